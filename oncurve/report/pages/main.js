// The page begins here.

async function showRun(root, boot) {
  const told = boot.overview, live = boot.live;
  const table = new Table(await blockOf("metrics"));
  const pill = el("span", { class: "pill", role: "status" }), note = el("div");
  const source = new FileSource(boot);
  const explorer = new Explorer(source);
  const curves = new Curves(boot, table, (step) => {
    if (!source.steps.length) return;
    explorer.go(explorer.nearest(step));
    explorer.node.scrollIntoView({ block: "start" });
  });
  const parts = [["curves", "Curves"], ["doctor", "Doctor"], ["evaluation", "Evaluation"], ["completions", "Completions"], ["costs", "Batch, time, cost"], ["recipe", "Recipe"]];
  const bar = el("nav", { class: "bar", "aria-label": "parts of the page" },
    live && live.home ? el("a", { class: "brand", href: live.home }, "← runs") : null,
    parts.map(([id, text]) => el("a", { href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } }, text)),
    el("span", { class: "grow" }), live ? pill : null, themeButton());
  const missing = boot.left_out.length ? el("p", { class: "notice" }, `Left out, to keep this page small: ${boot.left_out.join("; ")}. The run folder has everything.`) : null;
  fill(root, el("div", {}, header(told, table)), bar,
    el("main", { id: "main" }, note, missing, el("div", {}, tiles(told, table)), curves.node, findings(told), evaluationSection(told), explorer.node, arithmeticSection(told), recipeSection(told, boot)));
  explorer.begin();
  if (live) keepCurrent(live, pill, note);
  const before = sessionStorage.getItem("oncurve-scroll");
  if (before !== null) window.scrollTo(0, Number(before));
  else if (place.read().has("step")) explorer.node.scrollIntoView();
  sessionStorage.removeItem("oncurve-scroll");
}

/** Load the page again when the run's folder has changed; what is looked at stays in the address. */
function keepCurrent(live, pill, note) {
  setInterval(async () => {
    try {
      const answer = await fetch(`${location.pathname}?stamp`), text = await answer.text();
      pill.className = "pill good live";
      fill(pill, "live");
      fill(note, answer.ok ? null : el("p", { class: "notice" }, text));
      if (!answer.ok || text === live.stamp || document.activeElement.matches("input, select")) return;
      sessionStorage.setItem("oncurve-scroll", String(window.scrollY));
      location.reload();
    } catch (error) {
      pill.className = "pill warn";
      fill(pill, "connection lost, trying again");
    }
  }, live.every_seconds * 1000);
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
