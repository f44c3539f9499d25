"""Tests --rlk-bitwise in a real trainer: bits are equal in every packing, and the errors before and during a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from audit_cases import with_facts
from megatron.core.transformer import TransformerConfig
from megatron_cases import make_config as model_config
from megatron_cases import tiny_checkpoint
from trainer_cases import make_config, make_samples

import rl_kernel.invariant as invariant
from rl_kernel.invariant import layers
from slime import operators
from slime.megatron_backend.bitwise.install import use_invariant
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.norms import RMSNorm
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.step.replay import replay_log_probs
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.models import read_decoder
from slime.rules.kernels import BITWISE_SHARED_KIB, check_bitwise_model, check_kernels
from vime.vllm.backend import engine_facts

BITWISE = {"rlk_bitwise": True, "rlk_consistency": "strict"}
ALONE, TOGETHER = [[i] for i in range(9)], [[8, 0, 3], [1, 2, 4, 5, 6, 7]]


def log_probs(root: Any, tmp_path: Any, samples: list[Any], **flags: Any) -> dict[str, list[torch.Tensor]]:
    config = make_config(root, weight_dir=str(tmp_path / "weights"), **flags)
    return replay_log_probs(config, str(root / "policy"), samples, {"alone": ALONE, "together": TOGETHER})


@pytest.fixture
def samples(root, tmp_path):
    """Returns samples with the log-probs of the trainer itself, each sample packed alone."""
    found = make_samples()
    for sample, values in zip(found, log_probs(root, tmp_path, found, **BITWISE)["alone"], strict=True):
        sample.rollout_log_probs, sample.weight_versions = values.tolist(), [0]
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_token_has_the_same_bits_in_every_packing(root, tmp_path, temperature):
    found = log_probs(root, tmp_path, make_samples(), rollout_temperature=temperature, **BITWISE)
    plain = log_probs(root, tmp_path, make_samples(), rollout_temperature=temperature)
    for alone, together, wanted in zip(found["alone"], found["together"], plain["alone"], strict=True):
        assert torch.equal(alone, together)
        torch.testing.assert_close(alone, wanted, rtol=0, atol=2e-5)


@pytest.fixture
def trainer(request, root, tmp_path, samples):
    """Yields a trainer with --rlk-bitwise and the flags of the test's parameter."""
    flags = BITWISE | getattr(request, "param", {})
    config = make_config(root, weight_dir=str(tmp_path / "w"), run_dir=str(tmp_path / "run"), **flags)
    made = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("trainer", "head"),
    [
        ({}, operators.BITWISE_ONE_PASS),
        ({"advantage_estimator": "gspo"}, operators.BITWISE),
        ({"rl_kernel_ops": ["linear_logp"]}, operators.BITWISE),
        ({"rlk_fast": "off"}, operators.BITWISE),
    ],
    indirect=["trainer"],
    ids=["in one pass", "whole sequences", "listed operators", "off"],
)
def test_a_run_with_the_same_bits_trains_and_counts_none(trainer, head, samples):
    """A loss of whole sequences needs all log-probs first, as without the flag."""
    assert trainer.trainings[-1].head.kind is head
    before = {name: value.clone() for name, value in trainer.policy.model.named_parameters()}
    result = trainer.train(0, with_facts(trainer.config, samples))
    assert result.rollout["rl_kernel/bitwise/differing"] == 0
    assert result.rollout["consistency/bitwise_equal_tokens"] == result.rollout["consistency/tokens"] > 30
    changed = [
        not torch.equal(value, before[name]) for name, value in trainer.policy.model.named_parameters()
    ]
    assert all(changed)


def test_gradients_are_those_of_the_default_operators(root, tmp_path, samples):
    norms = []
    two_passes = BITWISE | {"rl_kernel_ops": ["linear_logp"]}
    sides = {"bitwise": BITWISE, "two": two_passes, "default": {"rlk_consistency": "audit"}}
    for name, flags in sides.items():
        config = make_config(root, weight_dir=str(tmp_path / "w"), run_dir=str(tmp_path / name), **flags)
        made = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store-{name}")
        (step,) = made.train(0, with_facts(config, samples)).steps
        norms.append((step["train/grad_norm"], step["train/loss"]))
        made.close()
    for found in norms[:2]:
        assert found == pytest.approx(norms[2], rel=1e-4, abs=1e-6) and found[0] > 0


