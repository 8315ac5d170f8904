// Where the numbers come from: blocks inside this file, or the server that this page came from.

/** Unpack base64 of raw deflate of JSON. */
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}

async function blockOf(id) {
  const node = document.getElementById(id);
  return node === null ? null : unpack(node.textContent);
}

/** Metrics as one list per key, ordered by step; rows of one step are merged, later values over earlier ones. */
class Table {
  constructor(columns) {
    this.columns = columns && columns.step ? columns : { step: [] };
  }

  get steps() {
    return this.columns.step;
  }

  keys() {
    return Object.keys(this.columns).filter((key) => key !== "step");
  }

  has(key) {
    return (this.columns[key] || []).some(isNumber);
  }

  last(key) {
    const values = this.columns[key] || [];
    for (let at = values.length - 1; at >= 0; at--) if (isNumber(values[at])) return values[at];
    return null;
  }

  first(key) {
    const found = (this.columns[key] || []).find(isNumber);
    return found === undefined ? null : found;
  }

  /** Add a row, or fill one that is there. */
  put(row) {
    const steps = this.steps;
    let at = steps.length;
    while (at > 0 && steps[at - 1] >= row.step) at--;
    if (steps[at] !== row.step) {
      for (const values of Object.values(this.columns)) values.splice(at, 0, null);
      steps[at] = row.step;
    }
    for (const [key, value] of Object.entries(row)) {
      if (!(key in this.columns)) this.columns[key] = steps.map(() => null);
      this.columns[key][at] = value;
    }
  }
}

/** A report: everything is in this file. */
class FileSource {
  constructor(boot) {
    this.boot = boot;
    this.steps = boot.steps;
    this.token_steps = new Set(boot.token_steps);
    this.num_examples = boot.num_examples;
    this.kept = new Map();
  }

  groups(step) {
    return this.block(step === "examples" ? "examples" : `step-${step}`);
  }

  async tokens(step) {
    return this.token_steps.has(step) ? this.block(`tokens-${step}`) : null;
  }

  /** Unpacked blocks, the last twenty of them kept. */
  async block(id) {
    if (!this.kept.has(id)) {
      this.kept.set(id, blockOf(id));
      if (this.kept.size > 20) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(id);
  }
}

/** A run that is followed: the server reads its folder and tells what is new. */
class LiveSource {
  constructor(boot, tell) {
    this.boot = boot;
    this.tell = tell;
    this.steps = boot.steps;
    this.num_examples = boot.num_examples;
    this.kept = new Map();
    this.heard = Date.now();
    this.open();
    setInterval(() => this.look(), 1000);
  }

  /** The stream of news, which begins with everything. */
  open() {
    this.stream = new EventSource(`${this.boot.base}/events`);
    for (const kind of ["reset", "rows", "overview", "steps", "problem", "alive"]) {
      this.stream.addEventListener(kind, (event) => {
        this.heard = Date.now();
        this.tell("connected", true);
        if (kind !== "alive") this.tell(kind, JSON.parse(event.data));
      });
    }
    this.stream.onerror = () => this.tell("connected", false);
  }

  /** Open a stream that was closed, or that fell silent without an error. */
  look() {
    const isSilent = Date.now() - this.heard > 12000;
    if (this.stream.readyState !== EventSource.CLOSED && !isSilent) return;
    this.stream.close();
    this.heard = Date.now() - 9000;
    this.tell("connected", false);
    this.open();
  }

  forget() {
    this.kept.clear();
  }

  async fetched(step) {
    if (!this.kept.has(step)) {
      const answer = await fetch(`${this.boot.base}/groups/${step}`);
      if (!answer.ok) throw new Error(await answer.text());
      this.kept.set(step, await answer.json());
      if (this.kept.size > 20) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(step);
  }

  async groups(step) {
    return (await this.fetched(step)).groups;
  }

  async tokens(step) {
    return step === "examples" ? null : (await this.fetched(step)).tokens;
  }
}
