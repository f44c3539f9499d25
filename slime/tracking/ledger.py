"""The ledger of a run: what became of each group, from the events of the run.

    drawn -> in the batch of a rollout -> trained
                                 -> left out, if its samples fill no optimizer step
          -> dropped, with the reason
          -> put back, and drawn again

Each group is drawn, and then trained or dropped, exactly once. A run that resumes after rollout r undoes what came
after its checkpoint: those groups are drawn again, with the same prompts. The prompts of a data set come one after the
other, and none is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.tracking.journal import read_events
from slime.tracking.kinds import DAMAGED

_KINDS = ("start", "step", "drawn", "batch", "left_out", "dropped", "put_back", DAMAGED)


@dataclass
class Ledger:
    """Groups by `Sample.group_index`."""

    running: set[int] = field(default_factory=set)
    """Drawn, and in no batch."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """The groups of each rollout."""
    left_out: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """Of each rollout with such samples: how many fill no optimizer step, and the groups without another sample."""
    trained: set[int] = field(default_factory=set)
    """The rollouts that were trained."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason. Those that a resumed run has drawn again do not count."""
    undone: set[int] = field(default_factory=set)
    """Groups that a run that resumed has to draw again."""
    again: int = 0
    """Groups that it has drawn again."""
    twice: set[int] = field(default_factory=set)
    """Groups that are in two batches."""
    over_limit: int = 0
    """Samples in batches that were older than --max-staleness."""
    starts: int = 0
    damaged: int = 0
    """Lines that cannot be read."""
    prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Where the prompt of each group is in the data: data set, first and last visit, prompt (`slime.data.source`)."""
    moved: set[int] = field(default_factory=set)
    """Groups that were drawn again with another prompt."""
    _reasons: dict[int, str] = field(default_factory=dict)
    _highest: int = -1
    _newest: int = -1
    _earlier: dict[int, Sequence[int]] = field(default_factory=dict)
    _passes_over: bool = False

    @property
    def lost(self) -> list[int]:
        """Groups that should have been drawn again: a later group was."""
        return sorted(group for group in self.undone if group < self._highest)

    @property
    def jumps(self) -> list[tuple[int, int]]:
        """(group, prompts) where the order of a data set goes on at another place than the one before ended: prompts
        that were left out, or came again if below 0."""
        found: list[tuple[int, int]] = []
        before: dict[int, tuple[int, int]] = {}
        for group in sorted(self.prompts):
            data_set, first, last, _ = self.prompts[group]
            number, end = before.get(data_set, (group - 1, first))
            # Between two groups of a data set may lie those of others, but no group without a place.
            if first != end and all(other in self.prompts for other in range(number + 1, group)):
                found.append((group, first - end))
            before[data_set] = group, last + 1
        return found

    @property
    def groups_trained(self) -> int:
        batches = (
            (self.batches.get(rollout, []), self.left_out.get(rollout, (0, []))) for rollout in self.trained
        )
        return sum(len(set(groups) - set(left)) for groups, (_, left) in batches)

    @property
    def samples_left_out(self) -> int:
        """Samples of trained rollouts that fill no optimizer step."""
        return sum(samples for rollout, (samples, _) in self.left_out.items() if rollout in self.trained)

    @property
    def is_exact(self) -> bool:
        """Whether no group was lost or trained twice, and no prompt left out."""
        return not (self.lost or self.twice or self.moved or self.jumps)

    def add(
        self,
        kind: str,
        rollout: int,
        groups: list[int],
        reason: str,
        over_limit: int,
        samples: int = 0,
        prompts: Sequence[Sequence[int] | None] = (),
    ) -> None:
        """One event."""
        match kind:
            case "start":
                self._start(rollout)
            case "step":
                self.trained.add(rollout)
            case "drawn":
                self._draw(groups)
                for group, place in zip(groups, prompts, strict=False):
                    if place is not None:
                        self._place(group, place)
            case "batch":
                self._batch(rollout, groups, over_limit)
            case "left_out":
                self.left_out[rollout] = samples, groups
            case "dropped":
                self.running -= set(groups)
                self._reasons |= dict.fromkeys(groups, reason)
                self.dropped[reason] += len(groups)
            case "put_back":
                self.running -= set(groups)

    def _start(self, rollout: int) -> None:
        """What came after the checkpoint before `rollout` is undone."""
        self.starts += 1
        if rollout == 0:  # the data starts anew
            self.prompts.clear()
            self._earlier.clear()
            self._newest = -1
        gone = [number for number in self.batches if number >= rollout]
        for number in gone:
            self.undone |= set(self.batches.pop(number))
            self.trained.discard(number)
        self.left_out = {number: left for number, left in self.left_out.items() if number < rollout}
        self.undone |= self.running
        self.running.clear()
        self._highest = -1

    def _draw(self, groups: list[int]) -> None:
        for group in groups:
            self.again += group in self.undone
            if (reason := self._reasons.pop(group, None)) is not None:
                self.dropped[reason] -= 1
        self.undone -= set(groups)
        self.running |= set(groups)
        self._highest = max([self._highest, *groups])

    def _place(self, group: int, place: Sequence[int]) -> None:
        """A run that resumed draws new groups from its checkpoint on. The places of later groups are from before it."""
        if group <= self._newest:
            later = [number for number in self.prompts if number >= group]
            self._earlier |= {number: self.prompts.pop(number) for number in later}
        self._newest = group
        _, first, last, _ = place
        self._passes_over |= first != last  # what rewards decide may be otherwise the next time
        if self._earlier.get(group, place) != place and not self._passes_over:
            self.moved.add(group)
        self.prompts[group] = place

    def _batch(self, rollout: int, groups: list[int], over_limit: int) -> None:
        others = {group for number, of in self.batches.items() if number != rollout for group in of}
        self.twice |= others & set(groups)
        self.batches[rollout] = groups
        self.running -= set(groups)
        self.over_limit += over_limit


def read_ledger(run_dir: Path) -> Ledger:
    """The ledger of a run that has ended or goes on. ValueError without its events."""
    ledger = Ledger()
    for event in read_events(run_dir, _KINDS):
        ledger.damaged += event.kind == DAMAGED
        groups, reason = list(event.get("groups", ())), str(event.get("reason"))
        counts = event.get("over_limit", 0), event.get("samples", 0)
        prompts = event.get("prompts", ())
        ledger.add(event.kind, event.get("rollout", -1), groups, reason, *counts, prompts)
    return ledger
