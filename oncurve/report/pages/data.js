// The numbers and texts of a run: blocks inside this file.

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
}

/** Completions and their tokens, unpacked when somebody looks at them. */
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
