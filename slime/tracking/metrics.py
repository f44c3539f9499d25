"""Defines the step keys, the metric names that this project adds to slime's, and the check that a metric is a
number."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Literal, SupportsFloat, cast, get_args

StepKey = Literal["rollout/step", "train/step", "eval/step"]
STEP_KEYS: tuple[str, ...] = get_args(StepKey)
RESERVED = frozenset({"step_key", "step", "time", "nonfinite"})
"""Names in a line of metrics.jsonl that are not metrics."""

LOGPROB_DIFF = "train/train_rollout_logprob_abs_diff"
LOGPROB_DIFF_MAX = "train/train_rollout_logprob_abs_diff_max"
"""Largest |trainer's log-prob - engine's log-prob| over the trained tokens of a step, in nats. The name is not
slime's."""
EXPERTS_DIFFER = "train/routed_experts_differ"
"""With routing replay, the share of (token, layer) pairs whose router would have chosen other experts than the replayed
ones. The name is not slime's."""
_TRUNCATED = "-truncated_ratio"
_DERIVED = re.compile(r"(-truncated_ratio|-aborted_ratio|-pass@[^/]*)$")
"""Endings that follow the name of a score in the names of metrics derived from a set's responses."""


HELD_OUT = ("loss", "rewards/accuracies", "rewards/margins")
"""Metrics of a held-out set that are shown to a user, such as eval/{name}/loss, without eval/{name}."""
_HELD_OUT_SCORES = ("loss", "rewards/accuracies")
_LOSS = "/loss"


def as_step_key(name: str) -> StepKey:
    """Returns `name`. Raises ValueError if it is not a step key."""
    if name not in STEP_KEYS:
        raise ValueError(f"step_key must be one of {', '.join(STEP_KEYS)}, got {name!r}; use one of them")
    return cast(StepKey, name)


def as_floats(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Converts every value to a Python float, also NumPy scalars and one-element tensors. Raises ValueError for other
    values and for a reserved name."""
    if taken := RESERVED.intersection(metrics):
        raise ValueError(f"metric names must not be {sorted(RESERVED)}, got {sorted(taken)}; rename them")
    out = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, str):
            raise ValueError(f"metric {name!r} must be a name with a number, got {value!r}; log numbers only")
        try:
            out[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {name} must be one number, got {type(value).__name__}; reduce it before logging"
            ) from error
    return out


def is_score(name: str, others: Container[str] = ()) -> bool:
    """Returns True if a metric is the score of an evaluation set, `eval/{name}`, and not derived from it.

    A set whose name has a "/" is recognised by its truncated_ratio, which is among the metrics `others`. A held-out set
    has its loss as a score, and a set of pairs its accuracy too.
    """
    own = name.startswith("eval/") and name not in STEP_KEYS and not _is_derived(name)
    return own and (
        name.count("/") == 1 or name + _TRUNCATED in others or _is_held_out(name, _HELD_OUT_SCORES, others)
    )


def is_held_out_loss(name: str) -> bool:
    """Returns True for a loss, where a lower value is better, among the scores of held-out sets. The name may lack its
    eval/."""
    return name.endswith(_LOSS)


def _is_held_out(name: str, figures: Iterable[str], others: Container[str]) -> bool:
    """Returns True if a metric is among these figures and belongs to a set without rewards. A set with rewards has a
    metric `eval/{name}`."""
    sets = (name.removesuffix(f"/{figure}") for figure in figures if name.endswith(f"/{figure}"))
    return any(one.count("/") >= 1 and one not in others for one in sets)


def select_sets(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores, ratios, pass rates and margins of evaluation sets, in their order."""
    return {
        name: value
        for name, value in metrics.items()
        if name.count("/") == 1
        or is_score(_DERIVED.sub("", name), metrics)
        or _is_held_out(name, HELD_OUT, metrics)
    }


def _is_derived(name: str) -> bool:
    return _DERIVED.search(name) is not None
