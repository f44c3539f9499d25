// Starts the page: its screens, their addresses, and the update of the runs every few seconds.

import { CurvesScreen } from "vime/curves";
import { el, fill } from "vime/dom";
import { SamplesScreen } from "vime/samples";
import { SettingsScreen } from "vime/settings";
import { openSource } from "vime/source";
import { TimelineScreen } from "vime/timeline";

const EVERY_MS = 2000;
const main = document.getElementById("main");
const notice = document.getElementById("notice");
const source = openSource();
const screens = {
  curves: ["Curves", new CurvesScreen(source)],
  timeline: ["Timeline", new TimelineScreen(source, go)],
  samples: ["Samples", new SamplesScreen(source, go)],
  settings: ["Settings", new SettingsScreen(source)],
};
let current = null;
let runs = null;
let busy = false;

const links = Object.entries(screens).map(([name, [title]]) => el("a", { href: `#${name}` }, title));
fill(document.getElementById("screens"), links);
document.getElementById("skip").addEventListener("click", () => main.focus());

/** Shows another place: "samples/RUN/ROLLOUT/PLACE". With `replace`, the browser's history gets no new entry. */
function go(place, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", `#${place}`);
  else history.pushState(null, "", `#${place}`);
  show();
}

function show() {
  const [name, ...parts] = location.hash.slice(1).split("/");
  const chosen = name in screens ? name : "curves";
  const [title, screen] = screens[chosen];
  links.forEach((link) => {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  screen.show?.(parts);
  if (current !== screen) {
    current = screen;
    fill(main, screen.element);
    scrollTo(0, 0);
  }
  document.title = `${title} · ${runs?.map((run) => run.name).join(", ") ?? "vime"}`;
  if (runs) refresh();
}

async function refresh() {
  try {
    await current.update(runs);
    say("");
  } catch (error) {
    say(error.message);
  }
}

async function look() {
  if (busy || (document.hidden && runs)) return;
  busy = true;
  try {
    runs = await source.runs();
    say("");
    const state = runs.map((run) => run.name).join(", ");
    document.title = `${document.title.split(" · ")[0]} · ${state}`;
    await current.update(runs);
  } catch (error) {
    say(error instanceof TypeError && /fetch/i.test(error.message) ? "The server does not answer. Has `vime ui` ended?" : error.message);
  }
  busy = false;
}

function say(text) {
  if (notice.textContent !== text) notice.textContent = text;
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", look);
show();
look();
if (source.live) setInterval(look, EVERY_MS);
