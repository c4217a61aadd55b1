// A list of any length of which only the rows in sight are elements.

import { el } from "./dom.js";

const ROW = matchMedia("(pointer: coarse)").matches ? 36 : 24; // a finger needs more than a mouse
const MARGIN = 8;
const TALLEST = 8e6; // pixels; browsers do not scroll further than a few tens of millions

export class VirtualList {
  constructor(draw) {
    this.draw = draw;
    this.items = [];
    this.space = el("div", { class: "space" });
    this.box = el("div", { class: "list", tabindex: "0", role: "tree", style: `--row:${ROW}px`, onscroll: () => this.refresh() }, this.space);
    new ResizeObserver(() => this.refresh()).observe(this.box);
  }

  show(items, keep) {
    this.items = items;
    this.space.style.height = `${Math.min(items.length * ROW, TALLEST)}px`;
    if (!keep) this.box.scrollTop = 0;
    this.refresh();
  }

  // Scrolls as far as is needed to see a row.
  reveal(number) {
    const height = this.box.clientHeight;
    const top = number * ROW - this.shift();
    if (top >= this.box.scrollTop && top + ROW <= this.box.scrollTop + height) return;
    const full = this.items.length * ROW;
    const wanted = Math.max(0, number * ROW - height / 2);
    this.box.scrollTop = full <= TALLEST ? wanted : (wanted / (full - height)) * (TALLEST - height);
    this.refresh();
  }

  // How far beyond the rows' own height the scroll bar reaches, for lists that are taller than a browser scrolls.
  shift() {
    const full = this.items.length * ROW;
    if (full <= TALLEST) return 0;
    const height = this.box.clientHeight;
    const part = this.box.scrollTop / Math.max(TALLEST - height, 1);
    return part * (full - height) - this.box.scrollTop;
  }

  refresh() {
    const height = this.box.clientHeight || 600;
    const shift = this.shift();
    const top = this.box.scrollTop + shift;
    const first = Math.max(0, Math.floor(top / ROW) - MARGIN);
    const last = Math.min(this.items.length, Math.ceil((top + height) / ROW) + MARGIN);
    const rows = [];
    for (let i = first; i < last; i += 1) {
      const row = this.draw(this.items[i], i);
      row.style.top = `${i * ROW - shift}px`;
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
  }
}
