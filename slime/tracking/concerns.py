"""Warns about a run that cannot learn, or is about to diverge: a table of conditions over the figures of a rollout.

A condition that holds in `Condition.in_a_row` consecutive rollouts is a concern. The driver prints it and records it in
the journal, and `vime doctor RUN_DIR` reports it. Each line of the table is one condition.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from slime.tracking.events import Events
from slime.tracking.journal import Tail

IN_A_ROW = 3
"""Default number of consecutive rollouts before a condition is a concern.

One rollout without spread is common if a batch has few groups. Three in a row are rare in a run that learns: with 4
groups and an even chance for each, one run in 4096.
"""
AGAIN_EVERY = 20
"""Number of rollouts until a lasting concern is printed again. The header of the lines is printed as often."""
FAR_FROM_REFERENCE = 5.0
"""Nats per token of `train/kl_loss`. A sampled token is then e^5 = 148 times as likely as in the reference, so the
reference no longer limits the policy. Runs that learn stay below 1."""
FAR_IN_A_STEP = 1.0
"""Nats per token of `train/ppo_kl`, between the sampling policy and the trained one. A ratio of e is far outside each
usual --eps-clip (0.2), so most tokens are clipped. Runs that learn stay below 0.1."""
ENTROPY_TIMES, ENTROPY_LEAST = 3.0, 2.0
"""The entropy has exploded if it is at least this multiple of its lowest value so far, and at least this number of nats
per token.

2 nats are an even choice among 7 tokens at each position, which is noise in most texts. Policies that learn keep or
lose entropy.
"""
ENTROPY_NOTHING, ENTROPY_SHARE = 0.01, 0.05
"""The entropy has collapsed if it is at most this number of nats per token, and this share of its highest value so far.
At 0.01 nats, the likeliest token has a probability of about 0.998, so the samples of a group are equal."""
MANY_SESSIONS = 0.1
"""Share of sessions that nothing is trained on. Some sessions fail in many runs, such as those whose answer no parser
can read."""

LOOK_EVERY_S = 5.0
BEGINS, ENDS = "concern_begin", "concern_end"
"""Kinds of the events in the journal."""

Figures = Mapping[str, float]
"""The figures of a rollout: those of `slime.rollout.learning`, and those of the optimizer steps.

