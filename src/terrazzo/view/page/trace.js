// The page of a step: a timeline per rank, memory against its bound, and what was sent; or of several steps, compared.

import { el, bytesText, facts, numberText, runsText, table } from "./dom.js";
import { addChart, seriesColour } from "./charts.js";
import { drawTimeline } from "./timeline.js";

const SHOWN = 4; // ranks, at first
const DIFFERENCES = 20; // of modules, the largest
const COLOURS = { compute: "#8fcb86", waits: "#f0908d", gathers: "#8db4e2", reductions: "#f5b56e", collectives: "#d0a6d0", other: "#c0c5cc" };

export function tracePage(page, data) {
  const unit = data.planned ? "operation" : "ms";
  const numbers = [...new Set(data.ranks.map((each) => each.rank))].sort((a, b) => a - b);
  const shown = new Set(numbers.slice(0, SHOWN));
  const charts = el("div", {});
  const draw = () => {
    const ranks = numbers.filter((rank) => shown.has(rank)).flatMap((rank) => data.ranks.filter((each) => each.rank === rank));
    charts.replaceChildren();
    if (!ranks.length) {
      charts.append(el("p", { class: "note" }, "choose a rank"));
      return;
    }
    const said = el("p", { class: "said", role: "status" }, "Click a bar.");
    charts.append(el("section", { class: "card" }, el("h3", {}, "Timeline"), drawTimeline(groupsOf(data, ranks, unit), data.planned ? "" : "ms", (text) => { said.textContent = text; }), said));
    charts.append(el("div", { class: "beside" },
      el("section", { class: "card times" }, el("h3", {}, data.steps.length > 1 ? "The steps compared" : `Time by lane, in ${unit}${data.planned ? "s" : ""}`), times(data, ranks)),
      data.steps.length > 1 ? el("section", { class: "card modules" }, el("h3", {}, "What differs most, by module"), byModule(data, ranks)) : null));
    const memoryCard = el("section", { class: "card" });
    charts.append(memoryCard);
    memory(memoryCard, data, ranks, unit);
  };
  const choice = numbers.length > 1 ? el("p", { class: "tools" }, "ranks ", numbers.map((rank) => el("label", {},
    el("input", { type: "checkbox", name: `rank-${rank}`, checked: shown.has(rank), onchange: (event) => {
      if (event.target.checked) shown.add(rank);
      else shown.delete(rank);
      draw();
    } }), ` ${rank}`))) : null;
  page.append(
    el("h1", {}, data.title),
    ...data.steps.map((name, step) => {
      const own = data.ranks.filter((each) => each.step === step);
      return facts([
        [data.steps.length > 1 ? `${letter(step)}:` : "", data.steps.length > 1 ? name : ""],
        ["ranks", `${runsText(own.map((each) => each.rank))} of ${own[0].world}`],
        ["took", data.planned ? null : `${Math.max(...own.map(length)).toPrecision(4)} ms`],
        ["held", bytesText(own[0].held)],
        ["bound by report", bytesText(own[0].bound)],
        ["most at once", bytesText(Math.max(...own.map(most)))],
        ["sent by a rank", bytesText(sent(own[0]))],
      ]);
    }),
    el("p", { class: "note" }, data.planned
      ? "A planned step: each operation has its number, not its time."
      : "Times are those of each rank's host: on an accelerator, work is queued at these times and runs later."),
    choice ?? "", charts,
    el("div", { class: "beside" }, data.steps.map((_, step) => el("section", { class: "card" }, el("h3", {}, `Bytes sent by a rank, by module and mesh dim${data.steps.length > 1 ? `: ${letter(step)}` : ""}`),
      moved(data.ranks.find((each) => each.step === step).moved)))));
  draw();
}

function letter(step) {
  return String.fromCharCode(65 + (step % 26));
}

function most(each) {
  return each.memory.reduce((found, [, bytes]) => Math.max(found, bytes), 0);
}

function sent(each) {
  return each.moved.reduce((sum, [, , , bytes]) => sum + bytes, 0);
}

function length(each) {
  return each.spans.reduce((last, span) => Math.max(last, span[4]), 0) - each.spans.reduce((first, span) => Math.min(first, span[3]), Infinity);
}

function titleOf(data, each) {
  return data.steps.length > 1 ? `rank ${each.rank}, ${letter(each.step)}` : `rank ${each.rank}`;
}

function groupsOf(data, ranks, unit) {
  return ranks.map((each) => ({
    title: titleOf(data, each),
    lanes: data.lanes.map((lane) => ({
      title: lane, colour: COLOURS[lane],
      spans: each.spans.filter((span) => span[0] === lane).map((span) => ({
        begin: span[3], end: span[4], backward: span[6], label: lane === "compute" ? span[2] : `${span[1]} ${span[2]}`, about: () => `${titleOf(data, each)}: ${aboutSpan(span, unit)}`,
      })),
    })),
  }));
}

