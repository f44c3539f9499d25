"""Finds flags that would make a run fit, and the GiB that each flag saves. It plans again with each flag changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.config import Config
from slime.models.decoder import Hf
from slime.operators import loss_head
from slime.plan.fit import Also, Fit, MachineSizes, fit
from slime.plan.memory_estimate import grad_bytes, longest_sample, micro_batch_tokens
from slime.plan.model_shape import Shape
from slime.plan.units import amount
from slime.weight_sync.registry import CHANNELS

_SHOWN = 3
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_FULL_VALUES = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_LEAST_TOKENS, _LEAST_WORKSPACE_MIB, _LEAST_SHARE = 1024, 128, 0.1


@dataclass(frozen=True)
class Change:
    """One flag with another value."""

    flag: str
    """The flag with its new value, as a user types it."""
    now: str
    """The current value."""
    config: Config


@dataclass(frozen=True)
class Advice:
    """The effect of a change."""

    change: Change
    saved_bytes: float
    """Bytes by which the shortage at the currently worst moment shrinks."""
    missing: float
    """Bytes that are still missing at some moment; at most 0 if the run then fits."""

    def __str__(self) -> str:
        rest = "fits" if self.missing <= 0 else f"{amount(self.missing)} are still missing"
        return f"{self.change.flag} (now {self.change.now}) gives {amount(self.saved_bytes)}, {rest}"


def advise(c: Config, hf: Hf, machine: MachineSizes, also: Also | None = None) -> list[Advice]:
    """Returns the flags that help a run that does not fit, at most three. Flags with which the run fits come first,
    ordered by the smallest change; then the flags that save the most. Empty if the run fits, or if no flag helps."""
    before = fit(c, hf, machine, also)
    if before.over <= 0:
        return []
    found = []
    for values in changes(c, Shape.of(hf)):
        tried = [_advice(before, change, hf, machine, also) for change in values]
        helping = [advice for advice in tried if advice.saved_bytes > 0]
        if not helping:
            continue
        fitting = [advice for advice in helping if advice.missing <= 0]
        found.append(fitting[0] if fitting else min(helping, key=lambda advice: advice.missing))
    found.sort(key=lambda advice: (advice.missing > 0, advice.missing if advice.missing > 0 else 0))
    return found[:_SHOWN]


def _advice(before: Fit, change: Change, hf: Hf, machine: MachineSizes, also: Also | None) -> Advice:
    after, worst = fit(change.config, hf, machine, also), before.worst
    assert worst is not None
    same = [need.over for need in after.needs if (need.of, need.when) == (worst.of, worst.when)]
    return Advice(change, worst.over - max(same, default=worst.over - worst.bytes), after.over)


def savings(c: Config, hf: Hf, phase: str, wanted: float) -> list[Advice]:
    """Returns at most three flags that save `wanted` bytes in `phase`, for a run whose card was full in that phase. The
    plan runs for a card that is too small by `wanted`."""
    cards = fit(c, hf, MachineSizes()).cards
    most = max((card[phase] for card in cards.values() if phase in card), default=None)
    return [] if most is None else advise(c, hf, MachineSizes(device=most - wanted))


def advice_lines(c: Config, hf: Hf, machine: MachineSizes, also: Also | None = None) -> list[str]:
    """Returns lines for people: the saving per flag, and the saving with all flags together if none is enough."""
    found = advise(c, hf, machine, also)
    lines = [str(advice) for advice in found]
    if len(found) > 1 and all(advice.missing > 0 for advice in found):
        together = c
        for advice in found:
            together = _both(together, c, advice.change.config)
        missing = fit(together, hf, machine, also).over
        rest = "fit"
        if missing > 0:
            rest = f"leave {amount(missing)} missing; combine other flags or use larger GPUs and hosts"
        lines.append(f"all {len(found)} together {rest}")
    return lines


def _both(one: Config, before: Config, other: Config) -> Config:
    """Returns `one` with the values in which `other` differs from `before`. `overrides` holds the values of several
    flags, which are compared one by one."""
    changed = {
        field.name: getattr(getattr(other, section.name), field.name)
        for section in dataclasses.fields(before)
        if dataclasses.is_dataclass(getattr(before, section.name))
        for field in dataclasses.fields(getattr(before, section.name))
        if getattr(getattr(other, section.name), field.name)
        != getattr(getattr(before, section.name), field.name)
    }
    if "overrides" in changed:
        old = before.megatron.overrides
        new = {name: value for name, value in other.megatron.overrides.items() if old.get(name) != value}
        changed["overrides"] = {**one.megatron.overrides, **new}
    return one.with_values(**changed)


def changes(c: Config, shape: Shape) -> Iterator[Sequence[Change]]:
    """Yields, for each flag that changes the memory of a run, its other values, the smallest change first."""
    yield tokens(c)
    yield workspace(c)
    yield remainders(c)
    yield recomputation(c)
    yield inputs_on_host(c)
    yield host_adam(c)
    yield engine_share(c)
    yield engines_per_gpu(c)
    yield offloading(c)
    yield context_parallel(c, shape)
    yield tensor_parallel(c, shape)
    yield saves(c)
    yield channels(c)
    yield gradient_sums(c)


def tokens(c: Config) -> list[Change]:
    """Returns smaller numbers of tokens in a micro-batch. The longest sample must still fit."""
    now = c.data.max_tokens_per_gpu
    if not c.data.use_dynamic_batch_size or now is None:
        size = c.data.micro_batch_size
        less = [size // 2**n for n in range(1, size.bit_length())]
        return [Change(f"--micro-batch-size {n}", str(size), c.with_values(micro_batch_size=n)) for n in less]
    least = max(_LEAST_TOKENS, longest_sample(c))
    steps = (1024 * n for n in (32, 24, 20, 16, 12, 8, 6, 4, 3, 2, 1))
    return [
        Change(f"--max-tokens-per-gpu {n}", str(now), c.with_values(max_tokens_per_gpu=n))
        for n in steps
        if least <= n < now
    ]


def workspace(c: Config) -> list[Change]:
    now = c.kernels.rl_kernel_workspace_mib
    if loss_head(c)[0].has_logits:
        if c.kernels.rlk_fast != "off" or c.kernels.selected_logprob_provider:
            return []
        return [Change("--rlk-fast auto", c.kernels.rlk_fast, c.with_values(rlk_fast="auto"))]
    less = [n for n in (1024, 512, 256, _LEAST_WORKSPACE_MIB) if n < now]
    return [
        Change(f"--rl-kernel-workspace-mib {n}", str(now), c.with_values(rl_kernel_workspace_mib=n))
        for n in less
    ]


def remainders(c: Config) -> list[Change]:
    """Returns main weights as remainders of 16 bits. A run resumes from checkpoints with either kind of main
    weights."""
    if c.megatron.use_precision_aware_optimizer or c.megatron.remainders_obstacle:
        return []
    on = c.with_values(use_precision_aware_optimizer=True)
    return [Change("--use-precision-aware-optimizer", "off", on)]


def recomputation(c: Config) -> list[Change]:
    now = c.megatron.overrides.get("recompute_granularity", "none")
    if now == "full":
        return []
    changed = c.with_values(overrides={**c.megatron.overrides, **_FULL_VALUES})
    return [Change(_FULL, str(now), changed)]


def inputs_on_host(c: Config) -> list[Change]:
    """Returns full recomputation with the inputs of layers on the host."""
    if c.megatron.cpu_offloading:
        return []
    changed = c.with_values(overrides={**c.megatron.overrides, **_FULL_VALUES}, cpu_offloading=True)
    full = c.megatron.overrides.get("recompute_granularity") == "full"
    return [Change("--cpu-offloading" if full else f"{_FULL} --cpu-offloading", "off", changed)]


def context_parallel(c: Config, shape: Shape) -> list[Change]:
    """Returns changes with which more ranks share each sequence, and micro-batches that still hold the longest."""
    m, now, found = c.megatron, micro_batch_tokens(c), []
    if m.overrides.get("transformer_impl") == "transformer_engine":
        return []
    if c.data.multimodal_keys or not c.data.use_dynamic_batch_size or now is None:
        return []
    for size in (2, 4, 8, 16, 32):
        ranks = size * m.tensor_model_parallel_size * m.pipeline_model_parallel_size
        if size <= m.context_parallel_size or c.world_size % ranks or shape.heads % size:
            continue
        changed = c.with_values(context_parallel_size=size)
        tokens = max(longest_sample(changed), _LEAST_TOKENS)
        if tokens < now:
            flag = f"--context-parallel-size {size} --max-tokens-per-gpu {tokens}"
            value = f"{m.context_parallel_size}, {c.data.max_tokens_per_gpu}"
            found.append(Change(flag, value, changed.with_values(max_tokens_per_gpu=tokens)))
    return found


def host_adam(c: Config) -> list[Change]:
    """Returns other shares of the optimizer on the host: larger, or smaller if the host is too small."""
    if not c.megatron.use_distributed_optimizer:
        on = c.with_values(use_distributed_optimizer=True)
        return [Change("--use-distributed-optimizer", "off", on)] if c.data_parallel_size > 1 else []
    now = c.megatron.optimizer_offload_fraction if c.megatron.optimizer_cpu_offload else 0.0
    found = []
    for tenth in range(11):
        part = tenth / 10
        changed = c.with_values(optimizer_cpu_offload=part > 0, optimizer_offload_fraction=part or 1.0)
        flag = f"--optimizer-cpu-offload --optimizer-offload-fraction {part:g}"
        found.append(
            (abs(part - now), Change(flag if part else "--no-optimizer-cpu-offload", f"{now:g}", changed))
        )
    return [change for distance, change in sorted(found, key=lambda pair: pair[0]) if distance > 1e-6]


def engine_share(c: Config) -> list[Change]:
    """Returns other shares of the card for the engine: smaller, or larger if the engine's weights do not fit."""
    facts = c.engine.engine_facts
    if not c.num_engines or facts.cache_bytes:
        return []
    shares = sorted(
        (n / 20 for n in range(round(20 * _LEAST_SHARE), 19)),
        key=lambda share: abs(share - facts.memory_share),
    )
    return [
        Change(
            f"{facts.flag('memory_share')} {share:g}",
            f"{facts.memory_share:g}",
            c.with_values(engine_facts=dataclasses.replace(facts, memory_share=share)),
        )
        for share in shares
        if abs(share - facts.memory_share) > 1e-6
    ]


