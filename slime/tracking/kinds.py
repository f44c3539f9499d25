"""Defines the kinds of events of a run: their fields, the process that writes them, and whether they are on the disk
when `add` returns.

A line of events.jsonl is one JSON object. Three common fields come first, then the fields of the kind:

    {"time": 1767225600.0, "source": "rollout", "kind": "drawn", "groups": [8, 9], "version": 2}

The first line of each file has the kind `journal` and the version of the format. Each kind is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from slime.tracking.run_files import is_number, is_whole_number

EVENTS_FILE = "events.jsonl"
OLDER = "events-*.jsonl"
"""Files that were full, numbered from 1. events.jsonl continues after the last one."""
VERSION = 1
STEP_PARTS = ("train_wait", "train", "update_weights")
DAMAGED = "damaged"
PHASES = {
    **{
        "train_wait": "wait",
        "update_weights": "update",
        "wake_up": "wake",
        "save_model": "save",
        "trainer": "train",
    },
    **{name: name for name in ("sleep", "train", "onload", "offload", "data_preprocess", "ref_log_probs")},
    **{name: name for name in ("log_probs", "values", "actor_train", "critic_train", "consistency")},
}
"""Times of `slime.tracking.timers` that are phases of a run, and their names in the journal. The parts of a micro-batch
are not phases, because they are too many."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole_or_none(value: object) -> bool:
    return value is None or is_whole_number(value)


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _are_numbers(value: object) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (is_whole_number(min(value)) and is_whole_number(max(value)))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_locations(value: object) -> bool:
    """Returns True for a list of (data set, first and last visit, prompt), or None for a group without a new prompt."""
    return isinstance(value, list) and all(
        location is None or (_are_numbers(location) and len(location) == 4) for location in value
    )


def _are_scores(value: object) -> bool:
    """Returns True for a dictionary of scores. A score that is not finite is a float, too."""
    return isinstance(value, dict) and all(type(score) in (int, float) for score in value.values())


_TEXTS = (
    "host session_id state type text log socket model engine address place reason session phase device logger name "
    "remedy"
)
_WHOLE = "pid attempt repeated over_limit turn prompt_tokens part bytes running waiting"
_WHOLE_OR_NONE = "born rollout rollouts version sample tokens"
CHECKS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(_TEXTS.split(), _is_text),
    **dict.fromkeys(_WHOLE.split(), is_whole_number),
    **dict.fromkeys(_WHOLE_OR_NONE.split(), _is_whole_or_none),
    **dict.fromkeys(("seconds", "kv_cache"), is_number),
    **{f"{name}_s": _is_number_or_none for name in STEP_PARTS},
    "groups": _are_numbers,
    "engines": _are_texts,
    "prompts": _are_locations,
    "scores": _are_scores,
    "samples": is_whole_number,
    "started.parts": _are_scores,
    "processes": lambda value: isinstance(value, dict),
    "cards": lambda value: isinstance(value, list) and all(isinstance(card, dict) for card in value),
    "memory.host": lambda value: isinstance(value, dict),
}
"""Checks of the fields of an event by name, or by KIND.NAME if the field has another type in that kind."""


@dataclass(frozen=True)
class EventKind:
    """One kind of event. `fields`: names; those after a `?` are optional."""

    name: str
    source: str
    fields: str
    about: str
    durable: bool = True
    """True if the event is written before `add` returns. Otherwise it is written at most half a second later, and `add`
    does not wait for the disk."""
    never_none: str = ""
    """Name of a field that is never None in this kind, although it may be None in other kinds."""
    words: frozenset[str] = frozenset()
    """All values of `state`, for a kind whose readers depend on them."""

    @cached_property
    def allowed(self) -> frozenset[str]:
        return frozenset(self.fields.replace("?", " ").split())

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.fields.partition("?")[0].split())

    @cached_property
    def checks(self) -> Mapping[str, Callable[[object], bool]]:
        return {name: CHECKS.get(f"{self.name}.{name}") or CHECKS[name] for name in self.allowed}

    def read(self, fields: Mapping[str, object]) -> dict[str, object] | None:
        """Returns the known fields of an event of this kind, or None if a field is missing or invalid: the line is then
        damaged."""
        known = {}
        for name, value in fields.items():
            if name not in self.allowed:
                continue
            if not self.checks[name](value) or (value is None and name == self.never_none):
                return None
            known[name] = value
        if not self.required <= known.keys():
            return None
        if self.words and known["state"] not in self.words:
            return None
        return known


