// Shows one chart: the lines of a panel over steps, with a cross-hair for mouse and arrow keys and a table.

import { begin, decades, onLookChange, soon, theme, ticks } from "vime/canvas";
import { el, fill, table } from "vime/dom";
import { number } from "vime/format";

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22;
const MOST_ROWS = 200;

export class Chart {
  /**
   * `look`: {smooth, log, window}, which all charts of a screen share. `onzoom(window)` is called when the reader
   * selects a range of steps.
   */
  constructor(title, look, onzoom) {
    this.title = title;
    this.look = look;
    this.onzoom = onzoom;
    this.lines = [];
    this.at = null;
    this.drag = null;
    this.canvas = el("canvas", { tabindex: 0, role: "img", class: "chart" });
    this.readout = el("output", { class: "readout" });
    this.legend = el("ul", { class: "legend", "aria-label": "Lines" });
    this.unit = el("span", { class: "faint" });
    this.rows = el("div");
    this.more = el("details", { ontoggle: () => this.fillTable() }, el("summary", {}, "Table"), this.rows);
    this.element = el("figure", { class: "card" }, el("figcaption", {}, title, " ", this.unit), this.canvas, this.legend, this.readout, this.more);
    this.draw = this.draw.bind(this);
    this.end = onLookChange(this.canvas, this.draw);
    this.listen();
  }

  /**
   * `lines`: {name, colour, dash, width, unit, steps, values}; a value that was not finite is null. `log`: the axis is
   * logarithmic by default. `legend`: the chart names its lines.
   */
  set(lines, log, legend) {
    this.lines = lines;
    fill(this.legend, legend ? lines.map((line) => el("li", {}, stroke(line), line.name)) : []);
    this.ownLog = log;
    this.unit.textContent = lines.length ? `by ${lines[0].unit}` : "";
    this.canvas.setAttribute("aria-label", `${this.title}. ${lines.map(said).join(". ")}`);
    if (this.more.open) this.fillTable();
    this.refresh();
  }

  refresh() { soon(this.draw); }

