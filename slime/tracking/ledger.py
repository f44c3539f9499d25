"""Builds the ledger of a run from its events: every group's fate.

    drawn -> in the batch of a rollout -> trained
                                 -> left out, if its samples fill no optimizer step
          -> dropped, with the reason
          -> put back, and drawn again

Each group is drawn, and then trained or dropped, exactly once. A run that resumes after rollout r undoes the rollouts
after its checkpoint: their groups are drawn again, with the same prompts. A rollout manager that starts again undoes
the rollouts that it had not finished. The prompts of a data set come in order without gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.tracking.journal import read_events
from slime.tracking.kinds import DAMAGED

_KINDS = ("start", "manager_restarted", "step", "drawn", "batch", "left_out", "dropped", "put_back", DAMAGED)


@dataclass
class Ledger:
    """Every group's fate, by `Sample.group_index`."""

    running: set[int] = field(default_factory=set)
    """Groups that were drawn and are in no batch."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Groups by rollout."""
    left_out: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """Rollout -> (number of samples that fill no optimizer step, groups with only such samples)."""
    trained: set[int] = field(default_factory=set)
    """Rollouts that were trained."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups by reason, without groups that a resumed run has drawn again."""
    undone: set[int] = field(default_factory=set)
    """Groups that must be drawn again, after a resume or a restart of the rollout manager."""
    again: int = 0
    """Number of groups that were drawn again for this reason."""
    twice: set[int] = field(default_factory=set)
    """Groups that are in two batches."""
    over_limit: int = 0
    """Number of samples in batches that were older than --max-staleness."""
    starts: int = 0
    damaged: int = 0
    """Number of unreadable lines."""
    prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Position of each group's prompt in the data: data set, first and last visit, prompt (`slime.data.source`)."""
    moved: set[int] = field(default_factory=set)
    """Groups that were drawn again with another prompt."""
    _reasons: dict[int, str] = field(default_factory=dict)
    _highest: int = -1
    _newest: int = -1
    _earlier: dict[int, Sequence[int]] = field(default_factory=dict)
    _passes_over: bool = False

    @property
    def lost(self) -> list[int]:
        """Returns the groups that should have been drawn again, because a later group was."""
        return sorted(group for group in self.undone if group < self._highest)

    @property
    def jumps(self) -> list[tuple[int, int]]:
        """Returns (group, prompts) for each gap in the order of a data set. `prompts` is the number of skipped prompts,
        or negative if prompts came again."""
        found: list[tuple[int, int]] = []
        before: dict[int, tuple[int, int]] = {}
        for group in sorted(self.prompts):
            data_set, first, last, _ = self.prompts[group]
            number, end = before.get(data_set, (group - 1, first))
            # Other data sets' groups may come between two groups of a data set, but each must have a position.
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
        """Returns the number of samples of trained rollouts that fill no optimizer step."""
        return sum(samples for rollout, (samples, _) in self.left_out.items() if rollout in self.trained)

    @property
    def is_exact(self) -> bool:
        """Returns True if no group was lost or trained twice, and no prompt was left out."""
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
        """Adds one event."""
        match kind:
            case "start":
                self.starts += 1
                self._undo(rollout)
            case "manager_restarted":
                self._undo(rollout)
            case "step":
                self.trained.add(rollout)
            case "drawn":
                self._draw(groups)
                for group, location in zip(groups, prompts, strict=False):
                    if location is not None:
                        self._store_position(group, location)
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

    def _undo(self, rollout: int) -> None:
        """Undoes the rollouts from `rollout` on, which generation makes again."""
        if rollout == 0:  # the data starts again
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

    def _store_position(self, group: int, location: Sequence[int]) -> None:
        """Stores the position of a group. A resumed run draws new groups from its checkpoint on, so positions of later
        groups are from before the resume."""
        if group <= self._newest:
            later = [number for number in self.prompts if number >= group]
            self._earlier |= {number: self.prompts.pop(number) for number in later}
        self._newest = group
        _, first, last, _ = location
        self._passes_over |= first != last  # the rewards of a repeated run may decide differently
        if self._earlier.get(group, location) != location and not self._passes_over:
            self.moved.add(group)
        self.prompts[group] = location

    def _batch(self, rollout: int, groups: list[int], over_limit: int) -> None:
        others = {group for number, of in self.batches.items() if number != rollout for group in of}
        self.twice |= others & set(groups)
        self.batches[rollout] = groups
        self.running -= set(groups)
        self.over_limit += over_limit


def read_ledger(run_dir: Path) -> Ledger:
    """Returns the ledger of a run that has ended or is running. Raises ValueError without its events."""
    ledger = Ledger()
    for event in read_events(run_dir, _KINDS):
        ledger.damaged += event.kind == DAMAGED
        groups, reason = list(event.get("groups", ())), str(event.get("reason"))
        counts = event.get("over_limit", 0), event.get("samples", 0)
        prompts = event.get("prompts", ())
        ledger.add(event.kind, event.get("rollout", -1), groups, reason, *counts, prompts)
    return ledger
