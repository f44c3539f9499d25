"""Reads the page's data from a run directory as JSON: state, curves, timeline, samples and settings."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from slime.config.secrets import mask_secrets
from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.journal import Phase, read_events
from slime.tracking.kinds import EVENTS_FILE, OLDER
from slime.tracking.run_files import is_there, open_file, read_object, readable
from slime.tracking.run_summary import RunSummary, run_summary
from slime.tracking.samples import SAMPLES
from slime.tracking.trackers import METRICS_FILE
from vime.view.measures import flatten
from vime.view.page.cached import CachedValue, Stamp, stamp
from vime.view.page.lanes import Timeline, read_timeline
from vime.view.page.sample_rows import COLUMNS, SampleRows
from vime.view.run_metrics import RunMetrics, load_run

CONFIG_FILE = "config.json"
LOOK_EVERY_S = 5.0
"""Seconds between two checks of a running run, even if it has written nothing."""
_WARNINGS = 50
"""Number of newest warnings in a summary."""

Json = dict[str, object]


class RunData:
    """One run. Each part is read again when its files have changed. The class is thread-safe."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.dir, self.name = run_dir, name
        self._lock = threading.Lock()
        self._goes_on = False
        self._summary = CachedValue(self._read_summary, lambda: (self._journal_stamp(), self._alive_stamp()))
        self._curves = CachedValue(
            lambda: _curves(load_run(self.dir)), lambda: stamp([self.dir / METRICS_FILE])
        )
        self._timeline = CachedValue(lambda: read_timeline(self.dir), self._journal_stamp)
        self._samples = SampleRows(run_dir)

    def check(self) -> None:
        """Raises ValueError unless this is a readable run directory with metrics, or with a journal of a supported
        version."""
        if not self._has_journal() and not is_there(self.dir, METRICS_FILE):
            raise ValueError(
                f"RUN_DIR must have {EVENTS_FILE} or {METRICS_FILE}, got neither in {self.dir}; name the --run-dir "
                "of a run"
            )
        for name in (METRICS_FILE, CONFIG_FILE, ENVIRONMENT_FILE, EVENTS_FILE):
            if (file := open_file(self.dir, name)) is not None:
                file.close()
        if self._has_journal():
            next(read_events(self.dir), None)  # its first line has the version

    def summary(self) -> Json:
        """Returns the state of the run, and for each part a stamp that changes when the part changes."""
        with self._lock:
            stamps = {
                "journal": str(hash(self._journal_stamp())),
                "curves": str(hash(stamp([self.dir / METRICS_FILE]))),
                "samples": str(hash(stamp([self.dir / SAMPLES, *(self.dir / SAMPLES).glob("*.jsonl")]))),
            }
            base: Json = {"name": self.name, "dir": str(self.dir), "stamps": stamps}
            if not self._has_journal():
                return base | {
                    "state": "unknown",
                    "cause": f"it has no {EVENTS_FILE}: a run of an older version",
                }
            found = self._summary.get()
            damaged = found.damaged | Counter(samples=sum(self._samples.damaged.values()))
            return base | _summary(found) | {"damaged": +damaged}

    def curves(self) -> Json:
        """Returns metric -> its unit, steps and values (None: not finite). The result is empty before the first
        step."""
        with self._lock:
            with readable(path := self.dir / METRICS_FILE):
                if not path.exists() or not path.stat().st_size:
                    return {}
            return self._curves.get()

    def timeline(self) -> Json:
        with self._lock:
            if not self._has_journal():
                return asdict(Timeline())
            return vars(self._timeline.get())

    def samples(self, serial: int) -> Json:
        """Returns rows of `COLUMNS` by rollout that were read after the reading with number `serial`."""
        with self._lock:
            rows, newest, more = self._samples.since(serial)
        return {"columns": COLUMNS, "rows": rows, "serial": newest, "more": more}

    def sample(self, rollout: int, place: int) -> Json:
        with self._lock:
            return self._samples.whole(rollout, place)

    def group(self, rollout: int, place: int) -> list[Json]:
        """Returns the kept samples of a sample's group."""
        with self._lock:
            return self._samples.group(rollout, place)

    def find(self, text: str, begin: int) -> Json:
        with self._lock:
            found, following = self._samples.find(text, begin)
        return {"found": found, "next": following}

    def settings(self) -> Json:
        """Returns the flat configuration and the versions: names of flags without their section, and names of packages.

        `hook_args`, which repeat flags for hooks, are left out. Secrets are masked, also those that an older version
        wrote.
        """
        config = _masked(read_object(self.dir, CONFIG_FILE))
        environment = _masked(read_object(self.dir, ENVIRONMENT_FILE))
        flags = {name.partition(".")[2] or name: value for name, value in flatten(config)} if config else {}
        flags = {name: value for name, value in flags.items() if not name.startswith("hook_args.")}
        versions = {
            name: environment.get(name) for name in ("git", "python", "packages", "host", "cpu", "gpus")
        }
        return {"configuration": flags, "versions": dict(flatten(versions)) if environment else {}}

    def _read_summary(self) -> RunSummary:
        found = run_summary(self.dir)
        self._goes_on = found.state == "running"
        return found

    def _alive_stamp(self) -> int:
        """Returns a number that changes while the run is running, also without an event, because a killed driver writes
        none."""
        return int(time.monotonic() / LOOK_EVERY_S) if self._goes_on else 0

    def _journal_stamp(self) -> Stamp:
        return stamp(self._journal())

    def _has_journal(self) -> bool:
        with readable(self.dir):
            return is_there(self.dir, EVENTS_FILE) or any(self.dir.glob(OLDER))

    def _journal(self) -> Iterable[Path]:
        return [self.dir / EVENTS_FILE, *sorted(self.dir.glob(OLDER))]


def _summary(summary: RunSummary) -> Json:
    engines = [asdict(engine) | {"deaths": summary.deaths[name]} for name, engine in summary.engines.items()]
    names = (
        "state",
        "cause",
        "error_type",
        "started",
        "updated",
        "rollout",
        "rollouts",
        "progress",
        "step_s",
        "eta_s",
    )
    warnings = [
        {
            "time": event.time,
            "source": event.source,
            "logger": event.get("logger", event.get("name")),
            "text": event["text"],
        }
        for event in summary.warnings[-_WARNINGS:]
    ]
    return _masked(
        {
            **{name: getattr(summary, name) for name in names},
            "engines": engines,
            "doing": [_doing(phase) for phase in summary.doing],
            "warnings": warnings,
            "concerns": [
                {name: event.get(name) for name in ("name", "rollout", "text", "remedy")}
                for event in summary.concerns.values()
                if event.kind == "concern_begin"
            ],
            "warning_count": len(summary.warnings),
            "starts": summary.starts,
        }
    )


def _masked(value: Json) -> Json:
    """Masks secrets, which the journal and the configuration of an older version may contain."""
    found = mask_secrets(value)
    assert isinstance(found, dict)
    return found


def _doing(phase: Phase) -> Json:
    return {"source": phase.source, "device": phase.device, "name": phase.name, "begin": phase.begin}


def _curves(run: RunMetrics) -> Json:
    return {
        name: {
            "unit": series.unit,
            "steps": series.steps.tolist(),
            "values": [value if math.isfinite(value) else None for value in series.values.tolist()],
        }
        for name, series in sorted(run.series.items())
    }
