// One value of a checkpoint: what it is, how it was cut, how a mesh would cut it, and, when served, its numbers.

import { el, bytesText, countText, facts, numberText, runsText, shapeText, table } from "./dom.js";
import { boxesOfMesh, boxesOfSteps, gridOf, parseMesh, parsePlacements } from "./grid.js";
import { cellText, drawGrid, drawHeld } from "./drawing.js";
import { addChart } from "./charts.js";

const LISTED = 200; // parts that are written out

export async function asked(what, name, of) {
  const response = await fetch(`${what}?name=${encodeURIComponent(name)}&of=${of}`);
  const found = await response.json();
  if (found.error) throw new Error(found.error);
  return found;
}

// A button that asks the server, and shows what it says.
export function askButton(label, ask, show) {
  const place = el("div", { class: "asked" });
  const button = el("button", { type: "button", onclick: async () => {
    button.disabled = true;
    place.replaceChildren(el("p", { class: "note", role: "status" }, "reading…"));
    try {
      const found = await ask();
      place.replaceChildren();
      show(place, found);
    } catch (error) {
      place.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
    button.disabled = false;
  } }, label);
  return el("div", {}, button, place);
}

export function showStatistics(place, found) {
  const names = ["elements", "min", "max", "mean", "std", "zeros", "nan", "infinite"];
  place.append(facts(names.map((name) => [name, numberText(found[name])])));
  if (!found.counts.length) {
    place.append(el("p", { class: "note" }, "no finite values"));
    return;
  }
  const middles = found.counts.map((_, i) => found.edges[i] / 2 + found.edges[i + 1] / 2);
  const points = found.counts.map((count, i) => [middles[i], count, () => `${numberText(found.edges[i])} to ${numberText(found.edges[i + 1])}: ${countText(count, "value")}`]);
  addChart(place, "histogram", [{ name: "elements", shape: "bars", colour: "#4c78a8", points }], { x: "value", y: "elements", height: 220 });
}

export function showValue(place, found) {
  place.append(el("p", { class: "note" }, found.longer ? `${found.type}, the beginning of it` : found.type), el("pre", {}, found.text));
}

function partsOf(kind) { // [offsets, lengths], in the order of their owners
  return kind.cut.boxes ?? boxesOfSteps(kind.shape, kind.cut.steps);
}

// The parts of a tensor with the ranks that saved them; null if these are not known.
export function savedBy(data, kind, owner) {
  return kind.cut && data.by_rank && owner >= 0 ? partsOf(kind).map((box, part) => [data.owners[owner][part], ...box]) : null;
}

// How the parts of a tensor were saved: by whom, or in which file.
export function savedParts(data, kind, owner) {
  if (!kind.cut) return el("p", { class: "note" }, `${countText(kind.parts, "part")}, which are too many to list`);
  const boxes = partsOf(kind);
  const owners = owner >= 0 ? data.owners[owner] : null;
  const who = (part) => (owners ? (data.by_rank ? `rank ${owners[part]}` : data.files[owners[part]]) : `part ${part}`);
  const said = el("p", { class: "said", role: "status" }, "Click a part.");
  const about = (part) => {
    const [offsets, lengths] = boxes[part];
    const index = offsets.map((offset, dim) => `${offset}:${offset + lengths[dim]}`).join(", ");
    const file = owners ? data.files[owners[part]] : null;
    return `[${index}]${owners && data.by_rank ? `, saved by rank ${owners[part]}` : ""}${file ? `, in ${file}` : ""}`;
  };
  const grid = gridOf(kind.shape, boxes.map(([offsets, lengths], part) => [part, offsets, lengths]));
  if (grid) {
    const byOwner = owners ? { ...grid, holders: grid.holders.map((parts) => parts.map((part) => owners[part])) } : grid;
    const text = (holders) => (owners && data.by_rank ? runsText(holders) : owners ? holders.map((file) => data.files[file]).join(", ") : runsText(holders));
    const drawn = drawGrid(byOwner, { who: text, onpick: (cell) => {
      said.textContent = about(grid.holders[cell][0]);
      for (const each of drawn.querySelectorAll(".picked")) each.classList.remove("picked");
      drawn.querySelector(`[data-cell="${cell}"]`).classList.add("picked");
    } });
    const legend = owners && data.by_rank ? "Each part with the rank that saved it." : owners ? "Each part with its file." : "The parts, numbered.";
    return el("div", {}, el("p", { class: "note" }, legend), drawn, said);
  }
  const rows = boxes.slice(0, LISTED).map((_, part) => [who(part), about(part)]);
  return el("div", {}, el("p", { class: "note" }, "Its parts form no grid."), table(["part", "elements"], rows),
    boxes.length > LISTED ? el("p", { class: "note" }, `and ${countText(boxes.length - LISTED, "more part")}`) : null);
}

const MOST_TRIES = 1e5; // ranks whose boxes are computed to find placements

// All placements under which the ranks of a mesh hold these parts, [rank, offsets, lengths].
export function placementsOf(shape, mesh, parts) {
  const ranks = mesh.reduce((product, [, size]) => product * size, 1);
  const words = ["R", ...shape.map((_, dim) => `S(${dim})`)];
  if (ranks * words.length ** mesh.length > MOST_TRIES || parts.some(([rank]) => rank >= ranks)) return [];
  const distinct = (boxes) => new Set(boxes.filter(([, , lengths]) => !lengths.includes(0)).map(([, ...box]) => box.join(";"))).size;
  const found = [];
  for (let number = 0; number < words.length ** mesh.length; number += 1) {
    const placed = mesh.map((_, m) => words[Math.floor(number / words.length ** m) % words.length]);
    const boxes = boxesOfMesh(shape, mesh, parsePlacements(placed.join(","), mesh.length, shape.length));
    const same = parts.every(([rank, offsets, lengths]) => boxes[rank].slice(1).join(";") === [offsets, lengths].join(";"));
    if (same && distinct(boxes) === parts.length) found.push(placed.join(","));
  }
  return found;
}

// A form: a mesh and placements, and what its ranks would hold.
// asked: {mesh, placements}, which keeps what is written; parts: of placementsOf, for when there are no placements.
export function onMesh(shape, itemsize, asked, parts) {
  const box = (name, hint) => el("input", { name, value: asked[name], placeholder: hint, "aria-label": name, size: 16, oninput: (event) => { asked[name] = event.target.value; } });
  const meshBox = box("mesh", "dp=8,tp=2"), placementsBox = box("placements", parts ? "as saved" : "S(0),R");
  const place = el("div", { class: "sketch" });
  const draw = () => {
    try {
      const dims = parseMesh(meshBox.value);
      const words = placementsBox.value.trim();
      const fitting = words ? [words] : parts ? placementsOf(shape, dims, parts) : [];
      if (!fitting.length) throw new Error(parts ? "No placements on this mesh cut the tensor as it was saved: write some, as in S(0),R." : "Write placements, as in S(0),R.");
      const parsed = parsePlacements(fitting[0], dims.length, shape.length);
      const boxes = boxesOfMesh(shape, dims, parsed);
      const grid = gridOf(shape, boxes);
      const counts = boxes.map(([, , lengths]) => lengths.reduce((product, length) => product * length, 1));
      const idle = boxes.filter((_, rank) => counts[rank] === 0).map(([rank]) => rank);
      const most = counts.reduce((a, b) => Math.max(a, b), 0);
      const least = counts.reduce((a, b) => Math.min(a, b), most);
      const size = (count) => (itemsize ? bytesText(count * itemsize) : countText(count, "element"));
      place.replaceChildren(
        facts([
          ["placements", fitting.map((words) => words.split(",").map((word, m) => `${dims[m][0]}: ${word}`).join(", ")).join(" or ")],
          ["ranks", boxes.length],
          ["per rank", least === most ? size(most) : `${size(least)} to ${size(most)}`],
          ["distinct parts", grid.holders.length],
          ["nothing on", idle.length ? runsText(idle) : null],
          ["terms", parsed.some((each) => each.text.startsWith("P")) ? "ranks of a part hold terms, to be reduced" : null],
        ]),
        drawHeld(grid, dims, boxes.map(([rank]) => rank), itemsize, parsed.map(({ dim }) => dim)));
    } catch (error) {
      place.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
  };
  const form = el("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); draw(); } },
    el("label", {}, "mesh ", meshBox), el("label", {}, "placements ", placementsBox), el("button", {}, "draw"));
  if (asked.mesh) draw();
  return el("div", {}, form, place);
}

export function heading(name, kind) {
  return [el("h2", { class: "name" }, name), facts(kind.dtype === null ? [["type", "object"]] : [
    ["dtype", kind.dtype], ["shape", shapeText(kind.shape)], ["size", bytesText(kind.bytes)], ["parts", kind.parts]])];
}
