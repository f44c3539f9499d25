"""A data source that makes its prompts: sums whose numbers have more digits as the run goes on.

--data-source-path sums.SumSource --disable-rollout-global-dataset
"""

import json
import random
from pathlib import Path

from vime.utils.types import Sample


class SumSource:
    """Makes sums with one more digit after every 100 groups. The position is saved with the checkpoints."""

    def __init__(self, args):
        self.args = args
        self.drawn = 0
        self.buffer = []

    def __len__(self):
        return 100

    def get_samples(self, num_groups):
        groups, self.buffer = self.buffer[:num_groups], self.buffer[num_groups:]
        return groups + [self._group() for _ in range(num_groups - len(groups))]

    def add_samples(self, groups):
        self.buffer += groups

    def save(self, rollout_id):
        if self.args.save:
            Path(self.args.save).mkdir(parents=True, exist_ok=True)
            self._file(self.args.save, rollout_id).write_text(
                json.dumps({"drawn": self.drawn}), encoding="utf-8"
            )

    def load(self, rollout_id=None):
        if self.args.load and rollout_id is not None and self._file(self.args.load, rollout_id).exists():
            self.drawn = json.loads(self._file(self.args.load, rollout_id).read_text(encoding="utf-8"))[
                "drawn"
            ]

    def _group(self):
        number = self.drawn
        self.drawn += 1
        rng = random.Random(self.args.rollout_seed + number)
        a, b = (rng.randrange(10 ** (1 + number // 100)) for _ in range(2))
        size = self.args.n_samples_per_prompt
        return [
            Sample(group_index=number, index=number * size + i, prompt=f"{a}+{b}=", label=str(a + b))
            for i in range(size)
        ]

    @staticmethod
    def _file(folder, rollout_id):
        return Path(folder) / f"sums_{rollout_id}.json"