_STEP = "rollout ? " + " ".join(f"{name}_s" for name in STEP_PARTS)
_ALL = (
    EventKind(
        "journal",
        "any",
        "version",
        "the first line of a file: the version of the format",
        never_none="version",
    ),
    EventKind(
        "run", "driver", "host pid born rollouts ? session_id", "a process begins a run of so many rollouts"
    ),
    EventKind(
        "start", "driver", "rollout", "training starts, or resumes, at this rollout", never_none="rollout"
    ),
    EventKind(
        "started",
        "driver",
        "seconds parts",
        "the engines have their first weights; the time since the driver's process began, and the parts of this time",
    ),
    EventKind(
        "step",
        "driver",
        _STEP,
        "the rollout was trained, and its line is in metrics.jsonl",
        never_none="rollout",
    ),
    EventKind(
        "checkpoint",
        "driver",
        "rollout",
        "the checkpoint after it is complete, or its files are being written",
        never_none="rollout",
    ),
    EventKind(
        "trainer_lost",
        "driver",
        "rollout phase text",
        "the trainer was lost before it had trained this rollout: what it did, and the error; it starts again",
        never_none="rollout",
    ),
    EventKind(
        "trainer_restarted",
        "driver",
        "rollout repeated seconds",
        "the trainer is back: it continued at this rollout, and has trained so many rollouts again",
        never_none="rollout",
    ),
    EventKind(
        "manager_lost",
        "driver",
        "rollout text",
        "the rollout manager was lost before it had made this rollout, with the error; it starts again",
        never_none="rollout",
    ),
    EventKind(
        "manager_restarted",
        "driver",
        "rollout seconds",
        "the rollout manager is back: it makes this rollout and later ones again",
        never_none="rollout",
    ),
    EventKind(
        "evaluation",
        "driver",
        "rollout scores",
        "the scores of the weights after so many rollouts",
        never_none="rollout",
    ),
    EventKind(
        "end",
        "driver",
        "state",
        "the run has ended: finished, or interrupted by its user",
        words=frozenset({"finished", "interrupted"}),
    ),
    EventKind(
        "concern_begin",
        "any",
        "name rollout text remedy",
        "the run cannot learn, or is about to diverge: what is so, and what to look at",
        never_none="rollout",
    ),
    EventKind(
        "concern_end",
        "any",
        "name rollout text remedy",
        "the concern of this name is over; what was so",
        never_none="rollout",
    ),
    EventKind("error", "driver", "type text ? log", "what has ended the run"),
    EventKind(
        "control_socket",
        "engines",
        "socket host pid",
        "a run starts its engines; where `vime engines` reaches it",
    ),
    EventKind("engine", "engines", "model engine state ? address place version", "what became of an engine"),
    EventKind(
        "weights",
        "engines",
        "model engines version",
        "these engines have loaded that version",
        never_none="version",
    ),
    EventKind(
        "part",
        "engines",
        "model version part bytes seconds",
        "engines have loaded a part of it",
        durable=False,
    ),
    EventKind(
        "load",
        "engines",
        "model engine running waiting kv_cache",
        "its requests that compute and wait, and the share of its cache that is used",
        durable=False,
    ),
    EventKind(
        "drawn",
        "rollout",
        "groups version ? prompts",
        "generation starts; the weights of the engines, and where the prompt of each new group is in the data",
    ),
    EventKind(
        "ended",
        "rollout",
        "groups ? sample seconds tokens",
        "they have responses and rewards, or were given up; their slowest sample",
        durable=False,
    ),
    EventKind("kept", "rollout", "groups", "they passed the filters, and wait for a batch", durable=False),
    EventKind("dropped", "rollout", "groups reason", "they will not be trained"),
    EventKind(
        "failed",
        "rollout",
        "groups sample reason state text",
        "a sample of the group failed for this reason, and was kept, replaced or dropped (--failed-samples)",
    ),
    EventKind("put_back", "rollout", "groups", "they return to the data source with their tokens"),
    EventKind(
        "snapshot",
        "rollout",
        "groups tokens bytes seconds",
        "a snapshot has these unfinished groups; the response tokens of the groups that were copied now",
        durable=False,
    ),
    EventKind(
        "restored",
        "rollout",
        "groups tokens samples",
        "the group goes on with so many tokens of a snapshot, in so many samples",
    ),
    EventKind(
        "leased",
        "rollout",
        "groups host attempt",
        "a rollout host generates the group; the number of its leases so far",
        durable=False,
    ),
    EventKind(
        "discarded",
        "rollout",
        "groups host reason text",
        "an answer of this host is not used: its lease was lost, its group had ended, or it is damaged or too old",
    ),
    EventKind(
        "batch",
        "rollout",
        "rollout groups over_limit",
        "the batch; samples older than --max-staleness",
        never_none="rollout",
    ),
    EventKind(
        "left_out",
        "rollout",
        "rollout samples groups",
        "samples of the batch that fill no optimizer step and are not trained; the groups without another sample",
        never_none="rollout",
    ),
    EventKind("position", "rollout", "rollout", "the data position after the batch is saved"),
    EventKind(
        "handed", "rollout", "rollout", "the batch is train data, and the trainer may take it", durable=False
    ),
    EventKind(
        "turn",
        "rollout",
        "session turn prompt_tokens tokens seconds",
        "a turn of a session ended",
        durable=False,
    ),
    EventKind(
        "phase_begin", "any", "phase ? device rollout", "a process begins a phase of its work", durable=False
    ),
    EventKind(
        "phase_end",
        "any",
        "phase seconds ? device rollout",
        "the phase ended, also by an error",
        durable=False,
    ),
    EventKind(
        "memory",
        "memory",
        "phase samples cards host processes ? rollout",
        "the largest memory in a phase, so far or until its end: of each card, of the host, of each process",
        durable=False,
    ),
    EventKind("warning", "any", "logger text", "a warning of a log", durable=False),
)
KINDS = {kind.name: kind for kind in _ALL}
