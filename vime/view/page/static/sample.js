// Shows one sample: prompt, response by turns and tokens, and the recorded facts.

import { el } from "vime/dom";
import { number } from "vime/format";
import { Tokens } from "vime/tokens";

/**
 * Returns the element of a sample. `row`: its facts in the list, `at`: column -> index in the row. `answers`: the
 * number of answers of its group that the run kept. `openGroup()` shows them.
 */
export function sampleView(sample, row, at, answers, openGroup) {
  const facts = [
    ["rollout, place", `${row[at.rollout]}, ${sample.place}`],
    ["group", sample.group ?? "–"],
    ["reward", rewardText(sample.reward)],
    ["advantage", sample.advantage === null ? "not known yet" : number(sample.advantage)],
    ["label", said(sample.label)],
    ["status", sample.status],
    ["turns", sample.turns],
    ["versions of the weights", sample.versions.length ? [...new Set(sample.versions)].join(", ") : "–"],
    ["|trainer − engine|", row[at.gap] === null ? "not known" : `mean ${number(row[at.gap])}, largest ${number(row[at.largest_gap])} nats`],
  ];
  return el("article", {},
    el("h2", { tabindex: -1 }, `Sample ${row[at.rollout]} / ${sample.place}`),
    answers > 1 ? el("button", { type: "button", class: "to-group", onclick: openGroup }, `Show the ${answers} answers of the group side by side`) : null,
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("h3", {}, "Prompt"), imagesView(sample.images), promptView(sample.prompt),
    sample.read ? el("details", { open: true }, el("summary", {}, "What the model read"), el("pre", { class: "turn" }, sample.read)) : null,
    el("h3", {}, "Response"), new Tokens(sample.tokens).element,
    el("details", {}, el("summary", {}, "Response as one text"), el("pre", {}, sample.response)),
    Object.keys(sample.metadata ?? {}).length
      ? el("details", {}, el("summary", {}, "Metadata"), el("pre", {}, JSON.stringify(sample.metadata, null, 1))) : null);
}

export function promptView(found) {
  if (typeof found === "string") return el("pre", { class: "turn" }, found);
  return found.map((message) => {
    const { role, content, ...rest } = message;
    const more = Object.keys(rest).length ? `\n${JSON.stringify(rest, null, 1)}` : "";
    return el("div", { class: "turn" }, el("p", { class: "faint who" }, said(role)), el("pre", {}, contentText(content) + more));
  });
}

/** Formats the content of a message. A part that is not text is its type in brackets, and its image is shown above. */
export function contentText(content) {
  if (!Array.isArray(content)) return said(content);
  return content.map((part) => part?.text ?? `[${part?.type}]`).join("");
}

/** Shows small copies of the images of a prompt, which are data URLs. */
export function imagesView(images) {
  if (!images?.length) return null;
  return el("div", { class: "images" }, images.map((src, i) => el("img", { src, alt: `Image ${i + 1} of the prompt` })));
}

/** Formats a reward. A reward that is a record is shown whole. */
export const rewardText = (reward) => (typeof reward === "number" ? number(reward) : said(reward));

export function said(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
