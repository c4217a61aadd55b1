// Which page this is.

import { el } from "./dom.js";
import { startKeys } from "./keys.js";
import { checkpointPage } from "./checkpoint.js";
import { diffPage } from "./diff.js";
import { layoutPage } from "./layout.js";
import { tracePage } from "./trace.js";
import { runPage } from "./run.js";

const PAGES = { checkpoint: checkpointPage, diff: diffPage, layout: layoutPage, trace: tracePage, run: runPage };

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  page.replaceChildren();
  page.className = data.kind_of_page;
  PAGES[data.kind_of_page](page, data);
  page.append(el("footer", {}, "made by terrazzo view", startKeys()));
  document.documentElement.dataset.ready = "yes";
}

start();
