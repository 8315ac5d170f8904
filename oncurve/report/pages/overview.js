// What stands around the curves: where the run is, what was measured, what the doctor found, what it took.

const STATES = { running: ["good live", "running"], finished: ["good", "finished"], stopped: ["", "stopped"], died: ["bad", "writer died"] };
const SEVERITIES = { severe: "bad", warning: "warn", note: "" };

function statePill(state) {
  const [looks, text] = STATES[state.name] || ["", state.name];
  const doing = state.name === "running" && state.phase ? ` · ${state.phase}` : "";
  return el("span", { class: `pill ${looks}`, "data-state": state.name }, text + doing);
}

const tile = (name, value, more) => el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), more ? el("div", { class: "more" }, more) : null);

function header(told, table) {
  const total = told.steps_planned;
  const done = Math.max(told.steps_done, table.steps.length ? table.steps[table.steps.length - 1] : 0);
  const title = el("div", { class: "grow" },
    el("h1", {}, told.name),
    el("p", { class: "underline" }, `step ${number(done)}${total ? ` of ${number(total)}` : ""}`, left(told, table, done)),
    told.state.reason ? el("p", { class: "underline why" }, told.state.reason) : null);
  const bar = el("div", { class: "progress", role: "progressbar", "aria-label": "steps done", "aria-valuenow": done, "aria-valuemin": 0, "aria-valuemax": total || done }, el("div"));
  bar.firstChild.style.width = `${total ? Math.min(100, (100 * done) / total) : 100}%`;
  return [el("header", { class: "top" }, title, statePill(told.state)), bar];
}

/** Time left at the pace so far, for a run that goes on. */
function left(told, table, done) {
  if (told.state.name !== "running" || !told.steps_planned || done < 1) return "";
  const seconds = (told.spent.elapsed_seconds / done) * (told.steps_planned - done);
  return seconds > 0 ? ` · about ${duration(seconds)} left` : "";
}

function tiles(told, table) {
  const spent = told.spent, compared = told.evaluation.compared;
  return el("div", { class: "tiles" },
    compared && compared.rows ? testTiles(compared) : heldOutTile(table),
    table.has("reward/mean") ? tile("Training reward", number(table.last("reward/mean")), `from ${number(table.first("reward/mean"))}`) : null,
    table.has("sft/loss") ? tile("Loss on demonstrations", number(table.last("sft/loss")), `from ${number(table.first("sft/loss"))}`) : null,
    table.has("episode/turns") ? tile("Turns per completion", number(table.last("episode/turns")), episodeFacts(table)) : null,
    spent.elapsed_seconds ? tile("Time", duration(spent.elapsed_seconds), spent.seconds_per_step ? `${duration(spent.seconds_per_step)} per step` : null) : null,
    spent.sampled_tokens ? tile("Tokens sampled", compact(spent.sampled_tokens), spent.trained_tokens ? `${compact(spent.trained_tokens)} trained` : null) : null,
    spent.usd === null ? null : tile("Cost so far", money(spent.usd), spent.basis));
}

/** Before and after on the test problems: the mean reward where it says more than what is correct, and that. */
function testTiles(compared) {
  const row = compared.rows.find((one) => one.name === "correct"), reward = compared.is_binary === false ? compared.reward : null;
  return [
    reward ? tile("Test reward", number(reward.after.value), `before ${number(reward.before.value)}, ${signed(reward.change, 3)} [${signed(reward.low, 3)}, ${signed(reward.high, 3)}]`) : null,
    row ? tile("Test problems solved", [percent(row.after.successes / row.after.total)],
      `before ${percent(row.before.successes / row.before.total)}, ${signed(100 * row.change, 1)} points [${signed(100 * row.low, 1)}, ${signed(100 * row.high, 1)}]`) : null,
  ];
}

/** The newest measurement of a run that goes on, once there is one besides that of the model before training. */
function heldOutTile(table) {
  const isShare = table.has("evaluation/correct_fraction"), key = isShare ? "evaluation/correct_fraction" : "evaluation/mean_reward";
  const [low, high] = isShare ? ["evaluation/correct_low_fraction", "evaluation/correct_high_fraction"] : [`${key}_low`, `${key}_high`];
  const form = isShare ? percent : number, count = (table.columns[key] || []).filter(isNumber).length;
  if (!count) return null;
  const says = count === 1 ? "before training" : `from ${form(table.first(key))}`;
  return tile(isShare ? "Validation accuracy" : "Validation reward", form(table.last(key)), `${says}; 95% interval ${form(table.last(low))} to ${form(table.last(high))}`);
}

/** "1.2 calls, 3% failed" */
function episodeFacts(table) {
  const calls = table.last("episode/calls"), failed = table.last("episode/tool_errors");
  return `${number(calls)} calls${calls && failed !== null ? `, ${percent(failed)} failed` : ""}`;
}

