// The page of a checkpoint: its tree, and what the value or the module that was clicked has; at first, what takes the room.

import { el, bytesText, facts, numberText } from "./dom.js";
import { overview } from "./overview.js";
import { TreeView } from "./tree.js";
import { askButton, asked, heading, onMesh, savedBy, savedParts, showStatistics, showValue } from "./values.js";

export function checkpointPage(page, data) {
  const rows = data.names.map((name, i) => {
    const kind = data.kinds[data.kind[i]];
    return { name, dtype: kind.dtype, shape: kind.shape, bytes: kind.bytes, note: kind.parts > 1 ? `${kind.parts} parts` : null };
  });
  const details = el("section", { class: "details" });
  const show = (...parts) => {
    details.replaceChildren(...parts);
    details.scrollTop = 0;
  };
  const tree = new TreeView(rows,
    (row, index) => show(...valueDetails(data, row.name, index)), (node) => show(overview(tree, node)));
  show(overview(tree, tree.root));
  const about = data.about;
  page.append(
    el("h1", {}, data.title),
    facts([
      ["values", numberText(about.values)], ["size", bytesText(about.bytes)],
      ["saved by", about.ranks ? `${about.ranks} ${about.ranks === 1 ? "rank" : "ranks"}` : null],
      ["files", about.files], ["writer", about.writer],
      ["saved", about.created ? new Date(about.created * 1000).toLocaleString() : null],
    ]),
    el("div", { class: "columns" }, tree.element, details));
  tree.refresh();
}

const onYours = { mesh: "", placements: "" }; // of the value before, too

function valueDetails(data, name, index) {
  const kind = data.kinds[data.kind[index]];
  const parts = heading(name, kind).flat();
  if (kind.dtype === null) {
    parts.push(data.served ? askButton("Show the value", () => asked("value", name, 0), showValue)
      : el("p", { class: "note" }, "Values that are no tensors are shown by `terrazzo view --serve` and `terrazzo show`."));
    return parts;
  }
  if (data.served) parts.push(askButton("Statistics", () => asked("statistics", name, 0), showStatistics));
  const itemsize = kind.bytes / (kind.shape.reduce((product, size) => product * size, 1) || 1);
  parts.push(el("h3", {}, "As it was saved"), savedParts(data, kind, data.owner[index]));
  parts.push(el("h3", {}, "On a mesh of yours"), onMesh(kind.shape, itemsize, onYours, savedBy(data, kind, data.owner[index])));
  return parts;
}
