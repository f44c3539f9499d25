"""Tests the GPUs of trainers and engines. A real local Ray counts GPUs that do not exist, and real processes report
the GPUs that they would see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from local_ray import local_ray
from placement_cases import placement_config

from slime.cluster import placement
from slime.cluster.placement import VISIBLE_VARIABLE, Gpu, Placement, reserve_devices

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
UUIDS = [f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "beca"]


@ray.remote
class Process:
    """A trainer rank, or the actor that starts an engine server. It reports the GPUs visible to it and to its child."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env

    def sees(self) -> str | None:
        return os.environ.get(VISIBLE_VARIABLE)

    def child_sees(self) -> str:
        code = f"import os; print(os.environ.get({VISIBLE_VARIABLE!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **self.env}, capture_output=True
        )
        return done.stdout.decode().strip()


@pytest.fixture(
    scope="module",
    params=[
        (None, list("0123")),
        pytest.param(("7,5,4,2", list("2457")), marks=pytest.mark.slow),
        pytest.param((",".join(UUIDS), sorted(UUIDS)), marks=pytest.mark.slow),
    ],
    ids=["all", "numbers", "uuids"],
)
def names(request) -> Iterator[list[str]]:
    """Starts a node of four GPUs and yields their names in order, for a value of CUDA_VISIBLE_DEVICES at
    Ray's start."""
    given, names = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VISIBLE_VARIABLE, raising=False)
        if given is not None:
            patch.setenv(VISIBLE_VARIABLE, given)
        with local_ray(num_cpus=2, num_gpus=4):
            yield names


def start(placed: Placement, bundles: list[int]) -> ray.actor.ActorHandle:
    return Process.options(**placed.options(bundles[0])).remote(placed.visible(bundles))


def test_colocated_engines_share_the_gpus_of_neighbouring_trainers(names):
    """4 trainers and 2 engines of 2 run at once, with half a GPU each: rank r sees GPU r, and an engine sees its two
    GPUs."""
    placed = reserve_devices(
        placement_config(
            "cuda",
            actor_num_gpus_per_node=4,
            rollout_num_gpus=4,
            rollout_num_gpus_per_engine=2,
            colocate=True,
        )
    )
    try:
        trainers = [start(placed, [bundle]) for bundle in placed.trainer_bundles[0]]
        engines = [start(placed, bundles) for bundles in placed.engine_bundles["policy"]]
        seen = ray.get([actor.sees.remote() for actor in [*trainers, *engines]], timeout=60)
        assert seen[:4] == names and seen[4:] == names[0::2]  # Ray shows an engine's actor its first GPU
        children = ray.get([actor.child_sees.remote() for actor in [*trainers, *engines]], timeout=60)
        assert children == [*names, ",".join(names[:2]), ",".join(names[2:])]
    finally:
        placed.release()


def test_several_engines_and_a_trainer_share_a_gpu(names):
    """A third of half a GPU has no exact value in Ray, which rounds to four digits."""
    several = 3
    placed = reserve_devices(placement_config("cuda", rollout_engines_per_gpu=several, colocate=True))
    try:
        (trainer,), engines = placed.trainer_bundles[0], placed.engine_bundles["policy"]
        assert engines == [[trainer]] * several
        actors = [start(placed, [trainer])]
        actors += [
            Process.options(**placed.options(bundle, several)).remote(placed.visible([bundle]))
            for (bundle,) in engines
        ]
        seen = ray.get([actor.child_sees.remote() for actor in actors], timeout=60)
        assert seen == [placed.gpus[trainer].name] * (1 + several)
    finally:
        placed.release()


def test_an_engine_stands_behind_the_trainers_and_has_its_gpus_for_itself(names):
    placed = reserve_devices(
        placement_config("cuda", actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    )
    try:
        actors = [start(placed, [bundle]) for bundle in placed.trainer_bundles[0]]
        actors.append(start(placed, placed.engine_bundles["policy"][0]))
        seen = ray.get([actor.child_sees.remote() for actor in actors], timeout=60)
        assert seen == [names[0], names[1], ",".join(names[2:])]
        # The engine's second GPU has no actor, and still no process outside the run gets it.
        assert ray.available_resources().get("GPU", 0) == 0
    finally:
        placed.release()


@pytest.mark.slow
def test_ray_may_leave_the_variable_alone(names, monkeypatch):
    """Every process then sees all GPUs, unless the placement sets the variable for the process."""
    monkeypatch.setenv(NOSET, "1")
    placed = reserve_devices(placement_config("cuda", actor_num_gpus_per_node=2, rollout_num_gpus=2))
    try:
        env = {"runtime_env": {"env_vars": {NOSET: "1"}}}
        bundles = [*placed.trainer_bundles[0], *(first for (first,) in placed.engine_bundles["policy"])]
        actors = [
            Process.options(**placed.options(bundle), **env).remote(placed.visible([bundle]))
            for bundle in bundles
        ]
        assert ray.get([actor.sees.remote() for actor in actors], timeout=60) != names
        assert ray.get([actor.child_sees.remote() for actor in actors], timeout=60) == names
    finally:
        placed.release()


def test_two_runs_of_a_node_get_different_gpus(names):
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(reserve_devices, [placement_config("cuda"), placement_config("cuda")]))
    try:
        taken = [gpu.name for placed in both for gpu in placed.gpus]
        assert sorted(taken) == sorted(names)
        for placed in both:
            order = [*placed.trainer_bundles[0], *placed.engine_bundles["policy"][0]]
            assert sorted(placed.gpus, key=lambda gpu: gpu.order) == [placed.gpus[b] for b in order]
    finally:
        for placed in both:
            placed.release()


def test_order_is_by_node_and_number():
    gpus = [
        *(Gpu("b", "10.0.0.9", name) for name in ("10", "9")),
        *(Gpu("a", "10.0.0.10", name) for name in ("1", "0")),
        Gpu("c", "10.0.0.9", "0"),
    ]
    ordered = sorted(gpus, key=lambda gpu: gpu.order)
    assert [(gpu.node, gpu.name) for gpu in ordered] == [
        ("b", "9"),
        ("b", "10"),
        ("c", "0"),
        ("a", "0"),
        ("a", "1"),
    ]


def test_cpus_have_no_gpus_to_see(names):
    placed = reserve_devices(placement_config("cpu", actor_num_gpus_per_node=2))
    try:
        assert (placed.trainer_bundles[0], placed.engine_bundles["policy"]) == ([0, 1], [[2]])
        assert placed.visible([0, 1]) == {}
    finally:
        placed.release()


def test_gpus_that_never_answer_are_told_of(names, monkeypatch):
    monkeypatch.setattr(placement, "_ANSWER_TIMEOUT_S", 1)
    monkeypatch.setattr(placement, "_own_gpu", ray.remote(num_gpus=1, num_cpus=0)(lambda: time.sleep(60)))
    with pytest.raises(RuntimeError, match="each of 2 GPUs must answer within 1 s"):
        reserve_devices(placement_config("cuda"))
