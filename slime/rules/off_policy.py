"""Defines the rules of corrections for the difference between engine and trainer, and of routing replay."""

from __future__ import annotations

from collections.abc import Iterator

from slime.algo.corrections import LEVELS, MEASURES
from slime.algo.estimators import surrogate_for
from slime.algo.losses import loss_for
from slime.algo.needs import draws_in_loss
from slime.config.fields import spelled
from slime.config.schema import Config
from slime.records.errors import FlagError


def check_off_policy(c: Config) -> None:
    """Checks that the log-probs that a correction compares exist and come from the same distribution."""
    if c.off_policy.use_rollout_logprobs and c.off_policy.use_tis:
        raise FlagError(
            "--use-rollout-logprobs",
            "not be combined with --use-tis",
            "both",
            "with rollout log-probs as the old policy there is nothing left to correct",
        )
    if c.off_policy.use_rollout_logprobs and c.off_policy.use_rs:
        raise FlagError(
            "--use-rollout-logprobs",
            "not be combined with --use-rs",
            "both",
            "with rollout log-probs as the old policy there is nothing to reject",
        )
    if c.algorithm.ref_update_interval is not None and c.checkpoint.save is not None:
        raise FlagError(
            "--ref-update-interval",
            "not be combined with --save",
            "both",
            "checkpoints do not hold the moved reference model yet, so a resumed run would go on "
            "with another one",
        )
    if c.off_policy.use_rollout_logprobs and c.off_policy.get_mismatch_metrics:
        raise FlagError(
            "--get-mismatch-metrics",
            "not be combined with --use-rollout-logprobs",
            "both",
            "the trainer's own old log-probs, which the metrics compare with, are not computed then",
        )
    reads_engine = ("use_rollout_logprobs", "use_tis", "use_rs", "get_mismatch_metrics")
    name = next((name for name in reads_engine if c.get_value(name)), None)
    if name and cuts(c) and not c.off_policy.replay_kept_tokens:
        raise FlagError(
            spelled(name),
            "be used with --rollout-top-p 1 and --rollout-top-k -1",
            f"{c.rollout.rollout_top_p} and {c.rollout.rollout_top_k}",
            "the engine's log-probs are of fewer tokens: --replay-kept-tokens N computes both "
            "over the ids that the engine kept",
        )
    if c.off_policy.tis_clip_low > c.off_policy.tis_clip:
        raise FlagError(
            "--tis-clip-low",
            "be at most --tis-clip",
            f"{c.off_policy.tis_clip_low} and {c.off_policy.tis_clip}",
        )


def cuts(c: Config) -> bool:
    """Returns True if engines sample from fewer ids than the model has."""
    return c.rollout.rollout_top_p < 1 or c.rollout.rollout_top_k != -1


def check_levels(c: Config) -> None:
    """Checks that a mask drops at least the units of the surrogate's ratio, and that the bounds keep something.

    A function of the user may give the flags another meaning.
    """
    o, surrogate = c.off_policy, surrogate_for(c.algorithm)
    if o.custom_tis_function_path is not None:
        return
    if o.use_rs and MEASURES[o.rs_type].ratio and o.rs_lower_bound > o.rs_upper_bound:
        raise FlagError(
            "--rs-lower-bound",
            "be at most --rs-upper-bound",
            f"{o.rs_lower_bound} and {o.rs_upper_bound}",
            "nothing would be kept",
        )
    masks = {
        f"--rs-level {o.rs_level}": o.use_rs and LEVELS[o.rs_level].part != "sequence",
        f"--tis-mode {o.tis_mode} --tis-level {o.tis_level}": (
            o.use_tis and o.tis_mode == "mask" and LEVELS[o.tis_level].part != "sequence"
        ),
    }
    if surrogate.reads_sequences and (mask := next((flags for flags, on in masks.items() if on), None)):
        raise FlagError(
            mask,
            f"not be combined with the policy loss {surrogate.name}",
            "both",
            "its ratio is of whole sequences, and that of a sequence without some of its tokens "
            "is undefined: use the level sequence or geometric",
        )


