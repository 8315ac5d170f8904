// Curves, drawn as SVG. All charts of a page share one cursor.

const cursor = {
  charts: new Set(),
  at: null,
  move(at) {
    cursor.at = at;
    for (const chart of cursor.charts) chart.point(at);
  },
};

/** How curves are drawn: measurements in a running mean (0: about a twentieth of the run). */
const drawing = { smooth: 0 };

const runningWindow = (length, size = 1) => (drawing.smooth ? Math.round(drawing.smooth / size) : 2 * Math.floor(length / 40) + 1);

/** Centred running mean; gaps are left out and stay open. */
function smoothed(values, window) {
  if (window <= 1) return values;
  const half = window >> 1;
  const sums = [0], counts = [0];
  values.forEach((value, at) => {
    sums.push(sums[at] + (isNumber(value) ? value : 0));
    counts.push(counts[at] + (isNumber(value) ? 1 : 0));
  });
  return values.map((value, at) => {
    if (!isNumber(value)) return null;
    const low = Math.max(0, at - half), high = Math.min(values.length, at + half + 1);
    return (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
}

/** Points of a long curve so that no pixel gets more than its lowest and highest. */
function thinned(points, width) {
  if (points.length <= 2 * width) return points;
  const size = Math.ceil(points.length / width), kept = [];
  for (let from = 0; from < points.length; from += size) {
    const part = points.slice(from, from + size);
    let low = part[0], high = part[0];
    for (const point of part) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

/** What a long run's curves show, in a sentence. */
const thinning = (table, spread = "; the thin line goes from the lowest to the highest of them") => (table.size > 1 ? el("span", { class: "soft small" }, `Each point is the mean of ${number(table.size)} steps${spread}.`) : null);

/** Round marks from low to high. */
function ticks(low, high, many, isWhole = false) {
  const rough = Math.max(isWhole ? 1 : 0, (high - low) / Math.max(1, many)) || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = (isWhole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((factor) => factor * size >= rough * 0.999) * size;
  const marks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) marks.push(Number((at * step).toPrecision(12)));
  return marks;
}

function tickText(value) {
  if (value === 0) return "0";
  if (value < 0) return `−${tickText(-value)}`;
  const size = Math.abs(value);
  if (size >= 10000) return compact(value);
  if (size < 1e-3) return value.toExponential(0).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

/**
 * One panel. `series` are {name, xs, values, low, high, colour, key, spread, size, last}; `band` is {name, xs, low, high} or null.
 * `zero` puts 0 on the axis, `least` is the least that its upper end may be. `onpick(x)` is told where somebody clicked or pressed Enter.
 */
class Chart {
  constructor({ title, note, zero, least, height, onpick, xname }) {
    Object.assign(this, { title, note, zero, least, height: height || 210, onpick, xname: xname || "step" });
    this.series = [];
    this.band = null;
    this.legend = el("div", { class: "legend" });
    this.box = el("div", {});
    this.node = el("div", { class: "card chart" }, el("h3", {}, title), this.legend, this.box, note ? el("p", { class: "note" }, note) : null);
    this.width = 0;
    new ResizeObserver((entries) => {
      const width = Math.floor(entries[0].contentRect.width);
      if (width > 40 && width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.box);
  }

  show(series, band) {
    this.series = series.filter((one) => one.values.some(isNumber));
    this.series.forEach((one, at) => {
      one.isSame = this.series.slice(0, at).some((other) => other.xs === one.xs && other.values.every((value, place) => value === one.values[place]));
    });
    this.band = band && band.low.some(isNumber) ? band : null;
    if (this.width) this.draw();
  }

  /** Ends of both axes. */
  measure() {
    let xlow = Infinity, xhigh = -Infinity, low = Infinity, high = -Infinity;
    const see = (xs, values) => {
      values.forEach((value, at) => {
        if (!isNumber(value) || !isNumber(xs[at])) return;
        xlow = Math.min(xlow, xs[at]);
        xhigh = Math.max(xhigh, xs[at]);
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
    };
    for (const one of this.series) {
      see(one.xs, one.values);
      for (const x of [one.xs[0], one.xs[one.xs.length - 1]]) {
        if (isNumber(x)) { xlow = Math.min(xlow, x); xhigh = Math.max(xhigh, x); } // all panels of a run span the same steps
      }
      for (const ends of [[one.low, one.high], one.spread]) if (ends && ends[0]) ends.forEach((end) => see(one.xs, end));
    }
    if (this.band) { see(this.band.xs, this.band.low); see(this.band.xs, this.band.high); }
    if (this.zero) low = Math.min(0, low);
    if (this.least) high = Math.max(this.least, high); // rounding errors are not magnified
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) { high += Math.abs(high) * 0.1 || 1; low -= this.zero && low === 0 ? 0 : Math.abs(low) * 0.1 || 1; }
    const room = 0.06 * (high - low);
    if (!(this.zero && low === 0)) low = low >= 0 && low - room < 0 ? 0 : low - room;
    if (xlow === xhigh) { xlow -= 1; xhigh += 1; }
    return { xlow, xhigh, low, high: high + room };
  }

  draw() {
    fill(this.box);
    cursor.charts.delete(this);
    if (!this.series.length && !this.band) return;
    cursor.charts.add(this);
    const edges = this.measure(), width = this.width, height = this.height;
    const marks = ticks(edges.low, edges.high, 4);
    const left = 12 + 6.6 * Math.max(...marks.map((mark) => tickText(mark).length)), right = 10, top = 8, bottom = 24;
    this.x = (value) => left + ((value - edges.xlow) / (edges.xhigh - edges.xlow)) * (width - left - right);
    this.y = (value) => top + (1 - (value - edges.low) / (edges.high - edges.low)) * (height - top - bottom);
    const drawn = svg("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img",
      "aria-label": `${this.title}: ${this.series.map((one) => `${one.name} ends at ${number(last(one))}`).join(", ")}. Arrow keys move the cursor.`,
    });
    for (const mark of marks) {
      const at = Math.round(this.y(mark)) + 0.5;
      drawn.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: at, y2: at }));
      drawn.append(svg("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, tickText(mark)));
    }
    const across = ticks(edges.xlow, edges.xhigh, Math.max(2, Math.floor((width - left) / 90)), this.xname === "step");
    across.forEach((mark, at) => {
      const isLast = at === across.length - 1;
      const text = !isLast ? tickText(mark) : this.xname === "step" ? `step ${tickText(mark)}` : `${tickText(mark)} ${this.xname}`;
      drawn.append(svg("text", { x: Math.min(this.x(mark), width - (isLast ? 4 : 0)), y: height - 6, "text-anchor": isLast && this.x(mark) > width - 50 ? "end" : "middle" }, text));
    });
    if (this.band) drawn.append(this.drawBand(this.band, width - left - right));
    for (const one of this.series) this.drawLine(drawn, one, width - left - right);
    this.mark = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    drawn.append(this.mark);
    this.listen(drawn, left, width - right, edges);
    this.box.append(drawn);
    this.point(cursor.at);
  }

  drawBand(band, width) {
    const window = runningWindow(band.xs.length);
    const edge = (values) => thinned(pairs(band.xs, smoothed(values, window)), width);
    const points = [...edge(band.low), ...edge(band.high).reverse()];
    return svg("path", { class: `band k${band.colour}`, d: `M${points.map(([x, value]) => `${this.x(x).toFixed(1)} ${this.y(value).toFixed(1)}`).join("L")}Z` });
  }

  drawLine(drawn, one, width) {
    const points = pairs(one.xs, one.values);
    const path = (list) => `M${thinned(list, width).map(([x, value]) => `${this.x(x).toFixed(1)} ${this.y(value).toFixed(1)}`).join("L")}`;
    const isSparse = points.length < 0.5 * one.xs.length || points.length <= 2;
    const window = isSparse ? 1 : runningWindow(one.xs.length, one.size);
    const colour = `k${one.colour}`;
    if (one.isBand) drawn.append(this.drawBand(one, width));
    else if (one.low) {
      const bars = one.xs.map((x, at) => (isNumber(one.low[at]) && isNumber(one.high[at]) ? `M${this.x(x).toFixed(1)} ${this.y(one.low[at]).toFixed(1)}V${this.y(one.high[at]).toFixed(1)}` : "")).join("");
      if (bars) drawn.append(svg("path", { class: `bars ${colour}`, d: bars }));
    }
    const spread = one.spread && one.xs.flatMap((x, at) => (isNumber(one.spread[0][at]) ? one.spread.map((end) => [x, end[at]]) : []));
    if (spread || window > 1) drawn.append(svg("path", { class: `raw ${colour}`, d: path(spread || points) }));
    drawn.append(svg("path", { class: `line ${colour}${one.isSame ? " same" : ""}`, d: path(window > 1 ? pairs(one.xs, smoothed(one.values, window)) : points) }));
    if (isSparse && points.length <= 80) {
      for (const [x, value] of points) drawn.append(svg("circle", { class: colour, cx: this.x(x).toFixed(1), cy: this.y(value).toFixed(1), r: 3 }));
    }
  }

  listen(drawn, left, right, edges) {
    const grid = [...new Set(this.series.flatMap((one) => one.xs))].filter(isNumber).sort((a, b) => a - b);
    const nearest = (event) => {
      const box = drawn.getBoundingClientRect();
      const at = edges.xlow + ((event.clientX - box.left - left) / (right - left)) * (edges.xhigh - edges.xlow);
      return grid.reduce((best, x) => (Math.abs(x - at) < Math.abs(best - at) ? x : best), grid[0]);
    };
    drawn.addEventListener("pointermove", (event) => cursor.move(nearest(event)));
    drawn.addEventListener("pointerleave", () => cursor.move(null));
    drawn.addEventListener("click", (event) => this.onpick && this.onpick(nearest(event)));
    drawn.addEventListener("blur", () => cursor.move(null));
    drawn.addEventListener("keydown", (event) => {
      const now = cursor.at === null ? grid.length - 1 : grid.indexOf(cursor.at);
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -grid.length, End: grid.length }[event.key];
      if (move) {
        cursor.move(grid[Math.min(grid.length - 1, Math.max(0, (cursor.at === null ? now + (move < 0 ? 1 : 0) : now) + move))]);
        event.preventDefault();
      } else if (event.key === "Enter" && this.onpick && cursor.at !== null) this.onpick(cursor.at);
    });
  }

  /** Values of the legend at a place; the last ones without a place. */
  point(at) {
    if (!this.mark) return;
    const entries = this.series.map((one) => {
      const value = at === null ? last(one) : one.values[one.xs.indexOf(at)];
      return el("span", {}, el("span", { class: `swatch k${one.colour}` }), `${one.name} `, el("b", {}, number(value)));
    });
    fill(this.legend, entries, at === null ? null : el("span", { class: "at" }, `${this.xname} ${number(at)}`));
    if (at === null) this.mark.setAttribute("visibility", "hidden");
    else {
      const where = this.x(at);
      this.mark.setAttribute("x1", where);
      this.mark.setAttribute("x2", where);
      this.mark.setAttribute("visibility", "visible");
    }
  }
}

/** The last value of a curve: of the run, or of what is drawn. */
function last({ last, values }) {
  if (isNumber(last)) return last;
  for (let at = values.length - 1; at >= 0; at--) if (isNumber(values[at])) return values[at];
  return null;
}

function pairs(xs, values) {
  const found = [];
  values.forEach((value, at) => { if (isNumber(value) && isNumber(xs[at])) found.push([xs[at], value]); });
  return found;
}

/** A curve without axes, for lists. */
function sparkline(values, colour) {
  const points = values.filter(isNumber);
  const drawn = svg("svg", { viewBox: "0 0 200 40", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length < 2) return drawn;
  const low = Math.min(...points), span = Math.max(...points) - low || 1;
  const means = smoothed(points, 2 * Math.floor(points.length / 40) + 1);
  const path = means.map((value, at) => `${(2 + (196 * at) / (means.length - 1)).toFixed(1)} ${(37 - (34 * (value - low)) / span).toFixed(1)}`).join("L");
  drawn.append(svg("path", { class: `line k${colour}`, d: `M${path}`, "vector-effect": "non-scaling-stroke" }));
  return drawn;
}

/** The curves of one run: the panels, and every metric below them. */
class Curves {
  constructor(boot, table, onpick) {
    Object.assign(this, { boot, table, onpick });
    this.panels = boot.panels.map((panel) => new Chart({ ...panel, onpick }));
    this.others = new Map();
    this.more = el("details", { id: "every-metric", ontoggle: () => this.drawOthers() }, el("summary", {}, "Every metric, with its meaning"), (this.all = el("div")));
    const grid = (panels, width) => el("div", { class: "grid" }, panels.map((chart) => { chart.node.classList.add(width); return chart.node; }));
    this.controls = el("div", { class: "controls" },
      el("label", {}, "smoothing", choice("smoothing", [["0", "auto"], ["1", "none"], ["5", "5 steps"], ["15", "15 steps"], ["51", "51 steps"]], "0", (value) => { drawing.smooth = Number(value); this.draw(); })));
    this.node = el("section", { id: "curves" },
      el("div", { class: "head" }, el("h2", {}, "Curves"), thinning(table), el("span", { class: "grow" }), this.controls),
      (this.nothing = el("p", { class: "soft" }, "No step is finished yet.")),
      grid(this.panels.slice(0, 4), "half"),
      el("div", { class: "spaced" }), grid(this.panels.slice(4), "third"), this.more);
    this.draw();
  }

  draw() {
    const { table } = this, column = (key) => table.curve(key).values;
    this.boot.panels.forEach((panel, at) => {
      const isDrawn = (line) => !line.unless_equal_to || JSON.stringify(table.columns[line.key]) !== JSON.stringify(table.columns[line.unless_equal_to]);
      const isBase = (key) => column(key).every((value, place) => !isNumber(value) || table.steps[place] === 0); // measured once
      const series = panel.lines.filter(isDrawn).map((line, colour) => ({
        ...table.curve(line.key), name: isBase(line.key) ? `${line.name}, before training` : line.name, colour,
        low: line.low && column(line.low), high: line.high && column(line.high),
      }));
      const band = panel.band && { name: panel.band[2], xs: table.steps, low: column(panel.band[0]), high: column(panel.band[1]), colour: 0 };
      this.panels[at].node.hidden = !series.some((one) => one.values.some(isNumber)); // no panel for what a run has not
      this.panels[at].show(series, band);
    });
    this.nothing.hidden = this.panels.some((panel) => !panel.node.hidden);
    this.drawOthers();
  }

  drawOthers() {
    if (!this.more.open) return;
    const keys = Object.keys(this.table.ends);
    const groups = [...this.boot.key_groups, ...keys.map((key) => key.split("/")[0])].filter((group, at, all) => all.indexOf(group) === at);
    const fresh = keys.some((key) => !this.others.has(key));
    for (const key of keys) {
      if (!this.others.has(key)) {
        const told = this.boot.glossary[key];
        const chart = new Chart({ title: key, note: told ? `${told[1]}${told[2] === "-" ? "" : `. Healthy: ${told[2]}`}` : "", height: 150, onpick: this.onpick });
        chart.node.classList.add("third");
        this.others.set(key, chart);
      }
      const name = (this.boot.glossary[key] || [""])[0] || "value";
      this.others.get(key).show([{ ...this.table.curve(key), name, colour: 0 }], null);
    }
    if (!fresh) return;
    fill(this.all, groups.map((group) => {
      const mine = keys.filter((key) => key.split("/")[0] === group);
      return mine.length ? [el("h3", { class: "metric-group" }, group), el("div", { class: "grid" }, mine.map((key) => this.others.get(key).node))] : null;
    }));
  }
}
