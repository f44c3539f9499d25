"""Tests the stream with rollouts ahead: batches of the first finished groups, bounded age, evaluation meanwhile, and
a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_double import ListSource, make_args, make_state, write_lines

from slime.data.source import PromptDataSource
from slime.rollout import vllm_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.stream import stream
from slime.tracking.journal import read_events
from slime.types import Sample

ONE = "hold=1 :"


async def reward_of_length(args: object, sample: Sample) -> float:
    if "unscorable" in str(sample.prompt):
        raise KeyError("no answer")
    return float(sample.response_length)


def drop_x(args: object, samples: list[Sample], **_: object) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep="x" not in str(samples[0].prompt), reason="x")


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


class Run:
    """Uses a rollout manager as the loop does: requests rollouts, and changes the weights after each rollout."""

    def __init__(self, prompts: list[str], *, source: object = None, **flags: object) -> None:
        self.args = make_args(
            **{"custom_rm_path": "test_stream.reward_of_length", "max_staleness": 1, **flags}
        )
        self.state = make_state(self.args)
        self.source = source or ListSource(self.args, prompts)
        self.threads = ThreadPoolExecutor(1)
        self.engine = self.state.engine

    def ask(self, rollout_id: int, version: int) -> Callable[[], RolloutFnTrainOutput]:
        self.engine.version = version
        self.state.allow(rollout_id, version)
        asked = self.threads.submit(vllm_rollout.generate_rollout, self.args, rollout_id, self.source)
        return lambda: asked.result(20)


def prompts_of(output: RolloutFnTrainOutput) -> list[str]:
    return [group[0].prompt for group in output.samples]


def test_a_batch_takes_what_finishes_first_and_the_rest_goes_on():
    run = Run([ONE, "b", "c", "d", "e", "f"])
    first, second = run.ask(0, 0), run.ask(1, 0)
    assert prompts_of(first()) == ["b", "c"]
    third = run.ask(2, 1)
    threading.Timer(0.1, run.engine.released.add, "1").start()
    output = second()
    assert prompts_of(output) == [ONE, "d"]  # drawn at weights 0, so rollout 1 is the last that may have it
    assert output.samples[0][0].weight_versions == [0, 1] and run.engine.aborts == 0
    assert (
        output.metrics["rollout/staleness/max"] == 1 and output.metrics["rollout/staleness/over_limit"] == 0
    )
    output = third()
    assert prompts_of(output) == ["e", "f"] and output.metrics["rollout/staleness/max"] == 1


def test_events_say_how_long_each_group_generates(tmp_path):
    """The first group is held while the others end."""
    run = Run([ONE, "b", "c", "d", "e", "f"], run_dir=str(tmp_path))
    first, second = run.ask(0, 0), run.ask(1, 0)
    first()
    assert until(lambda: run.engine.running == 2)  # both samples of the held group
    assert [group for kind, group in told(tmp_path) if kind == "ended"].count(0) == 0
    run.engine.released.add("1")
    second()
    run.state.close()
    kinds = told(tmp_path)
    for group in range(4):
        drawn, ended = kinds.index(("drawn", group)), kinds.index(("ended", group))
        assert drawn < ended < kinds.index(("batch", group))


def told(run_dir: Path) -> list[tuple[str, int]]:
    """Returns (kind, group) of the events about groups."""
    return [(event.kind, group) for event in read_events(run_dir) for group in event.get("groups", ())]


def test_a_batch_waits_for_old_groups_that_later_batches_have_no_room_for():
    """Four groups of weights 0 run when two groups of weights 1 are ready. Rollout 2 has room for only two of the
    four."""
    run = Run(["a", "b", ONE, ONE, ONE, ONE, "g", "h"], max_staleness=2)
    asked = [run.ask(rollout_id, 0) for rollout_id in range(3)]
    assert prompts_of(asked[0]()) == ["a", "b"]
    assert until(lambda: run.engine.running == 8)  # the four groups, drawn at weights 0
    last = run.ask(3, 1)
    assert until(lambda: len(run.engine.calls) == 16 and run.engine.running == 8)
    run.engine.released.add("1")
    assert [prompts_of(one()) for one in (*asked[1:], last)] == [[ONE, ONE], [ONE, ONE], ["g", "h"]]


def test_no_more_groups_are_drawn_than_the_loop_has_asked_for():
    run = Run([ONE] * 12, max_staleness=2)
    for rollout_id in range(3):
        asked = run.ask(rollout_id, 0)
        assert until(lambda wanted=4 * (rollout_id + 1): len(run.engine.calls) == wanted)
    assert run.source.drawn == 6
    run.engine.released.add("1")
    asked()


@pytest.mark.parametrize("default", [None, 2])  # --over-sampling-batch-size: a plug-in's args, a run's flags
def test_dropped_groups_are_replaced_one_by_one(default):
    flags = {"dynamic_sampling_filter_path": "test_stream.drop_x", "over_sampling_batch_size": default}
    run = Run(["x", "b", "c", "d", "e", "f"], **flags)
    first, second = run.ask(0, 0), run.ask(1, 0)
    assert prompts_of(first()) + prompts_of(second()) == ["b", "c", "d", "e"]
    assert run.source.drawn == 5


@pytest.mark.parametrize("policy", ["drop", "mask", "keep"])
def test_groups_beyond_the_limit_are_counted_and_dropped_masked_or_kept(policy):
    """Over-sampling draws six groups at weights 0. Rollouts 0 and 1 take four groups."""
    run = Run(list("abcdefghij"), over_sampling_batch_size=6, stale_samples=policy)
    first, second = run.ask(0, 0), run.ask(1, 0)
    assert prompts_of(first()) + prompts_of(second()) == list("abcd")
    output = run.ask(2, 2)()
    assert prompts_of(output) == (["g", "h"] if policy == "drop" else ["e", "f"])
    assert output.metrics.get("rollout/dynamic_filter/drop_stale", 0) == (2 if policy == "drop" else 0)
    assert output.metrics["rollout/staleness/over_limit"] == (0 if policy == "drop" else 4)
    assert {s.remove_sample for group in output.samples for s in group} == {policy == "mask"}


def test_a_running_group_beyond_the_limit_is_cancelled():
    run = Run([ONE, ONE, *"cdefgh"], over_sampling_batch_size=6)
    assert prompts_of(run.ask(0, 0)()) == ["c", "d"]
    assert prompts_of(run.ask(2, 2)()) == ["g", "h"]
    assert until(lambda: run.engine.running == 0)


def test_an_evaluation_runs_beside_a_rollout_that_does_not_end():
    run = Run([ONE, ONE, "c"])
    rollout = run.ask(0, 0)
    assert until(lambda: run.engine.running == 4)

    async def evaluate() -> SimpleNamespace:
        group = [Sample(prompt="q len=2 :", index=0)]
        params = {"max_new_tokens": 8}
        await stream.generate.generate_and_rm_group(run.args, group, params, True, stream="eval/a/0")
        return group[0]

    assert run.state.run(evaluate()).reward == 3
    run.engine.released.add("1")
    output = rollout()
    assert prompts_of(output) == [ONE, ONE]
    assert run.state.request_figures == {}  # the evaluation's figures do not belong to the rollout


def test_an_error_in_a_group_that_runs_ahead_ends_the_next_batch():
    run = Run(["a", "b", f"unscorable {ONE}", "d"])
    first, second = run.ask(0, 0), run.ask(1, 0)
    assert prompts_of(first()) == ["a", "b"]
    run.engine.released.add("1")
    with pytest.raises(RuntimeError, match="sample 4 of group 2: KeyError"):
        second()
    assert until(lambda: run.engine.running == 0)


def test_a_run_that_resumes_draws_first_what_was_in_no_batch(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": p} for p in (ONE, "b", "c", "d", "e", "f")])
    flags = {"prompt_data": data, "save": str(tmp_path), "load": str(tmp_path)}
    run = Run([], **flags)
    run.source = PromptDataSource(run.args)
    first, second = run.ask(0, 0), run.ask(1, 0)
    assert prompts_of(first()) == ["b", "c"]
    run.source.save(0, stream.outstanding(run.state))
    run.engine.released.add("1")
    second()
    seeds = {(text, seed) for text, _, seed in run.engine.calls if text in (ONE, "d")}
    again = Run([], **flags)
    again.source = PromptDataSource(again.args)
    again.source.load(0)
    again.engine.released.add("1")
    assert prompts_of(again.ask(1, 1)()) == [ONE, "d"]
    assert {(text, seed) for text, _, seed in again.engine.calls if text in (ONE, "d")} == seeds
    assert len(again.engine.calls) == 4
