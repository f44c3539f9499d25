"""Runs `vime train` over the two hosts of network_hosts: the link is cut or slow, a disk is full, a host leaves."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from network_hosts import Host, Hosts, find_obstacle, two_hosts
from process_names import command_line
from train_fixtures import Launch, World, launched, make_world, rows, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

OBSTACLE = find_obstacle()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
]
ROLLOUTS = 12
AT = 3
"""Number of trained rollouts before a fault."""


@pytest.fixture
def world() -> Iterator[World]:
    yield from make_world()


@pytest.fixture
def hosts(world: World) -> Iterator[Hosts]:
    """Two hosts with one CPU each. The run needs 1.5, so its processes are on both hosts."""
    with two_hosts(world.root) as found:
        store = ("--num-cpus", "1", "--object-store-memory", "80000000")
        with contextlib.ExitStack() as stack:
            for role in ("head", "worker"):
                node = stack.enter_context(found.ray(role, *store))
                stack.callback(node.kill)
                log, end = world.root / f"ray-{role}.log", time.monotonic() + 120
                while "Ray runtime started" not in log.read_text():
                    assert node.poll() is None and time.monotonic() < end, log.read_text()
                    time.sleep(0.2)
            yield found


@contextlib.contextmanager
def running(world: World, hosts: Hosts, *more: str) -> Iterator[Launch]:
    """A run that has trained AT rollouts."""
    flags = [
        *world.grpo("run", rollouts=ROLLOUTS),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"),
        *("--max-staleness", "1", "--save", str(world.root / "run" / "checkpoint"), "--save-interval", "2"),
        *("--rollout-max-response-len", "64", *more),
    ]
    began = time.monotonic()
    with launched(hosts.command(vime("train", *flags)), world.root / "run.out") as launch:
        launch.wait_for(lambda: len(trained(world)) >= AT, "the first rollouts", 300)
        print(f"{AT} rollouts after {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
        yield launch


def trained(world: World) -> dict[int, dict[str, float]]:
    return rows(world.root / "run", "train/step")


def finish(world: World, launch: Launch) -> None:
    """Waits for the end of the run, whose ledger must be exact."""
    code = launch.process.wait(300)
    assert code == 0, launch.output[-3000:]
    assert sorted(trained(world)) == list(range(ROLLOUTS))
    ledger = read_ledger(world.root / "run")
    assert ledger.is_exact and ledger.over_limit == 0


def recovery_s(world: World, since: float) -> float:
    """Returns the seconds until the end of the first step after `since`."""
    ends = [event.time for event in read_events(world.root / "run", ("step",)) if event.time > since]
    return min(ends) - since


def parts(host: Host) -> Counter[str]:
    """Returns the number of engines and trainer ranks on a host."""
    lines = [command_line(process) for process in host.processes()]
    patterns = {"engine": "-m vime.vllm.serve vllm", "trainer": "ray::TrainerActor"}
    supervised = [line for line in lines if "vime.pool.supervise" not in line]
    return Counter(name for line in supervised for name, words in patterns.items() if words in line)


def test_a_run_survives_a_cut_and_a_slow_link(world: World, hosts: Hosts) -> None:
    with running(world, hosts) as launch:
        print(f"first host: {parts(hosts.first)}, second host: {parts(hosts.second)}")
        assert parts(hosts.first) and parts(hosts.second)
        began = time.time()
        with hosts.cut():
            time.sleep(20)
        step = len(trained(world))
        launch.wait_for(lambda: len(trained(world)) > step + 1, "steps after the cut", 200)
        print(f"first step {recovery_s(world, began + 20):.1f} s after a cut of 20 s")
        began = time.time()
        with hosts.slow("8mbit"):
            step = len(trained(world))
            launch.wait_for(lambda: len(trained(world)) > step + 1, "steps over the slow link", 200)
            print(f"two steps over a link of 8 Mbit/s in {time.time() - began:.1f} s")
        finish(world, launch)


def test_a_full_disk_of_a_host_costs_no_step(world: World, hosts: Hosts) -> None:
    """The disk has Ray's logs and sockets. The run directory is on another disk, which the hosts share."""
    with running(world, hosts) as launch:
        with (hosts.second.disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        began = time.time()
        step = len(trained(world))
        launch.wait_for(lambda: len(trained(world)) > step + 1, "steps with a full disk", 200)
        print(f"two steps with a full disk in {time.time() - began:.1f} s")
        finish(world, launch)


def test_a_host_that_leaves_for_good_ends_the_run_with_its_name(world: World, hosts: Hosts) -> None:
    """No other host has free devices. The driver is on the first host."""
    with running(world, hosts) as launch:
        print(f"first host: {parts(hosts.first)}, second host: {parts(hosts.second)}")
        began = time.monotonic()
        hosts.second.leave()
        code = launch.process.wait(300)
        print(f"ended {time.monotonic() - began:.1f} s after the loss:\n{launch.output[-1500:]}")
        assert code == 1 and "Traceback" not in launch.output, launch.output[-3000:]
        launch.await_gone(20)
    (error,) = read_events(world.root / "run", ("error",))
    of_engine = f"Ray's raylet on node {hosts.second.address}" in error["text"]
    of_trainer = "devices must be free within" in error["text"]
    assert (of_engine or of_trainer) and "--load" in error["text"], error
