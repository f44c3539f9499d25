"""Compares a critic on separate ranks with a trainer that has both models, with real Ray actors and a tiny model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from local_ray import local_ray
from trainer_cases import make_config, make_samples, rank_data

from slime.cluster.calls import ActorError, first_failure_or_all
from slime.cluster.placement import reserve_devices
from slime.cluster.trainers import Trainers, merge_results, merged
from slime.config import Config
from slime.data.transport import pack_columns
from slime.protocols import Logged, TrainResult
from slime.roles.groups import build_groups

PPO = {
    "advantage_estimator": "ppo",
    "gamma": 0.9,
    "lambd": 0.8,
    "kl_coef": 0.1,  # the critic's returns need log-probs of the policy's ranks
    "normalize_advantages": True,
    "critic_lr": 0.3,
    "value_clip": 0.1,
    "clip_grad": 0.5,
    "global_batch_size": 4,
    "debug_train_only": True,
}
OWN = PPO | {"critic_devices": "own"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.fixture
def start(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainers]]:
    """Starts trainers one after another, with one compute thread per rank."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    running: list[Callable[[], None]] = []

    def end() -> None:
        while running:
            running.pop()()

    def start_one(**flags: Any) -> Trainers:
        end()
        given = {"weight_dir": str(tmp_path / "weights"), "run_dir": str(tmp_path / "run")} | flags
        config = make_config(root, **given)
        placed = reserve_devices(config)
        running.append(placed.release)
        trainers = Trainers(config, placed)
        running.append(trainers.stop)
        trainers.take_built(first_failure_or_all(config, trainers.building))
        return trainers

    yield start_one
    end()


def data_of(config: Config, rollout_id: int) -> list[object]:
    """Returns data as the rollout manager makes it, for each group's data-parallel ranks."""
    sizes = [group.config.data_parallel_size for group in build_groups(config)]
    samples = make_samples(rollout_id)
    parts = (rank_data(config, samples, rank, size) for size in sizes for rank in range(size))
    return [ray.put(pack_columns(part)) for part in parts]


def trained(trainers: Trainers, rollout_id: int) -> TrainResult:
    data = data_of(trainers._config, rollout_id)
    return trainers.train(rollout_id, data).result(timeout=120)


def alone(build: Callable[..., Any], rollouts: int, **flags: Any) -> list[TrainResult]:
    """Trains the same rollouts on one rank that has both models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = build(**PPO | flags)
        return [trainer.train(i, rank_data(trainer.config, make_samples(i))) for i in range(rollouts)]
    finally:
        torch.set_num_threads(threads)


def test_numbers_to_the_last_digit_a_resumed_run_and_a_rank_that_dies(
    build: Callable[..., Any], start: Callable[..., Trainers], tmp_path: Path
) -> None:
    wanted = alone(build, 3, num_critic_only_steps=1)
    flags = OWN | {"num_critic_only_steps": 1, "save": str(tmp_path / "save")}
    trainers = start(**flags, colocate=True, offload_train=True)
    assert [group.group.name for group in trainers._groups] == ["trainer", "critic"]
    told = "between trainings gradients, parameters, optimizer leave the device, "
    assert [line.startswith(told) for line in trainers.memory] == [True]  # the critic stays on its device
    for rollout_id in range(2):
        got = trained(trainers, rollout_id)
        assert (got.steps, got.rollout) == (wanted[rollout_id].steps, wanted[rollout_id].rollout)
    assert {"perf/trainer_time", "perf/actor_train_time", "perf/columns_wait_time"} <= set(got.perf)
    assert {f"perf/critic/{name}_time" for name in ("trainer", "values", "critic_train")} <= set(got.perf)
    assert "perf/values_time" not in got.perf
    assert trainers.progress()[0] == trainers.progress()[1] > 0
    trainers.save(1).result(timeout=60)
    assert (tmp_path / "save/critic/iter_0000001/metadata.json").is_file()

    resumed = start(**flags, load=str(tmp_path / "save"))
    assert resumed.start_rollout_id == 2
    got = trained(resumed, 2)
    assert (got.steps, got.rollout) == (wanted[2].steps, wanted[2].rollout)
    ray.kill(resumed._groups[1].actors[0])
    with pytest.raises(ActorError, match="^critic-0 failed: its process died"):
        trained(resumed, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        ({"critic_num_gpus_per_node": 2}, {}),
        ({"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 1}, {"kl_coef": 0.0}),
        ({"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "critic_devices": "own"}, {}),
        ({"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2, "critic_devices": "own"}, {}),
    ],
    ids=["dp1-dp2", "dp2-dp1", "tp2", "pp2"],
)
def test_other_layouts(
    build: Callable[..., Any], start: Callable[..., Trainers], ranks: dict[str, Any], flags: dict[str, Any]
) -> None:
    wanted = alone(build, 2, **flags)
    trainers = start(**PPO | flags | ranks)
    for rollout_id in range(2):
        got = trained(trainers, rollout_id)
        for a, b in zip(got.steps, wanted[rollout_id].steps, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        assert got.rollout == pytest.approx(wanted[rollout_id].rollout, rel=1e-4, abs=1e-5)


def test_figures_of_another_group_have_its_name(root: Path) -> None:
    policy, critic = build_groups(make_config(root, **OWN))
    of_policy = TrainResult([{"train/loss": 1.0}], {"rollout/values": 2.0}, {"perf/forward_time": 3.0})
    of_critic = TrainResult(
        [{"train/critic-value_loss": 4.0}],
        {},
        {"perf/forward_time": 5.0, "perf/values_time": 6.0},
    )
    both = merged({policy: of_policy, critic: of_critic})
    assert both.steps == [{"train/critic-value_loss": 4.0, "train/loss": 1.0}]
    assert both.rollout == {"rollout/values": 2.0}
    assert both.perf == {
        "perf/forward_time": 3.0,
        "perf/critic/forward_time": 5.0,
        "perf/critic/values_time": 6.0,
    }


def test_every_rank_may_log_and_what_all_log_counts_once() -> None:
    def result(rank: int, *logged: Logged) -> TrainResult:
        return TrainResult([{"train/loss": float(rank)}], {}, {}, list(logged))

    def one(name: str, value: float, step: int = 0) -> Logged:
        return Logged({name: value}, step, "train/step")

    ranks = [
        result(0, one("all", 0.0), one("all", 0.5), one("first", 1.0)),
        result(1, one("all", 2.0), one("last", 3.0), one("last", 3.5), one("first", 4.0, step=1)),
    ]
    found = merge_results(ranks)
    assert found.steps == [{"train/loss": 0.0}]
    assert [(*each.metrics.items(), each.step) for each in found.logged] == [
        *((("all", 0.0), 0), (("all", 0.5), 0), (("first", 1.0), 0)),
        *((("last", 3.0), 0), (("last", 3.5), 0), (("first", 4.0), 1)),
    ]
