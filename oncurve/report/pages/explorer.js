// The completions of a step: groups as a list, the chosen group's completions side by side.

const ROWS_AT_ONCE = 300;
const MAX_COLOURED_TOKENS = 4000;
const WIDEST = 0; // in the place of a group: the one whose rewards differ most
const FILTERS = [
  ["all", "all groups"], ["mixed", "with a signal"], ["silent", "without a signal"], ["solved", "all correct"], ["unsolved", "none correct"],
  ["errors", "with grader errors"], ["cut", "with cut-off completions"],
];
const KEEP = {
  all: () => true,
  mixed: (group) => group.spread > 1e-6,
  silent: (group) => !(group.spread > 1e-6),
  solved: (group) => group.correct === group.completions.length,
  unsolved: (group) => group.correct === 0,
  errors: (group) => group.errors > 0,
  cut: (group) => group.cut > 0,
  calls: (group) => group.calls > 0,
  failed: (group) => group.failed > 0,
};
/** Offered where completions are episodes. */
const EPISODE_FILTERS = [["calls", "with calls of tools"], ["failed", "with failed calls"]];
const COLUMNS = [
  ["place", "#", (group) => group.place], ["prompt", "prompt", (group) => group.prompt],
  ["reward", "reward", (group) => group.reward], ["spread", "spread", (group) => group.spread], ["tokens", "tokens", (group) => group.tokens],
];

/** Whether a completion is right: what its grader said, or nothing. */
function isRight(completion) {
  if (completion.parts && isNumber(completion.parts.correct)) return completion.parts.correct >= 1;
  if (completion.category) return completion.category === "correct";
  return null;
}

/** What the list shows of a group, worked out once. */
function weigh(group, at) {
  const rewards = group.completions.map((completion) => completion.reward).filter(isNumber);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const spread = rewards.length > 1 ? Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length - 1)) : 0;
  const lengths = group.completions.map((completion) => completion.tokens).filter(isNumber);
  const verdicts = group.completions.map(isRight);
  return {
    ...group, place: at + 1, reward: mean, spread,
    tokens: lengths.length ? lengths.reduce((a, b) => a + b, 0) / lengths.length : null,
    correct: verdicts.every((verdict) => verdict === null) ? null : verdicts.filter(Boolean).length,
    errors: group.completions.filter((completion) => completion.error || completion.category === "error").length,
    cut: group.completions.filter((completion) => CUT_OFF.has(completion.end)).length,
    calls: group.completions.reduce((sum, completion) => sum + (completion.calls || []).length, 0),
    failed: group.completions.reduce((sum, completion) => sum + errorsOf(completion), 0),
  };
}

const textOf = (group) => [group.prompt, group.answer, ...group.completions.map((completion) => completion.text)].join("\n").toLowerCase();

class Explorer {
  constructor(source) {
    this.source = source;
    this.sorted = "place";
    this.descending = false;
    this.shown = ROWS_AT_ONCE;
    this.order = "order";
    this.colour = memory.get("colour") || "none";
    this.query = "";
    this.filter = "all";
    this.build();
    this.listen();
  }

