// The page of two checkpoints: what differs, by how much.

import { el, facts, numberText } from "./dom.js";
import { TreeView } from "./tree.js";
import { askButton, asked, heading, showStatistics, showValue } from "./values.js";

export function diffPage(page, data) {
  const rows = data.rows.map((row) => ({ ...row, note: shortNote(row, data) }));
  const order = el("select", { "aria-label": "order" }, ["by name", "by largest difference", "by share of elements"].map((text) => el("option", {}, text)));
  const details = el("section", { class: "details" }, el("p", { class: "note" }, "Click a name."));
  const place = el("div", { class: "columns" });
  const build = () => {
    const sorted = [...rows];
    if (order.selectedIndex === 1) sorted.sort((a, b) => far(b) - far(a));
    if (order.selectedIndex === 2) sorted.sort((a, b) => share(b) - share(a));
    const tree = new TreeView(sorted, (row) => details.replaceChildren(...differenceDetails(data, row)));
    if (order.selectedIndex > 0) tree.root = flat(tree);
    place.replaceChildren(tree.element, details);
    tree.refresh();
  };
  order.addEventListener("change", build);
  page.append(
    el("h1", {}, data.title),
    facts([
      ["differ", numberText(data.rows.filter((row) => row.in[0] && row.in[1]).length)],
      ["equal", numberText(data.equal)],
      [`only in ${data.titles[0]}`, numberText(data.rows.filter((row) => !row.in[1]).length)],
      [`only in ${data.titles[1]}`, numberText(data.rows.filter((row) => !row.in[0]).length)],
      ["tolerance", data.tolerance || null],
    ]),
    data.rows.length ? el("p", {}, el("label", {}, "order ", order)) : el("p", { class: "note" }, "no difference"));
  if (!data.rows.length) return;
  page.append(place);
  build();
}

// In another order than that of names, names do not form a tree.
function flat(tree) {
  const children = new Map(tree.rows.map((row, index) => [index, { label: row.name, depth: 1, children: new Map(), row: index, values: 1, bytes: row.bytes ?? 0, open: false }]));
  return { ...tree.root, children };
}

function far(row) {
  return row.largest === null ? -1 : Number(row.largest === "inf" ? Infinity : row.largest === "nan" ? -1 : row.largest);
}

function share(row) {
  return row.elements ? row.differing / row.elements : -1;
}

function shortNote(row, data) {
  if (!row.in[1]) return `only in ${data.titles[0]}`;
  if (!row.in[0]) return `only in ${data.titles[1]}`;
  if (row.differing === null) return row.what;
  return `${(100 * share(row)).toPrecision(3)}%, ${row.largest === "nan" ? "nan in one" : `up to ${typeof row.largest === "number" ? Number(row.largest.toPrecision(3)) : row.largest}`}`;
}

function differenceDetails(data, row) {
  const parts = [...heading(row.name, row), el("p", { class: "said" }, row.what)];
  if (!data.served) return parts;
  const [ask, show, label] = row.dtype === null ? ["value", showValue, "Value"] : ["statistics", showStatistics, "Statistics"];
  data.titles.forEach((title, of) => {
    if (row.in[of]) parts.push(askButton(`${label} in ${title}`, () => asked(ask, row.name, of), show));
  });
  return parts;
}
