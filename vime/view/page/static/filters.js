// Chooses the samples that the list shows, and their order.

import { choice, el, labelled, later } from "vime/dom";

/** Ranges: the text of the form, and the column that must be in the range. `step`: step of the number field. */
const RANGES = [
  ["Reward", (row, at) => row[at.reward], "any"],
  ["Length", (row, at) => row[at.tokens], 1],
  ["Version", (row, at) => row[at.oldest], 1],
  ["Rollout", (row, at) => row[at.rollout], 1],
];
const ORDERS = [
  ["rollout", "newest rollout", (row, at) => -row[at.rollout]],
  ["oldest", "oldest rollout", (row, at) => row[at.rollout]],
  ["reward", "highest reward", (row, at) => -(row[at.reward] ?? -Infinity)],
  ["low", "lowest reward", (row, at) => row[at.reward] ?? Infinity],
  ["long", "longest", (row, at) => -row[at.tokens]],
  ["gap", "largest difference of a token", (row, at) => -(row[at.largest_gap] ?? -Infinity)],
  ["group", "group", (row, at) => row[at.group] ?? Infinity],
];

export class Filters {
  /** `change(text)` is called when the form changes; `text` is searched in prompts and responses. */
  constructor(change) {
    const changed = later(150, () => change());
    this.text = el("input", { type: "search", oninput: later(300, () => change()), placeholder: "in prompt and response" });
    this.ranges = RANGES.map(([name, of, step]) => {
      const end = (what) => el("input", { type: "number", step, "aria-label": `${name}, ${what}`, placeholder: what === "lowest" ? "from" : "to", oninput: changed });
      const low = end("lowest"), high = end("highest");
      return { name, of, low, high };
    });
    this.status = choice([["", "any"]], "", changed);
    this.order = choice(ORDERS.map(([own, text]) => [own, text]), "rollout", changed);
    const clear = el("button", { type: "reset", onclick: () => setTimeout(change) }, "Clear");
    this.element = el("form", { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
      labelled("Search", this.text),
      this.ranges.map(({ name, low, high }) => el("fieldset", {}, el("legend", {}, name), low, high)),
      labelled("Status", this.status), labelled("Order", this.order), clear);
  }

  /** Sets the statuses that samples have. */
  offer(statuses) {
    if (this.status.options.length === statuses.length + 1) return;
    const own = this.status.value;
    this.status.replaceChildren(el("option", { value: "" }, "any"), ...statuses.map((status) => el("option", { value: status }, status)));
    this.status.value = statuses.includes(own) ? own : "";
  }

  get search() { return this.text.value.trim(); }

  /**
   * Returns the rows that pass, in their order. `found`: the samples with the searched text, or null. `at`: column ->
   * index.
   */
  apply(rows, at, found) {
    const bounds = this.ranges.map(({ of, low, high }) => [of, low.value === "" ? null : Number(low.value), high.value === "" ? null : Number(high.value)])
      .filter(([, low, high]) => low !== null || high !== null);
    const status = this.status.value;
    const passing = rows.filter((row) => (!status || row[at.status] === status)
      && (!found || found.has(`${row[at.rollout]}/${row[at.place]}`))
      && bounds.every(([of, low, high]) => {
        const value = of(row, at);
        return value !== null && (low === null || value >= low) && (high === null || value <= high);
      }));
    const key = ORDERS.find(([own]) => own === this.order.value)[2];
    const keyed = passing.map((row) => [key(row, at), row]);
    keyed.sort(([a, left], [b, right]) => a - b || left[at.rollout] - right[at.rollout] || left[at.place] - right[at.place]);
    return keyed.map(([, row]) => row);
  }
}
