// Several runs: the list that a dashboard opens with, and runs side by side.

const OVERLAID = [
  ["Correct, validation", "evaluation/correct_fraction", "evaluation/correct_low_fraction", "evaluation/correct_high_fraction"],
  ["Reward, training", "reward/mean"], ["Correct, training", "reward/correct"], ["Sampler against trainer, KL", "mismatch/kl"],
  ["KL to the reference", "policy/kl"], ["Completion length, mean tokens", "completion/mean_tokens"], ["Gradient norm", "policy/gradient_norm"],
  ["Entropy", "policy/entropy"], ["Groups without signal", "group/zero_signal_fraction"], ["Tokens per second, whole step", "speed/tokens_per_second"],
];

const age = (seconds) => (seconds < 90 ? "now" : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`);

const LISTED = [
  ["name", "run", (run) => run.name], ["state", "state", (run) => run.state.name], ["steps", "steps", (run) => run.steps_done],
  ["tested", "test", (run) => run.tested ?? run.test_reward], ["reward", "reward", (run) => run.reward],
  ["doctor", "doctor", (run) => 1000 * (run.severe || 0) + (run.warnings || 0)], ["written", "written", (run) => -run.state.age_seconds],
];

/** One row of the list; `chosen` are the names of the runs to compare, and `renew` is told when they change. */
function runRow(run, chosen, renew) {
  const box = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name), disabled: Boolean(run.problem), onchange: () => { chosen[box.checked ? "add" : "delete"](run.name); renew(); } });
  const about = run.problem || [run.model, run.state.reason].filter(Boolean).join(" · ");
  return el("tr", {},
    el("td", {}, el("label", { class: "choose" }, box)),
    el("td", {}, el("a", { class: "name", href: run.href }, run.name), el("div", { class: "small soft" }, about)),
    el("td", {}, statePill(run.state)),
    el("td", { class: "num" }, run.problem ? "–" : `${number(run.steps_done)}${run.steps_planned ? ` of ${number(run.steps_planned)}` : ""}`),
    el("td", { class: "num" }, isNumber(run.test_reward) ? `reward ${number(run.test_reward)}` : percent(run.tested)),
    el("td", { class: "num curve" }, sparkline(run.curve || [], 0), el("span", { class: "last" }, isNumber(run.loss) ? `loss ${number(run.loss)}` : number(run.reward))),
    el("td", {}, run.severe ? el("span", { class: "pill bad" }, `${run.severe} severe`) : null, " ", run.warnings ? el("span", { class: "pill warn" }, count(run.warnings, "warning")) : null),
    el("td", { class: "num" }, isNumber(run.state.age_seconds) ? age(run.state.age_seconds) : "–"));
}

/** The line above the runs of one recipe: what their names begin with, and the mean of their tests. */
function recipeRow(group, chosen, change) {
  const names = group.map((run) => run.name).sort(), last = names[names.length - 1];
  let shared = names[0];
  while (!last.startsWith(shared)) shared = shared.slice(0, -1);
  const mean = (key) => { const found = group.map((run) => run[key]).filter(isNumber); return found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : null; };
  const name = shared.replace(/[-_. ]+(seed)?[-_. ]*$/, "") || names[0];
  const box = el("input", { type: "checkbox", "aria-label": `compare all of ${name}`, checked: names.every((one) => chosen.has(one)), onchange: () => { names.forEach((one) => chosen[box.checked ? "add" : "delete"](one)); change(); } });
  return el("tr", { class: "recipe" }, el("td", {}, el("label", { class: "choose" }, box)), el("th", { scope: "rowgroup", colspan: 3 }, name, el("span", { class: "soft" }, ` · ${count(group.length, "run")}`)),
    el("td", { class: "num" }, isNumber(mean("test_reward")) ? `mean reward ${number(mean("test_reward"))}` : isNumber(mean("tested")) ? `mean ${percent(mean("tested"))}` : "–"), el("td", { colspan: 3 }));
}

/** The runs that a dashboard knows, renewed every few seconds: searched, filtered and sorted as the address says. */
function showRuns(root, boot) {
  const body = el("tbody"), pill = el("span", { class: "pill" }, "reading runs …"), compare = el("div", { class: "compare", hidden: true }), none = el("p", { class: "soft" });
  const chosen = new Set();
  let runs = [];
  const asked = (name) => place.read().get(name) || "";
  const search = el("input", { type: "search", placeholder: "search", "aria-label": "search", value: asked("search"), oninput: () => { place.write({ search: search.value }); show(); } });
  const states = choice("state", [["", "all states"], ["running", "running"], ["finished", "finished"], ["stopped", "stopped"], ["died", "died"]], asked("state"), (value) => { place.write({ state: value }); show(); });
  const groups = choice("group", [["", "each run"], ["recipe", "by recipe"]], asked("group"), (value) => { place.write({ group: value }); show(); });
  const heads = LISTED.map(([key, text]) => el("th", { scope: "col", class: ["steps", "tested", "reward", "written"].includes(key) ? "num" : "" }, el("button", { class: "sort", type: "button", onclick: () => { place.write({ sort: asked("sort") === key ? `-${key}` : key }); show(); } }, text)));
  fill(root, el("header", { class: "top" }, el("div", { class: "grow" }, el("h1", {}, "Runs")), search, states, groups, pill, themeButton()),
    el("div", { class: "card wide runs" }, el("table", {}, el("thead", {}, el("tr", {}, el("th"), heads)), body)), none, compare);
  const offer = () => {
    compare.hidden = chosen.size === 0;
    const names = [...chosen], query = new URLSearchParams(names.map((name) => ["run", name]));
    fill(compare, el("span", {}, names.join(", ")), el("span", { class: "grow" }),
      chosen.size < 2 ? el("span", { class: "soft" }, "choose another run to compare with") : el("a", { class: "button", href: `/compare?${query}` }, `Compare ${chosen.size} runs`),
      el("button", { class: "plain", type: "button", onclick: () => { chosen.clear(); show(); } }, "clear"));
  };
  function show() {
    const words = asked("search").toLowerCase().split(" "), sort = asked("sort"), key = sort.replace("-", "");
    const shown = runs.filter((run) => (!asked("state") || run.state.name === asked("state")) && words.every((word) => [run.name, run.model, run.state.reason].join(" ").toLowerCase().includes(word)));
    const column = LISTED.find(([name]) => name === key);
    if (column) {
      const value = column[2], missing = (one) => one === null || one === undefined;
      shown.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        const order = typeof x === "string" ? x.localeCompare(y) : y - x; // words from a to z, numbers from the largest
        return sort.startsWith("-") ? -order : order;
      });
    }
    heads.forEach((head, at) => head.setAttribute("aria-sort", LISTED[at][0] !== key ? "none" : sort.startsWith("-") === at < 2 ? "descending" : "ascending"));
    const recipes = new Map(); // in the order of their first run
    for (const run of shown) {
      const of = asked("group") === "recipe" ? run.recipe || run.name : "";
      recipes.set(of, [...(recipes.get(of) || []), run]);
    }
    fill(body, [...recipes].map(([recipe, group]) => [recipe && group.length > 1 ? recipeRow(group, chosen, show) : null, group.map((run) => runRow(run, chosen, offer))]));
    fill(none, shown.length ? null : runs.length ? "No run fits the search." : "No run is here yet; one appears when it has finished its first measurement.");
    offer();
  }
  const renew = async () => {
    try {
      const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
      ({ runs } = await (await fetch("/runs")).json());
      for (const name of [...chosen]) if (!runs.some((run) => run.name === name)) chosen.delete(name);
      show();
      const again = focused && [...body.querySelectorAll("input")].find((one) => one.getAttribute("aria-label") === focused);
      if (again) again.focus();
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
  const isMeasured = (table, key) => table.has(key) && (!key.startsWith("evaluation/") || table.columns[key].filter(isNumber).length > 1);
  const charts = OVERLAID.filter(([, key]) => tables.some((table) => isMeasured(table, key))).map(([title, key, low, high]) => ({ chart: new Chart({ title, height: 200 }), key, low, high }));
  const draw = () => charts.forEach(({ chart, key, low, high }) => {
    chart.xname = away.x;
    if (boot.recipes) chart.show(boot.recipes.groups.map((group, at) => ({ name: group.name, key, colour: at % 6, isBand: true, ...overSeeds(group.runs.map((place) => tables[place]), key, away.x) })), null);
    else chart.show(tables.map((table, at) => {
      return { ...table.curve(key, away.x), name: boot.runs[at].name, colour: at % 6, low: low && table.curve(low).values, high: high && table.curve(high).values };
    }), null);
  });
  charts.forEach(({ chart }, at) => chart.node.classList.add(at < 4 ? "half" : "third"));
  fill(root,
    el("header", { class: "top" }, boot.home ? el("a", { class: "brand", href: boot.home }, "← runs") : null, el("div", { class: "grow" }, el("h1", {}, boot.runs.length > MOST_COLUMNS ? count(boot.runs.length, "run") : boot.runs.map((run) => run.name).join(" · "))), themeButton()),
    boot.recipes ? el("section", { id: "by-recipe" }, el("div", { class: "head" }, el("h2", {}, "By recipe, over seeds")), recipesTable(boot.recipes)) : null,
    el("section", { id: "table" }, el("div", { class: "head" }, el("h2", {}, "Results")), comparisonTable(boot)),
    el("section", { id: "curves" }, el("div", { class: "head" }, el("h2", {}, "Curves"), thinning(tables[0], boot.recipes ? "" : undefined), el("span", { class: "grow" }),
      el("label", {}, "along", choice("horizontal axis", [["step", "steps"], ["hours", "hours"], ["M tokens", "sampled tokens, millions"]], "step", (value) => { away.x = value; draw(); })),
      el("label", {}, "smoothing", choice("smoothing", [["0", "auto"], ["1", "none"], ["15", "15 steps"], ["51", "51 steps"]], "0", (value) => { drawing.smooth = Number(value); draw(); }))),
    el("div", { class: "grid" }, charts.map(({ chart }) => chart.node)),
    boot.recipes ? el("p", { class: "soft small" }, "A curve is the mean over those seeds of a recipe that have the step; its band goes from the lowest to the highest of them.") : null),
    el("section", { id: "recipes" }, el("div", { class: "head" }, el("h2", {}, "Differences of the recipes")), differencesTable(boot)),
    el("p", { class: "soft small" }, `Made ${boot.made} by oncurve ${boot.version}.`));
  draw();
}

/** The mean of a metric over runs, step by step, with its lowest and highest value. */
function overSeeds(tables, key, kind) {
  const found = new Map();
  for (const table of tables) {
    const { xs, values } = table.curve(key, kind);
    values.forEach((value, at) => {
      if (!isNumber(value) || !isNumber(xs[at])) return;
      const block = Math.ceil(table.steps[at] / table.size);
      if (!found.has(block)) found.set(block, []);
      found.get(block).push([xs[at], value]);
    });
  }
  const points = [...found].sort(([a], [b]) => a - b).map(([, both]) => both);
  const mean = (place) => points.map((both) => both.reduce((sum, pair) => sum + pair[place], 0) / both.length);
  const ends = (most) => points.map((both) => most(...both.map((pair) => pair[1])));
  return { xs: mean(0), values: mean(1), low: ends(Math.min), high: ends(Math.max) };
}

function recipesTable(recipes) {
  return el("div", { class: "card wide" }, stacked(el("table", {},
    el("thead", {}, el("tr", {}, recipes.heads.map((head, at) => el("th", { class: at ? "num turned" : "" }, head)))),
    el("tbody", {}, recipes.rows.map((row) => el("tr", {}, row.map((value, at) => el("td", { class: at ? "num turned" : "" }, value))))))),
    recipes.sentences.map((sentence) => el("p", {}, sentence)));
}

const MOST_COLUMNS = 6; // more runs than this stand below each other

/** Lines of {name, cells}, one cell for each run: the runs across, or below each other where they are many. */
function runsTable(boot, lines, first, mono) {
  const isTurned = boot.runs.length > MOST_COLUMNS;
  const shown = (cell) => el("td", { class: `num${mono}${isTurned ? " turned" : ""}` }, cell.text, cell.more ? [" ", el("span", { class: "interval" }, cell.more)] : null);
  const heads = isTurned ? lines : boot.runs;
  return stacked(el("table", { class: boot.runs.length > 3 && !isTurned ? "narrow" : "" },
    el("thead", {}, el("tr", {}, el("th", {}, isTurned ? "run" : first), heads.map((head) => el("th", { class: isTurned ? "num turned" : "num" }, head.name)))),
    el("tbody", {}, isTurned
      ? boot.runs.map((run, at) => el("tr", {}, el("td", {}, run.name), lines.map((line) => shown(line.cells[at]))))
      : lines.map((line) => el("tr", {}, el("td", { class: mono }, line.name), line.cells.map(shown))))));
}

function comparisonTable(boot) {
  const isLong = boot.runs.length > MOST_COLUMNS;
  const short = boot.rows.filter((row) => row.is_short), notes = boot.notes.map((note) => el("p", { class: "soft small" }, note));
  if (!isLong) return el("div", { class: "card wide" }, runsTable(boot, boot.rows, "", ""), notes);
  return [el("div", { class: "card wide" }, runsTable(boot, short, "", ""), notes),
    el("details", {}, el("summary", {}, "Every number"), el("div", { class: "card wide" }, runsTable(boot, boot.rows.filter((row) => !row.is_short), "", "")))];
}

function differencesTable(boot) {
  if (!boot.differences.length) return el("div", { class: "card" }, el("p", {}, "The recipes are the same."));
  if (boot.runs.length > MOST_COLUMNS) return el("div", { class: "card" }, pairsTable(boot.runs.slice(1).map((run, at) => [run.name,
    boot.differences.filter(({ values }) => values[at + 1] !== values[0]).map(({ key, values }) => `${key} ${values[at + 1]}`).join(" · ") || "nothing"]), "facts"),
    el("p", { class: "soft small" }, `What differs from ${boot.runs[0].name}.`));
  const lines = boot.differences.map((row) => ({ name: row.key, cells: row.values.map((text) => ({ text })) }));
  return el("div", { class: "card wide" }, runsTable(boot, lines, "key", " mono"));
}
