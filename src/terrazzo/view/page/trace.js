// The page of a step: a timeline per rank, memory against its bound, and what was sent.

import { el, bytesText, facts, numberText, runsText, table } from "./dom.js";
import { addChart, escaped } from "./charts.js";

const SHOWN = 4; // ranks, at first
const COLOURS = { compute: "#54a24b", waits: "#e45756", gathers: "#4c78a8", reductions: "#f58518", collectives: "#b279a2", other: "#8a8f98" };

export function tracePage(page, data) {
  const unit = data.planned ? "operation" : "ms";
  const numbers = data.ranks.map((each) => each.rank);
  const shown = new Set(numbers.slice(0, SHOWN));
  const charts = el("div", {});
  const said = el("p", { class: "said", role: "status" }, "Click a bar.");
  const draw = () => {
    const ranks = data.ranks.filter((each) => shown.has(each.rank));
    charts.replaceChildren();
    timeline(charts, data, ranks, unit, said);
    charts.append(said);
    memory(charts, ranks, unit);
  };
  const choice = numbers.length > 1 ? el("p", {}, "ranks ", numbers.map((rank) => el("label", {},
    el("input", { type: "checkbox", name: `rank-${rank}`, checked: shown.has(rank), onchange: (event) => {
      if (event.target.checked) shown.add(rank);
      else shown.delete(rank);
      draw();
    } }), ` ${rank} `))) : null;
  const first = data.ranks[0];
  page.append(
    el("h1", {}, data.title),
    facts([
      ["ranks", `${runsText(numbers)} of ${first.world}`],
      ["held", bytesText(first.held)],
      ["bound by report", bytesText(first.bound)],
      ["most at once", bytesText(Math.max(...data.ranks.map((each) => Math.max(...each.memory.map(([, bytes]) => bytes)))))],
      ["sent by a rank", bytesText(first.moved.reduce((sum, [, , , bytes]) => sum + bytes, 0))],
    ]),
    el("p", { class: "note" }, data.planned
      ? "A planned step: each operation has its number, not its time."
      : "Times are those of each rank's host: on an accelerator, work is queued at these times and runs later."),
    choice ?? "", charts,
    el("h3", {}, "Bytes sent by a rank, by module and mesh dim"), moved(first.moved));
  draw();
}

function timeline(place, data, ranks, unit, said) {
  if (!ranks.length) {
    place.append(el("p", { class: "note" }, "choose a rank"));
    return;
  }
  const lanes = ranks.flatMap((each) => data.lanes.map((lane) => `rank ${each.rank} ${lane}`));
  const traces = data.lanes.map((lane) => {
    const spans = ranks.flatMap((each) => each.spans.filter((span) => span[0] === lane).map((span) => ({ rank: each.rank, span })));
    return {
      type: "bar", orientation: "h", name: lane, marker: { color: COLOURS[lane], line: { width: 0.5, color: "#fff8" } },
      y: spans.map(({ rank }) => `rank ${rank} ${lane}`),
      base: spans.map(({ span }) => span[3]),
      x: spans.map(({ span }) => Math.max(span[4] - span[3], 0)),
      text: spans.map(({ rank, span }) => escaped(aboutSpan(rank, span, unit))),
      customdata: spans.map(({ rank, span }) => aboutSpan(rank, span, unit)),
      hoverinfo: "text", textposition: "none",
    };
  }).filter((trace) => trace.y.length);
  addChart(place, "timeline", traces, {
    height: 120 + 22 * lanes.length,
    x: { title: { text: unit } },
    y: { categoryorder: "array", categoryarray: [...lanes].reverse(), automargin: true },
  }, (point) => { said.textContent = point.customdata; });
}

function aboutSpan(rank, [, what, groups, begin, end, bytes, backward], unit) {
  const when = unit === "ms" ? `${numberText(begin)} to ${numberText(end)} ms` : `operations ${begin} to ${end}`;
  return `rank ${rank}: ${what} ${groups}, ${when}, ${backward ? "backward" : "forward"}${bytes ? `, ${bytesText(bytes)} sent` : ""}`;
}

function memory(place, ranks, unit) {
  if (!ranks.length) return;
  const last = Math.max(...ranks.map((each) => each.memory[each.memory.length - 1][0]));
  const bound = Math.max(...ranks.map((each) => each.bound));
  const traces = ranks.map((each) => ({
    type: "scatter", mode: "lines", name: `rank ${each.rank}`, line: { shape: "hv" },
    x: each.memory.map(([at]) => at), y: each.memory.map(([, bytes]) => bytes),
    text: each.memory.map(([, bytes]) => bytesText(bytes)), hoverinfo: "text+name",
  }));
  traces.push({ type: "scatter", mode: "lines", name: "bound by report", line: { dash: "dash", color: "#e45756" }, x: [0, last], y: [bound, bound], hoverinfo: "name" });
  addChart(place, "memory of parameters, gradients and buffers", traces, { x: { title: { text: unit } }, y: { rangemode: "tozero", title: { text: "bytes" } } });
}

function moved(rows) {
  const dims = [...new Set(rows.map(([, over]) => over))];
  const groups = [...new Set(rows.map(([group]) => group))];
  if (!rows.length) return el("p", { class: "note" }, "nothing was sent: there is one rank");
  const sum = (keep) => rows.filter(keep).reduce((total, [, , , bytes]) => total + bytes, 0);
  const kinds = [...new Set(rows.map(([, , kind]) => kind))];
  const lines = groups.map((group) => [group,
    ...kinds.map((kind) => bytesText(sum((row) => row[0] === group && row[2] === kind) || null)),
    ...dims.map((dim) => bytesText(sum((row) => row[0] === group && row[1] === dim) || null))]);
  const total = ["all", ...kinds.map((kind) => bytesText(sum((row) => row[2] === kind))), ...dims.map((dim) => bytesText(sum((row) => row[1] === dim)))];
  return el("div", { class: "scroll" }, table(["module", ...kinds, ...dims.map((dim) => `over ${dim}`)], [...lines, total], "moved"));
}