The figures of the steps are grad_norm, learning_rate and ppo_kl (the largest), and kl_loss and entropy (the last).
lowest_entropy and highest_entropy cover the earlier rollouts. text_labels is 1 if each label is a text.
"""


@dataclass(frozen=True)
class Condition:
    """One line of the table."""

    name: str
    holds: Callable[[Figures], bool]
    """Returns True if the condition holds. Raises KeyError if a figure is missing; then the rollout does not count."""
    text: str
    """Description of the condition, with figures in braces."""
    remedy: str
    """Advice to the user, with {run_dir} and {labels} in braces."""
    reported_by: tuple[str, ...] = ()
    """Conditions that include this one. While such a condition is a concern, this condition is not printed."""
    stops_learning: bool = True
    """True if nothing is learned while the condition holds."""
    in_a_row: int = IN_A_ROW
    """Number of consecutive rollouts in which the condition must hold before it is a concern."""


@dataclass(frozen=True)
class Concern:
    """A condition that has begun to hold for its number of rollouts, still holds, or has ended."""

    condition: Condition
    rollout: int
    """Last rollout that the concern is about."""
    state: str
    """begins, goes on or ends."""
    text: str

    @property
    def line(self) -> str:
        """Returns the text of the concern for the console."""
        if self.state == "ends":
            return f"{self.condition.name}: no longer so in rollout {self.rollout}"
        return f"{self.condition.name}: {self.text}; {self.condition.remedy}"

    def record(self, events: Events) -> None:
        """Adds the concern to the journal, unless it only continues."""
        if self.state == "goes on":
            return
        fields = {"name": self.condition.name, "text": self.text, "remedy": self.condition.remedy}
        events.add(BEGINS if self.state == "begins" else ENDS, rollout=self.rollout, **fields)


_SAMPLES = "look at samples (vime ui {run_dir})"
_TEXT_LABELS = (
    " (labels are text here, also those that look like numbers, so sample.label == 42 is never true)"
)
CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "sessions fail",
        lambda f: f["failed_sessions"] >= MANY_SESSIONS,
        "{failed_sessions:.0%} of the sessions of {span} are not trained on; sessions ended {session_ends}",
        'look at metadata["session"] of their samples (vime ui {run_dir}); docs/agents.md has the reasons',
        stops_learning=False,
        in_a_row=1,  # an agent's error usually repeats in the next rollout
    ),
    Condition(
        "entropy collapses",
        lambda f: f["entropy"] <= min(ENTROPY_NOTHING, ENTROPY_SHARE * f["highest_entropy"]),
        "the entropy of {span} is {entropy:.3g} nats per token, and was {highest_entropy:.3g}: the policy writes the "
        "same answer each time",
        "lower --lr, and resume from a checkpoint before it; where rewards are as wanted, end the run",
        stops_learning=False,
    ),
    Condition(
        "all samples dropped",
        lambda f: f["untrained"] == 1,
        "no sample of {span} is trained on",
        "look at rollout/removed/* and rollout/staleness/*, at --rollout-sample-filter-path and at rewards that are "
        "not finite",
    ),
    Condition(
        "all rewards 0",
        lambda f: f["reward_mean"] == 0 == f["reward_range"],
        "each reward of {span} is 0",
        f"{_SAMPLES}: does the reward find the answer{{labels}}? Check --label-key, --rm-type, --apply-chat-template "
        "and --rollout-max-response-len",
    ),
    Condition(
        "no spread of rewards",
        lambda f: f["without_spread"] == 1,
        "the rewards of {span} do not differ within any group (their mean is {reward_mean:.3g}), so the advantages "
        "are 0",
        f"{_SAMPLES}: are the prompts all too hard or too easy, does the reward see the answer, are the samples of a "
        "group equal (--rollout-temperature)?",
        reported_by=("all rewards 0",),
    ),
    Condition(
        "learning rate 0",
        lambda f: f["learning_rate"] == 0,
        "the learning rate of {span} is 0",
        "check --lr, --min-lr, --lr-warmup-iters and --lr-decay-iters, and where a resumed run is in its schedule",
    ),
    Condition(
        "gradient 0",
        lambda f: f["grad_norm"] == 0,
        "the gradient of {span} is 0",
        "look at rollout/advantages, at the loss masks, and at hooks that return a constant loss",
        reported_by=("all samples dropped", "all rewards 0", "no spread of rewards"),
    ),
    Condition(
        "all answers truncated",
        lambda f: f["truncated"] == 1,
        "each answer of {span} was cut at its limit",
        "raise --rollout-max-response-len, or check that the chat template and the stop tokens end an answer",
        stops_learning=False,
    ),
    Condition(
        "KL to the reference explodes",
        lambda f: f["kl_loss"] > FAR_FROM_REFERENCE,
        "train/kl_loss of {span} is {kl_loss:.3g} nats per token",
        "lower --lr, raise --kl-loss-coef, and resume from a checkpoint before it",
        stops_learning=False,
    ),
    Condition(
        "KL of a step explodes",
        lambda f: abs(f["ppo_kl"]) > FAR_IN_A_STEP,
        "train/ppo_kl of {span} is {ppo_kl:.3g} nats per token",
        "lower --lr or the optimizer steps per rollout, and compare trainer and engine with --rlk-consistency",
        stops_learning=False,
    ),
    Condition(
        "entropy explodes",
        lambda f: f["entropy"] >= max(ENTROPY_LEAST, ENTROPY_TIMES * f["lowest_entropy"]),
        "the entropy of {span} is {entropy:.3g} nats per token, and was {lowest_entropy:.3g}",
        "lower --lr and --entropy-coef, and resume from a checkpoint before it",
        stops_learning=False,
    ),
)
DROPPED = Condition(
    "all groups dropped",
    lambda f: f["dropped"] >= IN_A_ROW * f["batch"],
    "{dropped:.0f} groups in a row were dropped, and a batch needs {batch:.0f}",
    "look at the reasons (rollout/dynamic_filter/*), at the difficulty of the prompts, and at "
    "--dynamic-sampling-filter-path",
)
"""The condition during generation: `slime.rollout.stream.stream` checks it after each dropped group."""
STOPS_LEARNING = {one.name for one in (*CONDITIONS, DROPPED) if one.stops_learning}


@dataclass
class Concerns:
    """Evaluates the conditions of a run, rollout by rollout."""

    run_dir: str = "RUN_DIR"
    counts: dict[str, int] = field(default_factory=dict)
    """Number of consecutive rollouts in which each condition has held."""
    going_on: dict[str, Concern] = field(default_factory=dict)
    entropies: list[float] = field(default_factory=list)
    """Lowest and highest entropy over the earlier rollouts."""

    def observe(
        self, rollout: int, figures: Figures, texts: Mapping[str, str] = MappingProxyType({})
    ) -> list[Concern]:
        """Returns the concerns that begin, end, or are printed again with this rollout. `texts` has values for the
        placeholders in some conditions' texts."""
        seen = dict(figures)
        if self.entropies:
            seen["lowest_entropy"], seen["highest_entropy"] = self.entropies
        if (entropy := figures.get("entropy")) is not None:
            known = [*self.entropies, entropy]
            self.entropies = [min(known), max(known)]
        return [concern for one in CONDITIONS for concern in self._observed(one, rollout, seen, texts)]

    def _observed(
        self, one: Condition, rollout: int, figures: Figures, texts: Mapping[str, str]
    ) -> Iterator[Concern]:
        try:
            holds = one.holds(figures)
        except KeyError:
            return
        count = self.counts[one.name] = self.counts.get(one.name, 0) + 1 if holds else 0
        if not holds:
            if (ended := self.going_on.pop(one.name, None)) is not None:
                yield Concern(one, rollout, "ends", ended.text)
            return
        if count < one.in_a_row or any(name in self.going_on for name in one.reported_by):
            return
        one = replace(one, remedy=self._remedy(one, figures))
        span = f"rollouts {rollout - count + 1} to {rollout}" if count > 1 else f"rollout {rollout}"
        concern = Concern(one, rollout, "goes on", one.text.format(span=span, **figures, **texts))
        if one.name not in self.going_on:
            concern = Concern(one, rollout, "begins", concern.text)
            yield concern
        elif (count - one.in_a_row) % AGAIN_EVERY == 0:
            yield concern
        self.going_on[one.name] = concern

    def _remedy(self, one: Condition, figures: Figures) -> str:
        labels = _TEXT_LABELS if figures.get("text_labels") == 1 else ""
        return one.remedy.format(run_dir=self.run_dir, labels=labels)


