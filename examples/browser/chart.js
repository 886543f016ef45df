// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
/** Charts of lines as SVG, in the colours of style.css. */

const WIDTH = 540;
const HEIGHT = 300;
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 28, 34, 48]; // margins, for titles and labels
const TICKS = 5; // on an axis, about
const UNITS = ["B", "kB", "MB", "GB"];

/**
 * From 0 to xEnd and from 0 to the highest point. lines: {kind, points}, with kind a class of
 * style.css and points [x, y]; yText gives a number's text, with its unit.
 */
export function chart(title, lines, xEnd, yText) {
  const points = lines.flatMap((line) => line.points);
  const xTicks = ticks(Math.max(xEnd, ...points.map(([x]) => x)));
  const yTicks = ticks(Math.max(0, ...points.map(([, y]) => y)));
  const [right, bottom] = [WIDTH - RIGHT, HEIGHT - BOTTOM];
  const atX = (x) => (LEFT + (x / xTicks.at(-1)) * (right - LEFT)).toFixed(1);
  const atY = (y) => (bottom - (y / yTicks.at(-1)) * (bottom - TOP)).toFixed(1);
  const parts = [`<text class="title" x="${LEFT}" y="16">${title}</text>`];
  for (const y of yTicks) {
    parts.push(`<line class="grid" x1="${LEFT}" x2="${right}" y1="${atY(y)}" y2="${atY(y)}"/>`);
    parts.push(`<text class="y" x="${LEFT - 8}" y="${+atY(y) + 4}">${yText(y)}</text>`);
  }
  for (const x of xTicks) {
    parts.push(`<text class="x" x="${atX(x)}" y="${bottom + 18}">${x.toLocaleString("en")}</text>`);
  }
  const middle = (LEFT + right) / 2;
  parts.push(`<text class="x" x="${middle}" y="${HEIGHT - 8}">tokens of context</text>`);
  for (const { kind, points } of lines.filter((line) => line.points.length)) {
    const path = points.map(([x, y]) => `${atX(x)},${atY(y)}`).join(" ");
    const [x, y] = points.at(-1);
    parts.push(`<polyline class="${kind}" points="${path}"/>`);
    parts.push(`<circle class="${kind}" cx="${atX(x)}" cy="${atY(y)}" r="4"/>`);
  }
  const size = `viewBox="0 0 ${WIDTH} ${HEIGHT}"`;
  return `<svg ${size} role="img" aria-label="${title}">${parts.join("")}</svg>`;
}

/** Round numbers from 0 to one that is no less than `end`. */
function ticks(end) {
  const rough = Math.max(end, 1) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((x) => x >= rough * (1 - 1e-9));
  const count = Math.max(1, Math.ceil(end / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

/** With a unit of thousands, as "12.3 MB". */
export function byteText(count) {
  const power = Math.min(Math.floor(Math.log10(Math.max(count, 1)) / 3), UNITS.length - 1);
  return `${Number((count / 1000 ** power).toPrecision(3))} ${UNITS[power]}`;
}
