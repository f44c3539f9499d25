"""Tests --optimizer muon for a model with dense layers and experts: one rank against plain PyTorch, and four ranks
against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import VOCAB, make_config, sum_loss, tiny_checkpoint, train_step
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.muon import MuonSettings, orthogonalize
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

LR, DECAY, STEPS = 1e-3, 0.1, 3
MUON: dict[str, Any] = {
    "lr": LR,
    "weight_decay": DECAY,
    "clip_grad": 0.0,
    "optimizer": "muon",
    "use_distributed_optimizer": False,
    "overrides": {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "highest"},
}
SETTINGS = MuonSettings(0.95, False, 5, "spectral", 1.0, "highest", "quintic", False, False)
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp-dp": SPLIT,
    "ep-dp": {"expert_model_parallel_size": 2},
    "tp-ep": SPLIT | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "etp-ep": SPLIT | {"expert_model_parallel_size": 2},
}


def batch_of(step: int) -> list[Tensor]:
    """Returns sequences for four ranks. Sequence parallelism needs a multiple of its two ranks."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (6, 10, 4, 12)]


def trainer(directory: Path, config: Any) -> tuple[Any, ...]:
    model = build_model(read_hf_config(directory), config)
    load_hf(model, directory)
    return model, *build_optimizer(model, config, total_steps=10)


def exported(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in export_hf(model)}


def steps(parts: tuple[Any, ...], info: Any, numbers: range) -> dict[str, Tensor]:
    for step in numbers:
        mine = batch_of(step)[info.dp_rank :: info.dp_size]
        train_step(*parts, mine, tp_group=info.tp_group if info.tp_size > 1 else None)
    return exported(parts[0])


def work(rank: int, root: Path) -> None:
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        config = make_config(**MUON, **layout)
        info = init_parallel(rank, 4, config, init_method=f"file://{root}/store-{name}", local_rank=rank)
        parts = trainer(root / "moe", config)
        out[name] = {"first": steps(parts, info, range(STEPS))}
        save_checkpoint(root / f"from-{name}", STEPS, *parts)
        out[name]["last"] = steps(parts, info, range(STEPS, STEPS + 2))
        resumed = trainer(root / "moe", config)
        load_checkpoint(root / f"from-{name}", *resumed)
        out[name]["resumed"] = steps(resumed, info, range(STEPS, STEPS + 2))
        destroy_parallel()
    torch.save(out, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("muon")
    tiny_checkpoint(root / "moe", "qwen3_moe", tie_word_embeddings=False, mlp_only_layers=[0])
    return root


@pytest.fixture(scope="module")
def one(root):
    """Runs the same steps on a single rank, which stays up for the tests."""
    config = make_config(**MUON)
    info = init_parallel(0, 1, config, init_method=f"file://{root}/store-one")
    parts = trainer(root / "moe", config)
    yield {"first": steps(parts, info, range(STEPS)), "last": steps(parts, info, range(STEPS, STEPS + 2))}
    destroy_parallel()


@pytest.fixture(scope="module")
def four(root, one):
    on_ranks(work, root, ranks=4)
    return [torch.load(root / f"rank{rank}.pt") for rank in range(4)]


def update(weight: Tensor, moving: Tensor) -> None:
    """Updates a matrix, in which rows of several products may follow each other."""
    change = orthogonalize(moving, SETTINGS) * max(moving.shape) ** 0.5
    weight.mul_(1 - LR * DECAY).add_(change, alpha=-LR)


def reference_steps(model: nn.Module) -> None:
    """Trains with plain PyTorch. Each expert has two matrices: gate and up together, and down. A router is a matrix;
    embedding, head and norms have AdamW."""
    named = dict(model.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() >= 2 and "embed" not in n and "lm_head" not in n]
    tables, vectors = ([p for n, p in named.items() if n not in matrices and p.dim() == d] for d in (2, 1))
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=LR
    )
    moving = {n: torch.zeros_like(named[n]) for n in matrices}
    for step in range(STEPS):
        batch = batch_of(step)
        model.zero_grad()
        sum_loss(torch.cat([model(tokens[None]).logits[0] for tokens in batch]), batch).backward()
        adam.step()
        with torch.no_grad():
            for name in matrices:
                moving[name].lerp_(named[name].grad, 0.05)
            for name in matrices:
                weight, mean = named[name], moving[name]
                if weight.dim() == 3:
                    for expert, of_expert in zip(weight, mean, strict=True):
                        update(expert, of_expert)
                elif "qkv" in name or "up_proj" in name:
                    continue
                elif "gate_proj" in name:
                    up = name.replace("gate_proj", "up_proj")
                    both = torch.cat([weight, named[up]])
                    update(both, torch.cat([mean, moving[up]]))
                    weight.copy_(both[: len(weight)])
                    named[up].copy_(both[len(weight) :])
                else:
                    update(weight, mean)


def test_one_rank_is_plain_pytorch(root, one, tmp_path):
    model = tiny_checkpoint(tmp_path / "same", "qwen3_moe", tie_word_embeddings=False, mlp_only_layers=[0])
    start = load_file(root / "moe/model.safetensors")
    reference_steps(model)
    model.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained/model.safetensors")
    assert wanted.keys() == one["first"].keys()
    for name, tensor in one["first"].items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-5, msg=name)
        assert "norm" in name or (tensor - start[name]).abs().max() > LR / 2, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_train_as_one(one, four, layout):
    """Muon orthogonalizes the rounding of directions without a gradient too, so a few values differ by more."""
    for name, tensor in one["first"].items():
        for rank in four:
            assert torch.equal(rank[layout]["first"][name], four[0][layout]["first"][name]), name
        difference = (four[0][layout]["first"][name] - tensor).abs()
        assert difference.max() < 2.5 * LR and (difference > 2e-5).float().mean() < 0.01, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_resume_to_the_last_bit(one, four, layout):
    for rank in four:
        for name, tensor in rank[layout]["last"].items():
            assert torch.equal(rank[layout]["resumed"][name], tensor), name
    first = four[0][layout]["first"]
    assert not any(torch.equal(first[name], tensor) for name, tensor in one["last"].items())


def test_one_rank_continues_the_checkpoint_of_four(root, one, four):
    """Ranks that split experts have a second optimizer, whose state no other layout reads."""
    parts = trainer(root / "moe", make_config(**MUON))
    load_checkpoint(root / "from-tp-dp", *parts)
    for name, tensor in exported(parts[0]).items():
        assert torch.equal(tensor, four[0]["tp-dp"]["first"][name]), name
    with pytest.raises(ValueError, match="got 1 optimizers a rank; use that layout or --no-load-optim"):
        load_checkpoint(root / "from-tp-ep", *parts)
