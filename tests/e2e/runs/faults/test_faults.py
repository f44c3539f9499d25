"""`vime train` repairs the faults that it can repair. After any other fault it ends and reports the cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from fault_cases import (
    FaultyRun,
    engines_killed,
    rank_killed,
    resumed_with_a_slow_engine_then_interrupted,
    trainer_killed,
    training,
)
from train_fixtures import World, launched, make_world, published_weights, rows, samples, vime

pytestmark = pytest.mark.e2e

SERVER = r"^\S+ -m vime\.vllm\.serve vllm\.entrypoints"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def fail(world: World, name: str, flags: list[str], *, timeout_s: float = 180) -> tuple[int, str]:
    """Returns exit code and output of a run that ends without a signal."""
    with launched(vime("train", *flags), world.root / f"{name}.out") as launch:
        code = launch.finish(timeout_s)
        if (world.root / name / "config.json").exists():  # a refused run has no directory
            assert not published_weights(world.root / name).exists()
        assert "Traceback" not in launch.output, launch.output[-3000:]
        return code, launch.output


@pytest.mark.slow
def test_killed_engines_are_replaced(world: World) -> None:
    engines_killed(FaultyRun(world, "engines"))


@pytest.mark.slow
def test_a_run_whose_trainer_was_killed_is_resumed(world: World) -> None:
    run = FaultyRun(world, "trainer")
    trainer_killed(run)
    resumed_with_a_slow_engine_then_interrupted(run)


@pytest.mark.slow
def test_engine_killed_in_a_broadcast_leaves_the_update_to_the_other(world: World) -> None:
    """Two engines share a device, and one dies in the first update. The other gets all weights, whatever it had
    before."""
    flags = [
        *world.grpo("broadcast", rollouts=2),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-engines-per-gpu", "2"),
        "--check-weight-update-equal",
        # gloo with many buckets
        *("--update-weight-transport", "nccl", "--update-weight-buffer-size", "50000"),
    ]
    run_dir = world.root / "broadcast"
    with launched(vime("train", *flags), world.root / "broadcast.out") as launch:
        servers = launch.wait_for(lambda: (found := launch.find(SERVER))[1:] and found, "two engines", 120)
        launch.wait_for((run_dir / "config.json").exists, "a configuration", 60)
        launch.wait_for(lambda: [*published_weights(run_dir).glob("group-*[0-9a-f]")], "a group", 240)
        os.kill(servers[0], signal.SIGSTOP)  # the update cannot end without it, however fast the machine is
        time.sleep(0.5)  # meanwhile the other engine gets its first buckets
        os.kill(servers[0], signal.SIGKILL)
        killed = time.monotonic()
        again = "the update begins again for the 1 that are left"
        launch.wait_for(lambda: again in launch.output, "the update of the other", 20)
        print(f"noticed after {time.monotonic() - killed:.1f} s")
        assert launch.finish(240) == 0, launch.output[-3000:]
        assert "Traceback" not in launch.output, launch.output[-3000:]
    for step, row in rows(run_dir, "train/step").items():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, step
        assert all(s["weight_versions"] == [step] for s in samples(run_dir, step)), step
    assert len(rows(run_dir, "train/step")) == 2


@pytest.mark.slow
def test_reward_that_raises_ends_the_run_and_names_the_sample(world: World) -> None:
    flags = [
        *world.grpo("reward", rollouts=2, reward="broken_reward"),
        *("--colocate", "--actor-num-gpus-per-node", "1"),
    ]
    code, output = fail(world, "reward", flags)
    assert code == 1
    end = "\n".join(output.splitlines()[-2:])
    assert (
        "reward train_fixtures.broken_reward failed for sample 5 of group 1: KeyError: 'no such answer'"
        in end
    )
    assert "train_fixtures.py:" in end and ", label '" in end and ", response '" in end
    assert end.endswith(f"more in {world.root / 'reward' / 'logs' / 'rollout.log'}")
    assert "in broken_reward" in (world.root / "reward" / "logs" / "rollout.log").read_text()


@pytest.mark.slow
def test_trainer_rank_that_dies_is_named_though_its_peers_wait_for_it(world: World) -> None:
    rank_killed(world, "dead", ranks=2)


@pytest.mark.slow
def test_sigterm_of_every_process_ends_a_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd and Slurm send the signal to every process. Ray's servers get it too, so no call may wait for them."""
    with training(world, "unit", monkeypatch) as launch:
        for pid in launch.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    assert launch.process.returncode == 143
    assert launch.output.splitlines()[-1].startswith("interrupted by SIGTERM: everything"), launch.output


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_and_nohup_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(world, "closed", monkeypatch) as launch:
        os.killpg(launch.process.pid, signal.SIGHUP)
    assert launch.process.returncode == 129
    line = "interrupted by SIGHUP: everything that was started has been stopped"
    assert launch.output.splitlines()[-1] == line
    assert line in (world.root / "closed" / "logs" / "driver.log").read_text()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup ignores it, too
    try:
        with training(world, "nohup", monkeypatch) as launch:
            os.killpg(launch.process.pid, signal.SIGHUP)
            step = max(rows(world.root / "nohup", "train/step"))
            launch.wait_for(lambda: max(rows(world.root / "nohup", "train/step")) > step, "a later step", 60)
            launch.process.terminate()
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert launch.process.returncode == 143


@pytest.mark.slow
@pytest.mark.parametrize("process", ["gcs_server", "raylet"])
def test_a_killed_process_of_ray_is_named(
    world: World, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(world, process, monkeypatch) as launch:
        (pid,) = launch.find(
            rf"^\S+/{process}/{process} " if process == "raylet" else r"^\S+/gcs/gcs_server "
        )
        os.kill(pid, signal.SIGKILL)
    assert launch.process.returncode == 1
    *_, last, more = launch.output.splitlines()
    assert last.startswith("vime train: Ray's ") and f"{process} " in last and "--load" in last, (
        launch.output[-3000:]
    )
    assert more == f"more in {world.root / process / 'logs' / 'driver.log'}"
    assert list((world.root / process / "logs" / "ray").glob("raylet*"))
    assert "Traceback" not in launch.output, launch.output[-3000:]


@pytest.mark.slow
def test_too_many_devices_are_refused_before_anything_is_placed(world: World) -> None:
    flags = [
        *world.grpo("large", rollouts=1),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1000"),
    ]
    code, output = fail(world, "large", flags, timeout_s=60)
    assert code == 2
    assert "must have 1001 devices" in output.splitlines()[-1]
    assert not list((world.root / "large").glob("logs/engine*"))


@pytest.mark.slow
def test_engine_that_never_becomes_healthy_shows_its_last_log_lines(world: World) -> None:
    flags = [
        *world.grpo("sick", rollouts=1),
        *("--colocate", "--actor-num-gpus-per-node", "1", "--vllm-max-model-len", "1000000"),
    ]
    code, output = fail(world, "sick", flags)
    assert code == 1
    assert "must become healthy, got exit status 1" in output
    assert "1000000" in "\n".join(output.splitlines()[-12:]), output[-3000:]
