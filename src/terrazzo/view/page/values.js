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
  const width = found.edges.slice(1).map((edge, i) => edge - found.edges[i] || 1);
  const middle = found.edges.slice(0, -1).map((edge, i) => (width[i] === 1 && edge === found.edges[i + 1] ? edge : edge + width[i] / 2));
  const text = found.counts.map((count, i) => `${numberText(found.edges[i])} to ${numberText(found.edges[i + 1])}: ${countText(count, "value")}`);
  addChart(place, "histogram", [{ type: "bar", x: middle, y: found.counts, width, text, hoverinfo: "text", textposition: "none", marker: { color: "#4c78a8" } }],
    { x: { title: { text: "value" } }, y: { title: { text: "elements" } } });
}

export function showValue(place, found) {
  place.append(el("p", { class: "note" }, found.longer ? `${found.type}, the beginning of it` : found.type), el("pre", {}, found.text));
}

// How the parts of a tensor were saved: by whom, or in which file.
export function savedParts(data, kind, owner) {
  if (!kind.cut) return el("p", { class: "note" }, `${countText(kind.parts, "part")}, which are too many to list`);
  const boxes = kind.cut.boxes ?? boxesOfSteps(kind.shape, kind.cut.steps);
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

// A form: a mesh and placements, and what its ranks would hold.
export function onMesh(shape, itemsize, mesh, placements) {
  const meshBox = el("input", { name: "mesh", value: mesh, "aria-label": "mesh", size: 20 });
  const placementsBox = el("input", { name: "placements", value: placements, "aria-label": "placements", size: 20 });
  const place = el("div", { class: "sketch" });
  const draw = () => {
    try {
      const dims = parseMesh(meshBox.value);
      const parsed = parsePlacements(placementsBox.value, dims.length, shape.length);
      const boxes = boxesOfMesh(shape, dims, parsed);
      const grid = gridOf(shape, boxes);
      const counts = boxes.map(([, , lengths]) => lengths.reduce((product, length) => product * length, 1));
      const idle = boxes.filter((_, rank) => counts[rank] === 0).map(([rank]) => rank);
      const most = counts.reduce((a, b) => Math.max(a, b), 0);
      const least = counts.reduce((a, b) => Math.min(a, b), most);
      const size = (count) => (itemsize ? bytesText(count * itemsize) : countText(count, "element"));
      place.replaceChildren(
        facts([
          ["ranks", boxes.length],
          ["per rank", least === most ? size(most) : `${size(least)} to ${size(most)}`],
          ["distinct parts", grid.holders.length],
          ["nothing on", idle.length ? runsText(idle) : null],
          ["terms", parsed.some((each) => each.text.startsWith("P")) ? "ranks of a part hold terms, to be reduced" : null],
        ]),
        drawHeld(grid, dims, boxes.map(([rank]) => rank), itemsize));
    } catch (error) {
      place.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
  };
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); draw(); } },
    el("label", {}, "mesh ", meshBox), " ", el("label", {}, "placements ", placementsBox), " ", el("button", {}, "draw"));
  if (mesh) draw();
  return el("div", {}, form, place);
}

export function heading(name, kind) {
  return [el("h2", { class: "name" }, name), facts(kind.dtype === null ? [["type", "object"]] : [
    ["dtype", kind.dtype], ["shape", shapeText(kind.shape)], ["size", bytesText(kind.bytes)], ["parts", kind.parts]])];
}
