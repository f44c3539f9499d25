"""Compares the simulation with the records of runs on two and four GPUs. The factors of a step's time were not fitted
again for it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from search_models import DENSE, experts

from slime.hardware import HARDWARE
from vime.plan.search.simulated import make_stream
from vime.plan.search.step_time import GpuLayout, Model, PredictedStep, predict
from vime.plan.search.stream import DECODING, TRAINING, Simulated, Simulation

RECORDS = Path(__file__).parents[4] / "benchmarks" / "results"


def simulate(model: Model, gpu: str, layout: GpuLayout, response: int) -> tuple[PredictedStep, Simulated]:
    """Returns the prediction and the simulation of a step of 256 responses of equal length."""
    samples = [(14, response)] * 256
    prediction = predict(model, HARDWARE[gpu], layout, samples)
    return prediction, Simulation(
        make_stream(model, HARDWARE[gpu], layout, prediction, samples, faults=0.0)
    ).run(5)


def read(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text())


def relative(found: float, measured: float) -> float:
    return found / measured - 1


def compare(found: Simulated, medians: dict[str, float]) -> dict[str, float]:
    """Returns the relative errors of the step, and of the times in which engines decode and the trainer trains."""
    return {
        "step": relative(found.step_s, medians["perf/step_time"]),
        "rollout": relative(found.engine[DECODING] * found.step_s, medians["perf/rollout_time"]),
        "training": relative(found.trainer[TRAINING] * found.step_s, medians["perf/train_time"]),
    }


def test_a_disaggregated_run_on_two_h200() -> None:
    medians = read("weights_two_h200")["disaggregated_nccl"]["medians_of_steps_3_to_10"]
    layout = GpuLayout(1, 1, 1, False, micro_tokens=16384)
    _, found = simulate(DENSE, "h200", layout, 256)
    errors = {"step": 0.0, "rollout": -0.05, "training": 0.01}
    assert compare(found, medians) == pytest.approx(errors, abs=0.006)


def test_a_colocated_run_with_experts_on_four_h100() -> None:
    """Trainer and engines of this run take turns on the same GPUs, as they do on GPUs of their own without overlap."""
    layout = GpuLayout(4, 1, 4, True, ep=4, micro_tokens=16384, recompute=True, host_adam=0.9)
    _, found = simulate(experts(48), "h100", layout, 256)
    errors = {"step": -0.28, "rollout": 0.06, "training": -0.21}
    assert compare(found, read("whole_qwen3_30b_h100")["medians"]) == pytest.approx(errors, abs=0.006)


def test_a_colocated_run_with_experts_on_two_h200() -> None:
    """The newer run has Adam on the host and remainders. Adam on the host, and the weights of experts, were fitted to
    this record."""
    layout = GpuLayout(
        2, 1, 2, True, ep=2, micro_tokens=16384, recompute=True, host_adam=0.6, remainders=True
    )
    _, found = simulate(experts(48), "h200", layout, 256)
    steps = read("whole_qwen3_30b_h200")["measured"]["qwen3-30b-a3b, whole, from the launcher"]["steps"]
    medians = {name: statistics.median(values[1:]) for name, values in steps.items()}
    errors = {"step": 0.02, "rollout": 0.25, "training": -0.04}
    assert compare(found, medians) == pytest.approx(errors, abs=0.006)


def test_the_rollout_of_a_run_on_two_h100_that_no_factor_has_seen() -> None:
    """The record does not have the layout of its trainer, so the training is not compared."""
    seconds = statistics.median(read("trainer_restart_qwen3_4b_h100")["measured"]["per_step"]["rollout_time"])
    _, found = simulate(DENSE, "h100", GpuLayout(1, 1, 1, False), 512)
    assert relative(found.engine[DECODING] * found.step_s, seconds) == pytest.approx(0.07, abs=0.006)


def test_equal_responses_without_overlap_take_the_predicted_time() -> None:
    prediction, found = simulate(DENSE, "h200", GpuLayout(1, 1, 1, False), 4096)
    assert found.step_s == pytest.approx(prediction.step, rel=0.01)
