"""The columns of a trainer rank: a mapping that tracks the stage of a step and the columns that must exist then.

    sent -> device -> scored -> advantages        (`slime.data.columns.STAGES`)

`slime.data.train_data` makes one RankData per data-parallel rank, the trainer adds columns, and hooks get the RankData
as a dict. Each column is a list with one entry per sample. Other keys hold the schedule of the rank's micro-batches.

Shapes: sample i has R_i response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algo import mismatch
from slime.algo.importance import sequence_mean
from slime.config.schema import Config
from slime.data.columns import COLUMNS, STAGES, Stage, present, reported


class RankData(dict[str, Any]):
    """Typed access to the data of a rank. `stage` is the last stage that is complete."""

    stage: Stage = "sent"

    @property
    def samples(self) -> int:
        """Returns the number of samples."""
        return len(self["tokens"])

    @property
    def response_lengths(self) -> list[int]:
        lengths: list[int] = self["response_lengths"]
        return lengths

    @property
    def micro_batches(self) -> list[list[int]]:
        """Returns the samples per micro-batch, for every optimizer step in order."""
        batches: list[list[int]] = self["micro_batch_indices"]
        return batches

    @property
    def steps(self) -> Iterator[list[list[int]]]:
        """Yields the micro-batches per optimizer step."""
        first = 0
        for count in self.step_sizes:
            yield self.micro_batches[first : first + count]
            first += count

    @property
    def step_sizes(self) -> list[int]:
        """Returns the number of micro-batches per optimizer step."""
        sizes: list[int] = self["num_microbatches"]
        return sizes

    @property
    def counted_micro_batches(self) -> int:
        """Returns the number of a held-out set's micro-batches that count. These are the first micro-batches."""
        count: int = self["counted_micro_batches"]
        return count

    @property
    def global_batch_sizes(self) -> list[int]:
        """Returns the number of rollouts per optimizer step, over all ranks."""
        sizes: list[int] = self["global_batch_sizes"]
        return sizes

    @property
    def normalisers(self) -> list[float]:
        """Returns the last factor of `loss_denominators` per optimizer step: the number of rollouts or tokens over all
        ranks."""
        values: list[float] = self["normalisers"]
        return values

    def tensors(self, column: str) -> list[Tensor]:
        """Returns a column of kind response: one tensor [R_i] per sample."""
        values: list[Tensor] = self[column]
        return values

    def fill(self, column: str, of_sample: Mapping[int, Tensor]) -> None:
        """Sets a column from its entries by sample. Every sample must have an entry with one value per response
        token."""
        values = [of_sample[i] for i in range(self.samples)]
        assert [len(x) for x in values] == self.response_lengths, f"{column} has one value per response token"
        self[column] = values

    def filled(self, columns: Iterable[str]) -> RankData:
        """Returns `columns` on the host for other ranks, with each sample's index in the rollout."""
        found = RankData(partition=self["partition"])
        for name in columns:
            lengths = [len(values) for values in self[name]]
            found[name] = list(torch.cat(self[name]).cpu().split(lengths))  # in one copy
        return found

    def receive(self, parts: Iterable[RankData], device: torch.device) -> None:
        """Sets the columns that other ranks have filled for the samples of this rank."""
        index = {of_rollout: i for i, of_rollout in enumerate(self["partition"])}
        found: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for part in parts:
            for name in part.keys() - {"partition"}:
                found[name] |= {
                    index[of_rollout]: values
                    for of_rollout, values in zip(part["partition"], part[name], strict=True)
                    if of_rollout in index
                }
        for name, of_sample in found.items():
            self.fill(name, of_sample)
            self[name] = list(torch.cat(self[name]).to(device).split(self.response_lengths))

    def reach(self, stage: Stage, needed: Iterable[str] = (), reader: str = "") -> None:
        """Completes a stage. Raises ValueError if a column that `reader` needs is missing."""
        assert STAGES.index(stage) >= STAGES.index(self.stage), f"{stage} comes before {self.stage}"
        self.stage = stage
        if missing := sorted(name for name in needed if name not in self):
            raise ValueError(
                f"{reader} must have the columns {', '.join(missing)}, got {', '.join(sorted(self))}; something before "
                f"the stage {stage} has to fill them"
            )

    def list_stage_columns(self, stage: Stage) -> list[str]:
        """Returns the columns that this stage has filled."""
        return [name for name in self if name in COLUMNS and COLUMNS[name].stage == stage]

    def to_device(self, device: torch.device, *, per_token: bool, length: int | None = None) -> None:
        """Moves the tensors with one number per response token to `device`, and adds the denominator of every token in
        the loss. The packer reads the other tensors on the host.

        The denominator is `max(rollout_mask_sum, 1) * global_batch_size`, or with `per_token` the number of the step's
        tokens. `length`, from --use-dr-grpo, replaces every rollout's mask sum. Data that were trained before start at
        the first stage again.
        """
        self.stage = "sent"
        for name in [column.name for column in present(self, "response") if column.to_tensor is None]:
            joined = torch.cat(self[name]).to(device)  # one copy, because every copy waits for the device
            self[name] = list(joined.split([len(tensor) for tensor in self[name]]))
        self["normalisers"] = self["global_token_counts"] if per_token else self.global_batch_sizes
        denominators: dict[int, Tensor] = {}
        for step, normaliser in zip(self.steps, self.normalisers, strict=True):
            for i in (i for samples in step for i in samples):
                of_rollout = 1.0 if per_token else max(length or self["rollout_mask_sums"][i], 1.0)
                denominators[i] = torch.full_like(
                    self["loss_masks"][i], of_rollout * normaliser, dtype=torch.float32
                )
        self["loss_denominators"] = [denominators.get(i) for i in range(self.samples)]
        self.reach("device")


