"""Keeps the tokens of requests that engines still answer, for snapshots of unfinished groups."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TypedDict

import numpy as np

from slime.protocols import AnswerParts, GenerateResult
from slime.rollout.state import GenerateState

SHARE = 0.25
"""Seconds between two parts of an answer, divided by the seconds between two snapshots."""


class RequestParts(TypedDict, total=False):
    """Argument of a request to an engine."""

    parts: AnswerParts


class AnswersSoFar:
    """The parts of each running request by its random stream: a part of a run's `GenerateState`."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.found: dict[str, list[GenerateResult]] = {}

    def take(self, stream: str, index: int, part: GenerateResult) -> None:
        """Implements `slime.protocols.AnswerParts.take` for a random stream. Drops the tokens of an engine that has
        died."""
        if index == 0:
            self.found[stream] = []
        parts = self.found.get(stream)
        if parts is None or sum(len(each.token_ids) for each in parts) != index:
            self.found.pop(stream, None)  # a part is missing
            return
        parts.append(part)

    def read(self, stream: str) -> GenerateResult | None:
        """Returns the tokens of a running request so far, as if it were aborted now. Returns None without tokens. The
        text is empty, because it may end inside of a character."""
        if not (parts := self.found.get(stream)):
            return None
        names = set.intersection(*(set(part.columns) for part in parts))
        versions = [version for version, _ in groupby(v for part in parts for v in part.weight_versions)]
        return GenerateResult(
            [token for part in parts for token in part.token_ids],
            [value for part in parts for value in part.log_probs],
            "",
            "abort",
            versions,
            columns={name: _join([part.columns[name] for part in parts]) for name in names},
        )


def _join(arrays: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(each) for each in zip(*arrays, strict=True))


def request_parts(state: GenerateState, stream: str) -> RequestParts:
    """Returns the argument with which a request of the random stream reports its tokens. It is empty without snapshots,
    and for an engine that reports no parts."""
    answers = state.has_part(AnswersSoFar)
    if answers is None or not getattr(state.engine, "has_parts", False):
        return {}
    return {"parts": AnswerParts(answers.every_s, partial(answers.take, stream))}


def forget_parts(state: GenerateState, stream: str) -> None:
    """Drops the parts of a request that has ended."""
    if (answers := state.has_part(AnswersSoFar)) is not None:
        answers.found.pop(stream, None)