def engines_per_gpu(c: Config) -> list[Change]:
    """Returns smaller numbers of engines that share a GPU."""
    now = c.cluster.rollout_engines_per_gpu
    return [
        Change(f"--rollout-engines-per-gpu {count}", str(now), c.with_values(rollout_engines_per_gpu=count))
        for count in range(now - 1, 0, -1)
    ]


def offloading(c: Config) -> list[Change]:
    """Returns the change that moves all of the trainer's state off a shared card."""
    parts = c.cluster.offload_train_parts
    if not c.cluster.colocate or (c.cluster.offload_train is not False and parts is None):
        return []
    now = "--no-offload-train" if c.cluster.offload_train is False else f"only {' '.join(parts or ())}"
    return [Change("--offload-train", now, c.with_values(offload_train=True, offload_train_parts=None))]


def tensor_parallel(c: Config, shape: Shape) -> list[Change]:
    """Returns changes with which more ranks share each layer."""
    m, found = c.megatron, []
    for size in (2, 4, 8):
        ranks = size * m.pipeline_model_parallel_size * m.context_parallel_size
        fits = shape.groups % size == 0 and c.world_size % ranks == 0
        if m.tensor_model_parallel_size < size <= c.cluster.num_gpus_per_node and fits:
            changed = c.with_values(
                tensor_model_parallel_size=size,
                sequence_parallel=True,
                expert_tensor_parallel_size=m.expert_tensor_parallel,
            )
            flag = f"--tensor-model-parallel-size {size} --sequence-parallel"
            found.append(Change(flag, str(m.tensor_model_parallel_size), changed))
    return found


