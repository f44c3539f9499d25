"""The loop after a loss of the trainer: the order of its calls, and the errors that end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_double import LoopRun, words

from slime.protocols import TrainerLost
from slime.recovery import recovery
from slime.tracking.journal import read_events


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_PAUSE_S", 0.0)
    monkeypatch.setattr(recovery, "_DEATH_S", 0.2)


def loss(text: str) -> TrainerLost:
    error = TrainerLost(text)
    error.cause = text.rpartition(":")[2]
    return error


def lossy(call: str, *errors: str, **flags: Any) -> LoopRun:
    """Returns a run whose `call` fails once per error."""
    run = LoopRun(num_rollout=3, **flags)
    run.faults[call] = [loss(error) for error in errors]
    return run


AGAIN = {
    "publish 0": "publish 0, restart 0, publish 0, generate 0, train 0, publish 1, "
    "generate 1, train 1, publish 2, generate 2, train 2, publish 3",
    "train 1": "publish 0, generate 0, train 0, publish 1, generate 1, "
    "train 1, restart 0, train 0, train 1, publish 2, generate 2, train 2, publish 3",
    "publish 2": "publish 0, generate 0, train 0, publish 1, generate 1, "
    "train 1, publish 2, restart 0, train 0, train 1, publish 2, generate 2, train 2, publish 3",
}


@pytest.mark.parametrize("call", AGAIN)
def test_the_steps_of_a_lost_trainer_are_repeated_and_its_call_runs_again(call: str, tmp_path: Path) -> None:
    run = lossy(call, "trainer-0 died", run_dir=str(tmp_path))
    assert run.go() == words(AGAIN[call])
    assert run.next == 3
    # every step is reported once
    assert run.logged == [(f"{part}/step", i) for i in range(3) for part in ("rollout", "train")]
    lost, back = read_events(tmp_path, ("trainer_lost", "trainer_restarted"))
    assert lost["text"] == "trainer-0 died" and back["rollout"] == 0
    assert back["repeated"] == lost["rollout"] == {"publish 0": 0, "train 1": 1, "publish 2": 2}[call]
    assert [event["rollout"] for event in read_events(tmp_path, ("step",))] == [0, 1, 2]


def test_a_death_while_a_rollout_is_generated_is_repaired_meanwhile(tmp_path: Path) -> None:
    """The rollout is requested once, and waits for the trainer only if it ends earlier."""
    run = LoopRun(num_rollout=2, max_staleness=1)
    ready = run.generate

    def slow(rollout_id: int, saves: bool, version: int) -> Any:
        future = ready(rollout_id, saves, version)
        if rollout_id != 1:
            return future
        run.faults["check"] = [loss("trainer-0 died")]
        waiting = type(future)()
        found = run.restarted

        def restarted(*args: Any) -> Any:
            waiting.set_result(future.result())
            return found(*args)

        run.restarted = restarted
        return waiting

    run.generate = slow
    assert [call for call in run.go() if call != "check_health"] == words(
        "publish 0, generate 0, generate 1, train 0, publish 1, restart 0, train 0, train 1, publish 2"
    )


def test_colocated_engines_sleep_during_the_restart() -> None:
    run = lossy("publish 1", "lost", colocate=True)
    run.drops_weights = True
    assert run.go()[:14] == words(
        "publish 0, generate 0, sleep, train 0, wake, publish 1, sleep, restart 0, train 0, wake, "
        "publish 1, publish 1, generate 1, sleep"
    )
    run = lossy("train 1", "lost", colocate=True)
    assert run.go()[6:16] == words(
        "generate 1, sleep, train 1, restart 0, train 0, wake, sleep, train 1, wake, publish 2"
    )


def write_checkpoint(folder: Path, rollout_id: int) -> None:
    """Writes the files by which a complete checkpoint is found."""
    path = folder / f"iter_{rollout_id:07d}"
    path.mkdir(parents=True)
    (path / "metadata.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(rollout_id))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_newest_complete_checkpoint_is_the_point(is_async: bool, tmp_path: Path) -> None:
    """A checkpoint of an earlier run, with a number that this run has not saved, is no point."""
    write_checkpoint(tmp_path, 5)
    run = lossy("train 2", "lost", save=str(tmp_path), save_interval=1, async_save=is_async)
    done = run.save

    def save(rollout_id: int) -> Any:
        if rollout_id < 1 or not is_async:  # the files of rollout 1 are still being written
            write_checkpoint(tmp_path, rollout_id)
        return done(rollout_id)

    run.save = save
    calls = run.go()
    after = calls[calls.index("train 2") + 1 :][:4]
    assert after == (
        words("restart 1, train 1, save 1, train 2")
        if is_async
        else words("restart 2, train 2, publish 3, save 2")
    )


def test_the_same_crash_at_the_same_step_ends_the_run() -> None:
    """The rank may be another one."""
    run = lossy("train 1", "trainer-0: port 11", "trainer-1: port 11", "never")
    with pytest.raises(TrainerLost, match="^trainer-1: port 11$"):
        run.go()
    assert run.calls[-1] == "train 1" and run.calls.count("restart 0") == 1


def test_other_crashes_at_a_step_end_the_run_after_the_last_restart() -> None:
    run = lossy("train 1", "a", "b", "c", max_trainer_restarts=2)
    with pytest.raises(TrainerLost, match="^c$"):
        run.go()
    assert run.calls.count("restart 0") == 2
    run = lossy("train 1", "a", max_trainer_restarts=0)
    with pytest.raises(TrainerLost, match="^a$"):
        run.go()
    assert "restart 0" not in run.calls


def test_a_new_step_allows_all_restarts_again() -> None:
    run = LoopRun(num_rollout=4, max_trainer_restarts=1)
    run.faults |= {f"train {i}": [loss("killed")] for i in range(4)}
    run.go()
    assert run.calls.count("restart 0") == 4 and run.next == 4


def test_a_loss_during_the_restart_starts_it_again() -> None:
    run = lossy("train 1", "killed")
    run.faults["restart 0"] = [loss("killed")]
    run.faults["train 0"] = []
    assert run.go()[4:] == words(
        "generate 1, train 1, restart 0, restart 0, train 0, train 1, publish 2, generate 2, train 2, publish 3"
    )


def test_an_engines_error_that_a_dead_rank_has_caused_is_a_loss() -> None:
    run = LoopRun(num_rollout=1)
    run.faults["publish 1"] = [RuntimeError("the engine got no weights")]
    with pytest.raises(RuntimeError, match="^the engine got no weights$"):
        run.go()
    run = LoopRun(num_rollout=1)
    run.faults["publish 1"] = [RuntimeError("the engine got no weights")]
    run.faults["check"] = [loss("trainer-0 died")]
    assert run.go()[-4:] == words("publish 1, restart 0, train 0, publish 1")


def test_data_that_is_gone_ends_the_run_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MOST_STEPS", 1)
    run = lossy("train 2", "killed")
    with pytest.raises(RuntimeError, match="the data of rollout 0 must be there .* shorter --save-interval$"):
        run.go()


def test_the_kept_data_has_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two rollouts, a checkpoint after each second rollout suffices."""
    monkeypatch.setattr(recovery, "_MOST_BYTES", 2 * LoopRun.data_bytes)
    run = lossy("train 2", "killed")
    run.go()
    assert run.calls.count("train 0") == 2
    monkeypatch.setattr(recovery, "_MOST_BYTES", 2 * LoopRun.data_bytes - 1)
    with pytest.raises(RuntimeError, match="the data of rollout 0 must be there"):
        lossy("train 2", "killed").go()


