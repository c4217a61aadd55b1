// Charts over two axes: lines, steps, points and bars, marks across them, and what is under the pointer.
// Dragging across a chart shows that part, a double click all of it; a click in the legend hides a series.

import { el, svg, bytesText, numberText } from "./dom.js";

const SERIES = ["#4c78a8", "#e8a33d", "#54a24b", "#b279a2", "#d1604d", "#54a7a0", "#9d755d", "#8a8f98"];
const MARGIN_LEFT = 62, MARGIN_RIGHT = 14, MARGIN_TOP = 20, MARGIN_BOTTOM = 38;
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]; // between the ticks of a clock

export function seriesColour(number) {
  return SERIES[number % SERIES.length];
}

// Numbers between two, at round distances.
export function ticksOf(least, most, count, clock) {
  const rough = (most - least) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const days = Math.ceil(rough / 86400) * 86400;
  const step = clock && rough > 0.5 ? (SECONDS.find((each) => each >= rough) ?? days) : power * [1, 2, 5, 10].find((each) => power * each >= rough * 0.999);
  const found = [];
  for (let number = Math.ceil(least / step - 1e-9); number * step <= most + step * 1e-9; number += 1) found.push(Number((number * step).toPrecision(12)));
  return found;
}

function clockText(seconds, span) {
  const date = new Date(seconds * 1000);
  if (span > 2 * 86400) return date.toLocaleDateString();
  if (span < 8) return date.toLocaleTimeString([], { minute: "2-digit", second: "2-digit", fractionalSecondDigits: 1 });
  return date.toLocaleTimeString([], span > 600 ? { hour: "2-digit", minute: "2-digit" } : {});
}

