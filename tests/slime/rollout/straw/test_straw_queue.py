"""Tests one queue in a process: groups pass through it, leases are taken over with their tokens, and bad input is an
error or is counted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from straw_processes import Trainer, queue_flags, until

from slime.config import Config
from slime.rollout.straw.folder import folder_for, read_plain, require_same_sampling
from slime.rollout.straw.groups import GroupAnswer, GroupTask
from slime.rollout.stream import stream
from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger
from vime.run.lock import lock_all, written_folders

pytest.importorskip("straw")
LONG = "len=8 x :"
"""A prompt with eight letters as its answer, which goes on after the letters that it has."""
LEASE_S = 0.4


@pytest.fixture
def begin(tmp_path):
    """Starts trainers in `tmp_path`, which end with the test."""
    runs: list[Trainer] = []

    def start(start: int = 0, *, works: bool = True, **flags: object) -> Trainer:
        runs.append(Trainer(tmp_path, start, **{"rollout_queue_lease_seconds": LEASE_S, **flags}))
        if not works:
            runs[-1].queue.work.cancel()
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def ask(trainer: Trainer, rollout_id: int = 0) -> Future[Any]:
    """Requests a rollout and does not wait for it."""
    trainer.state.allow(rollout_id, rollout_id)
    context = trainer.state.submit(stream.generate_rollout_async(trainer.state, rollout_id, trainer.source))
    return context


def work(trainer: Trainer) -> None:
    """Lets the trainer's own process generate."""
    trainer.queue.work = trainer.state.submit(trainer.queue.worker.run())


def lease(trainer: Trainer, host: str, group: int) -> dict[str, Any]:
    """Leases the task of a group for a host that is no process. Other tasks go back."""

    def find() -> dict[str, Any] | None:
        found = trainer.queue.service.call(host, "lease", {"count": 9, "held": 0})
        others = [each["lease"] for each in found if each["facts"]["group"] != group]
        trainer.queue.service.call(host, "leave", {"leases": others})
        return next((each for each in found if each["facts"]["group"] == group), None)

    found = until(find)
    assert found
    return found


def write(trainer: Trainer, text: bytes, found: dict[str, Any]) -> dict[str, Any]:
    tags = {name: found["lease"][name] for name in ("task_id", "attempt_id")}
    return trainer.state.run(trainer.queue.storage.write(text, tags))


def task_with(trainer: Trainer, found: dict[str, Any], letters: str, version: int = 0) -> GroupTask:
    """Returns a leased task with these letters as the response of every sample."""
    task = GroupTask.from_text(trainer.queue.storage.read_now(found["task"]))
    for sample in task.samples:
        sample.tokens = trainer.state.prompt_ids(sample)
        ids = trainer.state.tokenizer.encode(letters, add_special_tokens=False)
        sample.append_response_tokens(tokens=ids, log_probs=[-1.0] * len(ids), text=letters)
        sample.add_weight_version(version)
        sample.status = sample.Status.ABORTED
    return task


def answer(trainer: Trainer, found: dict[str, Any], version: int = 0) -> bytes:
    """Returns the answer of a host with three letters per sample."""
    samples = task_with(trainer, found, "xyz", version).samples
    for sample in samples:
        sample.status, sample.reward = sample.Status.COMPLETED, 3.0
    return GroupAnswer(samples).text()


def prompts(output: Any) -> list[str]:
    return [group[0].prompt for group in output.samples]


def reasons(folder: Path) -> list[tuple[str, str]]:
    """Returns (host, reason) of the answers that were discarded."""
    found = read_events(folder / "run", ("discarded",))
    return [(str(event.get("host")), str(event.get("reason"))) for event in found]


def end_step(trainer: Trainer, folder: Path, rollout_id: int = 0) -> None:
    """Ends a rollout as the loop does, and asks the ledger."""
    trainer.state.events.add("step", rollout=rollout_id)
    ledger = read_ledger(folder / "run")
    assert ledger.is_exact and ledger.over_limit == 0


def test_a_group_has_everything_that_training_reads(begin, tmp_path):
    trainer = begin()
    output = trainer.train(0)
    sample = output.samples[0][0]
    assert len(output.samples) == 2 and sample.reward == 4.0 and sample.weight_versions == [0]
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert output.metrics["rollout/queue/leases"] >= 2 and output.metrics["rollout/queue/discarded"] == 0
    end_step(trainer, tmp_path)


