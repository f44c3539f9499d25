"""A trainer that continues from the checkpoint of --recover-from memory, or of --save, to the bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rank_processes import killed
from trainer_cases import make_config, make_samples, rank_data

from slime.checkpoints.memory_files import StoredState, find_states
from slime.megatron_backend.checkpoint import memory_store
from slime.megatron_backend.step.trainer import MegatronTrainer
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


def states_of(trainer: Any) -> Callable[[str], list[StoredState]]:
    return lambda role: find_states(Path(trainer.config.checkpoint.memory_dir) / role)


def digest(trainer: Any) -> str:
    return hashlib.sha256(Path(trainer.weights_file().info["path"]).read_bytes()).hexdigest()


def test_policy_and_critic_continue_from_the_hosts_memory(build: Callable[..., Any], tmp_path: Path) -> None:
    flags = PPO | {"memory_dir": str(tmp_path / "memory")}
    trainer = build(**flags)
    assert find_point(trainer.config, [], states_of(trainer)) is None
    for number in range(3):
        train(trainer, number)
        trainer.save_in_memory(number)
    point = find_point(trainer.config, [], states_of(trainer))
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
    assert find_point(trainer.config, [1], states_of(trainer)) == RecoveryPoint(None, 1)
    assert find_point(trainer.config, [], states_of(trainer)) == RecoveryPoint(str(tmp_path / "memory"), 0)
    lossy = trainer.config.with_values(no_save_optim=True)
    assert find_point(lossy, [1], states_of(trainer)) == RecoveryPoint(str(tmp_path / "memory"), 0)
    wanted = train(trainer, 2), digest(trainer)
    trainer.close()
    again = build(**flags, restart_iteration=1)
    assert (train(again, 2), digest(again)) == wanted


def save_and_die(root: str, folder: str) -> None:
    """Trains and stores rollout 0, and kills this process after two storages of rollout 1."""
    config = make_config(Path(root), memory_dir=f"{folder}/memory", weight_dir=f"{folder}/weights")
    config = config.with_values(update_weight_transport="disk")
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{folder}/store")
    train(trainer, 0)
    trainer.save_in_memory(0)
    Path(folder, "digest").write_text(digest(trainer))
    train(trainer, 1)
    trainer.save_in_memory(1)
    train(trainer, 2)
    all_shares = memory_store._iter_shares

    def some_shares(state: Any) -> Iterator[Any]:
        yield from itertools.islice(all_shares(state), 2)
        os.kill(os.getpid(), signal.SIGKILL)

    memory_store._iter_shares = some_shares
    trainer.save_in_memory(2)


def test_a_kill_in_a_save_leaves_the_state_before_it(
    root: Path, build: Callable[..., Any], tmp_path: Path
) -> None:
    """The killed save has overwritten a part of the slot of rollout 0. The slot of rollout 1 is whole."""
    killed(save_and_die, [(str(root), str(tmp_path))])
    flags = {"memory_dir": str(tmp_path / "memory"), "update_weight_transport": "disk"}
    stored = find_states(tmp_path / "memory" / "policy")
    assert [(one.iteration, one.slot) for one in stored] == [(1, 1)]
    again = build(**flags, restart_dir=flags["memory_dir"], restart_iteration=1)
    continued = train(again, 2), digest(again)
    alone = build(update_weight_transport="disk")
    train(alone, 0)
    assert digest(alone) == (tmp_path / "digest").read_text()
    train(alone, 1)
    assert (train(alone, 2), digest(alone)) == continued
