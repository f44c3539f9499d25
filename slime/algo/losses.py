"""The training losses: one record per value of --loss-type, in LOSSES.

`slime.rules` imports this file and must start without torch, so the functions here import the objectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.config.peer_names import instead
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.algo.token_columns import Losses, TokenColumns
    from slime.config.schema import Config
    from slime.config.sections.algorithm import AlgorithmConfig


SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
"""Rollout function whose prompts are conversations to train on."""
PAIRS_ROLLOUT = "slime.rollout.sft_rollout.generate_pairs"
"""Rollout function whose prompts are preference pairs."""
MASKED_ROLLOUTS = (SFT_ROLLOUT, PAIRS_ROLLOUT)
"""Rollout functions that make loss masks of conversations. As evaluation functions, they make held-out samples."""
_DEFAULT_ROLLOUT = "slime.rollout.vllm_rollout.generate_rollout"
SAMPLING_ROLLOUTS = (
    _DEFAULT_ROLLOUT,
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
"""Rollout functions of this project that sample responses from the engines."""


@dataclass(frozen=True)
class Loss:
    """One value of --loss-type."""

    name: str
    objective: Callable[[Config, TokenColumns], Losses] | None
    """`objective(c, t)` returns the loss from log-probs. None if --custom-loss-function-path computes the loss from
    logits."""
    rewarded: bool = True
    """True if the loss trains on rewarded samples of the policy, which have log-probs and advantages, at the
    temperature of the rollout. False if it trains on given responses."""
    pairs: bool = False
    """True if the loss trains on preference pairs. The two samples of a pair share a micro-batch."""
    head: Literal["lm", "value"] = "lm"
    """Meaning of `t.log_probs` for the objective: log-probs, or the values of a head with one value per token."""
    surrogate: bool = False
    """True if the loss contains the policy loss of --advantage-estimator, with KL and entropy."""
    entropy: bool = False
    """True if the objective reads the entropy."""
    reads: frozenset[str] = frozenset()
    """Columns that must exist before the first step, as in an estimator's record."""
    flags: frozenset[str] = frozenset()
    """Fields of the configuration that the objective reads, without those of estimator and surrogate. A hook may read
    all fields."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags. Each rule gets the configuration and raises ValueError."""
    rollout: str | None = None
    """Rollout function that returns the responses in the data, for a loss on given responses."""

    @property
    def inputs(self) -> str:
        """Returns the flags that a run on given responses needs first."""
        return f"--rollout-function-path {self.rollout} --debug-train-only"


def _policy(c: Config, t: TokenColumns) -> Losses:
    from slime.algo.policy_loss import policy_loss

    return policy_loss(c, t)


def _supervised(c: Config, t: TokenColumns) -> Losses:
    from slime.algo.policy_loss import sft_loss

    return sft_loss(t)


def _preference(c: Config, t: TokenColumns) -> Losses:
    from slime.algo.preference import dpo_loss

    return dpo_loss(c.algorithm, t)


def _rewards(c: Config, t: TokenColumns) -> Losses:
    from slime.algo.preference import reward_loss

    return reward_loss(t)


def _no_tokens_ahead(c: Config) -> None:
    """Raises ValueError for multi-token prediction, because a model with a value head predicts no tokens."""
    if c.algorithm.enable_mtp_training:
        raise FlagError(
            "--enable-mtp-training",
            f"be left out with --loss-type {c.algorithm.loss_type}",
            "both",
            "a reward model predicts no tokens",
        )


def check_responses(c: Config) -> None:
    """Raises ValueError if the rollout function does not fit a loss on given responses. Such a loss gets the responses
    from the rollout function and needs no engine. A user's own function may sample. The default function may sample for
    SFT if a reward chooses among the samples (see `sampled`)."""
    loss, path = loss_for(c.algorithm), c.rollout.rollout_function_path
    if loss.rollout is None or c.debug.load_debug_rollout_data or c.debug.debug_rollout_only:
        return
    got = f"the default, {path}, which samples" if path == _DEFAULT_ROLLOUT else path
    if loss.pairs and path in (*SAMPLING_ROLLOUTS, SFT_ROLLOUT):
        raise FlagError(
            "--rollout-function-path", f"make pairs with --loss-type {loss.name}", got, f"give {loss.inputs}"
        )
    if not loss.pairs and path in (*SAMPLING_ROLLOUTS, PAIRS_ROLLOUT) and not sampled(c):
        raise FlagError(
            "--rollout-function-path",
            f"give the responses of the data with --loss-type {loss.name}",
            got,
            f"give {loss.inputs}, or a reward such as --rm-type that chooses among samples",
        )
    if c.debug.debug_train_only:
        return
    if loss.head == "value":
        raise FlagError(
            "--debug-train-only",
            f"be given with --loss-type {loss.name}",
            "none",
            "a reward model has no engine: add it",
        )
    engines = c.cluster.rollout_num_gpus is not None or c.rollout.rollout_external_engine_addrs
    if path in MASKED_ROLLOUTS and not engines:
        raise FlagError(
            "--debug-train-only",
            f"be given with --loss-type {loss.name} and --rollout-function-path {path}",
            "none",
            "add it, as the responses are in the data, or --colocate for an evaluation that generates",
        )


