"""Checks of a reward: types, finite values, time, order, and the batch form of --group-rm."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from slime.config.schema import Config
from slime.hooks import Hook
from slime.rollout.context import RunContext
from slime.rollout.rewards import score, score_together
from slime.rules.resolve import resolve
from slime.types import Reward, Sample
from vime.testing.paths import function_path

T = TypeVar("T")

ODD_RESPONSES = (
    *("", " ", "\n\n", "\x00", "nan", "-inf", "1e999", "9" * 5000),
    *("\\boxed{", "<think>", "答案是 42 ∞", "a " * 20_000),
)
"""Responses that a model may write, and that graders often do not expect."""


def check_reward(
    reward: Hook | str,
    samples: Sequence[Sample],
    *,
    expected: Sequence[float] | None = None,
    limit_s: float = 1.0,
    odd: Sequence[str] = ODD_RESPONSES,
    group: bool = False,
    reward_key: str | None = None,
    deterministic: bool = True,
    **flags: object,
) -> list[float]:
    """Calls a reward as a run does, and returns its values for `samples`.

    Args:
        reward: the function of --custom-rm-path, or its path. It may have the form of TRL or verl.
        samples: samples with prompt, response, label and metadata.
        expected: the values of `samples`, compared within 1e-6.
        limit_s: the longest time per call, in seconds.
        odd: responses with which each distinct label is scored, too. Their values must be finite numbers.
        group: True for a reward that gets all samples of a prompt (--group-rm).
        reward_key: the entry of a dict that is the reward (--reward-key).
        deterministic: False for a reward that may return another value for the same sample.
        flags: more flags of the run, which the reward reads in `args`.

    Raises AssertionError if a value is not a finite number, a call is too slow, a call changes the sample, or the value
    of a sample depends on the order of the samples.
    """
    assert samples, "samples must not be empty, got none; give samples with prompt, response and label"
    settings = {
        "custom_rm_path": function_path(reward, "reward"),
        "group_rm": group,
        "reward_key": reward_key,
    }
    config = resolve({**settings, **flags})
    calls = _Calls(config, group=group, limit_s=limit_s)
    values = calls.score(samples)
    if expected is not None:
        assert len(expected) == len(values), f"expected must have {len(values)} values, got {len(expected)}"
        for sample, value, wanted in zip(samples, values, expected, strict=True):
            close = math.isclose(value, wanted, rel_tol=0, abs_tol=1e-6)
            assert close, f"the reward of {_shown(sample)} must be {wanted}, got {value}"
    if deterministic:
        again = calls.score(samples[::-1])[::-1]
        for sample, value, other in zip(samples, values, again, strict=True):
            same = value == other
            assert same, (
                f"the reward of {_shown(sample)} must not depend on earlier calls, got {value}, then {other}"
            )
    for text in odd:
        calls.score([replace(copy.deepcopy(sample), response=text) for sample in samples])
    return values


class _Calls:
    """Calls of a reward with the functions of a run."""

    def __init__(self, config: Config, *, group: bool, limit_s: float) -> None:
        self.context = RunContext(config, config.namespace())
        self.group, self.limit_s = group, limit_s

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns one number per sample."""
        before = [_fields(sample) for sample in samples]
        values = asyncio.run(self._together(list(samples)) if self.group else self._singly(samples))
        for sample, fields in zip(samples, before, strict=True):
            changed = sorted(name for name, value in _fields(sample).items() if value != fields.get(name))
            assert not changed, (
                f"a reward must not change the sample, got new {', '.join(changed)} for {_shown(sample)}"
            )
        return [self._number(value, sample) for value, sample in zip(values, samples, strict=True)]

    async def _singly(self, samples: Sequence[Sample]) -> list[Reward]:
        return [await self._timed(score(self.context, sample), sample) for sample in samples]

    async def _together(self, samples: list[Sample]) -> list[Reward]:
        return await self._timed(score_together(self.context, samples), samples[0])

    async def _timed(self, call: Awaitable[T], sample: Sample) -> T:
        began = time.perf_counter()
        try:
            value = await call
        except (ValueError, RuntimeError) as error:
            raise AssertionError(
                f"the reward of {_shown(sample)} must be a number, got an error: {error}"
            ) from error
        took = time.perf_counter() - began
        slow = f"the reward of {_shown(sample)} must take at most {self.limit_s} s, got {took:.2f} s"
        assert took <= self.limit_s, slow
        return value

    def _number(self, value: Reward, sample: Sample) -> float:
        if isinstance(value, dict):
            key = self.context.config.reward.reward_key or ""
            assert key in value, f"a dict must have the reward under reward_key, got {sorted(value)}"
            value = value[key]
        number = float(value)  # type: ignore[arg-type]  # a reward of another type raises here
        assert math.isfinite(number), f"the reward of {_shown(sample)} must be finite, got {number}"
        return number


def _fields(sample: Sample) -> dict[str, object]:
    """Returns copies of a sample's fields. A reward may write to `metadata`, as graders of slime do."""
    return {name: copy.deepcopy(value) for name, value in vars(sample).items() if name != "metadata"}


def _shown(sample: Sample) -> str:
    text = sample.response if len(sample.response) <= 60 else f"{sample.response[:60]}..."
    return f"the response {text!r} with the label {sample.label!r}"
