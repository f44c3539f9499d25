"""Corrections for the difference between the distribution that the engine sampled from and the one that the trainer
computes: importance weights (--use-tis) and rejection (--use-rs), each at a level.

    d = old - rollout log-prob of a token -> level: sum or mean over a part -> weight, or keep or drop

`slime.rules` imports this file and must start without torch. A micro-batch has R response tokens. A correction changes
the numerators of the loss, and leaves the denominators as they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.config.schema import read_section
from slime.config.sections.off_policy import OffPolicyConfig

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns

LARGEST = 20.0
"""Bound of the logarithm of a ratio over several tokens. exp(20) is 5e8, and float32 overflows at exp(88)."""


@dataclass(frozen=True)
class Level:
    """The part of a sample whose tokens share one value: the sum, or with `mean` the average. A turn is a run of
    trained tokens. Tokens of tools or users separate two turns."""

    name: str
    part: Literal["token", "turn", "sequence"]
    mean: bool = False


LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("token", "token"),
        Level("turn", "turn"),
        Level("sequence", "sequence"),
        Level("turn_geometric", "turn", mean=True),
        Level("geometric", "sequence", mean=True),
    )
}
"""Values of --tis-level and --rs-level. The exponential of a mean of log-ratios is a geometric mean of ratios."""


@dataclass(frozen=True)
class Mode:
    """One value of --tis-mode. `weights(ratio, low, high)` returns the importance weights."""

    name: str
    weights: Callable[[Tensor, float, float], Tensor]
    source: str
    aliases: tuple[str, ...] = ()


def _truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    """Returns `ratio.clamp(low, high)`."""
    return ratio.clamp(low, high)


def _masked(ratio: Tensor, low: float, high: float) -> Tensor:
    """Returns `ratio` where it is in [low, high], else 0."""
    import torch

    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("truncate", _truncated, "TIS, Yao et al., 2025"),
        Mode("clip", _truncated, "slime's name, which functions of --custom-tis-function-path read"),
        Mode("mask", _masked, "IcePop, 2510.18855", ("icepop",)),
    )
}
"""With --tis-clip-low 0, the mode mask is one-sided (masked importance sampling). With a lower bound, it is IcePop."""


@dataclass(frozen=True)
class Measure:
    """One value of --rs-type. `of(d)` [R] is summed or averaged over a part. With `ratio`, the exponential of the
    result is compared with both bounds. Otherwise, the result is compared with the upper bound."""

    name: str
    of: Callable[[Tensor], Tensor]
    ratio: bool = False


MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("k1", lambda d: d, ratio=True),
        Measure("k2", lambda d: d.square() / 2),
        Measure("k3", lambda d: d.expm1() - d),
    )
}
"""Estimators of KL(rollout || trainer) on samples of the rollout (Schulman, "Approximating KL divergence")."""


def parts(level: Level, mask: Tensor, sample_of_row: Tensor) -> Tensor:
    """Returns each token's part number, [R] int64. A token that is not trained on has the number of a part next
    to it."""
    import torch

    if level.part == "sequence":
        return sample_of_row
    if level.part == "token":
        return torch.arange(len(mask), device=mask.device)
    trained = mask != 0
    before = torch.nn.functional.pad(trained[:-1], (1, 0))
    starts = trained & ~before
    starts[1:] |= trained[1:] & (sample_of_row[1:] != sample_of_row[:-1])
    return (starts.long().cumsum(0) - 1).clamp(min=0)


def at_level(level: Level, values: Tensor, mask: Tensor, sample_of_row: Tensor) -> Tensor:
    """Returns the masked sum or mean of `values` [R] over each token's part, at every token of the part [R]."""
    if level.part == "token":
        return values
    from slime.algo.importance import weighted

    of_row = parts(level, mask, sample_of_row)
    weights = mask.to(values.dtype)
    totals = values.new_zeros(len(values)).index_add(0, of_row, weighted(values, weights))
    if level.mean:
        totals = totals / values.new_zeros(len(values)).index_add(0, of_row, weights).clamp(min=1)
    return totals.clamp(-LARGEST, LARGEST)[of_row]


def weigh(ratio: Tensor, mode: Mode, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the importance weights of ratios, and their metrics: tis (the ratio), tis_clipfrac (1 where the weight is
    not the ratio), tis_abs (|ratio - 1|). All are [R] fp32, without gradient."""
    weights = mode.weights(ratio, low, high)
    return weights, {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1).abs()}


def bounded(off_policy: OffPolicyConfig, ratio: Tensor) -> Tensor:
    """Returns the weight of --tis-mode for each ratio. `ratio` may have any shape."""
    return MODES[off_policy.tis_mode].weights(ratio, off_policy.tis_clip_low, off_policy.tis_clip)


def importance_weights(
    off_policy: OffPolicyConfig, t: TokenColumns, old: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the weights of --tis-mode at --tis-level: `exp(old - rollout)` per part, bounded or masked."""
    from slime.algo.importance import compute_ratio

    d = old.detach().float() - t["rollout_log_probs"].float()
    ratio = compute_ratio(at_level(LEVELS[off_policy.tis_level], d, t.mask, t.sample_of_row))
    return weigh(ratio, MODES[off_policy.tis_mode], off_policy.tis_clip_low, off_policy.tis_clip)


def accepted(off_policy: OffPolicyConfig, t: TokenColumns, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns 1.0 for each token that --use-rs keeps, else 0.0 [R], and the metric rs_dropped.

    A part is kept if its value of --rs-type is within the bounds. --rs-veto-threshold also drops the whole sample of a
    trained token whose ratio is below the threshold.
    """
    import torch

    measure, level = MEASURES[off_policy.rs_type], LEVELS[off_policy.rs_level]
    d = old.detach().float() - t["rollout_log_probs"].float()
    found = at_level(level, measure.of(d), t.mask, t.sample_of_row)
    if measure.ratio:
        ratio = found.exp()
        keep = (ratio >= off_policy.rs_lower_bound) & (ratio <= off_policy.rs_upper_bound)
    else:
        keep = found <= off_policy.rs_upper_bound
    if off_policy.rs_veto_threshold is not None:
        low = ((d.exp() < off_policy.rs_veto_threshold) & (t.mask != 0)).float()
        bad = torch.zeros(len(t.response_lengths), device=d.device).index_add(0, t.sample_of_row, low)
        keep &= (bad == 0)[t.sample_of_row]
    return keep.float(), {"rs_dropped": 1 - keep.float()}


@dataclass(frozen=True)
class TokenWeights:
    """A function for --custom-tis-function-path: weights each token as --tis-mode does without a function."""

    mode: Mode

    def __call__(
        self,
        args: Namespace,
        *,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        **_: object,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Returns the weighted loss, the masks without a change, and the metrics of `weigh`."""
        import torch

        from slime.algo.importance import compute_ratio

        off_policy, mask = read_section(OffPolicyConfig, args), torch.cat(loss_masks)
        d = torch.cat(train_log_probs).detach().float() - torch.cat(rollout_log_probs).float()
        if d.shape == mask.shape:  # with context parallelism, masks are whole and d is a part
            d = torch.where(mask != 0, d, 0.0)
        weights, metrics = weigh(compute_ratio(d), self.mode, off_policy.tis_clip_low, off_policy.tis_clip)
        return pg_loss * weights, loss_masks, metrics


vanilla_tis_function = TokenWeights(MODES["truncate"])
"""slime's name for truncated importance sampling per token."""
icepop_function = TokenWeights(MODES["mask"])
"""slime's name for IcePop per token."""
