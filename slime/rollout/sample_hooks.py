"""This module calls hooks with every generated sample before it is scored (`--rollout-sample-hook-path`)."""

from __future__ import annotations

import inspect
from argparse import Namespace
from functools import lru_cache
from typing import Any, TypeVar

from slime.hooks import Hook, load_function
from slime.rollout.context import RunContext, find_context
from slime.types import Sample

T = TypeVar("T")

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Sets the `rollout_id` that hooks get if the caller passes none, for rollout functions of plug-ins."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(
    args: Namespace,
    sample: T,
    *,
    rollout_id: int | None = None,
    evaluation: bool = False,
    **kwargs: object,
) -> T:
    """Runs the hooks in the order of their flags on a sample, or on each sample of a list, or of a list of lists.

    A hook is `fn(args, sample, *, rollout_id, evaluation)`, plain or async. It also gets the other keywords. Keywords
    that the hook does not take are left out. The default of `rollout_id` is set by `set_current_rollout_id`. The hook
    changes the sample in place or returns another sample. Raises TypeError, as in slime, if it returns anything else.
    """
    return await run_sample_hooks(
        find_context(args), sample, rollout_id=rollout_id, evaluation=evaluation, **kwargs
    )


async def run_sample_hooks(
    context: RunContext, sample: T, *, rollout_id: int | None, evaluation: bool, **kwargs: object
) -> T:
    """Implements `apply_rollout_sample_hooks`."""
    rollout_id = _current_rollout_id if rollout_id is None else rollout_id
    keywords = {"rollout_id": rollout_id, "evaluation": evaluation, **kwargs}
    made: T = await _apply(context, sample, keywords)
    return made


async def _apply(context: RunContext, sample: Any, keywords: dict[str, object]) -> Any:
    if isinstance(sample, list):
        return [await _apply(context, one, keywords) for one in sample]
    for path in context.config.rollout.rollout_sample_hook_path or []:
        hook = load_function(path, flag="--rollout-sample-hook-path")
        result = hook(context.hook_args, sample, **accepted(hook, **keywords))
        if inspect.isawaitable(result):
            result = await result
        if result is None:
            continue
        if not isinstance(result, Sample):
            raise TypeError(
                f"--rollout-sample-hook-path must return a sample, got {type(result).__name__} from {path}; "
                "return the expected Sample or None"
            )
        sample = result
    return sample


def accepted(fn: Hook, **keywords: T) -> dict[str, T]:
    """Returns the keywords that `fn` accepts, so that hooks with fewer arguments keep working."""
    # Functions are hashable, so the cache can hold them. A callable object may be unhashable (a plain dataclass).
    names = _remembered(fn) if inspect.isroutine(fn) else _parameters(fn)
    return keywords if names is None else {name: value for name, value in keywords.items() if name in names}


def _parameters(fn: Hook) -> frozenset[str] | None:
    """Returns the names of the parameters, or None if `fn` accepts any keyword."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


_remembered = lru_cache(256)(_parameters)
"""Cached version of `_parameters`, because every sample needs the result."""
