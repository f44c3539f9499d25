"""Places every actor: one Ray placement group with one bundle per device. Owns the arithmetic and its errors.

A device is a GPU, or half a CPU core on a host without GPUs. Half a core lets a laptop with two cores run every
topology of the test suite.

Ray assigns an actor only the GPU of its bundle, and does not guarantee an order of bundles. So a task in each bundle
reports its GPU. The run then takes the bundles in the order of NVLink domains, nodes and GPUs (see
slime.cluster.domains). The server of an engine with several GPUs is one actor in the engine's first bundle, and
`Placement.visible` lists all GPUs of the engine for it. An engine larger than a node has whole nodes, and one server
process with a separate actor on each node (`Placement.by_node`).
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.cluster.domains import arrange, compute_blocks, first_straddling, split_domains
from slime.cluster.gpu_facts import UNKNOWN, GpuFacts, read_gpu_facts
from slime.cluster.too_few import CORES_PER_CPU_DEVICE, each_takes, fewer, needed
from slime.config import Config
from slime.records.errors import FlagError
from slime.roles.groups import build_groups, trainer_ranks
from slime.roles.served import POLICY, served_models

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_PLACEMENT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 60, 120
_MORE_TIMEOUT_S = 10
"""Seconds to wait for free devices. Ray notices freed devices with a delay."""


@dataclass(frozen=True)
class Gpu:
    """The GPU of a bundle."""

    node: str
    """Ray's id of its node."""
    address: str
    name: str
    """Its name in CUDA_VISIBLE_DEVICES as Ray sets it, a number or a UUID. If the variable was set for Ray, the name is
    one of its entries."""
    facts: GpuFacts = UNKNOWN
    """Facts that the node's driver reports."""

    @property
    def order(self) -> tuple[int | str, ...]:
        """Returns the sort key: domain, node and number. Names that are not numbers are sorted as text."""
        number = int(self.name) if self.name.isdecimal() else -1
        return self.facts.domain, int(ipaddress.ip_address(self.address)), self.node, number, self.name


@dataclass(frozen=True)
class Node:
    """The node of a bundle: Ray's id of the node, and the node's address."""

    name: str
    address: str

    @property
    def order(self) -> tuple[int, str]:
        return int(ipaddress.ip_address(self.address)), self.name


@dataclass(frozen=True)
class Placement:
    """The bundles of a run's processes."""

    group: PlacementGroup
    resource: str
    trainer_bundles: list[list[int]]
    """Bundles by group of trainer ranks (`slime.roles.groups`), in rank order."""
    engine_bundles: dict[str, list[list[int]]]
    """Bundles by engine, under the name of the served model. The engine's first bundle on a node hosts the node's
    server process. Engines that share a GPU have the same bundle."""
    share: float
    nodes: list[Node]
    """One entry per bundle."""
    gpus: list[Gpu] = field(default_factory=list)
    """One entry per bundle. The list is empty on CPUs."""

    def options(self, bundle: int, actors: int = 1) -> dict[str, object]:
        """Returns Ray options that put an actor into `bundle`. Trainer and engine of a colocated run take half of a
        device each. If several engines share a GPU, `actors` is their number.

        An engine with several GPUs needs an actor in its first bundle only. The group reserves the other bundles for
        this run. With colocation, they hold the trainer ranks that share these GPUs.
        """
        amount = self.share * (1 if self.resource == "GPU" else CORES_PER_CPU_DEVICE)
        if actors > 1:
            amount = int(amount / actors * 10_000) / 10_000  # Ray rounds to four digits, and the sum must fit
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        resources = {"num_gpus": amount, "num_cpus": 0} if self.resource == "GPU" else {"num_cpus": amount}
        return {**resources, "scheduling_strategy": strategy}

    def by_node(self, bundles: Sequence[int]) -> list[list[int]]:
        """Returns the bundles of an engine, one list per node."""
        return [list(group) for _, group in groupby(bundles, key=lambda bundle: self.nodes[bundle])]

    def visible(self, bundles: Sequence[int]) -> dict[str, str]:
        """Returns the environment of a process that may use only the GPUs of `bundles`, in that order.

        For one bundle, Ray sets the same value, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES prevents it.
        """
        return {VISIBLE_VARIABLE: ",".join(self.gpus[bundle].name for bundle in bundles)} if self.gpus else {}

    def buses(self, bundles: Sequence[int]) -> tuple[str, ...]:
        """Returns PCI addresses of the GPUs of `bundles` on their node. The result is empty on CPUs."""
        return tuple(self.gpus[bundle].facts.bus for bundle in bundles) if self.gpus else ()

    def release(self) -> None:
        remove_placement_group(self.group)


