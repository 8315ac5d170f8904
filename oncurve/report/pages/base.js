// Elements, numbers and the address bar. Text reaches the document through text nodes only: there is no markup from data.

const SVG = "http://www.w3.org/2000/svg";

/** An element: properties by name ("class", "onclick", attributes), children as elements or texts. */
function el(tag, properties, ...children) {
  return dress(document.createElement(tag), properties, children);
}

/** The same for the elements of a drawing. */
function svg(tag, properties, ...children) {
  return dress(document.createElementNS(SVG, tag), properties, children);
}

function dress(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace what is inside an element. */
function fill(node, ...children) {
  node.textContent = "";
  add(node, children);
  return node;
}

/** A table that a phone shows row by row, each cell behind the head of its column. */
function stacked(table) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => at && cell.setAttribute("data-head", heads[at]));
  table.classList.add("stacked");
  return table;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number for people: about three digits, thousands separated. */
function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  if (value < 0) return `−${number(-value, digits)}`;
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // an error of rounding
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

const percent = (share, decimals = 1) => (isNumber(share) ? `${(100 * share).toFixed(decimals)}%` : "–");
const signed = (value, decimals) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(decimals);

function compact(value) {
  if (!isNumber(value)) return "–";
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return number(value);
}

/** A time as the terminal writes it: 7s, 1:15, 3:01:00. */
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))}s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = (part) => String(part).padStart(2, "0");
  if (hours) return `${hours}:${two(minutes)}:${two(whole % 60)}`;
  return minutes ? `${minutes}:${two(whole % 60)}` : `${whole}s`;
}

const money = (usd) => (isNumber(usd) ? `$${usd >= 100 ? usd.toFixed(0) : usd >= 0.095 ? usd.toFixed(2) : number(usd, 2)}` : "unknown");

/** "12 groups", "1 group". */
const count = (many, noun) => `${number(many)} ${noun}${many === 1 ? "" : "s"}`;

/** What the address says after "#", as names and values. */
const place = {
  read() {
    return new URLSearchParams(location.hash.slice(1));
  },
  /** Change some of it without a new entry in the history; null removes a name. */
  write(changes) {
    const now = place.read();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") now.delete(name);
      else now.set(name, value);
    }
    history.replaceState(null, "", `#${now.toString()}`);
  },
};

/** What a reader chose for good, where the browser lets a page remember. */
const memory = {
  get(name) {
    try { return localStorage.getItem(`oncurve-${name}`); } catch (error) { return null; }
  },
  set(name, value) {
    try { localStorage.setItem(`oncurve-${name}`, value); } catch (error) { /* a private window forgets */ }
  },
};

function themeButton() {
  const themes = ["auto", "light", "dark"];
  let now = memory.get("theme") || "auto";
  const button = el("button", { class: "plain", type: "button" });
  const show = () => {
    if (now === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", now);
    fill(button, now === "auto" ? "◐ auto" : now === "light" ? "○ light" : "● dark");
    button.setAttribute("aria-label", `colours: ${now}`);
  };
  button.addEventListener("click", () => {
    now = themes[(themes.indexOf(now) + 1) % themes.length];
    memory.set("theme", now);
    show();
  });
  show();
  return button;
}

/** A choice among [value, text] pairs. */
function choice(name, options, value, onchange) {
  const select = el("select", { "aria-label": name, onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(el("option", { value: key }, text));
  select.value = value;
  return select;
}
