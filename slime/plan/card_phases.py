"""The memory that a GPU needs in each phase of a run: one sum per phase over all processes on the card.

    tensors of the trainer          slime.plan.memory_estimate: state, and the memory that a step adds
    gaps of its allocator           FRAGMENTATION of the memory that a step adds
    communicators                   slime.plan.communicators
    context and libraries           BESIDES_TRAINER, and KERNELS from the first step on
    the engine on a shared card     asleep (SLEEPING_ENGINE), with its weights, or with its share

The constants are measured (tests/slime/plan/test_measured_memory.py compares the sums with records of real runs). The
module imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from slime.config import Config
from slime.plan.communicators import communicator_bytes, engine_communicator_bytes
from slime.plan.memory_estimate import Estimate, Item, grad_bytes
from slime.plan.model_shape import Params, Shape
from slime.plan.scheme_bytes import count_quantized
from slime.plan.units import BYTES, GIB, amount, count
from slime.roles import Role
from slime.tracking.phases import FIRST_WEIGHTS, GENERATING, HAND_OVER, LOADING, SAVING, TRAINING

BESIDES_GENERATING = 7.5 * GIB
"""Bytes of both processes in addition to the engine's share and the trainer's tensors: contexts, CUDA graphs,
workspaces, caches. On an H200 with 132.4 GiB in use, the share was 0.4 x 140.4 GiB, and state and buckets 68.9 GiB."""

SLEEPING_ENGINE = 1.9 * GIB
"""Bytes of GPU memory that a sleeping engine keeps, measured."""

BESIDES_TRAINER = 1.5 * GIB
"""Bytes of GPU memory of a trainer's CUDA context and libraries, and of communicators of a single rank."""

FURTHER_ENGINE, FURTHER_SLEEPING = 2.2 * GIB, 1.3 * GIB
"""Bytes that each further engine of a GPU needs, in addition to its weights and its KV cache: while it generates, and
while it sleeps. An H200 had 7.07 and 1.29 GiB for each of four engines of a 0.5B with 0.92 GiB of weights and 4 GiB of
KV cache."""

COMMUNICATORS = 1.2 * GIB
"""Least bytes for the communicators of a trainer whose engines are on other GPUs. The value is chosen, not measured. On
an H100, a Qwen3-4B failed at its first gradient norm with 1.5 GiB for context, libraries, kernels and communicators
together. With a communicator for each of Megatron's groups, used or not, they took 8.3 GiB."""

KERNELS = 1.3 * GIB
"""Bytes of GPU memory that a trainer's process takes outside of the allocator in its first step, and keeps: modules of
kernels, their local memory, workspaces. On an H200, the process of a Qwen3-4B with Adam on the host had 2.97 GiB before
its first step and 4.30 GiB after it, with the same tensors."""

FRAGMENTATION = 0.07
"""Gaps in the blocks of PyTorch's allocator, as a fraction of the memory that a step adds. A Qwen3-4B on one H200 had
128.1 GiB in use in a step with 120.0 GiB of tensors. The step itself had added 51.2 GiB of the 120.0 GiB. The gaps were
3.5 GiB, without the context, `KERNELS` and the sleeping engine."""


@dataclass(frozen=True)
class Moment:
    """The memory that a GPU needs at one time."""

    when: str
    bytes: float
    made_of: str
    """Text with the parts of `bytes`."""
    phase: str
    gaps: float = 0.0
    """Part of `bytes` without which the step may still succeed: gaps of the allocator."""


def card_moments(
    c: Config, e: Estimate, leaving: Collection[str], device_bytes: float | None
) -> list[Moment]:
    """Returns all moments of a trainer's card. `device_bytes` is the memory of the GPU, whose share an engine takes.
    Without it, the result lacks the moments of a generating engine."""
    shared = c.cluster.colocate and c.num_engines > 0
    found = (
        [] if device_bytes is None or not shared else list(list_engine_moments(c, e, leaving, device_bytes))
    )
    return [
        loading(c, e),
        *found,
        *([hand_over(c, e, leaving)] if shared else []),
        training(c, e, leaving),
        *saving(c, e, leaving),
    ]


