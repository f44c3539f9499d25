"""Implements --rlk-consistency: compares a rollout's trainer log-probs with the engine's, per token, on every
rank.

    rollout's log-probs finite? -> [optimizer steps] -> comparable samples -> figures over all ranks -> strict: stop

The trainer's log-probs belong to the policy before the rollout's updates. They are `data["log_probs"]` if an extra pass
computed them (then the figures come before training), otherwise the log-probs of the first optimizer step. The audit
computes no log-probs. Tokens that cannot be compared are counted by reason and excluded from every average. This module
owns audit.jsonl and the saved batch of a stopped run.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.contract import TRAIN_ROLLOUT
from slime.algo.consistency import TokenSums, figures, order_statistics, percentile_ranks, token_sums
from slime.algo.losses import loss_for
from slime.config import Config
from slime.data import columns, routed_experts, top_tokens
from slime.data.packing import MicroBatch
from slime.data.tokenizer import tokenizer_fingerprint
from slime.megatron_backend.bitwise.cause import why_bits_differ
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.pipeline import tensors_from_last_stage
from slime.rollout import facts as rollout_facts
from slime.rollout.debug_data import save_debug_rollout_data
from slime.tracking.timers import Timers
from slime.types import Sample, TrainData

DIFFERING = "rl_kernel/bitwise/differing"
"""Metric: number of compared tokens in a rollout whose log-probs have different bits in the trainer and in the
engine."""


@dataclass(frozen=True)
class AuditedToken:
    """A token of a response. `position` counts response tokens from 0. `trainer` and `rollout` are log-probs in
    nats."""

    sample: int | None
    position: int
    token_id: int
    trainer: float | None
    rollout: float

    @property
    def distance(self) -> float:
        return abs(self.trainer - self.rollout) if self.trainer is not None else 0.0

    def __str__(self) -> str:
        seen = f"rollout {self.rollout:.7g}"
        if self.trainer is not None:
            seen = f"trainer {self.trainer:.7g}, {seen}"
        return f"position {self.position} of sample {self.sample} (token {self.token_id}: {seen})"


@dataclass(frozen=True)
class _Part:
    """The result of a data-parallel rank. All other ranks receive it as plain values."""

    sums: TokenSums
    reasons: Counter[str]
    worst: AuditedToken | None
    fault: AuditedToken | None
    differing: AuditedToken | None
    """The first token whose bits differ, with --rlk-bitwise."""


class Audit:
    """The audit of a trainer rank. Every rank calls `watch` once per rollout and `add` once per micro-batch."""

    def __init__(self, config: Config, info: ParallelInfo, timers: Timers, temperature: float) -> None:
        self.config, self.info, self.timers = config, info, timers
        self.on = config.kernels.rlk_consistency != "off"
        self.mine = {
            "temperature": temperature,
            "top_p": 1.0,  # the trainer's softmax is over the whole vocabulary
            "top_k": -1,
            "sampling": {},
            "dtype": config.megatron.params_dtype,
            "tokenizer": tokenizer_fingerprint(config.rollout.hf_checkpoint) if self.on else None,
        }
        self.found: dict[int, Tensor] = {}

    def watch(
        self, rollout_id: int, data: TrainData, metrics: dict[str, float]
    ) -> AbstractContextManager[None]:
        """Returns a context for a rollout's optimizer steps. Adds consistency/* to `metrics`. Collective.

        Raises ValueError if the rollout has no log-probs, or if an active token's log-prob is not finite on either
        side. Raises RuntimeError in strict mode if a comparable token exceeds the tolerance, or if no token is
        comparable. The error names the token and the file of the batch, which is saved for --load-debug-rollout-data.
        """
        return self._watch(rollout_id, data, metrics) if self.on else nullcontext()

    def wants(self, data: TrainData, step_id: int) -> bool:
        """Returns whether the audit needs the log-probs of this step: they belong to the policy before any update, and
        are still missing."""
        return self.on and step_id == 0 and "log_probs" not in data

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None:
        """Adds the detached log-probs [R] of a micro-batch of a step for which `wants` is True."""
        parts = batch.split(log_probs, data["response_lengths"])
        self.found |= zip(batch.samples, parts, strict=True)

    @contextmanager
    def _watch(self, rollout_id: int, data: TrainData, metrics: dict[str, float]) -> Iterator[None]:
        before = "log_probs" in data
        self.found = dict(enumerate(data["log_probs"])) if before else {}
        with self.timers.measure("consistency"):
            if "rollout_log_probs" not in data:
                raise ValueError(
                    "--rlk-consistency must be given rollouts with log-probs, got none in rollout "
                    f"{rollout_id}; keep the column rollout_log_probs, or use --rlk-consistency off"
                )
            if before:
                metrics |= self._report(rollout_id, data)
            else:
                self._stop_at_fault(rollout_id, data, self._gather(self._fault(data)))
        try:
            yield
        except FloatingPointError:
            self._share(data)
            if not before:  # report a log-prob that is not finite rather than the gradient norm
                self._stop_at_fault(rollout_id, data, self._gather(self._fault(data)))
            raise
        if not before:
            with self.timers.measure("consistency"):
                self._share(data)
                metrics |= self._report(rollout_id, data)
        self.found = {}

    def _share(self, data: TrainData) -> None:
        """Sends the last stage's log-probs to all stages of a pipeline. A loss from a hook has no log-probs."""
        first_step = data["micro_batch_indices"][: data["num_microbatches"][0]]
        seen = (
            []
            if loss_for(self.config.algorithm).objective is None
            else [i for batch in first_step for i in batch]
        )
        lengths = {i: data["response_lengths"][i] for i in seen}
        self.found = tensors_from_last_stage(self.info, self.found, lengths)

    def _report(self, rollout_id: int, data: TrainData) -> dict[str, float]:
        """Compares, reduces and writes. In strict mode, raises an error if the tolerance is exceeded."""
        trainer, rollout, part = self._compare(rollout_id, data)
        parts = self._gather(part)
        self._stop_at_fault(rollout_id, data, [p.fault for p in parts])
        reasons: Counter[str] = sum((p.reasons for p in parts), Counter())
        sums = sum((p.sums for p in parts), TokenSums())
        worst = max((p.worst for p in parts if p.worst), key=lambda token: token.distance, default=None)
        metrics = {"tokens": sums.tokens, "not_comparable_tokens": float(reasons.total())}
        if worst is not None:
            at = percentile_ranks(int(sums.tokens))
            percentiles = order_statistics((trainer - rollout).abs(), at, self._add_up)
            metrics |= figures(sums, percentiles, worst.distance)
        self._write(rollout_id, metrics, reasons, worst)
        of_bits: dict[str, float] = {}
        strict = self.config.kernels.rlk_consistency == "strict"
        if self.config.kernels.rlk_bitwise:
            first = next((p.differing for p in parts if p.differing), None)
            of_bits[DIFFERING] = sums.tokens - sums.bitwise_equal
            if strict:
                self._judge_bits(rollout_id, data, of_bits[DIFFERING], first, reasons)
        if strict:
            self._judge(rollout_id, data, worst, reasons)
        metrics |= {f"not_comparable/{reason}": float(tokens) for reason, tokens in reasons.items()}
        return {f"consistency/{name}": value for name, value in metrics.items()} | of_bits

    def _compare(self, rollout_id: int, data: TrainData) -> tuple[Tensor, Tensor, _Part]:
        """Returns the log-probs of this rank's comparable active tokens (the trainer's and the rollout's), and the
        rank's result."""
        lengths = data["response_lengths"]
        masks = list(torch.cat(data["loss_masks"]).to("cpu", torch.int32).split(lengths))
        reasons: Counter[str] = Counter()
        chosen = []
        for i, mask in enumerate(masks):
            active = int(mask.count_nonzero())
            reason = self._difference(rollout_id, data, i, mask)
            if active and reason is None:
                chosen.append(i)
            elif active and reason is not None:
                reasons[reason] += active
        device = self.info.device
        none = [torch.empty(0, device=device)]
        mask = torch.cat([data["loss_masks"][i] for i in chosen] or none) != 0
        trainer = torch.cat([self.found[i].float() for i in chosen] or none)[mask]
        rollout = torch.cat([data["rollout_log_probs"][i] for i in chosen] or none)[mask]
        low, high = self.config.algorithm.eps_clip, self.config.algorithm.eps_clip_high
        sums = token_sums(trainer, rollout, eps_clip=low, eps_clip_high=high)
        worst = differing = None
        if chosen:
            at = mask.nonzero()[:, 0]
            worst = self._token(data, chosen, int(at[(trainer - rollout).abs().argmax()]))
            unequal = (trainer.view(torch.int32) != rollout.view(torch.int32)).nonzero()[:, 0]
            if self.config.kernels.rlk_bitwise and len(unequal):
                differing = self._token(data, chosen, int(at[unequal[0]]))
        return trainer, rollout, _Part(sums, reasons, worst, self._fault(data), differing)

    def _difference(self, rollout_id: int, data: TrainData, i: int, mask: Tensor) -> str | None:
        """Returns why sample i cannot be compared, or None if it can."""
        mine = self.mine | {
            "weight_version": [rollout_id],  # version v is the weights after v rollouts
            "token_ids": rollout_facts.token_checksum(data["tokens"][i]),
            "mask": rollout_facts.mask_checksum(mask),
        }
        theirs = data[rollout_facts.COLUMN][i] if rollout_facts.COLUMN in data else None
        reason = rollout_facts.first_difference(theirs, mine)
        return "later_step" if reason is None and i not in self.found else reason

    def _fault(self, data: TrainData) -> AuditedToken | None:
        """Returns the first active token of this rank whose log-prob is not finite on either side."""
        for by_sample in (dict(enumerate(data["rollout_log_probs"])), self.found):
            samples = list(by_sample)
            values = torch.cat([by_sample[i] for i in samples]) if samples else torch.empty(0)
            bad = ~torch.isfinite(values)
            if samples and bad.any():
                bad &= torch.cat([data["loss_masks"][i] for i in samples]) != 0
                if bad.any():
                    return self._token(data, samples, int(bad.nonzero()[0]))
        return None

    def _token(self, data: TrainData, samples: list[int], flat: int) -> AuditedToken:
        """Returns the response token at index `flat` of the concatenated responses of `samples`."""
        ends = list(itertools.accumulate(data["response_lengths"][i] for i in samples))
        k = next(k for k, end in enumerate(ends) if flat < end)
        i, position = samples[k], flat - (ends[k - 1] if k else 0)
        response = data["tokens"][i][-data["response_lengths"][i] :]
        return AuditedToken(
            sample=data["sample_indices"][i] if "sample_indices" in data else i,
            position=position,
            token_id=int(response[position]),
            trainer=float(self.found[i][position]) if i in self.found else None,
            rollout=float(data["rollout_log_probs"][i][position]),
        )

    def _gather(self, mine: Any) -> list[Any]:
        parts = [None] * self.info.dp_size
        dist.all_gather_object(parts, mine, group=self.info.dp_group)
        return parts

    def _add_up(self, counts: Tensor) -> None:
        dist.all_reduce(counts, group=self.info.dp_group)

    def _stop_at_fault(self, rollout_id: int, data: TrainData, faults: list[AuditedToken | None]) -> None:
        fault = next((token for token in faults if token is not None), None)
        if fault is not None:
            raise ValueError(
                f"log-probs of active tokens must be finite, got {fault} in rollout {rollout_id}; "
                f"{self._saved(rollout_id, data)}"
            )

    def _judge(
        self, rollout_id: int, data: TrainData, worst: AuditedToken | None, reasons: Counter[str]
    ) -> None:
        dtype = self.config.megatron.params_dtype
        bound = TRAIN_ROLLOUT[dtype].absolute
        if worst is None and reasons:
            found = ", ".join(f"{reason}: {tokens}" for reason, tokens in reasons.most_common())
            raise RuntimeError(
                f"--rlk-consistency strict must have tokens to compare, got none in rollout {rollout_id} ({found} "
                f"tokens); use --rlk-consistency audit, or remove the reason; {self._saved(rollout_id, data)}"
            )
        if worst is not None and worst.distance > bound:
            raise RuntimeError(
                f"--rlk-consistency strict must find log-probs that agree to {bound:.3g} nats ({dtype}), got "
                f"{worst.distance:.3g} at {worst} in rollout {rollout_id}; {self._saved(rollout_id, data)}"
            )

    def _judge_bits(
        self,
        rollout_id: int,
        data: TrainData,
        count: float,
        differing: AuditedToken | None,
        reasons: Counter[str],
    ) -> None:
        """Raises RuntimeError for the first bit that differs, and for a token that was not compared. Collective."""
        if differing is None and not reasons:
            return
        if differing is None:
            found = ", ".join(f"{reason}: {tokens}" for reason, tokens in reasons.most_common())
            raise RuntimeError(
                f"--rlk-bitwise must compare every token, got some that differ in {found} in rollout {rollout_id}; "
                f"remove the reason, or leave --rlk-bitwise out; {self._saved(rollout_id, data)}"
            )
        raise RuntimeError(
            f"--rlk-bitwise must find the same bits, got {count:.0f} log-probs that differ, the first at {differing} "
            f"in rollout {rollout_id}; {why_bits_differ(self.config, self.info.device)}; "
            f"{self._saved(rollout_id, data)}"
        )

    def _write(
        self, rollout_id: int, metrics: dict[str, float], reasons: Counter[str], worst: AuditedToken | None
    ) -> None:
        if self.info.rank != 0:
            return
        line = {
            "rollout_id": rollout_id,
            **metrics,
            "worst": worst and asdict(worst),
            "not_comparable": dict(reasons),
        }
        run_dir = self.config.logging.run_dir
        path = Path(run_dir) / "audit.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _saved(self, rollout_id: int, data: TrainData) -> str:
        """Saves all ranks' samples and returns the path. Collective. The file is complete when this method
        returns."""
        parts = self._gather(rebuild_samples(data, self.config.data.n_samples_per_prompt))
        template = rollout_facts.replay_template(self.config)
        path = template.format(rollout_id=rollout_id)
        if self.info.rank == 0:
            both = sorted(itertools.chain.from_iterable(parts), key=lambda pair: pair[0])
            known = [f for f in data.get(rollout_facts.COLUMN, []) if f is not None]
            shared = {name: known[0][name] for name in self.mine} if known else None
            save_debug_rollout_data(template, rollout_id, [[s for _, s in both]], facts=shared)
        dist.barrier()
        return f"the batch is saved, see it again with --load-debug-rollout-data {path}"


