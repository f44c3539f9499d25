"""Tests whole runs of `vime train` on a tiny model: every topology, a run's files, resuming, exporting, plotting.

A run costs 30-40 s before its first step, so each run here proves several things, and later tests read earlier runs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import log_hooks
import pytest
import torch
from train_fixtures import (
    PROMPTS,
    ROOT,
    SAMPLES,
    World,
    assert_on_loopback,
    assert_small,
    launched,
    make_world,
    other_interface,
    published_weights,
    rows,
    run,
    samples,
    vime,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.tracking.ledger import read_ledger
from vime.view.run_metrics import UNMEASURED, load_run, step_times

pytestmark = pytest.mark.e2e

ROLLOUTS, TRACED = 4, 2
KL = ("--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "low_var_kl")
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
NAMES = {
    "train/step": {
        *("train/loss", "train/pg_loss", "train/entropy_loss", "train/kl_loss"),
        *("train/pg_clipfrac", "train/ppo_kl", "train/grad_norm", "train/lr-pg_0"),
        *("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max"),
        *("train/global_batch_size", "train/step"),
    },
    "rollout/step": {
        *(
            f"rollout/{name}"
            for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "returns", "advantages")
        ),
        *("rollout/raw_reward", "rollout/truncated_ratio", "rollout/repetition_frac", "rollout/step"),
        *(f"rollout/response_len/{name}" for name in ("mean", "median", "max", "min")),
        *("perf/rollout_time", "perf/tokens_per_gpu_per_sec", "perf/effective_tokens_per_gpu_per_sec"),
        *(
            f"perf/{name}_time"
            for name in ("train_wait", "train", "data_preprocess", "ref_log_probs", "actor_train")
        ),
        *(f"perf/{name}_time" for name in ("sleep", "wake_up", "save_model", "update_weights", "step")),
        *(f"perf/update_weights_{name}_time" for name in ("wait", "pause", "load", "finish")),
        *(f"perf/{name}_time" for name in ("trainer", "handover", "make_data", "advantages", "pack")),
        *(
            f"perf/{name}_time"
            for name in ("forward", "policy_loss", "backward", "reduce_grads", "optimizer")
        ),
        *("perf/actor_train_tok_per_s", "perf/wait_time_ratio", "perf/step_tokens_per_gpu_per_sec"),
        *("perf/actor_train_tflops", "perf/ref_log_probs_tflops"),
        *("perf/longest_sample_tokens_per_sec", "perf/longest_effective_sample_tokens_per_sec"),
        *(
            f"perf/{figure}/mean"
            for figure in ("request/e2e_latency", "request/queue_time", "decode/throughput")
        ),
        *(f"perf/{process}_rss_gib" for process in ("driver", "rollout", "trainer")),
    },
    "eval/step": {
        "eval/greedy",
        "eval/greedy-truncated_ratio",
        "eval/sampled",
        "eval/sampled-truncated_ratio",
    },
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def colocated(world: World, name: str) -> list[str]:
    """Returns the flags of the reference run, which saves to `name` and resumes from there."""
    checkpoint = str(world.root / name / "checkpoint")
    return [
        *world.grpo(name, rollouts=ROLLOUTS),
        *("--colocate", "--actor-num-gpus-per-node", "1", *KL, "--use-prometheus", "--prometheus-port", "0"),
        *("--save", checkpoint, "--load", checkpoint, "--save-interval", "1"),
        *("--eval-config", str(world.eval_config), "--eval-interval", "2"),
        *("--check-weight-update-equal", "--use-tensorboard", "--profile-steps", f"{TRACED}:{TRACED + 1}"),
    ]


@pytest.fixture(scope="module")
def whole(world: World) -> Path:
    """Returns the uninterrupted colocated run, started as slime's launch scripts do."""
    command = [sys.executable, str(ROOT / "train.py"), *colocated(world, "whole")]
    printed = run(command, world.root / "whole.out")
    assert f"{ROLLOUTS - 1}/{ROLLOUTS}" in printed
    assert "Traceback" not in printed and "Prometheus metrics: http://127.0.0.1:" in printed
    run_dir = world.root / "whole"
    assert not published_weights(run_dir).exists()
    return run_dir


