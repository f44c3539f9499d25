"""What is decided from the memory of a trainer rank: what of its state leaves the device for an engine's sake, and which
flags lower a peak. With --colocate this is what --offload-train leaves open. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from slime.config.cluster import PARTS
from slime.memory_estimate import GIB, Estimate, amount
from slime.operators import loss_head

ENGINE_SHARE = 0.92
"""vLLM's own --gpu-memory-utilization."""

BESIDES_GENERATING = 7.5 * GIB
"""Beyond the engine's share and the trainer's tensors, both processes together: contexts, CUDA graphs, workspaces,
caches. Of 132.4 GiB in use on an H200 the share was 0.4 x 140.4, state and buckets 68.9."""

BESIDES_TRAINING = 3.4 * GIB
"""What a sleeping engine keeps (1.9 GiB, measured), and the trainer's context and libraries."""


def engine_share(c: Any) -> float:
    """Part of a GPU that an engine takes for itself."""
    return c.engine.vllm_args.get("gpu_memory_utilization", ENGINE_SHARE)


@dataclass(frozen=True)
class MemoryDecision:
    """What of the trainer's state leaves its device between trainings, and why, in lines for a person."""

    leaving: tuple[str, ...]
    lines: tuple[str, ...]


def choices(e: Estimate, allowed: Collection[str]) -> list[tuple[str, ...]]:
    """Sets of parts that may leave, each the one that moves the fewest bytes for what it leaves behind.

    Gradients move none, as they are worth nothing between two trainings: they go first.
    """
    parts = [part for part in PARTS if part in allowed]
    sets = [s for n in range(len(parts) + 1) for s in itertools.combinations(parts, n)]
    sets = [s for s in sets if not s or "gradients" in s or "gradients" not in parts]
    sets.sort(key=lambda s: (sum(e.of_part(p) for p in s if p != "gradients"), -e.left(s)))
    best: list[tuple[str, ...]] = []
    for chosen in sets:
        if not best or e.left(chosen) < e.left(best[-1]):
            best.append(chosen)
    return best


def decide_residence(c: Any, e: Estimate, device_bytes: float | None) -> MemoryDecision:
    """Which parts leave. `device_bytes`: memory of the GPU; None where it is not known, then nothing is decided for it.

    While engines generate: state left + buckets + engine's share + BESIDES_GENERATING <= memory of the GPU. Of the sets
    that hold it, the one that moves the fewest bytes. --offload-train takes all of --offload-train-parts, whatever the
    memory; --no-offload-train none.
    """
    allowed = c.offload_train_parts or PARTS
    # Buffers that are registered with NCCL stay where they are.
    if not c.colocate or c.offload_train is False or c.megatron.overrides.get("nccl_ub"):
        return MemoryDecision((), ())
    if c.offload_train:
        leaving = tuple(part for part in PARTS if part in allowed)
        return MemoryDecision(leaving, tuple(_told(c, e, leaving, device_bytes, "--offload-train")))
    if c.device != "cuda" or not c.num_engines:
        return MemoryDecision((), ())
    if device_bytes is None:
        return MemoryDecision((), tuple(_by_size(c, e, allowed)))
    room = device_bytes * (1 - engine_share(c)) - BESIDES_GENERATING
    sets = choices(e, allowed)
    leaving = next((s for s in sets if e.left(s) <= room), sets[-1])
    return MemoryDecision(leaving, tuple(_told(c, e, leaving, device_bytes, "as memory asks for it")))


def _told(
    c: Any, e: Estimate, leaving: tuple[str, ...], device_bytes: float | None, why: str
) -> Iterator[str]:
    moved = sum(e.of_part(part) for part in leaving if part != "gradients")
    if leaving:
        what = f"{', '.join(leaving)} leave the device, {amount(moved)} to the host and back a step"
    else:
        what = "the trainer's state stays on the device"
    yield f"between trainings {what} ({why})"
    if device_bytes is None or c.device != "cuda":
        return
    share = engine_share(c)
    generating = e.left(leaving) + share * device_bytes + BESIDES_GENERATING
    yield (
        f"while engines generate {amount(generating)} of {amount(device_bytes)}: {amount(e.left(leaving))} of the "
        f"trainer, {share:g} of the GPU for the engine, {amount(BESIDES_GENERATING)} besides"
    )
    if generating > device_bytes:
        yield f"that is {amount(generating - device_bytes)} too much; lower --vllm-gpu-memory-utilization"
    training = e.peak + BESIDES_TRAINING
    yield f"while it trains {amount(training)}, a sleeping engine's and its own {amount(BESIDES_TRAINING)} included"
    if training > device_bytes:
        yield f"that is {amount(training - device_bytes)} too much; lower it with {', '.join(lowering(c))}"


def _by_size(c: Any, e: Estimate, allowed: Collection[str]) -> Iterator[str]:
    """What would be decided on GPUs of which size: left + share x memory + besides <= memory, solved for it."""
    free = 1 - engine_share(c)
    yield "what leaves the device while engines generate is decided when its memory is known, here it is not:"
    if free <= 0:
        return
    for leaving in choices(e, allowed):
        least = (e.left(leaving) + BESIDES_GENERATING) / free
        yield f"  from {amount(least)} on: {', '.join(leaving) or 'nothing'}"
    yield f"  and training needs {amount(e.peak + BESIDES_TRAINING)}"


def lowering(c: Any) -> list[str]:
    """Flags that would lower the peak of a training step, with what they are now."""
    overrides = c.megatron.overrides
    flags = []
    if c.use_dynamic_batch_size:
        flags.append(f"--max-tokens-per-gpu (now {c.max_tokens_per_gpu})")
    elif c.micro_batch_size > 1:
        flags.append(f"--micro-batch-size (now {c.micro_batch_size})")
    if overrides.get("recompute_granularity") != "full":
        flags.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 (now "
            f"{overrides.get('recompute_granularity', 'none')})"
        )
    if loss_head(c)[0].startswith("linear"):
        flags.append(f"--rl-kernel-workspace-mib (now {c.rl_kernel_workspace_mib})")
    else:
        flags.append(f"--rlk-fast auto (now {c.rlk_fast})")
    flags.append(f"--tensor-model-parallel-size (now {c.tensor_model_parallel_size})")
    if not c.use_distributed_optimizer and c.data_parallel_size > 1:
        flags.append("--use-distributed-optimizer (now off)")
    return flags
