"""Compares a prompt that is computed once for its samples with a copy per sample. Log-probs, losses and gradients are
equal in float32, up to the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import on_ranks
from test_megatron_attention import no_rotation
from torch import Tensor
from trainer_cases import make_checkpoints, make_config, make_samples, rank_data

from slime.checkpoints.hf_config import read_hf_config
from slime.data.packing import pack
from slime.data.sharing.flops import micro_batch_flops
from slime.data.sharing.prompts import sample_images, shared_prompts, shares_prompts
from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import PackedAttention, packed_layout
from slime.megatron_backend.model.rows import GatheredRows, take
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.plan.flops import ForwardFlops
from slime.types import Sample

STEPS = {"global_batch_size": 4, "max_tokens_per_gpu": 200, "clip_grad": 0.0, "entropy_coef": 0.01}
"""Flags with two optimizer steps, each with one micro-batch that has samples of two groups."""

REPLAY = {"use_rollout_routing_replay": True}
DENSE: dict[str, dict[str, Any]] = {
    "one-pass": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "gspo": {"advantage_estimator": "gspo"},
    "native": {"rlk_fast": "off"},
    "logp": {"rl_kernel_ops": ["logp"]},
    "one-sample": {"use_dynamic_batch_size": False, "micro_batch_size": 1},
    "custom": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "trainer_cases.reinforce_loss",
        "entropy_coef": 0.0,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "routers": {},
    "own-replay": {"use_routing_replay": True},
    "engine-replay": REPLAY,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("dense", "experts")}
    make_checkpoints(found["dense"])
    make_checkpoints(found["experts"], "qwen3_moe", num_experts=4, moe_intermediate_size=24)
    return found


def forked_samples() -> list[Sample]:
    """Returns the samples, in which a turn of sample 0 is a part of sample 1's prompt, sample 7 leaves sample 6 inside
    its response, and sample 8 leaves sample 7 later. Only one sample trains a common token."""
    samples = make_samples()
    branches: dict[
        int, tuple[list[int], list[int], int]
    ] = {  # prompt, response, response tokens of earlier samples
        0: ([5, 6, 7], [8, 9, 10, 11, 12], 0),
        1: ([5, 6, 7, 8, 9, 20, 21], [22, 23], 0),
        6: ([30, 31, 32], [33, 34, 35, 36, 37], 0),
        7: ([30, 31, 32], [33, 34, 40, 41, 42], 2),
        8: ([30, 31, 32], [33, 34, 40, 43], 3),
    }
    for index, (prompt, response, common) in branches.items():
        sample, count = samples[index], len(response)
        sample.tokens, sample.response_length = prompt + response, count
        sample.loss_mask = [0] * common + [1] * (count - common)
        sample.rollout_log_probs = [-4.5 + 0.1 * number for number in range(count)]
    return samples


def samples_with_experts() -> list[Sample]:
    """Returns samples with random experts per token, equal for a prompt, except that sample 8 differs from sample 7."""
    samples, generator = make_samples(), np.random.default_rng(0)
    prompts: dict[Any, np.ndarray] = {}
    for sample in samples:
        scores = generator.random((len(sample.tokens) - 1, 2, 4))
        rows = scores.argsort(-1)[..., :2].astype(np.uint8)
        prompt = sample.tokens[: -sample.response_length]
        if sample.index != 8:
            rows[: len(prompt)] = prompts.setdefault(tuple(prompt), rows[: len(prompt)])
        sample.rollout_routed_experts = rows
    return samples


def trained(
    root: Path,
    name: str,
    rank: int = 0,
    ranks: int = 1,
    samples: Callable[[], list[Sample]] = samples_with_experts,
    **flags: Any,
) -> dict[str, Any]:
    """Runs two steps and returns metrics, old log-probs, the last gradients and the number of rows that the model
    computed."""
    given = STEPS | {"weight_dir": str(root / f"weights-{name}")} | flags
    config = make_config(root, actor_num_gpus_per_node=ranks, **given)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    packed, trainer_pack = [], trainer.batches.pack
    trainer.batches.pack = lambda *a, **k: packed.append(trainer_pack(*a, **k)) or packed[-1]  # type: ignore[method-assign]
    data = rank_data(config, samples(), trainer.info.dp_rank, trainer.info.dp_size)
    result = trainer.train(0, data)
    out = {
        "steps": result.steps,
        "rollout": result.rollout,
        "old": dict(zip(data["sample_indices"], data["old_log_probs"], strict=True)),
        "grads": {n: p.main_grad.clone() for n, p in trainer.policy.model.named_parameters()},
        "rows": [len(batch.part.tokens) for batch in packed],
        "taken": [sum(batch.part.lengths) - len(batch.part.tokens) for batch in packed],
    }
    trainer.close()
    return out


def assert_same(got: dict[str, Any], wanted: dict[str, Any], *, grads: bool = True) -> None:
    for a, b in zip(got["steps"], wanted["steps"], strict=True):
        names = [name for name in b if "lr-pg" not in name and "experts" not in name]
        assert [a[n] for n in names] == pytest.approx([b[n] for n in names], rel=1e-5, abs=1e-6)
    assert got["rollout"] == pytest.approx(wanted["rollout"], rel=1e-5, abs=1e-6)
    for index, log_probs in got["old"].items():
        torch.testing.assert_close(log_probs, wanted["old"][index], rtol=0, atol=2e-6)
    if grads:
        assert max(g.abs().max() for g in wanted["grads"].values()) > 0.01
        for name, gradient in wanted["grads"].items():
            torch.testing.assert_close(got["grads"][name], gradient, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("model", "case"), [*(("dense", name) for name in DENSE), *(("experts", name) for name in EXPERTS)]
)
def test_a_shared_prompt_changes_no_result(roots, model, case):
    root, flags = roots[model], (DENSE | EXPERTS)[case]
    shared = trained(root, f"{case}-shared", **flags)
    own = trained(root, f"{case}-own", **flags, share_prompts=False)
    assert_same(shared, own)
    if case == "one-sample":
        assert shared["rows"] == own["rows"]
    else:
        assert sum(shared["rows"]) < sum(own["rows"])
    again = trained(root, f"{case}-again", **flags)
    assert again["steps"] == shared["steps"]
    assert all(torch.equal(again["grads"][name], g) for name, g in shared["grads"].items())


@pytest.mark.parametrize("case", ["one-pass", "gspo", "native"])
def test_branches_of_a_session_share_their_turns(roots, case):
    """Log-probs, losses and gradients are those without sharing."""
    root, flags = roots["dense"], DENSE[case]
    shared = trained(root, f"{case}-tree", samples=forked_samples, **flags)
    own = trained(root, f"{case}-branches", samples=forked_samples, **flags, share_prompts=False)
    assert_same(shared, own)
    assert sum(own["rows"]) - sum(shared["rows"]) == sum(shared["taken"]) > 0
    again = trained(root, f"{case}-tree-again", samples=forked_samples, **flags)
    assert all(torch.equal(again["grads"][name], g) for name, g in shared["grads"].items())


def test_a_tree_of_branches():
    """A sample takes the longest beginning of an earlier sample, whatever their order."""
    data = rank_data_of(forked_samples())
    images = sample_images(data, list(range(5)), None)
    assert shared_prompts(data, list(range(5)), [], images) == [(0, 0), (0, 5), (2, 0), (2, 5), (3, 6)]
    order = [1, 0, 4, 2, 3]
    images = sample_images(data, order, None)
    found = shared_prompts(data, order, [], images)
    assert found == [(0, 0), (0, 5), (2, 0), (2, 5), (2, 6)]


def rank_data_of(samples: list[Sample]) -> Any:
    """Returns tokens and response lengths of samples 0, 1, 6, 7 and 8."""
    chosen = [samples[i] for i in (0, 1, 6, 7, 8)]
    return {
        "tokens": [torch.tensor(sample.tokens) for sample in chosen],
        "response_lengths": [sample.response_length for sample in chosen],
    }


def work(rank: int, roots: dict[str, Path]) -> None:
    found = {
        (model, name): trained(
            roots[model], f"two-{name}", rank, 2, **flags, **(REPLAY if model == "experts" else {})
        )
        for model, names in (("dense", ("sp", "pp", "cp")), ("experts", ("sp", "ep", "pp")))
        for name, flags in ((name, LAYOUTS[name]) for name in names)
    }
    torch.save(found, roots["dense"] / f"rank{rank}.pt")


def test_two_ranks_share_prompts_as_one_without(roots):
    on_ranks(work, roots, ranks=2)
    one = {
        "dense": trained(roots["dense"], "one", share_prompts=False),
        "experts": trained(roots["experts"], "one", share_prompts=False, **REPLAY),
    }
    for rank in (0, 1):
        for (model, name), got in torch.load(roots["dense"] / f"rank{rank}.pt").items():
            assert_same(got, one[model], grads=False)
            if name in ("sp", "pp"):
                assert sum(got["rows"]) < sum(one[model]["rows"])


def test_which_samples_share():
    prompt = [1, 2, 3]
    tokens = [[*prompt, 4, 5], [7, 8, 9], [*prompt, 6], [*prompt, 4], [1, 2, 4]]
    data = {"tokens": [torch.tensor(t) for t in tokens], "response_lengths": [2, 1, 1, 1, 1]}
    batch = pack(data, [0, 1, 2, 3, 4], [], device="cpu", multiple=4, share_prompts=True)
    # Samples 2 and 4 have only their last token. Sample 3 is the beginning of sample 0.
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 6, 4, 0, 0]
    assert batch.rows.tolist() == [2, 3, 6, 2, 2, 1] and batch.targets.tolist() == [4, 5, 9, 6, 4, 4]
    assert batch.sample_of_row.tolist() == [0, 0, 1, 2, 3, 4] and batch.mine is None
    layout = packed_layout(batch.part, "cpu")
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 2, 0, 0]
    assert layout.cu_seqlens_q.tolist() == [0, 5, 8, 9, 10]
    assert layout.cu_seqlens_kv.tolist() == [0, 5, 8, 12, 15]
    assert layout.keys is not None
    assert layout.keys.order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 8, 0, 1, 9]
    alone = pack(data, [1, 4], [], device="cpu", share_prompts=True)
    assert not alone.part.shares and packed_layout(alone.part, "cpu").keys is None


def test_experts_of_a_prompt_must_be_the_same(roots):
    config = make_config(roots["experts"], **STEPS, **REPLAY)
    data = rank_data(config, samples_with_experts())
    column = ["rollout_routed_experts"]
    with_record = pack(data, [6, 7, 8], column, device="cpu", share_prompts=True)
    without = pack(data, [6, 7, 8], [], device="cpu", share_prompts=True)
    prompt = len(data["tokens"][6]) - data["response_lengths"][6]
    assert len(with_record.part.tokens) == len(without.part.tokens) + prompt
    # Every row has the record of its own token.
    plain = pack(data, [6, 7, 8], column, device="cpu")
    rows = plain.of_rows[column[0]][with_record.part.tokens]
    assert torch.equal(with_record.of_rows[column[0]][: len(rows)], rows)


def test_flops_count_a_shared_prompt_once(roots):
    config = make_config(roots["dense"], **STEPS)
    data, hf = rank_data(config, make_samples()), read_hf_config(config.rollout.hf_checkpoint)
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    own = sum(ForwardFlops(hf)(n, r) for n, r in lengths)
    assert sum(micro_batch_flops(data, [], hf, share_prompts=False)) == own
    # Groups 0 and 1 have two samples with the prompt, group 3 has three.
    n0, n1, n3 = (lengths[i][0] - lengths[i][1] for i in (0, 2, 6))
    saved = sum(ForwardFlops(hf)(n, 0) for n in (n0, n1, n3, n3))
    assert sum(micro_batch_flops(data, [], hf, share_prompts=True)) == pytest.approx(own - saved, rel=1e-12)


def test_settings_without_sharing(roots):
    root = roots["dense"]
    hf_config = read_hf_config(root / "policy")
    assert shares_prompts(make_config(root), hf_config)
    assert not shares_prompts(make_config(root, share_prompts=False), hf_config)
    assert not shares_prompts(
        make_config(root, actor_num_gpus_per_node=2, context_parallel_size=2), hf_config
    )
    engine = {"device": "cuda", "fp32": False, "overrides": {"transformer_impl": "transformer_engine"}}
    assert not shares_prompts(make_config(root, **engine), hf_config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_readers_are_added_in_float32(dtype):
    torch.manual_seed(0)
    order = torch.cat([torch.randint(0, 40, (4000,)), torch.tensor([41])])
    x = torch.randn(43, 2, 64, dtype=dtype, requires_grad=True)
    upstream = torch.randn(len(order), 2, 64, dtype=dtype)
    rows = GatheredRows.of(order, 43)
    out = take(x, rows)
    assert torch.equal(out, x[order])
    (got,) = torch.autograd.grad(out, x, upstream)
    wanted = torch.zeros(43, 2, 64, dtype=torch.float64).index_add_(0, order, upstream.double())
    rounding = 5e-5 if dtype == torch.float32 else wanted.abs().max().item() * 2**-8
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=rounding)
    assert not got[40].any() and torch.equal(got[41], upstream[-1])
    for _ in range(5):
        assert torch.equal(torch.autograd.grad(take(x, rows), x, upstream)[0], got)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_over_a_shared_prompt(kv_heads):
    """The lengths are ragged: a prompt of 30 for three sequences, one of which has no other token, and another
    prompt."""
    torch.manual_seed(0)
    lengths, prompts = [37, 30, 9, 64], [(0, 0), (0, 30), (2, 0), (0, 30)]
    shared, own = token_slice(lengths, prompts=prompts), token_slice(lengths)
    assert len(shared.tokens) == sum(lengths) - 60 and len(shared.runs) == 3
    leaves = [torch.randn(len(shared.tokens), n, 8, requires_grad=True) for n in (4, kv_heads, kv_heads)]
    attention = PackedAttention(SimpleNamespace(kv_channels=8))  # type: ignore[arg-type]
    upstream = torch.randn(sum(lengths), 32)
    # The copies of the prompt have their own outputs, which nothing reads.
    upstream[37:67] = upstream[76:106] = 0

    def run(part: Any, inputs: list[Tensor]) -> Tensor:
        layout = packed_layout(part, "cpu")
        layout.rotary = no_rotation(part.rows, 4)
        return attention(*inputs, None, packed_seq_params=layout)

    out = run(shared, leaves)
    wanted = run(own, [leaf[shared.gathered] for leaf in leaves])
    torch.testing.assert_close(out, wanted[shared.tokens], rtol=0, atol=1e-6)
    grads = torch.autograd.grad(out, leaves, upstream[shared.tokens])
    for got, want in zip(grads, torch.autograd.grad(wanted, leaves, upstream), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
