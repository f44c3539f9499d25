"""Selects the parameters that a run trains, by Megatron's names: --only-train-params-name-list,
--freeze-params-name-list and --train-vision."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from slime.config import Config
from slime.config.fields import spelled
from slime.models.latent import INDEXER
from slime.models.vision import PREFIX as VISION
from slime.models.vision import sees_images
from slime.records.errors import FlagError

ADAPTERS = r"^adapters\."
"""Matches the names of adapters (slime.models.lora.PREFIX)."""
ONLY, FROZEN = "only_train_params_name_list", "freeze_params_name_list"


@dataclass(frozen=True)
class Selection:
    """Regular expressions that select parameters. `re.search` looks for each at any position in a name. Layers and
    experts are numbered from 0 over the whole model, on every rank."""

    only: tuple[str, ...] = ()
    """If not empty: a parameter that matches no expression here is frozen."""
    frozen: tuple[str, ...] = ()
    tower: bool = True
    """False: the vision tower is frozen."""
    indexer: bool = True
    """False: the indexers of sparse attention are frozen. The trainer's model has them frozen in any case."""

    @classmethod
    def of(cls, config: Config) -> Selection:
        """Returns the selection of a run. With --lora-rank, it selects the adapters. The vision tower is frozen without
        --train-vision, unless --only-train-params-name-list decides about it. No loss has a gradient for an indexer."""
        if config.lora.lora_rank:
            return cls(only=(ADAPTERS,), indexer=False)
        only = tuple(config.train.only_train_params_name_list or ())
        return cls(
            only,
            tuple(config.train.freeze_params_name_list or ()),
            tower=bool(only) or config.train.train_vision or not sees_images(config),
            indexer=False,
        )

    def __bool__(self) -> bool:
        return bool(self.only or self.frozen) or not self.tower

    def trains(self, name: str) -> bool:
        """Returns whether the parameter `name` is trained."""
        if (not self.tower and name.startswith(VISION)) or (not self.indexer and INDEXER in name):
            return False
        if self.only and not any(re.search(pattern, name) for pattern in self.only):
            return False
        return not any(re.search(pattern, name) for pattern in self.frozen)

    def check(self, names: Iterable[str]) -> None:
        """Raises ValueError unless each expression matches a name in `names`, and each list matches some of the names
        but not all. `names` are all parameters of the model. Frozen indexers do not count as a match."""
        names = [name for name in names if self.indexer or INDEXER not in name]
        for flag, patterns in ((ONLY, self.only), (FROZEN, self.frozen)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    raise FlagError(
                        spelled(flag),
                        "match parameters of the model",
                        f"{pattern!r}, which matches none",
                        f"a name is, for example, {names[len(names) // 2]}",
                    )
            if patterns and all(any(re.search(p, name) for p in patterns) for name in names):
                raise FlagError(
                    spelled(flag),
                    "leave parameters that it does not match",
                    f"{' '.join(patterns)}, which matches all of them",
                    "leave the flag out",
                )


def check_selection(c: Config) -> None:
    """Checks the rules of the two lists that need no model."""
    if c.train.only_train_params_name_list and c.train.freeze_params_name_list:
        raise FlagError(
            "--only-train-params-name-list",
            "not be given with --freeze-params-name-list",
            "both",
            "select the trained parameters with one of the two",
        )
    for flag in (ONLY, FROZEN):
        for pattern in c.get_value(flag) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise FlagError(
                    spelled(flag),
                    "be regular expressions",
                    f"{pattern!r}: {error}",
                    "escape the characters that are meant literally",
                ) from None
