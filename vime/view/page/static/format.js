// Formats numbers, times and colours for people.

/**
 * Okabe and Ito's palette, whose colours people with any kind of colour vision can distinguish. Each run has one
 * colour.
 */
const RUNS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

export const runColour = (i) => RUNS[i % RUNS.length];

/** Lines of one panel and run differ by their dashes. With more than six runs, the colours repeat with other dashes. */
export const dash = (i) => DASHES[i % DASHES.length];

/** Formats a number with four significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** Formats seconds as "12.3 s", "4 min 5 s", "2 h 10 min" or "3 d 4 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return two(whole, 60, "min", 1, "s");
  if (whole < 86400) return two(whole, 3600, "h", 60, "min");
  return two(whole, 86400, "d", 3600, "h");
}

/** Formats a time on an axis whose ticks are `step` seconds apart: as a duration, or as "1:54.25" for closer ticks. */
export function axisTime(seconds, step) {
  if (seconds === 0) return "0";
  if (seconds < 0 || seconds < 60 || step >= 1) return `${seconds < 0 ? "−" : ""}${duration(Math.abs(seconds))}`;
  const digits = Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  const [minutes, rest] = [Math.floor(seconds / 60), (seconds % 60).toFixed(digits).padStart(3 + digits, "0")];
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

function two(whole, large, largeName, small, smallName) {
  const rest = Math.floor((whole % large) / small);
  return `${Math.floor(whole / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** Formats a moment, in seconds since the epoch, in the reader's time zone. */
export function moment(seconds) {
  if (!seconds) return "–";
  return new Date(seconds * 1000).toLocaleString("sv");
}

export const percent = (share) => `${Math.round(100 * share)}%`;

/** Phases of a process by name: [text of the legend, colour]. */
const PHASES = {
  rollout: ["generates", "#009e73"],
  eval: ["evaluates", "#44aa99"],
  train: ["trains", "#0072b2"],
  actor_train: ["forward, backward, optimizer", "#3f97cf"],
  critic_train: ["trains the critic", "#7a5fb5"],
  log_probs: ["log-probs", "#e69f00"],
  ref_log_probs: ["log-probs of the reference", "#cc79a7"],
  values: ["values", "#a05fb0"],
  consistency: ["audit", "#999933"],
  data_preprocess: ["prepares data", "#8c8c8c"],
  wait: ["waits", "#b8ad1f"],
  update: ["updates weights", "#d55e00"],
  save: ["saves", "#882255"],
  sleep: ["engine sleeps", "#6e4b2a"],
  wake: ["engine wakes", "#a97142"],
  onload: ["loads to the device", "#6e4b2a"],
  offload: ["leaves the device", "#a97142"],
  starting: ["engine starts", "#c9b458"],
  serving: ["engine serves", "#8fbfa6"],
  leaving: ["engine leaves", "#c98b6b"],
};

/** Returns the position of a phase in a legend. */
export const phaseOrder = (name) => (name in PHASES ? Object.keys(PHASES).indexOf(name) : Infinity);
export const phaseText = (name) => (PHASES[name] ?? [name])[0];
export const phaseColour = (name) => (PHASES[name] ?? ["", "#777777"])[1];

const STATES = {
  running: "goes on", finished: "finished", failed: "failed", interrupted: "interrupted", unknown: "not known",
};

export const stateText = (state) => STATES[state] ?? state;