function aboutSpan([, what, groups, begin, end, bytes, backward], unit) {
  const when = unit === "ms" ? `${numberText(begin)} to ${numberText(end)} ms (${numberText(end - begin)} ms)` : `operations ${begin} to ${end}`;
  return `${what} ${groups}, ${when}, ${backward ? "backward" : "forward"}${bytes ? `, ${bytesText(bytes)} sent` : ""}`;
}

// How long some of these bars last, each moment counted once.
function covered(spans) {
  let sum = 0, last = -Infinity;
  for (const [, , , begin, end] of [...spans].sort((a, b) => a[3] - b[3])) {
    sum += Math.max(0, end - Math.max(begin, last));
    last = Math.max(last, end);
  }
  return sum;
}

// Of each step, the mean over the ranks that are shown.
function means(data, ranks, numberOf) {
  return data.steps.map((_, step) => {
    const own = ranks.filter((each) => each.step === step);
    return own.length ? own.reduce((sum, each) => sum + numberOf(each), 0) / own.length : null;
  });
}

function compared(name, found, text) { // a row, with what changed against the first step
  const changes = found.slice(1).map((value) => {
    if (value === null || found[0] === null) return "";
    const by = value - found[0];
    const sign = by > 0 ? "+" : by < 0 ? "−" : "";
    const part = found[0] ? ` (${sign}${Math.abs((100 * by) / found[0]).toFixed(0)}%)` : "";
    return el("span", { class: by > 0.02 * found[0] ? "worse" : by < -0.02 * found[0] ? "better" : null }, `${sign}${text(Math.abs(by))}${part}`);
  });
  return [name, ...found.map((value) => (value === null ? "" : text(value))), ...changes];
}

function headings(data, first) {
  if (data.steps.length === 1) return [first, "mean of the ranks"];
  return [first, ...data.steps.map((_, step) => letter(step)), ...data.steps.slice(1).map((_, step) => `${letter(step + 1)} against A`)];
}

function times(data, ranks) {
  const time = (value) => (data.planned ? numberText(value) : `${value.toPrecision(3)} ms`);
  const rows = [compared("whole step", means(data, ranks, length), time)];
  for (const lane of data.lanes) rows.push(compared(lane, means(data, ranks, (each) => covered(each.spans.filter((span) => span[0] === lane))), time));
  if (data.steps.length > 1) rows.push(compared("memory, at most", means(data, ranks, most), bytesText), compared("sent", means(data, ranks, sent), bytesText));
  return el("div", { class: "scroll" }, table(headings(data, ""), rows));
}

function byModule(data, ranks) {
  const sums = ranks.map((each) => {
    const found = new Map();
    for (const [, what, groups, begin, end] of each.spans) found.set(`${what} ${groups}`, (found.get(`${what} ${groups}`) ?? 0) + end - begin);
    return found;
  });
  const names = new Set(sums.flatMap((each) => [...each.keys()]));
  const rows = [...names].map((name) => [name, means(data, ranks, (each) => sums[ranks.indexOf(each)].get(name) ?? 0)]);
  const far = ([, found]) => found.reduce((largest, value) => Math.max(largest, Math.abs((value ?? 0) - (found[0] ?? 0))), 0);
  rows.sort((a, b) => far(b) - far(a));
  const time = (value) => (data.planned ? numberText(value) : `${value.toPrecision(3)} ms`);
  return el("div", { class: "scroll" }, table(headings(data, ""), rows.slice(0, DIFFERENCES).map(([name, found]) => compared(name, found, time))));
}

function memory(place, data, ranks, unit) {
  const last = Math.max(...ranks.map((each) => each.memory[each.memory.length - 1][0]));
  const series = ranks.map((each, number) => ({
    name: titleOf(data, each), shape: "steps", colour: seriesColour(number), dash: each.step ? "5 3" : null,
    points: each.memory.map(([at, bytes]) => [at, bytes, () => `${titleOf(data, each)}: ${bytesText(bytes)} at ${numberText(at)} ${unit}`]),
  }));
  data.steps.forEach((_, step) => {
    const bound = Math.max(...data.ranks.filter((each) => each.step === step).map((each) => each.bound));
    const name = data.steps.length > 1 ? `bound by report, ${letter(step)}` : "bound by report";
    series.push({ name, colour: "#e45756", dash: step ? "2 3" : "6 4", points: [0, last].map((at) => [at, bound, () => `${name}: ${bytesText(bound)}`]) });
  });
  addChart(place, "memory of parameters, gradients and buffers", series, { x: unit, bytes: true, zero: true });
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
