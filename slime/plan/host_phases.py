"""The memory that a host needs in each phase of a run: the sum over all processes of the run on the host.

Page cache is not counted, because the kernel takes it back. Pinned memory is counted where it is used: Adam on the host
and the state that leaves the GPUs are pinned. The sum is for the host with the most processes, and for runs on GPUs.
The module imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from slime.checkpoints.hf_config import MAPPED_BYTES
from slime.checkpoints.memory_files import SLOTS
from slime.config import Config
from slime.plan.loading_estimate import largest_slice, reads_whole, stored_bytes
from slime.plan.memory_estimate import ACTIVATIONS, Estimate
from slime.plan.step_memory.optimizer_state import main_bytes, saved_state
from slime.plan.tower import CACHE_BYTES, run_tower
from slime.plan.units import BYTES, GIB, amount
from slime.plan.update_estimate import compute_update_bytes
from slime.roles.groups import several_nodes
from slime.tracking.phases import FIRST_WEIGHTS, GENERATING, HAND_OVER, LOADING, PHASES, SAVING, TRAINING
from slime.weight_sync.registry import CHANNELS

KILLED_AT = 0.95
"""Fraction of the host's memory from which Ray kills workers, and vime ends a run."""
USABLE = KILLED_AT - 0.02
"""Fraction that a plan may fill. The sum is not more exact than the difference of the two fractions."""

TRAINER = 1.9 * GIB
"""Bytes of a trainer's resident memory without the state that it keeps on the host. On an H100: 54.3 GiB with 52.4 GiB
of a Qwen3-4B's state."""
OTHERS = 1.3 * GIB
"""Bytes of driver, rollout manager, router and the processes of Ray."""
SERVER, SPREAD, WORKER = 1.0 * GIB, 0.5 * GIB, 1.4 * GIB
"""Bytes of an engine's server, of its core if workers are separate processes, and of a worker. With OTHERS, a run
with one engine on one H100 had 3.65 GiB in addition to its trainer."""
OBJECT_STORE = 0.5 * GIB
"""Bytes in the Ray cluster that a run starts (`slime.cluster.ray_start`): rollout data, in shared memory."""
SHARED = 0.1 * GIB
"""Bytes of shared memory of a process on a GPU: the queues of an engine and of NCCL."""
SYSTEM = 4.0 * GIB
"""Bytes that a host uses without a run. The value is chosen, not measured. If the plan is for this host, its measured
value is used."""
IMAGE = 2**19
"""Bytes of an image's file, which the manager has for each prompt in flight. The value is chosen, not measured; a JPEG
of 1024 x 768 pixels had 124 kB. Processed images are files, whose pages all processes of the host share."""
PAGE_TABLES = 8 / 4096
"""Page-table bytes per byte of a process: eight bytes for each page of 4 KiB."""


@dataclass(frozen=True)
class HostItem:
    """One line of the sum."""

    name: str
    bytes: float
    arithmetic: str
    phases: tuple[str, ...] = PHASES
    """The phases that have this item."""


@dataclass(frozen=True)
class HostSum:
    """The memory of a host."""

    items: tuple[HostItem, ...]

    def sum_phase(self, phase: str) -> float:
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def worst(self) -> str:
        """Returns the first phase with the most bytes."""
        return max(PHASES, key=self.sum_phase)


def host_sum(groups: Sequence[tuple[Config, Estimate, Collection[str]]], system: float = SYSTEM) -> HostSum:
    """Returns the sum. `groups` has each group's configuration, its estimate, and the parts that leave its devices; the
    policy's group comes first. `system` is the number of bytes that the host uses without the run."""
    items = [HostItem("system", system, "used without the run")]
    for c, e, leaving in groups:
        items += _list_trainer_items(c, e, leaving)
    items += _list_run_items(groups[0][0], groups[0][1])
    tables = PAGE_TABLES * sum(item.bytes for item in items[1:])
    items.append(HostItem("page tables", tables, "8 B for each 4 KiB of these"))
    return HostSum(tuple(item for item in items if item.bytes))