def loading(c: Config, e: Estimate) -> Moment:
    """Returns the moment with the most memory while the trainer starts: it has its optimizer, and nothing has left the
    card, or megatron-core copies the weights that train into one buffer (`param_and_grad_buffer`)."""
    copied = copied_weights(c, e)
    built = e.sum_part("parameters") + e.sum_part("gradients") + copied
    kept, besides = max(e.left(()), built), BESIDES_TRAINER
    twice = f", {amount(copied)} of weights twice," if kept == built else ","
    made_of = f"{amount(kept)} of tensors{twice} {amount(besides)} besides"
    return Moment("while it loads", kept + besides, made_of, LOADING)


def copied_weights(c: Config, e: Estimate) -> float:
    """Returns the bytes of the weights that are on the card twice when the buffers of gradients exist, and the
    optimizer does not. Models of several trained roles are built one after the other."""
    if not c.megatron.use_distributed_optimizer:
        return 0.0
    gradients: dict[Role | None, float] = {}
    for item in e.kept:
        if item.part == "gradients":
            gradients[item.of] = gradients.get(item.of, 0.0) + item.bytes
    return max(gradients.values(), default=0.0) * BYTES[c.megatron.params_dtype] / grad_bytes(c)


def list_engine_moments(
    c: Config, e: Estimate, leaving: Collection[str], device_bytes: float
) -> Iterator[Moment]:
    """Yields the moments while the engine uses the GPU. If the bytes of its KV cache are given, the engine takes these
    bytes and the weights. It still does not start if less than its share is free."""
    facts, several = c.engine.engine_facts, c.cluster.rollout_engines_per_gpu
    left, share, cache = e.left(leaving), facts.memory_share / several, facts.cache_bytes
    besides = besides_generating(c)
    if cache:
        weights = engine_weights(c, e.shape).bytes
        taken, how = weights + cache, f"{amount(weights)} of weights and {amount(cache)} of KV cache"
        others = started_engines(c, taken)
        yield Moment(
            "when an engine starts",
            left + BESIDES_TRAINER + others + share * device_bytes,
            f"{amount(left + BESIDES_TRAINER)} of the trainer, "
            + (f"{amount(others)} of {several - 1} other engines, " if others else "")
            + f"{share:g} of the GPU that {facts.project} wants to find free",
            LOADING,
        )
    else:
        taken, how = share * device_bytes, f"{share:g} of the GPU"
    engines = "the engine" if several == 1 else f"each of {several} engines"
    yield Moment(
        "while engines generate",
        left + several * taken + besides,
        f"{amount(left)} of the trainer, {how} for {engines}, {amount(besides)} besides",
        GENERATING,
    )


def hand_over(c: Config, e: Estimate, leaving: Collection[str]) -> Moment:
    """Returns the moment when the trainer sends its weights to an engine that has woken without its KV cache. The rest
    of the trainer's state has left the card."""
    left = e.left([part for part in leaving if part != "parameters"])
    several, besides = c.cluster.rollout_engines_per_gpu, besides_tensors(c) + KERNELS
    weights, whose = several * engine_weights(c, e.shape).bytes, "engine's" if several == 1 else "engines'"
    return Moment(
        "while weights are handed over",
        left + weights + besides,
        f"{amount(left)} of the trainer, {amount(weights)} of the {whose} weights, {amount(besides)} besides",
        HAND_OVER,
    )


def besides_tensors(c: Config) -> float:
    """Returns the GPU memory that a training step needs in addition to the trainer's tensors: the CUDA context, NCCL's
    communicators (created when they are first used), and a sleeping engine."""
    own = BESIDES_TRAINER + communicator_bytes(c)
    if not c.num_engines:
        return own
    if c.cluster.colocate:
        sleeping = SLEEPING_ENGINE + (c.cluster.rollout_engines_per_gpu - 1) * FURTHER_SLEEPING
        return own + sleeping + engine_communicator_bytes(c)
    return max(own, BESIDES_TRAINER + COMMUNICATORS)


def besides_generating(c: Config) -> float:
    """Returns the GPU memory of trainer and engines in addition to the trainer's tensors and the engines' weights and
    KV caches."""
    return BESIDES_TRAINER + engines_besides(c) + communicator_bytes(c)


def engines_besides(c: Config) -> float:
    """Returns the GPU memory of a GPU's engines in addition to weights and KV caches, while they generate."""
    further = c.cluster.rollout_engines_per_gpu - 1
    return BESIDES_GENERATING - BESIDES_TRAINER + further * FURTHER_ENGINE


