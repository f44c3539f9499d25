"""Which roles live on which trainer ranks. Must start without torch.

    groups_of(config) -> trainer: reference, policy          one trainer per group, with a configuration of its own,
                         critic: critic                      in which `roles_of` has the roles of the group alone

A group is a trainer like any other. Each scores, makes the advantages of its samples and trains its roles. What the
passes of one group fill and another reads is sent between the two halves of a step:

    trainer   ref_log_probs, log_probs --.   .-- advantages -- train policy
    critic    values --------------------- X --- advantages -- train critic
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.algo.needs import columns_read, read_by_advantages
from slime.config import Config
from slime.roles import POLICY, order_of_step, roles_of


@dataclass(frozen=True, eq=False)
class Group:
    """Trainer ranks that have the same roles."""

    name: str
    """In the names of ranks, log files and metrics."""
    config: Config
    """That of the run, with the roles and the number of ranks of the group."""
    flags: str
    """Its devices are --{flags}-num-nodes x --{flags}-num-gpus-per-node."""

    @property
    def ranks(self) -> int:
        return self.config.world_size

    def awaits(self, other: Group) -> bool:
        """Whether it needs columns of another group before it trains."""
        return other is not self and bool(sent_by(other.config) & read_by(self.config))


def read_by(c: Config) -> frozenset[str]:
    """The columns that a group needs after all passes. `c`: the configuration of the group."""
    return columns_read(c) if POLICY in roles_of(c) else read_by_advantages(c)


def sent_by(c: Config) -> frozenset[str]:
    """The columns that a group fills for others: for that of the policy, or for those without it. `c`: the
    configuration of the group."""
    roles = roles_of(c)
    read = read_by_advantages(c) if POLICY in roles else columns_read(c)
    return read & {role.column for role in roles}


def name_of(c: Config) -> str:
    """The name of the group whose configuration `c` is: trainer for that of the policy, else its role's."""
    roles = roles_of(c)
    return "trainer" if POLICY in roles else roles[0].name


def groups_of(c: Config) -> tuple[Group, ...]:
    """The groups of a run's trainer ranks: first that of the policy, with all roles that have no devices of their
    own."""
    roles = roles_of(c)
    apart = [(role, devices) for role in roles if (devices := role.devices(c)) is not None]
    if not apart or c.cluster.trainer_roles:
        return (Group(name_of(c), c, "actor"),)
    with_policy = [role.name for role in roles if role not in dict(apart)]
    groups = [Group("trainer", c.with_values(trainer_roles=with_policy), "actor")]
    for role, (nodes, ranks) in apart:
        config = c.with_values(
            trainer_roles=[role.name],
            actor_num_nodes=nodes,
            actor_num_gpus_per_node=ranks,
            # engines share the policy's devices, so nothing has to make room on these
            colocate=False,
            offload=False,
            offload_train=None,
            offload_train_parts=None,
        )
        groups.append(Group(role.name, config, role.name))
    return tuple(groups)


def step_lines(c: Config) -> list[str]:
    """What the ranks of each group compute in a step, as the lines that a run prints at its start."""
    first, *others = groups_of(c)
    whose = {"": first} | {f" of the {group.name}'s ranks": group for group in others}
    return [f"step{of}: {order_of_step(group.config)}" for of, group in whose.items()]


def sent_lines(groups: Sequence[Group]) -> Iterator[str]:
    """What the groups send to each other in a step, for people."""
    for group in groups:
        for other in (other for other in groups if other.awaits(group)):
            columns = ", ".join(sorted(sent_by(group.config) & read_by(other.config)))
            yield f"{columns} from the {group.name}'s ranks to the {other.name}'s, in each step"


def trainer_ranks(c: Config) -> int:
    """Number of trainer ranks of all groups, each on a device of its own. 0 for --debug-rollout-only."""
    return 0 if c.debug.debug_rollout_only else sum(group.ranks for group in groups_of(c))


def several_nodes(c: Config) -> list[str]:
    """The flags of numbers of nodes, with their values, for each group of trainer ranks on more than one."""
    nodes = {group.flags: group.config.cluster.actor_num_nodes for group in groups_of(c)}
    return [f"--{flags}-num-nodes {count}" for flags, count in nodes.items() if count > 1]


def on_one_host(c: Config) -> bool:
    """Whether all processes of the run are on this host: the run joins no cluster and uses one node."""
    return not several_nodes(c) and not os.environ.get("RAY_ADDRESS")
