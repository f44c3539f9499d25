"""A trainer that continues from the checkpoint of --recover-from memory, or of --save, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_cases import make_samples, rank_data

from slime.checkpoints.memory_files import find_states
from slime.protocols import RecoveryPoint
from slime.roles.recovery_points import find_point

PPO = {
    "advantage_estimator": "ppo",
    "kl_coef": 0.1,
    "critic_lr": 0.3,
    "no_load_optim": True,  # flags for the start of a run do not change a restart
    "no_load_rng": True,
    "update_weight_transport": "disk",
}


def train(trainer: Any, *rollouts: int) -> list[Any]:
    return [
        trainer.train(number, rank_data(trainer.config, make_samples(number))).steps for number in rollouts
    ]


def digest(trainer: Any) -> str:
    return hashlib.sha256(Path(trainer.weights_file().info["path"]).read_bytes()).hexdigest()


def test_policy_and_critic_continue_from_the_hosts_memory(build: Callable[..., Any], tmp_path: Path) -> None:
    flags = PPO | {"memory_dir": str(tmp_path / "memory")}
    trainer = build(**flags)
    assert find_point(trainer.config, []) is None
    for number in range(3):
        train(trainer, number)
        trainer.save_in_memory(number)
    point = find_point(trainer.config, [])
    assert point == RecoveryPoint(str(tmp_path / "memory"), 2)
    for role in ("policy", "critic"):  # the newest two
        assert [(one.iteration, one.rank, one.slot) for one in find_states(tmp_path / "memory" / role)] == [
            (1, 0, 1),
            (2, 0, 0),
        ]
    wanted = train(trainer, 3), digest(trainer)
    trainer.close()
    again = build(**flags, restart_dir=point.directory, restart_iteration=point.iteration)
    assert again.start_rollout_id == again.outputs.version == 3
    assert (train(again, 3), digest(again)) == wanted


def test_the_newer_of_memory_and_disk_is_taken(build: Callable[..., Any], tmp_path: Path) -> None:
    flags = {
        "memory_dir": str(tmp_path / "memory"),
        "save": str(tmp_path / "save"),
        "update_weight_transport": "disk",
    }
    trainer = build(**flags)
    train(trainer, 0)
    trainer.save_in_memory(0)
    train(trainer, 1)
    trainer.save(1)
    assert find_point(trainer.config, [1]) == RecoveryPoint(None, 1)
    assert find_point(trainer.config, []) == RecoveryPoint(str(tmp_path / "memory"), 0)
    lossy = trainer.config.with_values(no_save_optim=True)
    assert find_point(lossy, [1]) == RecoveryPoint(str(tmp_path / "memory"), 0)
    wanted = train(trainer, 2), digest(trainer)
    trainer.close()
    again = build(**flags, restart_iteration=1)
    assert (train(again, 2), digest(again)) == wanted
