// Shows cards with the state of each run: its progress, its current phase, and its errors.

import { append, el, fill } from "vime/dom";
import { duration, moment, number, percent, phaseText, runColour, stateText } from "vime/format";

/**
 * Fills `parent` with a card for each run. `metrics(i)` returns the newest values that the card shows, as [name,
 * value].
 */
export function showRuns(parent, runs, metrics) {
  fill(parent, runs.map((run, i) => card(run, i, metrics(i))));
}

function card(run, i, metrics) {
  const made = el("section", { class: "card run", "aria-label": `run ${run.name}` },
    el("h2", {}, swatch(i), run.name, " ", badge(run)));
  if (run.rollouts || run.rollout !== undefined) append(made, progress(run));
  if (run.cause) append(made, el("p", { class: run.state === "failed" ? "alarm" : "faint" }, run.error_type ? `${run.error_type}: ` : "", run.cause));
  const damaged = Object.entries(run.damaged ?? {}).map(([file, count]) => `${number(count)} in ${file}`).join(", ");
  if (damaged) append(made, el("p", { class: "faint" }, `damaged lines, left out: ${damaged}`));
  const facts = [...metrics];
  if (run.engines?.length) facts.push([run.state === "running" ? "engines" : "engines at the end", engines(run.engines)]);
  if (run.state === "running" && run.doing.length) facts.push(["now", run.doing.map(doing).join(", ")]);
  if (run.updated) facts.push([run.state === "running" ? "newest event" : "ended", moment(run.updated)]);
  append(made, el("dl", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  if (run.concerns?.length) append(made, concerns(run));
  if (run.warning_count) append(made, warnings(run));
  return made;
}

export function swatch(i) {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = runColour(i);
  return made;
}

export function badge(run) {
  return el("span", { class: `badge ${run.state}` }, stateText(run.state));
}

function progress(run) {
  const done = run.rollout === null || run.rollout === undefined ? 0 : run.rollout + 1;
  const of = run.rollouts ? ` of ${run.rollouts}` : "";
  const parts = [`${done}${of} rollouts trained`];
  if (run.step_s) parts.push(`${duration(run.step_s)} per step`);
  if (run.eta_s) parts.push(`ends in about ${duration(run.eta_s)}`);
  const bar = el("progress", { max: 1, "aria-label": `${percent(run.progress ?? 0)} trained` });
  bar.value = run.progress ?? 0;
  return [run.rollouts ? bar : null, el("p", {}, parts.join(", "))];
}

function engines(all) {
  const counts = new Map();
  for (const engine of all) counts.set(engine.state, (counts.get(engine.state) ?? 0) + 1);
  const deaths = all.reduce((sum, engine) => sum + engine.deaths, 0);
  const said = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  return deaths ? `${said}; died ${deaths} times` : said;
}

function doing(phase) {
  return `${phase.source}${phase.device ? ` (${phase.device})` : ""} ${phaseText(phase.name)}`;
}

/** Returns conditions that keep the run from learning, and that hold now or held until the end. */
function concerns(run) {
  return el("ul", { class: "concerns" }, run.concerns.map(({ name, rollout, text, remedy }) => el("li", {},
    el("strong", {}, `${name}, from rollout ${rollout}`), `: ${text}`, el("br"), el("span", { class: "faint" }, remedy))));
}

function warnings(run) {
  return el("details", {},
    el("summary", {}, `${number(run.warning_count)} ${run.warning_count === 1 ? "warning" : "warnings"}`),
    el("ul", { class: "warnings" }, run.warnings.slice().reverse().map((found) =>
      el("li", {}, el("span", { class: "faint" }, `${moment(found.time)} ${found.source} ${found.logger}`), el("br"), found.text))));
}
