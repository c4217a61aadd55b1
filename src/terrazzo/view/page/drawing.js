// Drawings of grids and meshes.  Cells with the same holders have one colour; a click says what a cell or a rank has.

import { el, svg, runsText, spanText, bytesText, countText } from "./dom.js";
import { coordinateOf } from "./grid.js";
import { addKeys } from "./keys.js";

const MOST_CELLS = 16384;
const WRAPPED = 32; // parts of a dim that stand in one line, where only one dim is cut

// A hue for each cell, that of its holders: few are far apart, many are a spectrum in their order.
function huesOf(holders) {
  const numbers = new Map();
  for (const each of holders) if (!numbers.has(each.join())) numbers.set(each.join(), numbers.size);
  return holders.map((each) => Math.round(205 + (330 * numbers.get(each.join())) / numbers.size) % 360);
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

// Extents of parts along a side, in pixels, as large as the parts are but never less than the least.
function extents(lengths, whole, least) {
  const size = lengths.reduce((sum, length) => sum + length, 0) || 1;
  return lengths.map((length) => Math.max(least, (whole * length) / size));
}

// Columns are the parts of the last dim, rows those of all others, so a cut is drawn along its own axis.
// options: who (holders -> text), over (dim -> the mesh dims that cut it), onpick (cell)
export function drawGrid(grid, options) {
  if (!grid.holders.length) return el("p", { class: "note" }, "a tensor without elements: nobody holds any");
  if (grid.holders.length > MOST_CELLS) return el("p", { class: "note" }, `${grid.holders.length} cells, which are too many to draw`);
  const last = grid.shape.length - 1;
  const lengthsOf = (dim) => grid.starts[dim].map((start, place) => (grid.starts[dim][place + 1] ?? grid.shape[dim]) - start);
  const titlesOf = (dim) => grid.starts[dim].map((start, place) => spanText(start, grid.starts[dim][place + 1] ?? grid.shape[dim]));
  const across = last < 0 ? [1] : lengthsOf(last);
  const cut = grid.starts.map((_, dim) => dim).filter((dim) => dim !== last && grid.starts[dim].length > 1);
  let down = [{ title: "", length: 1 }];
  for (const dim of cut) {
    const lengths = lengthsOf(dim);
    down = down.flatMap(({ title }) => titlesOf(dim).map((own, place) => ({ title: title ? `${title} × ${own}` : own, length: lengths[place] })));
  }
  const wrapped = !cut.length && across.length > WRAPPED; // one long row
  if (wrapped) down = titlesOf(last).filter((_, place) => place % WRAPPED === 0).map((title) => ({ title: `${title.split("-")[0]}…`, length: 1 }));
  const tops = wrapped || last < 0 ? [] : titlesOf(last);
  const lines = down.length;
  const least = lines > 128 ? 4 : lines > 40 ? 9 : lines > 20 ? 14 : 22;
  const flat = grid.shape.length < 2;
  const widths = wrapped ? Array(WRAPPED).fill(18) : extents(across, Math.min(across.length > 1 || flat ? 480 : 240, innerWidth - 170), 16);
  const heights = extents(down.map(({ length }) => length), flat ? 30 * lines : Math.min(Math.max(lines * 28, 90), 420), least);
  const axisOf = (dims) => dims.map((dim) => `dim ${dim}: ${grid.shape[dim]}${options.over?.(dim).length ? ` over ${options.over(dim).join(", ")}` : ""}`).join(" × ");
  const side = axisOf(grid.shape.map((_, dim) => dim).slice(0, -1));
  const left = (side ? 20 : 4) + 6.6 * Math.max(...down.map(({ title }) => title.length)) + 6;
  const top = last < 0 ? 4 : 34;
  const ends = (sizes, from) => sizes.reduce((found, size) => [...found, found[found.length - 1] + size], [from]);
  const xs = ends(widths, left), ys = ends(heights, top);
  const height = Math.max(ys[lines] + 2, side ? top + 6.4 * side.length : 0);
  const width = Math.max(xs[widths.length], left + 6.4 * axisOf(last < 0 ? [] : [last]).length + 14) + 2;
  const picture = svg("svg", { class: "grid", width, viewBox: `0 0 ${width} ${height}`, style: `min-width:${Math.round(0.75 * width)}px`, role: "img" });
  if (last >= 0) picture.append(svg("text", { class: "axis", x: left, y: 12 }, `${axisOf([last])} →`));
  if (side) picture.append(svg("text", { class: "axis", transform: `translate(12 ${top}) rotate(-90)`, "text-anchor": "end" }, `← ${side}`));
  let free = 0;
  down.forEach(({ title }, row) => { // titles that would cover others are left out
    const y = ys[row] + heights[row] / 2 + 4;
    if (y - 11 < free) return;
    free = y;
    picture.append(svg("text", { x: left - 6, y, "text-anchor": "end" }, title));
  });
  free = 0;
  tops.forEach((title, place) => {
    if (xs[place] < free) return;
    free = xs[place] + 6.8 * title.length + 6;
    picture.append(svg("text", { x: xs[place] + 1, y: 28 }, title));
  });
  const hues = huesOf(grid.holders);
  const columns = widths.length;
  grid.holders.forEach((holders, cell) => {
    const text = options.who(holders);
    const column = cell % columns, row = Math.floor(cell / columns);
    const [x, y, wide, tall] = [xs[column], ys[row], widths[column], heights[row]];
    const box = svg("g", { class: "cell", "data-cell": cell, style: `--hue:${hues[cell]}`, onclick: () => options.onpick(cell) },
      svg("title", {}, `${cellText(grid, cell)}: ${text}`),
      svg("rect", { x, y, width: wide - 1, height: Math.max(tall - 1, 1), rx: tall > 12 ? 2 : 0 }));
    if (6.8 * text.length < wide && tall > 13) box.append(svg("text", { x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, text));
    picture.append(box);
  });
  return el("div", { class: "scroll" }, picture);
}

// ranks: their numbers, row-major; hueOf: rank -> that of its cell, or undefined
export function drawMesh(mesh, ranks, hueOf, onpick) {
  const last = mesh[mesh.length - 1][1];
  const wrapped = mesh.length === 1 && last > WRAPPED;
  const columns = wrapped ? WRAPPED : last;
  const lines = Math.ceil(ranks.length / columns);
  const size = columns > 40 ? 18 : 32;
  const height = 22;
  const titles = Array.from({ length: lines }, (_, line) =>
    mesh.length === 1 ? (wrapped ? `${line * columns}…` : "") : coordinateOf(line * columns, mesh).slice(0, -1).map((index, m) => `${mesh[m][0]} ${index}`).join(", "));
  const left = 10 + 6.6 * Math.max(...titles.map((title) => title.length));
  const picture = svg("svg", { class: "mesh", width: left + columns * size + 2, height: 36 + lines * height, role: "img" });
  picture.append(svg("text", { class: "axis", x: left, y: 12 }, `${mesh[mesh.length - 1][0]} →`));
  if (size > 20 && !wrapped) for (let place = 0; place < columns; place += 1) picture.append(svg("text", { class: "axis", x: left + (place + 0.5) * size, y: 28, "text-anchor": "middle" }, String(place)));
  titles.forEach((title, line) => picture.append(svg("text", { x: left - 6, y: 34 + line * height + 15, "text-anchor": "end" }, title)));
  ranks.forEach((rank, position) => {
    const hue = hueOf(rank);
    const x = left + (position % columns) * size;
    const y = 34 + Math.floor(position / columns) * height;
    const box = svg("g", { class: hue === undefined ? "rank empty" : "rank", "data-rank": rank, style: `--hue:${hue ?? 0}`, onclick: () => onpick(rank) },
      svg("title", {}, `rank ${rank}`), svg("rect", { x, y, width: size - 2, height: height - 2, rx: 3 }));
    if (size > 20) box.append(svg("text", { x: x + size / 2 - 1, y: y + 14, "text-anchor": "middle" }, String(rank)));
    picture.append(box);
  });
  return el("div", { class: "scroll" }, picture);
}

// A tensor's cells above the mesh whose ranks hold them; a click in one shows the other.
// cut: for each mesh dim, the dim of the tensor that it cuts, or undefined.
export function drawHeld(grid, mesh, ranks, itemsize, cut) {
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
  let at = -1;
  const next = (by) => {
    at = (at + by + ranks.length) % ranks.length;
    pickRank(ranks[at]);
  };
  addKeys("n", "the next rank of the mesh", () => next(1));
  addKeys("p", "the rank before", () => next(at < 0 ? 0 : -1));
  const hues = huesOf(grid.holders);
  element.append(el("div", { class: "pair" },
    drawGrid(grid, { who: runsText, onpick: pickCell, over: (dim) => mesh.filter((_, m) => cut[m] === dim).map(([name]) => name) }),
    drawMesh(mesh, ranks, (rank) => hues[cellOf.get(rank)], pickRank)), said);
  return element;
}
