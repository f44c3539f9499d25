"""Tests the table of GPU figures: which runs count, which do not, and the text of the table."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from gpu_numbers import FIGURES, main, read, rows

QWEN3_4B = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
FLAGS = {
    "colocate": True,
    "tensor_model_parallel_size": 1,
    "rollout_num_gpus_per_engine": 1,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 16384,
    "rlk_fast": "auto",
}
BEGAN = datetime(2026, 11, 21, 12).timestamp()


def write_run(
    path: Path, steps: list[dict[str, float]], model: dict[str, Any] | None = None, **flags: Any
) -> Path:
    checkpoint = path / "model"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(model or QWEN3_4B))
    config = {"all": {**FLAGS, "hf_checkpoint": str(checkpoint), **flags}, "notes": []}
    (path / "config.json").write_text(json.dumps(config))
    lines = [
        {"step_key": "rollout/step", "step": i, "time": BEGAN + 10 * (i + 1), **step}
        for i, step in enumerate(steps)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def values(*paths: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for target, value, _ in rows(read(paths)):
        found.setdefault(target.figure, []).extend([] if value is None else [value])
    return found


def timed(update_s: float, **more: float) -> dict[str, float]:
    return {"perf/update_weights_time": update_s, **more}


def test_times_are_medians_without_the_first_step_and_go_to_the_way_the_run_was_set_up(
    tmp_path: Path,
) -> None:
    steps = [timed(9.0), timed(0.3), timed(0.5), timed(0.4)]
    colocated = [{**step, "perf/sleep_time": 0.1, "perf/wake_up_time": 0.05} for step in steps]
    found = values(
        write_run(tmp_path / "a", colocated),
        write_run(tmp_path / "b", steps, colocate=False),
        write_run(tmp_path / "c", steps, colocate=False, tensor_model_parallel_size=2),
    )
    for name in ("sync_colocated_s", "sync_disaggregated_s", "sync_tp2_tp1_s"):
        assert found[name] == [pytest.approx(0.4)]
    assert found["hand_over_s"] == [pytest.approx(0.55)]
    assert found["offload_s"] == [] == found["mfu"]


def test_a_small_model_and_one_that_is_gone_do_not_count(tmp_path: Path) -> None:
    small = write_run(tmp_path / "small", [timed(0.1)] * 3, {**QWEN3_4B, "num_hidden_layers": 4})
    gone = write_run(tmp_path / "gone", [timed(0.1)] * 3)
    (gone / "model" / "config.json").unlink()
    assert values(small, gone)["sync_colocated_s"] == []


def test_training_is_held_against_the_peak_and_the_loss_against_the_benchmark(tmp_path: Path) -> None:
    """256 samples of 600 tokens (512 of the answer) take 10 s. By hand: the layers of a Qwen3-4B have
    3,633,315,840 weights, so the forward pass of a sample is 4.35998 TFLOP, and attention's 600 x 601 / 2
    pairs add 0.10635. Three times 256 such passes in 10 s are 343.01 TFLOP/s; the peak is 2.8833 times as
    much."""
    step = {
        "perf/actor_train_tok_per_s": 15_360.0,
        "perf/actor_train_time": 10.0,
        "rollout/response_len/mean": 512.0,
        "perf/policy_loss_time": 0.512,
    }
    bench = tmp_path / "bench.json"
    row = {"name": "linear_token_loss 1.5GiB bf16 main_grad grpo_loss", "ms": {"median": 58.0}}
    case = {"tokens": 16384, "hidden": 2560, "vocab": 151936}
    bench.write_text(
        json.dumps({"machine": {"gpu": "NVIDIA H200"}, "linear": [{"case": case, "rows": [row]}]})
    )
    run = write_run(tmp_path / "a", [step, step])
    assert values(run, bench)["loss_part"] == []  # the run names no GPU to compare with
    (run / "environment.json").write_text(json.dumps({"gpus": [{"name": "NVIDIA H200"}]}))
    found = values(run, bench)
    assert found["mfu"] == [pytest.approx(0.34683, rel=1e-4)]
    assert found["loss_part"] == [pytest.approx(0.512 / (256 * 512 / 16384 * 0.058))]
    other = write_run(tmp_path / "b", [step, step], max_tokens_per_gpu=9216)
    assert values(other, bench)["mfu"] == []


def test_memory_is_the_largest_of_a_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [timed(0.1)] * 11)
    uses = {
        5: 10_000,
        35: 100_000,
        38: 90_000,
        45: 500_000,
        101: 100_500,
        105: 102_000,
    }  # step 3 is from 30 to 40 s, step 10 from 100 s
    lines = [
        f"{datetime.fromtimestamp(BEGAN + s):%Y/%m/%d %H:%M:%S}.000, {gpu}, {used}"
        for s, mib in uses.items()
        for gpu, used in enumerate(
            (mib / 2, mib, 0 if s < 100 else 50_000)
        )  # the last GPU is used by a later process
    ]
    (run / "gpu_memory.csv").write_text("\n".join(lines) + "\n2026/11/21 12:0")  # the last line was cut off
    assert values(run)["memory_growth"] == [pytest.approx(0.02)]


def test_steps_that_began_beside_others_do_not_count(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a", [timed(update_s) for update_s in (9.0, 0.7, 0.6, 0.3, 0.2, 0.3)], colocate=False
    )
    assert values(run)["sync_disaggregated_s"] == [0.3]
    (run / "alone_from").write_text(f"{BEGAN + 35:.0f}\n")  # step 3 had begun 5 s earlier
    assert values(run)["sync_disaggregated_s"] == [pytest.approx(0.25)]
    (run / "alone_from").write_text(f"{BEGAN + 99:.0f}\n")
    assert values(run)["sync_disaggregated_s"] == []


def test_memory_that_was_watched_too_late_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = write_run(tmp_path / "a", [timed(0.1)] * 11)
    for began, code in ((29, 0), (31, 1)):  # step 3 is from 30 to 40 s
        lines = [
            f"{datetime.fromtimestamp(BEGAN + s):%Y/%m/%d %H:%M:%S}.000, 0, 10000" for s in (began, 35, 105)
        ]
        (run / "gpu_memory.csv").write_text("\n".join(lines))
        assert len(values(run)["memory_growth"]) == 1 - code
        assert main([str(run), "--require", "memory_growth"]) == code
    assert "memory_growth must be measured, got nothing of it" in capsys.readouterr().err


def test_a_layout_that_moves_nothing_forgives_nothing(tmp_path: Path) -> None:
    pairs = [{"first": "trainer, rows reordered", "second": "trainer, training rows", "mean": 0.0}]
    sides = {"off": [{"abs_dlogp_mean": 0.002}], "auto": [{"abs_dlogp_mean": 0.0021}]}
    file, out = tmp_path / "audit.json", tmp_path / "out.json"
    file.write_text(json.dumps({"rlk_fast": sides, "pairs": pairs}))
    assert values(file)["audit"] == [math.inf]
    assert main([str(file), "--out", str(out)]) == 0
    (row,) = (row for row in json.loads(out.read_text()) if row["figure"] == "audit")
    assert (row["value"], row["verdict"]) == (None, "missed")
    sides["auto"] = sides["off"]
    file.write_text(json.dumps({"rlk_fast": sides, "pairs": pairs}))
    assert values(file)["audit"] == [0.0]


def test_the_table_says_met_missed_and_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed, figures = tmp_path / "speed.json", tmp_path / "figures.json"
    speed.write_text(json.dumps({"ours_to": {"raw": 0.81}, "requests": 256, "engine": "vllm"}))
    figures.write_text(json.dumps({"figures": {"sync_tp2_tp1_s": 0.43}}))
    assert main([str(speed), str(figures), "--out", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "missed by 10%" in next(line for line in lines if line.startswith("rollout / raw"))
    assert "met" in next(line for line in lines if "TP 2 to TP 1" in line).split()
    assert sum("not measured" in line for line in lines) == len(FIGURES) - 2 == len(lines) - 3
    written = {
        record["figure"]: record["value"] for record in json.loads((tmp_path / "out.json").read_text())
    }
    assert written["rollout_share"] == 0.81 and written["mfu"] is None


def test_a_figure_without_a_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.json").write_text('{"figures": {"mfuu": 0.5}}')
    assert main([str(tmp_path / "f.json")]) == 2
    assert "got mfuu" in capsys.readouterr().err
    assert main([str(tmp_path / "nothere.json")]) == 2


def test_committed_results_hold_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    results = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
    assert main([str(path) for path in results]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("model FLOPs" in line and " met" in line and "training_qwen3_4b" in line for line in lines)
