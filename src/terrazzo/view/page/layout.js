// The page of a layout: who holds what of one tensor, on ranks that may not exist.

import { el } from "./dom.js";
import { drawHeld } from "./drawing.js";
import { onMesh } from "./values.js";

export function layoutPage(page, data) {
  page.append(
    el("h1", {}, data.title),
    el("p", { class: "note" }, data.caption),
    el("section", { class: "card" }, drawHeld(data.grid, data.mesh, data.ranks, data.itemsize, data.cut)),
    el("section", { class: "card" }, el("h3", {}, "On another mesh"),
      onMesh(data.grid.shape, data.itemsize, { mesh: "", placements: data.placements.join(",") })));
}
