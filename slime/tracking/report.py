"""Reports the loop's progress: metrics to the trackers, lines to the console. Owns the count of steps."""

from __future__ import annotations

import itertools
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Protocol

from slime.config import Config
from slime.config.sections.debug import profiled_steps
from slime.protocols import Evaluated, Logged, RolloutBatch, TrainResult
from slime.roles.groups import trainer_ranks
from slime.tracking.concerns import Concerns, ConcernsOfOthers, step_figures
from slime.tracking.console import HEADER_EVERY, HELD_OUT, LEFT, StepLine, progress
from slime.tracking.console.closing import closing
from slime.tracking.events import Events, Spans
from slime.tracking.kinds import STEP_PARTS
from slime.tracking.memory import resident_peak_gib
from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX, is_score, select_sets
from slime.tracking.percentiles import StepFigures
from slime.tracking.phases import FIRST_WEIGHTS
from slime.tracking.start_times import StartTimes
from slime.tracking.timers import Timers
from slime.tracking.trackers import Trackers
from slime.tracking.trackers.record import State

_STEPS = 10
"""Number of newest steps from which the remaining time is estimated."""


class PhaseWatch(Protocol):
    """An observer of the phases of a run, such as `slime.cluster.memory_watch.MemoryWatch`."""

    def observe(self, timer: str, begins: bool) -> None: ...

    def set_rollout(self, rollout: int) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]: ...


