"""Tests the updates of a tied checkpoint whose files hold the head again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_cases import tiny_checkpoint
from offline_engine import offline_engine, plain_matrices
from safetensors.torch import load_file, save_file

from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices

pytestmark = pytest.mark.e2e
TOKENS = [3, 7, 50, 21]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("more", [0.0, 1.0], ids=["equal", "other"])
def test_updates_tie_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, more: float
) -> None:
    """The trainer computes with the embedding, and sends no head."""
    embedding, path = "model.embed_tokens.weight", tmp_path / "hf"
    tiny_checkpoint(path, "qwen3", head_dim=32)
    (file,) = path.glob("*.safetensors")
    stored = load_file(file)
    assert "lm_head.weight" not in stored
    save_file({**stored, "lm_head.weight": stored[embedding] + more}, file, metadata={"format": "pt"})
    channel, found = FileChannel(tmp_path / "weights"), []
    with (
        plain_matrices(monkeypatch),
        offline_engine(path, tmp_path / "weights", monkeypatch, load_format=load_format) as engine,
    ):
        for version, scale in enumerate((1.0, 1.25, 1.0)):
            tensors = {**stored, embedding: scale * stored[embedding]}
            update = channel.publish(whole_slices(tensors.items()), version, checksums=True)
            engine.take(update)
            engine.take(replace(update, info={**update.info, "load": False}))
            found.append(engine.log_probs(TOKENS))
    assert torch.equal(found[0], found[2]) and (found[0] - found[1]).abs().max() > 0.01
    expected = _log_probs(path)
    assert (found[0] - expected).abs().max() < 1e-5


def _log_probs(path: Path) -> torch.Tensor:
    """Returns transformers' log-probs with the embedding as the head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