def _list_trainer_items(c: Config, e: Estimate, leaving: Collection[str]) -> Iterator[HostItem]:
    """Yields the items of the ranks of a group on one host."""
    ranks = c.cluster.actor_num_gpus_per_node
    yield HostItem("trainers", ranks * TRAINER, f"{ranks} ranks x {amount(TRAINER)}")
    inputs = sum(item.bytes for item in e.host if item.name == ACTIVATIONS)
    adam = sum(item.bytes for item in e.host) - inputs
    yield HostItem("Adam on the host", ranks * adam, f"{ranks} ranks x {amount(adam)}")
    # torch keeps pinned memory for the next step
    after = (TRAINING, SAVING, GENERATING, HAND_OVER)
    yield HostItem(ACTIVATIONS, ranks * inputs, f"{ranks} ranks x {amount(inputs)}", after)
    moved = {part: e.sum_part(part) for part in leaving if part != "gradients"}
    away = sum(moved.values())
    yield HostItem(
        "offloaded state", ranks * away, f"{ranks} ranks x {amount(away)} of {' and '.join(moved)}"
    )
    hf = e.shape.hf
    if run_tower(c, hf) is not None:
        how = f"{ranks} ranks x {amount(CACHE_BYTES)}: the rows of frozen towers for the images of a rollout, at most"
        yield HostItem("rows of images", ranks * CACHE_BYTES, how, (TRAINING,))
    elements, _ = largest_slice(c, e.shape, whole=reads_whole(hf))
    reads = elements * stored_bytes(c, hf) + MAPPED_BYTES
    yield HostItem("files read", ranks * reads, f"{ranks} ranks x {amount(reads)}", (LOADING,))
    if c.checkpoint.save is not None and c.checkpoint.async_save:
        share = ranks / c.world_size
        state = 0.0 if c.checkpoint.no_save_optim else saved_state(c, e.shape) / e.shape.params
        each = BYTES[c.megatron.params_dtype] + state
        saved, how = (
            e.shape.params * each * share,
            f"--async-save: {e.shape.params * share / 1e9:.3g} G x {each:.4g} B",
        )
        # The files are written while the next step runs.
        yield HostItem("checkpoint in flight", saved, how, (SAVING, GENERATING, HAND_OVER, TRAINING))
    if c.fault_tolerance.recover_from == "memory":
        whole = e.shape.params * BYTES[c.megatron.params_dtype] + saved_state(c, e.shape, main_bytes(c))
        each = whole * ranks / c.world_size
        copies = SLOTS * (2 if several_nodes(c) else 1)  # those of another node's ranks
        how = f"--recover-from memory: {copies} in /dev/shm x {amount(each)}"
        yield HostItem("states in memory", copies * each, how, (GENERATING, HAND_OVER, TRAINING, SAVING))


def _list_run_items(c: Config, e: Estimate) -> Iterator[HostItem]:
    """Yields the items of the driver's host, with its share of the engines."""
    yield HostItem("driver, manager, router, Ray", OTHERS, "measured")
    yield HostItem("object store", OBJECT_STORE, "Ray's, in shared memory")
    size, per_node = c.cluster.rollout_num_gpus_per_engine, c.cluster.num_gpus_per_node
    if c.num_engines and not c.rollout.rollout_external_engine_addrs:
        separate = 0 if c.cluster.colocate else c.cluster.actor_num_gpus_per_node
        here = min(c.cluster.rollout_num_gpus, per_node - separate if separate < per_node else per_node)
        here *= c.cluster.rollout_engines_per_gpu
        servers = -(-here // size)
        each = SERVER + (SPREAD if size > 1 else 0)
        how = f"{servers} servers x {amount(each)} + {here} workers x {amount(WORKER)}"
        yield HostItem("engines", servers * each + here * WORKER, how)
        if c.fault_tolerance.engine_standby_s:
            yield HostItem("standby", SERVER, "a process for the next lost engine (--engine-standby-s)")
        ranks = c.cluster.actor_num_gpus_per_node
        yield HostItem("queues", (here + ranks) * SHARED, "of processes on GPUs, in shared memory")
    yield image_item(c)
    yield from _published(c, e)


def image_item(c: Config) -> HostItem:
    """Returns the bytes of the images of prompts in flight, or 0 for a run without images."""
    prompts = c.data.rollout_batch_size * (1 + c.rollout.max_staleness) if c.data.multimodal_keys else 0
    return HostItem("images", prompts * IMAGE, f"{prompts} prompts in flight x {amount(IMAGE)} of a file")


def _published(c: Config, e: Estimate) -> Iterator[HostItem]:
    """Yields the published weights, for channels where they stay in memory."""
    size = e.shape.params * BYTES[c.megatron.params_dtype]
    copies = CHANNELS[c.weight_update.update_weight_transport].copies
    later = (FIRST_WEIGHTS, GENERATING, HAND_OVER, TRAINING, SAVING)
    if c.num_engines and copies and c.weight_update.weight_dir is None and c.cluster.actor_num_nodes == 1:
        how = f"{copies} versions x {amount(size)}, in shared memory"
        yield HostItem("published weights", copies * size, how, later)
    if c.num_engines and c.weight_update.update_weight_mode == "delta":
        update, _ = compute_update_bytes(c, e.shape)
        ranks = c.cluster.actor_num_gpus_per_node
        yield HostItem(
            "weights of the last update", ranks * update, f"{ranks} ranks x {amount(update)}", later
        )