def test_memory_has_one_checkpoint_per_step() -> None:
    run = lossy("memory 1", "killed", recover_from="memory")
    assert run.go()[3:] == words(
        "memory 0, publish 1, generate 1, train 1, memory 1, restart 0, train 0, train 1, memory 1, publish 2, "
        "generate 2, train 2, memory 2, publish 3"
    )
    assert any("perf/save_in_memory_time" in metrics for metrics in run.metrics)


def test_data_that_no_restart_can_use_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With memory, the data of one step stays. Without --save, the data of later steps is useless without the first."""

    def count_kept(**flags: Any) -> list[int]:
        kept, run = [], LoopRun(num_rollout=4, **flags)
        added = recovery.Recovery.add

        def add(self: recovery.Recovery, rollout_id: int, batch: Any) -> None:
            added(self, rollout_id, batch)
            kept.append(len(self._data))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recovery.Recovery, "add", add)
            run.go()
        return kept

    assert count_kept() == [1, 2, 3, 4]
    assert count_kept(recover_from="memory") == [1, 2, 2, 2]
    monkeypatch.setattr(recovery, "_MOST_STEPS", 2)
    assert count_kept() == [1, 2, 0, 0]
    assert count_kept(save=str(tmp_path)) == [1, 2, 2, 2]
