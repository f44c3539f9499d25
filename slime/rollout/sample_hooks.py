"""Hooks that see every generated sample before it is scored (`--rollout-sample-hook-path`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from slime.hooks import load_function
from slime.types import Sample

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """The rollout of the samples that are given to hooks without one: for rollout functions of plug-ins."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(
    args: Any, sample: Sample | list[Sample], *, rollout_id: int | None = None, evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the hooks in the order of their flags on a sample, or on each of the siblings in a list.

    A hook is `fn(args, sample, *, rollout_id, evaluation)`, plain or async. Keywords that the hook does not take
    are left out. Without a `rollout_id` it is that of `set_current_rollout_id`. The hook changes the sample in place or
    returns another sample. ValueError if it returns anything else.
    """
    paths = args.rollout_sample_hook_path or []
    rollout_id = _current_rollout_id if rollout_id is None else rollout_id
    if isinstance(sample, list):
        return [await _apply(args, one, paths, rollout_id, evaluation) for one in sample]
    return await _apply(args, sample, paths, rollout_id, evaluation)


async def _apply(
    args: Any, sample: Sample, paths: list[str], rollout_id: int | None, evaluation: bool
) -> Sample:
    for path in paths:
        hook = load_function(path, flag="--rollout-sample-hook-path")
        result = hook(args, sample, **accepted(hook, rollout_id=rollout_id, evaluation=evaluation))
        if inspect.isawaitable(result):
            result = await result
        if result is None:
            continue
        if not isinstance(result, Sample):
            raise ValueError(
                f"--rollout-sample-hook-path must return a Sample or None, "
                f"got {type(result).__name__} from {path}"
            )
        sample = result
    return sample


def accepted(fn: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """The keywords that `fn` has parameters for, so that hooks with fewer arguments keep working."""
    # Functions have a hash, so the cache can hold them. A callable object may have none (a plain dataclass).
    names = _remembered(fn) if inspect.isroutine(fn) else _parameters(fn)
    return keywords if names is None else {name: value for name, value in keywords.items() if name in names}


def _parameters(fn: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the parameters, or None if `fn` takes any keyword."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


_remembered = lru_cache(256)(_parameters)
"""Cached, because every sample needs the result."""
