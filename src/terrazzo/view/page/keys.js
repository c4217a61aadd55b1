// What a page does by keyboard, and the list of it that "?" shows.

import { el, table } from "./dom.js";

const actions = new Map(); // by what they do, so that a part that is drawn anew replaces its own

export function addKeys(keys, what, act) { // keys: as events name them, separated by blanks
  actions.set(what, { keys: keys.split(" "), act });
}

export function startKeys() {
  const help = el("dialog", { "aria-label": "keys" });
  const show = () => {
    const shown = (key) => el("kbd", {}, { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→" }[key] ?? key);
    help.replaceChildren(el("h2", {}, "Keys"), table(["", ""], [...actions].map(([what, { keys }]) => [keys.map(shown), what]), "words"),
      el("form", { method: "dialog" }, el("button", {}, "close")));
    help.showModal();
  };
  addKeys("?", "these keys", show);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.matches("input:not([type=checkbox]), select, button") && event.key !== "/") return;
    if (event.key === "/" && event.target.matches("input")) return;
    const found = [...actions.values()].find(({ keys }) => keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found.act(event);
  });
  return [help, el("button", { type: "button", onclick: show }, "keys: ?")];
}
