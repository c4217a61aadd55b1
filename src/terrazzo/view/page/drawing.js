// Drawings of grids and meshes.  Cells with the same holders have one colour; a click says what a cell or a rank has.

import { el, svg, runsText, spanText, bytesText, countText } from "./dom.js";
import { coordinateOf } from "./grid.js";

const MOST_CELLS = 16384;
const WRAPPED = 32; // parts of a dim that stand in one line, where only one dim is cut

export function hueOf(number) {
  return (number * 137) % 360; // the golden angle: neighbours differ
}

export function groupsOf(holders) {
  const numbers = new Map();
  return holders.map((each) => {
    const key = each.join();
    if (!numbers.has(key)) numbers.set(key, numbers.size);
    return numbers.get(key);
  });
}

export function cellText(grid, cell) { // the part of the tensor, as an index
  const spans = [];
  for (let dim = grid.shape.length - 1; dim >= 0; dim -= 1) {
    const starts = grid.starts[dim];
    const place = cell % starts.length;
    cell = Math.floor(cell / starts.length);
    spans.unshift(`${starts[place]}:${starts[place + 1] ?? grid.shape[dim]}`);
  }
  return `[${spans.join(", ")}]`;
}

// options: who (holders -> text), itemsize, onpick (cell)
export function drawGrid(grid, options) {
  if (!grid.holders.length) return el("p", { class: "note" }, "a tensor without elements: nobody holds any");
  if (grid.holders.length > MOST_CELLS) return el("p", { class: "note" }, `${grid.holders.length} cells, which are too many to draw`);
  const cut = grid.starts.map((_, dim) => dim).filter((dim) => grid.starts[dim].length > 1);
  const column = cut.pop();
  const titlesOf = (dim) => grid.starts[dim].map((start, place) => spanText(start, grid.starts[dim][place + 1] ?? grid.shape[dim]));
  const parts = column === undefined ? 1 : grid.starts[column].length;
  const wrapped = !cut.length && parts > WRAPPED;
  const columns = wrapped ? WRAPPED : parts;
  let rows = [""];
  for (const dim of cut) rows = rows.flatMap((title) => titlesOf(dim).map((own) => (title ? `${title} × ${own}` : own)));
  const tops = column === undefined || wrapped ? [] : titlesOf(column);
  if (wrapped) rows = titlesOf(column).filter((_, place) => place % WRAPPED === 0).map((title) => title.split("-")[0] + "…");
  const width = Math.max(14, Math.min(120, Math.floor(760 / columns)));
  const height = rows.length > 24 ? 16 : 26;
  const left = 12 + 7 * Math.max(...rows.map((title) => title.length));
  const top = tops.length ? 18 : 4;
  const groups = groupsOf(grid.holders);
  const picture = svg("svg", { class: "grid", width: left + columns * width + 2, height: top + rows.length * height + 2, role: "img" });
  rows.forEach((title, row) => picture.append(svg("text", { x: left - 6, y: top + row * height + height / 2 + 4, "text-anchor": "end" }, title)));
  tops.forEach((title, place) => {
    if (width >= 7 * title.length || place % Math.ceil((7 * title.length) / width) === 0) {
      picture.append(svg("text", { x: left + place * width + 2, y: 13 }, title));
    }
  });
  grid.holders.forEach((holders, cell) => {
    const text = options.who(holders);
    const x = left + (cell % columns) * width;
    const y = top + Math.floor(cell / columns) * height;
    const box = svg("g", { class: "cell", "data-cell": cell, onclick: () => options.onpick(cell) },
      svg("title", {}, `${cellText(grid, cell)}: ${text}`),
      svg("rect", { x, y, width: width - 1, height: height - 1, fill: `hsl(${hueOf(groups[cell])},60%,80%)` }));
    if (7 * text.length < width && height > 18) box.append(svg("text", { x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, text));
    picture.append(box);
  });
  return el("div", { class: "scroll" }, picture);
}

// ranks: their numbers, row-major; cellOf: rank -> cell or undefined
export function drawMesh(mesh, ranks, cellOf, groups, onpick) {
  const last = mesh[mesh.length - 1][1];
  const wrapped = mesh.length === 1 && last > WRAPPED;
  const columns = wrapped ? WRAPPED : last;
  const lines = Math.ceil(ranks.length / columns);
  const size = columns > 40 ? 18 : 30;
  const height = 22;
  const titles = Array.from({ length: lines }, (_, line) =>
    mesh.length === 1 ? (wrapped ? `${line * columns}…` : "") : coordinateOf(line * columns, mesh).slice(0, -1).map((index, m) => `${mesh[m][0]} ${index}`).join(", "));
  const left = 12 + 7 * Math.max(...titles.map((title) => title.length));
  const picture = svg("svg", { class: "mesh", width: left + columns * size + 2, height: 20 + lines * height, role: "img" });
  picture.append(svg("text", { x: left, y: 13 }, `${mesh[mesh.length - 1][0]} →`));
  titles.forEach((title, line) => picture.append(svg("text", { x: left - 6, y: 20 + line * height + 14, "text-anchor": "end" }, title)));
  ranks.forEach((rank, position) => {
    const cell = cellOf(rank);
    const x = left + (position % columns) * size;
    const y = 20 + Math.floor(position / columns) * height;
    const fill = cell === undefined ? "transparent" : `hsl(${hueOf(groups[cell])},60%,80%)`;
    const box = svg("g", { class: cell === undefined ? "rank empty" : "rank", "data-rank": rank, onclick: () => onpick(rank) },
      svg("title", {}, `rank ${rank}`), svg("rect", { x, y, width: size - 1, height: height - 1, fill }));
    if (size > 20) box.append(svg("text", { x: x + size / 2, y: y + 15, "text-anchor": "middle" }, String(rank)));
    picture.append(box);
  });
  return el("div", { class: "scroll" }, picture);
}

// A tensor's cells above the mesh whose ranks hold them; a click in one shows the other.
export function drawHeld(grid, mesh, ranks, itemsize) {
  const said = el("p", { class: "said", role: "status" }, "Click a part of the tensor, or a rank.");
  const cellOf = new Map();
  grid.holders.forEach((holders, cell) => holders.forEach((rank) => cellOf.set(rank, cell)));
  const element = el("div", { class: "held" });
  const elements = (cell) => grid.shape.reduceRight((state, size, dim) => {
    const starts = grid.starts[dim];
    const place = state.rest % starts.length;
    return { rest: Math.floor(state.rest / starts.length), count: state.count * ((starts[place + 1] ?? size) - starts[place]) };
  }, { rest: cell, count: 1 }).count;
  const sizeText = (cell) => countText(elements(cell), "element") + (itemsize ? `, ${bytesText(elements(cell) * itemsize)}` : "");
  const mark = (cell, rankNumbers) => {
    for (const each of element.querySelectorAll(".picked")) each.classList.remove("picked");
    element.querySelector(`[data-cell="${cell}"]`)?.classList.add("picked");
    for (const rank of rankNumbers) element.querySelector(`[data-rank="${rank}"]`)?.classList.add("picked");
  };
  const pickCell = (cell) => {
    said.textContent = `${cellText(grid, cell)}: ${sizeText(cell)}, on ${grid.holders[cell].length === 1 ? "rank" : "ranks"} ${runsText(grid.holders[cell])}`;
    mark(cell, grid.holders[cell]);
  };
  const pickRank = (rank) => {
    const cell = cellOf.get(rank);
    const where = coordinateOf(ranks.indexOf(rank), mesh).map((index, m) => `${mesh[m][0]} ${index}`).join(", ");
    said.textContent = `rank ${rank} (${where}) holds ${cell === undefined ? "nothing" : `${cellText(grid, cell)}: ${sizeText(cell)}`}`;
    mark(cell, [rank]);
  };
  element.append(
    drawGrid(grid, { who: runsText, onpick: pickCell }),
    said,
    drawMesh(mesh, ranks, (rank) => cellOf.get(rank), groupsOf(grid.holders), pickRank));
  return element;
}
