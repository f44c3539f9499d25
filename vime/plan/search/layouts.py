"""The layouts of a number of GPUs: which exist for a model, and the flags that make them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from slime.config import Config
from slime.hardware import Hardware
from vime.plan.search.step_time import GpuLayout, Model

SIZES = (1, 2, 4, 8)
TOKENS = (32768, 16384, 8192, 4096)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LONG = 16384
"""Tokens of a sample from which context parallelism is tried."""
ALONE = 0.85
"""Part of a GPU's memory that an engine may take while the trainer's state is elsewhere."""
TRAINER_SHARES = (0.25, 0.5, 0.75)
"""Parts of the GPUs that train in a disaggregated layout."""


@dataclass(frozen=True)
class Grid:
    """The values that a search tries for the memory of a layout."""

    host_adam: tuple[float, ...]
    """Parts of Adam on the host."""
    shares: tuple[float, ...]
    """Parts of a GPU's memory that an engine may take together with the trainer's state."""
    offloads: tuple[bool | None, ...]
    """Values of `GpuLayout.offload` if trainer and engines share GPUs."""


COARSE = Grid((0.0, 0.25, 1.0), (0.6, 0.45, 0.3), (False, True))
FINE = Grid(tuple(n / 10 for n in range(11)), (0.6, 0.45, 0.35, 0.3, 0.25), (None,))
"""The values for models that barely fit. A search tries them if no planned layout of `COARSE` fits."""


def list_layouts(
    model: Model,
    gpu: Hardware,
    gpus: int,
    longest: int,
    ahead: int,
    kinds: tuple[bool, ...] = (False,),
    grid: Grid = COARSE,
) -> Iterator[GpuLayout]:
    """Yields every layout of `gpus` GPUs that the model's heads, layers and experts allow. `longest` is the number of
    tokens of the longest sample. `ahead` is the largest number of steps that generation may be ahead. `kinds` has the
    kinds of main weights on a GPU: True is remainders of 16 bits."""
    for trainer, colocated in _trainer_sizes(gpus):
        rest = trainer if colocated else gpus - trainer
        for size in SIZES:
            if rest % size or not _engine_fits(model, gpu, size):
                continue
            for tp, pp, cp, ep in _splits(model, gpu, trainer, longest):
                base = GpuLayout(trainer, rest // size, size, colocated, tp, pp, cp, ep)
                for layout in _variants(base, longest, 0 if colocated else ahead, grid):
                    for kind in kinds if layout.host_adam < 1 else (False,):
                        yield dataclasses.replace(layout, remainders=kind) if kind else layout


def _trainer_sizes(gpus: int) -> Iterator[tuple[int, bool]]:
    """Yields (trainer GPUs, whether engines share them)."""
    yield gpus, True
    for trainer in sorted({round(gpus * share) for share in TRAINER_SHARES}):
        if 0 < trainer < gpus:
            yield trainer, False


def _engine_fits(model: Model, gpu: Hardware, size: int) -> bool:
    """Returns whether an engine of `size` GPUs stays in one node and divides the heads of keys and values."""
    return size <= gpu.gpus_per_node and (size <= model.shape.groups or model.shape.groups == 1)


def _splits(model: Model, gpu: Hardware, ranks: int, longest: int) -> Iterator[tuple[int, int, int, int]]:
    shape = model.shape
    for tp in SIZES:
        if tp > gpu.gpus_per_node or shape.groups % tp:
            continue
        for pp in SIZES:
            if shape.layers % pp:
                continue
            for cp in SIZES if longest >= LONG else (1,):
                if ranks % (tp * pp * cp) or (cp > 1 and shape.groups % (tp * cp)):
                    continue
                of_stage = ranks // pp
                for ep in (1, 2, 4, 8, 16, 32) if shape.experts else (1,):
                    if of_stage % ep == 0 and shape.experts % ep == 0:
                        yield tp, pp, cp, ep


def _variants(base: GpuLayout, longest: int, ahead: int, grid: Grid) -> Iterator[GpuLayout]:
    for micro in TOKENS:
        if micro * base.cp < min(longest, TOKENS[0]):
            continue
        for offload in grid.offloads if base.colocated else (False,):
            shares = grid.shares if base.colocated and not offload else (ALONE,)
            choices = itertools.product((False, True), grid.host_adam, sorted({0, ahead}), shares)
            for recompute, host_adam, steps, share in choices:
                yield dataclasses.replace(
                    base,
                    micro_tokens=micro,
                    recompute=recompute,
                    offload=offload,
                    host_adam=host_adam,
                    ahead=steps,
                    share=share,
                )


def with_layout(c: Config, gpu: Hardware, layout: GpuLayout) -> Config:
    """Returns the configuration of a run in this layout, from which the plan computes the memory."""
    per_node = min(gpu.gpus_per_node, layout.trainer_gpus)
    overrides = {name: value for name, value in c.megatron.overrides.items() if name not in FULL}
    facts = dataclasses.replace(c.engine.engine_facts, memory_share=layout.share)
    return c.with_values(
        engine_facts=facts,
        actor_num_nodes=-(-layout.trainer_gpus // per_node),
        actor_num_gpus_per_node=per_node,
        num_gpus_per_node=gpu.gpus_per_node,
        colocate=layout.colocated,
        rollout_num_gpus=layout.engines * layout.engine_gpus,
        rollout_num_gpus_per_engine=layout.engine_gpus,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=layout.micro_tokens,
        overrides=overrides | (FULL if layout.recompute else {}),
        offload_train=layout.offload,
        offload_train_parts=None,
        optimizer_cpu_offload=layout.host_adam > 0,
        optimizer_offload_fraction=layout.host_adam or 1.0,
        use_precision_aware_optimizer=layout.remainders,
    )


def find_remainders(c: Config) -> tuple[bool, ...]:
    """Returns the kinds of main weights that layouts of this run may have: True is remainders of 16 bits."""
    if c.with_values(optimizer_cpu_offload=False).megatron.remainders_obstacle:
        return (False,)
    return (True,) if c.megatron.use_precision_aware_optimizer else (False, True)


def spell(gpu: Hardware, layout: GpuLayout) -> str:
    """Returns the flags of the layout, as typed."""
    per_node = min(gpu.gpus_per_node, layout.trainer_gpus)
    words = (
        ["--colocate"] if layout.colocated else [f"--rollout-num-gpus {layout.engines * layout.engine_gpus}"]
    )
    words += [
        f"--actor-num-nodes {-(-layout.trainer_gpus // per_node)} --actor-num-gpus-per-node {per_node}",
        f"--rollout-num-gpus-per-engine {layout.engine_gpus}",
        f"--vllm-gpu-memory-utilization {layout.share:g} --max-tokens-per-gpu {layout.micro_tokens}",
    ]
    sizes = {
        "tensor-model": layout.tp,
        "pipeline-model": layout.pp,
        "context": layout.cp,
        "expert-model": layout.ep,
    }
    words += [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
    words += ["--sequence-parallel"] * (layout.tp > 1) + ["--expert-tensor-parallel-size 1"] * (layout.ep > 1)
    if layout.recompute:
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    words += ["--offload-train"] * (layout.offload is True)
    if layout.host_adam:
        words.append(f"--optimizer-cpu-offload --optimizer-offload-fraction {layout.host_adam:g}")
    words += ["--use-precision-aware-optimizer"] * layout.remainders
    words += [f"--max-staleness {layout.ahead}"] * (layout.ahead > 0)
    return " ".join(words)
