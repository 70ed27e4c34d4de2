// Elements, and numbers as text. Nothing here parses HTML, so no text can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Properties `class`, `for` and names with a dash are attributes; functions are listeners. */
export function html(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** An SVG element. All properties are attributes. */
export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, name), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A picture for screen readers: its name, and what it shows in a sentence. */
export function picture(width, height, label, ...children) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);
}

/** A table with a header row. `rows` are arrays of cells, the first of which names the row. */
export function table(caption, columns, rows) {
  const head = html("tr", {}, columns.map((column) => html("th", { scope: "col" }, column)));
  const body = rows.map(([name, ...cells]) =>
    html("tr", {}, html("th", { scope: "row" }, name), cells.map((cell) => html("td", {}, String(cell)))));
  return html("table", {}, html("caption", { class: "hidden" }, caption), html("thead", {}, head), html("tbody", {}, body));
}

export const UNKNOWN = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Seconds with a unit. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds === 0) return "0 s";
  return seconds < 1 ? `${number(1000 * seconds, seconds < 0.01 ? 1 : 0)} ms` : `${number(seconds, seconds < 10 ? 2 : 1)} s`;
}

export function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)}%` : UNKNOWN;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