  build() {
    this.picker = el("select", { "aria-label": "step", onchange: () => this.go(this.picker.value) });
    this.back = el("button", { type: "button", "aria-label": "previous step", onclick: () => this.walk(-1) }, "‹");
    this.on = el("button", { type: "button", "aria-label": "next step", onclick: () => this.walk(1) }, "›");
    this.scrub = el("input", { type: "range", min: 0, "aria-label": "step, as a slider", oninput: () => this.go(this.source.steps[Number(this.scrub.value)]) });
    this.search = el("input", { type: "search", placeholder: "Search prompts and completions", "aria-label": "search", oninput: () => { this.query = this.search.value.toLowerCase(); this.list(); this.detail(); } });
    this.everywhere = el("button", { type: "button", onclick: () => this.searchAll() }, "in all steps");
    this.filterBox = choice("filter", FILTERS, this.filter, (value) => { this.filter = value; this.shown = ROWS_AT_ONCE; this.list(); });
    this.hits = el("div", { class: "hits", "aria-live": "polite" });
    this.listBox = el("div", { class: "card list" });
    this.detailBox = el("div", { class: "card detail" });
    this.about = el("span", { class: "soft small" });
    this.node = el("section", { id: "completions" },
      el("div", { class: "head" }, el("h2", {}, "Completions"), this.about, el("span", { class: "grow" }), el("span", { class: "soft small keys" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " group  ", el("kbd", {}, "["), " ", el("kbd", {}, "]"), " step  ", el("kbd", {}, "/"), " search  ", el("kbd", {}, "c"), " colour")),
      el("div", { class: "controls" }, el("label", {}, "step", this.back, this.picker, this.on), this.scrub, this.search, this.everywhere, this.filterBox),
      this.hits,
      (this.body = el("div", { class: "explorer" }, this.listBox, this.detailBox)));
    this.listBox.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
      this.next(event.key === "ArrowDown" ? 1 : -1);
      event.preventDefault();
    });
  }

  listen() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const act = { j: () => this.next(1), k: () => this.next(-1), "]": () => this.walk(1), "[": () => this.walk(-1), c: () => this.recolour(), "/": () => this.search.focus() }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    window.addEventListener("hashchange", () => this.follow());
  }

  /** Offer the steps that can be chosen, and go where the address says. */
  begin() {
    const { steps, num_examples: examples } = this.source;
    fill(this.picker, examples ? el("option", { value: "examples" }, "test examples") : null, steps.map((step) => el("option", { value: step }, step)));
    this.scrub.max = Math.max(0, steps.length - 1);
    this.scrub.hidden = steps.length < 3;
    this.node.hidden = !steps.length && !examples;
    if (!this.node.hidden) this.follow();
  }

  /** Go where the address says; to the last step if it says nothing. */
  follow() {
    const asked = place.read(), steps = this.source.steps;
    const last = steps.length ? steps[steps.length - 1] : "examples";
    const wanted = asked.get("step");
    const step = wanted === "examples" && this.source.num_examples ? "examples" : wanted !== null && steps.length ? this.nearest(Number(wanted)) : last;
    this.go(step, Number(asked.get("group")) || WIDEST, false);
  }

  nearest(step) {
    return this.source.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), this.source.steps[0]);
  }

  async go(step, group = null, writes = true) {
    step = step === "examples" ? step : Number(step);
    const wanted = group === null ? this.group || 1 : group;
    if (step === this.step && this.groups) {
      if (wanted !== WIDEST && wanted !== this.group) this.choose(wanted, writes);
      return;
    }
    this.step = step;
    this.group = wanted;
    this.picker.value = step;
    this.turn();
    this.body.setAttribute("aria-busy", "true");
    try {
      const [groups, tokens] = await Promise.all([this.source.groups(step), this.source.tokens(step)]);
      if (step !== this.step) return; // somebody went on meanwhile
      this.groups = groups.map(weigh);
      this.offer();
      this.tokens = tokens;
      this.shown = ROWS_AT_ONCE;
      if (wanted === WIDEST) this.group = this.groups.reduce((widest, one) => (one.spread > widest.spread ? one : widest), this.groups[0] || { place: 1 }).place;
      else if (wanted > this.groups.length) this.group = 1;
      this.list();
      this.detail();
      if (writes) this.write();
    } catch (error) {
      fill(this.listBox, el("p", { class: "foot" }, `The completions of this step cannot be shown: ${error.message}`));
      fill(this.detailBox);
    } finally {
      this.body.removeAttribute("aria-busy");
    }
  }

  /** More filters, where there are episodes to filter. */
  offer() {
    if (this.offered || !this.groups.some((group) => group.completions.some(isEpisode))) return;
    this.offered = true;
    for (const [key, text] of EPISODE_FILTERS) this.filterBox.append(el("option", { value: key }, text));
  }

  turn() {
    const at = this.source.steps.indexOf(this.step);
    this.scrub.value = Math.max(0, at);
    this.back.disabled = at <= 0;
    this.on.disabled = at < 0 ? !this.source.steps.length : at === this.source.steps.length - 1;
  }

  walk(by) {
    const { steps } = this.source, at = steps.indexOf(this.step);
    const to = at < 0 ? 0 : at + by;
    if (to >= 0 && to < steps.length) this.go(steps[to]);
  }

  write() {
    place.write({ step: this.step, group: this.group });
  }

  visible() {
    const found = (this.groups || []).filter((group) => KEEP[this.filter](group) && (!this.query || textOf(group).includes(this.query)));
    const value = COLUMNS.find(([name]) => name === this.sorted)[2];
    const sign = this.descending ? -1 : 1;
    return found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return a.place - b.place;
      if (x === null) return 1;
      if (y === null) return -1;
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  }

  next(by) {
    const order = this.visible(), at = order.findIndex((group) => group.place === this.group);
    const to = order[at < 0 ? 0 : at + by];
    if (!to) return;
    this.choose(to.place);
    const row = this.listBox.querySelector('tr[aria-selected="true"]');
    if (row) row.scrollIntoView({ block: "nearest" });
  }

  choose(group, writes = true) {
    this.group = group;
    for (const row of this.listBox.querySelectorAll("tbody tr")) row.setAttribute("aria-selected", String(Number(row.dataset.group) === group));
    this.detail();
    if (writes) this.write();
  }

  recolour() {
    const ways = ["none", "logprob", "advantage"];
    this.colour = ways[(ways.indexOf(this.colour) + 1) % ways.length];
    memory.set("colour", this.colour);
    this.detail();
  }

  list() {
    const order = this.visible();
    const isExamples = this.step === "examples";
    fill(this.about, isExamples ? count((this.groups || []).length, "test problem") : `step ${this.step}: ${count((this.groups || []).length, "group")}`);
    const head = el("tr", {}, COLUMNS.map(([name, text]) => el("th", { class: name === "prompt" || name === "place" ? "" : "num", scope: "col", "aria-sort": this.sorted === name ? (this.descending ? "descending" : "ascending") : null },
      el("button", { class: "sort", type: "button", "data-sort": name, onclick: () => this.sort(name) }, text))));
    const rows = order.slice(0, this.shown).map((group) => this.row(group));
    const table = el("table", {}, el("thead", {}, head), el("tbody", {}, rows));
    const rest = order.length - rows.length;
    const foot = el("div", { class: "foot" }, order.length === (this.groups || []).length ? count(order.length, "group") : `${number(order.length)} of ${count((this.groups || []).length, "group")}`,
      rest > 0 ? [" · ", el("button", { class: "plain", type: "button", onclick: () => { this.shown += ROWS_AT_ONCE; this.list(); } }, `show ${Math.min(rest, ROWS_AT_ONCE)} more`)] : null);
    fill(this.listBox, el("div", { class: "scroll" }, table), foot);
  }

  sort(name) {
    this.descending = this.sorted === name ? !this.descending : name !== "place" && name !== "prompt";
    this.sorted = name;
    this.list();
    this.listBox.querySelector(`[data-sort="${name}"]`).focus();
  }

  row(group) {
    const dots = el("span", { class: "dots", "aria-hidden": "true" }, group.completions.map((completion) => {
      const right = isRight(completion);
      const looks = completion.error ? "error" : right === true ? "right" : right === false ? (completion.reward > 0 ? "part" : "wrong") : completion.reward > 0 ? "right" : "wrong";
      return el("i", { class: looks });
    }));
    const flags = [group.failed ? el("span", { class: "pill warn" }, count(group.failed, "failed call")) : null, group.errors ? el("span", { class: "pill bad" }, count(group.errors, "error")) : null, group.cut ? el("span", { class: "pill warn" }, `${group.cut} cut off`) : null];
    const open = () => this.open(group.place);
    return el("tr", { "data-group": group.place, "aria-selected": String(group.place === this.group), tabindex: "0", onclick: open, onkeydown: (event) => { if (event.key === "Enter") open(); } },
      el("td", { class: "soft" }, group.place),
      el("td", {}, el("span", { class: "snippet" }, this.marked(lastLine(group.prompt))), dots, " ", flags),
      el("td", { class: "num" }, number(group.reward)), el("td", { class: "num" }, number(group.spread, 2)), el("td", { class: "num" }, isNumber(group.tokens) ? Math.round(group.tokens) : "–"));
  }

  open(group) {
    this.choose(group);
    if (window.matchMedia("(max-width: 1000px)").matches) this.detailBox.scrollIntoView({ block: "start" });
  }

  /** A text with what was searched for marked. */
  marked(text) {
    if (!this.query) return text;
    const pieces = [], low = text.toLowerCase();
    if (low.length !== text.length) return text; // letters that change their length have no common places
    let from = 0;
    for (let at = low.indexOf(this.query); at >= 0; at = low.indexOf(this.query, from)) {
      pieces.push(text.slice(from, at), el("mark", {}, text.slice(at, at + this.query.length)));
      from = at + this.query.length;
    }
    return [...pieces, text.slice(from)];
  }

  detail() {
    const group = (this.groups || []).find((one) => one.place === this.group);
    if (!group) {
      fill(this.detailBox, el("p", { class: "soft" }, "No group is chosen."));
      return;
    }
    const title = this.step === "examples" ? `Test problem ${group.place}` : `Step ${this.step}, group ${group.place}`;
    const colours = [["none", "no colours"], ["logprob", "log-probability"], ["advantage", "advantage"]];
    const orders = [["order", "as sampled"], ["reward", "by reward"], ["advantage", "by advantage"], ["tokens", "by length"]];
    fill(this.detailBox,
      el("div", { class: "controls" }, el("h3", {}, title), el("span", { class: "soft small" }, group.index === null ? "" : `data row ${group.index}`),
        choice("order of completions", orders, this.order, (value) => { this.order = value; this.detail(); }),
        choice("colours", colours, this.colour, (value) => { this.colour = value; memory.set("colour", value); this.detail(); }),
        el("button", { class: "plain", type: "button", onclick: (event) => copyLink(event.target) }, "copy link")),
      el("pre", { class: "prompt", tabindex: "0", "aria-label": "prompt" }, this.marked(group.prompt)),
      group.answer ? el("p", {}, el("span", { class: "soft" }, "reference answer "), el("span", { class: "mono" }, this.marked(group.answer))) : null,
      this.scale(group),
      el("div", { class: "completions" }, this.arranged(group).map((completion) => this.card(completion, group))));
  }

  arranged(group) {
    const numbered = group.completions.map((completion, at) => ({ ...completion, at }));
    if (this.order === "order") return numbered;
    const worth = (completion) => (isNumber(completion[this.order]) ? completion[this.order] : -Infinity);
    return numbered.sort((a, b) => worth(b) - worth(a) || a.at - b.at);
  }

  tokensOf(group, at) {
    const found = this.tokens && this.tokens[group.place - 1];
    return found ? found[at] : null;
  }

  scale(group) {
    if (this.colour === "advantage") return el("p", { class: "scale" }, "The text is tinted by its advantage: green is made likelier, red less likely.");
    if (this.colour !== "logprob") return null;
    if (!group.completions.some((_, at) => this.tokensOf(group, at))) {
      return el("p", { class: "scale" }, this.step === "examples" ? "Log-probabilities are not kept for test examples." : "No log-probabilities of this group are in the page: a run keeps those of the first prompts of a written step (run.logprobs_of_prompts), and a large report samples the steps.");
    }
    return el("p", { class: "scale" }, "probability of the token when it was sampled", ["≥ 0.9", "0.5", "0.2", "0.05", "less"].map((text, at) => el("span", { class: `p${at}` }, text)));
  }

  card(completion, group) {
    const right = isRight(completion);
    const error = completion.error || (completion.category === "error" ? "not gradable" : "");
    const pills = [
      error ? el("span", { class: "pill bad" }, error) : null,
      !error && right !== null ? el("span", { class: `pill ${right ? "good" : ""}` }, right ? "correct" : completion.category === "bad_format" ? "bad form" : "wrong") : null,
      endPill(completion.end),
    ];
    const parts = Object.entries(completion.parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
    const detail = [parts, completion.detail].filter(Boolean).join(" · ");
    return el("article", { class: "completion", "aria-label": `completion ${completion.label || completion.at + 1}` },
      el("div", { class: "about" },
        el("div", { class: "row" }, el("span", { class: "soft" }, completion.label || completion.at + 1), el("span", { class: "reward" }, isNumber(completion.reward) ? number(completion.reward) : "–"), this.advantage(completion), el("span", { class: "soft" }, `${number(completion.tokens)} tokens`), pills),
        episodeSummary(completion),
        detail ? el("div", { class: "detail" }, detail) : null),
      this.text(completion, group));
  }

  advantage(completion) {
    if (!isNumber(completion.advantage)) return null;
    const bar = el("i", { class: completion.advantage < 0 ? "minus" : "plus" });
    bar.style.width = `${Math.min(50, 25 * Math.abs(completion.advantage))}%`;
    return el("span", { class: "soft", title: "advantage" }, el("span", { class: "advantage", "aria-hidden": "true" }, bar), ` ${signed(completion.advantage, 2)}`);
  }

  text(completion, group) {
    const text = completion.text || "";
    const tokens = this.colour === "logprob" ? this.tokensOf(group, completion.at) : null;
    if (isEpisode(completion)) {
      const colourPart = tokens && colouredParts(text, tokens);
      return episodeBox(completion, (said, from, to) => (colourPart ? colourPart(from, to) : this.marked(said)), this.tint(completion));
    }
    const box = el("div", { class: "text mono", tabindex: "0", "aria-label": "text" });
    if (tokens) add(box, coloured(text, tokens));
    else if (!text) add(box, [el("span", { class: "soft" }, "(empty)")]);
    else add(box, [this.marked(text)]);
    const tint = this.tint(completion);
    if (tint) box.style.background = tint;
    return box;
  }

  /** The ground of what is learned from, where that is asked for. */
  tint(completion) {
    if (this.colour !== "advantage" || !isNumber(completion.advantage)) return null;
    const strength = Math.min(0.3, 0.12 * Math.abs(completion.advantage));
    return `rgba(var(--${completion.advantage < 0 ? "minus" : "plus"}), ${strength.toFixed(3)})`;
  }

  /** Every step once, one after the other, so that the page stays awake. */
  async searchAll() {
    const query = this.search.value.toLowerCase();
    if (!query) {
      this.search.focus();
      return;
    }
    this.everywhere.disabled = true;
    const found = [];
    for (const [done, step] of this.source.steps.entries()) {
      const groups = await this.source.groups(step);
      const places = groups.flatMap((group, at) => (textOf(group).includes(query) ? [at + 1] : []));
      if (places.length) found.push(el("a", { href: `#step=${step}&group=${places[0]}` }, `step ${step}: ${places.length}`));
      if (done % 10 === 0 || done === this.source.steps.length - 1) {
        const total = this.source.steps.length;
        fill(this.hits, el("span", { class: "soft" }, `“${this.search.value}”, groups by step${done + 1 < total ? ` (${done + 1} of ${total} steps read)` : ""}:`), found.length ? found.slice(0, 200) : " none");
        await new Promise((ready) => setTimeout(ready));
      }
    }
    if (found.length > 200) this.hits.append(el("span", { class: "soft" }, `and ${found.length - 200} more steps`));
    this.everywhere.disabled = false;
  }
}

