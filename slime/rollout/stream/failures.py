"""Handles samples that fail because a part outside of the model does not answer (--failed-samples).

Such parts are a reward beyond --reward-deadline-s, a custom generate function beyond --session-deadline-s, and a
sandbox that has died. Their errors have the attribute `failed_sample` with a reason. Every other error ends the run,
because it is a fault in the user's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeAlias

from slime.rollout.rewards.finite import KEY
from slime.rollout.state import GenerateState
from slime.rollout.stream.groups import get_number, restarted
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)
REPLACEMENTS = 3
"""With --failed-samples replace, a sample is generated again this number of times. After that, its group is dropped."""
_ATTRIBUTE = "failed_sample"
"""Attribute of an error, and key in the metadata of a sample that is kept."""
Made: TypeAlias = Sample | list[Sample]


class LateAnswerError(ValueError):
    """A custom generate function has not returned in time."""

    failed_sample = "generate_deadline"


class NoSampleError(RuntimeError):
    """All samples of a group have failed."""

    failed_sample = "all_samples"


class Failure(NamedTuple):
    """Why a group was dropped."""

    reason: str
    error: Exception


class Failures:
    """The failed samples of a run: a part of its `GenerateState`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.dropped: dict[int, Failure] = {}
        """Maps the number of a group to the failure for which the stream drops it."""

    def note(self, state: GenerateState, sample: Sample, reason: str, error: Exception, end: str) -> None:
        """Counts a failed sample and records it in the journal. `end` is "kept", "replaced" or "dropped"."""
        self.counts.update((reason, end))
        if self.counts[reason] == 1:
            logger.warning(
                "sample %s of group %s failed and is %s: %s", sample.index, sample.group_index, end, error
            )
        number = get_number([sample])
        state.events.add(
            "failed", groups=[number], sample=sample.index, reason=reason, state=end, text=str(error)[:500]
        )

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of failed samples since the last call, by the reason and by the result of the failure."""
        counts, self.counts = self.counts, Counter()
        return {f"rollout/failed_samples/{name}": float(count) for name, count in sorted(counts.items())}


def find_reason(error: BaseException) -> str | None:
    """Returns the reason of the error, or of an error that has led to it. Returns None for a fault of the user's
    code."""
    seen: BaseException | None = error
    while seen is not None:
        if (reason := getattr(seen, _ATTRIBUTE, None)) is not None:
            return str(reason)
        seen = seen.__cause__ or seen.__context__
    return None


async def run_sample(
    state: GenerateState, policy: str, sample: Sample, run: Callable[[], Awaitable[Made]]
) -> Made:
    """Returns the result of `run`, which fills the sample. With the policies keep and replace, a failed sample does not
    end its group. `policy` is the value of --failed-samples, or end for an evaluation."""
    failures = state.part(Failures, Failures)
    left = REPLACEMENTS
    while True:
        try:
            return await run()
        except Exception as error:  # border with users' code: other errors are raised again
            reason = find_reason(error)
            if reason is None or policy not in ("keep", "replace") or (policy == "replace" and not left):
                raise
            failures.note(state, sample, reason, error, "kept" if policy == "keep" else "replaced")
            if policy == "keep":
                sample.metadata[KEY] = {"reason": reason, "said": str(error)[:500]}
                sample.metadata[_ATTRIBUTE] = reason
                sample.status, sample.remove_sample = Sample.Status.FAILED, True
                return sample
            left -= 1
            vars(sample).update(vars(restarted(sample)))  # the next request has another seed


def fill_failed(group: SampleGroup, key: str | None) -> None:
    """Gives each failed sample of a group that is kept the row of a batch, without a trained token. Its reward is the
    mean of the others, so that the baseline of their advantages is their own mean. A group in which all samples failed
    does not change; `require_samples` raises an error for it."""
    good = [sample for sample in group if not has_failed(sample)]
    scored = [sample for sample in good if sample.reward is not None]
    if len(good) == len(group) or not scored:
        return
    values = [sample.reward_value(key) for sample in scored]
    for sample in group:
        if not has_failed(sample):
            continue
        if not sample.response_length:
            own = {"index": sample.index, "metadata": sample.metadata, "session_id": sample.session_id}
            vars(sample).update({**vars(copy.deepcopy(good[0])), **own})
        mean = sum(values) / len(values)
        sample.reward = {**good[0].reward, key or "": mean} if isinstance(good[0].reward, dict) else mean
        sample.loss_mask = [0] * sample.response_length
        sample.status, sample.remove_sample = Sample.Status.FAILED, True


def require_samples(group: SampleGroup) -> None:
    """Raises NoSampleError if all samples of a group have failed."""
    if group and all(map(has_failed, group)):
        raise NoSampleError(group[0].metadata[KEY]["said"])


def has_failed(sample: Sample) -> bool:
    """Returns True if the sample has failed and waits for `fill_failed`."""
    return _ATTRIBUTE in sample.metadata and sample.reward is None


def drop_failed(state: GenerateState, policy: str, group: SampleGroup, error: Exception) -> bool:
    """Returns True if the group shall be dropped because of the error of a sample, and marks it as aborted."""
    reason = find_reason(error)
    if reason is None or policy == "end":
        return False
    failures = state.part(Failures, Failures)
    failures.note(state, group[0], reason, error, "dropped")
    failures.dropped[get_number(group)] = Failure(reason, error)
    group[0].status = Sample.Status.ABORTED
    return True


@contextlib.asynccontextmanager
async def limit_answer(seconds: float, what: str) -> AsyncIterator[None]:
    """Enforces --session-deadline-s on a custom generate function. A session ends itself at that time; the margin is
    for a function that does not return."""
    clock = asyncio.timeout(seconds * 1.1 + 0.5)
    try:
        async with clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise LateAnswerError(
            f"{what} must return within --session-deadline-s, got no sample in {seconds:g} s; mend it or raise it"
        ) from error
