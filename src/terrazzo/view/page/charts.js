// Charts, by plotly where the page has it.  Its texts know some HTML, so names are escaped.

import { el } from "./dom.js";

export function escaped(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Adds a chart to a parent that is on the page; onpick hears of the point that was clicked.
export function addChart(parent, title, traces, axes, onpick) {
  const place = el("div", { class: "chart", "data-title": title });
  parent.append(el("h3", {}, title), place);
  const ink = getComputedStyle(document.body).color;
  const axis = (more) => ({ automargin: true, gridcolor: "#8884", zerolinecolor: "#8886", ...more });
  const layout = {
    height: axes.height ?? 320,
    margin: { l: 60, r: 20, t: 10, b: 45 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink },
    hovermode: "closest",
    showlegend: traces.length > 1,
    legend: { orientation: "h", y: -0.25 },
    xaxis: axis(axes.x),
    yaxis: axis(axes.y),
    barmode: axes.barmode ?? "overlay",
    shapes: axes.shapes ?? [],
    annotations: axes.annotations ?? [],
  };
  // Without a button that would upload the chart, which plotly has by default since version 4.
  Plotly.newPlot(place, traces, layout, { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "" });
  if (onpick) place.on("plotly_click", (event) => onpick(event.points[0]));
  return place;
}
