// Shared parts of both kinds of pictures: a canvas of the right size, colours of the theme, ticks of an axis.

const drawn = new Set();
let queued = false;

/** Calls `draw` before the next frame, once however often this function is called. */
export function soon(draw) {
  drawn.add(draw);
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const now = [...drawn];
    drawn.clear();
    for (const each of now) each();
  });
}

/** Calls `draw` when the size of the element or the theme changes. Returns a function that ends the calls. */
export function onLookChange(element, draw) {
  const sizes = new ResizeObserver(() => soon(draw));
  const theme = matchMedia("(prefers-color-scheme: dark)");
  const again = () => soon(draw);
  sizes.observe(element);
  theme.addEventListener("change", again);
  return () => {
    sizes.disconnect();
    theme.removeEventListener("change", again);
  };
}

/** Returns a cleared context in units of CSS pixels, and its size. */
export function begin(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height };
}

/** Returns the colours of the present theme. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { text: of("text"), faint: of("faint"), line: of("line"), back: of("card"), alarm: of("alarm"), focus: of("focus") };
}

/** Returns about `count` round numbers between `low` and `high`. */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + span * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

const TIMES = [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

/** Returns times between `low` and `high`, in seconds. Steps above ten seconds are whole minutes, hours or days. */
export function timeTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const step = rough <= 5 ? null : TIMES.find((own) => own >= rough);
  if (!step) return ticks(low, high, count);
  const found = [];
  for (let time = Math.ceil(low / step) * step; time <= high; time += step) found.push(time);
  return found;
}

/** Returns powers of ten between `low` and `high`, at most `count`. */
export function decades(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / count));
  const found = [];
  for (let power = first; power <= last; power += stride) found.push(10 ** power);
  return found.length > 1 ? found : ticks(low, high, count / 2);  // less than two decades
}
