"""The benchmark of operators times every per-token policy loss inside linear_token_loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from operator_bench import command as bench
from operator_bench.pairs import loss_pairs, unfit
from operator_bench.timed_losses import LOSSES

from slime.algo.surrogates import SURROGATES

HERE = "operator_bench.timed_losses:LOSSES"


def test_each_loss_is_checked_and_compared_with_grpo_loss(tmp_path: Path) -> None:
    """Gradients are compared with those of the same loss in float64."""
    out = tmp_path / "result.json"
    rows = ",".join(f"{name}_loss" for name in ("grpo", *LOSSES))
    command = ["linear_token_loss", "--losses", HERE, "--rows", rows, "--cases", "tiny", "--device", "cpu"]
    assert bench.main([*command, "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["linear"]
    found = {row["upstream"]: row for row in case["rows"]}
    assert found.keys() == {"grpo", *LOSSES}
    assert LOSSES.keys() == {name for name, record in SURROGATES.items() if not record.reads_sequences}
    for name, row in found.items():
        assert unfit(row) is None and row["errors"]["d_hidden"] < 0.01, (name, row)
    pairs = loss_pairs(case["rows"])
    assert [(pair.ours["upstream"], pair.rival["upstream"]) for pair in pairs] == [
        (n, "grpo") for n in LOSSES
    ]
    # The trainer's clipped term is rl_kernel.grpo_loss, so the gradients are equal.
    assert found["clip"]["errors"]["d_hidden"] == pytest.approx(found["grpo"]["errors"]["d_hidden"], rel=1e-6)


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("operator_bench.timed_losses", "must be MODULE:NAME"),
        ("nowhere:LOSSES", "must be MODULE:NAME"),
        ("operator_bench.timed_losses:make_loss", "must name a dict"),
    ],
)
def test_losses_that_are_not_there(path: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["linear_token_loss", "--losses", path, "--device", "cpu"])
    assert f"--losses {rule}" in capsys.readouterr().err
