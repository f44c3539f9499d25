// Finds the spans of a timeline by lane, row and time, without a search through all spans.

/** Indices of the columns of a span. */
export const LANE = 0, ROW = 1, NAME = 2, BEGIN = 3, END = 4, ROLLOUT = 5;

export class Spans {
  /** `timeline`: the data from the server. `now`: the end of running spans, in seconds after the begin of the run. */
  constructor(timeline, now) {
    this.timeline = timeline;
    this.now = Math.max(now, timeline.end);
    this.rows = timeline.lanes.map(() => []);
    for (const span of timeline.spans) (this.rows[span[LANE]][span[ROW]] ??= []).push(span);
  }

  endOf(span) { return span[END] ?? this.now; }

  /** Returns the index of the first span of a row that ends after `time`. Spans of a row do not overlap. */
  after(row, time) {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.endOf(row[middle]) <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * Calls `draw(span, begin, end)` for the spans of a row between two times. Of several spans within one pixel (`least`
   * seconds), only one is drawn: a span of the phase with the most time in this pixel.
   */
  each(row, from, to, least, draw) {
    const sums = new Float64Array(this.timeline.names.length);
    let i = this.after(row, from);
    while (i < row.length && row[i][BEGIN] < to) {
      const begin = row[i][BEGIN], end = this.endOf(row[i]);
      if (end - begin >= least) {
        draw(row[i], begin, end);
        i += 1;
        continue;
      }
      const pixel = from + Math.floor((begin - from) / least) * least;
      let most = row[i];
      sums.fill(0);
      for (; i < row.length && row[i][BEGIN] < pixel + least && this.endOf(row[i]) - row[i][BEGIN] < least; i++) {
        sums[row[i][NAME]] += this.endOf(row[i]) - row[i][BEGIN];
        if (sums[row[i][NAME]] > sums[most[NAME]]) most = row[i];
      }
      draw(most, pixel, pixel + least);
    }
  }

  /** Returns a map from phase to its seconds in a lane between two times. */
  seconds(lane, from, to) {
    const found = new Map();
    for (const row of this.rows[lane]) {
      if (!row) continue;
      for (let i = this.after(row, from); i < row.length && row[i][BEGIN] < to; i++) {
        const name = this.timeline.names[row[i][NAME]];
        const inside = Math.min(this.endOf(row[i]), to) - Math.max(row[i][BEGIN], from);
        found.set(name, (found.get(name) ?? 0) + inside);
      }
    }
    return found;
  }

  /** Returns at most `most` spans between two times, sorted by begin, and the number of all these spans. */
  list(from, to, most) {
    const found = [];
    for (const row of this.rows.flat()) {
      if (!row) continue;
      for (let i = this.after(row, from); i < row.length && row[i][BEGIN] < to; i++) found.push(row[i]);
    }
    found.sort((a, b) => a[BEGIN] - b[BEGIN]);
    return [found.slice(0, most), found.length];
  }

  /**
   * Returns the span next to `span` in its lane, in the direction 1 or -1, or the first span in view if `span` is null.
   */
  next(lane, span, direction, from) {
    const all = this.rows[lane].flat().sort((a, b) => a[BEGIN] - b[BEGIN] || a[ROW] - b[ROW]);
    if (!span || span[LANE] !== lane) return all.find((own) => this.endOf(own) > from) ?? all.at(-1) ?? null;
    return all[all.indexOf(span) + direction] ?? span;
  }
}
