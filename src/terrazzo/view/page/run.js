// The page of a run: the loss across its starts, its checkpoints and what keeps them, and what happened to it.

import { el, bytesText, countText, facts, numberText, table } from "./dom.js";
import { addChart, escaped } from "./charts.js";

export function runPage(page, data) {
  const restarts = data.history.filter((each) => each.what === "went on").length;
  const metrics = [...new Set(data.steps.flatMap((step) => Object.keys(step.metrics)))];
  const said = el("p", { class: "said", role: "status" }, "Click a point.");
  const losses = el("div", {});
  page.append(
    el("h1", {}, data.title),
    facts([
      ["checkpoints", data.steps.length],
      ["latest", data.latest],
      ["size", bytesText(data.steps.reduce((sum, step) => sum + step.bytes, 0))],
      ["went on after a fault", data.history.length ? countText(restarts, "time") : null],
    ]),
    losses, said);
  loss(losses, data, said);
  for (const name of metrics) metric(losses, data, name, said);
  when(losses, data, said);
  page.append(el("h3", {}, "Checkpoints"), steps(data, metrics));
  if (data.history.length) page.append(el("h3", {}, "What happened"), history(data));
}

function loss(place, data, said) {
  if (!data.losses.length) return;
  const unit = data.by_step ? "step" : "samples";
  const traces = data.losses.map((segment, start) => ({
    type: "scatter", mode: segment.length > 1 ? "lines" : "markers", name: start ? `start ${start + 1}` : "start 1",
    x: segment.map(([at]) => at), y: segment.map(([, value]) => value),
    customdata: segment.map(([at, value]) => `start ${start + 1}: loss ${numberText(value)} at ${unit} ${numberText(at)}`),
    hovertemplate: `loss %{y}, ${unit} %{x}<extra></extra>`,
  }));
  const marks = data.by_step ? data.steps.map((step) => line(step.step, "#4c78a8", "dot")) : [];
  const again = data.losses.slice(1).map((segment) => line(segment[0][0], "#e45756", "dash"));
  addChart(place, data.losses.length > 1 ? `loss across ${data.losses.length} starts` : "loss", traces,
    { x: { title: { text: unit } }, y: { title: { text: "loss" } }, shapes: [...marks, ...again] },
    (point) => { said.textContent = point.customdata; });
  place.append(el("p", { class: "note" }, [marks.length ? "dotted: checkpoints" : "", again.length ? "dashed: where a start went on" : ""].filter(Boolean).join("; ")));
}

function line(x, color, dash) {
  return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color, dash, width: 1 } };
}

function metric(place, data, name, said) {
  const having = data.steps.filter((step) => typeof step.metrics[name] === "number");
  if (!having.length) return;
  addChart(place, `${name} of checkpoints`, [{
    type: "scatter", mode: "lines+markers", name: escaped(name), x: having.map((step) => step.step), y: having.map((step) => step.metrics[name]),
    customdata: having.map((step) => `${step.name}: ${name} ${numberText(step.metrics[name])}`), hovertemplate: "%{y}, step %{x}<extra></extra>",
  }], { height: 240, x: { title: { text: "step" } }, y: { title: { text: escaped(name) } } }, (point) => { said.textContent = point.customdata; });
}

function when(place, data, said) {
  const saves = data.steps.map((step) => ({ at: step.saved, y: step.step, text: `${step.name}, ${bytesText(step.bytes)}` }));
  if (!saves.length) return;
  const marker = { size: 9 };
  const traces = [{ type: "scatter", mode: "markers", name: "saved", marker, x: saves.map((each) => date(each.at)), y: saves.map((each) => each.y), customdata: saves.map((each) => each.text), hovertemplate: "step %{y}<extra></extra>" }];
  const shapes = data.history.map((each) => line(date(each.at), each.what === "went on" ? "#e45756" : "#8a8f98", each.what === "ended" ? "solid" : "dash"));
  addChart(place, "saves, starts and restarts by the clock", traces,
    { height: 260, x: { type: "date" }, y: { title: { text: "step" } }, shapes }, (point) => { said.textContent = point.customdata; });
}

function date(seconds) {
  const found = new Date(seconds * 1000);
  return Number.isNaN(found.getTime()) ? null : found.toISOString();
}

function steps(data, metrics) {
  const rows = data.steps.map((step) => [
    step.name, new Date(step.saved * 1000).toLocaleString(), bytesText(step.bytes),
    ...metrics.map((name) => numberText(step.metrics[name])), [...step.kept, ...(step.latest ? ["latest"] : [])].join(", ")]);
  return rows.length ? el("div", { class: "scroll" }, table(["name", "saved", "size", ...metrics, "kept"], rows, "words steps")) : el("p", { class: "note" }, "none");
}

function history(data) {
  const rows = data.history.map((each) => [
    new Date(each.at * 1000).toLocaleString(), each.host, each.what,
    each.what === "went on" ? `after ${numberText(Object.values(each.seconds).reduce((a, b) => a + b, 0))} s: ${Object.entries(each.seconds).map(([name, seconds]) => `${name.replace("_", " ")} ${seconds.toFixed(1)}`).join(", ")}`
      : each.why || (each.what === "ended" ? "done" : "")]);
  return table(["when", "host", "what", ""], rows, "words history");
}
