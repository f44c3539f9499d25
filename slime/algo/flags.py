"""Finds the flags of the objective that have no effect. Must start without torch.

    records (estimator, surrogate, loss) declare their flags -> flags_read(config) -> unread(config): without effect

A switch, such as --use-tis, has dependent flags. These have an effect if the switch is on and the objective reads the
switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algo.corrections import MEASURES
from slime.algo.estimators import ESTIMATORS, estimator_for, surrogate_for
from slime.algo.losses import LOSSES, Loss, loss_for
from slime.algo.surrogates import CENTRED, SURROGATES
from slime.config.fields import spelled

if TYPE_CHECKING:
    from slime.config.schema import Config

_WEIGHTS = frozenset({"tis_mode", "tis_level", "tis_clip", "tis_clip_low", "custom_tis_function_path"})
_BOUNDS = frozenset({"rs_type", "rs_level", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold"})
SWITCHES: dict[str, frozenset[str]] = {
    "use_kl_loss": frozenset({"kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "ref_update_interval"}),
    "kl_coef": frozenset({"kl_loss_type", "ref_update_interval"}),
    "use_tis": _WEIGHTS,
    "get_mismatch_metrics": _WEIGHTS,
    "use_rs": _BOUNDS | {"tis_clip", "tis_clip_low"},  # the defaults of its bounds
    "use_opsm": frozenset({"opsm_delta"}),
    "use_dr_grpo": frozenset({"dr_grpo_length"}),
    "use_score_centering": frozenset({"score_centering_top_k"}),
    "enable_mtp_training": frozenset({"mtp_loss_scaling_factor"}),
}
"""Maps the field of a switch to the fields that have an effect if the switch is on."""

_OF_REWARDED = frozenset({"normalize_advantages", "custom_advantage_function_path"})
_OF_ESTIMATORS = _OF_REWARDED.union(*(record.flags for record in ESTIMATORS.values()))
_OF_GROUPS = frozenset().union(*(record.flags_of_group for record in ESTIMATORS.values()))
_OF_SURROGATES = frozenset().union(*(record.flags for record in (*SURROGATES.values(), CENTRED)))
_OF_LOSSES = frozenset().union(*(record.flags for record in LOSSES.values()))
ALL = _OF_ESTIMATORS.union(_OF_GROUPS, _OF_SURROGATES, _OF_LOSSES, *SWITCHES.values())
"""Every field that a record or a switch declares."""


@dataclass(frozen=True)
class Unread:
    """A flag without effect. `because` is the end of the sentence "has no effect ...". `instead` follows the name of
    the flag in the message and names the settings that read the flag. `switches` are fields that are off, and with
    which the flag would have an effect."""

    name: str
    because: str
    instead: str
    switches: tuple[str, ...] = ()


def reads_kl_in_reward(c: Config) -> bool:
    """Returns true if advantages contain the KL of --kl-coef, or if a hook for advantages may read it."""
    a = c.algorithm
    reads = "kl_coef" in estimator_for(a).flags or a.custom_advantage_function_path is not None
    return a.kl_coef != 0 and reads and not a.disable_compute_advantages_and_returns


def flags_read(c: Config) -> frozenset[str]:
    """Returns the fields of `ALL` that loss, estimator, surrogate and active switches read. A hook counts as a reader
    of every field of the part that it replaces."""
    a, loss = c.algorithm, loss_for(c.algorithm)
    if loss.objective is None:
        return ALL
    read = {"enable_mtp_training"} | loss.flags
    if loss.rewarded:
        read |= _OF_GROUPS if c.reward.custom_reward_post_process_path else estimator_for(a).flags_of_group
        if a.custom_advantage_function_path:
            read |= _OF_ESTIMATORS
        elif not a.disable_compute_advantages_and_returns:
            read |= _OF_REWARDED | estimator_for(a).flags
    if loss.surrogate:
        read |= surrogate_for(a).flags
    if c.kernels.rlk_consistency != "off":  # the audit counts the tokens that would be clipped
        read |= {"eps_clip", "eps_clip_high"}
    for switch, its in SWITCHES.items():
        if switch in read and c.get_value(switch):
            read |= its
    if c.off_policy.custom_tis_function_path and "custom_tis_function_path" in read:
        return frozenset(read | _BOUNDS)  # which may reject, too
    if "use_rs" in read and c.off_policy.use_rs and not MEASURES[c.off_policy.rs_type].ratio:
        read -= {"rs_lower_bound"}
    return frozenset(read)


def unread(c: Config, set_flags: frozenset[str]) -> Iterator[Unread]:
    """Yields the fields without effect among `set_flags`, the fields with another value than their default."""
    read = flags_read(c)
    for name in sorted((set_flags & ALL) - read):
        yield _unread(c, name, read)


def _unread(c: Config, name: str, read: frozenset[str]) -> Unread:
    a, loss = c.algorithm, loss_for(c.algorithm)
    switches = tuple(switch for switch, its in SWITCHES.items() if name in its and switch in read)
    if name == "rs_lower_bound" and any(c.get_value(switch) for switch in switches):
        ratios = [measure.name for measure in MEASURES.values() if measure.ratio]
        return Unread(name, f"with --rs-type {c.off_policy.rs_type}", _for("rs_type", ratios))
    if switches:
        return Unread(name, f"without {' or '.join(map(spelled, switches))}", "is read only there", switches)
    estimators = [
        record.name for record in ESTIMATORS.values() if name in record.flags | record.flags_of_group
    ]
    if estimators and loss.rewarded:
        own = f"with --advantage-estimator {a.advantage_estimator}"
        return Unread(name, own, _for("advantage_estimator", estimators) + _HINTS.get(name, ""))
    surrogates = [record.name for record in SURROGATES.values() if name in record.flags]
    if surrogates and loss.surrogate:
        own = f"with --pg-loss-type {surrogate_for(a).name}"
        return Unread(name, own, _for("pg_loss_type", surrogates))
    losses = [record.name for record in LOSSES.values() if _may_read(record, name)]
    return Unread(name, f"with --loss-type {loss.name}", _for("loss_type", losses))


_HINTS = {"kl_coef": "; --use-kl-loss with --kl-loss-coef puts a KL in the loss of every estimator"}


def _may_read(loss: Loss, name: str) -> bool:
    of_switches = {switch for switch, its in SWITCHES.items() if name in its}
    of_rewards = name in _OF_ESTIMATORS | _OF_GROUPS
    own = bool(loss.flags & {name, *of_switches})
    return own or loss.objective is None or (loss.surrogate and (of_rewards or name in _OF_SURROGATES))


def _for(name: str, values: list[str]) -> str:
    return f"is for {spelled(name)} {', '.join(values)}"
