// Shows the tokens of a response, each with a colour: the difference between trainer and engine, or the token's
// probability.

import { choice, el, fill, labelled } from "vime/dom";
import { number } from "vime/format";

const TEXT = 0, ID = 1, MASK = 2, ENGINE = 3, TRAINER = 4;
const SCALES = [["0.001", "0.001 nats"], ["0.01", "0.01 nats"], ["0.1", "0.1 nats"], ["1", "1 nat"], ["own", "the largest here"]];

/** The reader's choice, which is kept for the next sample. */
const chosen = { colour: "gap", scale: "0.1" };

const gap = (token) => (token[ENGINE] === null || token[TRAINER] === null ? null : token[TRAINER] - token[ENGINE]);

export class Tokens {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = -1;
    this.spans = [];
    this.readout = el("output", { class: "readout" });
    this.body = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the response. Arrow keys read each token." });
    this.scale = labelled("Full colour at", choice(SCALES, chosen.scale, (value) => { chosen.scale = value; this.paint(); }));
    this.key = el("span", { class: "key" });
    this.element = el("div", {},
      el("div", { class: "controls" },
        labelled("Colour", choice([["gap", "trainer − engine"], ["engine", "probability"], ["none", "none"]], chosen.colour, (value) => { chosen.colour = value; this.paint(); })),
        this.scale, this.key),
      this.body, this.readout);
    this.build();
    this.paint();
    this.listen();
  }

  /** Makes one block for each run of tokens that the model, or a tool, has written. */
  build() {
    this.spans = this.tokens.map((token, i) => {
      const span = el("span", {}, visible(token[TEXT]));
      span.dataset.i = i;
      return span;
    });
    fill(this.body, blocksOf(this.tokens).map(({ model, turn, first, end }) => el("div", { class: model ? "turn" : "turn tool" },
      el("p", { class: "faint who" }, writer(model, turn), ` · ${end - first} ${end - first === 1 ? "token" : "tokens"}`), this.spans.slice(first, end))));
    if (!this.tokens.length) fill(this.body, el("p", { class: "faint" }, "The response has no tokens."));
  }

  paint() {
    const gaps = this.tokens.map((token) => (token[MASK] ? gap(token) : null));
    const largest = gaps.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
    const scale = chosen.scale === "own" ? largest || 1 : Number(chosen.scale);
    this.scale.hidden = chosen.colour !== "gap";
    this.tokens.forEach((token, i) => { this.spans[i].style.backgroundColor = token[MASK] ? this.colour(token, gaps[i], scale) : ""; });
    const known = gaps.some((value) => value !== null);
    this.key.textContent = chosen.colour === "gap"
      ? known ? `orange: the engine was surer; blue: the trainer. Largest difference: ${number(largest)} nats` : "The trainer's log-probs are not known: the rollout is not trained yet, or is not kept."
      : chosen.colour === "engine" ? "darker: less likely for the engine" : "";
  }

  colour(token, difference, scale) {
    if (chosen.colour === "gap") {
      if (difference === null) return "";
      const share = 0.8 * Math.min(1, Math.abs(difference) / scale);
      return difference > 0 ? `rgb(0 114 178 / ${share})` : `rgb(230 130 0 / ${share})`;
    }
    if (chosen.colour === "none" || token[ENGINE] === null) return "";
    return `rgb(140 90 200 / ${0.75 * (1 - Math.exp(token[ENGINE]))})`;
  }

  listen() {
    this.body.addEventListener("pointerover", (event) => { if (event.target.dataset.i) this.read(Number(event.target.dataset.i)); });
    this.body.addEventListener("click", (event) => { if (event.target.dataset.i) this.read(Number(event.target.dataset.i)); });
    this.body.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: this.tokens.length - 1 }[event.key];
      if (to === undefined || !this.tokens.length) return;
      event.preventDefault();
      this.read(Math.max(0, Math.min(this.tokens.length - 1, to)));
      this.spans[this.at].scrollIntoView({ block: "nearest" });
    });
  }

  read(i) {
    this.spans[this.at]?.classList.remove("here");
    this.at = i;
    this.spans[i].classList.add("here");
    const token = this.tokens[i], difference = gap(token);
    const parts = [`token ${i}: ${JSON.stringify(token[TEXT])}`, `id ${token[ID]}`];
    if (!token[MASK]) parts.push("not trained");
    if (token[ENGINE] !== null) parts.push(`engine ${number(token[ENGINE])} nats (${(100 * Math.exp(token[ENGINE])).toPrecision(3)}%)`);
    if (token[TRAINER] !== null) parts.push(`trainer ${number(token[TRAINER])}`);
    if (difference !== null) parts.push(`difference ${number(difference)}`);
    this.readout.textContent = parts.join(", ");
  }
}

/** Returns runs of tokens [first, end) that the model, or a tool, has written. `turn` counts the runs of the model. */
export function blocksOf(tokens) {
  const blocks = [];
  let turn = 0;
  tokens.forEach((token, i) => {
    if (i === 0 || token[MASK] !== tokens[i - 1][MASK]) {
      if (token[MASK]) turn += 1;
      blocks.push({ model: Boolean(token[MASK]), turn, first: i, end: i });
    }
    blocks.at(-1).end = i + 1;
  });
  return blocks;
}

/** Returns the writer of a block. */
export const writer = (model, turn) => (model ? `model, turn ${turn}` : "tool or environment, not trained");

/** Replaces a line break by a sign, so that a token with only a line break is visible. */
function visible(text) {
  return text.replaceAll("\n", "↵\n");
}
