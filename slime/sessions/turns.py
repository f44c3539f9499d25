"""Stores the turns of a session as a tree and converts the tree to samples.

A turn is a request and its answer. A request continues a turn if it repeats the turn's messages and answer, and adds
messages. A client that changes earlier messages, repeats a request or starts another conversation forks the tree. Each
path from a root to a leaf becomes a sample. If several samples contain an answer, only the first sample trains on the
answer, so no token counts twice.

Shapes: N tokens of a path, L layers of the model, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.data import columns
from slime.data.agents import turn_rewards
from slime.data.agents.blank_sample import blank
from slime.protocols import GenerateResult
from slime.sessions.images import list_images
from slime.sessions.messages import same
from slime.types import Message, Sample
from slime.vision.inputs import ImageInputs
from slime.vision.runs import shift


@dataclass(eq=False)
class Turn:
    """One request and its answer."""

    parent: Turn | None
    added: list[Message]
    """The request's messages after the parent's answer."""
    prompt_ids: list[int]
    """The tokens of the added messages, including the opening of the answer."""
    reply: Message
    result: GenerateResult
    ended: bool
    """True if the model ended the turn with a special token."""
    tools_key: str = ""
    """The request's tools as JSON text, or "" without tools. The prompt contains the tools."""
    children: list[Turn] = field(default_factory=list)
    reward: float | None = None
    images: ImageInputs | None = None
    """The images of the added messages."""

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this turn."""
        turns, turn = [self], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all turns in the path."""
        return [token for turn in self.path for token in (*turn.prompt_ids, *turn.result.token_ids)]

    @property
    def messages(self) -> list[Message]:
        """The messages of all turns in the path, including the answers."""
        return [message for turn in self.path for message in (*turn.added, turn.reply)]

    @property
    def generated(self) -> int:
        """Number of tokens in the path that the model sampled."""
        return sum(len(turn.result.token_ids) for turn in self.path)

    def known(self, name: str) -> int:
        """Returns the number of rows that the path's answers have of the engine column `name`."""
        rows = (turn.result.columns[name][0] for turn in self.path if name in turn.result.columns)
        return sum(map(len, rows))


def join_images(last: Turn | None, more: ImageInputs | None = None) -> ImageInputs | None:
    """Returns the images of all turns up to `last`, followed by `more`, or None without images."""
    found: list[ImageInputs] = []
    before = 0
    for turn in last.path if last else ():
        if turn.images is not None:
            found.append(shift(turn.images, before))
        before += len(turn.prompt_ids) + len(turn.result.token_ids)
    if more is not None:
        found.append(shift(more, before))
    return ImageInputs(tuple(item for one in found for item in one.items)) if found else None


class TurnTree:
    """The turns of a session. `turns` has them in the order of their answers."""

    def __init__(self) -> None:
        self._roots: list[Turn] = []
        self.turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        (turn.parent.children if turn.parent else self._roots).append(turn)
        self.turns.append(turn)

    def last_known(self, messages: list[Message], tools_key: str) -> tuple[Turn | None, int]:
        """Returns the deepest turn whose messages and answer `messages` repeats, and the number of repeated messages.
        Returns (None, 0) if `messages` repeats no turn."""
        best: tuple[Turn | None, int] = (None, 0)
        waiting = [(turn, 0) for turn in self._roots if turn.tools_key == tools_key]
        while waiting:
            turn, start = waiting.pop()
            known = [*turn.added, turn.reply]
            end = start + len(known)
            if end > len(messages) or not all(map(same, known, messages[start:end])):
                continue
            # The newer of two equally deep turns wins, because a client that repeats a request uses the last answer.
            if end >= best[1]:
                best = turn, end
            waiting += [(child, end) for child in turn.children]
        return best

    @property
    def leaves(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.children]

    def samples(self, sample: Sample) -> list[tuple[Sample, Turn]]:
        """Returns one (sample, leaf) per leaf. Each sample starts as a blank copy of `sample`."""
        trained: set[int] = set()
        found = []
        for leaf in self.leaves:
            found.append((_build_sample(leaf.path, sample, trained), leaf))
            trained |= {id(turn) for turn in leaf.path}
        return found


def _build_sample(path: list[Turn], original: Sample, trained: set[int]) -> Sample:
    sample = blank(original)
    sample.tokens = list(path[0].prompt_ids)
    if (images := join_images(path[-1])) is not None:
        sample.multimodal_train_inputs = images
        sample.multimodal_inputs = {
            "images": list_images([m for turn in path for m in turn.added]),
            "videos": None,
        }
    for number, turn in enumerate(path):
        if number:
            sample.append_response_tokens(tokens=turn.prompt_ids, trainable=False)
        _append(sample, turn.result, again=id(turn) in trained)
    rewards = [turn.reward for turn in path if id(turn) not in trained]
    if any(reward is not None for reward in rewards):
        sample.metadata[turn_rewards.KEY] = [reward or 0.0 for reward in rewards]
    return sample


def _append(sample: Sample, result: GenerateResult, *, again: bool) -> None:
    """Appends an answer to the sample. `again` is true if an earlier sample trains on the answer and has its counts."""
    if again:
        sample.append_response_tokens(tokens=result.token_ids, trainable=False)
    else:
        sample.append_response_tokens(
            tokens=result.token_ids, log_probs=result.log_probs, columns=result.token_columns
        )
        cached = {"cached_tokens": result.cached_tokens, "prompt_tokens": result.prompt_tokens}
        sample.prefix_cache_info.add(cached)
        sample.prefix_cache_info.add_ages(*result.cache_ages)
    columns.store(sample, result, again=again)
    for version in result.weight_versions if result.token_ids else []:
        sample.add_weight_version(version)
