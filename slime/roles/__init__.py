"""This package defines the models of a run, one file per role. It must start without torch, for `vime plan`.

    columns_read(config) -> roles_of(config) -> a learner for each trained role, a frozen model for each other
                                             -> passes_of(config): which columns they fill, in the order of a step

Memory, loading, checkpoints and the trainer read these records. No other code depends on the number of models.
"""

from __future__ import annotations

from slime.algo.needs import columns_read, needs_old_log_probs
from slime.config import Config
from slime.roles.critic import CRITIC
from slime.roles.policy import POLICY
from slime.roles.record import Role, Source
from slime.roles.reference import REFERENCE
from slime.roles.teacher import TEACHER

ROLES: tuple[Role, ...] = (REFERENCE, TEACHER, CRITIC, POLICY)
"""All roles, in the order of their passes in a step and of their training."""


def roles_of(c: Config) -> tuple[Role, ...]:
    """Returns the roles of a run: the policy, and roles whose column a loss or an estimator reads and samples lack. For
    the configuration of a group of ranks (`slime.roles.groups`), returns the group's roles."""
    read, group = columns_read(c), c.cluster.trainer_roles
    needed = (role for role in ROLES if role is POLICY or (role.column in read and not role.absent(c)))
    return tuple(role for role in needed if not group or role.name in group)


def passes_of(c: Config) -> tuple[Role, ...]:
    """Returns the roles whose pass without gradient fills their column before training, in the order of a step."""
    return tuple(role for role in roles_of(c) if role is not POLICY or needs_old_log_probs(c))


def order_of_step(c: Config) -> str:
    """Returns the line that a run prints at its start: the computations of a step in their order."""
    passes = [f"{role.column} ({role.name})" for role in passes_of(c)]
    trained = [f"train {role.name}" for role in roles_of(c) if role.trained]
    return " -> ".join([*passes, *trained])


__all__ = [
    "CRITIC",
    "POLICY",
    "REFERENCE",
    "ROLES",
    "TEACHER",
    "Role",
    "Source",
    "order_of_step",
    "passes_of",
    "roles_of",
]
