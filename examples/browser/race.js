// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
/** Language models that write and read the same, each by its own clock. */

const PIECE = 256; // tokens of a context that are read at once
const TURN_TOKENS = 16; // a turn ends after so many tokens one by one,
const TURN_MS = 100; // or so long
const MARKS = 40; // places in a context where it is measured how long a token takes
const MEDIAN_OF = 5; // measured speeds
const SNAPSHOT_MS = 100;
const TEMPERATURE = 0.7;
const TOP_K = 50;

/**
 * A model that writes behind a prompt, and then reads until its context is long, in turns that take
 * a fraction of a second.
 */
class Racer {
  constructor(model, prompt, toWrite, context) {
    this.model = model;
    this.prompt = model.tokenizer.encode(prompt).ids;
    this.context = Math.max(context, this.prompt.length + toWrite);
    this.toWrite = toWrite;
    this.written = [];
    this.steps = stepsOf(model.tokenizer);
    this.ms = 0;
    this.points = []; // {context, bytes, speed}, without a speed where many were read at once
    this.mark = this.nextMark = Math.max(PIECE, this.context / MARKS);
    this.failure = "";
    model.forget();
  }

  get phase() {
    if (this.failure) return "failed";
    if (this.written.length < this.toWrite) return "writing";
    return this.model.count < this.context ? "reading" : "done";
  }

  async turn() {
    const start = performance.now();
    const before = this.model.count;
    const isAtMark = before >= this.nextMark;
    try {
      if (before === 0) await this.read(this.prompt);
      else if (this.phase === "writing" || isAtMark) await this.oneByOne(start);
      else await this.read(this.following(Math.min(PIECE, this.context - before)));
    } catch (error) {
      this.failure = String(error.message ?? error).split("\n")[0];
      return;
    }
    const ms = performance.now() - start;
    if (isAtMark) this.nextMark += this.mark;
    this.ms += ms;
    const count = this.model.count - before;
    const isOneByOne = before > 0 && count <= TURN_TOKENS;
    this.points.push({
      context: this.model.count,
      bytes: this.model.stateBytes,
      speed: isOneByOne ? (1000 * count) / ms : null,
    });
  }

  async oneByOne(start) {
    const phase = this.phase;
    for (let i = 0; i < TURN_TOKENS && this.phase === phase; i++) {
      if (phase === "writing") this.written.push(draw(this.logits));
      await this.read(phase === "writing" ? this.written.slice(-1) : this.following(1));
      if (performance.now() - start > TURN_MS) break;
    }
  }

  /** So many tokens to read on with. */
  following(count) {
    const token = (_, i) => this.steps[(this.model.count + i) % this.steps.length];
    return Array.from({ length: count }, token);
  }

  async read(tokens) {
    this.logits = await this.model.read(tokens);
  }

  /** What it wrote; the tokenizer refuses to decode nothing. */
  get text() {
    const options = { skip_special_tokens: true };
    return this.written.length ? this.model.tokenizer.decode(this.written, options) : "";
  }

  get standing() {
    const measured = this.points.filter((point) => point.speed).slice(-MEDIAN_OF);
    return {
      phase: this.phase,
      failure: this.failure,
      count: this.model.count,
      context: this.context,
      ms: this.ms,
      bytes: this.model.stateBytes,
      speed: median(measured.map((point) => point.speed)),
      text: this.text,
      points: this.points,
    };
  }
}

/**
 * Shows how far all are, some ten times a second, until they are done or stopped.
 *
 * Whose clock shows least has the next turn: so they have had the same time at every moment, but
 * for a turn, and who is ahead is faster.
 */
export async function race(models, { prompt, toWrite, context }, show, isStopped) {
  const racers = models.map((model) => new Racer(model, prompt, toWrite, context));
  let shown = 0;
  while (!isStopped()) {
    const running = racers.filter(({ phase }) => phase === "writing" || phase === "reading");
    if (running.length === 0) break;
    await running.reduce((a, b) => (b.ms < a.ms ? b : a)).turn();
    if (performance.now() - shown > SNAPSHOT_MS) {
      shown = performance.now();
      show(racers.map(({ standing }) => standing));
      await new Promise((resolve) => setTimeout(resolve)); // messages come, as to stop
    }
  }
  show(racers.map(({ standing }) => standing));
}

/** Tokens of a program that does nothing of interest, which is read over and over. */
function stepsOf(tokenizer) {
  const steps = Array.from(
    { length: 100 },
    (_, i) => `def step_${i}(state):\n    state.total += ${i}\n    return state\n\n\n`,
  );
  return tokenizer.encode(steps.join("")).ids;
}

/** A token, by its probability among the likeliest. */
function draw(logits) {
  const likeliest = Array.from(logits, (logit, token) => ({ logit, token }));
  likeliest.sort((a, b) => b.logit - a.logit).splice(TOP_K);
  const weights = likeliest.map((x) => Math.exp((x.logit - likeliest[0].logit) / TEMPERATURE));
  let left = Math.random() * weights.reduce((sum, weight) => sum + weight);
  return likeliest[weights.findIndex((weight) => (left -= weight) <= 0)].token;
}

export function median(numbers) {
  return [...numbers].sort((a, b) => a - b)[numbers.length >> 1];
}
