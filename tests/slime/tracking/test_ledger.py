"""Tests the ledger of a run from its events, including a run that was killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.kinds import DAMAGED, EVENTS_FILE
from slime.tracking.ledger import Ledger, read_ledger
from vime.doctor import command


class Written:
    """A run with the events that its processes write."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rollout, self.driver = Events("rollout", str(run_dir)), Events("driver", str(run_dir))

    def start(self, rollout: int) -> None:
        self.driver.add("start", rollout=rollout)

    def drawn(self, *groups: int) -> None:
        self.rollout.add("drawn", groups=groups, version=0)

    def named(self, places: dict[int, tuple[int, int, int, int]]) -> None:
        """Records groups with the positions of their prompts."""
        self.rollout.add("drawn", groups=list(places), version=0, prompts=list(places.values()))

    def dropped(self, *groups: int, reason: str = "filtered") -> None:
        self.rollout.add("dropped", groups=groups, reason=reason)

    def trained(self, rollout: int, *groups: int, over_limit: int = 0) -> None:
        self.rollout.add("batch", rollout=rollout, groups=groups, over_limit=over_limit)
        self.driver.add("step", rollout=rollout)

    def ledger(self) -> Ledger:
        return read_ledger(self.run_dir)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Written]:
    written = Written(tmp_path)
    yield written
    written.rollout.close(), written.driver.close()


def test_a_restarted_manager_draws_its_unfinished_groups_again(run: Written) -> None:
    run.start(0)
    run.drawn(0, 1, 2, 3, 4)
    run.trained(0, 0, 1)
    run.rollout.add("batch", rollout=1, groups=[2, 3], over_limit=0)  # the driver never had this batch
    run.driver.add("manager_restarted", rollout=1, seconds=2.5)
    run.drawn(2, 4)
    lost = run.ledger()
    assert lost.lost == [3] and not lost.is_exact and lost.starts == 1
    run.drawn(3)
    run.trained(1, 2, 4)
    ledger = run.ledger()
    assert ledger.is_exact and (ledger.again, ledger.starts) == (3, 1)
    assert ledger.running == {3} and ledger.groups_trained == 4


def test_each_group_is_trained_dropped_or_still_there(run: Written) -> None:
    run.start(0)
    run.drawn(0, 1, 2, 3, 4)
    run.dropped(1)
    run.trained(0, 0, 2)
    run.drawn(5)
    ledger = run.ledger()
    assert ledger.is_exact and ledger.groups_trained == 2 and ledger.dropped == {"filtered": 1}
    assert ledger.running == {3, 4, 5} and ledger.starts == 1


