// The page of a run, or of several beside each other: the loss across their starts, their checkpoints and what keeps
// them, and what happened to them.

import { el, bytesText, countText, facts, numberText, table } from "./dom.js";
import { addChart, seriesColour } from "./charts.js";

const FAULT = "#e45756", QUIET = "#8a8f98";

export function runPage(page, data) {
  const runs = data.runs;
  const several = runs.length > 1;
  const said = el("p", { class: "said", role: "status" }, "Click a point.");
  const tell = (text) => { said.textContent = text; };
  const charts = el("section", { class: "card charts" });
  page.append(el("h1", {}, data.title), several ? el("section", { class: "card" }, summary(runs)) : facts(about(runs[0])), charts);
  for (const by_step of [true, false]) loss(charts, runs, by_step, tell);
  const others = el("div", { class: "beside" });
  charts.append(others, said);
  for (const name of metricsOf(runs)) metric(others, runs, name, tell);
  when(others, runs, tell);
  page.append(el("div", { class: "beside" }, runs.map((run, number) => el("section", { class: "card run" },
    several ? el("h2", {}, el("span", { class: "swatch", style: `background:${seriesColour(number)}` }), run.title) : null,
    el("h3", {}, "Checkpoints"), steps(run),
    run.history.length ? [el("h3", {}, "What happened"), history(run)] : null))));
}

function about(run) {
  const restarts = run.history.filter((each) => each.what === "went on").length;
  const ended = run.losses.length ? run.losses[run.losses.length - 1] : [];
  return [
    ["checkpoints", run.steps.length],
    ["latest", run.latest],
    ["size", bytesText(run.steps.reduce((sum, step) => sum + step.bytes, 0))],
    ["last loss", ended.length ? numberText(ended[ended.length - 1][1]) : null],
    ["went on after a fault", run.history.length ? countText(restarts, "time") : null],
  ];
}

function summary(runs) { // a column for each run
  const columns = runs.map(about);
  const rows = columns[0].map(([name], row) => [name, ...columns.map((column) => column[row][1] ?? "")]);
  const lasts = metricsOf(runs).map((name) => [`${name} of the last checkpoint`, ...runs.map((run) => numberText(run.steps.filter((step) => name in step.metrics).at(-1)?.metrics[name]))]);
  const titles = runs.map((run, number) => [el("span", { class: "swatch", style: `background:${seriesColour(number)}` }), run.title]);
  return el("div", { class: "scroll" }, table(["", ...titles], [...rows, ...lasts], "summary"));
}

function metricsOf(runs) {
  return [...new Set(runs.flatMap((run) => run.steps.flatMap((step) => Object.keys(step.metrics))))];
}

function named(runs, run, text) { // a text of a run, with its name where there are several
  return runs.length > 1 ? `${run.title}: ${text}` : text;
}

function loss(place, runs, by_step, tell) {
  const having = runs.filter((run) => run.losses.length && run.by_step === by_step);
  if (!having.length) return;
  const unit = by_step ? "step" : "samples";
  const several = runs.length > 1;
  const series = having.flatMap((run) => run.losses.map((segment, start) => ({
    name: several ? run.title : `start ${start + 1}`, colour: seriesColour(several ? runs.indexOf(run) : start),
    points: segment.map(([at, value]) => [at, value, () => named(runs, run, `start ${start + 1}: loss ${numberText(value)} at ${unit} ${numberText(at)}`)]),
  })));
  const saves = by_step && !several ? having[0].steps.map((step) => ({ x: step.step, colour: "#4c78a8", dash: "1 4", text: step.name })) : [];
  const again = having.flatMap((run) => run.losses.slice(1).map((segment) => ({ x: segment[0][0], colour: several ? seriesColour(runs.indexOf(run)) : FAULT, dash: "5 4", text: named(runs, run, "went on") })));
  const starts = having.reduce((sum, run) => sum + run.losses.length, 0);
  addChart(place, several ? `loss of ${countText(having.length, "run")}` : starts > 1 ? `loss across ${starts} starts` : "loss", series,
    { x: unit, y: "loss", height: 320, smooth: true, marks: [...saves, ...again], onpick: tell });
  place.append(el("p", { class: "note" }, [saves.length ? "dotted: checkpoints" : "", again.length ? "dashed: where a start went on" : ""].filter(Boolean).join("; ")));
}

function metric(place, runs, name, tell) {
  const series = runs.map((run, number) => ({
    name: run.title, colour: seriesColour(number),
    points: run.steps.filter((step) => typeof step.metrics[name] === "number").map((step) => [step.step, step.metrics[name], () => named(runs, run, `${step.name}: ${name} ${numberText(step.metrics[name])}`)]),
  })).filter(({ points }) => points.length);
  if (series.length) addChart(place, `${name} of checkpoints`, series, { x: "step", y: name, height: 220, onpick: tell });
}

function when(place, runs, tell) {
  const series = runs.map((run, number) => ({
    name: runs.length > 1 ? run.title : "saved", shape: "points", colour: seriesColour(number),
    points: run.steps.filter((step) => step.saved !== null).map((step) => [step.saved, step.step, () => named(runs, run, `${step.name}, ${bytesText(step.bytes)}, ${clock(step.saved)}`)]),
  })).filter(({ points }) => points.length);
  if (!series.length) return;
  const marks = runs.flatMap((run, number) => run.history.map((each) => ({
    x: each.at, colour: each.what === "went on" ? FAULT : runs.length > 1 ? seriesColour(number) : QUIET, dash: each.what === "ended" ? null : "5 4", text: named(runs, run, each.what) })));
  addChart(place, "saves, starts and restarts by the clock", series, { x: "", y: "step", height: 240, clock: true, marks, onpick: tell });
}

function clock(seconds) {
  const found = new Date(seconds * 1000);
  return seconds === null || Number.isNaN(found.getTime()) ? "" : found.toLocaleString([], { year: "2-digit", month: "short", day: "numeric", hour: "numeric", minute: "2-digit", second: "2-digit" });
}

function steps(run) {
  const metrics = metricsOf([run]);
  const rows = run.steps.map((step) => [
    step.name, clock(step.saved), bytesText(step.bytes),
    ...metrics.map((name) => numberText(step.metrics[name])), [...step.kept, ...(step.latest ? ["latest"] : [])].join(", ")]);
  return rows.length ? el("div", { class: "scroll" }, table(["name", "saved", "size", ...metrics, "kept"], rows, "words steps")) : el("p", { class: "note" }, "none");
}

function history(run) {
  const rows = run.history.map((each) => [
    clock(each.at), each.host, each.what,
    each.what === "went on" ? `after ${numberText(Object.values(each.seconds).reduce((a, b) => a + b, 0))} s: ${Object.entries(each.seconds).map(([name, seconds]) => `${name.replace("_", " ")} ${seconds.toFixed(1)}`).join(", ")}`
      : each.why || (each.what === "ended" ? "done" : "")]);
  return el("div", { class: "scroll" }, table(["when", "host", "what", ""], rows, "words history"));
}
