// What takes the room: the bytes of a module by dtype, by the modules in it, and its largest tensors.

import { el, bytesText, countText, facts, numberText, shapeText } from "./dom.js";

const DTYPES = { float32: "#4c78a8", bfloat16: "#e8a33d", float16: "#54a7a0", float64: "#2d4b73", int8: "#b56fb0", uint8: "#d58fb8", int64: "#8a8f98", int32: "#6f7680", bool: "#a3a8b0" };
const OTHER_DTYPES = ["#d1604d", "#7fae54", "#9d755d", "#d6b93c", "#7b68c4"]; // of dtypes such as float8_e4m3fn, by their names
const MODULES = 12; // modules
const LARGEST = 5;

function dtypeColour(dtype) {
  return DTYPES[dtype] ?? OTHER_DTYPES[[...dtype].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % OTHER_DTYPES.length];
}

function rowsUnder(node, rows, found = []) {
  if (node.row >= 0) found.push(rows[node.row]);
  for (const child of node.children.values()) rowsUnder(child, rows, found);
  return found;
}

function byDtype(rows) { // [dtype, {bytes, tensors}], the largest first
  const found = new Map();
  for (const { dtype, bytes } of rows) {
    if (dtype === null) continue;
    const sum = found.get(dtype) ?? { bytes: 0, tensors: 0 };
    found.set(dtype, { bytes: sum.bytes + bytes, tensors: sum.tensors + 1 });
  }
  return [...found].sort(([, a], [, b]) => b.bytes - a.bytes);
}

function stack(dtypes, whole) {
  return el("div", { class: "stack" }, dtypes.map(([dtype, { bytes }]) =>
    el("span", { style: `width:${(100 * bytes) / (whole || 1)}%;background:${dtypeColour(dtype)}`, title: `${dtype}: ${bytesText(bytes)}` })));
}

function pathOf(node) {
  return node.parent?.parent ? `${pathOf(node.parent)}.${node.label}` : node.label;
}

// tree: a TreeView, in which a click on a module opens it.
export function overview(tree, node) {
  for (let only = node; only?.children.size && only.row < 0; only = only.children.size === 1 ? [...only.children.values()][0] : null) node = only;
  const rows = rowsUnder(node, tree.rows);
  const dtypes = byDtype(rows);
  const elements = rows.reduce((sum, { shape }) => sum + (shape ?? [0]).reduce((product, size) => product * size, 1), 0);
  const share = (bytes) => `${((100 * bytes) / (node.bytes || 1)).toFixed(bytes && bytes < node.bytes / 100 ? 1 : 0)}%`;
  const modules = [...node.children.values()];
  if (!modules.every((each) => /^\d+$/.test(each.label))) modules.sort((a, b) => b.bytes - a.bytes);
  const most = modules.reduce((largest, each) => Math.max(largest, each.bytes), 0);
  const line = (name, bar, bytes, act) => el("button", { type: "button", onclick: act },
    el("span", { class: "name", title: name }, name), bar, el("span", { class: "size" }, `${bytesText(bytes)}, ${share(bytes)}`));
  const largest = rows.filter((row) => row.bytes).sort((a, b) => b.bytes - a.bytes).slice(0, LARGEST);
  const rest = modules.slice(MODULES);
  return el("div", { class: "overview" },
    el("h2", {}, pathOf(node) || "All values"),
    facts([["values", numberText(rows.length)], ["elements", numberText(elements)], ["size", bytesText(node.bytes)]]),
    stack(dtypes, node.bytes),
    el("div", { class: "legend" }, dtypes.map(([dtype, { bytes, tensors }]) => el("span", {},
      el("span", { class: "swatch", style: `background:${dtypeColour(dtype)}` }), `${dtype} ${bytesText(bytes)}, ${share(bytes)} `, el("span", { class: "note" }, countText(tensors, "tensor"))))),
    el("h3", {}, "By module"),
    el("div", { class: "shares modules" }, modules.slice(0, MODULES).map((each) =>
      line(each.label, stack(byDtype(rowsUnder(each, tree.rows)), most), each.bytes, () => tree.show(each)))),
    rest.length ? el("p", { class: "note" }, `and ${numberText(rest.length)} more, ${bytesText(rest.reduce((sum, each) => sum + each.bytes, 0))}`) : null,
    el("h3", {}, "The largest"),
    el("div", { class: "shares" }, largest.map((row) =>
      line(row.name.slice(pathOf(node) ? pathOf(node).length + 1 : 0) || row.name, el("span", { class: "note" }, `${row.dtype} ${shapeText(row.shape)}`), row.bytes, () => tree.show(nodeOf(tree.root, row.name))))));
}

function nodeOf(root, name) {
  let node = root;
  for (const part of name.split(".")) node = node.children.get(part) ?? node;
  return node;
}
