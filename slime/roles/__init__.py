"""The models of a run: one file per role, and its place in ROLES. Must start without torch, for `vime plan`.

    columns_read(config) -> roles_of(config) -> a learner for each trained role, a frozen model for each other
                                             -> passes_of(config): which columns they fill, in the order of a step

Memory, loading, checkpoints and the trainer read the records; no other code knows how many models there are.
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
"""In the order of their passes in a step, and then of their training."""


def roles_of(c: Config) -> tuple[Role, ...]:
    """The roles of a run: the policy, and those whose column a loss or an estimator reads and no sample brings. Of the
    configuration of one group of ranks (`slime.roles.groups`), the roles of the group."""
    read, group = columns_read(c), c.cluster.trainer_roles
    needed = (role for role in ROLES if role is POLICY or (role.column in read and not role.absent(c)))
    return tuple(role for role in needed if not group or role.name in group)


def passes_of(c: Config) -> tuple[Role, ...]:
    """The roles whose pass without gradient fills their column before training, in their order in a step."""
    return tuple(role for role in roles_of(c) if role is not POLICY or needs_old_log_probs(c))


def order_of_step(c: Config) -> str:
    """What a step computes, one after the other, as the line that a run prints at its start."""
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
