"""Tests devices for trainers and engines on CPUs: the arithmetic, on a real local Ray, and the errors for a run that
does not fit. test_placement_gpus.py tests the choice of GPUs."""

from __future__ import annotations

import itertools
import os
import re

import pytest
import ray
from local_ray import local_ray
from placement_cases import placement_config, with_teachers

from slime.cluster import placement
from slime.cluster.placement import cpu_threads, require_devices, reserve_devices, reserve_engine

RESOURCE, DEVICE = "CPU", 0.5
CRITIC = {"advantage_estimator": "ppo"}


@pytest.mark.parametrize(
    ("cores", "flags", "threads"),
    [
        (16, {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}, (4, 4)),  # 4 processes share the cores
        (16, {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}, (3, 3)),
        (16, {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "colocate": True}, (4, 4)),
        (16, {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 8, "colocate": True}, (4, 2)),
        (16, {"rollout_num_gpus": 2, "rollout_engines_per_gpu": 3, "colocate": True}, (16, 2)),
        (16, {"actor_num_nodes": 2, "rollout_num_gpus": 0, "debug_train_only": True}, (8, 16)),
        (2, {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}, (1, 1)),
        (16, {**CRITIC, "critic_num_gpus_per_node": 3, "colocate": True}, (4, 16)),
        (None, {}, (1, 1)),  # the system does not report its cores
    ],
)
def test_cpu_threads(monkeypatch, cores, flags, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert cpu_threads(placement_config("cpu", **flags)) == threads


@pytest.fixture(scope="module")
def cluster():
    """Starts a Ray with four devices, which are 2 CPU cores."""
    with local_ray(num_cpus=2, num_gpus=0):
        yield


@ray.remote
class Actor:
    def bundle(self) -> tuple[str, dict]:
        context = ray.get_runtime_context()
        return context.get_placement_group_id(), context.get_assigned_resources()


def test_engines_stand_behind_the_trainers(cluster):
    placed = reserve_devices(
        placement_config("cpu", actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    )
    try:
        assert placed.trainer_bundles == [[0, 1]] and placed.engine_bundles["policy"] == [[2, 3]]
        assert placed.group.bundle_specs == [{RESOURCE: DEVICE}] * 4
        actor = Actor.options(**placed.options(3)).remote()
        group, resources = ray.get(actor.bundle.remote(), timeout=60)
        assert group == placed.group.id.hex() and resources[RESOURCE] == DEVICE
    finally:
        placed.release()


def test_colocated_engines_share_the_trainers_devices(cluster):
    """Two engines of 2 devices run on 4 trainers; a bundle holds a trainer and an engine at the same time."""
    placed = reserve_devices(
        placement_config(
            "cpu", actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, colocate=True
        )
    )
    try:
        assert placed.trainer_bundles == [[0, 1, 2, 3]] and placed.engine_bundles["policy"] == [
            [0, 1],
            [2, 3],
        ]
        assert placed.group.bundle_specs == [{RESOURCE: DEVICE}] * 4
        actors = [Actor.options(**placed.options(0)).remote() for _ in range(2)]
        for _, resources in ray.get([a.bundle.remote() for a in actors], timeout=60):
            assert resources[RESOURCE] == DEVICE / 2
    finally:
        placed.release()


@pytest.mark.parametrize(
    ("flags", "trainers", "engines"),
    [
        ({"debug_train_only": True, "rollout_num_gpus": 0}, [[0]], []),
        ({**CRITIC, "critic_num_gpus_per_node": 2}, [[0], [2, 3]], [[1]]),
        ({**CRITIC, "critic_devices": "own", "colocate": True}, [[0], [1]], [[0]]),
        ({**CRITIC, "critic_num_gpus_per_node": 1, "colocate": True}, [[0]], [[0]]),
        ({"debug_rollout_only": True, "rollout_num_gpus": 2}, [[]], [[0], [1]]),
        ({"colocate": True, "rollout_engines_per_gpu": 3}, [[0]], [[0], [0], [0]]),
        ({"rollout_num_gpus": 2, "rollout_engines_per_gpu": 2}, [[0]], [[1], [1], [2], [2]]),
    ],
)
def test_places_of_groups_and_engines(cluster, flags, trainers, engines):
    placed = reserve_devices(placement_config("cpu", **flags))
    placed.release()
    assert (placed.trainer_bundles, placed.engine_bundles["policy"]) == (trainers, engines)


@pytest.mark.parametrize(
    ("flags", "policy"),
    [({"colocate": True}, [[0]]), ({}, [[1]]), ({"debug_rollout_only": True}, [[0]])],
)
def test_teachers_have_devices_of_their_own_behind_all_others(cluster, flags, policy):
    first = 1 + max(max(each) for each in policy)
    placed = reserve_devices(with_teachers(placement_config("cpu", **flags), "math", "code", gpus=1))
    try:
        assert placed.engine_bundles == {
            "policy": policy,
            "teacher-math": [[first]],
            "teacher-code": [[first + 1]],
        }
        assert len(placed.nodes) == first + 2
    finally:
        placed.release()


def test_a_teacher_of_several_engines(cluster):
    placed = reserve_devices(
        with_teachers(placement_config("cpu", colocate=True), "default", gpus=2, per_engine=2)
    )
    placed.release()
    assert placed.engine_bundles["teacher-default"] == [[1, 2]]
    placed = reserve_devices(with_teachers(placement_config("cpu", colocate=True), "default", gpus=2))
    placed.release()
    assert placed.engine_bundles["teacher-default"] == [[1], [2]]
    with pytest.raises(
        ValueError, match=r"5 devices .* and 4 of teacher-default \(--opd-teacher-num-gpus\), got 2 CPUs"
    ):
        reserve_devices(with_teachers(placement_config("cpu", colocate=True), "default", gpus=4))


def test_a_run_that_does_not_fit_is_told_what_it_needs(cluster):
    got = 4 * DEVICE
    with pytest.raises(ValueError) as caught:
        reserve_devices(placement_config("cpu", actor_num_gpus_per_node=3, rollout_num_gpus=2))
    assert str(caught.value) == (
        f"the cluster must have 5 devices ({5 * DEVICE:g} {RESOURCE}s) for 3 trainer ranks (--actor-num-nodes x "
        f"--actor-num-gpus-per-node) and 2 rollout devices (--rollout-num-gpus), got {got:g} {RESOURCE}s, of "
        "which each rank and each rollout device takes a half; give --actor-num-gpus-per-node 2 here, or join a larger "
        "cluster with RAY_ADDRESS"
    )
    told = "5 devices .* for 1 trainer ranks .*, 3 critic ranks .--critic-num-nodes x --critic-num-gpus-per-node. and 1"
    with pytest.raises(ValueError, match=told):
        reserve_devices(placement_config("cpu", **CRITIC, critic_num_gpus_per_node=3))
    with pytest.raises(ValueError, match="5 devices .* shared by --colocate"):
        reserve_devices(placement_config("cpu", actor_num_gpus_per_node=5, rollout_num_gpus=5, colocate=True))


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_flags_of_the_error_fit(device, colocate):
    """For each number of ranks and engines, the run with the printed flags fits the existing devices."""
    resource, share = ("GPU", 1.0) if device == "cuda" else ("CPU", DEVICE)
    seen = 0
    for existing, ranks, engines, tensor in itertools.product((1, 2, 4, 7), (1, 2, 8), (0, 1, 2, 8), (1, 2)):
        if colocate and (engines == 0 or ranks % tensor):
            continue
        given = {
            "actor_num_gpus_per_node": ranks,
            "rollout_num_gpus": engines,
            "colocate": colocate,
            "tensor_model_parallel_size": tensor,
            "debug_train_only": engines == 0,
        }
        config, there = placement_config(device, **given), {resource: existing * share}
        try:
            require_devices(config, there)
        except ValueError as error:
            flags = re.findall(r"--([a-z-]+) (\d+)", str(error).partition("; give ")[2])
            if flags:
                values = {name.replace("-", "_"): int(number) for name, number in flags}
                assert values.get("actor_num_gpus_per_node", ranks) % tensor == 0
                require_devices(config.with_values(**values), there)
                seen += 1
            else:
                assert "; ask for fewer or join" in str(error) and (existing < 2 or tensor == 2)
            assert ("takes a half" in str(error)) == (device == "cpu")
    assert seen > 10


def test_devices_held_by_another_job(cluster, monkeypatch):
    other = reserve_devices(placement_config("cpu", actor_num_gpus_per_node=2, rollout_num_gpus=1))
    try:
        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="2 devices must be free within 1 s, got only .* another job"),
        ):
            # The short limit is for this call only: Ray needs some seconds to give back the last test's devices.
            patch.setattr(placement, "_PLACEMENT_TIMEOUT_S", 1)
            reserve_devices(placement_config("cpu"))
    finally:
        other.release()
    # The failed placement holds no device.
    reserve_devices(placement_config("cpu", actor_num_gpus_per_node=3)).release()


def test_an_engine_that_joins_takes_devices_that_are_free(cluster, monkeypatch):
    """Two of four devices are in use: two engines of one device may join, and one more after an engine has left."""
    config = placement_config("cpu", actor_num_gpus_per_node=1, rollout_num_gpus=1)
    placed = reserve_devices(config)
    joined = [reserve_engine(config, "policy") for _ in range(2)]
    try:
        assert [each.engine_bundles for each in joined] == [{"policy": [[0]]}] * 2
        assert len({each.group.id for each in (placed, *joined)}) == 3
        with (
            monkeypatch.context() as patch,
            pytest.raises(
                ValueError,
                match="one more engine must find 1 free devices .0.5 CPUs. in 1 s, got 0 of 2 CPUs",
            ),
        ):
            patch.setattr(placement, "_MORE_TIMEOUT_S", 1)
            reserve_engine(config, "policy")
        joined.pop().release()
        joined.append(reserve_engine(config, "policy"))
    finally:
        for each in (placed, *joined):
            each.release()
