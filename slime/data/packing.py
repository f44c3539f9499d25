"""Assigns each sample to an optimizer step, a data-parallel rank and a micro-batch, and packs a micro-batch into one
row of tokens.

The schedule follows slime's rules (SLIME contract, "Micro-batches"). Pure functions of lengths.
Shapes: the model computes P rows, and the micro-batch has R response tokens. This rank predicts r of them.
"""

from __future__ import annotations

import heapq
import itertools
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.config.problems import require_value
from slime.config.schema import read_section
from slime.config.sections.data import DataConfig
from slime.config.sections.megatron import MegatronConfig
from slime.data.columns import COLUMNS
from slime.data.media.packing import PackedImages, pack_images
from slime.data.media.tower_cache import TowerCache
from slime.data.sharing.prompts import sample_images, shared_prompts
from slime.data.token_slice import TokenSlice, token_slice
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.models.vision import Vision
from slime.plan.flops import ForwardFlops
from slime.plan.stages import micro_batch_group
from slime.system.uploads import upload
from slime.types import TrainData


@dataclass(frozen=True)
class Schedule:
    """Micro-batches of a rollout. `ranks[r][step][k]` lists the sample positions in micro-batch k for rank r and
    optimizer step `step`."""

    ranks: list[list[list[list[int]]]]
    step_samples: list[list[int]]
    global_batch_sizes: list[int]


def karmarkar_karp(costs: Sequence[float], k: int, *, equal_size: bool) -> list[list[int]]:
    """Splits positions 0..n-1 into k parts with near-equal cost sums (largest differencing method, Karmarkar and Karp
    1982). `equal_size` also makes the parts equally long and needs n % k == 0. Deterministic.
    """
    if equal_size and len(costs) % k:
        raise ValueError(
            f"number of items must be a multiple of the parts, got {len(costs)} items and {k} parts"
        )
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    width = k if equal_size else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for n, start in enumerate(range(0, len(order), width)):
        parts = [(float(costs[i]), [i]) for i in order[start : start + width]]
        parts += [(0.0, []) for _ in range(k - len(parts))]
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], n, parts))
    serial = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        # Join the heaviest part of a with the lightest of b, so that the sums differ as little as possible.
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(k)]


def _steps(rollout_ids: Sequence[int], data: DataConfig) -> list[list[int]]:
    """Returns the sample positions per optimizer step. A step has --global-batch-size rollouts, or its number of
    --global-batch-size-schedule, in order of appearance."""
    by_rollout: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_ids):
        by_rollout.setdefault(rollout, []).append(position)
    rollouts = list(by_rollout.values())
    sizes = _step_sizes(len(rollouts), data)
    ends = list(itertools.accumulate(sizes))
    return [
        [position for rollout in rollouts[end - size : end] for position in rollout]
        for size, end in zip(sizes, ends, strict=True)
    ]


def _step_sizes(rollouts: int, data: DataConfig) -> list[int]:
    """Returns the number of rollouts per optimizer step for a batch, whose number of rollouts a hook may have
    changed."""
    if (schedule := data.global_batch_size_schedule) is not None:
        if sum(schedule) != rollouts:
            raise ValueError(
                "--global-batch-size-schedule must cover the rollouts of a batch, got "
                f"{','.join(map(str, schedule))} with {rollouts} rollouts; use --variable-global-batch-size for "
                "batches of several sizes"
            )
        return schedule
    size = data.global_batch_size or rollouts
    count, rest = divmod(rollouts, size)
    if data.variable_global_batch_size and rest:
        return [size] * count + [rest]
    if count == 0:
        raise ValueError(
            f"--global-batch-size must not exceed the rollouts of one batch, got {size} "
            f"with {rollouts} rollouts; lower it or raise --rollout-batch-size"
        )
    return [size] * count


