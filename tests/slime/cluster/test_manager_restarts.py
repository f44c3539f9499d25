"""Kills the real rollout manager of an SFT run, which needs no engine. Another manager makes its rollouts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deadly_hooks
import numpy as np
import pytest
import ray
from deadly_hooks import order
from local_ray import local_ray

from slime.cluster.calls import ActorError
from slime.cluster.rollout_actor import RolloutGroup, wait_built
from slime.config import Config
from slime.protocols import RolloutBatch
from slime.rules.resolve import resolve
from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

ROLLOUTS = 6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(deadly_hooks.__file__).parent))
        with local_ray(num_cpus=1):
            yield


def make_run_config(root: Path, checkpoint: Path, **flags: Any) -> Config:
    """Returns the config of a run whose conversation number n has 40,000 + n characters, so that Ray stores the data of
    a rollout in its shared memory."""
    data, model = root / "chats.jsonl", root / "model"
    shutil.copytree(checkpoint, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    rows = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * (40_000 + n)}]
        for n in range(8)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    given = {
        **{"hf_checkpoint": str(model), "run_dir": str(root / "run"), "device": "cpu"},
        **{"prompt_data": str(data), "input_key": "messages", "loss_type": "sft_loss"},
        **{"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout", "debug_train_only": True},
        **{"num_rollout": ROLLOUTS, "rollout_batch_size": 1, "micro_batch_size": 1},
        "custom_rollout_log_function_path": "deadly_hooks.in_log",
    }
    return resolve(given | flags)


def lengths(batch: RolloutBatch) -> list[int]:
    return [int(np.sum(ray.get(data)["response_lengths"])) for data in batch.rank_data]


def test_rollouts_outlive_their_manager_and_lost_ones_are_made_again(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first manager dies after it has saved the position of a rollout that the driver does not have. The second
    one dies in the first rollout that it makes."""
    config = make_run_config(tmp_path, checkpoint, save=str(tmp_path / "save"))
    order(tmp_path / "run", "log-2")
    rollout = RolloutGroup(config, None, 1, {})
    try:
        wait_built(config, None, rollout)
        rollout.load(0)
        made = [rollout.generate(number, False, 0) for number in range(4)]
        first = made[0].result(120), made[1].result(120)
        second = made[2].result(120)
        order(tmp_path / "run", "log-4")
        batches = [*first, second, made[3].result(120)]
        batches += [rollout.generate(number, False, 0).result(120) for number in (4, 5)]
        # a rollout has a conversation; its answer has an end of turn
        every = [lengths(batch) for batch in batches]
        assert every == [[every[0][0] + number] for number in range(ROLLOUTS)] and every[0][0] > 40_000
    finally:
        rollout.stop()
    assert capsys.readouterr().err.count("the rollout manager is back after") == 2
    lost = [event["rollout"] for event in read_events(tmp_path / "run", ("manager_lost",))]
    back = [event["rollout"] for event in read_events(tmp_path / "run", ("manager_restarted",))]
    assert lost == back == [2, 4]
    saved = [event["rollout"] for event in read_events(tmp_path / "run", ("position",))]
    assert saved == [0, 1, 2, 2, 3, 4, 4, 5]
    assert read_ledger(tmp_path / "run").is_exact


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_manager_stays_dead_without_positions_and_after_its_last_restart(
    tmp_path: Path, checkpoint: Path, restarts: int
) -> None:
    saved = {"save": str(tmp_path / "save"), "max_manager_restarts": restarts} if restarts else {}
    config = make_run_config(tmp_path, checkpoint, **saved)
    rollout = RolloutGroup(config, None, 1, {})
    try:
        wait_built(config, None, rollout)
        rollout.load(0)
        order(tmp_path / "run", "log-0")
        made = rollout.generate(0, False, 0)
        if restarts:
            obeyed = tmp_path / "run" / "obeyed-log-0.0"
            while not obeyed.exists() and not made.done():
                time.sleep(0.01)
            order(tmp_path / "run", "log-0")
        with pytest.raises(ActorError, match="rollout failed: its process died"):
            made.result(120)
    finally:
        rollout.stop()
    if restarts:
        (event,) = read_events(tmp_path / "run", ("manager_lost",))
        assert event["rollout"] == 0 and event["text"].startswith("rollout failed: its process died")
