"""The kinds of events of a run: what each says, who writes it, and whether it is on the disk when `add` returns.

A line of events.jsonl is one JSON object, and the fields of the kind follow its first three:

    {"time": 1767225600.0, "source": "rollout", "kind": "drawn", "groups": [8, 9], "version": 2}

The first line of each file has the kind `journal` and the version of the format. Another kind is one line here.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENTS_FILE = "events.jsonl"
OLDER = "events-*.jsonl"
"""Files that were full, numbered from 1. events.jsonl goes on after the last of them."""
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
"""The times of `slime.tracking.timers` that are phases of a run, and their names there. Those of parts of a micro-batch
are too many."""


@dataclass(frozen=True)
class EventKind:
    """One kind of event. `fields`: names, those after a `?` only of some events."""

    name: str
    source: str
    fields: str
    about: str
    durable: bool = True
    """Written before `add` returns. Otherwise at most half a second later, without waiting for the disk."""

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(self.fields.replace("?", " ").split())

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.fields.partition("?")[0].split())


_STEP = "rollout ? " + " ".join(f"{name}_s" for name in STEP_PARTS)
_ALL = (
    EventKind("journal", "any", "version", "the first line of a file: the version of the format"),
    EventKind("run", "driver", "host pid born rollouts", "a process begins a run of so many rollouts"),
    EventKind("start", "driver", "rollout", "training starts, or resumes, at this rollout"),
    EventKind("step", "driver", _STEP, "the rollout was trained, and its line is in metrics.jsonl"),
    EventKind(
        "checkpoint",
        "driver",
        "rollout",
        "the checkpoint after it is complete, or its files are being written",
    ),
    EventKind("evaluation", "driver", "rollout scores", "the scores of the weights after so many rollouts"),
    EventKind("end", "driver", "state", "the run has ended: finished, or interrupted by its user"),
    EventKind("error", "driver", "type text ? log", "what has ended the run"),
    EventKind(
        "control_socket",
        "engines",
        "socket host pid",
        "a run starts its engines; where `vime engines` reaches it",
    ),
    EventKind("engine", "engines", "model engine state ? address place version", "what became of an engine"),
    EventKind("weights", "engines", "model engines version", "these engines have loaded that version"),
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
    EventKind("drawn", "rollout", "groups version", "generation starts; the weights of the engines"),
    EventKind(
        "ended",
        "rollout",
        "groups ? sample seconds tokens",
        "they have responses and rewards, or were given up; their slowest sample",
        durable=False,
    ),
    EventKind("kept", "rollout", "groups", "they passed the filters, and wait for a batch", durable=False),
    EventKind("dropped", "rollout", "groups reason", "they will not be trained"),
    EventKind("put_back", "rollout", "groups", "they return to the data source with their tokens"),
    EventKind(
        "batch", "rollout", "rollout groups over_limit", "the batch; samples older than --max-staleness"
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
