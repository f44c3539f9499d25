"""Where and with what a benchmark ran, and by which switch of its file."""

from __future__ import annotations

import pytest
from bench_cases import CONFIG, ENVIRONMENT, a_record, full_steps

from vime.bench.coverage import of_another_switch, without_record
from vime.bench.record import BASELINE, RL_KERNEL
from vime.bench.where import facts

FILE = """
name: small
model: {path: somewhere}
data: file.jsonl
switch: {field: rl_kernel_ops, baseline: "swiglu", rl_kernel: "logp,swiglu"}
steps: 4
presets:
  fused: {claim: mine, switch: {baseline: "logp"}}
"""


@pytest.mark.parametrize(
    ("cluster", "gpus", "told"),
    [
        ({"device": "cpu"}, 2, "CPU, 64 of 64 cores of EPYC"),
        ({"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}, 8, "1 of 8 x NVIDIA H200, 143771 MiB"),
        ({"colocate": False, "rollout_num_gpus": 6}, 8, "8 x NVIDIA H200, 143771 MiB"),
        (
            {"actor_num_nodes": 4},
            2,
            "8 x NVIDIA H200, 143771 MiB, driver 580.1 (looked at on one host, which has 2)",
        ),
    ],
)
def test_hardware_is_what_the_runs_were_given(cluster, gpus, told):
    config = {**CONFIG, "cluster": CONFIG["cluster"] | cluster}
    environment = ENVIRONMENT | {"gpus": ENVIRONMENT["gpus"][:1] * gpus}
    assert dict(facts(environment, config))["Hardware"].startswith(told)


def test_a_record_counts_for_its_file_as_long_as_the_switch_is_the_same(tmp_path):
    """Its field and its values, which a run resolves to lists."""
    (tmp_path / "small.yaml").write_text(FILE)
    switch = {"field": "rl_kernel_ops", BASELINE: ["swiglu"], RL_KERNEL: ["swiglu", "logp"]}
    record = a_record(full_steps(repeats=1, steps=3).sides, name="small", switch=switch)
    assert without_record([record], tmp_path) == ["a trainer alone (`vime bench module`) on small"]
    assert of_another_switch(record, tmp_path) == []
    (tmp_path / "small.yaml").write_text(FILE.replace('"swiglu"', '"swiglu,rotary"'))
    moved = "by other values of `rl_kernel_ops` than the file has today"
    assert without_record([record], tmp_path)[0] == f"full steps of small (but for all of it {moved})"
    assert of_another_switch(record, tmp_path) == [f"Measured {moved}: to repeat this, check out the commit."]
    fused = a_record(record.sides, name="small", preset="fused", switch=switch | {BASELINE: ["logp"]})
    assert of_another_switch(fused, tmp_path) == []
    assert without_record([fused], tmp_path)[0] == "full steps of small (but for fused)"
    (tmp_path / "small.yaml").write_text(FILE.partition("presets:")[0])
    gone = "by preset fused, which the file does not have today"
    assert of_another_switch(fused, tmp_path) == [f"Measured {gone}: to repeat this, check out the commit."]
