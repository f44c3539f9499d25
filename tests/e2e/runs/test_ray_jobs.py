"""Runs the last lines of a slime launch script unchanged: `ray start`, a second node, `ray job submit`, twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import ROOT, World, launched, make_world, rows

from vime.pool.process import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = """\
set -e
# What docs/several-hosts.md adds before a script.
python -m slime.cluster.ray_token --make {token}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}

export MASTER_ADDR=127.0.0.1
ray start --head --node-ip-address $MASTER_ADDR --port {port} --num-cpus 1 --disable-usage-stats \\
    --dashboard-host 127.0.0.1 --dashboard-port {dashboard} --temp-dir {temporary} --object-store-memory 80000000
ray start --address $MASTER_ADDR:{port} --num-cpus 1 --disable-usage-stats --object-store-memory 80000000
for run in first second; do
    ray job submit --address http://127.0.0.1:{dashboard} --runtime-env-json '{environment}' \\
        -- python3 train.py {arguments} --run-dir {root}/$run
done
# What somebody without the token gets.
env -u RAY_AUTH_MODE -u RAY_AUTH_TOKEN_PATH HOME=/nowhere \\
    ray job submit --address http://127.0.0.1:{dashboard} -- echo never && exit 9
echo refused
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_two_jobs_after_each_other_on_a_cluster_of_two_nodes(world: World) -> None:
    """Each node has one CPU, and the run needs 1.5, so its processes are on both nodes."""
    arguments = world.grpo("unused", rollouts=2)
    at = arguments.index("--run-dir")
    arguments = arguments[:at] + arguments[at + 2 :]
    arguments += ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"]
    variables = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parents[1]}", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    text = SCRIPT.format(
        token=world.root / "token",
        port=free_port("127.0.0.1"),
        dashboard=free_port("127.0.0.1"),
        temporary=world.root / "r",
        environment=json.dumps({"env_vars": variables}),
        arguments=" ".join(arguments).replace("{rollout_id}", "'{rollout_id}'"),
        root=world.root,
    )
    script = world.root / "run.sh"
    script.write_text(text)
    with launched(["bash", str(script)], world.root / "script.log") as launch:
        assert launch.process.wait(500) == 0, launch.output[-3000:]
        of_runs = launch.find(r"vllm|vime\.|Actor|train\.py")
        output = launch.output
    assert of_runs == [], "the cluster stays, and nothing of the jobs does"
    assert len(re.findall(r"Job 'raysubmit_\w+' succeeded", output)) == 2, output[-3000:]
    assert "Missing authentication token" in output.rpartition("succeeded")[2] and output.endswith(
        "refused\n"
    )
    first, second = (rows(world.root / run, "rollout/step") for run in ("first", "second"))
    assert list(first) == list(second) == [0, 1]
    assert [first[step]["rollout/raw_reward"] for step in (0, 1)] == [
        second[step]["rollout/raw_reward"] for step in (0, 1)
    ]
