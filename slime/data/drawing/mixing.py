"""Several data sets in one run (`--prompt-data NAME=PATH ...`): names, weights, and the choice of the next prompt.

The order depends on the seed, the weights and the number of drawn prompts, so a restart needs three numbers per data
set.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from slime.config.sections.data import DataConfig
from slime.records.errors import FlagError
from slime.types import Prompt

SOURCE = "data_source"
"""Key in a sample's metadata for the name of its data set."""


@dataclass(frozen=True)
class DataSet:
    """One value of --prompt-data. `name` is None for one file without a name, and `weight` without
    --prompt-data-weights."""

    name: str | None
    path: str
    weight: float | None = None


def data_sets(data: DataConfig) -> list[DataSet]:
    """Returns the data sets of --prompt-data, in order. A value is `NAME=PATH`, or a path, whose name is the file's
    name.

    A single path without NAME= gets no name. Raises ValueError for a name that occurs twice, and for weights that do
    not fit.
    """
    values = [data.prompt_data] if isinstance(data.prompt_data, str) else data.prompt_data or []
    sets = [_split(value) for value in values]
    if len(sets) > 1:
        sets = [DataSet(one.name or Path(one.path.split("@[")[0]).stem, one.path) for one in sets]
    names = [one.name for one in sets]
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise FlagError(
            "--prompt-data",
            "give each data set a name of its own",
            f"{' and '.join(twice)} more than once",
            "write NAME=PATH",
        )
    weights = _weights(names, data.prompt_data_weights or [])
    return [DataSet(one.name, one.path, weight) for one, weight in zip(sets, weights, strict=True)]


def _split(value: str) -> DataSet:
    named = re.fullmatch(r"([\w.-]+)=(.+)", value)
    if named is None or Path(value.split("@[")[0]).exists():
        return DataSet(None, value)
    return DataSet(named[1], named[2])


def _weights(names: Sequence[str | None], values: Sequence[str]) -> list[float | None]:
    """Returns the weight per name. `values` are NAME=WEIGHT, or plain numbers in the order of the names."""
    if not values:
        return [None] * len(names)
    found: dict[str | None, float] = {}
    for index, value in enumerate(values):
        name, separator, text = value.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise FlagError("--prompt-data-weights", "be numbers above 0", value, "write NAME=WEIGHT")
        found[name if separator else (*names, *values)[index]] = weight
    if None in names or len(values) != len(names) or set(found) != set(names):
        raise FlagError(
            "--prompt-data-weights",
            f"have one weight for each NAME=PATH of --prompt-data ({' '.join(map(str, names))})",
            " ".join(values),
            "write NAME=WEIGHT",
        )
    return [found[name] for name in names]


class Joined(Sequence[Prompt]):
    """The prompts of several data sets, one after another. Reads only the requested prompts."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self.parts = parts
        self.starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        part = bisect.bisect_right(self.starts, index) - 1
        return self.parts[part][index - self.starts[part]]


def shuffled(size: int, seed: int) -> Sequence[int]:
    """Returns the order of an epoch. It must not change, because a checkpoint continues it. 10 million prompts take 40
    MB and about 4 s."""
    visits = array("I", range(size))
    random.Random(seed).shuffle(visits)
    return visits


class Order:
    """The position in one data set. Epoch e visits the prompts in file order, or with `shuffle` in the order
    `random.Random(seed + e).shuffle(range(size))`."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = self.position = self.draws = 0
        self._visits: tuple[int, Sequence[int]] | None = None

    @property
    def visits(self) -> int:
        """Returns the number of prompts so far, including those that were left out."""
        return self.epoch * self.size + self.position

    def next(self, passes_over: Callable[[int, int], bool]) -> int:
        """Returns the next prompt, without the prompts for which `passes_over(prompt, epoch)` is true. It leaves out at
        most `size` prompts in a row."""
        prompt = self._step()
        for _ in range(self.size):
            if not passes_over(prompt, self.epoch):
                break
            prompt = self._step()
        self.draws += 1
        return prompt

    def _step(self) -> int:
        if self.position == self.size:
            self.epoch += 1
            self.position = 0
        if self._visits is None or self._visits[0] != self.epoch:
            whole = range(self.size)
            self._visits = self.epoch, shuffled(self.size, self.seed + self.epoch) if self.shuffle else whole
        prompt = self._visits[1][self.position]
        self.position += 1
        return prompt


class Mixture:
    """Chooses the data set of the next prompt.

    The next data set is the one with the lowest `(drawn[i] + u) / weight[i]`, where u in [0, 1) is the first number of
    `random.Random(f"{seed}/{name}/{drawn[i]}")`. At any time, the share of data set i in the drawn prompts is
    `weight[i] / sum(weight)` to within about one prompt, and the order does not repeat. Independent draws would deviate
    more.
    """

    def __init__(
        self, orders: Sequence[Order], weights: Sequence[float], names: Sequence[str], seed: int
    ) -> None:
        self.orders, self.weights, self.names, self.seed = orders, weights, names, seed

    def next(self) -> int:
        """Returns the index of the next data set."""
        return min(range(len(self.orders)), key=self._due) if len(self.orders) > 1 else 0

    def _due(self, number: int) -> float:
        draws = self.orders[number].draws
        jitter = random.Random(f"{self.seed}/{self.names[number]}/{draws}").random()
        return (draws + jitter) / self.weights[number]
