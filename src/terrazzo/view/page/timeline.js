// The bars of a step by rank and lane, over one clock.  Dragging moves it, keys and the wheel with Ctrl zoom.

import { el, svg, numberText } from "./dom.js";
import { addKeys } from "./keys.js";
import { ticksOf } from "./charts.js";

const BAR = 18, HEAD = 22, TOP = 24;
const STACKED = 5; // bars of a lane that overlap stand below one another, in at most so many lines
const CLOSEST = 1e-6; // of all time: a view is no smaller

// groups: {title, lanes: [{title, colour, spans: [{begin, end, label, about, backward}]}]}, where about() is a text
export function drawTimeline(groups, unit, onpick) {
  const place = el("div", { class: "timeline", tabindex: "0", role: "group", "aria-label": "timeline" });
  const packed = groups.map((group) => ({ title: group.title, lanes: group.lanes.map(stackedLane) }));
  let first = Infinity, end = 0;
  for (const { lanes } of packed) for (const { spans } of lanes) for (const span of spans) {
    first = Math.min(first, span.begin);
    end = Math.max(end, span.end);
  }
  if (first >= end) [first, end] = [0, 1];
  let view = [first, end], picked = null, drawn = 0;
  const gutter = () => (place.clientWidth < 600 ? 76 : 104);

  function draw() {
    const width = place.clientWidth;
    drawn = width;
    if (!width) return;
    const left = gutter();
    const xOf = (at) => left + ((at - view[0]) / (view[1] - view[0])) * (width - left);
    const bars = svg("g", {}), labels = svg("g", {});
    let y = TOP;
    const rules = [];
    for (const { title, lanes } of packed) {
      labels.append(svg("text", { class: "group", x: 2, y: y + 15 }, title));
      y += HEAD;
      for (const lane of lanes) {
        labels.append(svg("text", { class: "axis lane", x: 2, y: y + 13 }, lane.title));
        rules.push(y - 1);
        const free = [];
        for (const span of lane.spans) {
          if (span.end < view[0] || span.begin > view[1]) continue;
          const x = Math.max(xOf(span.begin), left), right = Math.min(xOf(span.end), width);
          if (right - (free[span.line] ?? -2) < 2 && span !== picked) continue; // behind the bar before it
          free[span.line] = right;
          const long = Math.max(right - x - 0.5, 0.75);
          const bar = svg("g", { class: `span${span.backward ? " backward" : ""}${span === picked ? " picked" : ""}`, onclick: () => pick(span) }, svg("title", {}, span.about()), svg("rect", { x, y: y + span.line * BAR, width: long, height: BAR - 2, rx: long > 6 ? 2 : 0, fill: lane.colour }));
          const letters = Math.floor((long - 6) / 6.4);
          if (letters >= 3) bar.append(svg("text", { x: x + 3, y: y + span.line * BAR + 12 }, span.label.length > letters ? `${span.label.slice(0, letters - 1)}…` : span.label));
          bars.append(bar);
        }
        y += lane.lines * BAR + 2;
      }
      y += 6;
    }
    const grid = svg("g", {});
    for (const at of ticksOf(view[0], view[1], width / 110)) {
      if (xOf(at) < left) continue;
      grid.append(svg("line", { x1: xOf(at), x2: xOf(at), y1: TOP - 6, y2: y, stroke: "var(--edge)" }),
        svg("text", { class: "axis tick", x: Math.min(xOf(at) + 3, width - 60), y: 12 }, `${numberText(at)} ${unit}`));
    }
    for (const at of rules) grid.append(svg("line", { x1: left, x2: width, y1: at, y2: at, stroke: "var(--soft)" }));
    place.replaceChildren(svg("svg", { width, height: y, role: "img" }, grid, bars, labels));
  }

  function pick(span) {
    picked = span;
    onpick(span.about());
    const long = view[1] - view[0];
    if (span.end < view[0] || span.begin > view[1]) show((span.begin + span.end - long) / 2, long);
    else draw();
  }

  function next(by) { // in the lane of the bar that is picked
    const lanes = packed.flatMap((group) => group.lanes).filter(({ spans }) => spans.length);
    const { spans } = lanes.find((lane) => lane.spans.includes(picked)) ?? lanes[0] ?? { spans: [] };
    const span = spans[spans.indexOf(picked) + by];
    if (span) pick(span);
  }

  function show(begin, length) {
    const long = Math.min(Math.max(length, end * CLOSEST), end - first);
    const from = Math.min(Math.max(begin, first), end - long);
    view = [from, from + long];
    draw();
  }
  const zoom = (factor, at = (view[0] + view[1]) / 2) => show(at - (at - view[0]) * factor, (view[1] - view[0]) * factor);
  const move = (part) => show(view[0] + part * (view[1] - view[0]), view[1] - view[0]);
  const all = () => show(first, end - first);
  addKeys("w +", "closer", () => zoom(0.6));
  addKeys("s -", "further away", () => zoom(1 / 0.6));
  addKeys("a ArrowLeft", "earlier", () => move(-0.2));
  addKeys("d ArrowRight", "later", () => move(0.2));
  addKeys("0", "the whole step", all);
  addKeys("n", "the next bar of the lane", () => next(1));
  addKeys("p", "the one before", () => next(-1));
  addKeys("f", "the bar that is picked, from near", () => picked && show(picked.begin - (picked.end - picked.begin), 3 * (picked.end - picked.begin)));

  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const width = place.clientWidth - gutter();
    const at = view[0] + ((event.clientX - place.getBoundingClientRect().left - gutter()) / width) * (view[1] - view[0]);
    if (event.shiftKey) move((event.deltaY || event.deltaX) / width);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  }, { passive: false });
  const fingers = new Map(); // by their numbers, where they are; two zoom
  place.addEventListener("pointerdown", (event) => fingers.set(event.pointerId, event.clientX));
  for (const kind of ["pointerup", "pointercancel", "pointerleave"]) place.addEventListener(kind, (event) => fingers.delete(event.pointerId));
  place.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined || before === event.clientX) return;
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    fingers.set(event.pointerId, event.clientX);
    if (others.length) zoom(Math.max(Math.abs(before - others[0]), 1) / Math.max(Math.abs(event.clientX - others[0]), 1));
    else move((before - event.clientX) / (place.clientWidth - gutter()));
  });
  new ResizeObserver(() => place.clientWidth !== drawn && draw()).observe(place);
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  return el("div", {}, el("div", { class: "tools" }, button("+", "closer", () => zoom(0.6)), button("−", "further away", () => zoom(1 / 0.6)), button("all", "the whole step", all),
    el("span", { class: "note" }, "drag to move, Ctrl and wheel or two fingers to zoom; keys: w a s d")), place);
}

function stackedLane({ title, colour, spans }) {
  const ends = [];
  const placed = [...spans].sort((a, b) => a.begin - b.begin).map((span) => {
    let line = ends.findIndex((end) => end <= span.begin);
    if (line < 0) line = Math.min(ends.length, STACKED - 1);
    ends[line] = span.end;
    return { ...span, line };
  });
  return { title, colour, spans: placed, lines: Math.max(ends.length, 1) };
}
