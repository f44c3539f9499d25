"""Collects the turns of agents and makes samples from them, for plug-ins that send requests to the engine themselves.

The adapters of `slime.agent.adapters` do not need it: their sessions keep the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.agent.segments import (
    TokenRow,
    TokenSegment,
    TurnRecord,
    TurnSegment,
    build_sample,
    fan_out_sample_segments,
    make_turn_segment,
    merge_turn_segments,
    merge_turns,
    write_segment_to_sample,
)
from slime.types import Message, Metadata, Reward, Sample

__all__ = [
    "TokenSegment",
    "TrajectoryManager",
    "TurnRecord",
    "TurnSegment",
    "fan_out_sample_segments",
    "make_turn_segment",
    "merge_turn_segments",
    "merge_turns",
    "write_segment_to_sample",
]

_SHORT_TOKENS = 1024
"""Default number of tokens below which an answer is given up if the agent's next prompt changes it."""


@dataclass(eq=False)
class _Node:
    """A turn in its conversation."""

    turn: TurnRecord
    asked: list[Message]
    said: Message | None
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*self.asked, *([] if self.said is None else [self.said])]

    @property
    def path(self) -> list[_Node]:
        """Returns the turns from the first turn of the conversation to this turn."""
        found, node = [self], self.parent
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class TrajectoryManager:
    """The turns of all sessions, by the session's name.

    A request that repeats the messages of an earlier turn and its answer continues this turn. Other requests start a
    branch. Each branch becomes at least one sample, and an answer that branches share is trained on once.

    `fork_threshold_tokens`: a template may render an earlier answer with other tokens than the model wrote. If the
    difference is in the newest answer and the next answer is shorter than the threshold, the changed answer stays as
    context that is not trained on. Otherwise, the next answer starts a new sample. In the same way, an agent that
    rewrites the text of an answer below the threshold replaces it. With 0, every answer is trained on.
    """

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        self._short = _SHORT_TOKENS if fork_threshold_tokens is None else fork_threshold_tokens
        self._nodes: dict[str, list[_Node]] = {}
        self._counts: dict[str, int] = {}

    def has_session(self, sid: str) -> bool:
        """Returns True if the session has a turn."""
        return sid in self._nodes

    def turn_count(self, sid: str) -> int:
        """Returns the number of turns that were recorded for the session."""
        return self._counts.get(sid, 0)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: list[Message],
        response_message: Message | None,
        metadata: Metadata | None = None,
    ) -> None:
        """Adds a turn: the request's messages, the answer as a message, and their tokens. `metadata` has no effect.
        Raises ValueError without a message."""
        if not prompt_messages:
            raise ValueError(
                f"prompt_messages must have a message, got none for session {sid!r}; record the messages of the request"
            )
        nodes = self._nodes.setdefault(sid, [])
        known = [node for node in nodes if node.messages == prompt_messages[: len(node.messages)]]
        parent = max(reversed(known), key=lambda node: len(node.messages), default=None)
        if (old := self._rewritten(nodes, prompt_messages, parent)) is not None:
            nodes.remove(old)
            parent = old.parent
            if parent is not None:
                parent.children.remove(old)
        node = _Node(turn, list(prompt_messages), response_message, parent)
        if parent is not None:
            parent.children.append(node)
        nodes.append(node)
        self._counts[sid] = self.turn_count(sid) + 1

    def _rewritten(self, nodes: list[_Node], asked: list[Message], parent: _Node | None) -> _Node | None:
        """Returns the turn whose answer the request replaces with another text, or None."""
        start = 0 if parent is None else len(parent.messages)
        candidates = [
            node
            for node in nodes
            if start <= len(node.asked) < len(asked)
            and node.asked == asked[: len(node.asked)]
            and asked[len(node.asked)].get("role") == "assistant"
        ]
        longest = max((len(node.asked) for node in candidates), default=0)
        last = [node for node in candidates if len(node.asked) == longest]
        if len(last) != 1 or last[0].children or len(last[0].turn.output_ids) >= self._short:
            return None
        return last[0]

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Reward = 0.0,
        extra_metadata: Metadata | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """Returns the samples of a session and forgets the session. Returns [] for an unknown name.

        The samples have the facts of `base_sample`, the whole `reward`, and the metadata `truncated`, `use_tool` and
        `ill_formed`. `max_sample_tokens` cuts longer samples; 0 means no limit.
        """
        nodes = self._nodes.get(sid, [])
        self.drop_session(sid)
        trained: set[int] = set()
        made: list[Sample] = []
        for leaf in (node for node in nodes if not node.children):
            path = leaf.path
            found = {
                **(extra_metadata or {}),
                "truncated": leaf.turn.finish_reason == "length",
                "use_tool": any((node.said or {}).get("tool_calls") for node in path),
                "ill_formed": any(node.turn.ill_formed for node in path),
            }
            for row in self._rows(path, trained):
                cut = 0 < max_sample_tokens < len(row.tokens)
                segment = row.segment(found | {"truncated": found["truncated"] or cut}, max_sample_tokens)
                if any(segment.loss_mask):
                    made.append(build_sample(segment, base_sample))
        for sample in made:
            sample.reward = reward
        return made

    def _rows(self, path: list[_Node], trained: set[int]) -> list[TokenRow]:
        """Returns the turns of a branch as rows. `trained` has the turns that an earlier branch trains on."""
        rows: list[TokenRow] = []
        for node in path:
            if not rows or not self._continues(rows[-1], node.turn):
                rows.append(TokenRow())
            rows[-1].add(node.turn, trained=id(node) not in trained)
            trained.add(id(node))
        return rows

    def _continues(self, row: TokenRow, turn: TurnRecord) -> bool:
        same = row.shared(turn.prompt_ids)
        return same == len(row.tokens) or (same >= row.last_answer and len(turn.output_ids) < self._short)

    def drop_session(self, sid: str) -> None:
        """Forgets a session. It does nothing for an unknown name."""
        self._nodes.pop(sid, None)
        self._counts.pop(sid, None)
