// The page begins here.

async function showRun(root, boot) {
  let told = boot.overview;
  const table = new Table(boot.mode === "file" ? await blockOf("metrics") : null);
  const top = el("div"), figures = el("div"), doctor = el("div"), measured = el("div"), costs = el("div"), recipe = el("div");
  const link = el("span", { class: "pill", role: "status" }), note = el("div");
  const isLive = boot.mode === "live";
  const source = isLive ? new LiveSource(boot, hear) : new FileSource(boot);
  const explorer = new Explorer(source);
  const curves = new Curves(boot, table, (step) => {
    if (!source.steps.length) return;
    explorer.go(explorer.nearest(step));
    explorer.node.scrollIntoView({ block: "start" });
  });
  const parts = [["curves", "Curves"], ["doctor", "Doctor"], ["evaluation", "Evaluation"], ["completions", "Completions"], ["costs", "Batch, time, cost"], ["recipe", "Recipe"]];
  const bar = el("nav", { class: "bar", "aria-label": "parts of the page" },
    isLive && boot.home ? el("a", { class: "brand", href: boot.home }, "← runs") : null,
    parts.map(([id, text]) => el("a", { href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } }, text)),
    el("span", { class: "grow" }), isLive ? link : null, themeButton());
  fill(root, top, bar, el("main", { id: "main" }, note, figures, curves.node, doctor, measured, explorer.node, costs, recipe));

  function renew() {
    fill(top, header(told, table));
    fill(figures, tiles(told, table));
  }

  function renewAll() {
    renew();
    const opened = [...recipe.querySelectorAll("details")].map((one) => one.open);
    fill(doctor, findings(told));
    fill(measured, evaluationSection(told));
    fill(costs, arithmeticSection(told));
    fill(recipe, recipeSection(told, boot));
    recipe.querySelectorAll("details").forEach((one, at) => { one.open = Boolean(opened[at]); });
  }

  /** News from the server. */
  function hear(kind, what) {
    if (kind === "connected") {
      link.className = what ? "pill good live" : "pill warn";
      fill(link, what ? "live" : "connection lost, trying again");
    } else if (kind === "reset" || kind === "rows") {
      if (kind === "reset") {
        table.columns = { step: [] };
        source.forget();
        explorer.again();
      }
      for (const row of what.rows) table.put(row);
      Object.assign(boot.glossary, what.glossary);
      curves.draw();
      renew();
    } else if (kind === "steps") {
      source.steps = what.steps;
      source.num_examples = what.num_examples;
      explorer.refresh();
    } else if (kind === "problem") {
      fill(note, what.text ? el("p", { class: "notice" }, what.text) : null);
    } else if (kind === "overview") {
      told = what;
      renewAll();
    }
  }

  const missing = boot.left_out || [];
  if (missing.length) fill(note, el("p", { class: "notice" }, `Left out, to keep this file small: ${missing.join("; ")}. The run folder has everything.`));
  renewAll();
  explorer.refresh();
  const asked = place.read();
  if (asked.has("step")) explorer.node.scrollIntoView();
}

async function begin() {
  const boot = JSON.parse(document.getElementById("boot").textContent);
  const root = document.getElementById("page");
  if (boot.kind === "runs") await showRuns(root, boot);
  else if (boot.kind === "compare") showComparison(root, boot, await Promise.all(boot.runs.map(async (_, at) => new Table(await blockOf(`metrics-${at}`)))));
  else await showRun(root, boot);
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  fill(document.getElementById("page"), el("p", { class: "opening" }, `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
});
