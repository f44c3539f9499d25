"""Rules of --flush-cache-interval: how long engines keep keys and values over weight updates."""

from __future__ import annotations

from collections.abc import Iterator

from slime.algo.losses import loss_for
from slime.config import Config
from slime.config.sections.weight_update import EACH, NEVER
from slime.records.errors import FlagError

_FLAG = "--flush-cache-interval"


def check_flush_value(c: Config) -> None:
    """Checks that the interval is a number of updates, or `never`."""
    value = c.weight_update.flush_cache_interval
    if value == NEVER or (value.isdecimal() and value.lstrip("0") == value):
        return
    raise FlagError(
        _FLAG,
        f"be a number of updates of at least 1, or {NEVER}",
        value,
        f"use 1 to drop the caches at each update, and {NEVER} to keep them over all updates",
    )


def check_flush_interval(c: Config) -> None:
    """Checks that caches can outlive an update, and that nothing requires equal log-probs."""
    if c.weight_update.flush_cache_interval == EACH:
        return
    value = c.weight_update.flush_cache_interval
    if c.cluster.colocate and c.cluster.device == "cuda":
        raise FlagError(
            _FLAG,
            "be 1 with --colocate on GPUs",
            value,
            "engines free their caches while the trainer computes",
        )
    if c.kernels.rlk_consistency == "strict":
        raise FlagError(
            "--rlk-consistency",
            f"be off or audit with {_FLAG} {value}",
            "strict",
            "keys and values of older weights change the engines' log-probs",
        )


def flush_notes(c: Config) -> Iterator[str]:
    """Yields a note that recommends a correction if caches outlive updates and no correction is on."""
    o = c.off_policy
    if (
        c.weight_update.flush_cache_interval == EACH
        or not c.num_engines
        or not loss_for(c.algorithm).rewarded
    ):
        return
    if not (o.use_tis or o.use_rs or o.use_rollout_logprobs):
        yield (
            f"{_FLAG} {c.weight_update.flush_cache_interval}: engines sample from keys and values of older weights, so "
            "their log-probs differ from the trainer's. --use-tis corrects for the difference; --get-mismatch-metrics "
            "only reports it"
        )
