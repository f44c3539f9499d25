"""Compares corrections between engine and trainer at every level with numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from test_policy_loss import flags as flags_of_loss

from slime.algo import mismatch
from slime.algo.corrections import (
    LEVELS,
    MODES,
    accepted,
    at_level,
    icepop_function,
    importance_weights,
    parts,
    vanilla_tis_function,
    weigh,
)
from slime.algo.policy_loss import policy_loss
from slime.algo.token_columns import TokenColumns

RATIOS = torch.tensor([2.0, 3.0, 0.5, 4.0, 0.25, 0.1])
"""Factors by which engine and trainer differ. Sample 0 has the tokens 0 to 3, sample 1 has the rest."""
MASK = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.int32)
"""Turns of the tokens: tokens 0 and 1, token 3, tokens 4 and 5. A tool wrote token 2."""
ROWS = torch.tensor([0, 0, 0, 0, 1, 1])
TURN = [6.0, 6.0, None, 4.0, 0.025, 0.025]
SEQUENCE = [24.0, 24.0, None, 24.0, 0.025, 0.025]
GEOMETRIC = [24 ** (1 / 3), 24 ** (1 / 3), None, 24 ** (1 / 3), 0.025**0.5, 0.025**0.5]
TURN_GEOMETRIC = [6**0.5, 6**0.5, None, 4.0, 0.025**0.5, 0.025**0.5]


def columns():
    old = torch.full((6,), -2.0)
    table = {
        "loss_masks": MASK,
        "loss_denominators": torch.ones(6),
        "advantages": torch.ones(6),
        "old_log_probs": old,
        "rollout_log_probs": old - RATIOS.log(),
    }
    new = old.clone().requires_grad_()
    return TokenColumns(new, torch.zeros(6), table, ROWS, [6, 4], [4, 2], 1.0)


def flags(**changes):
    values = dict(
        rs_type="k1",
        rs_level="token",
        rs_upper_bound=2.0,
        rs_lower_bound=0.0,
        rs_veto_threshold=None,
        tis_clip=1000.0,
    )
    return flags_of_loss(**(values | changes))


def trained(values):
    return [x for x, m in zip(values.tolist(), MASK.tolist(), strict=True) if m]


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("token", [2.0, 3.0, None, 4.0, 0.25, 0.1]),
        ("turn", TURN),
        ("sequence", SEQUENCE),
        ("geometric", GEOMETRIC),
        ("turn_geometric", TURN_GEOMETRIC),
    ],
)
def test_levels(level, wanted):
    weights, metrics = importance_weights(
        flags(tis_level=level).off_policy, columns(), columns().old_log_probs
    )
    wanted = [x for x in wanted if x is not None]
    assert trained(weights) == pytest.approx(wanted, rel=1e-5)
    assert trained(metrics["tis"]) == pytest.approx(wanted, rel=1e-5)
    assert trained(metrics["tis_abs"]) == pytest.approx([abs(x - 1) for x in wanted], rel=1e-5)
    assert trained(metrics["tis_clipfrac"]) == [0] * 5


def test_turns_end_with_the_sample():
    mask, rows = torch.tensor([0, 1, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert parts(LEVELS["turn"], mask, rows).tolist() == [0, 0, 0, 1, 1, 2]
    assert at_level(LEVELS["turn"], torch.ones(6), mask, rows).tolist() == [2, 2, 2, 1, 1, 1]


def test_a_product_stays_finite():
    found = at_level(LEVELS["sequence"], torch.full((6,), 50.0), MASK, ROWS)
    assert found.tolist() == [20.0] * 6


def test_modes():
    ratio = torch.tensor([3.0, 1.0, 0.1, 2.0, 0.5])
    weights, metrics = weigh(ratio, MODES["truncate"], 0.5, 2.0)
    assert weights.tolist() == [2.0, 1.0, 0.5, 2.0, 0.5]
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1, 0, 0]
    torch.testing.assert_close(metrics["tis_abs"], torch.tensor([2.0, 0.0, 0.9, 1.0, 0.5]))
    weights, metrics = weigh(ratio, MODES["mask"], 0.5, 2.0)
    assert weights.tolist() == [0.0, 1.0, 0.0, 2.0, 0.5]
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rs_upper_bound": 3.0}, [1, 1, 0, 1, 1]),
        ({"rs_upper_bound": 3.5, "rs_lower_bound": 0.2}, [1, 1, 0, 1, 0]),
        ({"rs_level": "turn", "rs_upper_bound": 5.0}, [0, 0, 1, 1, 1]),
        ({"rs_level": "sequence", "rs_upper_bound": 5.0}, [0, 0, 0, 1, 1]),
        ({"rs_level": "geometric", "rs_upper_bound": 5.0, "rs_lower_bound": 0.2}, [1, 1, 1, 0, 0]),
        # d: 0.69, 1.10, 1.39, -1.39, -2.30; d^2 / 2: 0.24, 0.60, 0.96, 0.96, 2.65
        ({"rs_type": "k2", "rs_upper_bound": 1.0}, [1, 1, 1, 1, 0]),
        ({"rs_type": "k2", "rs_level": "sequence", "rs_upper_bound": 3.0}, [1, 1, 1, 0, 0]),
        # r - 1 - d: 0.31, 0.90, 1.61, 0.64, 1.40; their means are 0.94 and 1.02
        ({"rs_type": "k3", "rs_upper_bound": 1.0}, [1, 1, 0, 1, 0]),
        ({"rs_type": "k3", "rs_level": "geometric", "rs_upper_bound": 1.0}, [1, 1, 1, 0, 0]),
        ({"rs_upper_bound": 9.0, "rs_veto_threshold": 0.2}, [1, 1, 1, 0, 0]),
    ],
)
def test_rejection(changes, wanted):
    keep, metrics = accepted(flags(**changes).off_policy, columns(), columns().old_log_probs)
    assert trained(keep) == wanted
    assert trained(metrics["rs_dropped"]) == [1 - x for x in wanted]


def test_weights_and_rejection_multiply_the_loss():
    """A token with advantage 1 and ratio 1 costs -1; the denominators do not change."""
    given = flags(use_tis=True, tis_level="sequence", tis_clip=10.0, use_rs=True, rs_upper_bound=3.5)
    loss, sums, _ = policy_loss(given, columns())
    # The weights are 10, 10, 10, 0.025, 0.025; token 3 is dropped.
    assert loss.item() == pytest.approx(-(10 + 10 + 0.025 + 0.025), rel=1e-6)
    assert sums["rs_dropped"].item() == 1 and sums["tis_clipfrac"].item() == 3
    loss, _, _ = policy_loss(flags(use_rs=True, rs_upper_bound=3.5), columns())
    assert loss.item() == pytest.approx(-4.0)


def test_functions_that_scripts_name_give_the_same():
    """slime's scripts name these functions in --custom-tis-function-path."""
    names = {"vanilla_tis_function": "truncate", "icepop_function": "mask"}
    assert (vanilla_tis_function.mode.name, icepop_function.mode.name) == ("truncate", "mask")
    for name, mode in names.items():
        bounds = {"use_tis": True, "tis_clip": 3.5, "tis_clip_low": 0.2}
        wanted, sums, _ = policy_loss(flags(tis_mode=mode, **bounds), columns())
        path = f"slime.algo.corrections.{name}"
        loss, hooked, _ = policy_loss(flags(custom_tis_function_path=path, **bounds), columns())
        assert loss.item() == pytest.approx(wanted.item())
        for metric in ("tis", "tis_clipfrac", "tis_abs"):
            assert hooked[metric].item() == pytest.approx(sums[metric].item())


