"""This module defines the critic. It has the policy's architecture, and computes a value per token for an estimator."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints.checkpoint_dir import (
    COMPLETE,
    existing,
    is_hf_directory,
    latest,
    released,
    resumed_iteration,
    saves_where_it_loads,
)
from slime.config import Config
from slime.roles.policy import POLICY
from slime.roles.record import Role, Source


def folder(own: str | None, of_policy: str | None) -> str | None:
    """Returns the folder of the critic's checkpoints: the critic's flag, or critic/ in the policy's folder."""
    return own or (str(Path(of_policy) / "critic") if of_policy else None)


def loads_from(c: Config) -> str | None:
    return folder(c.critic.critic_load, c.checkpoint.load)


def saves_to(c: Config) -> str | None:
    return folder(c.critic.critic_save, c.checkpoint.save)


def resume_folders(c: Config) -> list[str]:
    """Returns the folders from which a critic may resume: --critic-load, and --critic-save if the command resumes its
    own checkpoints."""
    load, save = loads_from(c), saves_to(c) if saves_where_it_loads(c) else None
    return list(dict.fromkeys(directory for directory in (load, save) if directory))


def _resumed(c: Config) -> Source | None:
    """Returns the critic's checkpoint of the iteration from which the policy resumes, or None if it is missing."""
    if (iteration := resumed_iteration(c)) is None:
        return None
    for directory in resume_folders(c):
        if (existing(Path(directory), iteration) / COMPLETE).is_file():
            return Source(directory, iteration, "--critic-load")
    return None


def _start(c: Config) -> Source:
    """Returns --critic-load if it contains weights, else the weights with which the policy starts or resumes."""
    own = c.critic.critic_load
    if own and (latest(own) is not None or released(own) or is_hf_directory(own)):
        return Source(own, None, "--critic-load")
    return POLICY.resumes(c) or POLICY.source(c)


def wanted_devices(c: Config) -> tuple[int, int]:
    """Returns (nodes, ranks per node) of the critic's flags. The defaults are the policy's numbers."""
    given = c.critic.critic_num_nodes, c.critic.critic_num_gpus_per_node
    return given[0] or c.cluster.actor_num_nodes, given[1] or c.cluster.actor_num_gpus_per_node


def _devices(c: Config) -> tuple[int, int] | None:
    nodes, ranks = wanted_devices(c)
    differs = nodes * ranks != c.world_size
    own = differs if c.critic.critic_devices == "auto" else c.critic.critic_devices == "own"
    return (nodes, ranks) if own else None


CRITIC = Role(
    "critic",
    "values",
    "values",
    _start,
    _resumed,
    saves_to,
    devices=_devices,
    trained=True,
    head="value",
    save_flag="--critic-save",
    metrics="critic-",
    lr="critic_lr",
    lr_warmup_iters="critic_lr_warmup_iters",
)