def assert_agree(run_dir: Path, *, steps: int) -> None:
    """Checks that every step was logged, and that engine and trainer computed the same log-probs in it."""
    trained = rows(run_dir, "train/step")
    assert sorted(trained) == list(range(steps))
    for step, row in trained.items():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, step
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4, step


def test_colocated_run_logs_every_step_under_the_contract_names(whole: Path) -> None:
    assert_agree(whole, steps=ROLLOUTS)
    for key, steps in {
        "train/step": range(ROLLOUTS),
        "rollout/step": range(ROLLOUTS),
        "eval/step": [0, 2, 4],
    }.items():
        logged = rows(whole, key)
        assert sorted(logged) == list(steps)
        for row in logged.values():
            assert NAMES[key] <= row.keys(), NAMES[key] - row.keys()
            assert "nonfinite" not in row
            # With one optimizer step per rollout, old log-probs need no separate pass.
            assert "perf/log_probs_tflops" not in row
    trained = rows(whole, "train/step")
    # The first step is on policy and starts from the reference; the policy of later steps differs from it.
    assert trained[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert all(trained[step]["train/kl_loss"] > 1e-5 for step in range(1, ROLLOUTS))
    assert all(row["train/grad_norm"] > 0 and row["train/ppo_kl"] == 0 for row in trained.values())
    assert sorted(path.name for path in (whole / "tensorboard").iterdir()) == ["eval", "rollout", "train"]


def assert_adds_up(steps: list[dict[str, float]], names: tuple[str, ...], whole: str) -> None:
    """Checks that the times `names` add up to `whole`: in the median step within 2 % or 5 ms, in every step within 10 %
    or 200 ms. If the process loses its core between two parts, a step of any length misses some milliseconds.
    """
    missing, wholes = [], []
    for row in steps:
        parts = {name: row[f"perf/{name}_time"] for name in names if f"perf/{name}_time" in row}
        wholes.append(row[f"perf/{whole}_time"])
        missing.append(wholes[-1] - sum(parts.values()))
        assert abs(missing[-1]) < max(0.1 * wholes[-1], 0.2), (parts, row)
    assert abs(statistics.median(missing)) < max(0.02 * statistics.median(wholes), 0.005), (missing, wholes)


def test_parts_of_a_step_add_up_to_it(whole: Path) -> None:
    """Each level is measured separately: the driver's step, rank 0's training, its optimizer steps."""
    steps = rows(whole, "rollout/step")
    every = [*steps.values()]
    assert_adds_up(every, ("train_wait", "sleep", "train", "wake_up", "update_weights"), "step")
    of_update = tuple(f"update_weights_{name}" for name in ("wait", "pause", "load", "finish"))
    assert_adds_up(every, of_update, "update_weights")
    inside = ("data_preprocess", "ref_log_probs", "advantages", "actor_train", "rollout_metrics")
    assert_adds_up(every, inside, "trainer")
    parts = ("pack", "forward", "policy_loss", "backward", "reduce_grads", "optimizer", "step_metrics")
    # In a traced step the profiler itself works between the ranges.
    assert_adds_up([row for step, row in steps.items() if step != TRACED], parts, "actor_train")
    for step, row in steps.items():
        assert ("perf/profile_time" in row) == (step == TRACED)
        assert 0 < row["perf/handover_time"] < row["perf/train_time"]
        waited = row["perf/train_wait_time"]  # the rollout begins just before the driver waits
        rollout = row["perf/rollout_time"] + row["perf/make_data_time"]
        assert max(0.5 * waited, 0.5) > waited - rollout > -0.005  # a busy machine delays the call's answer
    times = step_times(load_run(whole))
    measured = sum(seconds.sum() for name, seconds in times.parts.items() if name != UNMEASURED)
    assert measured == pytest.approx(times.whole.sum(), rel=0.02)


def test_percentiles_and_trace(whole: Path) -> None:
    logged = rows(whole, "rollout/step")
    seconds = {step: row["perf/step_time"] for step, row in logged.items()}
    assert "perf/step_time_p50" not in logged[0]
    assert logged[3]["perf/step_time_p50"] == pytest.approx((seconds[1] + seconds[3]) / 2)  # 2 was traced
    for row in logged.values():  # colocated on one device
        assert row["perf/step_tokens_per_gpu_per_sec"] == row["perf/step_tokens_per_sec"]
    tokens = sum(len(s["tokens"]) for s in samples(whole, 1))
    assert logged[1]["perf/step_tokens_per_sec"] == pytest.approx(tokens / seconds[1])
    (trace,) = (whole / "profile").iterdir()
    assert trace.name == f"trainer-0-rollout-{TRACED}.json.gz"
    with gzip.open(trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    spans = Counter(e["name"] for e in events)
    # The forward spans are the model, and the rows that the head takes from its output.
    assert spans["forward"] == 2 * spans["backward"] > 2 and spans["trainer"] == 1
    forward = sum(e["dur"] for e in events if e["name"] == "forward") / 1e6
    assert forward == pytest.approx(logged[TRACED]["perf/forward_time"], rel=0.1)
    assert f"trace of rollout {TRACED}: {trace.resolve()}" in (whole / "logs" / "trainer-0.log").read_text()


def test_colocated_run_samples_carry_the_version_and_the_evaluation_its_own_settings(whole: Path) -> None:
    for rollout_id in range(ROLLOUTS):
        drawn = samples(whole, rollout_id)
        assert [s["index"] for s in drawn] == list(
            range(rollout_id * 32, rollout_id * 32 + PROMPTS * SAMPLES)
        )
        assert all(s["weight_versions"] == [rollout_id] for s in drawn)
        assert all(len(s["rollout_log_probs"]) == s["response_length"] <= 8 for s in drawn)
        mean = sum(s["reward"] for s in drawn) / len(drawn)
        assert rows(whole, "rollout/step")[rollout_id]["rollout/raw_reward"] == pytest.approx(mean)
    for step in (0, 2, 4):
        drawn = samples(whole, f"eval_{step}")
        greedy, sampled = drawn[:6], drawn[6:]
        assert len(sampled) == 4 * 2
        assert all(s["weight_versions"] == [step] for s in drawn)
        assert (
            max(s["response_length"] for s in greedy) <= 3 < max(s["response_length"] for s in sampled) <= 5
        )
        assert rows(whole, "eval/step")[step]["eval/greedy"] == pytest.approx(
            sum(s["reward"] for s in greedy) / 6
        )


def test_colocated_run_records_configuration_and_environment_without_keys(world: World, whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["data"]["rollout_batch_size"] == PROMPTS
    environment = json.loads((whole / "environment.json").read_text())
    assert "--check-weight-update-equal" in environment["command"]
    assert {"torch", "ray", "transformers"} <= environment["packages"].keys()
    assert environment["variables"]["OMP_WAIT_POLICY"] == "passive", (
        "threads that wait leave the cores to others"
    )
    digests = {file["sha256"] for file in environment["files"].values()} | {
        (environment["git"] or {}).get("difference")
    }
    assert set(environment["files"]) >= {str(world.data / "train.jsonl")}
    # The run's key is 64 hex digits; no file of the run may hold one.
    for path in [whole / "config.json", whole / "environment.json", *(whole / "logs").iterdir()]:
        text = path.read_text(errors="replace")
        assert "Bearer " not in text, path
        assert set(re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text)) <= digests, path


def test_killed_driver_leaves_nothing_and_the_same_command_continues_the_curve(
    world: World, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interface := other_interface():
        # A user's shell sets it for a cluster. Without it, gloo uses loopback if the host's name resolves to it.
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    # Between trainings, the trainer's state is on the host, on CPUs too. The run saves and resumes it as on a GPU.
    command = vime("train", *colocated(world, "killed"), "--offload-train")
    run_dir = world.root / "killed"
    newest = run_dir / "checkpoint" / "latest_checkpointed_iteration.txt"
    with launched(command, world.root / "killed.out") as launch:
        launch.wait_for(lambda: newest.exists() and newest.read_text().strip() == "1", "save", 300)
        os.kill(launch.process.pid, signal.SIGSTOP)  # The run must not end during the checks below.
        assert_on_loopback(launch.sockets())
        assert_small(launch)
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.process.wait(5)
        launch.await_gone(30)
    assert len(rows(run_dir, "train/step")) < ROLLOUTS
    assert not published_weights(run_dir).exists()
    printed = run(command, world.root / "resumed.out")
    assert "memory: between trainings gradients, parameters, optimizer leave the device" in printed
    assert not published_weights(run_dir).exists()
    assert_agree(run_dir, steps=ROLLOUTS)
    assert_same_curve(run_dir, whole)
    for step, row in rows(whole, "eval/step").items():
        assert rows(run_dir, "eval/step")[step]["eval/sampled"] == row["eval/sampled"]


def assert_same_curve(run_dir: Path, whole: Path) -> None:
    expected, actual = rows(whole, "train/step"), rows(run_dir, "train/step")
    for step in range(ROLLOUTS):
        assert [s["tokens"] for s in samples(run_dir, step)] == [s["tokens"] for s in samples(whole, step)], (
            step
        )
        for name in ("train/pg_loss", "train/kl_loss", "train/loss", "train/grad_norm", "train/entropy_loss"):
            assert actual[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)
        reward = rows(whole, "rollout/step")[step]["rollout/raw_reward"]
        assert rows(run_dir, "rollout/step")[step]["rollout/raw_reward"] == reward


def test_export_loads_in_transformers_with_the_log_probs_of_the_rollout(world: World, whole: Path) -> None:
    """The checkpoint after rollout 2 is version 3, which drew the samples of rollout 3."""
    out = world.root / "exported"
    flags = [
        *("--load", str(whole / "checkpoint"), "--iteration", "2"),
        *("--hf-checkpoint", str(world.model), "--output-dir", str(out)),
    ]
    run(vime("export", *flags), world.root / "export.out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(out).decode([257]) == "<|im_start|>"
    for sample in samples(whole, 3):
        tokens, length = torch.tensor([sample["tokens"]]), sample["response_length"]
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
        picked = log_probs.gather(1, tokens[0, 1:, None])[-length:, 0]
        assert torch.allclose(picked, torch.tensor(sample["rollout_log_probs"]), atol=1e-4, rtol=0)


def test_plot_writes_the_pictures(world: World, whole: Path) -> None:
    run(vime("plot", str(whole)), world.root / "plot.out")
    names = {path.name for path in (whole / "plots").glob("*.png")}
    assert {"reward.png", "step_time.png", "logprob_diff.png", "kl.png", "response_length.png"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_tensor_parallel_disaggregated_run_equals_the_colocated_one(
    world: World, whole: Path, transport: str
) -> None:
    flags = [
        *world.grpo(transport, rollouts=2),
        *("--update-weight-transport", transport),
        *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--rollout-num-gpus", "1", "--check-weight-update-equal", *KL),
    ]
    run(vime("train", *flags), world.root / f"{transport}.out")
    run_dir = world.root / transport
    assert_agree(run_dir, steps=2)
    assert [s["tokens"] for s in samples(run_dir, 0)] == [s["tokens"] for s in samples(whole, 0)]
    expected, actual = rows(whole, "train/step"), rows(run_dir, "train/step")
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert actual[0][name] == pytest.approx(expected[0][name], rel=1e-4, abs=1e-6), name
    # One step later the test compares the weights themselves: the samples drawn from them, and the trainer's metrics.
    assert [s["tokens"] for s in samples(run_dir, 1)] == [s["tokens"] for s in samples(whole, 1)]
    assert actual[1]["train/grad_norm"] == pytest.approx(expected[1]["train/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_asynchronous_data_parallel_run_keeps_within_its_staleness(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation is one update ahead. The run drops over-sampled groups that are too old, and groups without spread.
    A plug-in logs the metrics."""
    monkeypatch.setenv("PYTHONPATH", log_hooks.PLUG_INS)
    flags = [
        *world.grpo("async", rollouts=ROLLOUTS),
        *("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--max-staleness", "1"),
        *("--over-sampling-batch-size", str(PROMPTS + 4)),
        *("--dynamic-sampling-filter-path", FILTER),
        *("--check-weight-update-equal", "--balance-data", *log_hooks.flags(world)),
    ]
    run([sys.executable, str(ROOT / "train_async.py"), *flags], world.root / "async.out")
    log_hooks.assert_logged(run_dir := world.root / "async", ROLLOUTS)
    trained, generated = rows(run_dir, "train/step"), rows(run_dir, "rollout/step")
    assert sorted(trained) == sorted(generated) == list(range(ROLLOUTS))
    assert {row["rollout/staleness/max"] for row in generated.values()} == {0, 1}
    for name in ("token_over_limit_frac", "token_unknown_frac"):
        assert {row[f"rollout/staleness/{name}"] for row in generated.values()} == {0}
    seen = []
    for rollout_id in range(ROLLOUTS):
        drawn = samples(run_dir, rollout_id)
        assert len(drawn) == PROMPTS * SAMPLES
        seen += [s["index"] for s in drawn]
        for sample in drawn:
            versions = sample["weight_versions"]
            assert versions == sorted(versions) and versions[-1] <= rollout_id
            assert versions[0] >= rollout_id - 1, (rollout_id, versions)
            of_tokens = sample["columns"]["token_versions"]
            assert list(dict.fromkeys(of_tokens)) == versions and len(of_tokens) == sample["response_length"]
        rewards = torch.tensor([s["reward"] for s in drawn]).reshape(PROMPTS, SAMPLES)
        assert (rewards.std(dim=1) > 0).all()
    assert len(seen) == len(set(seen)), "a sample was trained on twice"
    ledger = read_ledger(run_dir)
    assert ledger.is_exact and ledger.groups_trained == ROLLOUTS * PROMPTS and ledger.over_limit == 0
    # Log-probs recomputed without the carried-over tokens are of newer weights: the difference is bounded, not 0.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.5 for row in trained.values())


@pytest.mark.slow
def test_sft_lowers_the_loss(world: World, monkeypatch) -> None:
    """The run also leaves no files of ours in the temporary folder."""
    temporary = world.root / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    began = time.monotonic()
    held_out = ["--eval-interval", "6", "--eval-prompt-data", "a/b", f"{world.data / 'sft.jsonl'}@[7000:]"]
    printed = run(vime("train", *world.sft("sft", rollouts=12), *held_out), world.root / "sft.out")
    of_steps = [row["eval/a/b/loss"] for _, row in sorted(rows(world.root / "sft", "eval/step").items())]
    assert len(of_steps) == 3 and of_steps[0] > of_steps[1] > of_steps[2]
    assert " held_out " in printed and "best evaluation: a/b/loss " in printed
    loss = [row["train/loss"] for _, row in sorted(rows(world.root / "sft", "train/step").items())]
    assert len(loss) == 12
    assert loss[0] == pytest.approx(5.57, abs=0.2)  # log(262): the untrained model is nearly uniform
    assert loss[-1] < 0.6 * loss[0]
    assert time.monotonic() - began < 120
    assert [path.name for path in temporary.iterdir() if "torchinductor" not in path.name] == []