def test_mismatch_figures_by_hand():
    old = torch.full((6,), -2.0)
    found = mismatch.figures(mismatch.sums(old, old - RATIOS.log(), MASK, ROWS, 2).tolist())
    ratios = [2.0, 3.0, 4.0, 0.25, 0.1]
    logs = [math.log(x) for x in ratios]
    assert found == pytest.approx(
        {
            "kl": -sum(logs) / 5,
            "k3_kl": sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / 5,
            "chi2_token": (4 + 9 + 16 + 0.0625 + 0.01) / 5 - 1,
            "chi2_sequence": (24**2 + 0.025**2) / 2 - 1,
            "log_ppl": 2.0,
            "rollout_log_ppl": (2 + math.log(24) / 3 + 2 + math.log(0.025) / 2) / 2,
            "ppl_ratio": (24 ** (-1 / 3) + 0.025**-0.5) / 2,
            "ess": 9.35**2 / (5 * 29.0725),
        },
        rel=1e-6,
    )


def test_mismatch_of_equal_distributions_and_of_nothing():
    old, rows = torch.tensor([-1.0, -2.0]), torch.tensor([0, 1])
    found = mismatch.figures(mismatch.sums(old, old, torch.tensor([1, 0]), rows, 2).tolist())
    assert found["kl"] == found["k3_kl"] == found["chi2_token"] == found["chi2_sequence"] == 0
    assert found["ppl_ratio"] == found["ess"] == found["log_ppl"] == 1
    assert mismatch.figures(mismatch.sums(old, old, torch.tensor([0, 0]), rows, 2).tolist()) == {}