@dataclass(frozen=True)
class _Engines:
    """Device indices of a served model's engines, and the number of devices per engine."""

    indices: range
    size: int


@dataclass(frozen=True)
class _DeviceIndices:
    """Device indices of the processes in the order in which a run takes its devices."""

    groups: list[range]
    """Indices by group of trainer ranks."""
    engines: dict[str, _Engines]
    """Engines by the name of the served model, first those of the policy."""

    @property
    def devices(self) -> int:
        return max(
            indices.stop for indices in (*self.groups, *(each.indices for each in self.engines.values()))
        )

    def blocks(self, config: Config) -> list[int]:
        """Returns numbers of GPUs that belong together, in the order in which the run takes them; see
        slime.cluster.domains. An engine's GPUs on one node are a block."""
        tensor, node = config.megatron.tensor_model_parallel_size, config.cluster.num_gpus_per_node
        policy, *others = map(len, self.groups)
        of_policy, *frozen = [(len(each.indices), min(each.size, node)) for each in self.engines.values()]
        count, part = of_policy
        blocks = compute_blocks(policy, tensor, count // part, part, colocate=config.cluster.colocate)
        blocks += [size for ranks in others for size in compute_blocks(ranks, tensor, 0, 1, colocate=False)]
        return blocks + [size for count, size in frozen for _ in range(count // size)]


def _assign_devices(config: Config) -> _DeviceIndices:
    """Assigns device indices to the processes of a run.

    With colocation, engine i of the policy has the indices [i*g, (i+1)*g) of the policy's ranks. Otherwise its engines
    follow these ranks. Further groups of trainer ranks, and the engines of frozen models, come last.
    """
    sizes = [0] if config.debug.debug_rollout_only else [group.ranks for group in build_groups(config)]
    first = 0 if config.cluster.colocate else sizes[0]
    indices = range(first, first + _engine_devices(config))
    engines = {POLICY: _Engines(indices, config.cluster.rollout_num_gpus_per_engine)}
    groups, end = [range(sizes[0])], max(sizes[0], indices.stop)
    for ranks in sizes[1:]:
        groups.append(range(end, end + ranks))
        end += ranks
    for model in (model for model in served_models(config) if model.frozen):
        engines[model.name] = _Engines(range(end, end + model.devices), model.devices_per_engine)
        end += model.devices
    return _DeviceIndices(groups, engines)


def reserve_devices(config: Config) -> Placement:
    """Reserves the devices of trainers and engines. If the devices do not suffice, raises an error with the numbers of
    needed and present devices. Raises ValueError if an engine would span more nodes than it needs."""
    existing = require_devices(config, ray.cluster_resources())  # type: ignore[no-untyped-call]
    indices = _assign_devices(config)
    devices = indices.devices
    resource = "GPU" if config.cluster.device == "cuda" else "CPU"
    amount = 1.0 if resource == "GPU" else CORES_PER_CPU_DEVICE
    group = _reserve(resource, amount, devices, existing, _PLACEMENT_TIMEOUT_S)
    try:
        nodes = find_nodes(group, devices)
        gpus = find_gpus(group, range(devices)) if resource == "GPU" else []
        if gpus:
            order, domains = _ordered(gpus, indices.blocks(config), config.cluster.nvlink_domain_size)
        else:
            order, domains = sorted(range(devices), key=lambda bundle: nodes[bundle].order), []
        trainers = [[order[index] for index in ranks] for ranks in indices.groups]
        engines = {
            name: _cut([order[index] for index in each.indices], each.size)
            for name, each in indices.engines.items()
        }
        together = config.cluster.rollout_engines_per_gpu
        engines[POLICY] = [bundles for bundles in engines[POLICY] for _ in range(together)]
        share = 0.5 if config.cluster.colocate else 1.0
        placed = Placement(group, resource, trainers, engines, share, nodes, gpus)
        _require_nodes(placed, config)
        if config.cluster.nvlink_domain_size or any(gpu.facts.domain for gpu in gpus):
            _require_domains(config, indices, domains)
    except BaseException:
        remove_placement_group(group)
        raise
    return placed


def require_devices(config: Config, resources: Mapping[str, float]) -> float:
    """Returns the number of GPUs or CPUs among Ray's `resources`. Raises ValueError unless they suffice for the run."""
    indices = _assign_devices(config)
    resource, amount = ("GPU", 1.0) if config.cluster.device == "cuda" else ("CPU", CORES_PER_CPU_DEVICE)
    existing = resources.get(resource, 0.0)
    if indices.devices * amount > existing:
        raise ValueError(
            f"the cluster must have {indices.devices} devices ({indices.devices * amount:g} {resource}s) for "
            f"{needed(config, _engine_devices(config))}, got {existing:g} {resource}s"
            f"{each_takes(config)}; {fewer(config, indices.devices, int(existing / amount))} or join a larger "
            "cluster with RAY_ADDRESS"
        )
    return existing


def reserve_engine(config: Config, model: str) -> Placement:
    """Reserves free devices for one more engine of a model, while the run is running.

    `config` has the settings of the model (`vime.pool.served.ServedEngines`). Raises ValueError if the devices are
    not free.
    """
    size = config.cluster.rollout_num_gpus_per_engine
    resource = "GPU" if config.cluster.device == "cuda" else "CPU"
    amount = 1.0 if resource == "GPU" else CORES_PER_CPU_DEVICE
    existing: float = ray.cluster_resources().get(resource, 0.0)  # type: ignore[no-untyped-call]
    try:
        group = _reserve(resource, amount, size, existing, _MORE_TIMEOUT_S)
    except RuntimeError as error:
        free = ray.available_resources().get(resource, 0.0)  # type: ignore[no-untyped-call]
        raise ValueError(
            f"one more engine must find {size} free devices ({size * amount:g} {resource}s) in {_MORE_TIMEOUT_S} s, "
            f"got {free:g} of {existing:g} {resource}s; remove another engine first, or join a larger cluster"
        ) from error
    try:
        nodes = find_nodes(group, size)
        gpus = find_gpus(group, range(size)) if resource == "GPU" else []
        order = sorted(range(size), key=lambda bundle: nodes[bundle].order)
        if gpus:
            order, domains = _ordered(gpus, [size], config.cluster.nvlink_domain_size)
            if config.cluster.nvlink_domain_size or any(gpu.facts.domain for gpu in gpus):
                _require_one_domain(_size_flag(config, model), config.engine_tensor_parallel, domains)
        placed = Placement(group, resource, [], {model: [order]}, 1.0, nodes, gpus)
        _require_nodes(placed, config)
    except BaseException:
        remove_placement_group(group)
        raise
    return placed


def _require_domains(config: Config, indices: _DeviceIndices, domains: Sequence[Hashable]) -> None:
    """Calls `_require_one_domain` for the tensor-parallel groups of trainers and the policy's engines. `domains` has
    one entry per GPU, in order."""
    for ranks in indices.groups:
        size = config.megatron.tensor_model_parallel_size
        _require_one_domain("--tensor-model-parallel-size", size, [domains[index] for index in ranks])
    of_engines = [domains[index] for index in indices.engines[POLICY].indices]
    _require_one_domain("--rollout-num-gpus-per-engine", config.engine_tensor_parallel, of_engines)


def _engine_devices(config: Config) -> int:
    """Returns the number of devices of the policy's engines that the run starts itself."""
    separate = config.debug.debug_train_only or config.rollout.rollout_external_engine_addrs
    return 0 if separate else config.cluster.rollout_num_gpus


def _cut(bundles: list[int], size: int) -> list[list[int]]:
    return [bundles[start : start + size] for start in range(0, len(bundles), size)]


def _reserve(resource: str, amount: float, devices: int, existing: float, timeout_s: int) -> PlacementGroup:
    """Returns a group of `devices` bundles with `amount` each. Raises RuntimeError if the devices are not free in
    time."""
    group: PlacementGroup = placement_group([{resource: amount}] * devices, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        free = ray.available_resources().get(resource, 0.0)  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"{devices} devices must be free within {timeout_s} s, got only {free:g} of {existing:g} "
            f"{resource}s; another job holds the rest"
        )
    return group


def find_nodes(group: PlacementGroup, devices: int) -> list[Node]:
    """Returns each bundle's node."""
    known = ray.nodes()  # type: ignore[no-untyped-call]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in known}
    names = placement_group_table(group)["bundles_to_node_id"]
    return [Node(names[bundle], addresses[names[bundle]]) for bundle in range(devices)]


@ray.remote(num_gpus=1, num_cpus=0)
def _own_gpu() -> Gpu:
    """Returns the one GPU of this task's bundle. The task takes the whole bundle."""
    (name,) = ray.get_gpu_ids()
    node = ray.get_runtime_context().get_node_id()
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return Gpu(node, address, str(name), read_gpu_facts(str(name)))


def find_gpus(group: PlacementGroup, bundles: Sequence[int]) -> list[Gpu]:
    """Returns each bundle's GPU. Each task takes its whole bundle, so no two tasks report the same GPU."""
    devices = len(bundles)
    strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
    tasks = [_own_gpu.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        gpus = ray.get(tasks, timeout=_ANSWER_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"each of {devices} GPUs must answer within {_ANSWER_TIMEOUT_S} s, got no answer from all of them; "
            "Ray's logs have the reason why its workers did not start"
        ) from error
    assert len({(gpu.node, gpu.name) for gpu in gpus}) == devices, gpus
    return gpus


def _ordered(gpus: list[Gpu], blocks: list[int], domain_size: int | None) -> tuple[list[int], list[Hashable]]:
    """Returns bundles in the order in which the run takes them, and their NVLink domains in that order."""
    ranked = sorted(range(len(gpus)), key=lambda bundle: gpus[bundle].order)
    nodes = [gpus[bundle].node for bundle in ranked]
    domains = split_domains([gpus[bundle].facts.domain for bundle in ranked], nodes, domain_size)
    positions = arrange(nodes, domains, blocks)
    return [ranked[position] for position in positions], [domains[position] for position in positions]


def _require_one_domain(flag: str, size: int, domains: Sequence[Hashable]) -> None:
    """Raises ValueError if NVLink does not connect the GPUs of a tensor-parallel group. `domains` has one entry per
    GPU, by rank."""
    index = first_straddling(domains, size)
    if index is None:
        return
    counts = Counter(domains)
    group = Counter(domains[index * size : (index + 1) * size])
    raise FlagError(
        f"a tensor-parallel group of {size} GPUs ({flag})",
        "be inside one NVLink domain",
        f"group {index} on {len(group)} domains ({' + '.join(map(str, group.values()))} "
        f"GPUs), and this run has {' + '.join(map(str, counts.values()))} GPUs on its domains",
        f"give every domain a multiple of {size} GPUs, lower the size, or set --nvlink-domain-size",
    )


def _size_flag(config: Config, model: str) -> str:
    flag = "--rollout-num-gpus-per-engine"
    return next((one.spelling.of(flag) for one in served_models(config) if one.name == model), flag)


def _require_nodes(placed: Placement, config: Config) -> None:
    """Raises ValueError if an engine spans more nodes than it needs.

    The server process on a node uses only the node's GPUs, and vLLM needs the same number of GPUs on each node.
    """
    engines = [
        (name, i, each) for name, every in placed.engine_bundles.items() for i, each in enumerate(every)
    ]
    per_node = config.cluster.num_gpus_per_node
    for name, index, bundles in engines:
        parts, each = placed.by_node(bundles), min(len(bundles), per_node)
        if any(len(part) != each for part in parts):
            on = ", ".join(f"{len(part)} on {placed.nodes[part[0]].address}" for part in parts)
            where = "on one node"
            if each < len(bundles):
                where = f"{len(bundles) // each} whole nodes (--num-gpus-per-node {each})"
            raise FlagError(
                f"the GPUs of an engine ({_size_flag(config, name)} {len(bundles)})",
                f"be {where}",
                f"engine {index} with {on}",
                f"give every node a multiple of {each} GPUs of trainers and of engines, or use "
                "smaller engines",
            )


def cpu_threads(config: Config) -> tuple[int, int]:
    """Returns the numbers of compute threads of (a trainer rank, an engine) on a CPU host.

    With colocation, trainers and engines take turns, and each side gets all cores. Otherwise they share the cores.
    """
    cores = os.cpu_count() or 1
    trainers = max(trainer_ranks(config), 1)
    engines = 0 if config.debug.debug_train_only else max(config.num_engines, 1)
    if config.cluster.colocate or not engines:
        return max(cores // trainers, 1), max(cores // max(engines, 1), 1)
    each = max(cores // (trainers + engines), 1)
    return each, each
