"""Routing replay: the trainer sends tokens to experts that were chosen earlier, by the engine while it sampled
(--use-rollout-routing-replay) or by the trainer's pass for old log-probs (--use-routing-replay).

    Replay.attach -> MicroBatch.routing -> PackedLayout.routing -> DecoderLayer -> LayerRouting.get_replay_topk

Only the choice is replayed. The weights of a token's experts are the router's own probabilities, so the gradient
reaches the router as usual (2510.11370). The record belongs to the micro-batch, not to the model. So a layer that is
recomputed in the backward, after other micro-batches' forward, finds its own record.

Shapes: n rows of this rank (or of its sequence-parallel part), L layers of the model, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from slime.config import Config
from slime.data.packing import MicroBatch
from slime.data.routed_experts import COLUMN, OPEN
from slime.megatron_backend.parallel import ParallelInfo
from slime.tracking.metrics import EXPERTS_DIFFER

OwnTopk = Callable[..., tuple[Tensor, Tensor]]


class Routing:
    """The routing of a micro-batch in a pass. `ids`: int16 [n, L, K] of `slime.data.routed_experts`, or None if the
    routers choose.

    The pass fills these dicts, whose keys are layer numbers from 0. `chosen`: the router's own choice for each layer of
    this stage, int16 [n, K], if `records`. `compared`: number of tokens whose experts were replayed. `differing`:
    number of replayed tokens for which the router would have chosen other experts.
    """

    def __init__(self, ids: Tensor | None = None, *, records: bool = False) -> None:
        self.ids, self.records = ids, records
        self.chosen: dict[int, Tensor] = {}
        self.differing: dict[int, Tensor] = {}
        self.compared: dict[int, Tensor] = {}

    def get_layer(self, number: int) -> LayerRouting:
        """Returns the routing of a layer. `number` counts from 0 over the whole model."""
        return LayerRouting(self, number)


class LayerRouting:
    """The object that Megatron's router gets as its `router_replay`."""

    def __init__(self, routing: Routing, layer: int) -> None:
        self._routing, self._layer = routing, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: OwnTopk,
    ) -> tuple[Tensor, Tensor]:
        """Maps scores [n, E] to scores and ids [n, K] of the experts to use, differentiable in the scores.

        The experts are sorted by descending score, as in the router. So if engine and router choose the same experts,
        the result is bitwise equal to the result without a replay.
        """
        routing, layer = self._routing, self._layer
        values, mine = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routing.records:
            routing.chosen[layer] = mine.to(torch.int16)
        if routing.ids is None:
            return values, mine
        if len(routing.ids) != len(scores):
            raise ValueError(f"routed experts must have {len(scores)} rows, got {len(routing.ids)}")
        theirs = routing.ids[:, layer].long()
        compared = theirs[:, :1] != OPEN
        ids = torch.where(compared, theirs, mine)
        order = scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
        # Kept per layer and not added up, because a recomputed layer reports the same numbers again.
        other = (ids.sort(1).values != mine.sort(1).values).any(1)
        routing.differing[layer], routing.compared[layer] = other.sum(), compared.sum()
        return scores.gather(1, ids), ids


class Replay:
    """The replay of a trainer rank. Keeps the trainer's own record from the log-prob pass to the training pass."""

    def __init__(self, config: Config, info: ParallelInfo) -> None:
        self._info = info
        self.from_engine: bool = config.off_policy.use_rollout_routing_replay
        self.from_trainer: bool = config.off_policy.use_routing_replay and not self.from_engine
        self._cuts = config.megatron.sequence_parallel and info.tp_size > 1
        self._recorded: dict[tuple[int, ...], dict[int, Tensor]] = {}
        self._step: list[tuple[dict[int, Tensor], dict[int, Tensor]]] = []

    def attach(self, batch: MicroBatch, *, training: bool) -> None:
        """Sets the routing of a packed micro-batch, for a training pass or for the earlier pass for old log-probs."""
        if self.from_engine:
            batch.routing = Routing(self._own_rows(batch.of_rows[COLUMN]))
        elif self.from_trainer and training:
            batch.routing = Routing(self._ids(batch.samples))
        elif self.from_trainer:
            batch.routing = Routing(records=True)
            self._recorded[tuple(batch.samples)] = batch.routing.chosen  # filled while the layers run
        if training and batch.routing is not None:
            self._step.append((batch.routing.differing, batch.routing.compared))  # without the rows

    def forget(self) -> None:
        """Drops the record after the last step of a rollout, because the next rollout has other micro-batches."""
        self._recorded.clear()

    def metrics(self) -> dict[str, float]:
        """Returns the share of the step's (token, layer) pairs whose router would have chosen other experts. Collective
        over all ranks, because each rank has different tokens or layers. Returns {} without replay."""
        if not (self.from_engine or self.from_trainer):
            return {}
        counts = torch.zeros(2, dtype=torch.float64, device=self._info.device)
        if layers := [(differing[i], compared[i]) for differing, compared in self._step for i in compared]:
            counts += torch.stack([torch.stack(of_layers) for of_layers in zip(*layers, strict=True)]).sum(1)
        self._step.clear()
        dist.all_reduce(counts)
        differing, compared = counts.tolist()
        return {EXPERTS_DIFFER: differing / max(compared, 1.0)}

    def _own_rows(self, ids: Tensor) -> Tensor:
        """Returns this rank's rows. With sequence parallelism, each tensor-parallel rank has one run of the packed
        rows."""
        return ids.chunk(self._info.tp_size)[self._info.tp_rank] if self._cuts else ids

    def _ids(self, samples: list[int]) -> Tensor | None:
        """Returns the trainer's record of a micro-batch, or None if this stage has no layer with experts. Entries
        for other stages' layers are never read."""
        if tuple(samples) not in self._recorded:
            raise ValueError(
                f"--use-routing-replay must train the micro-batches of its log-prob pass, got samples {samples}"
            )
        chosen = self._recorded[tuple(samples)]
        if not chosen:
            return None
        rows, topk = next(iter(chosen.values())).shape
        ids = torch.full((rows, max(chosen) + 1, topk), OPEN, dtype=torch.int16, device=self._info.device)
        for layer, of_layer in chosen.items():
            ids[:, layer] = of_layer
        return ids
