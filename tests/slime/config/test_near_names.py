"""The error for a wrong name suggests the nearest name, or no name if none is near."""

import pytest

from slime.config.core_table import core_flags
from slime.config.near_names import nearest
from slime.rules.flags import own_flags

FLAGS = [*own_flags(), *core_flags(), "vllm_..."]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        # These differ in spelling.
        ("rolout-batch-size", "--rollout-batch-size"),
        ("rollout_batchsize", "--rollout-batch-size"),
        ("lrr", "--lr"),
        ("num-rollouts", "--num-rollout"),
        # These are the beginning of a name.
        ("n-samples", "--n-samples-per-prompt"),
        ("n-sample", "--n-samples-per-prompt"),
        ("rollout-temp", "--rollout-temperature"),
        ("global-batch", "--global-batch-size"),
        ("use-kl", "--use-kl-loss"),
        ("balance-by", "--balance-by-flops"),
        # These have the same words.
        ("max-tokens-gpu", "--max-tokens-per-gpu"),
        ("rollout-max-response-length", "--rollout-max-response-len"),
        ("entropy-coefficient", "--entropy-coef"),
        ("n-samples-per-group", "--n-samples-per-prompt"),
        ("interval-save", "--save-interval"),
        ("max-response-len", "--eval-max-response-len or --rollout-max-response-len"),
    ],
)
def test_the_name_that_was_meant(wrong, meant):
    assert nearest(wrong, FLAGS) == f"; did you mean {meant}?"


@pytest.mark.parametrize("wrong", ["size", "fused-rope", "rollout", "my-own-flag", "zzz", "max-len", "vllm"])
def test_no_name_is_near(wrong):
    assert nearest(wrong, FLAGS) == ""


def test_only_the_spelling_counts_where_names_may_be_those_of_others():
    assert nearest("use_kl", FLAGS, words=False) == ""
    assert nearest("rollout_sed", FLAGS, words=False) == "; did you mean --rollout-seed?"


def test_the_order_of_the_names_does_not_count():
    assert len({nearest("adam-beta3", names) for names in (FLAGS, FLAGS[::-1], set(FLAGS))}) == 1