def test_a_group_goes_on_with_the_tokens_of_a_host_that_died(begin, tmp_path):
    trainer = begin(works=False, prompts=[LONG, *"bcdefg"])
    asked = ask(trainer)
    found = lease(trainer, "dead", 0)
    reference = write(trainer, task_with(trainer, found, "abcd").text(), found)
    assert trainer.queue.service.call("dead", "save", {"lease": found["lease"], "reference": reference})
    work(trainer)
    output = asked.result(20)
    first = output.samples[0][0]
    assert first.prompt == LONG and first.response == "abcdefgh"
    assert first.rollout_log_probs[:4] == [-1.0] * 4
    restored = [event.get("tokens") for event in read_events(tmp_path / "run", ("restored",))]
    assert restored == [8] and output.metrics["rollout/queue/taken_over"] >= 1
    end_step(trainer, tmp_path)


@pytest.mark.parametrize("first", [True, False], ids=["before the other", "after the other"])
def test_the_late_answer_of_a_lease_that_expired_while_its_owner_lives_is_not_counted_twice(
    begin, tmp_path, first
):
    """The host is suspended longer than its lease, and answers after another host has leased the group or answered."""
    trainer = begin(works=False)
    asked = ask(trainer)
    found = lease(trainer, "slow", 0)
    late = write(trainer, answer(trainer, found), found)
    if first:
        lease(trainer, "other", 0)
    else:
        work(trainer)
        asked.result(20)
    assert trainer.queue.service.call("slow", "answer", {"lease": found["lease"], "reference": late}) is False
    if first:
        work(trainer)
    output = asked.result(20)
    assert output.samples[0][0].reward == 4.0, "not the three letters of the late answer"
    assert ("slow", "lease" if first else "ended") in reasons(tmp_path)
    end_step(trainer, tmp_path)


def test_the_answer_of_a_file_that_was_cut_is_discarded_and_the_group_is_generated_again(begin, tmp_path):
    trainer = begin(works=False)
    asked = ask(trainer)
    found = lease(trainer, "host", 0)
    reference = write(trainer, answer(trainer, found), found)
    pack = folder_for(trainer.state.config).store / reference["manifest"]["segment"]["path"]
    content = bytearray(pack.read_bytes())
    middle = reference["manifest"]["segment"]["offset"] + 200
    content[middle : middle + 40] = bytes(40)
    pack.write_bytes(content)
    trainer.queue.service.call("host", "answer", {"lease": found["lease"], "reference": reference})
    work(trainer)
    assert asked.result(20).samples[0][0].reward == 4.0
    assert [reason for _, reason in reasons(tmp_path)] == ["damaged"]
    end_step(trainer, tmp_path)


def test_tokens_older_than_the_group_are_discarded(begin, tmp_path):
    """A host that does not follow the weights answers with tokens of version 0 for a group of version 3."""
    trainer = begin(works=False)
    trainer.engine.version = 3
    asked = ask(trainer, 3)
    found = lease(trainer, "old", 0)
    reference = write(trainer, answer(trainer, found, version=0), found)
    assert trainer.queue.service.call("old", "answer", {"lease": found["lease"], "reference": reference})
    work(trainer)
    assert asked.result(20).samples[0][0].weight_versions == [3]
    assert reasons(tmp_path) == [("", "stale")]


def test_an_error_of_a_host_ends_the_run_with_its_text(begin):
    trainer = begin(prompts=["unscorable", "b", "c"])
    with pytest.raises(RuntimeError, match="KeyError: 'no answer'"):
        ask(trainer).result(20)


def test_a_rollout_that_ends_early_takes_back_the_tokens_of_hosts(begin, tmp_path):
    """--partial-rollout: the batch is full without group 0, of which a host has saved four tokens."""
    flags = {"max_staleness": 0, "partial_rollout": True, "over_sampling_batch_size": 3}
    trainer = begin(works=False, prompts=[LONG, *"bcdefg"], **flags)
    asked = ask(trainer)
    found = lease(trainer, "host", 0)
    reference = write(trainer, task_with(trainer, found, "abcd").text(), found)
    assert trainer.queue.service.call("host", "save", {"lease": found["lease"], "reference": reference})
    renew = lambda: trainer.queue.service.call("host", "renew", {"leases": [found["lease"]]})  # noqa: E731
    work(trainer)
    assert until(lambda: asked.done() or (renew() and False))
    assert prompts(asked.result()) == ["b", "c"]
    assert [sample.response for sample in trainer.source.buffer[0]] == ["abcd", "abcd"]
    assert renew() == [False], "the host ends the group at its next renewal"