function findings(told) {
  const list = told.findings;
  const summary = ["severe", "warning", "note"].map((name) => [name, list.filter((one) => one.severity === name).length]).filter(([, many]) => many);
  return el("section", { id: "doctor" },
    el("div", { class: "head" }, el("h2", {}, "Doctor"), el("span", { class: "soft small" }, `${told.num_checks} checks`), summary.map(([name, many]) => el("span", { class: `pill ${SEVERITIES[name]}` }, `${many} ${name}`))),
    el("div", { class: "card" }, list.length ? list.map(finding) : el("p", {}, "Nothing to report. No finding is no proof of health.")));
}

function finding(one) {
  return el("div", { class: "finding" },
    el("div", {}, el("span", { class: `pill ${SEVERITIES[one.severity]}` }, one.severity)),
    el("div", {}, el("strong", {}, `${one.what}.`),
      el("p", {}, one.shown.map((text, at) => [at ? " · " : "", el("code", {}, text)])),
      one.follows ? el("p", { class: "soft small" }, `Probably follows from ${one.follows}.`) : null,
      el("p", { class: "do" }, one.do)));
}

const interval = (low, high, form) => el("span", { class: "interval" }, `[${form(low)}, ${form(high)}]`);
const points = (value) => signed(100 * value, 1);

function evaluationSection(told) {
  const { measured, compared } = told.evaluation;
  const cards = [];
  if (told.stages && told.stages.length) cards.push(stagesCard(told.stages));
  if (compared && compared.rows) cards.push(comparedCard(compared));
  if (measured.length) cards.push(measuredCard(measured));
  if (!cards.length) cards.push(el("div", { class: "card whole" }, el("p", { class: "soft" }, "No measurement is finished yet.")));
  return el("section", { id: "evaluation" }, el("div", { class: "head" }, el("h2", {}, "Evaluation")), el("div", { class: "grid" }, cards));
}

function comparedCard(compared) {
  const share = (one) => [percent(one.successes / one.total), " ", interval(one.low, one.high, (end) => (100 * end).toFixed(1))];
  return el("div", { class: "card whole" },
    el("h3", {}, `${compared.names.join(" and ")} on ${number(compared.num_prompts)} ${compared.problems}`),
    el("div", { class: "wide" }, stacked(el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}), ...compared.names.map((name) => el("th", { class: "num" }, name)), el("th", { class: "num" }, compared.is_binary === false ? "change" : "points"), el("th", { class: "num" }, "p"))),
      el("tbody", {}, compared.is_binary === false ? rewardRow(compared.reward) : null, compared.rows.map((row) => el("tr", {}, el("td", {}, row.name), el("td", { class: "num" }, share(row.before)), el("td", { class: "num" }, share(row.after)),
        el("td", { class: "num" }, points(row.change), " ", interval(row.low, row.high, points)),
        el("td", { class: "num" }, row.p_value < 1e-4 ? "<0.0001" : row.p_value.toFixed(4)))))))),
    el("p", { class: "soft small" }, "95% intervals; the difference and its p-value are paired: both answered the same problems."));
}

function rewardRow(row) {
  const mean = (one) => [number(one.value), " ", interval(one.low, one.high, number)], change = (value) => signed(value, 3);
  return el("tr", {}, el("td", {}, "mean reward"), el("td", { class: "num" }, mean(row.before)), el("td", { class: "num" }, mean(row.after)),
    el("td", { class: "num" }, change(row.change), " ", interval(row.low, row.high, change)), el("td", { class: "num" }, row.p_value < 1e-4 ? "<0.0001" : row.p_value.toFixed(4)));
}

/** The runs that the model came from, and this one. */
function stagesCard(stages) {
  const cell = (share) => (share ? [percent(share.fraction), " ", interval(share.low, share.high, (end) => (100 * end).toFixed(1))] : "–");
  const problems = new Set(stages.flatMap((stage) => [stage.before, stage.after]).filter(Boolean).map((share) => share.num_prompts));
  return el("div", { class: "card whole", id: "stages" }, el("h3", {}, "Stages of the model"), el("div", { class: "wide" }, stacked(el("table", {},
    el("thead", {}, el("tr", {}, ["run", "learns by", "steps", "correct before", "correct after"].map((name, at) => el("th", { class: at > 1 ? "num" : "" }, name)))),
    el("tbody", {}, stages.map((stage) => el("tr", {},
      el("td", {}, stage.href ? el("a", { href: stage.href }, stage.name) : el(stage.is_own ? "strong" : "span", {}, stage.name), stage.is_own ? el("span", { class: "interval" }, " this run") : null),
      el("td", {}, stage.what === "supervised" ? "demonstrations" : stage.what), el("td", { class: "num" }, number(stage.steps)), el("td", { class: "num" }, cell(stage.before)), el("td", { class: "num" }, cell(stage.after)))))))),
    el("p", { class: "soft small" }, `Each run starts from the model of the one above. Accuracy is on each run's own test problems${problems.size > 1 ? ", which differ in number" : ""}.`));
}

