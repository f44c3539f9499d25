"""What is decided from the memory of a trainer rank: what of its state leaves the device between trainings (where
--offload-train leaves that open), whether a GPU of some size is enough, and which flags lower a peak.

What engines take is vLLM's affair; here are only the two numbers that the trainer's decision depends on. Imports
neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from slime.config.cluster import PARTS
from slime.memory_estimate import BYTES, GIB, Estimate, Item, amount, count
from slime.model_shape import Shape
from slime.operators import loss_head

ENGINE_SHARE = 0.92
"""vLLM's own --gpu-memory-utilization."""

BESIDES_GENERATING = 7.5 * GIB
"""Beyond what an engine takes and the trainer's tensors, both processes together: contexts, CUDA graphs, workspaces,
caches. Of 132.4 GiB in use on an H200 the share was 0.4 x 140.4, state and buckets 68.9."""

SLEEPING_ENGINE = 1.9 * GIB
"""What an engine keeps of a GPU that it gave to the trainer, measured."""

BESIDES_TRAINER = 1.5 * GIB
"""A trainer's context and libraries."""


TOO_SMALL = "does not fit"
"""How a verdict begins on a GPU that is not enough, for trainer and engine; a plan of such GPUs ends with status 1."""


def engine_share(c: Any) -> float:
    """Part of a GPU that vLLM wants to find free at its start, and takes where its KV cache is not given in bytes."""
    return c.engine.vllm_args.get("gpu_memory_utilization", ENGINE_SHARE)


def engine_kv_bytes(c: Any) -> int | None:
    """Bytes of a GPU for KV cache where they are given; None or 0: what the engine's share leaves."""
    return c.engine.vllm_args.get("kv_cache_memory_bytes")


def engine_weights(c: Any, shape: Shape) -> Item:
    """Of a model on one GPU of an engine: its tensor-parallel ranks and pipeline stages share the parameters."""
    size = BYTES.get(c.engine.vllm_args.get("dtype", c.params_dtype), 2)
    gpus = c.rollout_num_gpus_per_engine // (c.engine.vllm_args.get("data_parallel_size") or 1)
    return Item("weights", shape.params * size / gpus, f"{count(shape.params)} x {size} B / {gpus} GPUs")


def engine_flag(c: Any) -> str:
    """The flag that lowers what an engine takes, with what it is now."""
    if given := engine_kv_bytes(c):
        return f"--vllm-kv-cache-memory-bytes (now {given})"
    return f"--vllm-gpu-memory-utilization (now {engine_share(c):g})"


def gpu(device_bytes: float) -> str:
    """80 GiB -> "a GPU of 80 GiB"."""
    return f"a GPU of {device_bytes / GIB:.4g} GiB"


@dataclass(frozen=True)
class MemoryDecision:
    """What of the trainer's state leaves its device between trainings; in lines for a person why, and what it needs."""

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


@dataclass(frozen=True)
class Moment:
    """What a GPU must hold at a time: `when`, how many `bytes`, made up of what, and which flags lower it."""

    when: str
    bytes: float
    made_of: str
    lower: str


def beside_engine(c: Any, e: Estimate, leaving: Collection[str], device_bytes: float) -> Iterator[Moment]:
    """While the engine has the GPU. Given the bytes of its KV cache, vLLM takes these and the weights, whatever its
    share; but it does not start where less than its share is free."""
    left, share, given = e.left(leaving), engine_share(c), engine_kv_bytes(c)
    more = e.left(PARTS) < left and not _registered(c)
    parts = ", --offload-train with all its parts" if more else ""
    if given:
        weights = engine_weights(c, e.shape).bytes
        taken, how = weights + given, f"{amount(weights)} of weights and {amount(given)} of KV cache"
        yield Moment(
            "when an engine starts",
            left + BESIDES_TRAINER + share * device_bytes,
            f"{amount(left + BESIDES_TRAINER)} of the trainer, {share:g} of the GPU that vLLM wants to find free",
            f"--vllm-gpu-memory-utilization (now {share:g}){parts}",
        )
    else:
        taken, how = share * device_bytes, f"{share:g} of the GPU"
    yield Moment(
        "while engines generate",
        left + taken + BESIDES_GENERATING,
        f"{amount(left)} of the trainer, {how} for the engine, {amount(BESIDES_GENERATING)} besides",
        f"{engine_flag(c)}{parts}",
    )


def training(c: Any, e: Estimate) -> Moment:
    """While the trainer works; an engine on its GPU sleeps."""
    besides, whose = BESIDES_TRAINER, "its own"
    if c.colocate and c.num_engines:
        besides, whose = BESIDES_TRAINER + SLEEPING_ENGINE, "a sleeping engine's and its own"
    made_of = f"{amount(e.peak)} of tensors, {whose} {amount(besides)} besides"
    return Moment("while it trains", e.peak + besides, made_of, ", ".join(lowering(c)))


