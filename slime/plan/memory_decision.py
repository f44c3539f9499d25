"""Decisions from the memory of a trainer rank: which parts of its state leave the device between training steps (if
--offload-train is not given), whether a GPU of a given size is large enough, and which flags lower a peak.

The rollout backend decides the memory of engines (`EngineFacts`). This file has only the numbers that the trainer's
decision needs. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from slime.config import Config
from slime.config.sections.cluster import PARTS
from slime.operators import loss_head
from slime.plan.memory_estimate import BYTES, Estimate, Item, on_device
from slime.plan.model_shape import Params, Shape
from slime.plan.units import GIB, amount, count

BESIDES_GENERATING = 7.5 * GIB
"""Memory of both processes in addition to the engine's share and the trainer's tensors: contexts, CUDA graphs,
workspaces, caches. On an H200 with 132.4 GiB in use, the share was 0.4 x 140.4 GiB, and state and buckets 68.9 GiB."""

SLEEPING_ENGINE = 1.9 * GIB
"""GPU memory that a sleeping engine keeps, measured."""

BESIDES_TRAINER = 1.5 * GIB
"""GPU memory of a trainer's CUDA context and libraries."""

COMMUNICATORS = 2.5 * GIB
"""GPU memory of NCCL's communicators of a trainer whose engines are on other GPUs. Chosen, not measured. On an H100, a
Qwen3-4B failed at its first gradient norm with 1.5 GiB for context, libraries and communicators together. With one
communicator for each of Megatron's groups, used or not, they took 8.3 GiB."""


TOO_SMALL = "does not fit"
"""First words of a verdict if the GPU is too small for the trainer or the engine. `vime plan` then ends with status
1."""


def engine_weights(c: Config, shape: Shape) -> Item:
    """The model's weights on one GPU of an engine. Tensor-parallel ranks and pipeline stages share the parameters, and
    data-parallel replicas share the experts. An engine that quantises does not quantise embedding and head. A draft
    adds the layers of multi-token prediction."""
    facts = c.engine.engine_facts
    size: float = BYTES.get(facts.dtype or c.megatron.params_dtype, 2)
    gpus = c.cluster.rollout_num_gpus_per_engine // facts.data_parallel_size
    every = c.cluster.rollout_num_gpus_per_engine
    ends = shape.params - shape.params_of(shape.kinds, 0).total
    whole = shape.params_of(shape.kinds, 0) + (shape.predicting if facts.drafts else Params())
    experts = whole.experts if facts.data_parallel_size > 1 else 0
    layers = whole.total - experts
    parts = [(layers + ends, size)]
    if facts.weight_bytes is not None:
        parts = [(layers, facts.weight_bytes), (ends, size)]
        size = facts.weight_bytes
    how = " + ".join(f"{count(number)} x {each:.4g} B" for number, each in parts)
    how = f"{how if len(parts) == 1 else f'({how})'} / {gpus} GPUs"
    if experts:
        how += f" + {count(experts)} of experts x {size:.4g} B / {every} GPUs"
    shared = sum(number * each for number, each in parts)
    return Item("weights", shared / gpus + experts * size / every, how)


def engine_flag(c: Config) -> str:
    """The flag that lowers the memory of an engine, with its present value."""
    facts = c.engine.engine_facts
    if facts.cache_bytes:
        return f"{facts.flag('cache_bytes')} (now {facts.cache_bytes})"
    return f"{facts.flag('memory_share')} (now {facts.memory_share:g})"


def gpu(device_bytes: float) -> str:
    """80 GiB -> "a GPU of 80 GiB"."""
    return f"a GPU of {device_bytes / GIB:.4g} GiB"


@dataclass(frozen=True)
class MemoryDecision:
    """The parts of the trainer's state that leave the device between training steps, and lines with reasons and
    sizes."""

    leaving: tuple[str, ...]
    lines: tuple[str, ...]


