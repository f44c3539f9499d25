"""Tests the times of a real trainer rank: the parts of its training add up, in numbers and in a trace."""

from __future__ import annotations

import gzip
import json

import pytest
from trainer_cases import make_checkpoints, make_config, make_samples, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer

INSIDE = (
    "data_preprocess",
    "ref_log_probs",
    "log_probs",
    "advantages",
    "actor_train",
    "ref_model_update",
    "rollout_metrics",
)
STEPS = ("pack", "forward", "policy_loss", "backward", "reduce_grads", "optimizer", "step_metrics")


@pytest.mark.slow
@pytest.mark.parametrize("operators", ["linear_token_loss", "linear_logp,ratio_kl,grpo_loss"])
def test_parts_of_training_add_up_to_it(tmp_path, operators):
    """There are two optimizer steps per rollout, a reference that is updated, and the loss in one pass and in two."""
    # Between the parts of a micro-batch the host spends 0.1 ms, a hundredth of a part's time with these sizes.
    make_checkpoints(tmp_path, num_hidden_layers=6, hidden_size=64)
    flags = {
        "max_tokens_per_gpu": 64,
        "global_batch_size": 4,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "ref_update_interval": 1,
    }
    config = make_config(
        tmp_path, **flags, rl_kernel_ops=[operators], run_dir=str(tmp_path / "run"), profile_steps="3:4"
    )
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path / 'store'}")
    try:
        # The first rollout includes first-time work, between the parts too.
        perf = [trainer.train(i, rank_data(config, make_samples(i))).perf for i in range(4)]
    finally:
        trainer.close()

    def missing(times: dict[str, float], names: tuple[str, ...], whole: str) -> float:
        return 1 - sum(times[f"perf/{name}_time"] for name in names) / times[f"perf/{whole}_time"]

    # The best of three counts, because the process may lose its core between two parts for a millisecond.
    assert 0 <= min(missing(times, INSIDE, "trainer") for times in perf[:3]) < 0.02
    assert 0 <= min(missing(times, STEPS, "actor_train") for times in perf[:3]) < 0.03
    assert not any(name.endswith("_peak_gib") for name in perf[0])  # only a GPU has these
    assert 0.1 < perf[0]["perf/trainer_rss_gib"] < 24
    assert ["perf/profile_time" in times for times in perf] == [False, False, False, True]
    with gzip.open(tmp_path / "run" / "profile" / "trainer-0-rollout-3.json.gz") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    assert {*INSIDE, *STEPS, "trainer"} <= {e["name"] for e in events}
    for name in ("trainer", "forward", "backward"):
        seconds = sum(e["dur"] for e in events if e["name"] == name) / 1e6
        assert seconds == pytest.approx(perf[3][f"perf/{name}_time"], rel=0.2), name
