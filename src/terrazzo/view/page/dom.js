// Elements and texts.  Whatever comes from a checkpoint becomes a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function bytesText(count) {
  if (count === null || count === undefined) return "";
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  let size = count, unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

export function shapeText(shape) {
  if (shape === null) return "";
  return shape.length ? shape.join(" × ") : "scalar";
}

export function countText(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : (many ?? one + "s")}`;
}

export function numberText(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));
}

export function spanText(start, stop) {
  return stop === start + 1 ? `${start}` : `${start}-${stop - 1}`;
}

export function runsText(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs[runs.length - 1];
    if (last && last[1] === number) last[1] += 1;
    else runs.push([number, number + 1]);
  }
  return runs.map(([start, stop]) => spanText(start, stop)).join(", ");
}

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export function table(titles, rows, name) {
  return el("table", { class: name ?? "plain" },
    el("thead", {}, el("tr", {}, titles.map((title) => el("th", {}, title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))));
}
