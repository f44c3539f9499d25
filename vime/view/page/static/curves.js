// Shows the first screen: the state of the runs, and their curves in common charts.

import { Chart } from "vime/chart";
import { choice, el, fill, labelled, later } from "vime/dom";
import { dash, number, runColour } from "vime/format";
import { showRuns } from "vime/runs";

/** The first panels: title, test whether a metric belongs to the panel, and whether its axis is logarithmic. */
const PANELS = [
  ["Reward", (name) => name === "rollout/raw_reward"],
  ["Parts of the reward", (name) => /^rollout\/reward\/[^/]+$/.test(name)],
  ["Evaluation", (name) => /^eval\/[^/]+$/.test(name) && !/-(truncated|aborted)_ratio$|^eval\/step$/.test(name)],
  ["Held-out loss", (name) => /^eval\/.+\/loss$/.test(name)],
  ["Held-out accuracy", (name) => /^eval\/.+\/rewards\/accuracies$/.test(name)],
  ["Loss", (name) => name === "train/loss"],
  ["Gradient norm", (name) => name === "train/grad_norm"],
  ["Entropy (nats)", (name) => name === "train/entropy_loss"],
  ["KL", (name) => name === "train/ppo_kl" || name === "train/kl_loss"],
  ["Log-prob difference (nats)", (name) => name === "train/train_rollout_logprob_abs_diff", true],
  ["Response length (tokens)", (name) => name === "rollout/response_len/mean"],
  ["Truncated responses (share)", (name) => name === "rollout/truncated_ratio"],
  ["Staleness (weight updates)", (name) => /^rollout\/staleness\/(mean|max)$/.test(name)],
  ["Tokens per second per device", (name) => name === "perf/tokens_per_gpu_per_sec"],
  ["Seconds of a step", (name) => name === "perf/step_time" || name === "perf/train_wait_time"],
];
const MOST_OTHERS = 24;
const NEWEST = [["reward", "rollout/raw_reward"], ["loss", "train/loss"], ["tokens/s per device", "perf/tokens_per_gpu_per_sec"]];

export class CurvesScreen {
  constructor(source) {
    this.source = source;
    this.runs = [];
    this.curves = [];
    this.stamps = [];
    this.hidden = new Set();
    this.look = { smooth: 1, log: false, window: null };
    this.charts = new Map();
    this.shown = MOST_OTHERS;
    this.cards = el("div", { class: "cards" });
    this.picker = el("div", { class: "picker", role: "group", "aria-label": "Runs that the charts show" });
    this.main = el("div", { class: "charts" });
    this.others = el("div", { class: "charts" });
    this.count = el("p", { class: "faint", role: "status" });
    this.more = el("button", { type: "button", onclick: () => { this.shown += MOST_OTHERS; this.arrange(); } }, "Show more");
    this.search = el("input", { type: "search", placeholder: "such as perf/", oninput: later(150, () => { this.shown = MOST_OTHERS; this.arrange(); }) });
    this.element = el("div", {}, this.cards, this.controls(), this.main,
      el("section", { "aria-label": "Other metrics" }, el("h2", {}, "Other metrics"),
        labelled("Search", this.search), this.count, this.others, this.more));
  }

  controls() {
    const smooth = choice([[1, "none"], [5, "mean of 5"], [11, "mean of 11"], [51, "mean of 51"]], 1, (value) => this.change({ smooth: Number(value) }));
    const log = el("input", { type: "checkbox", onchange: () => this.change({ log: log.checked }) });
    this.whole = el("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "All steps");
    return el("div", { class: "controls" }, this.picker, labelled("Smoothing", smooth), labelled("Logarithmic", log), this.whole,
      el("span", { class: "faint hint" }, "Drag over a chart to zoom. Arrow keys read values."));
  }

  change(look) {
    Object.assign(this.look, look);
    for (const chart of this.charts.values()) chart.refresh();
  }

  zoom(window) {
    this.whole.hidden = window === null;
    this.change({ window });
  }

  async update(runs) {
    this.runs = runs;
    this.pick();
    await Promise.all(runs.map(async (run, i) => {
      if (this.stamps[i] === run.stamps.curves && this.curves[i]) return;
      try {
        this.curves[i] = await this.source.curves(i);
        this.stamps[i] = run.stamps.curves;
      } catch (error) {
        this.curves[i] ??= {};
        run.cause = [run.cause, error.message].filter(Boolean).join("; ");
      }
    }));
    showRuns(this.cards, runs, (i) => this.newest(i));
    this.arrange();
  }

  newest(i) {
    return NEWEST.filter(([, name]) => this.curves[i][name]?.values.length)
      .map(([text, name]) => [text, number(this.curves[i][name].values.at(-1) ?? NaN)]);
  }

  pick() {
    if (this.picker.childElementCount === this.runs.length || this.runs.length < 2) return;
    fill(this.picker, this.runs.map((run, i) => {
      const box = el("input", { type: "checkbox", checked: true, onchange: () => {
        if (box.checked) this.hidden.delete(i);
        else this.hidden.add(i);
        this.arrange();
      } });
      const label = labelled(run.name, box);
      label.style.setProperty("--run", runColour(i));
      label.classList.add("pick");
      return label;
    }));
  }

  arrange() {
    const names = [...new Set(this.curves.flatMap((curves) => Object.keys(curves)))].sort();
    const first = PANELS.map(([title, owns, log]) => [title, names.filter(owns), log]).filter(([, own]) => own.length);
    const taken = new Set(first.flatMap(([, own]) => own));
    const wanted = this.search.value.trim().toLowerCase();
    const rest = names.filter((name) => !taken.has(name) && name.toLowerCase().includes(wanted));
    const visible = wanted ? rest.slice(0, this.shown) : [];
    this.count.textContent = !names.length ? "No metrics yet: the first step has not ended."
      : wanted ? `${rest.length} metrics have this in their name` : `${rest.length} more metrics: give a part of a name`;
    this.more.hidden = visible.length >= rest.length || !wanted;
    this.place(this.main, first);
    this.place(this.others, visible.map((name) => [name, [name], false]));
    for (const [title, chart] of this.charts) {
      if (!first.some(([own]) => own === title) && !visible.includes(title)) { chart.end(); this.charts.delete(title); }
    }
  }

  place(parent, panels) {
    const elements = panels.map(([title, names, log]) => {
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, this.look, (window) => this.zoom(window)));
      const chart = this.charts.get(title);
      chart.set(this.linesOf(names), log, this.hasSeveral(names));
      return chart.element;
    });
    const same = elements.length === parent.childElementCount && elements.every((own, i) => parent.children[i] === own);
    if (!same) fill(parent, elements);  // a chart that has the focus is not moved
  }

  /** Returns whether a run has several lines in a chart. The picker names the runs, so one line per run needs no legend. */
  hasSeveral(names) {
    return this.curves.some((curves, i) => !this.hidden.has(i) && names.filter((name) => curves[name]).length > 1);
  }

  linesOf(names) {
    const several = this.runs.length > 1;
    return this.runs.flatMap((run, i) => this.hidden.has(i) ? [] : names.filter((name) => this.curves[i][name]).map((name, j) => ({
      ...this.curves[i][name],
      name: [several ? run.name : "", names.length > 1 || !several ? name.replace(/^(rollout|train|eval|perf)\//, "") : ""].filter(Boolean).join(" "),
      colour: several ? runColour(i) : runColour(j),
      width: 1.6 + (several ? 1.4 * (this.runs.length - 1 - i) : 0),  // equal curves are all visible
      dash: dash(several ? j + 4 * Math.floor(i / 6) : 0),
    })));
  }
}