def mark_saved_samples(ranks: Iterable[RankData], indices: Iterable[int]) -> None:
    """Adds the column `kept` to every rank's data. `indices` are the indices of the samples that the run keeps."""
    kept = set(indices)
    for data in ranks:
        data["kept"] = [index in kept for index in data["partition"]]


def rollout_means(data: RankData, config: Config, group: dist.ProcessGroup) -> dict[str, float]:
    """Returns `rollout/{column}`: means over the samples on the ranks of `group`. For a per-token column, a sample
    contributes the mean over its trained tokens. --get-mismatch-metrics adds `rollout/mismatch_{name}`. Collective."""
    count, mask = data.samples, torch.cat(data.tensors("loss_masks"))
    lengths = torch.tensor([len(m) for m in data.tensors("loss_masks")])
    sample_of_row = torch.repeat_interleave(torch.arange(count), lengths).to(mask.device)
    sums = {
        name: sequence_mean(torch.cat(data[name]).double(), mask, sample_of_row, count).sum()
        for name in reported(data, config, "response")
    }
    differs = torch.zeros(0, dtype=torch.float64, device=mask.device)
    if config.off_policy.get_mismatch_metrics:
        old, rollout = (torch.cat(data[name]) for name in ("old_log_probs", "rollout_log_probs"))
        differs = mismatch.sums(old, rollout, mask, sample_of_row, count)
    plain = {name: float(sum(data[name])) for name in reported(data, config, "sample")}
    on_host = torch.tensor([*plain.values(), count], dtype=torch.float64).to(mask.device)
    total = torch.cat([differs, *(x[None] for x in sums.values()), on_host])
    dist.all_reduce(total, group=group)
    *found, samples = total.tolist()
    compared, found = found[: len(differs)], found[len(differs) :]
    means = {f"rollout/{name}": x / samples for name, x in zip([*sums, *plain], found, strict=True)}
    if compared:
        means |= {f"rollout/mismatch_{name}": x for name, x in mismatch.figures(compared).items()}
    return means
