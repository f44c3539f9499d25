"""Decides which operators of rl_kernel the training runs: one decision per operator, at start-up.

This module owns the rule that chooses how log-probs are computed from hidden states, and the operators' metrics. It
does not import Megatron. Only the functions that decide, install or count import rl_kernel, which imports torch: the
driver calls the rules and must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.algo.corrections import LEVELS
from slime.algo.estimators import estimator_for, surrogate_for
from slime.algo.flags import reads_kl_in_reward
from slime.algo.losses import loss_for
from slime.algo.needs import draws_in_loss
from slime.checkpoints.hf_config import read_hf_config
from slime.config.sections.kernels import OPERATORS
from slime.models.reading import expert_count
from slime.records.errors import FlagError
from slime.roles import POLICY, get_passes, get_roles

if TYPE_CHECKING:
    import torch

    from slime.config.schema import Config

REDUCTIONS = ("masked_sum", "masked_mean", "masked_whiten")
"""Deterministic reductions. --rl-kernel-ops switches them together with group_advantage."""

FILTERS = "slime.rollout.filter_hub."
"""Path prefix of the dynamic-sampling filters that compare the rewards of a group."""


@dataclass(frozen=True)
class Head:
    """One way to compute log-probs from hidden states."""

    name: str
    """The operator's name in --rl-kernel-ops."""
    in_one_pass: bool = False
    """The operator also computes the loss, block by block of tokens. It cannot compute a loss that needs whole
    sequences."""
    has_logits: bool = True
    """The logits of all response tokens of a micro-batch are in memory at once."""


ONE_PASS = Head("linear_token_loss", in_one_pass=True, has_logits=False)
LINEAR = Head("linear_logp", has_logits=False)
LOGITS = Head("logp")
NATIVE = Head("native")
"""Megatron's logits and plain PyTorch, with no operator."""

PROVIDER = Head("provider")
"""Logits, and the function of --selected-logprob-provider."""

BITWISE = Head("bitwise", has_logits=False)
"""The operators of rl_kernel.invariant, which the engine has too. linear_logp computes the gradients."""

BITWISE_ONE_PASS = Head("bitwise", in_one_pass=True, has_logits=False)
"""The head has the log-probs of BITWISE. linear_token_loss computes loss and gradients, with one product less."""

VALUES = Head("value head", has_logits=False)
"""One value per token, of a reward model, with no operator."""

HEADS = (ONE_PASS, LINEAR, LOGITS)
"""The heads that are operators, in order of preference."""


@dataclass(frozen=True)
class Decision:
    """The decision about one operator. `str` is the line that the run prints."""

    operator: str
    requested: str
    chosen: str
    """triton, reference (the operator in plain PyTorch) or not called."""
    reason: str
    contract: str
    """The numeric contract that a fast run must meet."""

    def __str__(self) -> str:
        return f"{self.contract:<28} {self.chosen:<10} {self.reason}".rstrip()

    @property
    def short(self) -> str:
        """Returns the decision's line without the contract's hash."""
        return f"{self.operator:<19} {self.chosen:<10} {self.reason}".rstrip()


def loss_head(config: Config) -> tuple[Head, str]:
    """Returns the head of the training loss, and the reason why it is not the one-pass operator ("" if it is).

    A loss that needs whole sequences cannot be computed block by block of tokens. A provider comes before every
    operator. The head is NATIVE with --rlk-fast off, for a custom loss, and when --rl-kernel-ops has no operator for
    log-probs.
    """
    if loss_for(config.algorithm).head == "value":
        return VALUES, f"--loss-type {config.algorithm.loss_type} reads values"
    if POLICY not in get_roles(config):
        return VALUES, "these ranks do not have the policy"
    reads_logits = loss_for(config.algorithm).objective is None
    if (provider := config.kernels.selected_logprob_provider) and not reads_logits:
        return PROVIDER, f"--selected-logprob-provider {provider}"
    if "head" in bitwise(config):
        one_pass = not reads_logits and not whole_sequences(config) and config.kernels.rlk_fast != "off"
        listed = ONE_PASS.name in config.kernels.rl_kernel_ops
        return BITWISE_ONE_PASS if one_pass and listed else BITWISE, "--rlk-bitwise"
    if config.kernels.rlk_fast == "off":
        return NATIVE, "--rlk-fast off"
    if reads_logits:
        return NATIVE, "--custom-loss-function-path takes logits"
    reason = whole_sequences(config)
    for head in HEADS:
        if head.in_one_pass and reason:
            continue
        if head.name in config.kernels.rl_kernel_ops:
            return head, reason
        reason = reason or f"{head.name} is not in --rl-kernel-ops"
    return NATIVE, "no operator for log-probs is in --rl-kernel-ops"