  listen() {
    const { canvas } = this;
    const step = (event) => this.stepAt(event.clientX - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointermove", (event) => { this.at = step(event); this.show(); });
    canvas.addEventListener("pointerleave", () => { this.at = null; this.show(); });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") { this.drag = step(event); canvas.setPointerCapture(event.pointerId); }
    });
    canvas.addEventListener("pointerup", (event) => {
      const [a, b] = [this.drag, step(event)].sort((x, y) => x - y);
      this.drag = null;
      if (a !== null && b - a >= 1) this.onzoom([a, b]);
    });
    canvas.addEventListener("dblclick", () => this.onzoom(null));
    canvas.addEventListener("keydown", (event) => {
      const known = this.known();
      const place = this.at === null ? -1 : known.findIndex((own) => own >= this.at);
      const next = { ArrowLeft: Math.max(0, (place < 0 ? known.length : place) - 1),
        ArrowRight: Math.min(known.length - 1, place + 1), Home: 0, End: known.length - 1 }[event.key];
      if (event.key === "Escape") this.onzoom(null);
      else if (next === undefined || !known.length) return;
      else this.at = known[next];
      event.preventDefault();
      this.show();
    });
  }

  /** Returns the steps in view that at least one line has. */
  known() {
    const [low, high] = this.window();
    return [...new Set(this.lines.flatMap((line) => line.steps))].filter((s) => s >= low && s <= high).sort((a, b) => a - b);
  }

  window() {
    if (this.look.window) return this.look.window;
    let low = Infinity, high = -Infinity;
    for (const { steps } of this.lines) {
      if (!steps.length) continue;
      low = Math.min(low, steps[0]);
      high = Math.max(high, steps[steps.length - 1]);
    }
    return low < high ? [low, high] : low === high ? [low - 0.5, high + 0.5] : [0, 1];
  }

  stepAt(x) {
    const [low, high] = this.window();
    const share = (x - LEFT) / Math.max(1, this.canvas.clientWidth - LEFT - RIGHT);
    return Math.min(high, Math.max(low, low + share * (high - low)));
  }

  show() {
    const near = this.at === null ? [] : this.lines.map((line) => [line, nearest(line.steps, this.at)]).filter(([, i]) => i >= 0);
    this.readout.textContent = near.length
      ? near.map(([line, i]) => `${line.name}: ${number(line.values[i] ?? NaN)} at ${line.unit} ${line.steps[i]}`).join(" · ") : "";
    this.refresh();
  }

  fillTable() {
    if (!this.more.open) return;
    const known = this.known();
    const stride = Math.max(1, Math.ceil(known.length / MOST_ROWS));
    const rows = known.filter((_, i) => i % stride === 0).map((step) => [step, ...this.lines.map((line) => {
      const i = line.steps.indexOf(step);
      return i < 0 ? "" : line.values[i] === null ? "not finite" : number(line.values[i]);
    })]);
    const every = stride > 1 ? `, every ${stride}th step` : "";
    fill(this.rows, table(`${this.title}${every}`, [this.lines[0]?.unit ?? "step", ...this.lines.map((l) => l.name)], rows));
  }

  draw() {
    const { context, width, height } = begin(this.canvas);
    if (!width) return;
    const colours = theme();
    const [low, high] = this.window();
    const lines = this.lines.map((line) => inside(line, low, high));
    const scale = vertical(lines, this.look.log || this.ownLog);
    const x = (step) => LEFT + ((step - low) / (high - low)) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - scale.share(value) * (height - TOP - BOTTOM);
    axes(context, colours, { width, height, x, y, scale, low, high });
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT + 4, height - BOTTOM + 1);
    context.clip();
    for (const line of lines) this.drawLine(context, line, x, y, height, colours);
    if (this.at !== null) this.drawCross(context, colours, x, y, height);
    context.restore();
  }

  drawLine(context, line, x, y, height, colours) {
    const window = this.look.smooth;
    const smooth = window > 1 ? runningMean(line.values, window) : null;
    context.strokeStyle = line.colour;
    context.lineJoin = "round";
    context.setLineDash(smooth ? [] : line.dash);
    context.globalAlpha = smooth ? 0.25 : 1;
    context.lineWidth = smooth ? 1 : line.width;
    path(context, line.steps, line.values, x, y);
    if (smooth) {
      context.globalAlpha = 1;
      context.lineWidth = line.width;
      context.setLineDash(line.dash);
      path(context, line.steps, smooth, x, y);
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
    if (line.steps.length <= 30) dots(context, line, x, y);
    context.strokeStyle = colours.alarm;
    line.values.forEach((value, i) => { if (value === null) crossMark(context, x(line.steps[i]), height - BOTTOM - 6); });
  }

  drawCross(context, colours, x, y, height) {
    context.strokeStyle = colours.faint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(this.at), TOP);
    context.lineTo(x(this.at), height - BOTTOM);
    context.stroke();
    for (const line of this.lines) {
      const i = nearest(line.steps, this.at);
      if (i < 0 || line.values[i] === null) continue;
      context.fillStyle = line.colour;
      context.beginPath();
      context.arc(x(line.steps[i]), y(line.values[i]), 3.5, 0, 7);
      context.fill();
    }
    if (this.drag !== null) {
      context.fillStyle = colours.focus;
      context.globalAlpha = 0.15;
      context.fillRect(x(this.drag), TOP, x(this.at) - x(this.drag), height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
  }
}

/** Returns a short piece of a line, with its colour and dashes. */
function stroke({ colour, dash }) {
  const piece = el("span", { class: "stroke", "aria-hidden": "true" });
  let at = 0;
  const stops = (dash.length ? dash : [1, 0]).map((length, i) => `${i % 2 ? "transparent" : colour} ${at}px ${at += length}px`);
  piece.style.background = `repeating-linear-gradient(to right, ${stops.join(", ")})`;
  return piece;
}

function said(line) {
  const known = line.values.filter((value) => value !== null);
  if (!known.length) return `${line.name}: no value`;
  return `${line.name}: from ${number(known[0])} to ${number(known[known.length - 1])} over ${line.steps.length} points`;
}

/** Returns the part of a line in view, with one more point at each end. */
function inside(line, low, high) {
  const first = Math.max(0, line.steps.findIndex((step) => step >= low) - 1);
  const after = line.steps.findIndex((step) => step > high);
  const last = after < 0 ? line.steps.length : after + 1;
  return { ...line, steps: line.steps.slice(first, last), values: line.values.slice(first, last) };
}

function vertical(lines, log) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const value of line.values) {
    if (value === null || (log && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (log && low < Infinity) {
    if (low === high) { low /= 2; high *= 2; }
    const [a, b] = [Math.log(low), Math.log(high)];
    return { log: true, low, high, share: (value) => (value > 0 ? (Math.log(value) - a) / (b - a) : 0) };
  }
  if (low === Infinity) [low, high] = [0, 1];
  const pad = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  low -= pad;
  high += pad;
  return { log: false, low, high, share: (value) => (value - low) / (high - low) };
}

function axes(context, colours, { width, height, x, y, scale, low, high }) {
  const across = scale.log ? decades(scale.low, scale.high, 6) : ticks(scale.low, scale.high, 5);
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of across) {
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(LEFT, Math.round(y(value)) + 0.5);
    context.lineTo(width - RIGHT, Math.round(y(value)) + 0.5);
    context.stroke();
    context.fillStyle = colours.faint;
    context.fillText(number(value), LEFT - 6, y(value));
  }
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const step of ticks(low, high, width / 90).filter((value) => Number.isInteger(value))) {
    context.fillText(number(step), Math.min(x(step), width - RIGHT - 4), height - BOTTOM + 6);
  }
}

