// Shows the configuration and the versions of the runs: only the differences, or everything.

import { choice, el, fill, labelled, later, table } from "vime/dom";

const PARTS = [["configuration", "Configuration"], ["versions", "Versions and machine"]];
/** Flags that differ in every run. */
const OWN = new Set(["run_dir", "weight_dir"]);
const MOST_ROWS = 400;

export class SettingsScreen {
  constructor(source) {
    this.source = source;
    this.runs = [];
    this.found = null;
    this.which = "differences";
    this.search = el("input", { type: "search", placeholder: "such as lr", oninput: later(150, () => this.arrange()) });
    this.select = choice([["differences", "that differ"], ["all", "all"]], "differences", (value) => { this.which = value; this.arrange(); });
    this.tables = el("div");
    this.element = el("div", {}, el("div", { class: "controls" }, labelled("Settings", this.select), labelled("Search", this.search)), this.tables);
  }

  async update(runs) {
    this.runs = runs;
    if (this.found) return;
    this.found = await Promise.all(runs.map((_, i) => this.source.settings(i)));
    if (runs.length < 2) {
      this.which = "all";
      this.select.value = "all";
    }
    this.arrange();
  }

  arrange() {
    const wanted = this.search.value.trim().toLowerCase();
    const parts = PARTS.map(([part, title]) => {
      const names = [...new Set(this.found.flatMap((own) => Object.keys(own[part])))].sort();
      const rows = names.map((name) => [name, ...this.found.map((own) => said(own[part][name]))])
        .filter((row) => row.some((cell) => cell.toLowerCase().includes(wanted)))
        .filter((row) => this.which === "all" || (!OWN.has(row[0]) && row.slice(2).some((cell) => cell !== row[1])));
      const missing = this.found.flatMap((own, i) => Object.keys(own[part]).length ? [] : [this.runs[i].name]);
      return el("section", { class: "card" }, el("h2", {}, title),
        missing.length ? el("p", { class: "faint" }, `Not recorded: ${missing.join(", ")}`) : null,
        rows.length ? table(`${title}: ${rows.length} ${counted(this.which === "all" ? "entry" : "difference", rows.length)}`, ["name", ...this.runs.map((run) => run.name)], rows.slice(0, MOST_ROWS))
          : el("p", {}, this.which === "all" ? "None with this name." : this.runs.length < 2 ? "One run differs from none: open several." : "They do not differ."),
        rows.length > MOST_ROWS ? el("p", { class: "faint" }, `The first ${MOST_ROWS} of ${rows.length}: search for the others.`) : null);
    });
    fill(this.tables, parts);
  }
}

function counted(noun, count) {
  if (count === 1) return noun;
  return noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`;
}

function said(value) {
  if (value === undefined) return "(absent)";
  return typeof value === "string" ? value : JSON.stringify(value);
}
