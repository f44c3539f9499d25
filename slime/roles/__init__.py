"""The models on a run's trainer ranks. Each role has a file and an entry in ROLES. `vime plan` imports no torch here.

    columns_read(config) -> get_roles(config) -> a learner per trained role, a frozen model per other role
                                             -> get_passes(config): the roles that fill columns, in the order of a step

Memory plan, loading, checkpoints and the trainer loop over the records, so no other code depends on the number of
models.
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
"""All roles, in the order of their passes in a step. Trained roles are trained in the same order."""


def get_roles(c: Config) -> tuple[Role, ...]:
    """Returns the roles of a run: the policy, and each role whose column a loss or an estimator reads, unless samples
    bring the column. For the configuration of a rank group (`slime.roles.groups`) it returns the group's roles."""
    read, group = columns_read(c), c.cluster.trainer_roles
    needed = (role for role in ROLES if role is POLICY or (role.column in read and not role.absent(c)))
    return tuple(role for role in needed if not group or role.name in group)


def get_passes(c: Config) -> tuple[Role, ...]:
    """Returns the roles whose pass without gradient fills their column before training, in the order of a step."""
    return tuple(role for role in get_roles(c) if role is not POLICY or needs_old_log_probs(c))


def describe_step(c: Config) -> str:
    """Returns the passes and trainings of a step in their order, as the line that a run prints at its start."""
    passes = [f"{role.column} ({role.name})" for role in get_passes(c)]
    trained = [f"train {role.name}" for role in get_roles(c) if role.trained]
    return " -> ".join([*passes, *trained])


__all__ = [
    "CRITIC",
    "POLICY",
    "REFERENCE",
    "ROLES",
    "TEACHER",
    "Role",
    "Source",
    "describe_step",
    "get_passes",
    "get_roles",
]