def moved(samples: list[Any]) -> tuple[int, int]:
    """Changes the last bit of an active token. Returns its sample's index and its position."""
    sample = next(s for s in samples[2:] if not s.remove_sample and any(s.loss_mask))
    at = sample.loss_mask.index(1)
    value = torch.tensor(sample.rollout_log_probs[at])
    sample.rollout_log_probs[at] = torch.nextafter(value, torch.tensor(-math.inf)).item()
    return sample.index, at


def test_one_bit_ends_the_run(trainer, samples):
    index, at = moved(samples)
    wanted = rf"the same bits, got 1 log-probs that differ, the first at position {at} of sample {index} .*"
    wanted += "the operators of both sides keep their promise on test rows.*--load-debug-rollout-data"
    with pytest.raises(RuntimeError, match=wanted):
        trainer.train(0, with_facts(trainer.config, samples))


def test_an_operator_of_the_trainer_that_breaks_its_promise_is_the_cause(trainer, samples, monkeypatch):
    moved(samples)
    monkeypatch.setattr(layers, "rms_norm", lambda x, w, eps: invariant.rms_norm(x, w, eps) * len(x))
    with pytest.raises(RuntimeError, match="in the trainer, results of rms_norm depend on the other rows"):
        trainer.train(0, with_facts(trainer.config, samples))


def test_a_token_that_cannot_be_compared_ends_the_run(trainer, samples):
    samples[1].weight_versions = [3]
    with pytest.raises(
        RuntimeError, match=r"must compare every token, got some that differ in weight_version: \d"
    ):
        trainer.train(0, with_facts(trainer.config, samples))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("gpt_oss", ["decoder.layers.0.self_attention.core_attention", "sinks", "GatedExperts"]),
        ("gemma2", ["GeluMLP", "centred at zero", "capped logits"]),
        ("deepseek_v3", ["Router, groups of experts"]),
        ("qwen2_moe", ["SharedExpert, with a gate"]),
    ],
)
def test_modules_without_an_operator_are_listed(tmp_path, kind, names):
    tiny_checkpoint(tmp_path / kind, kind)
    config = model_config()
    init_parallel(0, 1, config, init_method=f"file://{tmp_path}/store")
    try:
        model = build_model(load_hf_config(tmp_path / kind), config, ddp=False)
        with pytest.raises(
            ValueError, match="every operator of the trainer from rl_kernel.invariant, got"
        ) as error:
            use_invariant([model], dtype=torch.float32)
    finally:
        destroy_parallel()
    assert all(name in str(error.value) for name in names), error.value


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen3", None),
        ("llama", None),
        ("qwen3_moe", None),
        (
            "gemma2",
            "geglu activations, norms .*, scaled embeddings, capped scores, capped logits",
        ),
        (
            "gpt_oss",
            "biases of experts, clipped_swiglu activations, sinks",
        ),
        ("glm4", "interleaved rotary pairs"),
        ("deepseek_v3", "groups of experts, .*another attention"),
        ("qwen2_moe", "a shared expert with a gate"),
        ("glm4_moe", None),
        ("minimax_m2", "a norm over all heads"),
        ("olmo3", "a norm over all heads, norms of outputs"),
    ],
)
def test_a_model_with_other_parts_is_refused_before_the_start(root, tmp_path, kind, parts):
    tiny_checkpoint(tmp_path / kind, kind)
    decoder = read_decoder(load_hf_config(tmp_path / kind))
    check_bitwise_model(make_config(root), decoder)
    if parts is None:
        return check_bitwise_model(make_config(root, **BITWISE), decoder)
    with pytest.raises(ValueError, match=f"every part rl_kernel.invariant computes, got one with {parts}"):
        check_bitwise_model(make_config(root, **BITWISE), decoder)