def _first_fit(positions: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    unused: list[int] = []
    for position in positions:
        for b, free in enumerate(unused):
            if lengths[position] <= free:
                bins[b].append(position)
                unused[b] -= lengths[position]
                break
        else:
            bins.append([position])
            unused.append(cap - lengths[position])
    return bins


def _round_up_bins(
    bins: list[list[int]], dp_size: int, group: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Halves the largest bins until their number is a multiple of the number of ranks times the group size of a virtual
    stage."""
    while len(bins) % (dp_size * group):
        splittable = [b for b in bins if len(b) > 1]
        if not splittable:
            total = sum(len(b) for b in bins)
            virtual = f" in groups of {group} micro-batches (virtual stages)" if group > 1 else ""
            raise ValueError(
                f"samples of one optimizer step must fill {dp_size} data-parallel ranks equally{virtual}, got {total}; "
                "raise --global-batch-size or --n-samples-per-prompt"
            )
        largest = max(splittable, key=lambda b: sum(lengths[i] for i in b))
        bins.remove(largest)
        bins += _halves(largest, lengths)
    return bins


def _halves(positions: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Returns two parts with near-equal sums. Neighbours may share a prompt, so they stay together if the balance is
    not worse."""
    sizes = [lengths[i] for i in positions]
    parts = [[positions[i] for i in part] for part in karmarkar_karp(sizes, 2, equal_size=False)]
    sums = list(itertools.accumulate(sizes))
    cut = min(range(len(sums) - 1), key=lambda i: max(sums[i], sums[-1] - sums[i]))
    if max(sums[cut], sums[-1] - sums[cut]) <= max(sum(lengths[i] for i in part) for part in parts):
        return [positions[: cut + 1], positions[cut + 1 :]]
    return parts


def choose_bins(data: DataConfig, context_parallel: int, lengths: Sequence[int]) -> list[list[int]]:
    """Returns micro-batches of the size that training uses, for a pass without optimizer steps. Their number is free,
    and the last micro-batch may be smaller."""
    positions = range(len(lengths))
    if not data.use_dynamic_batch_size:
        size = data.micro_batch_size
        return [list(positions[i : i + size]) for i in range(0, len(lengths), size)]
    return _first_fit(positions, lengths, require_value(data.max_tokens_per_gpu) * context_parallel)


def _bins(
    data: DataConfig,
    context_parallel: int,
    positions: list[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    dp_size: int,
    group: int,
) -> list[list[int]]:
    multiple = dp_size * group
    if not data.use_dynamic_batch_size:
        size = data.micro_batch_size
        if len(positions) % (size * multiple):
            virtual = " x micro-batches of a virtual stage" if group > 1 else ""
            raise ValueError(
                f"samples of one optimizer step must divide by --micro-batch-size x data-parallel ranks{virtual}, got "
                f"{len(positions)} samples, {size} x {dp_size}{f' x {group}' if group > 1 else ''}; change the sizes "
                "or use --use-dynamic-batch-size"
            )
        return [positions[i : i + size] for i in range(0, len(positions), size)]
    cap = require_value(data.max_tokens_per_gpu) * context_parallel
    if data.balance_by_flops:
        count = -(-sum(lengths[i] for i in positions) // cap)
        count = min(-(-count // multiple) * multiple, len(positions) // multiple * multiple)
        if count:
            parts = karmarkar_karp([costs[i] for i in positions], count, equal_size=False)
            return [[positions[i] for i in part] for part in parts]
    return _round_up_bins(_first_fit(positions, lengths, cap), dp_size, group, lengths)


def build_dp_schedule(
    args: Namespace,
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    dp_size: int,
    hf_config: Hf,
    response_lengths: Sequence[int] | None = None,
) -> Schedule:
    """Calls `plan_steps` with the sections in `args`. Plug-ins of slime call this function."""
    sections = read_section(DataConfig, args), read_section(MegatronConfig, args)
    return plan_steps(*sections, total_lengths, rollout_ids, dp_size, hf_config, response_lengths)


def plan_steps(
    data: DataConfig,
    megatron: MegatronConfig,
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    dp_size: int,
    hf_config: Hf,
    response_lengths: Sequence[int] | None = None,
) -> Schedule:
    """Plans the optimizer steps of a rollout.

    Every step has --global-batch-size rollouts (without the flag: every rollout) with all siblings. The last rollouts
    are dropped if they fill no step, or are a smaller step with --variable-global-batch-size. With
    --global-batch-size-schedule, each step has its own number of rollouts. With --use-dynamic-batch-size, the step's
    samples are packed first-fit under `max_tokens_per_gpu * context_parallel_size` tokens, and a longer sample gets its
    own micro-batch. The number of micro-batches is a multiple of `dp_size`, or of `dp_size * micro_batch_group` with
    virtual pipeline stages. Ranks take micro-batches by stride, or balanced by FLOPs with --balance-data
    (`ForwardFlops`). Without `response_lengths`, all tokens count as response tokens.
    """
    steps = _steps(rollout_ids, data)
    responses = total_lengths if response_lengths is None else response_lengths
    flops = ForwardFlops(hf_config)
    costs = [flops(n, r) for n, r in zip(total_lengths, responses, strict=True)]
    group = micro_batch_group(megatron, len(read_decoder(hf_config).layers))
    ranks: list[list[list[list[int]]]] = [[] for _ in range(dp_size)]
    for positions in steps:
        bins = _bins(data, megatron.context_parallel_size, positions, total_lengths, costs, dp_size, group)
        if data.balance_data:
            parts = karmarkar_karp([sum(costs[i] for i in b) for b in bins], dp_size, equal_size=True)
        else:
            parts = [list(range(r, len(bins), dp_size)) for r in range(dp_size)]
        for rank, part in enumerate(parts):
            ranks[rank].append([bins[i] for i in part])
    return Schedule(ranks, steps, [len({rollout_ids[i] for i in step}) for step in steps])


@dataclass
class MicroBatch:
    """A packed row of samples with the inputs of their loss. Every context-parallel rank has all data of the samples,
    and the model computes this rank's part of the tokens.

    Example:
        batch = pack(data, [0, 1], ["loss_masks", "advantages"], device="cpu")
        batch.tokens                     # [P] int64: the tokens of samples 0 and 1, then padding
        batch.columns["advantages"]      # [R] fp32: one number per response token
    """

    part: TokenSlice
    """The part of the row that this rank computes."""
    tokens: torch.Tensor
    """[P] int64: this rank's tokens, then padding."""
    rows: torch.Tensor
    """[r] int64: indices into `tokens`. The hidden state at such an index predicts a response token."""
    targets: torch.Tensor
    """[r] int64: the predicted response tokens."""
    mine: torch.Tensor | None
    """[r] int64: indices of the predicted tokens among all R response tokens. None if r = R."""
    sample_of_row: torch.Tensor
    """[R] int64: index into `samples` for each response token."""
    samples: list[int]
    """Positions of the samples in the rank's data."""
    columns: dict[str, torch.Tensor]
    """The requested columns with one number per response token, [R] per column."""
    of_rows: dict[str, torch.Tensor]
    """The ragged columns, such as the engine's experts, [P, ...] per column. Row i belongs to `tokens[i]`."""
    packed: torch.Tensor
    """[T] int64 on the host: the tokens of the whole row."""
    predicting: torch.Tensor
    """[R] int64 on the host: the index into `packed` that predicts each response token."""
    images: PackedImages | None = None
    """The images of this rank's tokens. None if no sample has an image."""
    routing: Any = None
    """Experts that the layers of this pass take, see `slime.megatron_backend.step.routing_replay`."""

    def split(self, per_token: torch.Tensor, response_lengths: list[int]) -> list[torch.Tensor]:
        """Splits [R] into one tensor per sample of the micro-batch."""
        return list(torch.split(per_token, [response_lengths[i] for i in self.samples]))

    def local(self, per_token: torch.Tensor) -> torch.Tensor:
        """Returns the part of a column [R] that belongs to `rows`, [r]."""
        return per_token if self.mine is None else per_token[self.mine]


def pack(
    data: TrainData,
    samples: list[int],
    columns: Sequence[str],
    *,
    device: torch.device | str,
    multiple: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    share_prompts: bool = False,
    vision: Vision | None = None,
    has_tower: bool = True,
    cache: TowerCache | None = None,
) -> MicroBatch:
    """Concatenates samples of a rank into a MicroBatch whose rows P are a multiple of `multiple`.

    With `share_prompts`, the model computes a prompt once for all samples that begin with it. This needs one
    context-parallel rank. `vision` is the model's vision tower, which a rank with `has_tower` has. `cache` has
    the outputs of frozen towers. `columns` are names of `slime.data.columns` with kind response or ragged, which `data`
    has.
    """
    lengths = [len(data["tokens"][i]) for i in samples]
    images = sample_images(data, samples, vision)
    prompts = shared_prompts(data, samples, columns, images) if share_prompts else ()
    part = token_slice(lengths, rank=cp_rank, size=cp_size, multiple=multiple, prompts=prompts)
    wanted = [COLUMNS[name] for name in columns]
    of_rows = {c.name: c.to_rows(data, samples, part) for c in wanted if c.to_rows is not None}
    packed = torch.cat([data["tokens"][i] for i in samples])
    tokens = torch.zeros(part.rows, dtype=torch.int64)
    tokens[: len(part.tokens)] = packed[part.tokens]
    ends = torch.tensor(lengths).cumsum(0)
    response = torch.tensor([data["response_lengths"][i] for i in samples])
    sample_of_row = torch.repeat_interleave(torch.arange(len(samples)), response)
    # The state at index end_s - response_s - 1 + j predicts response token j of sample s.
    first_row = torch.cat([torch.zeros(1, dtype=torch.int64), response.cumsum(0)[:-1]])
    offset = torch.arange(int(response.sum())) - first_row[sample_of_row]
    predicting = (ends - response - 1)[sample_of_row] + offset
    mine, rows = part.find_rows(predicting)
    packed_images = pack_images(images, vision, part.tokens, part.rows, has_tower=has_tower, cache=cache)
    return MicroBatch(
        part=part,
        tokens=upload(tokens, device),
        rows=upload(rows, device),
        targets=upload(packed[predicting[mine] + 1], device),
        mine=upload(mine, device) if cp_size > 1 else None,
        sample_of_row=upload(sample_of_row, device),
        samples=list(samples),
        columns={
            c.name: upload(torch.cat([data[c.name][i] for i in samples]), device)
            for c in wanted
            if c.kind == "response"
        },
        of_rows={name: upload(rows, device) for name, rows in of_rows.items()},
        packed=packed,
        predicting=predicting,
        images=None if packed_images is None else packed_images.to(device),
    )
