"""Assigns the roles of a run to groups of trainer ranks. This module must not import torch.

    build_groups(config) -> trainer: reference, policy          one trainer per group, with the group's configuration,
                         critic: critic                      for which `get_roles` returns only the group's roles

Every group runs a complete trainer: it scores, computes the advantages of its samples and trains its roles. Between the
two halves of a step, a group sends the columns that its passes filled to the groups that read them:

    trainer   ref_log_probs, log_probs --.   .-- advantages -- train policy
    critic    values --------------------- X --- advantages -- train critic
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.algo.needs import columns_read, read_by_advantages
from slime.config import Config
from slime.roles import POLICY, describe_step, get_roles


@dataclass(frozen=True, eq=False)
class RoleGroup:
    """Trainer ranks that have the same roles."""

    name: str
    """Name of the group in the names of ranks, log files and metrics."""
    config: Config
    """The run's configuration, with the roles and the number of ranks of the group."""
    flags: str
    """Prefix of the flags for the devices: --{flags}-num-nodes x --{flags}-num-gpus-per-node."""

    @property
    def ranks(self) -> int:
        return self.config.world_size

    def awaits(self, other: RoleGroup) -> bool:
        """Returns True if this group needs columns from `other` before it trains."""
        return other is not self and bool(sent_by(other.config) & read_by(self.config))


def read_by(c: Config) -> frozenset[str]:
    """Returns the columns that a group needs after all passes. `c` is the group's configuration."""
    return columns_read(c) if POLICY in get_roles(c) else read_by_advantages(c)


def sent_by(c: Config) -> frozenset[str]:
    """Returns the columns that a group fills for other groups. `c` is the group's configuration.

    The policy's group sends the columns that advantages need. Another group sends all its columns that the loss or the
    estimator reads.
    """
    roles = get_roles(c)
    read = read_by_advantages(c) if POLICY in roles else columns_read(c)
    return read & {role.column for role in roles}


def name_group(c: Config) -> str:
    """Returns the name of the group with the configuration `c`: "trainer" for the policy's group, else its role's
    name."""
    roles = get_roles(c)
    return "trainer" if POLICY in roles else roles[0].name


def build_groups(c: Config) -> tuple[RoleGroup, ...]:
    """Returns the groups of a run's trainer ranks. The first group has the policy and all roles on the policy's
    devices; each role with separate devices has a group."""
    roles = get_roles(c)
    separate = [(role, devices) for role in roles if (devices := role.devices(c)) is not None]
    if not separate or c.cluster.trainer_roles:
        return (RoleGroup(name_group(c), c, "actor"),)
    with_policy = [role.name for role in roles if role not in dict(separate)]
    groups = [RoleGroup("trainer", c.with_values(trainer_roles=with_policy), "actor")]
    for role, (nodes, ranks) in separate:
        config = c.with_values(
            trainer_roles=[role.name],
            actor_num_nodes=nodes,
            actor_num_gpus_per_node=ranks,
            # engines share only the policy's devices, so these ranks never offload
            colocate=False,
            offload=False,
            offload_train=None,
            offload_train_parts=None,
        )
        groups.append(RoleGroup(role.name, config, role.name))
    return tuple(groups)


def step_lines(c: Config) -> list[str]:
    """Returns the order of each group's step, as the lines that a run prints at its start."""
    first, *others = build_groups(c)
    whose = {"": first} | {f" of the {group.name}'s ranks": group for group in others}
    return [f"step{of}: {describe_step(group.config)}" for of, group in whose.items()]


def sent_lines(groups: Sequence[RoleGroup]) -> Iterator[str]:
    """Yields a line of text for each pair of groups with the columns that one sends to the other in a step."""
    for group in groups:
        for other in (other for other in groups if other.awaits(group)):
            columns = ", ".join(sorted(sent_by(group.config) & read_by(other.config)))
            yield f"{columns} from the {group.name}'s ranks to the {other.name}'s, in each step"


def trainer_ranks(c: Config) -> int:
    """Returns the total number of trainer ranks. Each rank has one device. It is 0 for --debug-rollout-only."""
    return 0 if c.debug.debug_rollout_only else sum(group.ranks for group in build_groups(c))


def several_nodes(c: Config) -> list[str]:
    """Returns "--FLAG VALUE" of the number of nodes, for each group of trainer ranks on more than one node."""
    nodes = {group.flags: group.config.cluster.actor_num_nodes for group in build_groups(c)}
    return [f"--{flags}-num-nodes {count}" for flags, count in nodes.items() if count > 1]


def on_one_host(c: Config) -> bool:
    """Returns True if all processes of the run are on this host: the run joins no cluster and uses one node."""
    return not several_nodes(c) and not os.environ.get("RAY_ADDRESS")
