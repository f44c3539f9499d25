"""Flags of the objective that nothing reads give an error or a note, for all estimators, losses and corrections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_cases import good_argv

from slime.algo.corrections import MEASURES
from slime.algo.estimators import ESTIMATORS, Response
from slime.algo.flags import ALL, SWITCHES
from slime.algo.losses import LOSSES
from slime.algo.surrogates import CENTRED, SURROGATES
from slime.algo.token_columns import TokenColumns
from slime.config import Config
from slime.config.fields import get_specs, spelled
from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.critic import CriticConfig
from slime.config.sections.off_policy import OffPolicyConfig
from slime.roles import REFERENCE, get_roles
from slime.rules import parse_args

SPECS = {**get_specs(AlgorithmConfig), **get_specs(OffPolicyConfig)}
CRITIC = get_specs(CriticConfig)
OTHER: dict[str, str] = {
    "advantage_estimator": "",
    "clip_cov_lb": "0.5",
    "clip_cov_ub": "6",
    "custom_advantage_function_path": "trainer_cases.advantage_hook",
    "custom_loss_function_path": "trainer_cases.reinforce_loss",
    "custom_pg_loss_reducer_function_path": "trainer_cases.advantage_hook",
    "custom_tis_function_path": "slime.algo.corrections.icepop_function",
    "eps_clip_c": "3",
    "kl_loss_type": "k3",
    "pass_at_k": "2",
    "ref_update_interval": "3",
    "rs_level": "sequence",
    "rs_type": "k3",
    "rs_lower_bound": "0.5",
    "rs_upper_bound": "3",
    "tis_clip": "5",
    "tis_level": "sequence",
    "tis_mode": "mask",
    "dr_grpo_length": "20",
    "score_centering_top_k": "16",
}
"""Field -> a value that is not its default, for fields that are neither a switch nor a share."""


class Section:
    """A section that adds the name of each field that is read to `seen`."""

    def __init__(self, section: Any, seen: set[str]) -> None:
        self.section, self.seen = section, seen

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self.section, name)


class Recording:
    """The sections of an objective at their defaults. `seen` collects the fields that are read."""

    def __init__(self) -> None:
        found = Config.from_flat({"eps_clip_high": 0.3, "use_tis": True})
        self.seen: set[str] = set()
        self.algorithm, self.off_policy, self.critic = (
            Section(section, self.seen) for section in (found.algorithm, found.off_policy, found.critic)
        )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_declares_the_flags_that_it_reads(name):
    columns = {
        "values": torch.zeros(2),
        "group_rewards": torch.tensor([1.0, 0.0]),
        "turn_advantages": torch.zeros(2),
    }
    c = Recording()
    ESTIMATORS[name].estimate(c, Response(1.0, torch.ones(2), torch.zeros(2), columns))
    assert c.seen == ESTIMATORS[name].flags


@pytest.mark.parametrize("record", [*SURROGATES.values(), CENTRED], ids=lambda r: r.flag or r.name)
def test_a_policy_loss_declares_the_flags_that_it_reads(record):
    one = torch.zeros(1)
    columns = dict.fromkeys(("advantages", "chosen_tokens", "rollout_log_probs"), one)
    columns |= {
        "loss_masks": one + 1,
        "loss_denominators": one + 1,
        "rollout_top_ids": torch.zeros(1, 2).int(),
    }
    columns |= {"rollout_top_log_probs": torch.full((1, 2), -1.0)}
    rows = torch.zeros(1, dtype=torch.long)
    t = TokenColumns(one, one, columns, rows, [2], [1], 1.0, None, torch.full((1, 2), -1.0))
    c = Recording()
    record.per_token(c, t, one, one)
    if record.choose is not None:
        record.choose(c.algorithm, one, one, rows, None)
    elsewhere = {"score_centering_top_k"}  # engines return this many ids
    assert c.seen == record.flags - elsewhere


def config(tmp_path: Path, *flags: str) -> Config:
    return parse_args([*good_argv(tmp_path), *flags])


def assert_unread(tmp_path: Path, name: str, *flags: str) -> None:
    """Checks that an error or a note names the flag, and that the flag adds no reference model."""
    flag = spelled(name)
    value = [] if SPECS[name].kind is bool else [OTHER.get(name, "0.25")]
    try:
        found = config(tmp_path, *flags, flag, *value)
    except ValueError as error:
        assert flag in str(error)
        return
    assert any(note.startswith(flag) and "has no effect" in note for note in found.notes), (name, found.notes)
    assert REFERENCE not in get_roles(found) or LOSSES[found.algorithm.loss_type].reads


def assert_read(tmp_path: Path, name: str, *flags: str) -> None:
    value = [] if SPECS[name].kind is bool else [OTHER.get(name, "0.25")]
    found = config(tmp_path, *flags, spelled(name), *value)
    assert not [note for note in found.notes if "has no effect" in note]


NEEDS = {
    "ppo": (),
    "reinforce_plus_plus": ("--normalize-advantages",),
    "reinforce_plus_plus_baseline": ("--normalize-advantages",),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_flag_of_another_estimator_is_reported(tmp_path, estimator):
    record = ESTIMATORS[estimator]
    flags = ("--advantage-estimator", estimator, *NEEDS.get(estimator, ()))
    for name in sorted(
        {name for other in ESTIMATORS.values() for name in other.flags | other.flags_of_group}
    ):
        if name in CRITIC or (estimator, name) == ("rloo", "disable_rewards_normalization"):
            continue  # these have separate rules
        if name in record.flags | record.flags_of_group:
            assert_read(tmp_path, name, *flags)
        else:
            assert_unread(tmp_path, name, *flags)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_every_flag_of_another_policy_loss_is_reported(tmp_path, surrogate):
    for name in sorted({name for other in SURROGATES.values() for name in other.flags}):
        check = assert_read if name in SURROGATES[surrogate].flags else assert_unread
        check(tmp_path, name, "--pg-loss-type", surrogate)


@pytest.mark.parametrize("switch", [name for name in SWITCHES if name not in ("enable_mtp_training",)])
def test_every_flag_of_a_switch_is_reported_without_it(tmp_path, switch):
    for name in sorted(SWITCHES[switch]):
        assert_unread(tmp_path, name)


@pytest.mark.parametrize("switch", ["use_kl_loss", "use_tis", "get_mismatch_metrics", "use_rs", "use_opsm"])
def test_every_flag_of_a_switch_is_read_with_it(tmp_path, switch):
    for name in sorted(SWITCHES[switch]):
        assert_read(tmp_path, name, spelled(switch))


@pytest.mark.parametrize("loss", ["sft_loss", "dpo", "reward_model"])
def test_a_loss_without_rewards_reads_its_own_flags_alone(tmp_path, loss):
    flags = [
        "--loss-type",
        loss,
        "--debug-train-only",
        "--n-samples-per-prompt",
        "1",
        "--global-batch-size",
        "4",
    ]
    flags += ["--rollout-function-path", str(LOSSES[loss].rollout)]
    kept = {"dr_grpo_length", "use_score_centering", "custom_loss_function_path"}
    for name in sorted(ALL - LOSSES[loss].flags - set(CRITIC) - kept):
        assert_unread(tmp_path, name, *flags)
    for name in sorted(LOSSES[loss].flags):
        assert_read(tmp_path, name, *flags)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_lower_bound_is_that_of_a_ratio(tmp_path, measure):
    check = assert_read if MEASURES[measure].ratio else assert_unread
    check(tmp_path, "rs_lower_bound", "--use-rs", "--rs-type", measure)


def test_a_bound_of_weights_is_also_the_default_of_rejection(tmp_path):
    assert_read(tmp_path, "tis_clip", "--use-rs")


def test_hooks_may_read_the_flags_of_their_part(tmp_path):
    hook = ("--custom-advantage-function-path", "trainer_cases.advantage_hook")
    for name in ("kl_coef", "gamma", "pass_at_k"):
        assert_read(tmp_path, name, *hook)
    loss = ("--loss-type", "custom_loss", "--custom-loss-function-path", "trainer_cases.reinforce_loss")
    for name in ("kl_coef", "sapo_tau_pos", "entropy_coef", "opsm_delta", "dpo_beta"):
        assert_read(tmp_path, name, *loss)


def test_the_errors_say_what_reads_the_flag(tmp_path):
    with pytest.raises(
        ValueError, match="--kl-coef must be 0 with --advantage-estimator gspo, got 5.0; .* ppo; --use-kl"
    ):
        config(tmp_path, "--advantage-estimator", "gspo", "--kl-coef", "5")
    with pytest.raises(
        ValueError, match="--eps-clip-c must be left out with --pg-loss-type sapo, .* clip, gspo"
    ):
        config(tmp_path, "--pg-loss-type", "sapo", "--eps-clip-c", "3")
    with pytest.raises(ValueError, match="--use-kl-loss must be given with --use-unbiased-kl, got only True"):
        config(tmp_path, "--use-unbiased-kl")


def test_cispo_may_have_no_lower_clip(tmp_path):
    for flags in (
        "--advantage-estimator cispo",
        "--pg-loss-type cispo",
        "--advantage-estimator rloo --pg-loss-type cispo",
    ):
        config(tmp_path, *flags.split(), "--eps-clip", "1.0", "--eps-clip-high", "4")
    for name in ("clip", "gspo", "gspo_token", "gmpo", "clip_cov"):
        with pytest.raises(
            ValueError, match="--eps-clip must be below 1, got 1.0; only --pg-loss-type cispo"
        ):
            config(tmp_path, "--pg-loss-type", name, "--eps-clip", "1.0")