def rebuild_samples(data: TrainData, group_size: int) -> list[tuple[int, Sample]]:
    """Returns (index in the rollout, sample) for the samples of a rank's data, as the rollout made them, for a replay.

    Groups come from the rollout's facts. Without facts, `group_size` neighbours form a group.
    """
    out = []
    truncated = data.get("truncated", [0] * len(data["tokens"]))
    for i, tokens in enumerate(data["tokens"]):
        index = data["partition"][i]
        facts = data.get(rollout_facts.COLUMN, {i: None})[i] or {}
        mask = data["loss_masks"][i].tolist()
        log_probs = data["rollout_log_probs"][i].tolist() if "rollout_log_probs" in data else None
        sample = Sample(
            index=data["sample_indices" if "sample_indices" in data else "partition"][i],
            group_index=facts.get("group_index", index // group_size),
            rollout_id=data["rollout_ids"][i],
            tokens=tokens.tolist(),
            response_length=data["response_lengths"][i],
            loss_mask=mask,
            remove_sample=not any(mask),
            rollout_log_probs=log_probs,
            weight_versions=facts.get("weight_version", []),
            reward=data["raw_reward" if "raw_reward" in data else "rewards"][i],
            status=Sample.Status.TRUNCATED if truncated[i] else Sample.Status.COMPLETED,
            prompt=data["prompt"][i] if "prompt" in data else "",
            rollout_routed_experts=routed_experts.read_sample(data, i),
            **top_tokens.read_sample_fields(data, i),
            columns=columns.read_engine_columns(data, i),
            metadata=data["metadata"][i] if "metadata" in data else {},
        )
        out.append((index, sample))
    return out
