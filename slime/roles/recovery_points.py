"""Finds the checkpoint from which restarted trainer ranks continue. Reads file names only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from slime.checkpoints.checkpoint_dir import COMPLETE, existing, latest
from slime.checkpoints.memory_files import StoredState, find_common
from slime.config import Config
from slime.protocols import RecoveryPoint
from slime.roles import get_roles
from slime.roles.groups import build_groups


def find_point(
    config: Config, saved: Collection[int], find_states: Callable[[str], Collection[StoredState]]
) -> RecoveryPoint | None:
    """Returns the newest checkpoint that this run has written: in the hosts' memory, or in --save. `saved` has the
    iterations of --save. `find_states` returns the states of a role in memory. None means that the ranks start as at
    the start of the run.

    A checkpoint without the optimizer does not continue to the bit, so it does not count.
    """
    stored, on_disk = _stored(config, find_states), _saved(config, saved)
    if stored is not None and (on_disk is None or on_disk <= stored):
        return RecoveryPoint(config.checkpoint.memory_dir, stored)
    return None if on_disk is None else RecoveryPoint(None, on_disk)


def _stored(config: Config, find_states: Callable[[str], Collection[StoredState]]) -> int | None:
    """Returns the newest iteration in the hosts' memory that all ranks of all trained roles have."""
    if config.checkpoint.memory_dir is None:
        return None
    common = [
        find_common(find_states(role.name), group.ranks)
        for group in build_groups(config)
        for role in get_roles(group.config)
        if role.trained
    ]
    return max(set.intersection(*common), default=None)


def _saved(config: Config, saved: Collection[int]) -> int | None:
    """Returns the newest of the iterations `saved` that is complete in the folders of all trained roles.

    A folder may have a complete iteration of an earlier run whose number is that of a file which is being written. So
    with --async-save, the newest iteration counts only if the folder names it as the latest.
    """
    if config.checkpoint.save is None or config.checkpoint.no_save_optim:
        return None
    roles = [role for role in get_roles(config) if role.trained]
    folders = [Path(folder) for role in roles if (folder := role.saves_to(config))]
    for iteration in sorted(saved, reverse=True):
        if all((existing(folder, iteration) / COMPLETE).is_file() for folder in folders):
            is_written = not config.checkpoint.async_save or iteration != max(saved)
            if is_written or all(latest(folder) == iteration for folder in folders):
                return iteration
    return None
