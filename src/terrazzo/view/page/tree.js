// Names as a tree, which opens by a click and is searched by words.

import { el, bytesText, countText, shapeText } from "./dom.js";
import { VirtualList } from "./list.js";

const DEEPEST = 32; // of hostile names; what is left of a longer one stays together
const OPENED = 60; // rows: a tree with fewer is shown open

// rows: what each name stands for, {name, dtype, shape, bytes, note}, in the order in which they are shown.
export function treeOf(rows) {
  const root = newNode("", 0);
  rows.forEach((row, index) => {
    const parts = row.name.split(".");
    if (parts.length > DEEPEST) parts.splice(DEEPEST - 1, parts.length, parts.slice(DEEPEST - 1).join("."));
    let node = root;
    count(node, row);
    parts.forEach((part, depth) => {
      let child = node.children.get(part);
      if (!child) {
        child = newNode(part, depth + 1);
        node.children.set(part, child);
      }
      node = child;
      count(node, row);
    });
    node.row = index;
  });
  return root;
}

function newNode(label, depth) {
  return { label, depth, children: new Map(), row: -1, values: 0, bytes: 0, open: false };
}

function count(node, row) {
  node.values += 1;
  node.bytes += row.bytes ?? 0;
}

export function visibleNodes(root) {
  const found = [];
  const waiting = [...root.children.values()].reverse();
  while (waiting.length) {
    const node = waiting.pop();
    found.push(node);
    if (node.open) waiting.push(...[...node.children.values()].reverse());
  }
  return found;
}

export class TreeView {
  constructor(rows, onpick) {
    this.rows = rows;
    this.onpick = onpick;
    this.root = treeOf(rows);
    this.picked = -1;
    this.list = new VirtualList((item) => this.drawn(item));
    this.search = el("input", { type: "search", placeholder: "search names, dtypes, shapes", "aria-label": "search", oninput: () => this.refresh() });
    this.found = el("output", { class: "found" });
    this.element = el("section", { class: "tree" }, el("div", { class: "bar" }, this.search, this.found), this.list.box);
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

  refresh(keep) {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      this.found.textContent = countText(this.rows.length, "value");
      this.list.show(visibleNodes(this.root), keep);
      return;
    }
    this.texts ??= this.rows.map((row) => `${row.name} ${row.dtype ?? "object"} ${(row.shape ?? []).join("x")}`.toLowerCase());
    const items = [];
    this.texts.forEach((text, index) => {
      if (words.every((word) => text.includes(word))) items.push(index);
    });
    this.found.textContent = `${items.length.toLocaleString("en")} of ${countText(this.rows.length, "value")}`;
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
    const act = () => this.act(item, index, folder);
    return el("div", {
      class: `row${folder ? " folder" : ""}${row && index === this.picked ? " picked" : ""}`,
      role: "treeitem", tabindex: "-1", "aria-expanded": folder ? String(item.open) : null, title: row ? row.name : null,
      onclick: act, onkeydown: (event) => event.key === "Enter" && act(),
    },
      el("span", { class: "mark", style: `margin-left:${inTree ? (item.depth - 1) * 14 : 0}px` }, mark),
      el("span", { class: "name" }, inTree ? item.label : row.name),
      row && row.note ? el("span", { class: "note" }, row.note) : null,
      sizes.map((text, place) => el("span", { class: `size${place}` }, text)));
  }

  act(item, index, folder) {
    if (folder) item.open = !item.open;
    if (index >= 0) {
      this.picked = index;
      this.onpick(this.rows[index], index);
    }
    this.refresh(true);
  }
}