def test_a_card_without_the_kernels_is_refused_before_the_start(root, monkeypatch):
    # test_bitwise_context.py needs the interpreter, and this test may import the kernels first
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from rl_kernel.invariant.kernels import product

    assert product.SHARED_BYTES == BITWISE_SHARED_KIB * 1024
    given = {"device": "cuda", "gpu": "a100", "fp32": False, "bf16": True, "colocate": True}
    with pytest.raises(ValueError, match="--gpu must have 227 KiB of shared memory .*, got a100 with 163"):
        check_kernels(make_config(root, **BITWISE | given))
    monkeypatch.setattr(invariant, "refusal", lambda device: "the GPU is too old")
    with pytest.raises(
        ValueError, match="got cuda in the engine, where the GPU is too old; leave --rlk-bitwise out"
    ):
        operators.require_promise("engine", torch.device("cuda"), torch.bfloat16)


def test_experts_are_allowed_on_gpus_unless_they_are_in_fp8(root, tmp_path):
    tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    decoder = read_decoder(load_hf_config(tmp_path / "model"))
    given = BITWISE | {"device": "cuda", "fp32": False, "bf16": True, "colocate": True}
    check_bitwise_model(make_config(root, **given), decoder)
    with pytest.raises(ValueError, match="computes, got one with experts in fp8 on a GPU; leave"):
        check_bitwise_model(
            make_config(root, **given, overrides={"fp8": "e4m3", "fp8_recipe": "blockwise"}), decoder
        )


def test_windows_and_context_parallel_ranks_are_allowed_on_gpus(root, tmp_path):
    tiny_checkpoint(tmp_path / "mistral", "mistral", sliding_window=6)
    decoder = read_decoder(load_hf_config(tmp_path / "mistral"))
    assert {layer.window for layer in decoder.layers} == {6}
    more = {"context_parallel_size": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 1}
    given = {"device": "cuda", "gpu": "h100", "fp32": False, "bf16": True, "colocate": True, **more}
    for way in ("a2a", "all_gather"):
        config = make_config(root, cp_comm_type=way, engine_facts=engine_facts({}), **BITWISE | given)
        check_kernels(config)
        check_bitwise_model(config, decoder)


def test_a_machine_whose_operators_break_their_promise_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "swiglu", lambda x: x - x.mean())
    with pytest.raises(ValueError, match="others in the trainer on cpu: swiglu; leave --rlk-bitwise out"):
        use_invariant(
            [RMSNorm(TransformerConfig(num_attention_heads=1, num_layers=1), 8, 1e-6)], dtype=torch.float32
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rlk_consistency": "audit"}, "--rlk-consistency must be strict with --rlk-bitwise, got audit"),
        ({"rlk_bitwise_operators": ["norms"]}, r"--rlk-bitwise-operators must be of .*, got norms; did you mean norm"),
        ({"rlk_bitwise_operators": ["head"]}, "--rlk-consistency must be audit with --rlk-bitwise, got strict"),
        (
            {"rlk_bitwise": False, "rlk_bitwise_operators": ["head"]},
            "must be combined with --rlk-bitwise, got head",
        ),
        ({"max_staleness": 1}, "--max-staleness must be 0 with --rlk-bitwise, got 1"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay must be left out with --rlk-bitwise"),
        ({"rollout_top_k": 20}, "--rollout-top-k must be -1 with --rlk-bitwise, got 20"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p must be 1 with --rlk-bitwise, got 0.9"),
        ({"replay_kept_tokens": 20}, "--replay-kept-tokens must be 0 with --rlk-bitwise, got 20"),
        ({"partial_rollout": True}, "--partial-rollout must be left out with --rlk-bitwise, got True"),
        ({"fp32": False, "bf16": True}, "parameters must be float32 with --rlk-bitwise on --device cpu, got bfloat16"),
        ({}, "engines must have plain weights of the trainer's dtype, no drafts and no context"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_with_it(root, flags, message):
    with pytest.raises(ValueError, match=message):
        check_kernels(make_config(root, **BITWISE | flags))