class Reporter:
    """Reports the progress of a run in the driver. `timers` are the driver's own; the ranks' times arrive in their
    results. `watch` observes the phases of the loop, and `start_times` has the parts of the start so far."""

    def __init__(
        self,
        config: Config,
        trackers: Trackers,
        line: StepLine,
        watch: PhaseWatch | None = None,
        start_times: StartTimes | None = None,
    ) -> None:
        self.config, self.trackers, self.line = config, trackers, line
        self.events = Events("driver", config.logging.run_dir)
        self.spans = Spans(self.events)
        self.timers = Timers()
        self._watch, self._start_times = watch, start_times
        self.timers.observer = self._observe
        self._sent: dict[str, float] = {}
        self._concerns = Concerns(shlex.quote(config.logging.run_dir or "RUN_DIR"))
        self._of_others = ConcernsOfOthers(config.logging.run_dir, "driver")
        separate = 0 if config.cluster.colocate else config.cluster.rollout_num_gpus
        self._figures = StepFigures(trainer_ranks(config) + separate)
        self._ends = deque[float](maxlen=_STEPS + 1)
        """End times of the newest steps, in seconds."""
        self._shown = 0
        """Number of rollouts that have a line."""
        self._evaluations: dict[int, dict[str, float]] = {}
        self._held_out: dict[str, float] = {}
        """Values for the line, from the newest evaluation."""
        self._saved: int | None = None
        self._profiled = profiled_steps(config.debug.profile_steps)

    def start(self, rollout_id: int) -> None:
        """Records that the run starts or resumes at `rollout_id`."""
        self.events.add("start", rollout=rollout_id)
        self._ends.append(time.monotonic())

    def _observe(self, timer: str, begins: bool) -> None:
        self.spans(timer, begins)
        if self._watch is not None:
            self._watch.observe(timer, begins)

    @contextmanager
    def first_weights(self, version: int) -> Iterator[None]:
        """Records the block in which the engines get their first weights, and prints the parts of the start."""
        watched = nullcontext() if self._watch is None else self._watch.phase(FIRST_WEIGHTS)
        with self.events.phase("update", rollout=version), watched:
            yield
        if self._start_times is not None:
            self._start_times.end(FIRST_WEIGHTS)
            print(self._start_times.report(self.events), flush=True)

    @contextmanager
    def running(self, rollout_id: int) -> Iterator[None]:
        """Records a step of the loop: rollout `rollout_id`, its training and its update."""
        self.spans.set_rollout(rollout_id)
        if self._watch is not None:
            self._watch.set_rollout(rollout_id)
        with self.timers.measure("step"):
            yield

    def step(self, rollout_id: int, batch: RolloutBatch, trained: TrainResult) -> None:
        """Logs one rollout and its optimizer steps, and prints its line. `timers` have measured the rollout as
        `step`."""
        perf = {**trained.perf, **self.timers.flush(), **self._sent}
        self._sent = {}
        if "perf/trainer_time" in perf:
            # Time outside the ranks: Ray moves their data to them and rank 0's metrics back.
            names = ("trainer_time", "profile_time", "columns_wait_time")
            inside = sum(perf.get(f"perf/{name}", 0.0) for name in names)
            perf["perf/handover_time"] = perf["perf/train_time"] - inside
        # Computed here, because a rank has only its own samples.
        perf |= training_speed(
            perf,
            tokens=batch.tokens,
            forward_flops=batch.forward_flops,
            old_flops=batch.old_flops,
            ahead_flops=batch.ahead_flops,
            tower_flops=batch.tower_flops,
            ranks=self.config.world_size,
        )
        traced = rollout_id in self._profiled
        perf |= self._figures.add(perf["perf/step_time"], batch.tokens, count=not traced)
        if (resident := resident_peak_gib()) is not None:
            perf["perf/driver_rss_gib"] = resident
        metrics = {**batch.metrics, **trained.rollout, **perf, "rollout/step": rollout_id}
        of_user = self._send(batch.logged)
        self.trackers.log(metrics, rollout_id, "rollout/step")
        seconds = {f"{name}_s": round(perf.get(f"perf/{name}_time", 0.0), 4) for name in STEP_PARTS}
        self.events.add("step", rollout=rollout_id, **seconds)
        first = self.trackers.first_step(rollout_id, self.config.data.num_steps_per_rollout)
        for offset, step in enumerate(trained.steps):
            self.trackers.log({**step, "train/step": first + offset}, first + offset, "train/step")
        self._send(trained.logged)
        shown = {**of_user, **metrics, **trained.steps[-1], **self._difference(trained.steps)}
        self._show(rollout_id, shown, batch)
        self._warn(rollout_id, batch.learning | step_figures(trained.steps), batch.learning_texts)

    def _show(self, rollout_id: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """Prints the line of a rollout with the time until the end, and sometimes a sample (--log-sample)."""
        self._ends.append(time.monotonic())
        left: dict[str, float] = {}
        if len(self._ends) > 1 and (total := self.config.data.num_rollout) is not None:
            step_s = statistics.median(end - begin for begin, end in itertools.pairwise(self._ends))
            left[LEFT] = step_s * max(0, total - rollout_id - 1)
        self.line.show(rollout_id, {**metrics, **left, **self._held_out})
        wanted = self.config.logging.log_sample
        wanted = self.line.is_terminal if wanted is None else wanted
        if wanted and batch.sample is not None and self._shown % HEADER_EVERY == 0:
            self.line.show_sample(rollout_id, batch.sample)
        self._shown += 1

    def _warn(self, rollout_id: int, figures: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Prints and records concerns that stop the run from learning."""
        for concern in self._concerns.observe(rollout_id, figures, texts):
            self.line.show_warning(concern.line)
            concern.record(self.events)

    def _send(self, logged: Iterable[Logged]) -> dict[str, float]:
        """Logs the metrics that functions of the user have logged in other processes, and returns them."""
        of_user: dict[str, float] = {}
        for one in logged:
            self.trackers.log(one.metrics, one.step, one.step_key)
            of_user |= one.metrics
        return of_user

    @staticmethod
    def _difference(steps: list[dict[str, float]]) -> dict[str, float]:
        """Returns the difference between trainer and engine over all optimizer steps of the rollout, for its line."""
        seen = [step for step in steps if LOGPROB_DIFF_MAX in step]
        if not seen:
            return {}
        return {
            LOGPROB_DIFF: sum(step[LOGPROB_DIFF] for step in seen) / len(seen),
            LOGPROB_DIFF_MAX: max(step[LOGPROB_DIFF_MAX] for step in seen),
        }

    def sent(self, figures: Mapping[str, float]) -> None:
        """Adds the metrics of a weight update to the next step."""
        self._sent |= figures

    def saved(self, rollout_id: int) -> None:
        """Logs the time of the checkpoint after a rollout, as a second record of the same step."""
        self.trackers.log(self.timers.flush(), rollout_id, "rollout/step")
        self.events.add("checkpoint", rollout=rollout_id)
        self._saved = rollout_id

    @contextmanager
    def bar(
        self, desc: str, unit: str, state: Callable[[], tuple[int, int]]
    ) -> Iterator[Callable[[], None] | None]:
        """Shows a progress bar. Yields a function that redraws the bar from `state()`, (done, total), or None without a
        terminal."""
        with progress(desc=desc, unit=unit) as bar:

            def redraw() -> None:
                bar.n, bar.total = state()
                bar.refresh()

            yield None if bar.disable else redraw

    def rollout(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Logs a rollout without training."""
        of_user = self._send(batch.logged)
        self.trackers.log({**batch.metrics, "rollout/step": rollout_id}, rollout_id, "rollout/step")
        self._show(rollout_id, {**of_user, **batch.metrics}, batch)
        self._warn(rollout_id, batch.learning, batch.learning_texts)

    def evaluation(self, rollout_id: int, evaluated: Evaluated) -> None:
        of_user = self._send(evaluated.logged)
        if evaluated.metrics:
            self.trackers.log(evaluated.metrics, rollout_id, "eval/step")
        seen = {name: value for name, value in of_user.items() if name.startswith("eval/")}
        if metrics := {**seen, **evaluated.metrics}:
            scores = {
                name.removeprefix("eval/"): value
                for name, value in metrics.items()
                if is_score(name, metrics)
            }
            self.events.add("evaluation", rollout=rollout_id, scores=scores)
            self._evaluations[rollout_id] = scores
            for shown, end in HELD_OUT.items():
                if (name := next((name for name in scores if name.endswith(end)), None)) is not None:
                    self._held_out[shown] = scores[name]
            self.line.show_eval(rollout_id, select_sets(metrics))

    def heed(self) -> None:
        """Prints concerns that another process has recorded, such as a rollout that drops all groups. Waits call it
        regularly."""
        for text in self._of_others.new_lines():
            self.line.show_warning(text)

    def conclude(self) -> None:
        """Prints the last lines of a run that ends without an error."""
        self.line.show_end(list(closing(self.config, self._evaluations, self._saved)))

    def close(self, state: State = "finished") -> None:
        for concern in self._concerns.going_on.values():
            self.line.show_warning(f"until the end, {concern.line}")
        self.trackers.close(state)
        self.events.close()


FORWARDS = {"ref_log_probs": 1, "actor_train": 3}
"""Maps a timer to its work in forward passes over all samples. A backward pass costs two: for input and weight
gradients."""


def training_speed(
    perf: Mapping[str, float],
    *,
    tokens: int,
    forward_flops: float,
    old_flops: float,
    ranks: int,
    ahead_flops: float = 0.0,
    tower_flops: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Returns perf/{log_probs,ref_log_probs,actor_train}_tflops, in 1e12 FLOPs per second per trainer rank, and
    perf/actor_train_tok_per_s over all ranks, for the parts that were timed.

    `perf` holds a rank's times in seconds. `tokens` and the FLOPs count every rank's samples (as in RolloutBatch: a
    shared prompt counts in `tokens` once per sample), so the result is for a rank with the mean share. Only the model's
    own FLOPs count: recomputation and padding take time and make the speed smaller.
    """
    work = {"log_probs": old_flops} | {part: forwards * forward_flops for part, forwards in FORWARDS.items()}
    work["actor_train"] += ahead_flops
    work = {part: flops + tower_flops.get(part, 0.0) for part, flops in work.items()}
    speed = {
        f"perf/{part}_tflops": flops / ranks / seconds / 1e12
        for part, flops in work.items()
        if (seconds := perf.get(f"perf/{part}_time"))
    }
    if seconds := perf.get("perf/actor_train_time"):
        speed["perf/actor_train_tok_per_s"] = tokens / seconds
    return speed