/**
 * Draws a line with gaps at values that are not finite. If points are denser than pixels, each pixel shows their range.
 */
function path(context, steps, values, x, y) {
  context.beginPath();
  let pen = false, pixel = NaN, least = 0, most = 0;
  const dense = steps.length > 2 * (x(steps[steps.length - 1]) - x(steps[0]));
  for (let i = 0; i < steps.length; i++) {
    if (values[i] === null) { pen = false; continue; }
    const px = x(steps[i]), py = y(values[i]);
    if (dense && Math.round(px) === pixel && pen) {
      least = Math.min(least, py);
      most = Math.max(most, py);
      const isLast = i + 1 === steps.length || values[i + 1] === null || Math.round(x(steps[i + 1])) !== pixel;
      if (isLast) { context.lineTo(pixel, least); context.lineTo(pixel, most); context.lineTo(px, py); }
      continue;
    }
    if (pen) context.lineTo(px, py);
    else context.moveTo(px, py);
    pen = true;
    pixel = Math.round(px);
    least = most = py;
  }
  context.stroke();
}

function dots(context, line, x, y) {
  context.fillStyle = line.colour;
  line.steps.forEach((step, i) => {
    if (line.values[i] === null) return;
    context.beginPath();
    context.arc(x(step), y(line.values[i]), 2, 0, 7);
    context.fill();
  });
}

function crossMark(context, x, y) {
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x - 4, y - 4);
  context.lineTo(x + 4, y + 4);
  context.moveTo(x + 4, y - 4);
  context.lineTo(x - 4, y + 4);
  context.stroke();
}

/** Returns the mean over the `window` values around each value, without values that are not finite. */
export function runningMean(values, window) {
  const half = Math.floor(window / 2);
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  return values.map((_, i) => {
    const a = Math.max(0, i - half), b = Math.min(values.length, i + half + 1);
    return counts[b] > counts[a] ? (sums[b] - sums[a]) / (counts[b] - counts[a]) : null;
  });
}

/** Returns the index of the step nearest to `at`, or -1 without steps. `steps` are sorted. */
function nearest(steps, at) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && at - steps[low - 1] < steps[low] - at) low -= 1;
  return low < steps.length ? low : -1;
}
