"""Log-probs of saved samples from the trainer's forward pass, on one rank, packed in several ways, without gradient."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor

from slime import operators
from slime.config import Config
from slime.data import columns, routed_experts
from slime.data.packing import MicroBatch, pack
from slime.megatron_backend.bitwise.install import adaptation
from slime.megatron_backend.checkpoint.weights import load_weights
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.step.heads import lm_head
from slime.megatron_backend.step.routing_replay import Replay
from slime.megatron_backend.step.scorers import compute_column, make_log_probs
from slime.models import read_decoder
from slime.types import Sample, TrainData

Layout = list[list[int]]
"""Micro-batches: indices in the list of samples, in packing order."""


def replay_log_probs(
    config: Config, weights: str, samples: list[Sample], layouts: dict[str, Layout]
) -> dict[str, list[Tensor]]:
    """Returns, for each layout, one fp32 tensor [response length] per sample, in nats at --rollout-temperature.

    `config` describes one rank. `weights` is an HF directory. With --use-rollout-routing-replay, tokens go to the
    experts in their samples. A layout contains every sample once. The function starts and ends Megatron's process
    groups in this process.
    """
    data: TrainData = {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
    }
    if config.off_policy.use_rollout_routing_replay:
        rows: TrainData = {routed_experts.COLUMN: [s.rollout_routed_experts for s in samples]}
        routed_experts.check_column(data | rows, load_hf_config(weights))
        data |= {name: [routed_experts.as_tensor(x) for x in column] for name, column in rows.items()}
    operators.install(config)
    with tempfile.TemporaryDirectory() as rendezvous:
        info = init_parallel(0, 1, config, init_method=f"file://{rendezvous}/store")
        try:
            model = build_model(load_hf_config(weights), config, ddp=False, adapt=adaptation(config))
            load_weights(model, weights, dithers=config.train.dither_weights)
            head = lm_head(
                operators.pass_head(config),
                model,
                info,
                config.kernels,
                temperature=config.rollout.rollout_temperature,
            )
            replay, found = Replay(config, info), {}
            vision = read_decoder(load_hf_config(weights)).vision

            def packed(row: list[int]) -> MicroBatch:
                carried = columns.carried(data, config, training=False, policy=True)
                batch = pack(data, row, carried, device=info.device, vision=vision)
                replay.attach(batch, training=False)
                return batch

            for name, layout in layouts.items():
                assert sorted(i for row in layout for i in row) == list(range(len(samples))), name
                batches = (packed(row) for row in layout)
                lengths = data["response_lengths"]
                values = compute_column(model, info, make_log_probs(head), batches, len(layout), lengths)
                found[name] = [values[i].cpu() for i in range(len(samples))]
            return found
        finally:
            destroy_parallel()
