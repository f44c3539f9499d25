// Draws a timeline: lanes of spans, marks, the limits of steps and the axis of time.

import { begin, theme, timeTicks } from "vime/canvas";
import { axisTime, phaseColour, phaseText } from "vime/format";
import { NAME, ROLLOUT } from "vime/spans";

export const ROW_HEIGHT = 18, LANE_GAP = 16, TOP = 40;
const ALARMS = new Set(["error", "dead", "failed", "warning", "concern_begin", "dropped"]);

export const gutter = (width) => (width < 600 ? 84 : 132);

/** Returns the top of each lane, and the bottom of the last lane. */
export function tops(spans) {
  const found = [TOP];
  for (const rows of spans.rows) found.push(found.at(-1) + Math.max(1, rows.length) * ROW_HEIGHT + LANE_GAP);
  return found;
}

/**
 * `view`: {from, to} in seconds after the begin. `chosen`: a span or null. `lane`: the lane that the keyboard controls.
 */
export function drawLanes(canvas, spans, view, chosen, lane) {
  const { context, width, height } = begin(canvas);
  if (!width) return;
  const colours = theme();
  const left = gutter(width);
  const x = (time) => left + ((time - view.from) / (view.to - view.from)) * (width - left);
  const pixel = (view.to - view.from) / (width - left);
  const at = tops(spans);
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, height);
  context.clip();
  drawAxis(context, colours, view, x, width, height, left);
  drawSteps(context, colours, spans.timeline.steps, x, width, left, height);
  spans.rows.forEach((rows, i) => rows.forEach((row, r) => {
    const y = at[i] + r * ROW_HEIGHT;
    if (row) spans.each(row, view.from, view.to, pixel, (span, from, to) => drawSpan(context, colours, spans, span, x(from), x(to), y, left, span === chosen));
  }));
  drawMarks(context, colours, spans.timeline.marks, at, x, left, width);
  context.restore();
  drawNames(context, colours, spans.timeline.lanes, at, left, width, lane);
}

function drawSpan(context, colours, spans, span, from, to, y, left, isChosen) {
  const name = spans.timeline.names[span[NAME]];
  const width = Math.max(1, to - from - (to - from > 4 ? 0.5 : 0));
  context.fillStyle = phaseColour(name);
  context.fillRect(from, y, width, ROW_HEIGHT - 2);
  if (isChosen) {
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.strokeRect(from, y, Math.max(2, width), ROW_HEIGHT - 2);
  }
  const begin = Math.max(from, left);
  const rollout = span[ROLLOUT] === null ? "" : String(span[ROLLOUT]);
  const room = Math.min(to, context.canvas.clientWidth) - begin - 8;
  if (room < 8) return;
  const text = [`${phaseText(name)} ${rollout}`.trim(), phaseText(name), rollout].find((own) => context.measureText(own).width <= room);
  if (!text) return;
  context.fillStyle = ink(phaseColour(name));
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, begin + 4, y + ROW_HEIGHT / 2 - 1);
}

/** Returns black or white, whichever is clearer on a colour. */
function ink(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
}

function drawAxis(context, colours, view, x, width, height, left) {
  context.textBaseline = "top";
  context.textAlign = "center";
  context.lineWidth = 1;
  const times = timeTicks(view.from, view.to, (width - left) / 110);
  for (const time of times) {
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(Math.round(x(time)) + 0.5, 20);
    context.lineTo(Math.round(x(time)) + 0.5, height);
    context.stroke();
    const text = axisTime(time, times[1] - times[0]), half = context.measureText(text).width / 2;
    context.fillStyle = colours.faint;
    context.fillText(text, Math.max(left + half, Math.min(x(time), width - half)), 4);
  }
}

function drawSteps(context, colours, steps, x, width, left, height) {
  context.textAlign = "left";
  let free = left;
  for (const [rollout, from, to] of steps) {
    if (x(to) < left || x(from) > width) continue;
    if (x(to) - x(from) > 3) {
      context.strokeStyle = colours.faint;
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(x(to), 20);
      context.lineTo(x(to), height);
      context.stroke();
      context.setLineDash([]);
    }
    const text = x(to) - x(from) > 60 ? `step ${rollout}` : String(rollout);
    const place = Math.max(x(from) + 3, left + 3);
    if (place < free || place + context.measureText(text).width > x(to)) continue;
    context.fillStyle = colours.faint;
    context.fillText(text, place, 22);
    free = place + context.measureText(text).width + 8;
  }
}

function drawMarks(context, colours, marks, at, x, left, width) {
  const last = new Map();
  for (const [lane, time, kind] of marks) {
    const place = x(time);
    if (place < left - 4 || place > width + 4) continue;
    const key = `${lane} ${kind}`;
    if (place - (last.get(key) ?? -9) < 3) continue;
    last.set(key, place);
    const y = at[lane + 1] - LANE_GAP + 2;
    context.fillStyle = ALARMS.has(kind) ? colours.alarm : colours.text;
    context.beginPath();
    context.moveTo(place, y);
    context.lineTo(place - 4, y + 7);
    context.lineTo(place + 4, y + 7);
    context.fill();
  }
}

function drawNames(context, colours, lanes, at, left, width, chosen) {
  context.fillStyle = colours.back;
  context.fillRect(0, 0, left - 2, at.at(-1));
  context.textBaseline = "middle";
  context.textAlign = "left";
  lanes.forEach(([source, device], i) => {
    if (i === chosen) {
      context.fillStyle = colours.focus;
      context.fillRect(0, at[i], 3, at[i + 1] - at[i] - LANE_GAP);
    }
    context.fillStyle = colours.text;
    const text = device ? `${source} ${device}` : source;
    context.fillText(text, 8, at[i] + ROW_HEIGHT / 2 - 1, left - 14);
  });
}