function measuredCard(measured) {
  const cell = (share) => (share ? [percent(share.fraction), " ", interval(share.low, share.high, (end) => (100 * end).toFixed(1))] : "–");
  const passes = [...new Set(measured.flatMap((one) => Object.keys(one.pass_at_k)))].filter((k) => k !== "1").sort((a, b) => a - b);
  const isGraded = measured.some((one) => one.mean_reward), isJudged = measured.some((one) => one.shares.correct);
  const mean = (one) => (one ? [number(one.value), " ", interval(one.low, one.high, number)] : "–");
  const kinds = [["wrong", "wrong"], ["bad_format", "bad form"], ["error", "not gradable"]].filter(([name]) => measured.some((one) => one.counts[name]));
  return el("div", { class: "card whole" }, el("h3", {}, "Measurements"), el("div", { class: "wide" }, stacked(el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "name"), ...["step", ...(isGraded ? ["mean reward"] : []), ...(isJudged ? ["correct", "in any form"] : []), ...passes.map((k) => `pass@${k}`), ...kinds.map(([, name]) => name), "examples"].map((name) => el("th", { class: "num" }, name)))),
    el("tbody", {}, measured.map((one) => el("tr", {},
      el("td", {}, one.name, isNumber(one.temperature) ? el("span", { class: "interval" }, one.temperature === 0 ? " greedy" : ` T ${one.temperature}`) : null),
      el("td", { class: "num" }, number(one.step)), isGraded ? el("td", { class: "num" }, mean(one.mean_reward)) : null,
      ...(isJudged ? [el("td", { class: "num" }, cell(one.shares.correct)), el("td", { class: "num" }, cell(one.shares.any_format))] : []),
      ...passes.map((k) => el("td", { class: "num" }, percent(one.pass_at_k[k]))),
      ...kinds.map(([name]) => el("td", { class: "num" }, number(one.counts[name]))),
      el("td", { class: "num" }, number(one.num_examples)))))))));
}

function arithmeticSection(told) {
  const spent = told.spent;
  return el("section", { id: "costs" },
    el("div", { class: "head" }, el("h2", {}, "Batch, time and cost")),
    el("div", { class: "grid" },
      el("div", { class: "card third" }, el("h3", {}, "Batch arithmetic"),
        told.arithmetic.length ? pairsTable(told.arithmetic, "pairs") : el("p", { class: "soft" }, "The folder has no config.yaml to derive it from.")),
      el("div", { class: "card third" }, el("h3", {}, "Time and tokens by phase"), phasesTable(spent)),
      el("div", { class: "card third" }, el("h3", {}, isNumber(spent.usd) ? "Cost so far" : "Device"), pairsTable([
        ["device", `${spent.devices > 1 ? `${spent.devices} x ` : ""}${spent.device}`],
        ["device hours", number(spent.hours * spent.devices)],
        ...(spent.mfu ? [["training", spent.mfu]] : []),
        ...(isNumber(spent.usd) ? [["cost", money(spent.usd)]] : []),
        ...(isNumber(spent.usd) && told.steps_done ? [["per step", money(spent.usd / told.steps_done)]] : []),
      ], "pairs"), el("p", { class: "soft small" }, `${spent.basis[0].toUpperCase()}${spent.basis.slice(1)}. Steps that a crash lost and the measurement after training are not in it.`))));
}

const pairsTable = (rows, kind) => el("table", { class: kind }, el("tbody", {}, rows.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)))));

function phasesTable(spent) {
  const whole = spent.phases.reduce((sum, phase) => sum + phase[1], 0);
  if (!whole) return el("p", { class: "soft" }, "No step is finished yet.");
  const bar = el("div", { class: "split", "aria-hidden": "true" }, spent.phases.map((phase, at) => {
    const part = el("div", { class: `k${at % 6}` });
    part.style.flexGrow = String(phase[1] / whole);
    return part;
  }));
  return [bar, el("table", {},
    el("thead", {}, el("tr", {}, ["phase", "time", "share", "completion tokens", "per second"].map((name, at) => el("th", { class: at ? "num" : "" }, name)))),
    el("tbody", {}, spent.phases.map(([name, seconds, tokens], at) => el("tr", {},
      el("td", {}, el("span", { class: "chart" }, el("span", { class: "legend" }, el("span", {}, el("span", { class: `swatch k${at % 6}` }), name)))),
      el("td", { class: "num" }, duration(seconds)), el("td", { class: "num" }, percent(seconds / whole, 0)),
      el("td", { class: "num" }, tokens === null ? "" : compact(tokens)), el("td", { class: "num" }, tokens === null ? "" : compact(tokens / seconds))))))];
}

function recipeSection(told, boot) {
  return el("section", { id: "recipe" },
    el("div", { class: "head" }, el("h2", {}, "Recipe and machine")),
    el("div", { class: "card" },
      pairsTable(told.facts, "facts"),
      told.recipe ? el("details", {}, el("summary", {}, "config.yaml: the recipe with every default"), el("pre", { class: "long" }, told.recipe)) : null,
      told.log.length ? el("details", {}, el("summary", {}, "The last lines of log.txt"), el("pre", { class: "long" }, told.log.join("\n"))) : null,
      el("p", { class: "soft small" }, boot.made ? `Made ${boot.made} by oncurve ${boot.version}.` : `oncurve ${boot.version}`)));
}
