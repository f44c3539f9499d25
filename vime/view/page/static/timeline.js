// Shows the screen of the timeline: one lane per process and device, from the whole run to a part of one step.

import { onLookChange, soon } from "vime/canvas";
import { choice, el, fill, labelled, later, table } from "vime/dom";
import { duration, phaseColour, phaseOrder, phaseText } from "vime/format";
import { LANE_GAP, ROW_HEIGHT, drawLanes, gutter, tops } from "vime/lanes";
import { BEGIN, LANE, NAME, ROLLOUT, Spans } from "vime/spans";

const LEAST_S = 1e-4;
const MOST_LISTED = 200;
const HELP = "Arrow keys choose lane and phase, Enter zooms to it, + and - zoom, Shift and arrow keys move, Home shows the whole run. Mouse: drag, wheel, click.";

export class TimelineScreen {
  constructor(source, go) {
    this.source = source;
    this.go = go;
    this.run = 0;
    this.loaded = null;
    this.stamp = null;
    this.spans = null;
    this.view = null;
    this.chosen = null;
    this.lane = 0;
    this.pointers = new Map();
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": `Timeline. ${HELP}`, class: "lanes" });
    this.readout = el("output", { class: "readout" });
    this.legend = el("ul", { class: "legend", "aria-label": "Colours" });
    this.bar = el("div", { class: "controls" });
    this.sums = el("div", { class: "sums" });
    this.listed = el("div");
    this.list = el("details", { ontoggle: () => this.fillTables() }, el("summary", {}, "Phases in view, as a table"), this.listed);
    this.element = el("div", {}, this.bar, el("section", { class: "card" }, this.canvas, this.readout, this.legend),
      el("section", { class: "card", "aria-label": "Seconds in view" }, this.sums), el("section", { class: "card" }, this.list));
    this.draw = this.draw.bind(this);
    onLookChange(this.canvas, this.draw);
    this.tables = later(200, () => this.fillTables());
    this.listen();
  }

  async show(parts) {
    const run = Number(parts[0] ?? 0) || 0;
    if (run !== this.run) { this.spans = null; this.view = null; this.chosen = null; }
    this.run = run;
  }

  async update(runs) {
    if (this.run >= runs.length) this.run = 0;
    const run = runs[this.run], stamp = run.stamps.journal;
    if (!this.spans || this.loaded !== this.run || stamp !== this.stamp) {
      const timeline = await this.source.timeline(this.run);
      this.loaded = this.run;
      this.stamp = stamp;
      const follows = !this.view || this.view.to >= this.spans?.now;
      const key = this.chosen && [this.chosen[LANE], this.chosen[NAME], this.chosen[BEGIN]].join();
      this.spans = new Spans(timeline, run.state === "running" && this.source.live ? Date.now() / 1000 - timeline.origin : 0);
      this.chosen = this.chosen && (timeline.spans.find((own) => [own[LANE], own[NAME], own[BEGIN]].join() === key) ?? null);
      if (!this.view) this.whole();
      else if (follows) this.move(this.view.from, this.spans.now);
    }
    this.controls(runs);
    this.refresh();
  }

  controls(runs) {
    const steps = this.spans.timeline.steps;
    if (this.bar.contains(document.activeElement) && document.activeElement.tagName === "SELECT") return;
    const button = (text, name, f) => el("button", { type: "button", "aria-label": name, title: name, onclick: f }, text);
    const focused = this.bar.contains(document.activeElement) ? document.activeElement.title : null;
    fill(this.bar,
      runs.length > 1 ? labelled("Run", choice(runs.map((run, i) => [i, run.name]), this.run, (i) => this.go(`timeline/${i}`))) : null,
      button("Whole run", "Whole run", () => this.whole()),
      button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
      button("←", "Earlier", () => this.pan(-0.5)), button("→", "Later", () => this.pan(0.5)),
      steps.length ? labelled("Step", choice([["", "–"], ...steps.map(([rollout], i) => [i, rollout])], this.step(), (i) => i !== "" && this.toStep(Number(i)))) : null,
      el("span", { class: "faint hint" }, HELP));
    if (focused) this.bar.querySelector(`[title="${focused}"]`)?.focus();
  }

