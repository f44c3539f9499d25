"""Tests the switch: each configuration's head with its reason, one decision per operator, strict mode, a step's
counts."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from config_cases import good_argv

import rl_kernel
from rl_kernel.contract import contract_id
from rl_kernel.dispatch import Choice, Refused
from rl_kernel.telemetry import record
from slime import operators
from slime.rules import parse_args

ALL = (
    "linear_logp,linear_token_loss,logp,ratio_kl,grpo_loss,swiglu,rotary,expert_dispatch,expert_combine,"
    "group_advantage"
)


@pytest.fixture
def configured(tmp_path):
    return lambda *flags: parse_args([*good_argv(tmp_path), *flags])


@pytest.fixture
def switched():
    """Restores the defaults of rl_kernel."""
    yield
    rl_kernel.configure()
    rl_kernel.telemetry(reset=True)


def chosen(config):
    return {d.operator: d.chosen for d in operators.decide(config, "cpu")}


PROVIDER = ("--selected-logprob-provider", "math.fsum")
SFT = (
    *("--loss-type", "sft_loss", "--debug-train-only"),
    *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
)
CUSTOM = ("--custom-tis-function-path", "math.fsum", "--use-tis")


@pytest.mark.parametrize(
    ("flags", "head", "reason"),
    [
        ((), "linear_token_loss", ""),
        (("--advantage-estimator", "cispo"), "linear_token_loss", ""),
        (SFT, "linear_token_loss", ""),
        (("--advantage-estimator", "gspo"), "linear_logp", "--advantage-estimator gspo looks at whole sequences"),
        (("--use-opsm",), "linear_logp", "--use-opsm looks at whole sequences"),
        (CUSTOM, "linear_logp", "--custom-tis-function-path looks at whole sequences"),
        (
            ("--custom-pg-loss-reducer-function-path", "math.fsum"),
            "linear_logp",
            "--custom-pg-loss-reducer-function-path looks at whole sequences",
        ),
        (
            ("--loss-type", "custom_loss", "--custom-loss-function-path", "math.fsum"),
            "native",
            "--custom-loss-function-path takes logits",
        ),
        (("--rl-kernel-ops", "linear_logp,logp"), "linear_logp", "linear_token_loss is not in --rl-kernel-ops"),
        (("--rl-kernel-ops", "logp"), "logp", "linear_token_loss is not in --rl-kernel-ops"),
        (("--rl-kernel-ops", "ratio_kl"), "native", "no operator for log-probs is in --rl-kernel-ops"),
        (("--rlk-fast", "off"), "native", "--rlk-fast off"),
        (PROVIDER, "provider", "--selected-logprob-provider math.fsum"),
        ((*PROVIDER, "--rlk-fast", "off"), "provider", "--selected-logprob-provider math.fsum"),
        ((*PROVIDER, "--advantage-estimator", "gspo"), "provider", "--selected-logprob-provider math.fsum"),
        (
            (*PROVIDER, "--loss-type", "custom_loss", "--custom-loss-function-path", "math.fsum"),
            "native",
            "--custom-loss-function-path takes logits",
        ),
    ],
)  # fmt: skip
def test_head_of_the_loss(configured, flags, head, reason):
    found, why = operators.loss_head(configured(*flags))
    assert (found.name, why) == (head, reason)


@pytest.mark.parametrize(
    ("flags", "head"),
    [
        ((), "linear_logp"),
        (("--rl-kernel-ops", "logp"), "logp"),
        (("--rlk-fast", "off"), "native"),
        (PROVIDER, "provider"),
    ],
)
def test_head_of_passes_without_gradient(configured, flags, head):
    assert operators.pass_head(configured(*flags)).name == head


def test_decisions_of_a_plain_run(configured):
    """Two steps per rollout need old log-probs, so the two-pass operator is called as well."""
    config = configured()
    decisions = {d.operator: d for d in operators.decide(config, "cpu")}
    assert list(decisions) == [*ALL.split(","), "masked_whiten"]
    on_cpu = "the tensors are on cpu and the kernels need a CUDA device"
    for name in ("linear_token_loss", "linear_logp", "grpo_loss", "swiglu", "rotary"):
        assert (decisions[name].requested, decisions[name].chosen) == ("auto", "reference")
        assert decisions[name].reason == on_cpu
        assert decisions[name].contract == contract_id(name)
    assert decisions["group_advantage"].reason == "rewards are on the host"
    assert decisions["logp"].chosen == decisions["ratio_kl"].chosen == "not called"
    kl = ("--kl-coef", "0.1", "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages")
    assert chosen(configured(*kl))["ratio_kl"] == "reference"
    assert chosen(configured("--normalize-advantages"))["masked_whiten"] == "reference"
    hooked = ("--kl-coef", "0.1", "--normalize-advantages", "--custom-advantage-function-path", "math.fsum")
    assert {chosen(configured(*hooked))[name] for name in ("ratio_kl", "masked_whiten")} == {"not called"}


def test_decisions_follow_the_configuration(configured):
    off = chosen(configured("--rlk-fast", "off"))
    reference = {"grpo_loss", "swiglu", "rotary", "group_advantage"}
    assert {name for name, what in off.items() if what == "reference"} == reference
    assert set(off.values()) == {"reference", "not called"}
    one_step = chosen(configured("--global-batch-size", "32"))
    assert (one_step["linear_token_loss"], one_step["linear_logp"]) == ("reference", "not called")
    gspo = operators.decide(configured("--advantage-estimator", "gspo"), "cpu")
    assert str(gspo[1]).endswith(" not called --advantage-estimator gspo looks at whole sequences")
    some = chosen(configured("--rl-kernel-ops", "linear_logp,ratio_kl"))
    assert (some["linear_token_loss"], some["linear_logp"]) == ("not called", "reference")
    grpo = operators.decide(configured("--rl-kernel-ops", "linear_logp"), "cpu")[4]
    assert (grpo.chosen, grpo.reason) == ("reference", "grpo_loss is not in --rl-kernel-ops")
    assert chosen(configured(*SFT))["group_advantage"] == "not called"
    plain = ("--disable-rewards-normalization",)
    assert chosen(configured(*plain))["group_advantage"] == "not called"
    filters = f"{operators.FILTERS}dynamic_sampling_filters.check_reward_nonzero_std"
    assert (
        chosen(configured(*plain, "--dynamic-sampling-filter-path", filters))["group_advantage"]
        == "reference"
    )


def test_the_activation_of_transformer_engines_layers_is_not_ours(configured):
    local, theirs = (
        operators.called(configured("--transformer-impl", impl, "--device", "cuda"))
        for impl in ("local", "transformer_engine")
    )
    assert local - theirs == {"swiglu"} and theirs < local
    assert "swiglu" in operators.called(configured())


def test_strict_refuses_a_cpu_naming_operator_and_reason(configured):
    for flag in (("--rlk-fast", "strict"), ("--rl-kernel-strict",)):
        with pytest.raises(
            Refused,
            match="must run the fast linear_logp, linear_token_loss, grpo_loss, swiglu, rotary, but the tensors",
        ):
            operators.decide(configured(*flag), "cpu")
    # Operators that run on the host by design are no fallback, and a run without a trainer has only these.
    operators.decide(configured("--rlk-fast", "strict", "--debug-rollout-only"), "cpu")
    operators.decide(configured("--rlk-fast", "strict", "--rl-kernel-ops", "group_advantage"), "cpu")


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ((), "auto"),
        (("--enable-rl-kernel",), "auto"),
        (("--enable-rl-kernel", "--rl-kernel-strict"), "strict"),
        (("--rlk-fast", "off"), "off"),
    ],
)
def test_spellings_of_the_mode(configured, flags, mode):
    assert configured(*flags).kernels.rlk_fast == mode


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rl-kernel-ops", "linear_logp,grpo"), "must name operators of linear_logp, .*got grpo"),
        (("--rlk-fast", "off", "--rl-kernel-strict"), "--rl-kernel-strict must not be combined with --rlk-fast off"),
        (("--rlk-fast", "auto", "--rl-kernel-strict"), "--rl-kernel-strict must not be combined with --rlk-fast auto"),
        (("--rlk-fast", "off", "--enable-rl-kernel"), "--enable-rl-kernel must not be combined with --rlk-fast off"),
        (("--rlk-fast", "fast"), "--rlk-fast must be one of off, auto, strict, got fast"),
    ],
)  # fmt: skip
def test_what_is_refused(configured, flags, message):
    with pytest.raises(ValueError, match=message):
        configured(*flags)


def test_counts_of_a_step(configured, switched):
    operators.install(configured())
    operators.step_metrics()
    rl_kernel.group_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    rl_kernel.linear_logp(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 1, 2]))
    metrics = operators.step_metrics()
    assert metrics["rl_kernel/linear_logp/calls"] == 1 and metrics["rl_kernel/linear_logp/tokens"] == 3
    assert metrics["rl_kernel/linear_logp/fallbacks"] == 1 and metrics["rl_kernel/linear_logp/ms"] > 0
    assert metrics["rl_kernel/group_advantage/fallbacks"] == 0
    assert metrics["rl_kernel/fast"] == 0.0
    assert operators.step_metrics() == {}


def test_a_head_that_falls_back_shows_beside_hundreds_of_layers(configured, switched):
    """One operator of four falls back, and half of another's calls do: (1 + 1 + 0 + 1/2) / 4, for any number of
    calls."""
    operators.install(configured())
    operators.step_metrics()
    for name, calls in {"swiglu": 720, "rotary": 720, "grpo_loss": 1}.items():
        for _ in range(calls):
            record(Choice(name, "triton"), 10)
    for name in ("linear_token_loss", "grpo_loss"):
        record(Choice(name, "reference", "float64", fallback=True), 10)
    record(Choice("logp", "reference", "the operator is not in the configured list"), 10)
    assert operators.step_metrics()["rl_kernel/fast"] == 2.5 / 4


def test_off_counts_nothing(configured, switched):
    operators.install(configured("--rlk-fast", "off"))
    rl_kernel.group_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert operators.step_metrics() == {}


def test_a_run_says_its_provider(configured):
    config = configured(*PROVIDER)
    assert operators.headline(config) == (
        "--rlk-fast auto, the loss has its log-probs from provider: --selected-logprob-provider math.fsum"
    )
    assert chosen(config)["linear_token_loss"] == chosen(config)["linear_logp"] == "not called"


def test_a_run_says_what_both_sides_compute_alike(configured):
    plain = configured()
    config = replace(plain, kernels=replace(plain.kernels, rlk_bitwise=True))
    assert operators.headline(config) == (
        "--rlk-fast auto, the loss has its log-probs from bitwise: --rlk-bitwise; trainer and engine both compute "
        "product, norm, activation, rotary, attention, head with rl_kernel.invariant"
    )
    found = chosen(config)
    assert found["linear_token_loss"] == "reference" and found["linear_logp"] == "not called"
    for kernels in ({"rlk_fast": "off"}, {"rl_kernel_ops": ["linear_logp"]}):
        two_passes = replace(config, kernels=replace(config.kernels, **kernels))
        assert operators.loss_head(two_passes)[0] is operators.BITWISE
        assert operators.called(two_passes) >= {"linear_logp"} > operators.called(config) & {"linear_logp"}
    config = replace(plain, kernels=replace(config.kernels, rlk_bitwise_operators=["norm"]))
    assert operators.headline(config).endswith(
        "from linear_token_loss; trainer and engine both compute norm with rl_kernel.invariant"
    )


def test_a_provider_that_is_not_there(configured):
    """In mode auto the run reports it at its start. In mode strict it is an error, and an invalid provider is one in
    both."""
    flags = ("--selected-logprob-provider", "no_such_module.provider")
    notes = [note for note in configured(*flags).notes if "provider" in note]
    assert len(notes) == 1 and notes[0].startswith(
        "the trainer's own log-probs are used: --selected-logprob-provider"
    )
    for bad in (
        (*flags, "--selected-logprob-provider-mode", "strict"),
        ("--selected-logprob-provider", "math.no_such_name", "--selected-logprob-provider-mode", "strict"),
        ("--selected-logprob-provider", "provider"),
        ("--selected-logprob-provider", "math.pi"),
    ):
        with pytest.raises(ValueError, match="--selected-logprob-provider must"):
            configured(*bad)
    with pytest.raises(ValueError, match="--selected-logprob-provider-mode strict must be combined with"):
        configured("--selected-logprob-provider-mode", "strict")
    with pytest.raises(
        ValueError, match="--selected-logprob-provider-mode must be one of auto, strict, got fast"
    ):
        configured(*PROVIDER, "--selected-logprob-provider-mode", "fast")


COMPILE = """
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rl_kernel.ops.swiglu.kernels import backward_kernel
from rl_kernel.telemetry import time_compilations
from slime import operators

heard = []
knobs.compilation.listener = lambda **event: heard.append(event["cache_hit"])
time_compilations()
time_compilations()
pointers = {"X": "*fp32", "D_OUT": "*fp32", "D_X": "*fp32"}
types = pointers | {"x_stride": "i32", "d_stride": "i32", "F": "i32", "BLOCK": "constexpr"}
steps = []
for block in (64, 64, 128):
    source = ASTSource(backward_kernel, types, {(6,): block})
    compile(source, target=GPUTarget("cuda", 90, 32))
    steps.append(operators.step_metrics())
print([step.get("rl_kernel/compile_ms", 0) > 1 for step in steps], [len(step) for step in steps], heard)
"""


def test_a_step_says_how_long_triton_compiled(tmp_path):
    """The second step reads its kernel from the disk. Triton's earlier listener is still called."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "[True, False, True] [1, 0, 1] [False, True, False]"