// series: {name, colour, points: [[x, y, () => text]], shape: "line", "steps", "points" or "bars", dash}; a y of null is a gap.
// options: {x, y, height, clock, bytes, zero, smooth, marks: [{x, colour, dash, text}], onpick (text)}
export function addChart(parent, title, series, options) {
  const place = el("div", { class: "chart", "data-title": title });
  const hidden = new Set();
  const every = series.flatMap(({ points }) => points);
  let shown = null; // the part along x; null: all
  let drawn = 0; // the width
  let smooth = 0; // the share that a point has of those before it
  const draw = () => {
    drawn = place.clientWidth;
    if (drawn) place.replaceChildren(...picture(drawn, options.height ?? 260));
  };

  function bounds() {
    const visible = series.filter((_, number) => !hidden.has(number)).flatMap(({ points, shape }) => points.map(([x, y]) => [x, y, shape]));
    const xs = shown ?? spread(every.map(([x]) => x), series.some(({ shape }) => shape === "points" || shape === "bars") ? 0.02 : 0);
    const within = visible.filter(([x, y]) => y !== null && x >= xs[0] && x <= xs[1]);
    const bars = visible.some(([, , shape]) => shape === "bars");
    const ys = spread([...within.map(([, y]) => y), ...(options.zero || bars ? [0] : [])], 0.06);
    return { xs, ys: (options.zero || bars) && !within.some(([, y]) => y < 0) ? [0, ys[1]] : ys };
  }

  function picture(width, height) {
    const { xs, ys } = bounds();
    const right = width - MARGIN_RIGHT, bottom = height - MARGIN_BOTTOM;
    const xOf = (x) => MARGIN_LEFT + ((x - xs[0]) / (xs[1] - xs[0])) * (right - MARGIN_LEFT);
    const yOf = (y) => bottom - ((y - ys[0]) / (ys[1] - ys[0])) * (bottom - MARGIN_TOP);
    const found = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
    for (const y of ticksOf(ys[0], ys[1], height / 55)) {
      found.append(svg("line", { class: "line", x1: MARGIN_LEFT, x2: right, y1: yOf(y), y2: yOf(y) }),
        svg("text", { class: "axis", x: MARGIN_LEFT - 6, y: yOf(y) + 4, "text-anchor": "end" }, options.bytes ? bytesText(y) : numberText(y)));
    }
    for (const x of ticksOf(xs[0], xs[1], width / (options.clock ? 110 : 90), options.clock)) {
      found.append(svg("text", { class: "axis", x: xOf(x), y: bottom + 15, "text-anchor": "middle" }, options.clock ? clockText(x, xs[1] - xs[0]) : numberText(x)));
    }
    found.append(svg("text", { class: "axis", x: right, y: height - 6, "text-anchor": "end" }, options.x), svg("text", { class: "axis", x: 2, y: 11 }, options.y ?? ""));
    const inside = svg("svg", { x: MARGIN_LEFT, y: 0, width: right - MARGIN_LEFT, height: bottom + 4, viewBox: `${MARGIN_LEFT} 0 ${right - MARGIN_LEFT} ${bottom + 4}` });
    for (const mark of options.marks ?? []) {
      inside.append(svg("line", { class: "mark", x1: xOf(mark.x), x2: xOf(mark.x), y1: MARGIN_TOP, y2: bottom, stroke: mark.colour, "stroke-dasharray": mark.dash }, svg("title", {}, mark.text ?? "")));
    }
    series.forEach((each, number) => {
      if (hidden.has(number)) return;
      const group = drawnSeries(each, xOf, yOf, bottom, right - MARGIN_LEFT);
      inside.append(group);
      if (!smooth) return;
      group.setAttribute("opacity", 0.3);
      inside.append(drawnSeries({ ...each, points: smoothed(each.points, smooth) }, xOf, yOf, bottom, right - MARGIN_LEFT));
    });
    const dot = svg("circle", { r: 4, fill: "none", stroke: "currentColor", "stroke-width": 2, visibility: "hidden" });
    const drag = svg("rect", { y: MARGIN_TOP, height: bottom - MARGIN_TOP, fill: "var(--picked)", visibility: "hidden" });
    inside.append(drag, dot);
    found.append(inside);
    const tip = el("div", { class: "tip", hidden: true });
    const seen = series.flatMap(({ points }, number) => (hidden.has(number) ? [] : points.filter(([, y]) => y !== null).map(([x, y, text]) => ({ x: xOf(x), y: yOf(y), text }))));
    const nearest = (x, y) => seen.reduce((best, each) => {
      const far = Math.hypot(each.x - x, (each.y - y) / 3);
      return far < best.far ? { far, each } : best;
    }, { far: 60, each: null }).each;
    let from = null;
    const at = (event) => [event.clientX - found.getBoundingClientRect().left, event.clientY - found.getBoundingClientRect().top];
    const valueAt = (x) => xs[0] + ((Math.min(Math.max(x, MARGIN_LEFT), right) - MARGIN_LEFT) / (right - MARGIN_LEFT)) * (xs[1] - xs[0]);
    found.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (from !== null && event.pointerType === "mouse" && Math.abs(x - from) > 4) {
        drag.setAttribute("visibility", "visible");
        drag.setAttribute("x", Math.min(x, from));
        drag.setAttribute("width", Math.abs(x - from));
      }
      const near = nearest(x, y);
      tip.hidden = !near;
      dot.setAttribute("visibility", near ? "visible" : "hidden");
      if (!near) return;
      dot.setAttribute("cx", near.x);
      dot.setAttribute("cy", near.y);
      tip.textContent = near.text();
      tip.style.left = `${Math.max(0, Math.min(near.x + 10, width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${Math.max(0, near.y - tip.offsetHeight - 8)}px`;
    });
    found.addEventListener("pointerleave", () => {
      from = null;
      tip.hidden = true;
      dot.setAttribute("visibility", "hidden");
      drag.setAttribute("visibility", "hidden");
    });
    found.addEventListener("pointerdown", (event) => { [from] = at(event); });
    found.addEventListener("pointerup", (event) => {
      const [x, y] = at(event);
      const begun = from;
      from = null;
      if (begun !== null && event.pointerType === "mouse" && Math.abs(x - begun) > 4) {
        shown = [valueAt(Math.min(x, begun)), valueAt(Math.max(x, begun))];
        draw();
      } else {
        const near = nearest(x, y);
        if (near) options.onpick?.(near.text());
      }
    });
    found.addEventListener("dblclick", () => {
      shown = null;
      draw();
    });
    return [found, tip, ...(series.length > 1 ? [legend()] : [])];
  }

  function legend() {
    const names = [...new Set(series.map(({ name }) => name))];
    return el("div", { class: "legend" }, names.map((name) => {
      const numbers = series.flatMap((each, number) => (each.name === name ? [number] : []));
      return el("button", { type: "button", class: hidden.has(numbers[0]) ? "off" : null, "aria-pressed": String(!hidden.has(numbers[0])), onclick: () => {
        for (const number of numbers) if (!hidden.delete(number)) hidden.add(number);
        draw();
      } }, el("span", { class: "swatch", style: `background:${series[numbers[0]].colour}` }), name);
    }));
  }

  const slider = options.smooth ? el("label", { class: "note" }, "smooth ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: (event) => {
    smooth = Number(event.target.value);
    draw();
  } })) : null;
  parent.append(el("div", {}, el("div", { class: "titled" }, el("h3", {}, title), slider), place));
  new ResizeObserver(() => place.clientWidth !== drawn && draw()).observe(place);
  draw();
  return place;
}