def bitwise(config: Config) -> tuple[str, ...]:
    """Returns the names in BITWISE_OPERATORS of the rl_kernel.invariant operators that trainer and engine share."""
    return tuple(config.kernels.rlk_bitwise_operators) if config.kernels.rlk_bitwise else ()


def require_promise(side: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if the operators of --rlk-bitwise cannot run on `device`, or break their promise there.

    `side` is "trainer" or "engine". `dtype` is the model's dtype.
    """
    import rl_kernel.invariant as invariant

    if reason := invariant.refusal(device):
        raise FlagError(
            "--rlk-bitwise",
            "have a device that runs rl_kernel.invariant",
            f"{device} in the {side}, where {reason}",
            "leave --rlk-bitwise out on this machine",
        )
    if names := invariant.broken(device, dtype):
        raise FlagError(
            "--rlk-bitwise",
            "have operators whose rows are independent",
            f"others in the {side} on {device}: {', '.join(names)}",
            "leave --rlk-bitwise out on this machine",
        )


def pass_head(config: Config) -> Head:
    """Returns the head for the log-probs of the old policy and of the reference model, which need no gradient."""
    if config.kernels.selected_logprob_provider:
        return PROVIDER
    if "head" in bitwise(config):
        return BITWISE
    if config.kernels.rlk_fast == "off":
        return NATIVE
    listed = (head for head in HEADS if not head.in_one_pass and head.name in config.kernels.rl_kernel_ops)
    return next(listed, NATIVE)


def whole_sequences(config: Config) -> str:
    """Returns the reason why a token's loss needs more than the token's log-prob, or "" if the log-prob is enough."""
    if loss_for(config.algorithm).pairs:
        return f"--loss-type {config.algorithm.loss_type} looks at whole sequences"
    if not loss_for(config.algorithm).surrogate:
        return ""
    algorithm, off_policy = config.algorithm, config.off_policy
    surrogate = f"--advantage-estimator {algorithm.advantage_estimator}"
    if algorithm.pg_loss_type is not None:
        surrogate = f"--pg-loss-type {algorithm.pg_loss_type}"
    weighs = off_policy.use_tis or off_policy.get_mismatch_metrics
    asked = {
        surrogate: surrogate_for(algorithm).reads_sequences,
        "--use-opsm": off_policy.use_opsm,
        f"--tis-level {off_policy.tis_level}": weighs and LEVELS[off_policy.tis_level].part != "token",
        f"--rs-level {off_policy.rs_level}": off_policy.use_rs
        and LEVELS[off_policy.rs_level].part != "token",
        "--rs-veto-threshold": off_policy.use_rs and off_policy.rs_veto_threshold is not None,
        "--custom-tis-function-path": off_policy.custom_tis_function_path,
        "--custom-pg-loss-reducer-function-path": algorithm.custom_pg_loss_reducer_function_path,
    }
    return next((f"{flag} looks at whole sequences" for flag, on in asked.items() if on), "")


def called(config: Config) -> set[str]:
    """Returns the names of the operators that this configuration calls. Calls that a hook adds or replaces are
    ignored."""
    found = {"group_advantage"} if _rates_groups(config) else set[str]()
    if config.debug.debug_rollout_only:
        return found
    head = loss_head(config)[0]
    with_gradients = {BITWISE: {LINEAR.name}, BITWISE_ONE_PASS: {ONE_PASS.name}}
    found |= {head.name} | with_gradients.get(head, set())
    if any(role.head == "lm" for role in get_passes(config)):
        found.add(pass_head(config).name)
        if pass_head(config) == BITWISE and draws_in_loss(config):
            found.add(LINEAR.name)  # linear_top, which --rlk-fast sets with linear_logp
    return found | {name for name, calls in _IN_TRAINING.items() if calls(config)}


def _rates_groups(config: Config) -> bool:
    rewarded = loss_for(config.algorithm).rewarded
    return rewarded and (_compares_rewards(config) or _filters_by_reward(config))


def _own_activation(config: Config) -> bool:
    """Returns False if another activation runs: Megatron's with Transformer Engine, or the engine's with
    --rlk-bitwise."""
    local = config.megatron.overrides.get("transformer_impl", "local") == "local"
    return bool(local and "activation" not in bitwise(config))


def _has_experts(config: Config) -> bool:
    """Returns whether config.json names experts. Most rules run before a checkpoint exists, and then the result is
    False."""
    directory = config.rollout.hf_checkpoint
    if directory is None or not Path(directory, "config.json").is_file():
        return False
    return expert_count(read_hf_config(directory)) > 0


def _own_advantages(config: Config) -> bool:
    algorithm = config.algorithm
    left_out = algorithm.disable_compute_advantages_and_returns or algorithm.custom_advantage_function_path
    return loss_for(algorithm).rewarded and not left_out


def _has_kl(config: Config) -> bool:
    in_loss = loss_for(config.algorithm).surrogate and config.algorithm.use_kl_loss
    return in_loss or (_own_advantages(config) and reads_kl_in_reward(config))


def _whitens(config: Config) -> bool:
    return _own_advantages(config) and config.algorithm.normalize_advantages


def _fused_policy_loss(config: Config) -> bool:
    hooked = (
        config.off_policy.custom_tis_function_path or config.algorithm.custom_pg_loss_reducer_function_path
    )
    fused = loss_for(config.algorithm).surrogate and surrogate_for(config.algorithm).fused
    return fused and not hooked


_IN_TRAINING: dict[str, Callable[[Config], bool]] = {
    "rotary": lambda config: True,
    "swiglu": _own_activation,
    "expert_dispatch": _has_experts,
    "expert_combine": _has_experts,
    "ratio_kl": _has_kl,
    "masked_whiten": _whitens,
    "grpo_loss": _fused_policy_loss,
}
"""Operator other than a head -> the function that returns whether training calls the operator."""


def _compares_rewards(config: Config) -> bool:
    hooked = (
        config.reward.custom_reward_post_process_path
        or config.reward.custom_convert_samples_to_train_data_path
    )
    normalised = (
        estimator_for(config.algorithm).centred and not config.algorithm.disable_rewards_normalization
    )
    return normalised and not hooked


def _filters_by_reward(config: Config) -> bool:
    return (config.rollout.dynamic_sampling_filter_path or "").startswith(FILTERS)


def decide(config: Config, device_type: str) -> list[Decision]:
    """Returns one decision per operator, for tensors of `device_type`.

    Raises Refused with --rlk-fast strict if an operator that the configuration calls cannot run fast.
    """
    from rl_kernel.contract import contract_id
    from rl_kernel.dispatch import Refused

    found, refused = [], {}
    for name in (*OPERATORS, "masked_whiten"):
        chosen, reason, fallback = _chosen(name, config, device_type)
        if fallback:
            refused[name] = reason
        found.append(Decision(name, config.kernels.rlk_fast, chosen, reason, contract_id(name)))
    if refused and config.kernels.rlk_fast == "strict":
        reasons = "; ".join(dict.fromkeys(refused.values()))
        raise Refused(
            f"--rlk-fast strict must run the fast {', '.join(refused)}, but {reasons}; use --rlk-fast auto"
        )
    return found


def _chosen(name: str, config: Config, device_type: str) -> tuple[str, str, bool]:
    """Returns (implementation, reason, whether the implementation is a fallback in spite of --rlk-fast)."""
    if name not in called(config):
        return "not called", loss_head(config)[1] if name == ONE_PASS.name else "", False
    if config.kernels.rlk_fast == "off":
        return "reference", "--rlk-fast off", False
    listed = "group_advantage" if name in REDUCTIONS else name
    if listed not in config.kernels.rl_kernel_ops:
        return "reference", f"{listed} is not in --rl-kernel-ops", False
    if name == "group_advantage":
        return "reference", "rewards are on the host", False
    from rl_kernel.dispatch import HOST_OPERATORS, machine_refusal

    refusal = machine_refusal(device_type)
    if refusal is None:
        return "triton", "", False
    return "reference", refusal, not (device_type == "cpu" and name in HOST_OPERATORS)


def headline(config: Config) -> str:
    """Returns the line above the decisions."""
    head, reason = loss_head(config)
    if head == VALUES:
        return f"--rlk-fast {config.kernels.rlk_fast}, {reason}"
    line = f"--rlk-fast {config.kernels.rlk_fast}, the loss has its log-probs from {head.name}"
    line += f": {reason}" if reason else ""
    if shared := bitwise(config):
        line += f"; trainer and engine both compute {', '.join(shared)} with rl_kernel.invariant"
    return line


def install(config: Config) -> None:
    """Applies --rlk-fast and --rl-kernel-ops in this process, and sets the timing of operators."""
    import rl_kernel
    from rl_kernel.telemetry import set_timing, time_compilations

    names = list(config.kernels.rl_kernel_ops)
    if "group_advantage" in names:
        names += REDUCTIONS
    if LINEAR.name in names:
        names.append("linear_top")  # A teacher's head, which is the same operator (see `pass_head`).
    rl_kernel.configure(config.kernels.rlk_fast, names)
    set_timing(config.kernels.rlk_fast != "off")
    if _has_kernels():
        time_compilations()


def _has_kernels() -> bool:
    """Returns whether this process can run Triton kernels."""
    import torch

    from rl_kernel.dispatch import machine_refusal

    return torch.cuda.is_available() and machine_refusal("cuda") is None


def step_metrics() -> dict[str, float]:
    """Returns the metrics of the operators in this process since the last call of this function.

    `rl_kernel/compile_ms` is the time in which Triton compiled kernels, absent if it compiled none. With --rlk-fast off
    there are no other metrics. `rl_kernel/{op}/calls`, `/tokens`, `/fallbacks` and `/ms` are per operator.
    `rl_kernel/fast` is the share of fast runs among the calls that the mode wants to be fast. The share is the mean
    over operators, so that a fallback of any operator shows: a layer calls its operators hundreds of times per step,
    and the head is called once per micro-batch. Operators of the host, operators outside --rl-kernel-ops and the native
    path do not count.

    The function reads timing events of the device. The caller must call it at the end of a step, when the step's
    metrics have arrived.
    """
    import rl_kernel
    from rl_kernel.mode import settings
    from rl_kernel.telemetry import compiled_ms

    counted = rl_kernel.telemetry(reset=True)
    metrics = {"rl_kernel/compile_ms": compiled} if (compiled := compiled_ms()) else {}
    if settings().mode == "off":
        return metrics
    shares = []
    for name, counts in counted.items():
        fallen = sum(counts["fallbacks"].values())
        values = {
            "calls": counts["calls"],
            "tokens": counts["tokens"],
            "fallbacks": fallen,
            "ms": counts["ms"],
        }
        metrics |= {f"rl_kernel/{name}/{key}": float(value) for key, value in values.items()}
        if wanted := counts["implementations"].get("triton", 0) + fallen:
            shares.append(1 - fallen / wanted)
    if shares:
        metrics["rl_kernel/fast"] = sum(shares) / len(shares)
    return metrics