def test_a_run_that_resumes_finds_ready_and_unfinished_groups_in_its_queue(begin, tmp_path):
    """Group 0 is unfinished with four tokens, group 3 is ready, and the checkpoint is of groups 1 and 2."""
    flags = {"prompts": [LONG, *"bcdefg"], "rollout_queue_lease_seconds": 30.0}
    trainer = begin(works=False, **flags)
    asked = ask(trainer)
    trainer.state.allow(1, 0)
    found = lease(trainer, "host", 0)
    for group in (1, 2, 3):
        each = lease(trainer, f"host {group}", group)
        reference = write(trainer, answer(trainer, each), each)
        assert trainer.queue.service.call(
            "host 1", "answer", {"lease": each["lease"], "reference": reference}
        )
    output = asked.result(20)
    assert prompts(output) == ["b", "c"] and output.samples[0][0].reward == 3.0
    reference = write(trainer, task_with(trainer, found, "abcd").text(), found)
    assert trainer.queue.service.call("host", "save", {"lease": found["lease"], "reference": reference})
    trainer.source.save(0, stream.outstanding(trainer.state))
    trainer.state.events.add("step", rollout=0)
    again = begin(1, **flags)
    output = again.train(1)
    assert prompts(output) == [LONG, "d"] and not [call for call in again.engine.calls if call[0] == "d"]
    assert output.samples[1][0].reward == 3.0 and output.samples[0][0].response == "abcdefgh"
    assert again.queue.service.call("host", "renew", {"leases": [found["lease"]]}) == [False]
    ledger = read_ledger(tmp_path / "run")
    assert ledger.is_exact and ledger.batches == {0: [1, 2], 1: [0, 3]}


def test_a_queue_whose_owner_was_killed_in_a_write_opens_again(begin, tmp_path):
    trainer = begin()
    trainer.train(0)
    trainer.queue.service.close()
    journal = folder_for(trainer.state.config).store / "control" / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-50])
    again = begin(1)
    assert len(again.train(1).samples) == 2
    assert read_ledger(tmp_path / "run").is_exact


def refusal(start: Callable[..., object], *given: object, **flags: object) -> str:
    with pytest.raises(ValueError) as error:
        start(*given, **flags)
    return str(error.value)


def test_a_queue_of_another_run_is_an_error(begin, tmp_path):
    begin().train(0)
    other = tmp_path / "other"
    other.mkdir()
    flags = {"rollout_data_dir": str(tmp_path / "queues"), "rollout_queue_lease_seconds": LEASE_S}
    text = refusal(Trainer, other, 0, **flags)
    assert text.startswith(
        "--rollout-queue-run-id must name a new queue, or the queue of the run that resumes, got"
    )
    assert "remove its folder" in text and "\n" not in text


def test_a_queue_with_other_settings_is_an_error(begin):
    begin().train(0)
    text = refusal(begin, 1, rollout_queue_lease_seconds=7.0)
    assert text.startswith(
        f"--rollout-queue-lease-seconds must be {LEASE_S}, with which the queue was made, got 7.0"
    )


def test_two_runs_on_one_queue_are_an_error(tmp_path):
    def config(run_dir: str) -> Config:
        values = {**queue_flags(tmp_path), "run_dir": str(tmp_path / run_dir)}
        return Config.from_flat(
            {name: value for name, value in values.items() if name != "server_concurrency"}
        )

    with ExitStack() as first, ExitStack() as second:
        lock_all(written_folders(config("one")), first)
        text = refusal(lock_all, written_folders(config("two")), second)
    assert text.startswith("--rollout-data-dir must not be in use by another run, got")
    host = config("queues/q/hosts/a")
    assert set(written_folders(host)) == {"--run-dir"}, "a host locks no queue"


def test_a_host_with_other_sampling_is_an_error(begin, tmp_path):
    trainer = begin()
    found = read_plain(folder_for(trainer.state.config).queue)
    text = refusal(require_same_sampling, found, {"--rollout-temperature": 0.5})
    assert text.startswith("--rollout-temperature must be 1.0, as in the run of the queue, got 0.5")


def test_files_of_groups_that_a_checkpoint_has_are_removed(begin, tmp_path):
    """Groups of 300 KB fill files of 1 MiB."""
    flags = {"rollout_queue_online_gc": True, "rollout_queue_segment_mib": 1, "rollout_io_concurrency": 1}
    flags |= {"more": "z" * 150_000, "n_samples_per_prompt": 1}
    trainer = begin(**flags)

    def stored() -> int:
        return sum(pack.stat().st_size for pack in (tmp_path / "queues" / "q" / "store").rglob("*.pack"))

    for rollout_id in range(6):
        trainer.train(rollout_id)
    before = stored()
    trainer.queue.note_checkpoint({group[0].group_index for group in stream.outstanding(trainer.state)})
    assert before > 4 * 2**20 and stored() < before - 2**20
    trainer.train(6)
    again = begin(7, **flags)
    assert len(again.train(7).samples) == 2 and read_ledger(tmp_path / "run").is_exact


def test_a_group_that_ten_leases_have_lost_ends_the_run(begin):
    trainer = begin(works=False, rollout_queue_lease_seconds=0.05)
    asked = ask(trainer)

    def lose() -> bool:
        trainer.queue.service.call("dying", "lease", {"count": 9, "held": 0})
        return asked.done()

    assert until(lose)
    with pytest.raises(RuntimeError, match=r"group \d was lost by 10 leases of rollout hosts"):
        asked.result()