def sampled(c: Config) -> bool:
    """Returns true if SFT shall train on responses that the engines sample: a reward or a user's function is part of
    the rollout, and the run has engines."""
    r = c.reward
    chosen = r.rm_type or r.rm_weights or r.custom_rm_path or c.rollout.custom_generate_function_path
    default = c.rollout.rollout_function_path in SAMPLING_ROLLOUTS
    return bool(default and chosen and not c.debug.debug_train_only and not loss_for(c.algorithm).pairs)


def _check_pairs(c: Config) -> None:
    """Raises ValueError for flags that do not fit a loss that is a mean over pairs, with one pair per row."""
    kind = c.algorithm.loss_type
    if c.algorithm.calculate_per_token_loss:
        raise FlagError(
            "--calculate-per-token-loss",
            f"be left out with --loss-type {kind}",
            "both",
            "the loss is a mean over pairs",
        )
    if c.data.n_samples_per_prompt != 1:
        raise FlagError(
            "--n-samples-per-prompt",
            f"be 1 with --loss-type {kind}",
            c.data.n_samples_per_prompt,
            "a row of --prompt-data is one pair",
        )


def _check_custom_loss(c: Config) -> None:
    if c.algorithm.custom_loss_function_path is None:
        raise FlagError("--custom-loss-function-path", "be given with --loss-type custom_loss", "none")


_DIVIDED = frozenset({"calculate_per_token_loss", "use_dr_grpo"})
"""Fields that losses read which are means over the tokens of samples."""
_POLICY = _DIVIDED | {
    "entropy_coef",
    "use_kl_loss",
    "use_tis",
    "use_rs",
    "use_opsm",
    "get_mismatch_metrics",
    "use_rollout_logprobs",
    "use_score_centering",
    "custom_pg_loss_reducer_function_path",
}

LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("policy_loss", _policy, surrogate=True, entropy=True, flags=_POLICY),
        Loss("sft_loss", _supervised, rewarded=False, flags=_DIVIDED, rollout=SFT_ROLLOUT),
        Loss(
            "dpo",
            _preference,
            rewarded=False,
            pairs=True,
            reads=frozenset({"ref_log_probs"}),
            flags=frozenset({"dpo_beta", "dpo_label_smoothing", "ref_update_interval"}),
            checks=(_check_pairs,),
            rollout=PAIRS_ROLLOUT,
        ),
        Loss(
            "reward_model",
            _rewards,
            rewarded=False,
            pairs=True,
            head="value",
            checks=(_check_pairs, _no_tokens_ahead),
            rollout=PAIRS_ROLLOUT,
        ),
        Loss(
            "custom_loss",
            None,
            reads=frozenset({"old_log_probs"}),
            flags=frozenset({"custom_loss_function_path"}),
            checks=(_check_custom_loss,),
        ),
    )
}


def loss_for(algorithm: AlgorithmConfig) -> Loss:
    """Returns the record that --loss-type names."""
    if algorithm.loss_type not in LOSSES:
        raise FlagError(
            "--loss-type",
            f"be one of {', '.join(LOSSES)}",
            f"{algorithm.loss_type}{instead('loss_type', algorithm.loss_type, LOSSES)}",
        )
    return LOSSES[algorithm.loss_type]


def held_out(c: Config) -> bool:
    """Returns true if an evaluation computes the loss of held-out samples: the loss is on given responses, and the
    evaluation function makes samples from conversations or pairs."""
    return not loss_for(c.algorithm).rewarded and c.evaluation.eval_function_path in MASKED_ROLLOUTS