// Each point the mean of those up to it, which count less the further before it they are.
function smoothed(points, share) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    sum = share * sum + (1 - share) * y;
    weight = share * weight + 1 - share;
    return [x, sum / weight];
  });
}

// The least and the greatest, with some room beside them.
function spread(numbers, room) {
  let least = Infinity, most = -Infinity;
  for (const each of numbers) {
    if (each === null) continue;
    least = Math.min(least, each);
    most = Math.max(most, each);
  }
  if (least > most) return [0, 1];
  const beside = (most - least) * room || (least === most ? Math.abs(least) * 0.1 || 1 : 0);
  return [least - beside, most + beside];
}

function drawnSeries({ points, shape, colour, dash }, xOf, yOf, bottom, width) {
  const group = svg("g", { class: `series ${shape ?? "line"}` });
  const gaps = points.slice(1).map(([x], place) => xOf(x) - xOf(points[place][0]));
  const wide = gaps.reduce((a, b) => Math.min(a, b), width);
  if (shape === "bars") {
    for (const [x, y] of points) group.append(svg("rect", { x: xOf(x) - wide / 2, y: yOf(y), width: Math.max(wide - 1, 1), height: Math.max(bottom - yOf(y), 0), fill: colour }));
    return group;
  }
  if (shape === "points" || points.length === 1) {
    for (const [x, y] of points) if (x !== null && y !== null) group.append(svg("circle", { cx: xOf(x), cy: yOf(y), r: 4, fill: colour }));
    return group;
  }
  let path = "", before = null;
  for (const [x, y] of thinned(points, xOf, width)) {
    if (y === null) before = null;
    else {
      if (before === null) path += "M";
      else path += shape === "steps" ? `L${xOf(x).toFixed(1)} ${yOf(before).toFixed(1)}L` : "L";
      path += `${xOf(x).toFixed(1)} ${yOf(y).toFixed(1)}`;
      before = y;
    }
  }
  group.append(svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.6, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
  return group;
}

// Of many points on one column of pixels, the first, the least, the greatest and the last.
function thinned(points, xOf, width) {
  if (points.length < 4 * width) return points;
  const columns = new Map();
  for (const point of points) {
    const column = Math.round(xOf(point[0]));
    const kept = columns.get(column);
    if (!kept) columns.set(column, [point, point, point, point]);
    else {
      if (point[1] < kept[1][1]) kept[1] = point;
      if (point[1] > kept[2][1]) kept[2] = point;
      kept[3] = point;
    }
  }
  return [...columns.values()].flatMap((kept) => [...new Set(kept)].sort((a, b) => a[0] - b[0]));
}