def mismatch_notes(c: Config) -> Iterator[str]:
    """Yields a note that recommends a correction if the engine computes in another precision than the trainer and no
    correction is on."""
    o, facts = c.off_policy, c.engine.engine_facts
    corrected = o.use_tis or o.use_rs or o.use_rollout_logprobs
    if (
        not loss_for(c.algorithm).rewarded
        or corrected
        or c.debug.debug_train_only
        or not c.cluster.rollout_num_gpus
    ):
        return
    trainer = c.megatron.params_dtype
    if facts.weight_bytes is not None:
        theirs = f"quantised weights ({facts.weight_bytes:.2g} bytes each)"
    elif facts.dtype is not None and facts.dtype != trainer:
        theirs = facts.dtype
    else:
        return
    trainer = "products in fp8" if c.megatron.has_fp8_blocks else trainer
    yield (
        f"{facts.project} computes with {theirs}, the trainer with {trainer}: their probabilities of a token differ. "
        "--use-tis --tis-mode mask --tis-clip 5 --tis-clip-low 0.5 (IcePop) trains without the tokens that differ "
        "most; --get-mismatch-metrics only reports"
    )


def check_kept_tokens(c: Config) -> None:
    """Checks that sampling cuts ids off, and that the requested sets can hold the rest."""
    most, p, k = c.off_policy.replay_kept_tokens, c.rollout.rollout_top_p, c.rollout.rollout_top_k
    if not most:
        return
    if p == 1 and k == -1:
        raise FlagError(
            "--replay-kept-tokens",
            "be left out with --rollout-top-p 1 and --rollout-top-k -1",
            most,
            "nothing is cut off",
        )
    if p == 1 and k > most:
        raise FlagError(
            "--replay-kept-tokens",
            "be at least --rollout-top-k",
            f"{most} and {k}",
            "the set of no token would fit",
        )
    teacher = c.distillation
    if teacher.use_opd and not draws_in_loss(c) and teacher.opd_type != "megatron":
        raise FlagError(
            "--replay-kept-tokens",
            f"be left out with --opd-type {teacher.opd_type}",
            most,
            "a served teacher's log-probs are over all ids, and their difference would be no KL: "
            "use --opd-type megatron, or leave out one of the two",
        )
    if not loss_for(c.algorithm).rewarded:
        raise FlagError(
            "--replay-kept-tokens",
            f"be left out with --loss-type {c.algorithm.loss_type}",
            most,
            "no engine samples",
        )


def check_routing_replay(c: Config) -> None:
    """Checks that the engine or an earlier pass chooses experts, and that each layer of the training pass gets them."""
    if (flag_ := _replays(c)) is None:
        return
    if not loss_for(c.algorithm).rewarded:
        raise FlagError(
            flag_,
            f"be left out with --loss-type {c.algorithm.loss_type}",
            "both",
            "nobody chose experts before",
        )
    if not c.off_policy.use_rollout_routing_replay and c.off_policy.use_rollout_logprobs:
        raise FlagError(
            "--use-routing-replay",
            "not be combined with --use-rollout-logprobs",
            "both",
            "no pass for old log-probs runs that could choose experts: use --use-rollout-routing-replay",
        )
    overrides = c.megatron.overrides
    if overrides.get("recompute_granularity") == "selective" and "moe" in (
        overrides.get("recompute_modules") or []
    ):
        raise FlagError(
            "--recompute-modules",
            f"not name moe with {flag_}",
            "it",
            "a recomputed layer would not have its micro-batch: use --recompute-granularity full",
        )


def check_replayed_model(c: Config, experts: int, topk: int | None) -> None:
    """Checks that the model has experts, and that a missing record differs from a written record."""
    if (flag_ := _replays(c)) is not None and not experts:
        raise FlagError(flag_, "be left out for a dense model", "it", "no layer of the model has experts")
    if c.off_policy.use_rollout_routing_replay and topk == 1:
        raise FlagError(
            "--use-rollout-routing-replay",
            "be left out for one expert a token",
            "it",
            "rows that the engine did not write could not be distinguished from others",
        )


def _replays(c: Config) -> str | None:
    if c.off_policy.use_rollout_routing_replay:
        return "--use-rollout-routing-replay"
    return "--use-routing-replay" if c.off_policy.use_routing_replay else None
