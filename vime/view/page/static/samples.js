// Shows the screen of samples: a list of all kept samples, filters, and next to them one sample or the answers of its
// group.

import { choice, el, fill, labelled } from "vime/dom";
import { Filters } from "vime/filters";
import { number } from "vime/format";
import { groupView } from "vime/group";
import { sampleView } from "vime/sample";
import { VirtualList } from "vime/virtual";

const ROW_HEIGHT = 58;

export class SamplesScreen {
  constructor(source, go) {
    this.source = source;
    this.go = go;
    this.run = 0;
    this.wanted = null;
    this.grouped = false;
    this.reset();
    this.filters = new Filters(() => this.filter().catch((error) => { this.count.textContent = error.message; }));
    this.count = el("p", { class: "faint", role: "status" });
    this.picker = el("div");
    this.list = new VirtualList("Samples", ROW_HEIGHT, makeRow, (element, i) => showRow(element, this.shown[i], this.at), (i) => this.choose(i));
    this.detail = el("section", { class: "card detail", "aria-label": "Sample" }, el("p", { class: "faint" }, "Choose a sample. Arrow keys go through the list."));
    const back = el("button", { type: "button", class: "back", onclick: () => this.close() }, "Back to the list");
    this.pane = el("div", { class: "pane" }, back, this.detail);
    this.split = el("div", { class: "split" }, el("div", { class: "left" }, this.count, this.list.element), this.pane);
    this.more = el("details", { class: "filters", open: innerWidth >= 800 }, el("summary", {}, "Search and filters"), this.filters.element);
    this.element = el("div", { class: "samples" }, this.picker, this.more, this.split);
  }

  reset() {
    this.rows = new Map();
    this.shown = [];
    this.serial = 0;
    this.stamp = null;
    this.open = null;
    this.found = null;
    this.searched = "";
    this.at = {};
  }

  show([run, rollout, place, view]) {
    const number_ = Number(run ?? 0) || 0;
    if (number_ !== this.run) this.reset();
    this.run = number_;
    this.wanted = place === undefined ? null : `${Number(rollout)}/${Number(place)}`;
    this.grouped = view === "group";
    this.element.classList.toggle("one", this.wanted !== null);
    this.element.classList.toggle("grouped", this.wanted !== null && this.grouped);
    if (this.wanted) this.openSample();
  }

  async update(runs) {
    if (this.run >= runs.length) { this.run = 0; this.reset(); }
    if (runs.length > 1 && this.picker.childElementCount === 0) {
      this.select = choice(runs.map((run, i) => [i, run.name]), this.run, (i) => this.go(`samples/${i}`));
      fill(this.picker, el("div", { class: "controls" }, labelled("Run", this.select)));
    }
    if (this.select && document.activeElement !== this.select) this.select.value = String(this.run);
    if (runs[this.run].stamps.samples === this.stamp || this.reading) return;
    this.reading = true;
    try {
      await this.read();
      this.stamp = runs[this.run].stamps.samples;
    } finally {
      this.reading = false;
    }
  }

  /** Gets the rows of rollouts that are new or have changed, part by part. */
  async read() {
    for (let more = true; more;) {
      const run = this.run;
      const answer = await this.source.samples(run, this.serial);
      if (run !== this.run) continue;  // the reader has chosen another run in between
      this.at = Object.fromEntries(answer.columns.map((name, i) => [name, i]));
      for (const [rollout, rows] of Object.entries(answer.rows)) {
        this.rows.set(Number(rollout), rows);
        if (this.open?.startsWith(`${rollout}/`)) this.open = null;  // the trainer has written its part
      }
      this.serial = answer.serial;
      more = answer.more;
      this.total = [...this.rows.values()].reduce((sum, rows) => sum + rows.length, 0);
      this.arrange(more);
    }
    this.searched = null;  // new samples may have the text
    await this.filter();
    if (this.wanted) this.openSample();
  }

  async filter() {
    const text = this.filters.search;
    if (text !== this.searched) {
      this.searched = text;
      this.found = text ? new Set() : null;
      for (let begin = text ? 0 : null; begin !== null;) {
        const { found, next } = await this.source.find(this.run, text, begin);
        if (text !== this.filters.search) return;
        for (const [rollout, place] of found) this.found.add(`${rollout}/${place}`);
        begin = next;
        this.arrange(begin !== null);
      }
    }
    this.arrange(false);
  }