def saves(c: Config) -> list[Change]:
    if c.checkpoint.save is None or not c.checkpoint.async_save:
        return []
    return [Change("--no-async-save", "--async-save", c.with_values(async_save=False))]


def channels(c: Config) -> list[Change]:
    """Returns the channel that sends weights without shared memory."""
    now = c.weight_update.update_weight_transport
    if not CHANNELS[now].copies or not c.num_engines or c.weight_update.weight_dir is not None:
        return []
    gpus = "shared" if c.cluster.colocate else "apart"
    other = next(name for name, channel in CHANNELS.items() if channel.gpus == gpus)
    if CHANNELS[other].collective and c.cluster.rollout_engines_per_gpu > 1:
        return []
    return [Change(f"--update-weight-transport {other}", now, c.with_values(update_weight_transport=other))]


def gradient_sums(c: Config) -> list[Change]:
    """Returns sums of gradients in bfloat16, alone and with remainders: without remainders, the optimizer's step copies
    all gradients to float32.

    This change is the last, because it changes the results of a run. Each sum over micro-batches and ranks is rounded
    to bfloat16, which has 8 significant bits, so a small gradient that is added to a large sum can be lost.
    """
    changed = c.with_values(overrides={**c.megatron.overrides, "grad_reduce_in_fp32": False})
    if grad_bytes(changed) >= grad_bytes(c):
        return []
    flag = "--grad-reduce-in-bf16"
    both = [Change(f"{flag} {one.flag}", "off", one.config) for one in remainders(changed)]
    return [Change(flag, "off", changed), *both]
