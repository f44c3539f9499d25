"""Chooses the columns of the step line from the loss of a run and the width of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime.algo.losses import held_out, loss_for
from slime.roles import CRITIC, get_roles
from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX

if TYPE_CHECKING:
    from slime.config.schema import Config

LEFT = "left"
"""Name of the remaining seconds of the run, which only the line shows."""
HELD_OUT = {"held_out/loss": "/loss", "held_out/accuracy": "/rewards/accuracies"}
"""Maps names that only the line shows to the ending of a metric's name. The line shows the metric's newest value in the
first held-out set."""
GAP = "  "


@dataclass(frozen=True)
class ConsoleColumn:
    """One column. The column shows the first entry of `metrics` that the step has. `spec`: the number format of a
    value."""

    title: str
    metrics: tuple[str, ...]
    spec: str
    width: int
    rank: int
    """On a narrow terminal, columns with a low rank are shown first."""


REWARD = ConsoleColumn("reward", ("rollout/raw_reward",), ".3f", 6, 1)
_LENGTH = ConsoleColumn("length", ("rollout/response_len/mean",), ".1f", 6, 2)
_LOSS = ConsoleColumn("loss", ("train/loss",), ".1e", 8, 3)
_GRAD = ConsoleColumn("grad", ("train/grad_norm",), ".3g", 7, 5)
_TRAIN_S = ConsoleColumn("train_s", ("perf/train_time", "perf/actor_train_time"), ".1f", 7, 8)
_OLD = ConsoleColumn("kl_old", ("train/ppo_kl",), ".1e", 8, 6)
POLICY: tuple[ConsoleColumn, ...] = (
    *(REWARD, _LENGTH, _LOSS),
    ConsoleColumn("kl_ref", ("train/kl_loss",), ".1e", 8, 13),
    _OLD,
    ConsoleColumn("dlogp", (LOGPROB_DIFF,), ".1e", 7, 7),
    ConsoleColumn("max", (LOGPROB_DIFF_MAX,), ".1e", 7, 12),
    _GRAD,
    ConsoleColumn("fast", ("rl_kernel/fast",), ".0%", 4, 14),
    ConsoleColumn("tok/s/gpu", ("perf/tokens_per_gpu_per_sec",), ",.0f", 9, 11),
    ConsoleColumn("roll_s", ("perf/rollout_time",), ".1f", 6, 9),
    _TRAIN_S,
    ConsoleColumn("sync_s", ("perf/update_weights_time",), ".1f", 6, 10),
)
"""Columns for a loss on rewarded samples, and for a line without a configuration."""
_CRITIC = (
    ConsoleColumn("v_loss", ("train/critic-value_loss",), ".1e", 8, 3),
    ConsoleColumn("expl_var", ("train/critic-explained_variance",), ".3f", 8, 3),
)
_TEACHER = ConsoleColumn("rev_kl", ("rollout/opd_reverse_kl",), ".1e", 8, 1)
_PAIRS = (
    ConsoleColumn("accuracy", ("train/rewards/accuracies",), ".3f", 8, 1),
    ConsoleColumn("margin", ("train/rewards/margins",), ".2e", 9, 2),
    ConsoleColumn("chosen", ("train/rewards/chosen",), ".2e", 9, 9),
    ConsoleColumn("rejected", ("train/rewards/rejected",), ".2e", 9, 9),
)
_FIXED = (
    ConsoleColumn("lr", ("train/lr-pg_0",), ".1e", 8, 9),
    _GRAD,
    ConsoleColumn("tok/s", ("perf/step_tokens_per_sec",), ",.0f", 9, 6),
    _TRAIN_S,
)
"""Columns for a loss on given responses, which are neither generated nor rewarded."""
_HELD_LOSS = ConsoleColumn("held_out", ("held_out/loss",), ".2e", 9, 2)
_HELD_ACCURACY = ConsoleColumn("held_acc", ("held_out/accuracy",), ".3f", 8, 3)
_LEFT = ConsoleColumn(LEFT, (LEFT,), "", 6, 4)


def choose_columns(c: Config) -> tuple[ConsoleColumn, ...]:
    """Returns the columns of a run, in order."""
    loss = loss_for(c.algorithm)
    if c.debug.debug_rollout_only or loss.rewarded:
        first = POLICY
        if CRITIC in get_roles(c) and not c.debug.debug_rollout_only:
            at = POLICY.index(_OLD)
            first = (*POLICY[:at], *_CRITIC, *POLICY[at:])
        if c.distillation.use_opd:
            only = c.reward.rm_type == "zero"
            first = (_TEACHER, *(column for column in first if not (only and column is REWARD)))
        return (*first, _LEFT)
    held: tuple[ConsoleColumn, ...] = ()
    if c.evaluation.eval_interval is not None and held_out(c):
        held = (_HELD_ACCURACY if loss.pairs else _HELD_LOSS,)
    pairs = _PAIRS if loss.pairs else ()
    return (replace(_LOSS, rank=1), *pairs[:2], *held, *pairs[2:], *_FIXED, _LEFT)


def fitting(columns: Sequence[ConsoleColumn], width: int | None) -> list[ConsoleColumn]:
    """Returns the columns that fit `width` characters, in their order. Without a width, all columns fit. The first
    column by rank is always returned."""
    by_rank = sorted(columns, key=lambda column: column.rank)
    kept = by_rank[:1]
    left = 0 if width is None else width - kept[0].width - len(GAP)
    for column in by_rank[1:]:
        needed = column.width + len(GAP)
        if width is not None and needed > left:
            continue
        left -= needed
        kept.append(column)
    return [column for column in columns if column in kept]


def duration(seconds: float) -> str:
    """Formats a time in at most six characters: 45s, 12m05s, 3h20m, 2d04h, 120d."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for small, unit, large, name in (
        (60, "s", 3600, "m"),
        (3600, "m", 86400, "h"),
        (86400, "h", 8640000, "d"),
    ):
        if whole < large:
            rest = whole % small // {"s": 1, "m": 60, "h": 3600}[unit]
            return f"{whole // small}{name}{rest:02d}{unit}"
    return f"{whole // 86400}d"