def test_samples_that_fill_no_step_are_not_trained(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    run.start(0)
    run.drawn(0, 1, 2, 3)
    for rollout, groups in enumerate(((0, 1), (2, 3))):
        run.rollout.add("left_out", rollout=rollout, samples=3, groups=[groups[1]])
        run.trained(rollout, *groups)
    ledger = run.ledger()
    assert (ledger.groups_trained, ledger.samples_left_out, ledger.is_exact) == (2, 6, True)
    command.main([str(run.run_dir)])
    assert (
        "2 trained in 2 rollouts, dropped: none, 6 samples left out of optimizer steps"
        in capsys.readouterr().out
    )
    run.start(1)
    assert (run.ledger().groups_trained, run.ledger().samples_left_out) == (1, 3)


def killed_after_a_checkpoint_of_rollout_0(run: Written) -> None:
    run.start(0)
    run.drawn(0, 1, 2, 3)
    run.trained(0, 1, 2)
    run.drawn(4, 5)
    run.dropped(4)
    run.trained(1, 0, 3)
    run.start(1)


def test_a_resumed_run_draws_again_what_came_after_its_checkpoint(run: Written) -> None:
    killed_after_a_checkpoint_of_rollout_0(run)
    run.drawn(0, 3, 4)
    run.trained(1, 0, 3)
    run.drawn(5, 6)
    ledger = run.ledger()
    assert ledger.is_exact and ledger.groups_trained == 4 and ledger.again == 3
    assert ledger.dropped["filtered"] == 0 and ledger.running == {4, 5, 6}


def test_lost_and_doubled_groups_are_named(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    killed_after_a_checkpoint_of_rollout_0(run)
    run.drawn(0, 2, 4, 5, 6)  # 3 is missing, 2 was trained
    run.trained(1, 0, 2, over_limit=3)
    ledger = run.ledger()
    assert ledger.lost == [3] and ledger.twice == {2} and not ledger.is_exact
    assert command.main([str(run.run_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("problem  lost groups") and " 3;" in line for line in lines)
    assert any(line.startswith("problem  groups in two batches") and " 2;" in line for line in lines)
    assert any(line.startswith("warning  samples beyond --max-staleness") and " 3;" in line for line in lines)
    names = "lost groups, groups in two batches"
    assert (
        lines[-1]
        == f"2 problems, 1 warning: the records of the run in {run.run_dir} are not in order: {names}"
    )


def test_groups_that_were_put_back_may_be_drawn_again(run: Written) -> None:
    run.start(0)
    run.drawn(0, 1, 2)
    run.rollout.add("put_back", groups=[2])
    run.trained(0, 0, 1)
    run.drawn(2, 3)
    run.trained(1, 2, 3)
    assert run.ledger().is_exact and run.ledger().groups_trained == 4


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"RUN_DIR must have {EVENTS_FILE}, got none in"):
        read_ledger(tmp_path)


WRITER = """
import sys
from slime.tracking.events import Events
events = Events(sys.argv[1], sys.argv[2])
while True:
    events.add("drawn", groups=list(range(200)), version=0)
"""


def test_lines_of_killed_processes_are_whole(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name, str(tmp_path)]) for name in ("a", "b")]
    path = tmp_path / EVENTS_FILE
    begun: set[bytes] = set()
    while len(begun) < 2 or path.stat().st_size < 2_000_000:
        lines = path.read_bytes().splitlines() if len(begun) < 2 and path.is_file() else []
        begun |= {name for name in (b"a", b"b") if any(b'"source": "%s"' % name in line for line in lines)}
        assert all(writer.poll() is None for writer in writers)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    events = list(read_events(tmp_path, ("drawn", DAMAGED)))
    assert sum(event.kind == DAMAGED for event in events) <= 2
    assert {event.source for event in events if event.source} == {"a", "b"}


def visits(groups: range, shift: int = 0) -> dict[int, tuple[int, int, int, int]]:
    return {group: (0, group + shift, group + shift, 7 * (group + shift) % 10) for group in groups}


def test_prompts_in_the_order_of_the_data_are_right(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    run.start(0)
    run.named(visits(range(6)))
    run.trained(0, 0, 1)
    run.start(1)
    run.named(visits(range(4, 9)))  # groups 2 and 3 come from the buffer
    ledger = run.ledger()
    assert (ledger.jumps, ledger.moved, len(ledger.prompts)) == ([], set(), 9)
    command.main([str(run.run_dir)])
    assert "9 in the order of the data" in capsys.readouterr().out


@pytest.mark.parametrize(("shift", "said"), [(1, "1 prompts were left out"), (-2, "2 prompts came again")])
def test_a_resume_at_another_prompt_is_a_problem(
    run: Written, capsys: pytest.CaptureFixture[str], shift: int, said: str
) -> None:
    """A flipped bit in the data position has this effect: no group is lost, and no group is trained twice."""
    run.start(0)
    run.named(visits(range(4)))
    run.trained(0, 0, 1, 2, 3)
    run.start(1)
    run.named(visits(range(4, 8), shift))
    run.trained(1, 4, 5, 6, 7)
    ledger = run.ledger()
    assert ledger.jumps == [(4, shift)] and not ledger.is_exact and not ledger.lost and not ledger.twice
    assert command.main([str(run.run_dir)]) == 1
    assert f"before group 4 {said}" in capsys.readouterr().out


def test_a_group_that_is_drawn_again_with_another_prompt_is_named(run: Written) -> None:
    run.start(0)
    run.named(visits(range(4)))
    run.start(1)
    run.named({2: (0, 2, 2, 9)})
    assert run.ledger().moved == {2}


def test_what_curriculum_passes_over_is_no_jump_and_may_change(run: Written) -> None:
    run.start(0)
    run.named({0: (0, 0, 0, 0), 1: (0, 1, 3, 3), 2: (0, 4, 4, 4), 3: (0, 5, 5, 5)})
    run.start(1)
    run.named({2: (0, 4, 6, 6), 3: (0, 7, 7, 7)})
    run.start(0)
    run.named({0: (0, 0, 0, 0)})
    ledger = run.ledger()
    assert ledger.is_exact and ledger.prompts == {0: [0, 0, 0, 0]}


def test_data_sets_have_orders_of_their_own(run: Written) -> None:
    run.start(0)
    run.named({0: (0, 0, 0, 0), 1: (1, 0, 0, 9), 2: (0, 1, 1, 1), 3: (1, 1, 1, 8), 4: (1, 3, 3, 7)})
    assert run.ledger().jumps == [(4, 1)]
