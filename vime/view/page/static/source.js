// Provides the data of the page: from the server of `vime ui`, or from the page itself if it was exported. Both sources
// have the same methods, and each method returns a promise.

import { contentText } from "vime/sample";

/** Gets data from the server. The number of a run is its index on the command line. */
class ServedRuns {
  live = true;

  async ask(path, query = {}) {
    const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`, { credentials: "same-origin" });
    if (answer.status === 401) throw new Error("The server has another key now. Open the address that it printed.");
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error ?? `the server answered ${answer.status}`);
    return found;
  }

  runs() { return this.ask("runs"); }
  curves(run) { return this.ask("curves", { run }); }
  timeline(run) { return this.ask("timeline", { run }); }
  settings(run) { return this.ask("settings", { run }); }
  samples(run, since) { return this.ask("samples", { run, since }); }
  sample(run, rollout, place) { return this.ask("sample", { run, rollout, place }); }
  group(run, rollout, place) { return this.ask("group", { run, rollout, place }); }
  find(run, text, begin) { return this.ask("find", { run, text, begin }); }
}

/** Reads the data that `vime ui --export` has put into the page. */
class ExportedRuns {
  live = false;

  constructor(parts) { this.parts = parts; }

  async runs() { return this.parts.map((part) => part.summary); }
  async curves(run) { return this.parts[run].curves; }
  async timeline(run) { return this.parts[run].timeline; }
  async settings(run) { return this.parts[run].settings; }
  async samples(run, since) {
    const all = this.parts[run].samples;
    return since < all.serial ? all : { ...all, rows: {} };
  }

  async sample(run, rollout, place) { return this.parts[run].whole[`${rollout}/${place}`]; }

  async group(run, rollout, place) {
    const { whole } = this.parts[run];
    const asked = whole[`${rollout}/${place}`];
    if (!asked || asked.group === null) return asked ? [asked] : [];
    const of = Object.entries(whole).filter(([name]) => name.startsWith(`${rollout}/`));
    return of.map(([, sample]) => sample).filter((sample) => sample.group === asked.group);
  }

  async find(run, text) {
    const wanted = text.toLowerCase();
    const found = [];
    for (const [name, sample] of Object.entries(this.parts[run].whole)) {
      const prompt = typeof sample.prompt === "string" ? sample.prompt
        : sample.prompt.map((message) => contentText(message.content ?? "")).join("\n");
      if (prompt.toLowerCase().includes(wanted) || sample.response.toLowerCase().includes(wanted)) {
        found.push(name.split("/").map(Number));
      }
    }
    return { found, next: null };
  }

  /** Returns the number of a run's samples in the file. */
  kept(run) { return [this.parts[run].kept, this.parts[run].samples_of]; }
}

/** The source of this page. */
export function openSource() {
  const inside = document.getElementById("data");
  return inside ? new ExportedRuns(JSON.parse(inside.textContent).runs) : new ServedRuns();
}
