// Names as a tree, which opens by a click or by keys, and is searched.

import { el, bytesText, countText, shapeText } from "./dom.js";
import { addKeys } from "./keys.js";
import { VirtualList } from "./list.js";
import { matcher, searched } from "./search.js";

const DEEPEST = 32; // of hostile names; what is left of a longer one stays together
const NARROW = matchMedia("(max-width: 760px)"); // what a name has is below the tree, as on a phone
const OPENED = 60; // rows: a tree with fewer is shown open

// rows: what each name stands for, {name, dtype, shape, bytes, note}, in the order in which they are shown.
export function treeOf(rows) {
  const root = newNode("", null);
  rows.forEach((row, index) => {
    const parts = row.name.split(".");
    if (parts.length > DEEPEST) parts.splice(DEEPEST - 1, parts.length, parts.slice(DEEPEST - 1).join("."));
    let node = root;
    count(node, row);
    parts.forEach((part) => {
      let child = node.children.get(part);
      if (!child) {
        child = newNode(part, node);
        node.children.set(part, child);
      }
      node = child;
      count(node, row);
    });
    node.row = index;
  });
  return root;
}

function newNode(label, parent) {
  return { label, parent, depth: parent ? parent.depth + 1 : 0, children: new Map(), row: -1, values: 0, bytes: 0, open: false };
}

function count(node, row) {
  node.values += 1;
  node.bytes += row.bytes ?? 0;
}

export function visibleNodes(node, found = []) {
  for (const child of node.children.values()) {
    found.push(child);
    if (child.open) visibleNodes(child, found);
  }
  return found;
}

// onpick hears of a row, with its number, and onmodule of a node that has others below it.
export class TreeView {
  constructor(rows, onpick, onmodule = () => {}) {
    this.rows = rows;
    this.onpick = onpick;
    this.onmodule = onmodule;
    this.root = treeOf(rows);
    this.picked = null; // the number of a row, or a node that is none
    this.list = new VirtualList((item) => this.drawn(item));
    this.search = el("input", { type: "search", placeholder: "search: layers[0], *.weight, bf16, 4096x128", "aria-label": "search", autocomplete: "off", spellcheck: "false",
      oninput: () => this.refresh(), onkeydown: (event) => this.typed(event) });
    this.found = el("output", { class: "found" });
    this.element = el("section", { class: "tree" }, el("div", { class: "bar" }, this.search, this.found), this.list.box);
    this.addKeys();
    this.openFew();
    this.refresh();
  }

  openFew() {
    const rows = () => visibleNodes(this.root);
    let node = this.root;
    while (node.children.size === 1) {
      node = [...node.children.values()][0];
      node.open = true;
    }
    if (this.rows.length > OPENED) return;
    for (let before = -1, now = rows(); now.length !== before && now.length <= OPENED; now = rows()) {
      before = now.length;
      for (const each of now) each.open = each.children.size > 0;
    }
  }

  addKeys() {
    addKeys("/", "search", () => this.search.focus());
    addKeys("ArrowDown j", "the next name", () => this.move(1));
    addKeys("ArrowUp k", "the one before", () => this.move(-1));
    addKeys("ArrowRight l", "open a module", () => this.fold(true));
    addKeys("ArrowLeft h", "close it, or go to the one above", () => this.fold(false));
    addKeys("Home", "the first name", () => this.move(-Infinity));
    addKeys("End", "the last", () => this.move(Infinity));
  }

  typed(event) {
    if (event.key === "Escape") {
      this.search.value = "";
      this.refresh();
      this.list.box.focus();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      this.list.box.focus();
      this.move(this.at() < 0 ? 1 : 0);
    }
  }

  at() {
    return this.list.items.findIndex((item) => this.keyOf(item) === this.picked);
  }

  keyOf(item) {
    return typeof item === "number" ? item : item.row >= 0 ? item.row : item;
  }

  move(by) {
    const last = this.list.items.length - 1;
    if (last >= 0) this.pick(this.list.items[Math.min(last, Math.max(0, this.at() + by))]);
  }

  fold(open) {
    const node = this.list.items[this.at()];
    if (node === undefined || typeof node === "number") return;
    if (node.children.size && node.open !== open) {
      node.open = open;
      this.refresh(true);
    } else if (!open && node.parent.parent) this.pick(node.parent);
  }

  // Shows a module in the tree, and what it has.
  show(node) {
    this.search.value = "";
    for (let each = node; each; each = each.parent) each.open = true;
    this.refresh(true);
    this.pick(node);
  }

  refresh(keep) {
    const fits = matcher(this.search.value);
    if (fits === null) {
      this.found.textContent = countText(this.rows.length, "value");
      this.list.show(visibleNodes(this.root), keep);
      return;
    }
    this.texts ??= this.rows.map(searched);
    const items = [];
    let bytes = 0;
    this.texts.forEach((text, index) => {
      if (!fits(text)) return;
      items.push(index);
      bytes += this.rows[index].bytes ?? 0;
    });
    this.found.textContent = `${items.length.toLocaleString("en")} of ${countText(this.rows.length, "value")}, ${bytesText(bytes)}`;
    this.list.show(items, keep);
  }

  // A node of the tree, or in a search the number of a row.
  drawn(item) {
    const inTree = typeof item !== "number";
    const index = inTree ? item.row : item;
    const row = index >= 0 ? this.rows[index] : null;
    const folder = inTree && item.children.size > 0;
    const mark = folder ? (item.open ? "▾" : "▸") : "";
    const sizes = row ? [row.dtype ?? "object", shapeText(row.shape), bytesText(row.bytes)] : [countText(item.values, "value"), "", bytesText(item.bytes)];
    const picked = this.keyOf(item) === this.picked;
    return el("div", {
      class: `row${folder ? " folder" : ""}${picked ? " picked" : ""}`,
      role: "treeitem", "aria-expanded": folder ? String(item.open) : null, "aria-selected": String(picked), title: row ? row.name : null,
      onclick: () => {
        if (folder) item.open = !item.open;
        this.pick(item);
      },
    },
      el("span", { class: "mark", style: `margin-left:${inTree ? (item.depth - 1) * 14 : 0}px` }, mark),
      inTree ? el("span", { class: "name" }, item.label) : el("span", { class: "name tail" }, el("bdi", {}, row.name)),
      row && row.note ? el("span", { class: "note" }, row.note) : null,
      sizes.map((text, place) => el("span", { class: `size${place}` }, text)));
  }

  pick(item) {
    this.picked = this.keyOf(item);
    if (typeof this.picked === "number") {
      this.onpick(this.rows[this.picked], this.picked);
      this.goToDetails();
    } else this.onmodule(item);
    this.refresh(true);
    this.list.reveal(this.at());
  }

  goToDetails() {
    const details = this.element.nextElementSibling;
    if (!NARROW.matches || !details) return;
    details.prepend(el("button", { type: "button", onclick: () => this.element.scrollIntoView() }, "↑ names"));
    details.scrollIntoView();
  }
}
