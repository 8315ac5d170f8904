// Several runs: the list that a dashboard opens with, and runs side by side.

const OVERLAID = [
  ["Correct, held-out", "evaluation/correct_fraction", "evaluation/correct_low_fraction", "evaluation/correct_high_fraction"],
  ["Reward, training", "reward/mean"], ["Correct, training", "reward/correct"], ["Sampler against trainer, KL", "mismatch/kl"],
  ["KL to the reference", "policy/kl"], ["Completion length, mean tokens", "completion/mean_tokens"], ["Gradient norm", "policy/gradient_norm"],
  ["Entropy", "policy/entropy"], ["Groups without signal", "group/zero_signal_fraction"], ["Tokens per second, whole step", "speed/tokens_per_second"],
];

const age = (seconds) => (seconds < 90 ? "now" : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`);

/** `chosen` are the names of the runs to compare; `renew` is told when they change. */
function runCard(run, chosen, renew) {
  const box = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name), disabled: Boolean(run.problem), onchange: () => { chosen[box.checked ? "add" : "delete"](run.name); renew(); } });
  const done = run.steps_done, total = run.steps_planned;
  const bar = el("div", { class: "progress" }, el("div"));
  bar.firstChild.style.width = `${total ? Math.min(100, (100 * done) / total) : 0}%`;
  return el("div", { class: "card run-card" },
    el("label", { class: "choose" }, box),
    el("div", {}, el("a", { class: "name", href: run.href }, run.name), el("div", { class: "small soft" }, run.problem || `step ${number(done)}${total ? ` of ${number(total)}` : ""}`), run.problem ? null : bar,
      run.model ? el("div", { class: "small soft" }, [run.model, run.state && isNumber(run.state.age_seconds) ? age(run.state.age_seconds) : null].filter(Boolean).join(" · ")) : null,
      run.findings && run.findings[0] + run.findings[1] ? el("div", { class: "small" }, "doctor ", run.findings[0] ? el("span", { class: "pill bad" }, `${run.findings[0]} severe`) : null, " ", run.findings[1] ? el("span", { class: "pill warn" }, count(run.findings[1], "warning")) : null) : null,
      run.state && run.state.reason ? el("div", { class: "small soft why" }, run.state.reason) : null),
    isNumber(run.held_out) ? el("div", {}, el("div", { class: "small soft" }, "held-out"), percent(run.held_out)) : el("div"),
    isNumber(run.reward) ? el("div", {}, el("div", { class: "small soft" }, "reward"), number(run.reward)) : el("div"),
    el("div", {}, run.state ? statePill(run.state) : null, sparkline(run.rewards || [], 0)));
}

/** The runs that a dashboard knows, renewed every few seconds. */
function showRuns(root, boot) {
  const list = el("div", { class: "run-list" }), pill = el("span", { class: "pill" }, "…"), compare = el("div", { class: "compare" });
  const chosen = new Set();
  fill(root, el("header", { class: "top" }, el("div", { class: "grow" }, el("h1", {}, "Runs")), pill, themeButton()), list, compare);
  const offer = () => {
    compare.hidden = chosen.size === 0;
    const names = [...chosen], query = new URLSearchParams(names.map((name) => ["run", name]));
    fill(compare, el("span", {}, names.join(", ")), el("span", { class: "grow" }),
      chosen.size < 2 ? el("span", { class: "soft" }, "choose another run to compare with") : el("a", { class: "button", href: `/compare?${query}` }, `Compare ${chosen.size} runs`),
      el("button", { class: "plain", type: "button", onclick: () => { chosen.clear(); renew(); } }, "clear"));
  };
  const renew = async () => {
    try {
      const answer = await fetch("/runs");
      const { runs } = await answer.json();
      for (const name of [...chosen]) if (!runs.some((run) => run.name === name)) chosen.delete(name);
      const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
      fill(list, runs.length ? runs.map((run) => runCard(run, chosen, offer)) : el("p", { class: "soft" }, "No run is here yet; one appears when it has finished its first measurement."));
      const again = focused && [...list.querySelectorAll("input")].find((one) => one.getAttribute("aria-label") === focused);
      if (again) again.focus();
      offer();
      pill.className = "pill good live";
      fill(pill, count(runs.length, "run"));
    } catch (error) {
      pill.className = "pill warn";
      fill(pill, "server is away");
    }
  };
  setInterval(renew, boot.every_seconds * 1000);
  return renew();
}

/** Runs side by side. */
function showComparison(root, boot, tables) {
  const away = { x: "step" };
  const charts = OVERLAID.filter(([, key]) => tables.some((table) => table.has(key))).map(([title, key, low, high]) => ({ chart: new Chart({ title, height: 200 }), key, low, high }));
  const draw = () => charts.forEach(({ chart, key, low, high }) => {
    chart.xname = away.x;
    chart.show(tables.map((table, at) => {
      const column = (name) => table.columns[name] || table.steps.map(() => null);
      return { name: boot.runs[at].name, key, xs: along(table, away.x), values: column(key), colour: at % 6, low: low && column(low), high: high && column(high) };
    }), null);
  });
  charts.forEach(({ chart }, at) => chart.node.classList.add(at < 4 ? "half" : "third"));
  fill(root,
    el("header", { class: "top" }, boot.home ? el("a", { class: "brand", href: boot.home }, "← runs") : null, el("div", { class: "grow" }, el("h1", {}, boot.runs.map((run) => run.name).join(" · "))), themeButton()),
    el("section", { id: "table" }, el("div", { class: "head" }, el("h2", {}, "Results")), comparisonTable(boot)),
    el("section", { id: "curves" }, el("div", { class: "head" }, el("h2", {}, "Curves"), el("span", { class: "grow" }),
      el("label", {}, "along", choice("horizontal axis", [["step", "steps"], ["hours", "hours"], ["M tokens", "sampled tokens, millions"]], "step", (value) => { away.x = value; draw(); })),
      el("label", {}, "smoothing", choice("smoothing", [["0", "auto"], ["1", "none"], ["15", "15 steps"], ["51", "51 steps"]], "0", (value) => { drawing.smooth = Number(value); draw(); }))),
    el("div", { class: "grid" }, charts.map(({ chart }) => chart.node))),
    el("section", { id: "recipes" }, el("div", { class: "head" }, el("h2", {}, "Differences of the recipes")), differencesTable(boot)),
    el("p", { class: "soft small" }, `Made ${boot.made} by oncurve ${boot.version}.`));
  draw();
}

/** A run's steps as steps, as hours spent in steps and evaluations, or as millions of sampled tokens. */
function along(table, kind) {
  if (kind === "step") return table.steps;
  const keys = kind === "hours" ? ["time/step_seconds", "time/evaluate_seconds"] : ["tokens/sampled"];
  const unit = kind === "hours" ? 3600 : 1e6;
  let sum = 0;
  return table.steps.map((_, at) => {
    for (const key of keys) sum += (table.columns[key] && table.columns[key][at]) || 0;
    return sum / unit;
  });
}

function comparisonTable(boot) {
  return el("div", { class: "card wide" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}), boot.runs.map((run) => el("th", { class: "num" }, run.name)))),
    el("tbody", {}, boot.rows.map((row) => el("tr", {}, el("td", {}, row.name), row.cells.map((cell) => el("td", { class: "num" }, cell.text, cell.more ? [" ", el("span", { class: "interval" }, cell.more)] : null)))))),
    boot.notes.map((note) => el("p", { class: "soft small" }, note)));
}

function differencesTable(boot) {
  if (!boot.differences.length) return el("div", { class: "card" }, el("p", {}, "The recipes are the same."));
  return el("div", { class: "card wide" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "key"), boot.runs.map((run) => el("th", { class: "num" }, run.name)))),
    el("tbody", {}, boot.differences.map((row) => el("tr", {}, el("td", { class: "mono" }, row.key), row.values.map((value) => el("td", { class: "num mono" }, value)))))));
}