class ConcernsOfOthers:
    """Reads the concerns that other processes of the run record from now on."""

    def __init__(self, run_dir: str | None, source: str) -> None:
        self._run_dir, self._source = run_dir, source
        self._tail: Tail | None = None
        self._next_s = 0.0

    def new_lines(self) -> Iterator[str]:
        """Yields lines for the console. Reads the journal at most every LOOK_EVERY_S seconds."""
        if self._run_dir is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_EVERY_S
        if self._tail is None:
            with contextlib.suppress(ValueError):  # the journal does not exist yet
                self._tail = Tail(Path(self._run_dir), kinds=(BEGINS,))
                self._tail.skip()
            return
        for event in self._tail.new():
            if event.source != self._source:
                yield f"{event['name']}: {event['text']}; {event['remedy']}"


def dropped_groups(rollout: int, dropped: int, batch: int) -> Concern | None:
    """Returns the concern that begins with a dropped group of a rollout, or None.

    `dropped` is the number of groups dropped in a row. `batch` is --rollout-batch-size.
    """
    figures = {"dropped": float(dropped), "batch": float(batch)}
    if not DROPPED.holds(figures) or dropped > IN_A_ROW * batch:
        return None
    return Concern(DROPPED, rollout, "begins", DROPPED.text.format(**figures))


def end_dropped_groups(rollout: int, dropped: int, batch: int) -> Concern | None:
    """Returns the concern that ends with a kept group after `dropped` groups that were dropped in a row, or None."""
    figures = {"dropped": float(dropped), "batch": float(batch)}
    return (
        Concern(DROPPED, rollout, "ends", DROPPED.text.format(**figures)) if DROPPED.holds(figures) else None
    )


def step_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the figures of a rollout's optimizer steps."""
    figures: dict[str, float] = {}
    for name, metric in (("grad_norm", "train/grad_norm"), ("ppo_kl", "train/ppo_kl")):
        if values := [step[metric] for step in steps if metric in step]:
            figures[name] = max(values, key=abs)
    if rates := [value for step in steps for name, value in step.items() if name.startswith("train/lr-pg_")]:
        figures["learning_rate"] = max(rates)
    for name, metric in (("kl_loss", "train/kl_loss"), ("entropy", "train/entropy_loss")):
        if values := [step[metric] for step in steps if metric in step]:
            figures[name] = values[-1]
    return figures
