"""The rules by which a group continues after tokens that a killed run or another rollout host sampled earlier.

A sample restarts, and is counted, if its tokens come from weights that are further from the engines' weights than
--max-staleness allows. These weights may be newer than the engines', because training after a checkpoint is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slime.protocols import UNKNOWN_VERSION
from slime.rollout.generate import FINISHED, decode_response
from slime.rollout.state import GenerateState, rollout_sampling_params
from slime.rollout.stream.groups import StreamGroup, get_number
from slime.types import Sample


class Restored(NamedTuple):
    """The number of samples and tokens that a group restored, and the number of samples that start again."""

    samples: int = 0
    tokens: int = 0
    restarted: int = 0


def restore_group(
    entry: StreamGroup,
    samples: Sequence[Sample],
    version: int,
    state: GenerateState,
    rollout_id: int,
    limit: int,
) -> Restored:
    """Gives a group, drawn for rollout `rollout_id` or a later one, the tokens of `samples`. Tokens of unknown version
    count as sampled at `version`. `limit` is the largest distance of weights in updates."""
    if sum(s.response_length for s in samples) <= sum(s.response_length for s in entry.original):
        return Restored()  # the group already has as many tokens
    versions = range(rollout_id - limit, entry.version + limit + 1)
    usable = [_is_usable(sample, version, versions, state) for sample in samples]
    params = rollout_sampling_params(state.config.rollout)
    for sample in samples:
        if sample.response_length and sample.status not in FINISHED:
            sample.response = decode_response(sample, state, params)  # parts have no text
    used = [s for s, good in zip(samples, usable, strict=True) if good and s.response_length]
    if len(samples) == len(entry.original):
        every = zip(samples, usable, entry.original, strict=True)
        entry.original = [sample if good else new for sample, good, new in every]
        entry.group = entry.original
    elif all(usable):  # samples fanned out
        entry.group = list(samples)
    else:
        used = []
    tokens = sum(s.response_length for s in used)
    if used:
        entry.version = min([entry.version, *(v for s in used for v in find_versions(s, entry.version))])
        number = get_number(entry.original)
        state.events.add("restored", groups=[number], tokens=tokens, samples=len(used))
    return Restored(len(used), tokens, len(samples) - sum(usable))


def find_versions(sample: Sample, default: int) -> set[int]:
    """Returns the versions of the weights that sampled the tokens. A token of unknown version counts as sampled at
    version `default`. The result is empty without tokens."""
    if not sample.response_length:
        return set()
    known = {version for version in sample.weight_versions if isinstance(version, int)} - {UNKNOWN_VERSION}
    return known or {default}


def _is_usable(sample: Sample, default: int, versions: range, state: GenerateState) -> bool:
    """Returns True if the sample may continue, because `versions` has the weights of all its tokens. A sample without
    tokens starts anyway."""
    if sample.response_length and sample.status not in FINISHED and state.config.kernels.rlk_bitwise:
        return False  # the engine would compute the earlier tokens in another batch
    return all(version in versions for version in find_versions(sample, default))
