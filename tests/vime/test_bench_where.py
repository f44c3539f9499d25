"""Where and with what a benchmark ran."""

from __future__ import annotations

import pytest
from bench_cases import CONFIG, ENVIRONMENT

from vime.bench.where import facts


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
