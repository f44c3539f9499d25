"""Compares two processes over gloo with one: tensor, sequence and data parallel, and resharded checkpoints.

The worker processes run every layout in turn and write their results; the tests compare them with a single rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron_cases import hidden_of, make_config, sequences, tiny_checkpoint, train_step
from rank_processes import on_ranks
from torch import Tensor

import rl_kernel
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model, output_weight, unwrap, vocab_range
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

LR = 1e-3
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "use_distributed_optimizer": False,
    # a split matrix is gathered, so its update is that of the whole matrix
    "overrides": {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "highest"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp": {},
    "dp-plain": {"use_distributed_optimizer": False},
    "dp-host": {"optimizer_cpu_offload": True},
    "muon": {"tensor_model_parallel_size": 2, **MUON},
    "dp-muon": MUON,
}


def batch_of(step: int) -> list[Tensor]:
    """Returns 32 tokens, because sequence parallelism needs a multiple of the ranks."""
    return [*sequences(step), torch.tensor([1, 2, 3])]


def trainer(hf_dir: Path, config: Any) -> tuple:
    model = build_model(load_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def two_steps(parts: tuple, info: Any, first: int = 0) -> dict[str, Any]:
    tp_group = info.tp_group if info.tp_size > 1 else None
    logs = []
    for step in (first, first + 1):
        mine = batch_of(step)[info.dp_rank :: info.dp_size]
        logs.append(train_step(*parts, mine, tp_group=tp_group))
    return {"logs": logs, "weights": exported(parts[0])}


def exported(model: Any) -> dict[str, Tensor]:
    """Returns a copy of the weights on the host."""
    return {name: tensor.cpu().clone() for name, tensor in export_hf(model)}


def work(rank: int, root: Path) -> None:
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        config = make_config(lr=LR, **layout)
        info = init_parallel(rank, 2, config, init_method=f"file://{root}/store-{name}", local_rank=rank)
        parts = trainer(root / "qwen3", config)
        out[name] = two_steps(parts, info)
        out[name]["ranks"] = (info.tp_rank, info.tp_size, info.dp_rank, info.dp_size)
        save_checkpoint(root / f"from-{name}", 2, *parts, extra={"from": name})
        if name in ("tp", "dp", "dp-host"):  # two ranks continue the checkpoint of a single rank
            resumed = trainer(root / "qwen3", config)
            assert load_checkpoint(root / "from-one", *resumed) == {"from": "one"}
            out[name]["resumed"] = two_steps(resumed, info, first=2)
        if name == "tp":
            out[name] |= tensor_parallel_only(root, parts[0])
        destroy_parallel()
    out["remainders"] = [of_bfloat16(rank, root, flag) for flag in (False, True)]
    torch.save(out, root / f"rank{rank}.pt")


def of_bfloat16(rank: int, root: Path, remainders: bool) -> dict[str, Any]:
    """Trains a bfloat16 model on two data-parallel ranks, with main weights in float32 or as remainders. The second
    model also continues the checkpoint of the first."""
    config = make_config(lr=LR, params_dtype="bfloat16", use_precision_aware_optimizer=remainders)
    store = f"file://{root}/store-remainders-{remainders}"
    info = init_parallel(rank, 2, config, init_method=store, local_rank=rank)
    parts = trainer(root / "qwen3", config)
    result = two_steps(parts, info)
    if remainders:
        parts = trainer(root / "qwen3", config)
        load_checkpoint(root / "from-float32", *parts)
    else:
        save_checkpoint(root / "from-float32", 2, *parts)
    result["more"] = two_steps(parts, info, first=2)
    destroy_parallel()
    return result


def tensor_parallel_only(root: Path, model: Any) -> dict[str, Any]:
    save_hf(model, root / "qwen3", root / "saved", max_shard_bytes=60_000)
    config = make_config(tensor_model_parallel_size=2)
    few_groups = build_model(load_hf_config(root / "one-group"), config)  # fewer key/value heads than ranks
    load_hf(few_groups, root / "one-group")
    return {
        "one-group": exported(few_groups),
        "head": (tuple(output_weight(model).shape), vocab_range(model)),
        "qkv": tuple(unwrap(model).decoder.layers[0].self_attention.linear_qkv.weight.shape),
        "one-group-loss": forward_loss(few_groups),
    }


def forward_loss(model: Any) -> float:
    """Returns the mean log-prob over the batch, through the vocabulary-parallel head."""
    batch = batch_of(0)
    start, size = vocab_range(model)
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs = rl_kernel.linear_logp(
        *(hidden_of(model, batch), output_weight(model), torch.cat(batch).to(output_weight(model).device)),
        tp_group=group if group.size() > 1 else None,
        vocab_start=start,
        vocab_size=size,
    )
    return log_probs.mean().item()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    tiny_checkpoint(root / "qwen3", tie_word_embeddings=False)
    tiny_checkpoint(root / "one-group", "qwen2", num_key_value_heads=1)
    return root


@pytest.fixture(scope="module")
def one(root):
    """Runs the same steps on a single rank, which stays up for the tests."""
    config = make_config(lr=LR)
    info = init_parallel(0, 1, config, init_method=f"file://{root}/store-one")
    parts = trainer(root / "qwen3", config)
    result = two_steps(parts, info)
    save_checkpoint(root / "from-one", 2, *parts, extra={"from": "one"})
    result["muon"] = two_steps(trainer(root / "qwen3", make_config(lr=LR, **MUON)), info)
    result["resumed"] = two_steps(parts, info, first=2)
    yield result
    destroy_parallel()


@pytest.fixture(scope="module")
def two(root, one):
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


def compare_weights(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Adam turns the sign of a rounding error in a gradient near zero into at most one rate per step.
        difference = (got[name] - tensor).abs()
        assert difference.max() < 2.5 * LR and (difference > 1e-5).float().mean() < 0.01, name


def losses(results: list[dict], *path: str) -> Tensor:
    for key in path:
        results = [r[key] for r in results]
    return torch.tensor(results)[..., 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(one, two, layout):
    one = one["muon"] if "muon" in layout else one
    wanted, norms = torch.tensor(one["logs"]).unbind(-1)
    got = losses(two, layout, "logs")  # [rank, step]
    if layout.startswith("dp"):
        torch.testing.assert_close(got.sum(0), wanted, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(got, wanted.expand(2, 2), rtol=1e-5, atol=0)
    for rank in (0, 1):
        got_norms = torch.tensor(two[rank][layout]["logs"])[:, 1]
        torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0)
        compare_weights(two[rank][layout]["weights"], one["weights"])
    for name, tensor in two[0][layout]["weights"].items():
        assert torch.equal(tensor, two[1][layout]["weights"][name]), name


def test_remainders_train_as_float32_main_weights(two):
    """Both sides have the same sums of gradients, so that only lost last bits differ."""
    for rank in two:
        whole, small = rank["remainders"]
        for steps, wanted in ((small, whole), (small["more"], whole["more"])):
            torch.testing.assert_close(
                torch.tensor(steps["logs"]), torch.tensor(wanted["logs"]), rtol=1e-3, atol=0
            )
            pairs = [(steps["weights"][name], tensor) for name, tensor in wanted["weights"].items()]
            different = sum(int((one != other).sum()) for one, other in pairs)
            assert different < 1e-3 * sum(other.numel() for _, other in pairs)


def test_ranks_and_shards(two):
    assert [r["tp"]["ranks"] for r in two] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert [r["dp"]["ranks"] for r in two] == [(0, 1, 0, 2), (0, 1, 1, 2)]
    # The vocabulary of 99 is padded to 256 = 128 x 2; q, k, v have 4 + 2 + 2 heads of 32.
    assert [r["tp"]["head"] for r in two] == [((128, 64), (0, 99)), ((128, 64), (128, 99))]
    assert two[0]["tp"]["qkv"] == (128, 64)


@pytest.mark.parametrize("layout", ["tp", "dp", "dp-host"])
def test_checkpoint_of_one_rank_continues_on_two(one, two, layout):
    wanted = torch.tensor(one["resumed"]["logs"])[:, 0]
    got = losses(two, layout, "resumed", "logs")
    torch.testing.assert_close(got[0] if layout == "tp" else got.sum(0), wanted, rtol=1e-3, atol=0)
    compare_weights(two[0][layout]["resumed"]["weights"], one["resumed"]["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_of_two_ranks_loads_on_one(root, two, layout):
    values = {k: v for k, v in LAYOUTS[layout].items() if "parallel" not in k and "offload" not in k}
    parts = trainer(root / "qwen3", make_config(lr=LR, **values))
    assert load_checkpoint(root / f"from-{layout}", *parts) == {"from": layout}
    for name, tensor in exported(parts[0]).items():
        assert torch.equal(tensor, two[0][layout]["weights"][name]), name
    (only,) = parts[1].chained_optimizers
    assert {float(s["step"]) for s in only.optimizer.state.values() if "step" in s} == {2.0}


def test_hf_directory_saved_by_two_ranks(root, two):
    model = build_model(load_hf_config(root / "saved"), make_config())
    load_hf(model, root / "saved")
    for name, tensor in exported(model).items():
        assert torch.equal(tensor, two[0]["tp"]["weights"][name]), name


def test_fewer_kv_heads_than_ranks(root, one, two):
    model = build_model(load_hf_config(root / "one-group"), make_config())
    load_hf(model, root / "one-group")
    for name, tensor in exported(model).items():
        assert torch.equal(tensor, two[1]["tp"]["one-group"][name]), name
    assert [r["tp"]["one-group-loss"] for r in two] == pytest.approx([forward_loss(model)] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "world", "message"),
    [
        ({"expert_model_parallel_size": 4}, 2, "--expert-model-parallel-size times ETP"),
        ({"tensor_model_parallel_size": 2}, 3, r"TP \* PP \* CP must divide .* got 2 \* 1 \* 1 for 3"),
        (
            {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
            6,
            r"TP \* PP \* CP must divide .* got 1 \* 2 \* 2 for 6",
        ),
    ],
)
def test_impossible_layouts_are_refused(values, world, message):
    with pytest.raises(ValueError, match=message):
        init_parallel(0, world, make_config(**values), init_method="file:///nowhere")
