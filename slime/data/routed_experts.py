"""The experts that the engine used for each token, from the engine's answer to a packed row
(`Sample.rollout_routed_experts`, --use-rollout-routing-replay).

This file owns the check against the model and the rows of a micro-batch. `Sample` joins the parts of a response. The
trainer's router chooses experts only for padding and for the last token of a sample, which no forward pass of the
engine read. A record without another token is an error, because the trainer would train another policy than the one
that sampled.

Shapes: a sample has N tokens, the model has L layers and K experts per token, and a packed micro-batch has P rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slime.data.token_slice import TokenSlice
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.protocols import EXPERTS
from slime.protocols.engine_column import EngineColumn
from slime.types import TrainData

COLUMN = "rollout_routed_experts"
OPEN = -1
"""Value in a packed row for which the router chooses the expert."""


ENGINE = EngineColumn(
    EXPERTS,
    ("rollout_routed_experts",),
    asked=lambda config: int(config.off_policy.use_rollout_routing_replay),
    append=lambda sample, arrays: sample.append_routed_experts(*arrays),
    known=lambda sample: sample.known_experts,
)


def check_column(data: TrainData, hf_config: Hf) -> None:
    """Raises ValueError for the first sample whose record is not [N - 1, L, K] with different experts of the model per
    token.

    The engine leaves zeros for a token without a record, so the first two experts of such a token are equal. With one
    expert per token, this check is impossible, and `slime.rules` makes the flag an error.
    """
    decoder = read_decoder(hf_config)
    assert decoder.experts is not None  # slime.rules raises an error for a dense model
    layers, topk, experts = len(decoder.layers), decoder.experts.topk, decoder.experts.count
    sparse = np.array(decoder.sparse)
    found: list[np.ndarray | None] = data.get(COLUMN) or [None] * len(data["tokens"])
    names = data.get("sample_indices", range(len(found)))
    for name, tokens, rows in zip(names, data["tokens"], found, strict=True):
        wanted = [len(tokens) - 1, layers, topk]
        if rows is None or list(rows.shape) != wanted:
            raise ValueError(
                f"{COLUMN} must be {wanted}, tokens but the last, layers and experts of a token, got "
                f"{'none' if rows is None else list(rows.shape)} for sample {name}; generate functions must fill it "
                "with --use-rollout-routing-replay"
            )
        chosen = rows[:, sparse]
        if chosen.size and chosen.max() >= experts:
            raise ValueError(
                f"{COLUMN} must be below {experts}, the experts, got {chosen.max()} for sample {name}"
            )
        twice = (
            np.nonzero((chosen[..., 0] == chosen[..., 1]).any(1))[0] if topk > 1 else np.empty(0, np.int64)
        )
        if twice.size:
            raise ValueError(
                f"{COLUMN} must name different experts of a token, got {rows[twice[0]].tolist()} by layer for token "
                f"{twice[0]} of sample {name}"
            )


def as_tensor(rows: np.ndarray) -> Tensor:
    """Returns the rows as uint8, or as int16 for larger ids. torch can concatenate and index both dtypes."""
    return torch.from_numpy(rows if rows.dtype == np.uint8 else rows.astype(np.int16))


def read_sample(data: TrainData, i: int) -> np.ndarray | None:
    """Returns the record of sample i with the engine's unsigned dtype: the inverse of `as_tensor`. Returns None without
    a record."""
    if COLUMN not in data:
        return None
    rows: np.ndarray = data[COLUMN][i].numpy()
    return rows if rows.dtype == np.uint8 else rows.astype(np.uint16)


def packed(data: TrainData, samples: list[int], part: TokenSlice) -> Tensor:
    """Returns this context-parallel rank's rows for the micro-batch of `samples`: int16 [P, L, K], with `OPEN` for a
    token without a record.

    Each row is written once. 32,768 tokens with 48 layers and 8 experts take 3 to 9 ms on one CPU core.
    """
    rows = [data[COLUMN][i] for i in samples]
    out = torch.empty((part.rows, *rows[0].shape[1:]), dtype=torch.int16)
    end = 0
    for run in part.runs:
        known = rows[run.sequence][run.start : run.stop]  # a sample's last token has no record
        out[end : end + len(known)] = known
        out[end + len(known) : (end := end + run.stop - run.start)] = OPEN
    out[end:] = OPEN
    return out
