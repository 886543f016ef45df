// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
/** The page: what a visitor asks for, and what the models have done so far. */

import { byteText, chart } from "./chart.js";
import { median } from "./race.js";

const KINDS = ["softmax", "linear"]; // folders of models, and classes of style.css
const AROUND = 2; // speeds before and behind one, with which it is a median

const find = (selector) => document.querySelector(selector);
const format = (number) => Math.round(number).toLocaleString("en");
const worker = new Worker("worker.js", { type: "module" });

const MESSAGES = {
  loaded() {
    setRunning(false);
    tell("");
  },
  standings({ standings }) {
    standings.forEach((standing, i) => showCard(KINDS[i], standing));
    const lines = (of) => standings.map(({ points }, i) => ({ kind: KINDS[i], points: of(points) }));
    const end = standings[0].context;
    find("#speed").innerHTML = chart("Tokens per second", lines(speeds), end, format);
    find("#memory").innerHTML = chart("Memory of the context", lines(sizes), end, byteText);
  },
  over() {
    setRunning(false);
  },
  failed({ text }) {
    tell(`This did not work: ${text}`);
  },
};

function sizes(points) {
  return points.map(({ context, bytes }) => [context, bytes]);
}

/** Medians, for other programs slow a model down at times. */
function speeds(points) {
  const measured = points.filter(({ speed }) => speed);
  return measured.map(({ context }, i) => {
    const around = measured.slice(Math.max(i - AROUND, 0), i + AROUND + 1);
    return [context, median(around.map(({ speed }) => speed))];
  });
}

function showCard(kind, standing) {
  const card = find(`.card.${kind}`);
  const show = (selector, text) => (card.querySelector(selector).textContent = text);
  const { phase, count, context, ms } = standing;
  card.dataset.phase = phase;
  const told = { writing: "writing", reading: "reading on", done: "done", failed: standing.failure };
  show(".phase", `${told[phase]}: ${format(count)} of ${format(context)} tokens`);
  show(".speed", standing.speed ? format(standing.speed) : "–");
  show(".bytes", byteText(standing.bytes));
  show(".clock", `${(ms / 1000).toFixed(1)} s`);
  show(".text", standing.text);
  card.querySelector(".bar i").style.width = `${(100 * count) / context}%`;
}

function setRunning(isRunning) {
  find("#race").disabled = isRunning;
  find("#stop").disabled = !isRunning;
}

function tell(text) {
  find("#message").textContent = text;
  find("#message").hidden = !text;
}

const slider = find("#context");
slider.oninput = () => (find("#context-text").textContent = format(slider.value));
slider.oninput();

find("#controls").onsubmit = (event) => {
  event.preventDefault();
  const prompt = find("#prompt").value;
  if (!prompt.trim()) return tell("Type a prompt first.");
  tell("");
  setRunning(true);
  worker.postMessage({ kind: "race", prompt, toWrite: 120, context: Number(slider.value) });
};
find("#stop").onclick = () => worker.postMessage({ kind: "stop" });

worker.onmessage = ({ data: { kind, ...data } }) => MESSAGES[kind](data);
worker.onerror = ({ message }) => MESSAGES.failed({ text: message ?? "the models' thread ended" });
tell("Loading two small models and ONNX Runtime …");
worker.postMessage({ kind: "load", folders: KINDS.map((kind) => `models/${kind}`) });