def choices(e: Estimate, allowed: Collection[str]) -> list[tuple[str, ...]]:
    """Sets of parts that may leave. Each set moves the fewest bytes for the memory that it frees.

    Gradients leave first. They move no bytes, because they are not needed between two training steps.
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
    """The memory that a GPU needs at one time."""

    when: str
    bytes: float
    made_of: str
    """Its parts."""
    lower: str
    """The flags that lower it."""


def beside_engine(c: Config, e: Estimate, leaving: Collection[str], device_bytes: float) -> Iterator[Moment]:
    """Moments while the engine uses the GPU. If the bytes of its KV cache are given, it takes these bytes and the
    weights. But it does not start if less than its share is free."""
    facts = c.engine.engine_facts
    left, share, given = e.left(leaving), facts.memory_share, facts.cache_bytes
    more = e.left(PARTS) < left and not _registered(c)
    parts = ", --offload-train with all its parts" if more else ""
    if given:
        weights = engine_weights(c, e.shape).bytes
        taken, how = weights + given, f"{amount(weights)} of weights and {amount(given)} of KV cache"
        yield Moment(
            "when an engine starts",
            left + BESIDES_TRAINER + share * device_bytes,
            f"{amount(left + BESIDES_TRAINER)} of the trainer, {share:g} of the GPU that "
            f"{facts.project} wants to find free",
            f"{facts.flag('memory_share')} (now {share:g}){parts}",
        )
    else:
        taken, how = share * device_bytes, f"{share:g} of the GPU"
    yield Moment(
        "while engines generate",
        left + taken + BESIDES_GENERATING,
        f"{amount(left)} of the trainer, {how} for the engine, {amount(BESIDES_GENERATING)} besides",
        f"{engine_flag(c)}{parts}",
    )


def besides_tensors(c: Config) -> float:
    """GPU memory that a training step needs beside the trainer's tensors: for the CUDA context, for NCCL's
    communicators (they are made when they are first used), and for a sleeping engine."""
    if not c.num_engines:
        return BESIDES_TRAINER
    return BESIDES_TRAINER + (SLEEPING_ENGINE if c.cluster.colocate else COMMUNICATORS)


def training(c: Config, e: Estimate, leaving: Collection[str]) -> Moment:
    """The moment of a training step, while the engine on the GPU sleeps and the parts `leaving` come when needed."""
    besides = besides_tensors(c)
    whose = "a sleeping engine's and its own" if c.cluster.colocate and c.num_engines else "its own"
    peak = e.peak_with(leaving)
    made_of = f"{amount(peak)} of tensors, {whose} {amount(besides)} besides"
    return Moment("while it trains", peak + besides, made_of, ", ".join(lowering(c)))


def decide_residence(c: Config, e: Estimate, device_bytes: float | None) -> MemoryDecision:
    """Decide which parts leave. `device_bytes`: memory of the GPU. If it is None (unknown), nothing is decided.

    While engines generate: remaining state + buckets + the engine's memory + BESIDES_GENERATING <= memory of the GPU.
    Of the sets that fulfil this, the result moves the fewest bytes. --offload-train offloads all of
    --offload-train-parts for every size of memory, and --no-offload-train offloads none.
    """
    if c.cluster.device != "cuda":
        device_bytes = None
    allowed = c.cluster.offload_train_parts or PARTS
    leaving: tuple[str, ...] = ()
    if not c.cluster.colocate:
        why = None
    elif c.cluster.offload_train is False or _registered(c):
        why = "--no-offload-train" if c.cluster.offload_train is False else "--nccl-ub"
    elif c.cluster.offload_train:
        leaving, why = tuple(part for part in PARTS if part in allowed), "--offload-train"
    elif c.cluster.device != "cuda" or not c.num_engines:
        why = None
    elif device_bytes is None:
        return MemoryDecision((), tuple(_by_size(c, e, allowed)))
    else:
        leaving, why = _least(c, e, allowed, device_bytes), "as memory asks for it"
    told = [] if why is None or (device_bytes is None and not leaving) else [_leaves(e, leaving, why)]
    return MemoryDecision(leaving, (*told, *_fits(c, e, leaving, device_bytes)))


def _registered(c: Config) -> bool:
    """Whether buffers are registered with NCCL. Such buffers stay on the device."""
    return bool(c.megatron.overrides.get("nccl_ub"))


def _least(c: Config, e: Estimate, allowed: Collection[str], device_bytes: float) -> tuple[str, ...]:
    """The first choice that leaves room for the engine, or the last choice if none does."""
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


def _fits(c: Config, e: Estimate, leaving: Collection[str], device_bytes: float | None) -> Iterator[str]:
    """One line per moment, and the verdict. Nothing if the size of the GPU is not known."""
    if device_bytes is None:
        return
    moments = [training(c, e, leaving)]
    if c.cluster.colocate and c.num_engines:
        moments = [*beside_engine(c, e, leaving, device_bytes), *moments]
    for moment in moments:
        yield f"{moment.when} {amount(moment.bytes)} of {amount(device_bytes)}: {moment.made_of}"
    short = [
        f"{amount(moment.bytes - device_bytes)} too much {moment.when}, lower it with {moment.lower}"
        for moment in moments
        if moment.bytes > device_bytes
    ]
    yield f"{TOO_SMALL} {gpu(device_bytes)}: {'; '.join(short)}" if short else f"fits {gpu(device_bytes)}"


def _by_size(c: Config, e: Estimate, allowed: Collection[str]) -> Iterator[str]:
    """The decision for each size of GPU: `beside_engine` <= memory, solved for the memory."""
    free, given = 1 - c.engine.engine_facts.memory_share, c.engine.engine_facts.cache_bytes
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
    yield f"  and training needs {amount(training(c, e, allowed).bytes)}"


def lowering(c: Config) -> list[str]:
    """Flags that lower the peak of a training step, with their current values."""
    overrides = c.megatron.overrides
    flags = []
    if c.data.use_dynamic_batch_size:
        flags.append(f"--max-tokens-per-gpu (now {c.data.max_tokens_per_gpu})")
    elif c.data.micro_batch_size > 1:
        flags.append(f"--micro-batch-size (now {c.data.micro_batch_size})")
    if overrides.get("recompute_granularity") != "full":
        flags.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 (now "
            f"{overrides.get('recompute_granularity', 'none')})"
        )
    if not loss_head(c)[0].has_logits:
        flags.append(f"--rl-kernel-workspace-mib (now {c.kernels.rl_kernel_workspace_mib})")
    elif c.kernels.selected_logprob_provider:
        flags.append(f"--selected-logprob-provider (now {c.kernels.selected_logprob_provider})")
    else:
        flags.append(f"--rlk-fast auto (now {c.kernels.rlk_fast})")
    if c.megatron.use_distributed_optimizer and on_device(c):
        flags.append(f"--optimizer-cpu-offload (now {1 - on_device(c):g} of the optimizer)")
    flags.append(f"--tensor-model-parallel-size (now {c.megatron.tensor_model_parallel_size})")
    if not c.megatron.use_distributed_optimizer and c.data_parallel_size > 1:
        flags.append("--use-distributed-optimizer (now off)")
    return flags
