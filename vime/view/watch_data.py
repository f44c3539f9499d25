"""Reads the data that `vime watch` shows. Each update reads only new lines of the run's files."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.tracking.journal import Event, Tail
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.metrics import LOGPROB_DIFF, is_held_out_loss, is_score
from slime.tracking.run_files import open_file, read_lines
from slime.tracking.run_summary import RunSummary, SummaryOfEvents
from slime.tracking.trackers import METRICS_FILE, RESERVED, metric_record

Points = dict[int, float]
"""Step -> value, NaN if it was not finite. Resumed runs log some steps again."""
_RECENT = 512
"""Number of groups that ended last. The slowest samples are chosen among their samples."""


@dataclass(frozen=True)
class Curve:
    """One curve. It shows the first entry of `metrics` that the run has. `spec`: the number format of a value."""

    title: str
    metrics: tuple[str, ...]
    spec: str = ".3g"


CURVES: tuple[Curve, ...] = (
    Curve("reward", ("rollout/raw_reward", "rollout/rewards"), ".3f"),
    Curve("loss", ("train/loss",), ".2e"),
    Curve("tokens/s", ("perf/step_tokens_per_sec", "perf/tokens_per_gpu_per_sec"), ",.0f"),
    Curve("staleness (updates)", ("rollout/staleness/token_mean", "rollout/staleness/mean"), ".2f"),
    Curve("response (tokens)", ("rollout/response_len/mean",), ",.1f"),
    Curve("KL to sampler", ("train/ppo_kl",), ".2e"),
    Curve("log-prob difference", (LOGPROB_DIFF,), ".2e"),
    Curve("gradient norm", ("train/grad_norm",), ".3g"),
)


HELD_OUT = Curve("held-out loss", (), ".3g")
"""First curve of a run on given responses, which has no reward: the loss of its first held-out set."""


@dataclass(frozen=True)
class SlowSample:
    """The slowest sample of a group, or a group that is still in generation."""

    group: int
    seconds: float
    sample: int | None = None
    tokens: int | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    summary: RunSummary
    curves: dict[str, Points]
    """Points by the title of the curve. Curves without a metric in the run are absent."""
    scores: dict[str, Points]
    """Evaluation set -> score by the number of trained rollouts."""
    slow: list[SlowSample] = field(default_factory=list)


class WatchedRun:
    """Reads one run. Raises ValueError for a directory without a run's journal, or one that may not be read."""

    def __init__(self, run_dir: Path) -> None:
        self._tail, self._events = Tail(run_dir), SummaryOfEvents(run_dir)
        self._metrics, self._groups = MetricsTail(run_dir), GroupTimes()

    def look(self) -> Look:
        """Returns the current state of the run."""
        for event in self._tail.new():
            self._events.add(event)
            self._groups.add(event)
        self._metrics.read()
        series, summary = self._metrics.series, self._events.summary()
        summary.damaged = Counter({EVENTS_FILE: self._tail.damaged, METRICS_FILE: self._metrics.damaged})
        curves = {
            curve.title: series[name]
            for curve in CURVES
            if (name := next((name for name in curve.metrics if name in series), None)) is not None
        }
        scores = {
            name.removeprefix("eval/"): series[name] for name in sorted(self._metrics.scores & series.keys())
        }
        loss = next((name for name in scores if is_held_out_loss(name)), None)
        if loss is not None and CURVES[0].title not in curves:
            curves[HELD_OUT.title] = scores[loss]
        now = summary.updated if summary.state == "running" else None
        return Look(summary, curves, scores, self._groups.slowest(now))


class MetricsTail:
    """Reads new lines of the metrics. `series`: the metrics of CURVES and the scores, by their names. `scores`: the
    names of the scores."""

    def __init__(self, run_dir: Path) -> None:
        self.series: dict[str, Points] = {}
        self.scores: set[str] = set()
        self._dir = Path(run_dir)
        self._wanted = {name for curve in CURVES for name in curve.metrics}
        self._file, self._offset, self.damaged = -1, 0, 0

    def read(self) -> None:
        """Reads the new complete lines. A resumed run replaces the file, which is then read from its start."""
        file = open_file(self._dir, METRICS_FILE)
        if file is None:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self.scores.clear()
                self.series, self._file, self._offset, self.damaged = {}, status.st_ino, 0, 0
            file.seek(self._offset)
            for line in read_lines(file):
                if not line.endswith(b"\n"):
                    break
                self._offset = file.tell()
                self._take(line)

    def _take(self, line: bytes) -> None:
        if (row := metric_record(line)) is None:
            self.damaged += 1
            return
        for name in row.keys() - RESERVED:
            if is_score(name, row):
                self.scores.add(name)
            if name in self._wanted | self.scores:
                value = float("nan") if row[name] is None else float(row[name])
                self.series.setdefault(name, {})[row["step"]] = value


class GroupTimes:
    """Measures the time that groups take in generation."""

    def __init__(self) -> None:
        self._running: dict[int, float] = {}
        self._ended: deque[SlowSample] = deque(maxlen=_RECENT)

    def add(self, event: Event) -> None:
        match event.kind:
            case "run" | "end" | "error":
                self._running.clear()
            case "drawn":
                self._running |= dict.fromkeys(event["groups"], event.time)
            case "dropped" | "put_back":
                for number in event["groups"]:
                    self._running.pop(number, None)
            case "ended":
                for number in event["groups"]:
                    self._end(number, event)

    def _end(self, number: int, event: Event) -> None:
        started = self._running.pop(number, None)
        if "seconds" in event.fields:
            found = SlowSample(number, event["seconds"], event.get("sample"), event.get("tokens"))
        elif started is not None:
            found = SlowSample(number, event.time - started)
        else:
            return
        self._ended.append(found)

    def slowest(self, now: float | None, count: int = 64) -> list[SlowSample]:
        """Returns the slowest samples of the newest groups, after groups that take even longer and still run.

        `now` is None if the run is not running.
        """
        ended: Sequence[SlowSample] = sorted(self._ended, key=lambda one: -one.seconds)[:count]
        longest = ended[0].seconds if ended else 0.0
        running = () if now is None else self._running.items()
        late = [SlowSample(number, now - started, goes_on=True) for number, started in running if now]
        late = sorted((one for one in late if one.seconds > longest), key=lambda one: -one.seconds)
        return [*late, *ended][:count]
