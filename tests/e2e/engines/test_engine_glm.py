"""Trains a tiny GLM-4.5 in Megatron and publishes it to a real vLLM: their log-probs are equal before and after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offline_engine import offline_engine
from rank_processes import on_ranks
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from slime.config import Config
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices

pytestmark = pytest.mark.e2e

TOKENS = [3, 7, 50, 21, 9, 88, 40, 2, 11]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def make_glm(path: Path, seed: int) -> None:
    """Writes random weights and biases, and a tensor of multi-token prediction after the last layer, as in published
    files."""
    config = Glm4MoeConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    further = {"model.layers.3.eh_proj.weight": torch.randn(64, 128)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})


def train(_: int, root: Path) -> None:
    """Trains in a child process. It saves the trainer's log-probs for both checkpoints, the second after a step of
    plain gradient descent, and the updates that it publishes."""
    from slime.checkpoints.hf_config import read_hf_config
    from slime.data.token_slice import token_slice
    from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
    from slime.megatron_backend.model.attention import packed_layout
    from slime.megatron_backend.model.gpt import build_model, compute_logits, stage_output, unwrap
    from slime.megatron_backend.parallel import init_parallel

    config = Config.from_flat({"params_dtype": "float32", "seed": 1, "distributed_timeout_minutes": 1})
    init_parallel(0, 1, config, init_method=f"file://{root}/store")
    tokens = torch.tensor(TOKENS)

    def log_probs(model: torch.nn.Module) -> torch.Tensor:
        output = stage_output(model, tokens, packed_layout(token_slice([len(TOKENS)]), "cpu"))
        return compute_logits(model, output)[:-1, :99].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    found, updates = {}, {}
    for version, seed in enumerate((1, 0), 1):
        model = build_model(read_hf_config(root / str(seed)), config)
        load_hf(model, root / str(seed))
        if seed == 1:
            log_probs(model).sum().backward()
            for parameter in unwrap(model).parameters():
                parameter.data.add_(0.01 * parameter.main_grad)
        found[seed] = log_probs(model).detach()
        updates[seed] = FileChannel(root / "weights").publish(
            whole_slices(export_hf(model)), version, checksums=True
        )
    torch.save((found, updates), root / "trained.pt")


def test_trainer_and_engine_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        make_glm(tmp_path / str(seed), seed)
    on_ranks(train, tmp_path, ranks=1)
    expected, updates = torch.load(tmp_path / "trained.pt", weights_only=False)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    published = load_file(updates[1].info["path"])
    assert published[BIAS].dtype == torch.float32 and "model.layers.3.eh_proj.weight" not in published
    with offline_engine(tmp_path / "0", tmp_path / "weights", monkeypatch) as engine:
        torch.testing.assert_close(engine.log_probs(TOKENS), expected[0], rtol=0, atol=1e-5)
        for seed in (1, 0):
            engine.take(updates[seed])
            torch.testing.assert_close(engine.log_probs(TOKENS), expected[seed], rtol=0, atol=1e-5)
