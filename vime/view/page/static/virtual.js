// Shows a list of any length: only the rows in view are elements. All rows have the same height.

import { el } from "vime/dom";
import { soon } from "vime/canvas";

const MORE = 6;
/** Maximum height in pixels, because browsers cut higher elements. */
const HIGHEST = 8_000_000;

export class VirtualList {
  /**
   * `make()` returns the element of a row, `show(element, i)` fills it with item `i`, and `choose(i)` is called after a
   * choice.
   */
  constructor(name, height, make, show, choose) {
    this.height = height;
    this.make = make;
    this.show = show;
    this.choose = choose;
    this.count = 0;
    this.active = -1;
    this.pool = [];
    this.inner = el("div", { class: "rows", role: "presentation" });
    this.element = el("div", { class: "virtual", role: "listbox", "aria-label": name, tabindex: 0 }, this.inner);
    this.draw = this.draw.bind(this);
    this.element.addEventListener("scroll", () => soon(this.draw), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => soon(this.draw)).observe(this.element);
  }

  /** Shows `count` items, and marks the chosen item; -1 for none. */
  set(count, active) {
    this.count = count;
    this.active = active;
    const whole = count * this.height;
    this.scale = Math.max(1, whole / HIGHEST);
    this.inner.style.height = `${whole / this.scale}px`;
    for (const row of this.pool) row.at = -1;
    soon(this.draw);
  }

  /** Scrolls an item into view. */
  reveal(i) {
    const top = (i * this.height) / this.scale;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.height > scrollTop + clientHeight) this.element.scrollTop = top + this.height - clientHeight;
    soon(this.draw);
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    if (!clientHeight) return;
    const inView = Math.ceil(clientHeight / this.height) + 1;
    const first = Math.max(0, Math.floor((scrollTop * this.scale) / this.height) - MORE);
    const shown = Math.min(this.count - first, inView + 2 * MORE);
    const shift = scrollTop - (scrollTop * this.scale) ;
    while (this.pool.length < shown) this.add();
    this.pool.forEach((row, n) => {
      // An item keeps its element while it stays in view.
      const i = first + ((n - first) % this.pool.length + this.pool.length) % this.pool.length;
      const isShown = i < first + shown && i < this.count;
      row.element.hidden = !isShown;
      if (!isShown) { row.at = -1; return; }
      row.element.style.transform = `translateY(${i * this.height + shift}px)`;
      if (row.at !== i) {
        row.at = i;
        row.element.setAttribute("aria-posinset", i + 1);
        row.element.setAttribute("aria-setsize", this.count);
        this.show(row.element, i);
      }
      row.element.setAttribute("aria-selected", i === this.active);
      if (i === this.active) this.element.setAttribute("aria-activedescendant", row.element.id);
    });
  }

  add() {
    const element = this.make();
    element.id = `row-${this.pool.length}`;
    element.setAttribute("role", "option");
    const row = { element, at: -1 };
    element.addEventListener("click", () => { if (row.at >= 0) this.pick(row.at); });
    this.pool.push(row);
    this.inner.append(element);
  }

  pick(i) {
    this.active = i;
    this.reveal(i);
    this.choose(i);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.count - 1 : by === undefined ? undefined : this.active + by;
    if (to === undefined || !this.count) return;
    event.preventDefault();
    this.pick(Math.max(0, Math.min(this.count - 1, to)));
  }
}
