"""The critic, whose values an estimator reads: the policy's architecture with one value per token."""

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
    """Returns the folder of the critic's checkpoints: `own`, the value of its flag, or critic/ in the policy's
    folder."""
    return own or (str(Path(of_policy) / "critic") if of_policy else None)


def loads_from(c: Config) -> str | None:
    return folder(c.critic.critic_load, c.checkpoint.load)


def saves_to(c: Config) -> str | None:
    return folder(c.critic.critic_save, c.checkpoint.save)


def resume_folders(c: Config) -> list[str]:
    """Returns the folders from which the critic may resume: the load folder, and the save folder if the run resumes
    from the checkpoints that it saves."""
    load, save = loads_from(c), saves_to(c) if saves_where_it_loads(c) else None
    return list(dict.fromkeys(directory for directory in (load, save) if directory))


def _resumed(c: Config) -> Source | None:
    """Returns the critic's checkpoint with the iteration from which the policy resumes, or None without one."""
    if (iteration := resumed_iteration(c)) is None:
        return None
    for directory in resume_folders(c):
        if (existing(Path(directory), iteration) / COMPLETE).is_file():
            return Source(directory, iteration, "--critic-load")
    return None


def _start(c: Config) -> Source:
    """Returns --critic-load if it holds weights, else the weights with which the policy starts or resumes."""
    own = c.critic.critic_load
    if own and (latest(own) is not None or released(own) or is_hf_directory(own)):
        return Source(own, None, "--critic-load")
    return POLICY.resumes(c) or POLICY.source(c)


def wanted_devices(c: Config) -> tuple[int, int]:
    """Returns nodes and ranks per node from the critic's flags. A missing flag takes the policy's value."""
    sizes = c.critic.critic_num_nodes, c.critic.critic_num_gpus_per_node
    return sizes[0] or c.cluster.actor_num_nodes, sizes[1] or c.cluster.actor_num_gpus_per_node


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