  /** Returns the index of the step that the view shows, or "" if it shows another range. */
  step() {
    const found = this.spans.timeline.steps.findIndex(([, from, to]) => Math.abs(from - this.view.from) < 1e-3 && Math.abs(to - this.view.to) < 1e-3);
    return found < 0 ? "" : found;
  }

  toStep(i) {
    const [, from, to] = this.spans.timeline.steps[i];
    this.move(from, to);
  }

  whole() { this.move(0, this.spans.now || 1); }

  move(from, to) {
    const span = Math.max(LEAST_S, to - from), end = Math.max(this.spans.now, LEAST_S);
    const first = Math.max(-0.05 * span, Math.min(from, end - 0.95 * span));
    this.view = { from: first, to: first + Math.min(span, end * 1.1) };
    this.refresh();
  }

  pan(share) {
    const by = share * (this.view.to - this.view.from);
    this.move(this.view.from + by, this.view.to + by);
  }

  zoom(factor, about = (this.view.from + this.view.to) / 2) {
    this.move(about - (about - this.view.from) * factor, about + (this.view.to - about) * factor);
  }

  timeAt(x) {
    const left = gutter(this.canvas.clientWidth);
    return this.view.from + ((x - left) / (this.canvas.clientWidth - left)) * (this.view.to - this.view.from);
  }

  refresh() {
    soon(this.draw);
    this.tables();
  }

  draw() {
    if (!this.spans || !this.view) return;
    this.canvas.style.height = `${tops(this.spans).at(-1)}px`;
    drawLanes(this.canvas, this.spans, this.view, this.chosen, this.lane);
    const step = this.bar.querySelector("label:last-of-type select");
    if (step && step !== document.activeElement && this.spans.timeline.steps.length) step.value = String(this.step());
  }

  /** Returns [span, mark] at a position of the canvas; each may be null. */
  at(x, y) {
    const all = tops(this.spans), time = this.timeAt(x);
    const near = ((this.view.to - this.view.from) / this.canvas.clientWidth) * 5;
    const lane = all.findIndex((top, i) => y >= top && y < (all[i + 1] ?? top));
    if (lane < 0) return [null, null];
    const isMark = y >= all[lane + 1] - LANE_GAP;
    const mark = isMark ? this.spans.timeline.marks.find(([own, when]) => own === lane && Math.abs(when - time) < near) ?? null : null;
    const row = this.spans.rows[lane][Math.floor((y - all[lane]) / ROW_HEIGHT)];
    if (!row || mark) return [null, mark];
    const span = row[this.spans.after(row, time - near / 5)];
    return [span && span[BEGIN] <= time + near ? span : null, null];
  }

  said(span) {
    const { lanes, names } = this.spans.timeline;
    const rollout = span[ROLLOUT] === null ? "" : `, rollout ${span[ROLLOUT]}`;
    const length = `${duration(this.spans.endOf(span) - span[BEGIN])}${span[4] === null ? " so far" : ""}`;
    return `${lanes[span[LANE]].filter(Boolean).join(" ")}: ${phaseText(names[span[NAME]])} (${names[span[NAME]]})${rollout}, ${length}, from ${duration(span[BEGIN])}`;
  }

  choose(span) {
    this.chosen = span;
    if (!span) return;
    this.lane = span[LANE];
    const width = this.view.to - this.view.from;
    if (this.spans.endOf(span) < this.view.from || span[BEGIN] > this.view.to) this.move(span[BEGIN] - width / 4, span[BEGIN] + (3 * width) / 4);
    this.readout.textContent = this.said(span);
    this.refresh();
  }

