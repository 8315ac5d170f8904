// A completion with tools or an environment, turn by turn: who wrote what, what was called, how long it waited.

const ENDS = {
  length: ["warn", "cut off"], abort: ["bad", "aborted"], done: ["", "ended by the environment"], turns: ["warn", "out of turns"],
  context: ["warn", "out of context"], seconds: ["warn", "out of time"], malformed: ["warn", "too many malformed calls"], failed: ["bad", "environment failed"],
};
/** Ends after which something was left to say. */
const CUT_OFF = new Set(["length", "abort", "turns", "context", "seconds", "failed"]);

const isEpisode = (completion) => Array.isArray(completion.segments);
const errorsOf = (completion) => (completion.calls || []).filter((call) => call.error).length;

function endPill(end) {
  const known = ENDS[end];
  return known ? el("span", { class: `pill ${known[0]}` }, known[1]) : null;
}

/** "3 turns · 2 calls · waited 0.4 s" */
function episodeSummary(completion) {
  if (!isEpisode(completion)) return null;
  const calls = completion.calls || [], errors = errorsOf(completion), rows = 1 + (completion.branches || []).length;
  const facts = [count(completion.turns, "turn"), rows > 1 ? count(rows, "row") : null, count(calls.length, "call"), isNumber(completion.waited) ? `waited ${duration(completion.waited)}` : null];
  return el("div", { class: "detail" }, facts.filter(Boolean).join(" · "), errors ? [" ", el("span", { class: "pill warn" }, count(errors, "failed call"))] : null);
}

/** The segments of an episode with the turn that each belongs to, and the tokens that it covers. */
function turnsOf(completion) {
  let turn = -1, from = 0;
  return completion.segments.map(([isPolicy, text, size]) => {
    if (isPolicy) turn++;
    const part = { isPolicy, text, turn, from, to: from + (size || 0) };
    from = part.to;
    return part;
  });
}

function callLine(call) {
  const head = [el("strong", {}, call.name || "unreadable call"), call.arguments ? ` ${call.arguments}` : ""];
  const tail = [isNumber(call.seconds) && call.seconds >= 0.001 ? duration(call.seconds) : null, call.error ? el("span", { class: "pill warn" }, call.error.replaceAll("_", " ")) : null];
  return el("div", { class: "call" }, el("span", { class: "mono" }, head), " ", tail.filter(Boolean).flatMap((piece) => [" ", piece]));
}

/** `show(text, from, to)` gives the text of the tokens from-to as elements; `tint` colours what is learned from. */
function turnRows(completion, show, tint) {
  const calls = completion.calls || [], parts = turnsOf(completion);
  const answered = new Set(parts.filter((part) => !part.isPolicy).map((part) => part.turn));
  return parts.map((part) => {
    const mine = calls.filter((call) => call.turn === part.turn);
    const size = part.to > part.from ? count(part.to - part.from, "token") : null;
    const names = [...new Set(mine.map((call) => call.name).filter(Boolean))].join(", ");
    const head = part.isPolicy ? `policy, turn ${part.turn + 1}` : names || (mine.length ? "tools" : "environment");
    const text = el("div", { class: "said mono" }, part.text ? show(part.text, part.from, part.to) : el("span", { class: "soft" }, "(empty)"));
    if (part.isPolicy && tint) text.style.background = tint;
    const shown = part.isPolicy ? (answered.has(part.turn) ? [] : mine) : mine;
    return el("div", { class: `turn ${part.isPolicy ? "policy" : "told"}` },
      el("div", { class: "who" }, el("span", {}, head), size ? el("span", { class: "soft" }, size) : null, part.isPolicy ? null : el("span", { class: "soft" }, "not trained on")),
      part.isPolicy ? null : shown.map(callLine), text, part.isPolicy ? shown.map(callLine) : null);
  });
}

function ownPrompt(completion) {
  return completion.own_prompt ? el("details", { class: "asked" }, el("summary", {}, "its own prompt"), el("pre", { class: "long" }, completion.own_prompt)) : null;
}

/** The turns of an episode; further conversations and forks, which are rows of their own, are folded below. */
function episodeBox(completion, show, tint) {
  const branches = (completion.branches || []).map((branch, place) =>
    el("details", { class: "asked branch" }, el("summary", {}, `row ${place + 2}: another conversation or a fork`),
      ownPrompt(branch), turnRows(branch, (text) => text, tint)));
  return el("div", { class: "text episode", tabindex: "0", "aria-label": "turns" }, ownPrompt(completion), turnRows(completion, show, tint), branches);
}