def started_engines(c: Config, each: float) -> float:
    """Returns the GPU memory of the engines that a GPU's last engine finds when it starts. `each` is the sum of an
    engine's weights and KV cache."""
    return (c.cluster.rollout_engines_per_gpu - 1) * (each + FURTHER_ENGINE)


def training(c: Config, e: Estimate, leaving: Collection[str]) -> Moment:
    """Returns the moment of a training step, while the engine on the GPU sleeps and the parts `leaving` return when
    needed."""
    besides = besides_tensors(c) + KERNELS
    whose = "a sleeping engine's and its own" if c.cluster.colocate and c.num_engines else "its own"
    peak = e.peak_with(leaving)
    gaps = FRAGMENTATION * max((item.bytes for item in e.work), default=0.0)
    made_of = f"{amount(peak)} of tensors, {whose} {amount(besides)} besides, {amount(gaps)} of gaps between tensors"
    return Moment("while it trains", peak + besides + gaps, made_of, TRAINING, gaps)


def saving(c: Config, e: Estimate, leaving: Collection[str]) -> Iterator[Moment]:
    """Yields the moment of a checkpoint, for which the weights and the optimizer's state return to the card."""
    if c.checkpoint.save is None:
        return
    kept = e.left([part for part in leaving if part == "gradients"])
    besides = besides_tensors(c) + KERNELS
    made_of = f"{amount(kept)} of tensors, {amount(besides)} besides"
    yield Moment("while it saves", kept + besides, made_of, SAVING)


def compute_peaks(moments: Collection[Moment]) -> dict[str, float]:
    """Returns phase -> the most bytes on the card. The engines receive their first weights awake, with their KV cache.
    Weights of the trainer that leave the card are sent from the host then."""
    found: dict[str, float] = {}
    for moment in moments:
        found[moment.phase] = max(moment.bytes, found.get(moment.phase, 0.0))
    if GENERATING in found:
        found[LOADING] = max(found.get(LOADING, 0.0), found[GENERATING])
        found[FIRST_WEIGHTS] = found[GENERATING]
        # A hand-over begins before the engine frees its KV cache, and ends after the engine has it back.
        if HAND_OVER in found:
            found[HAND_OVER] = max(found[GENERATING], found[HAND_OVER])
    elif LOADING in found:
        found[FIRST_WEIGHTS] = found[LOADING]
    return found


def engine_weights(c: Config, shape: Shape) -> Item:
    """Returns the model's weights on one GPU of an engine. Tensor-parallel ranks and pipeline stages share the
    parameters, and data-parallel replicas share the experts. An engine keeps the scheme of a quantised checkpoint. An
    engine that quantises plain weights does not quantise embedding and head. A draft adds the layers of multi-token
    prediction, in plain weights."""
    facts = c.engine.engine_facts
    size: float = BYTES.get(facts.dtype or c.megatron.params_dtype, 2)
    gpus = c.cluster.rollout_num_gpus_per_engine // facts.data_parallel_size
    every = c.cluster.rollout_num_gpus_per_engine
    ends = shape.params - shape.count_params(shape.kinds, 0).total
    whole = shape.count_params(shape.kinds, 0) + (shape.predicting if facts.drafts else Params())
    experts = whole.experts if facts.data_parallel_size > 1 else 0
    layers = whole.total - experts
    parts = [(layers + ends, size)]
    if facts.weight_bytes is not None:
        parts = [(layers, facts.weight_bytes), (ends, size)]
        size = facts.weight_bytes
    elif (found := count_quantized(shape)) is not None:
        small = found.others + (0 if experts else found.experts)
        parts = [(small, found.bytes), (layers + ends - small, size)]
        size += (found.bytes - size) * found.experts / max(1, whole.experts)  # the mean of all layers
    parts = [(number, each) for number, each in parts if number]
    how = " + ".join(f"{count(number)} x {each:.4g} B" for number, each in parts)
    how = f"{how if len(parts) == 1 else f'({how})'} / {gpus} GPUs"
    if experts:
        how += f" + {count(experts)} of experts x {size:.4g} B / {every} GPUs"
    shared = sum(number * each for number, each in parts)
    return Item("weights", shared / gpus + experts * size / every, how)


def registered(c: Config) -> bool:
    """Returns whether buffers are registered with NCCL. Such buffers stay on the device."""
    return bool(c.megatron.overrides.get("nccl_ub"))
