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

/** Metrics as one list per key, ordered by step: of each step or, in a long run, means of `size` steps and their lowest and highest. */
class Table {
  constructor({ size, step, along, columns, spread, ends }) {
    Object.assign(this, { size, steps: step, columns, spread, ends, places: { ...along, step } });
  }

  has(key) {
    return key in this.ends;
  }

  last(key) {
    return this.has(key) ? this.ends[key][1] : null;
  }

  first(key) {
    return this.has(key) ? this.ends[key][0] : null;
  }

  /** A metric as a chart draws it, along steps, hours or tokens. */
  curve(key, kind = "step") {
    return { key, xs: this.places[kind], values: this.columns[key] || this.steps.map(() => null), spread: this.spread[key], size: this.size, last: this.last(key) };
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
