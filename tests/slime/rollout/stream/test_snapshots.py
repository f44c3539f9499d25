"""Tests the snapshots of unfinished groups: a run that resumes continues their tokens, and no group is lost or trained
twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rollout_double import write_lines
from test_stream import ONE, Run, prompts_of, until

from slime.data.source import PromptDataSource
from slime.protocols import GenerateResult
from slime.rollout.stream import snapshot_file, stream
from slime.rollout.stream.parts import AnswersSoFar
from slime.rollout.stream.snapshot_file import NAME, SnapshotFile, SnapshotHeader, Text, decode, encode
from slime.rollout.stream.snapshot_start import begin_snapshots
from slime.rollout.stream.snapshots import Snapshots
from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger
from slime.types import Sample

PROMPTS = (ONE, "b", "c", "d", "e", "f", "g", "h")


RUNS: list[Saved] = []


@pytest.fixture(autouse=True)
def _ends_runs():
    yield
    while RUNS:
        run = RUNS.pop()
        run.snapshots.stop()
        run.engine.released.add("1")
        run.threads.shutdown()


class Saved(Run):
    """A run with a data position and a run directory."""

    def __init__(
        self,
        folder: Path,
        start: int = 0,
        run_dir: str = "run",
        prompts: Sequence[str] = PROMPTS,
        **flags: object,
    ) -> None:
        data = write_lines(folder / "d.jsonl", [{"prompt": p} for p in prompts])
        given = {
            "prompt_data": data,
            "save": str(folder),
            "load": str(folder),
            "run_dir": str(folder / run_dir),
        }
        super().__init__([], **given, **flags)
        self.state.events.add("start", rollout=start)
        self.source = PromptDataSource(self.args)
        self.source.load(start - 1)
        begin_snapshots(self.state, self.source, start)
        RUNS.append(self)
        self.snapshots = self.state.has_part(Snapshots)

    def take(self) -> None:
        self.state.run(self.snapshots.take())

    def train(self, rollout_id: int, version: int) -> list[str]:
        output = self.ask(rollout_id, version)()
        self.state.events.add("step", rollout=rollout_id)
        return prompts_of(output)

    def save(self, rollout_id: int) -> None:
        self.source.save(rollout_id, stream.outstanding(self.state))


def restored(folder: Path) -> list[tuple[int, int]]:
    """Returns (group, tokens) of the groups that went on with stored tokens."""
    return [(e.get("groups")[0], e.get("tokens")) for e in read_events(folder / "run", ("restored",))]


def resume(folder: Path, start: int = 1, **flags: object) -> Saved:
    again = Saved(folder, start, **flags)
    again.engine.released.add("1")
    return again


def stopped_run(folder: Path, *, saves: bool = True, version: int = 0) -> Saved:
    """Returns a run whose checkpoint and snapshot have group 3, which is ready, and group 0, which runs."""
    run = Saved(folder)
    first, run.second = run.ask(0, version), run.ask(1, version)
    assert prompts_of(first()) == ["b", "c"]
    assert until(lambda: stream.unfinished(run.state)[0].is_ready)
    if saves:
        run.save(0)
    run.take()
    return run


def test_a_killed_run_goes_on_with_the_groups_that_were_ready(tmp_path):
    """Group 3 is ready and group 0 runs when the checkpoint and the snapshot are made."""
    run = stopped_run(tmp_path)
    run.state.events.add("step", rollout=0)
    run.engine.released.add("1")
    again = resume(tmp_path)
    assert again.train(1, 1) == [ONE, "d"]
    assert [text for text, _, _ in again.engine.calls].count(
        "d"
    ) == 0  # its responses are those of the first run
    assert restored(tmp_path) == [(3, 8)]
    ledger = read_ledger(tmp_path / "run")
    assert ledger.is_exact and ledger.batches[1] == [0, 3]


def test_the_tokens_of_a_snapshot_are_counted(tmp_path):
    stopped_run(tmp_path)
    output = resume(tmp_path).ask(1, 1)()
    assert output.metrics["rollout/snapshot/tokens_restored"] == 8
    assert output.metrics["rollout/snapshot/samples_restored"] == 2
    assert output.metrics["rollout/staleness/max"] == 1


def test_an_old_snapshot_brings_no_trained_group_back(tmp_path):
    """The snapshot is older than the checkpoint of rollout 1, which has trained its groups."""
    run = stopped_run(tmp_path)
    run.engine.released.add("1")
    old = (tmp_path / "run" / NAME).read_bytes()
    run.state.events.add("step", rollout=0)
    assert prompts_of(run.second()) == [ONE, "d"]
    run.state.events.add("step", rollout=1)
    run.save(1)
    (tmp_path / "run" / NAME).write_bytes(old)
    again = resume(tmp_path, start=2)
    assert again.snapshots.waiting == set()
    assert again.train(2, 2) == ["e", "f"] and restored(tmp_path) == []
    assert read_ledger(tmp_path / "run").is_exact


def test_a_snapshot_newer_than_the_checkpoint_waits_until_its_groups_are_drawn(tmp_path):
    """The checkpoint is of rollout 0, and the snapshot has the groups of rollout 4. A second resume finds them in the
    snapshot of the first, from a run directory of another name."""
    run = stopped_run(tmp_path)
    run.engine.released.add("1")
    run.second()
    run.ask(2, 1)()
    run.ask(3, 3)
    run.state.allow(4, 3)
    assert until(lambda: len(groups_of(run)) == 2)
    assert until(lambda: all(entry.is_ready for entry in stream.unfinished(run.state)))
    run.take()
    again = resume(tmp_path)
    assert again.snapshots.waiting == {8, 9}
    again.take()
    third = resume(tmp_path, run_dir="moved")
    assert third.snapshots.waiting == {8, 9}
    assert [third.train(i, i)[0] for i in (1, 2, 3, 4)] == [ONE, "e", "g", ONE]
    assert {text for text, _, _ in third.engine.calls} == {ONE, *"defgh"}


@pytest.mark.parametrize(("sampled_at", "rollout"), [(0, 2), (3, 1)])
def test_tokens_of_weights_too_far_away_start_again(tmp_path, sampled_at, rollout):
    """With --max-staleness 1, rollout 2 may have tokens of the versions 1 to 3, and rollout 1 those of 0 to 2."""
    stopped_run(tmp_path, version=sampled_at)
    output = resume(tmp_path).ask(rollout, rollout)()
    assert restored(tmp_path) == [] and output.metrics["rollout/snapshot/samples_restarted"] == 2
    assert {s.weight_versions[0] for group in output.samples for s in group} == {rollout}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda line: line[: len(line) // 2], "damaged"),
        (lambda line: line.replace(b"abc", b"abd"), "damaged"),
        (lambda line: b"", None),
    ],
)
def test_a_half_written_snapshot_is_left_out_with_a_note(tmp_path, caplog, change, note):
    stopped_run(tmp_path)
    path = tmp_path / "run" / NAME
    header, *groups = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"".join(map(change, groups)))
    again = resume(tmp_path)
    assert again.snapshots.waiting == set() and again.train(1, 1) == [ONE, "d"]
    assert note is None or note in caplog.text


@pytest.mark.parametrize("content", [b"", b"x", b"{}\n", b"00000000 {}\n"])
def test_a_snapshot_without_a_header_is_not_used(tmp_path, caplog, content):
    stopped_run(tmp_path)
    (tmp_path / "run" / NAME).write_bytes(content)
    assert resume(tmp_path).snapshots.waiting == set()
    assert "no readable first line" in caplog.text


def test_the_snapshot_of_another_run_is_not_used(tmp_path, caplog):
    other = tmp_path / "other"
    other.mkdir()
    stopped_run(tmp_path), stopped_run(other)
    (tmp_path / "run" / NAME).write_bytes((other / "run" / NAME).read_bytes())
    again = resume(tmp_path)
    assert again.snapshots.waiting == set() and "the checkpoint is of run" in caplog.text


def test_changed_sampling_starts_the_groups_again(tmp_path, caplog):
    stopped_run(tmp_path)
    assert resume(tmp_path, rollout_temperature=0.5).snapshots.waiting == set()
    assert "--rollout-temperature changed" in caplog.text


def test_a_run_that_starts_anew_before_its_first_checkpoint_uses_its_snapshot(tmp_path):
    stopped_run(tmp_path, saves=False)
    again = resume(tmp_path, start=0)
    assert [again.train(0, 0), again.train(1, 1)] == [[ONE, "b"], ["c", "d"]]
    assert restored(tmp_path) == [(3, 8)]


def test_a_sample_of_an_agent_starts_again(tmp_path):
    """One sample of each group has its reward; the other is in its generate function."""
    flags = {
        "custom_generate_function_path": "test_snapshots.agent",
        "rollout_batch_size": 1,
        "max_staleness": 0,
    }
    run = Saved(tmp_path, **flags)
    run.ask(0, 0)
    assert until(lambda: [s.reward for group in groups_of(run) for s in group] == [2.0, None])
    assert until(lambda: groups_of(run)[0][1].response_length == 2)
    run.take()
    record = SnapshotFile(tmp_path / "run" / NAME)
    record.load()
    assert [s["response_length"] for s in record.read(0)["samples"]] == [2, 0]
    run.engine.released.add("agent")
    again = resume(tmp_path, start=0, **flags)
    again.engine.released.add("agent")
    assert again.train(0, 0) == [ONE]
    assert restored(tmp_path) == [(0, 2)]


def groups_of(run: Saved) -> list[list[Sample]]:
    return [entry.group for entry in stream.unfinished(run.state)]


async def agent(args: object, sample: Sample, sampling_params: object) -> Sample:
    sample.tokens = [1]
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.5, -0.25])
    while sample.index % 2 and "agent" not in RUNS[-1].engine.released:
        await asyncio.sleep(0.002)
    sample.status = Sample.Status.COMPLETED
    return sample


def test_the_tokens_of_a_running_request_are_in_the_snapshot(tmp_path):
    """The engine has reported two of four letters. The resumed run requests the other two with a seed of their own."""
    run = Saved(tmp_path, prompts=["part=2 hold=1 len=4 :", "b"])
    run.ask(0, 0)
    assert until(
        lambda: len(groups_of(run)) == 2 and groups_of(run)[0][0].reward == 4 and run.engine.running == 2
    )
    run.take()
    again = resume(tmp_path, start=0, prompts=["part=2 hold=1 len=4 :", "b"])
    output = again.ask(0, 0)()
    assert restored(tmp_path) == [(0, 4), (1, 8)]
    assert [text for text, _, _ in again.engine.calls] == ["part=2 hold=1 len=4 :ab"] * 2
    for sample in output.samples[0]:
        assert (sample.response, sample.response_length, sample.reward) == ("abcd<|im_end|>", 5, 5.0)
        assert sample.rollout_log_probs == pytest.approx([-0.1, -0.1, -0.1, -0.2, -0.3])
        assert sample.columns["token_versions"] == [0] * 5 and sample.loss_mask == [1] * 5


def test_parts_of_an_engine_that_died_are_dropped():
    answers = AnswersSoFar(1.0)
    part = GenerateResult([5], [-0.5], "x", "abort", [3], columns={"token_versions": (np.asarray([3]),)})
    for index in (0, 1, 2):
        answers.take("a", index, part)
    assert answers.read("a").token_ids == [5, 5, 5] and answers.read("b") is None
    assert answers.read("a").token_columns == {"token_versions": [3, 3, 3]}
    answers.take("a", 0, part)
    assert answers.read("a").token_ids == [5]
    answers.take("a", 4, part)
    assert answers.read("a") is None


def test_aborted_groups_in_the_buffer_are_in_the_snapshot(tmp_path):
    """--partial-rollout has put a group back with two tokens per sample, after the checkpoint."""
    flags = {"partial_rollout": True, "over_sampling_batch_size": 3, "max_staleness": 0}
    data = ["a", "slow len=4 :", "c", "d"]
    run = Saved(tmp_path, prompts=data, **flags)
    assert run.train(0, 0) == ["a", "c"]
    run.take()
    again = resume(tmp_path, start=0, prompts=data, **flags)
    again.ask(0, 0)()
    assert restored(tmp_path) == [(1, 4)]


def test_a_rollout_that_fails_leaves_its_groups_to_the_next_snapshot(tmp_path):
    run = Saved(tmp_path, prompts=["a", f"unscorable {ONE}"])
    first = run.ask(0, 0)
    assert until(lambda: any(s.reward is not None for group in groups_of(run) for s in group))
    run.engine.released.add("1")
    with pytest.raises(RuntimeError, match="no answer"):
        first()
    assert len(groups_of(run)) == 1  # the other group has ended
    run.take()
    assert run.snapshots._file.lines.keys() == {0, 1}


def test_unchanged_groups_are_not_converted_again(tmp_path, monkeypatch):
    run = stopped_run(tmp_path)
    before = (tmp_path / "run" / NAME).read_bytes()
    monkeypatch.setattr(snapshot_file, "sample_text", None)
    run.take()
    assert (tmp_path / "run" / NAME).read_bytes() == before


def test_the_size_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot_file, "MOST_BYTES", 1000)
    file = SnapshotFile(tmp_path / NAME)
    header = SnapshotHeader("r", {}, 0)
    texts = {number: Text(None, encode({"group": number, "x": "y" * 300})) for number in range(5)}
    assert file.write(header, texts, ()) < 1000 and file.lines.keys() == {0, 1}
    assert "3 groups are not stored" in caplog.text
    again = SnapshotFile(tmp_path / NAME)
    assert again.load() == header and again.read(1)["group"] == 1 and again.read(4) is None


def test_a_full_disk_costs_a_snapshot_and_not_the_run(tmp_path, monkeypatch, caplog):
    run = stopped_run(tmp_path)
    before = (tmp_path / "run" / NAME).read_bytes()
    scratch = run.snapshots.path.with_name(f"{NAME}.tmp")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.snapshots._file, "write", full)
    run.take()
    assert "No space left on device" in caplog.text and not scratch.exists()
    assert (tmp_path / "run" / NAME).read_bytes() == before


def test_a_value_that_is_not_plain_leaves_its_group_out(tmp_path, caplog):
    run = stopped_run(tmp_path)
    groups_of(run)[0][0].metadata["tool"] = object()
    groups_of(run)[0][0].reward = 7.0
    groups_of(run)[0][0].response_length -= 1
    run.take()
    assert "must have plain values" in caplog.text


def test_no_unfinished_group_leaves_no_file(tmp_path):
    run = stopped_run(tmp_path)
    run.engine.released.add("1")
    run.second()
    run.take()
    assert not (tmp_path / "run" / NAME).exists()


def test_a_line_is_checked(tmp_path):
    line = encode({"group": 1})
    assert decode(line) == {"group": 1} and json.loads(line[9:]) == {"group": 1}
    assert decode(line[:-1]) is None and decode(b"0" + line[1:]) is None and decode(b"") is None


def test_a_plug_in_source_may_use_the_name_for_something_else(tmp_path):
    class Source(PromptDataSource):
        def snapshot(self) -> None:
            """Has a meaning of its own."""

    run = stopped_run(tmp_path)
    source = Source.__new__(Source)
    source.__dict__.update({name: value for name, value in vars(run.source).items() if name != "snapshot"})
    begin_snapshots(run.state, source, 0)
    assert source.snapshot() is None