  listen() {
    const { canvas } = this;
    const place = (event) => [event.clientX - canvas.getBoundingClientRect().left, event.clientY - canvas.getBoundingClientRect().top];
    canvas.addEventListener("wheel", (event) => {
      if (!this.view || (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && document.activeElement !== canvas)) return;
      event.preventDefault();  // without the focus, the wheel scrolls the page
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(((event.deltaX || event.deltaY) / canvas.clientWidth));
      else this.zoom(Math.exp(event.deltaY / 400), this.timeAt(place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { x: place(event)[0], begin: place(event)[0] });
    });
    canvas.addEventListener("pointermove", (event) => this.pointerMoved(event, place(event)));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerup", (event) => {
      const pointer = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      if (this.spans && pointer && Math.abs(place(event)[0] - pointer.begin) < 4) this.choose(this.at(...place(event))[0]);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  pointerMoved(event, [x, y]) {
    if (!this.spans) return;
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) {
      const [span, mark] = this.at(x, y);
      if (mark) this.readout.textContent = `${this.spans.timeline.lanes[mark[0]].filter(Boolean).join(" ")}: ${mark[3]}, at ${duration(mark[1])}`;
      else if (span) this.readout.textContent = this.said(span);
      return;
    }
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {  // two fingers
      const before = Math.abs(pointer.x - other.x), now = Math.abs(x - other.x);
      if (before > 5 && now > 5) this.zoom(before / now, this.timeAt((x + other.x) / 2));
    } else this.pan((pointer.x - x) / (this.canvas.clientWidth - gutter(this.canvas.clientWidth)));
    pointer.x = x;
  }

  key(event) {
    if (!this.spans || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) this.pan(0.25 * way);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.choose(this.spans.next(this.lane, this.chosen, way, this.view.from));
    else if (way) this.toLane(this.lane + way);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Home") this.whole();
    else if (event.key === "Enter" && this.chosen) {
      const pad = 0.1 * (this.spans.endOf(this.chosen) - this.chosen[BEGIN]);
      this.move(this.chosen[BEGIN] - pad, this.spans.endOf(this.chosen) + pad);
    } else return;
    event.preventDefault();
  }

  toLane(lane) {
    const lanes = this.spans.timeline.lanes;
    if (lane < 0 || lane >= lanes.length) return;
    this.lane = lane;
    this.chosen = null;
    this.readout.textContent = `lane ${lanes[lane].filter(Boolean).join(" ")}`;
    this.refresh();
  }

  fillTables() {
    if (!this.spans || !this.element.isConnected) return;
    const { lanes, names } = this.spans.timeline, { from, to } = this.view;
    if (!lanes.length) return fill(this.sums, "The run has no journal, or nothing has happened yet.");
    const sums = lanes.map((_, i) => this.spans.seconds(i, from, to));
    const seen = names.filter((name) => sums.some((own) => own.has(name))).sort((a, b) => phaseOrder(a) - phaseOrder(b));
    fill(this.legend, seen.map((name) => {
      const colour = el("span", { class: "swatch", "aria-hidden": "true" });
      colour.style.background = phaseColour(name);
      return el("li", {}, colour, phaseText(name));
    }), el("li", {}, "▲ weights, checkpoint, evaluation"), el("li", { class: "alarm" }, "▲ warning, dropped group, death, error"));
    const rows = lanes.map((lane, i) => [lane.filter(Boolean).join(" "), ...seen.map((name) => (sums[i].has(name) ? duration(sums[i].get(name)) : ""))]);
    fill(this.sums, table(`Time by phase, ${duration(Math.max(0, from))} to ${duration(to)} after the begin`, ["", ...seen.map(phaseText)], rows));
    if (!this.list.open) return;
    const [found, count] = this.spans.list(from, to, MOST_LISTED);
    const caption = count > found.length ? `The first ${found.length} of ${count} phases in view` : `${count} phases in view`;
    fill(this.listed, table(caption, ["process", "phase", "rollout", "from", "length"], found.map((span) => [
      lanes[span[LANE]].filter(Boolean).join(" "), phaseText(names[span[NAME]]), span[ROLLOUT] ?? "", duration(span[BEGIN]), duration(this.spans.endOf(span) - span[BEGIN])])));
  }
}
