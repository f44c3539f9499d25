"""Pass rates of prompts, and the choice of prompts that a later epoch leaves out (`--curriculum`).

A group with equal rewards has no advantage, so its generation has no effect on training. If the last group of a prompt
had equal rewards, the prompt is drawn again with the probability of the flag.
"""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Sequence

import numpy as np

from slime.data.trajectories import trajectory_rewards
from slime.types import SampleGroup

PROMPT = "prompt_index"
"""Key in a sample's metadata for the number of its prompt."""
_NAMES = ("tries", "mean", "last", "equal", "group")
_ROW = np.dtype(list(zip(_NAMES, ("<u4", "<f4", "<f4", "?", "<u4"), strict=True)))
"""The record of a prompt: number of responses, their mean reward, mean reward of the last group, true if the last group
had equal rewards, and the number of this group plus 1 (0: no group yet)."""
_SAVED = np.dtype([("prompt", "<u4"), *((name, _ROW[name]) for name in _NAMES)])


class PassRates:
    """The rewards of prompts, 17 bytes per prompt. A page of memory is allocated when the first of its prompts has a
    reward.

    `keep` is the probability with which a prompt is drawn again after a group of equal rewards.
    """

    def __init__(self, size: int, keep: float, seed: int) -> None:
        self.keep, self.seed = keep, seed
        self.rows = np.zeros(size, _ROW)
        self.seen = self.equal = self.solved = self.passed_over = 0

    def passes_over(self, prompt: int, epoch: int) -> bool:
        """Returns true if this epoch leaves the prompt out. The result depends on seed, epoch, prompt and the prompt's
        record."""
        if not self.rows["equal"][prompt]:
            return False
        left_out = random.Random(f"{self.seed}/{epoch}/{prompt}").random() >= self.keep
        self.passed_over += left_out
        return left_out

    def observe(self, groups: Sequence[SampleGroup], reward_key: str | None) -> None:
        """Records the rewards of finished groups. A group counts once, and a group with a sample without a reward does
        not count."""
        for group in groups:
            prompt = next((s.metadata[PROMPT] for s in group if PROMPT in s.metadata), None)
            number = group[0].group_index
            if prompt is None or number is None or any(sample.reward is None for sample in group):
                continue
            if self.rows["group"][prompt] != number + 1:
                self._record(prompt, number, trajectory_rewards(group, reward_key))

    def _record(self, prompt: int, number: int, rewards: list[float]) -> None:
        self._count(prompt, -1)
        before, mean, *_ = self.rows[prompt].tolist()
        tries, total = before + len(rewards), sum(rewards)
        equal = max(rewards) == min(rewards)
        mean = (before * mean + total) / tries
        self.rows[prompt] = (tries, mean, total / len(rewards), equal, number + 1)
        self._count(prompt, 1)

    def _count(self, prompt: int, change: int) -> None:
        *_, last, equal, group = self.rows[prompt].tolist()
        self.seen += change * (group > 0)
        self.equal += change * equal
        self.solved += change * (equal and last >= 1)

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the curriculum: seen is the number of prompts with a reward. equal_rewards and solved
        are the shares of seen prompts whose last group had equal rewards, and rewards of 1. passed_over is the number
        of prompts that were left out since the last call."""
        figures = {"seen": float(self.seen), "passed_over": float(self.passed_over)}
        self.passed_over = 0
        if self.seen:
            figures |= {"equal_rewards": self.equal / self.seen, "solved": self.solved / self.seen}
        return {f"rollout/curriculum/{name}": value for name, value in figures.items()}

    def state_dict(self) -> str:
        """Returns the records of the prompts with a reward as compressed text: at most 105 MB for 10 million
        prompts."""
        seen = np.flatnonzero(self.rows["group"])
        saved = np.empty(len(seen), _SAVED)
        saved["prompt"] = seen
        for name in _NAMES:
            saved[name] = self.rows[name][seen]
        return base64.b64encode(zlib.compress(saved.tobytes(), level=1)).decode()

    def load_state_dict(self, text: str) -> None:
        saved = np.frombuffer(zlib.decompress(base64.b64decode(text)), _SAVED)
        self.rows = np.zeros(len(self.rows), _ROW)
        for name in _NAMES:
            self.rows[name][saved["prompt"]] = saved[name]
        self.seen, self.equal = len(saved), int(saved["equal"].sum())
        self.solved = int((saved["equal"] & (saved["last"] >= 1)).sum())