/** A text in its tokens, each shaded by how unlikely it was. */
function coloured(text, [lengths, hundredths]) {
  const letters = Array.from(text), pieces = [];
  let from = 0;
  lengths.slice(0, MAX_COLOURED_TOKENS).forEach((length, at) => {
    if (!length) return;
    const probability = Math.exp(-hundredths[at] / 100);
    const level = probability >= 0.9 ? 0 : probability >= 0.5 ? 1 : probability >= 0.2 ? 2 : probability >= 0.05 ? 3 : 4;
    pieces.push(el("span", { class: `p${level}`, title: `p = ${number(probability, 2)}` }, letters.slice(from, from + length).join("")));
    from += length;
  });
  return [...pieces, letters.slice(from).join("")];
}

/** The same for an episode: a function that gives the letters of the tokens from-to. */
function colouredParts(text, [lengths, hundredths]) {
  const letters = Array.from(text), starts = [0];
  for (const length of lengths) starts.push(starts[starts.length - 1] + length);
  const last = starts[lengths.length];
  return (from, to) => {
    const low = starts[Math.min(from, lengths.length)], high = to >= lengths.length ? letters.length : starts[to];
    return low >= last ? letters.slice(low, high).join("") : coloured(letters.slice(low, high).join(""), [lengths.slice(from, to), hundredths.slice(from, to)]);
  };
}

/** The part of a prompt that differs from the others: its last lines, without what only opens the answer. */
function lastLine(prompt) {
  const lines = prompt.split("\n").map((line) => line.trim()).filter((line) => line.length > 24);
  const line = lines.length ? lines[lines.length - 1] : prompt;
  const asked = line.replace(/^.*?\bUser:\s*/, "").replace(/\s*Assistant:.*$/, "");
  return (asked || line).slice(0, 240);
}

async function copyLink(button) {
  try {
    await navigator.clipboard.writeText(location.href);
    fill(button, "copied");
  } catch (error) {
    fill(button, "see the address bar");
  }
  setTimeout(() => fill(button, "copy link"), 1600);
}
