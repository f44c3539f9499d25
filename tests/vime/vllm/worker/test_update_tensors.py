"""Tests which tensors an engine expects in an update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vime.vllm.worker.update_tensors import CheckpointTensors

SENT = {"model.embed_tokens.weight": [32, 16], "lm_head.weight": [32, 16]}


def test_an_update_may_leave_out_tensors_that_no_model_uses(tmp_path: Path) -> None:
    """Older files of Llama hold the frequencies of the rotary embedding, which each model computes."""
    hf = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    stored = {**SENT, "model.layers.0.self_attn.rotary_emb.inv_freq": [4]}
    save_file({name: torch.zeros(shape) for name, shape in stored.items()}, tmp_path / "model.safetensors")
    tensors = CheckpointTensors(str(tmp_path), tied=False)
    assert tensors.every_update() == {}
    tensors.require(SENT, "the update")
    tensors.require(stored, "the update")
    with pytest.raises(ValueError, match="got lm_head.weight missing from the update"):
        tensors.require({"model.embed_tokens.weight": [32, 16]}, "the update")
