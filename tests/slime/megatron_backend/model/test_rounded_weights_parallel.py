"""Two ranks with --round-weights train as one: tensor (and sequence) and expert parallel. A rank rounds its slices of
the weights to the values of the whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from quantize import quantization_config, quantize_checkpoint
from rank_processes import on_ranks

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
KINDS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "latent": (
        "deepseek_v3",
        {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        [],
    ),
    # the trainer joins q, k and v in one weight, and the files have k in plain form
    "partly": ("qwen3_moe", {"mlp_only_layers": [0]}, ["re:.*k_proj"]),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep-tp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


def two_steps(folder: Path, sizes: dict[str, Any], group: Any, **flags: Any) -> list[list[float]]:
    config = make_config(lr=1e-3, hf_checkpoint=str(folder), **sizes, **flags)
    model = build_model(read_hf_config(folder), config)
    load_hf(model, folder)
    parts = (model, *build_optimizer(model, config, total_steps=10))
    # There are 32 tokens, because sequence parallelism needs a multiple of the ranks.
    return [train_step(*parts, [*sequences(s), torch.tensor([1, 2, 3])], tp_group=group) for s in (0, 1)]


def work(rank: int, root: Path) -> None:
    found = {}
    for layout, sizes in LAYOUTS.items():
        info = init_parallel(
            rank, 2, make_config(**sizes), init_method=f"file://{root}/store-{layout}", local_rank=rank
        )
        for kind in KINDS:
            found[kind, layout] = two_steps(root / kind, sizes, info.tp_group, round_weights=True)
        destroy_parallel()
    torch.save(found, root / f"rank{rank}.pt")


def test_two_ranks_train_with_rounded_weights_as_one(tmp_path: Path) -> None:
    for kind, (family, shape, plain) in KINDS.items():
        tiny_checkpoint(tmp_path / f"{kind}-plain", family, **WIDE, **shape)
        said = quantization_config("int4")
        said["ignore"] += ["re:.*mlp.gate$", *plain]
        quantize_checkpoint(tmp_path / f"{kind}-plain", tmp_path / kind, said)
    on_ranks(work, tmp_path, ranks=2)
    two = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store-one")
    for kind in KINDS:
        wanted, unrounded = (
            torch.tensor(two_steps(tmp_path / kind, {}, None, round_weights=rounds))
            for rounds in (True, False)
        )
        assert (wanted - unrounded)[1].abs().max() > 1e-4
        for layout in LAYOUTS:
            for rank in two:
                found = torch.tensor(rank[kind, layout])  # [step, (loss, norm)]
                torch.testing.assert_close(found, wanted, rtol=2e-5, atol=0)
    destroy_parallel()
