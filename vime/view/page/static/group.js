// Shows the answers of one group side by side: the prompt once, and a column for each answer.

import { el } from "vime/dom";
import { number } from "vime/format";
import { imagesView, promptView, rewardText, said } from "vime/sample";
import { blocksOf, writer } from "vime/tokens";

/**
 * Returns the element of a group. `samples`: the samples that the run kept. `rows`: their rows in the list, `at`:
 * column -> index in a row. `chosen`: the place of the answer that the reader selected. `open(place)` shows one answer
 * alone.
 */
export function groupView(samples, rows, at, chosen, open) {
  const scores = samples.map((sample) => rows.get(sample.place)?.[at.reward] ?? null);
  const known = scores.filter((score) => score !== null);
  const [lowest, highest] = [Math.min(...known), Math.max(...known)];
  const names = answerNames(samples);
  const size = samples[0].group_size ?? samples.length;
  return el("article", { class: "group" },
    el("h2", { tabindex: -1 }, `Group ${samples[0].group ?? "–"} of rollout ${rows.get(samples[0].place)?.[at.rollout] ?? "–"}`),
    el("p", { class: "faint" }, summary(samples.length, size, known, lowest, highest)),
    prompts(samples),
    el("div", { class: "answers", role: "list", tabindex: 0, "aria-label": "Answers of the group" },
      samples.map((sample, i) => answer(sample, {
        name: names[i], score: scores[i], row: rows.get(sample.place), at,
        mark: lowest === highest ? "" : scores[i] === highest ? "highest" : scores[i] === lowest ? "lowest" : "",
        chosen: sample.place === chosen,
        open: () => open(sample.place),
      }))));
}

/** Joins samples with one index, which are parts of one answer, such as the conversations of one agent. */
function answerNames(samples) {
  const numbers = new Map(), parts = new Map();
  const keys = samples.map((sample) => (sample.index === null ? `place ${sample.place}` : sample.index));
  for (const key of keys) {
    if (!numbers.has(key)) numbers.set(key, numbers.size + 1);
    parts.set(key, (parts.get(key) ?? 0) + 1);
  }
  const seen = new Map();
  return keys.map((key) => {
    seen.set(key, (seen.get(key) ?? 0) + 1);
    return `Answer ${numbers.get(key)}${parts.get(key) > 1 ? `, part ${seen.get(key)} of ${parts.get(key)}` : ""}`;
  });
}

function summary(kept, size, known, lowest, highest) {
  const count = kept < size ? `${kept} of ${size} answers are kept` : `${size} ${size === 1 ? "answer" : "answers"}`;
  if (!known.length) return `${count}, without rewards`;
  if (lowest === highest) return known.length > 1 ? `${count}, all with the reward ${number(lowest)}` : `${count}, reward ${number(lowest)}`;
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  return `${count}, rewards from ${number(lowest)} to ${number(highest)}, mean ${number(mean)}`;
}

/** Shows the prompt and the text that the model read, once if all answers have the same text. */
function prompts(samples) {
  const [first] = samples;
  const same = (name) => samples.every((sample) => JSON.stringify(sample[name]) === JSON.stringify(first[name]));
  return [
    el("h3", {}, "Prompt"),
    same("prompt") ? null : el("p", { class: "faint" }, "The prompts of the answers differ. This is the prompt of the first one."),
    el("div", { class: "shared" }, imagesView(first.images), promptView(first.prompt)),
    first.read && same("read") ? el("details", {}, el("summary", {}, "What the model read"), el("pre", { class: "turn" }, first.read)) : null,
    first.label === null || first.label === undefined || !same("label") ? null
      : el("p", { class: "label" }, el("span", { class: "faint" }, "label "), said(first.label)),
  ];
}

function answer(sample, { name, score, row, at, mark, chosen, open }) {
  const facts = [
    `${number(sample.tokens.length)} tokens`,
    sample.turns > 1 ? `${sample.turns} turns` : "",
    sample.advantage === null ? "" : `advantage ${number(sample.advantage)}`,
    row && row[at.gap] !== null ? `mean |trainer − engine| ${number(row[at.gap])} nats` : "",
  ];
  return el("section", { class: `answer ${mark}`, role: "listitem", "aria-label": name, "aria-current": chosen ? "true" : null },
    el("header", {},
      el("h4", {}, name),
      el("button", { type: "button", onclick: open, "aria-label": `${name}: its tokens and facts` }, "Open")),
    el("p", { class: "score" },
      el("span", { class: "faint" }, "reward "), el("strong", {}, score === null ? rewardText(sample.reward) : number(score)),
      mark ? el("span", { class: "badge" }, mark) : null,
      sample.status === "completed" ? null : el("span", { class: "badge warm" }, sample.status)),
    el("p", { class: "faint facts" }, facts.filter(Boolean).join(" · ")),
    el("div", { class: "said" }, texts(sample)));
}

/** Shows the text of an answer: a block for each turn, according to its tokens. */
function texts(sample) {
  const blocks = blocksOf(sample.tokens);
  if (!blocks.length) return el("p", { class: "faint" }, "The response has no tokens.");
  if (blocks.length === 1 && blocks[0].model) return el("pre", { class: "turn" }, sample.response);
  return blocks.map(({ model, turn, first, end }) => el("div", { class: model ? "turn" : "turn tool" },
    el("p", { class: "faint who" }, writer(model, turn)),
    el("pre", {}, sample.tokens.slice(first, end).map((token) => token[0]).join(""))));
}
