"""Adds hardware to a plan: this machine, the data of --gpu, and lower bounds of times from its peak speeds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from slime.config import Config
from slime.hardware import HARDWARE, Hardware
from slime.models.selection import Selection
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape
from slime.plan.tower import run_tower, tower_token_flops, trained_tower_params
from slime.plan.units import BYTES, amount
from slime.plan.update_estimate import update_lines
from slime.roles.groups import RoleGroup, trainer_ranks
from slime.weight_sync.registry import CHANNELS
from vime.run.prompts import plural


def machine() -> str:
    """Returns the number of cores and GPUs of this machine."""
    import torch

    return f"{os.cpu_count()} CPU cores and {plural(torch.cuda.device_count(), 'GPU')}"


def hardware(c: Config, hf: dict[str, object]) -> Iterator[str]:
    """Yields memory, speeds and layout of the GPU, then lower bounds. Yields nothing without --gpu."""
    if c.cluster.gpu is None:
        return
    gpu = HARDWARE[c.cluster.gpu]
    domain = c.cluster.nvlink_domain_size or gpu.nvlink_domain
    yield (
        f"{gpu.name}: {gpu.memory_gib:g} GiB for CUDA at {gpu.memory_bytes_s / 1e12:g} TB/s, "
        f"{gpu.bf16_flops / 1e12:g} TFLOP/s in dense bfloat16; the host's CPU is {gpu.cpu}"
    )
    nvlink = (
        f"NVLink {gpu.nvlink_bytes_s / 1e9:g} GB/s among {domain} GPUs" if gpu.nvlink_bytes_s else "no NVLink"
    )
    yield (
        f"in each direction: {nvlink}, network {gpu.network_bytes_s / 1e9:g} GB/s a GPU; "
        f"{plural(c.cluster.num_gpus_per_node, 'GPU')} per node"
    )
    yield from _bounds(c, hf, gpu, domain)


def _bounds(c: Config, hf: dict[str, object], gpu: Hardware, domain: int) -> Iterator[str]:
    """Yields lower bounds of times from published peak speeds. A run is slower."""
    if (
        c.num_engines
        and not c.debug.debug_rollout_only
        and (link := _weight_link(c, gpu, domain)) is not None
    ):
        size = Shape.of(hf).params * BYTES[c.megatron.params_dtype]
        name, speed = link
        yield (
            f"lower bound of a weight update: {amount(size)} / {speed / 1e9:g} GB/s ({name}) = {size / speed:.3g} s"
        )
    if not c.debug.debug_rollout_only and c.megatron.params_dtype == "bfloat16":
        flops = 3 * ForwardFlops(hf)(1, 0)
        rate = c.world_size * gpu.bf16_flops / flops
        yield (
            f"upper bound of training: {c.world_size} x {gpu.bf16_flops / 1e12:g} TFLOP/s / {flops / 1e9:.3g} GFLOP "
            f"a token = {rate:,.0f} tokens/s (layers alone, without attention's products, head and recomputation)"
        )
        yield from _tower_bound(c, hf, gpu)


def _tower_bound(c: Config, hf: dict[str, object], gpu: Hardware) -> Iterator[str]:
    """Yields the bound of the vision tower. Nothing for a run without images."""
    vision = run_tower(c, hf)
    if vision is None:
        return
    trained = trained_tower_params(Selection.of(c), vision) > 0
    flops = (3 if trained else 1) * tower_token_flops(vision)
    rate = c.world_size * gpu.bf16_flops / flops
    often = "trained, in each micro-batch" if trained else "frozen, once per rollout"
    yield (
        f"upper bound of the vision tower: {flops / 1e9:.3g} GFLOP a token of an image ({often}) = {rate:,.0f} "
        "tokens/s"
    )


def update(groups: Sequence[RoleGroup], shape: Shape) -> Iterator[str]:
    """Yields the bytes that a rank of the first group, which holds the policy, sends to the engines.

    With --gpu, also yields the time over the link of an update. For files, this is the link between a node and a shared
    folder.
    """
    for c in (group.config for group in groups[:1]):
        link = None
        if c.cluster.gpu is not None:
            gpu = HARDWARE[c.cluster.gpu]
            domain = c.cluster.nvlink_domain_size or gpu.nvlink_domain
            link = _weight_link(c, gpu, domain) or ("network of one GPU", gpu.network_bytes_s)
        yield from update_lines(c, shape, link)


def _weight_link(c: Config, gpu: Hardware, domain: int) -> tuple[str, float] | None:
    """Returns the link through which all weights reach the engines, or None for files, for which the table has no
    speed."""
    transport, rollout_gpus = c.weight_update.update_weight_transport, c.cluster.rollout_num_gpus
    gpus = CHANNELS[transport].gpus
    if gpus == "shared":  # each rank packs all weights into buckets on its GPU
        return "the GPU's memory", gpu.memory_bytes_s
    if gpus == "apart":  # all weights reach each GPU of the engines
        inside = gpu.nvlink_bytes_s > 0 and trainer_ranks(c) + rollout_gpus <= domain
        return ("NVLink", gpu.nvlink_bytes_s) if inside else ("network of one GPU", gpu.network_bytes_s)
    return None