  arrange(more) {
    const all = [...this.rows.values()].flat();
    this.filters.offer([...new Set(all.map((row) => row[this.at.status]))].sort());
    this.shown = this.filters.apply(all, this.at, this.found);
    const kept = this.source.live ? null : this.source.kept(this.run);
    const whole = kept && kept[1] > kept[0] ? `; this file has the newest ${number(kept[0])} of ${number(kept[1])}` : "";
    this.count.textContent = !all.length
      ? more ? "Reading…" : "No samples: --save-samples says how many of each rollout a run keeps, and none are there yet."
      : `${number(this.shown.length)} of ${number(all.length)} samples${more ? ", reading…" : ""}${whole}`;
    this.list.set(this.shown.length, this.placeOf(this.wanted));
  }

  placeOf(name) {
    return name === null ? -1 : this.shown.findIndex((row) => `${row[this.at.rollout]}/${row[this.at.place]}` === name);
  }

  choose(i) {
    const row = this.shown[i];
    this.wanted = `${row[this.at.rollout]}/${row[this.at.place]}`;
    this.go(`samples/${this.run}/${this.wanted}${this.grouped ? "/group" : ""}`, { replace: this.open !== null });
  }

  async openSample() {
    const name = this.wanted;
    const [rollout, place] = name.split("/").map(Number);
    const rows = new Map((this.rows.get(rollout) ?? []).map((own) => [own[this.at.place], own]));
    const row = rows.get(place);
    const view = this.grouped ? `${name}/group` : name;
    if (!row || this.open === view) return;
    this.open = view;
    try {
      const made = this.grouped ? await this.groupElement(rollout, place, rows) : await this.sampleElement(rollout, place, rows);
      if (this.open !== view) return;
      fill(this.detail, made ?? el("p", {}, "This file does not have the sample."));
      this.detail.scrollTop = 0;
    } catch (error) {
      fill(this.detail, el("p", { class: "alarm" }, error.message));
    }
    this.list.active = this.placeOf(name);
    if (this.list.active >= 0) this.list.reveal(this.list.active);
  }

  async sampleElement(rollout, place, rows) {
    const sample = await this.source.sample(this.run, rollout, place);
    const row = rows.get(place), group = row[this.at.group];
    const answers = group === null ? 1 : [...rows.values()].filter((own) => own[this.at.group] === group).length;
    return sample && sampleView(sample, row, this.at, answers, () => this.go(`samples/${this.run}/${rollout}/${place}/group`));
  }

  async groupElement(rollout, place, rows) {
    const samples = await this.source.group(this.run, rollout, place);
    const open = (chosen) => this.go(`samples/${this.run}/${rollout}/${chosen}`);
    return samples.length ? groupView(samples, rows, this.at, place, open) : null;
  }

  close() {
    this.open = null;
    this.go(`samples/${this.run}`);
    this.list.element.focus();
  }
}

function makeRow() {
  return el("div", { class: "row" },
    el("span", { class: "reward" }), el("span", { class: "texts" }, el("span", { class: "prompt" }), el("span", { class: "response" })),
    el("span", { class: "facts faint" }));
}

function showRow(element, row, at) {
  const [reward, texts, facts] = element.children;
  reward.textContent = number(row[at.reward]);
  texts.children[0].textContent = row[at.prompt];
  texts.children[1].textContent = row[at.response] || "(empty)";
  const version = row[at.oldest] === null ? "" : row[at.oldest] === row[at.newest] ? ` · v${row[at.oldest]}` : ` · v${row[at.oldest]}–${row[at.newest]}`;
  const turns = row[at.turns] > 1 ? ` · ${row[at.turns]} turns` : "";
  const status = row[at.status] === "completed" ? "" : ` · ${row[at.status]}`;
  facts.textContent = `${row[at.rollout]}/${row[at.place]} · ${number(row[at.tokens])} tok${version}${turns}${status}`;
  element.classList.toggle("bad", row[at.status] !== "completed");
}
