// Two kinds of plots: curves, and stacked bars. A width in pixels, data in, an SVG picture out.

import { picture, svg } from "./dom.js";

const HEIGHT = 170;
const LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 26;

/** Three to five round values from 0 to at least `most`. */
function ticksTo(most) {
  const step = [1, 2, 2.5, 5, 10].map((one) => one * 10 ** Math.floor(Math.log10(most / 4 || 1))).find((one) => one * 4 >= most) ?? 1;
  const ticks = [];
  for (let i = 0; i * step < most + step * 0.999; i++) ticks.push(i * step);
  return ticks;
}

function frame(width, most, format, yOf) {
  return ticksTo(most).filter((value) => value <= most * 1.0001).flatMap((value) => [
    svg("line", { x1: LEFT, x2: width - RIGHT, y1: yOf(value), y2: yOf(value), class: "grid" }),
    svg("text", { x: LEFT - 6, y: yOf(value) + 4, class: "soft end" }, format(value)),
  ]);
}

/**
 * Curves over x. `curves`: {colour, dash, points: [[x, y or null]], area, step}; `xTicks`: [[x, text]].
 * `reference`: a dashed horizontal line.
 */
export function curves(width, label, curvesGiven, { xFrom, xTo, xTicks, most, format, reference, dots }) {
  const bottom = HEIGHT - BOTTOM;
  const xOf = (x) => LEFT + ((x - xFrom) / (xTo - xFrom || 1)) * (width - LEFT - RIGHT);
  const yOf = (y) => bottom - (Math.min(y, most) / most) * (bottom - TOP);
  const parts = frame(width, most, format, yOf);
  for (const [x, text] of xTicks) {
    const at = xOf(x);
    const side = at > width - 40 ? "soft end" : at < LEFT + 20 ? "soft" : "soft middle";
    parts.push(svg("text", { x: side === "soft end" ? width - RIGHT : at, y: HEIGHT - 8, class: side }, text));
  }
  if (reference !== undefined) {
    parts.push(svg("line", { x1: LEFT, x2: width - RIGHT, y1: yOf(reference), y2: yOf(reference), class: "reference" }));
  }
  for (const { colour, dash, points, area, step } of curvesGiven) {
    for (const piece of pieces(points.filter(([x]) => x >= xFrom && x <= xTo))) {
      const at = piece.map(([x, y]) => [xOf(x).toFixed(1), yOf(y).toFixed(1)]);
      const line = at.map(([x, y], i) => (i === 0 ? `M${x},${y}` : step ? `H${x}V${y}` : `L${x},${y}`)).join("");
      if (area) parts.push(svg("path", { d: `${line}V${bottom}H${at[0][0]}z`, class: `area ${colour}` }));
      parts.push(svg("path", { d: piece.length > 1 ? line : `${line}h0.1`, class: `curve ${colour}${dash ? ` dash${dash}` : ""}` }));
      if (dots) parts.push(...at.map(([x, y]) => svg("circle", { cx: x, cy: y, r: 2.8, class: `point ${colour}` })));
    }
  }
  return picture(width, HEIGHT, label, parts);
}

/** Runs of points without a gap. */
function pieces(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((piece) => piece.length);
}

/** Stacked bars: `bars`: {name, parts: [[class, value]], note}. */
export function bars(width, label, barsGiven, { most, format, axis }) {
  const bottom = HEIGHT - BOTTOM - 14;
  const yOf = (y) => bottom - (Math.min(y, most) / most) * (bottom - TOP);
  const room = (width - LEFT - RIGHT) / Math.max(1, barsGiven.length);
  const thick = Math.min(46, room * 0.66);
  const parts = frame(width, most, format, yOf);
  barsGiven.forEach(({ name, parts: stack, note }, i) => {
    const middle = LEFT + room * (i + 0.5);
    let sum = 0;
    for (const [kind, value] of stack) {
      const height = Math.max(0, yOf(sum) - yOf(sum + value));
      parts.push(svg("rect", { x: (middle - thick / 2).toFixed(1), y: yOf(sum + value).toFixed(1), width: thick.toFixed(1), height: height.toFixed(1), class: kind }));
      sum += value;
    }
    parts.push(svg("text", { x: middle, y: yOf(sum) - 4, class: "middle" }, note));
    parts.push(svg("text", { x: middle, y: HEIGHT - BOTTOM + 2, class: "soft middle" }, name));
  });
  parts.push(svg("text", { x: width - RIGHT, y: HEIGHT - 6, class: "soft end" }, axis));
  return picture(width, HEIGHT, label, parts);
}
