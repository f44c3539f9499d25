"""Tests held-out losses in the output for users: scores, the step line, the line of an evaluation, and the last
lines."""

from __future__ import annotations

import io

import pytest

from slime.algo.losses import PAIRS_ROLLOUT, SFT_ROLLOUT
from slime.config import Config
from slime.protocols import Evaluated, RolloutBatch, TrainResult
from slime.tracking.console import StepLine, choose_columns
from slime.tracking.journal import read_events
from slime.tracking.metrics import is_score, select_sets
from slime.tracking.report import Reporter
from slime.tracking.trackers import Trackers

KINDS = {"sft_loss": SFT_ROLLOUT, "dpo": PAIRS_ROLLOUT, "reward_model": PAIRS_ROLLOUT}
FIGURES = ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies")


def config(kind: str, **more) -> Config:
    sizes = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 0, "num_steps_per_rollout": 1}
    run = {"num_rollout": 9, "eval_interval": 2, "loss_type": kind, "eval_function_path": KINDS[kind]}
    return Config.from_flat(sizes | run | more)


def evaluated(*losses: float) -> Evaluated:
    """Returns an evaluation of the sets a and b with these losses. The other figures are multiples of the loss."""
    return Evaluated(
        {
            f"eval/{name}/{figure}": value * (i + 1)
            for name, value in zip("ab", losses, strict=False)
            for i, figure in enumerate(FIGURES)
        }
    )


def test_scores_of_held_out_sets():
    metrics = evaluated(1.0).metrics
    assert [name for name in metrics if is_score(name, metrics)] == [
        "eval/a/loss",
        "eval/a/rewards/accuracies",
    ]
    assert list(select_sets(metrics)) == [
        "eval/a/loss",
        "eval/a/rewards/margins",
        "eval/a/rewards/accuracies",
    ]
    with_rewards = metrics | {"eval/a": 0.5, "eval/a-truncated_ratio": 0.0}  # a figure that a user logs
    assert [name for name in with_rewards if is_score(name, with_rewards)] == ["eval/a"]
    assert not is_score("eval/loss/mean") and not is_score("train/loss") and is_score("eval/loss")


@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_a_run_with_held_out_sets(kind, tmp_path):
    """Each line has the newest evaluation before it. The best loss is the lowest, the best accuracy the highest."""
    c, screen = config(kind, run_dir=str(tmp_path)), io.StringIO()
    report = Reporter(c, Trackers([]), StepLine(total=9, stream=screen, columns=choose_columns(c)))
    losses = {0: 0.5, 2: 0.25, 4: 0.375}
    for count, loss in losses.items():
        made = evaluated(loss, 9.0)
        if kind == "sft_loss":
            made = Evaluated({name: x for name, x in made.metrics.items() if name.endswith("/loss")})
        report.evaluation(count, made)
        with report.running(count):
            pass
        report.step(count, RolloutBatch([], {}, 1, 0.0), TrainResult([{"train/loss": 0.5}], {}, {}))
    report.conclude()
    report.close()
    pairs = kind != "sft_loss"
    lines = [line.split() for line in screen.getvalue().splitlines()]
    header = next(line for line in lines if line[0] == "step")
    column = header.index("held_acc" if pairs else "held_out")
    shown = [line[column] for line in lines if line[0].endswith("/9")]
    assert shown == (
        [f"{4 * x:.3f}" for x in losses.values()] if pairs else ["5.00e-01", "2.50e-01", "3.75e-01"]
    )
    more = "  a/rewards/margins 1.5  a/rewards/accuracies 2" if pairs else ""
    assert screen.getvalue().startswith(f"eval at step 0:  a/loss 0.5{more}  b/loss 9")
    best = [line for line in screen.getvalue().splitlines() if line.startswith("best")]
    wanted = ["best evaluation: a/loss 0.25 after 2 rollouts (after 4: 0.375)"]
    if pairs:
        wanted.append("best evaluation: a/rewards/accuracies 2 after 0 rollouts (after 4: 1.5)")
    assert (
        best[: len(wanted)] == wanted
        and best[len(wanted)] == "best evaluation: b/loss 9, equal in all 3 evaluations"
    )
    first = next(read_events(tmp_path, ("evaluation",)))["scores"]
    assert first["a/loss"] == 0.5 and ("a/rewards/accuracies" in first) == pairs


def test_no_column_without_evaluations_of_held_out_sets():
    for more in ({"eval_interval": None}, {"eval_function_path": "own.evaluate"}):
        titles = [column.title for column in choose_columns(config("sft_loss", **more))]
        assert "held_out" not in titles and titles[:2] == ["loss", "lr"]