def decide_residence(c: Any, e: Estimate, device_bytes: float | None) -> MemoryDecision:
    """Which parts leave. `device_bytes`: memory of the GPU; None where it is not known, then nothing is decided for it.

    While engines generate: state left + buckets + what the engine takes + BESIDES_GENERATING <= memory of the GPU. Of
    the sets that hold it, the one that moves the fewest bytes. --offload-train takes all of --offload-train-parts,
    whatever the memory; --no-offload-train none.
    """
    if c.device != "cuda":
        device_bytes = None
    allowed = c.offload_train_parts or PARTS
    leaving: tuple[str, ...] = ()
    if not c.colocate:
        why = None
    elif c.offload_train is False or _registered(c):
        why = "--no-offload-train" if c.offload_train is False else "--nccl-ub"
    elif c.offload_train:
        leaving, why = tuple(part for part in PARTS if part in allowed), "--offload-train"
    elif c.device != "cuda" or not c.num_engines:
        why = None
    elif device_bytes is None:
        return MemoryDecision((), tuple(_by_size(c, e, allowed)))
    else:
        leaving, why = _least(c, e, allowed, device_bytes), "as memory asks for it"
    told = [] if why is None or (device_bytes is None and not leaving) else [_leaves(e, leaving, why)]
    return MemoryDecision(leaving, (*told, *_fits(c, e, leaving, device_bytes)))


def _registered(c: Any) -> bool:
    """Buffers that are registered with NCCL stay where they are."""
    return bool(c.megatron.overrides.get("nccl_ub"))


def _least(c: Any, e: Estimate, allowed: Collection[str], device_bytes: float) -> tuple[str, ...]:
    """The first choice that leaves room for the engine; the last one where none does."""
    sets = choices(e, allowed)
    for leaving in sets:
        if all(moment.bytes <= device_bytes for moment in beside_engine(c, e, leaving, device_bytes)):
            return leaving
    return sets[-1]


def _leaves(e: Estimate, leaving: Collection[str], why: str) -> str:
    moved = sum(e.of_part(part) for part in leaving if part != "gradients")
    if leaving:
        what = f"{', '.join(leaving)} leave the device, {amount(moved)} to the host and back a step"
    else:
        what = "the trainer's state stays on the device"
    return f"between trainings {what} ({why})"


def _fits(c: Any, e: Estimate, leaving: Collection[str], device_bytes: float | None) -> Iterator[str]:
    """A line for each moment, and the verdict. Nothing for a GPU whose size is not known."""
    if device_bytes is None:
        return
    moments = [training(c, e)]
    if c.colocate and c.num_engines:
        moments = [*beside_engine(c, e, leaving, device_bytes), *moments]
    for moment in moments:
        yield f"{moment.when} {amount(moment.bytes)} of {amount(device_bytes)}: {moment.made_of}"
    short = [
        f"{amount(moment.bytes - device_bytes)} too much {moment.when}, lower it with {moment.lower}"
        for moment in moments
        if moment.bytes > device_bytes
    ]
    yield f"{TOO_SMALL} {gpu(device_bytes)}: {'; '.join(short)}" if short else f"fits {gpu(device_bytes)}"


def _by_size(c: Any, e: Estimate, allowed: Collection[str]) -> Iterator[str]:
    """What would be decided on GPUs of which size: the sums of `beside_engine` <= memory, solved for it."""
    free, given = 1 - engine_share(c), engine_kv_bytes(c)
    yield "what leaves the device while engines generate is decided when its memory is known, here it is not:"
    if free <= 0:
        return
    for leaving in choices(e, allowed):
        left = e.left(leaving)
        if given:
            taken = engine_weights(c, e.shape).bytes + given
            least = max(left + taken + BESIDES_GENERATING, (left + BESIDES_TRAINER) / free)
        else:
            least = (left + BESIDES_GENERATING) / free
        yield f"  from {amount(least)} on: {', '.join(leaving) or 'nothing'}"
    yield f"  and training needs {amount(training(c, e).bytes)}"


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
    if not loss_head(c)[0].has_logits:
        flags.append(f"--rl-kernel-workspace-mib (now {c.rl_kernel_workspace_mib})")
    else:
        flags.append(f"--rlk-fast auto (now {c.rlk_fast})")
    flags.append(f"--tensor-model-parallel-size (now {c.tensor_model_parallel_size})")
    if not c.use_distributed_optimizer and c.data_parallel_size > 1:
        flags.append("--use-distributed-optimizer (now off)")
    return flags
