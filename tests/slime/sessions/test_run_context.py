"""Tests the record that replaces `args` inside this project: the fields that it reads, and its cost."""

from __future__ import annotations

import asyncio
import copy
import time
from argparse import Namespace

import pytest
from rollout_double import make_args, make_state

from slime.config.schema import SECTION_OF, Config, read_section
from slime.config.sections.rollout import RolloutConfig
from slime.event_loop import loop_objects
from slime.rollout.context import RunContext, find_context


def whole_args(**changed: object) -> Namespace:
    """Returns `args` with every flag, as a run's hooks get them."""
    config = Config.from_flat(changed)
    return Namespace(**{name: config.get_value(name) for name in SECTION_OF})


def test_what_a_hook_sets_is_read_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rollout.state._entered", [])
    args = whole_args(rollout_temperature=0.5)
    first = find_context(args)
    assert find_context(args).config == first.config and first.state is None
    args.rollout_temperature = 0.7
    args.rollout_stop = ["a"]
    assert find_context(args).config.rollout.rollout_temperature == 0.7
    args.rollout_stop.append("b")
    assert find_context(args).config.rollout.rollout_stop == ["a", "b"]
    assert first.config.rollout.rollout_temperature == 0.5
    with pytest.raises(RuntimeError, match="must be called while a rollout runs"):
        _ = first.run


def test_other_args_between_two_reads_change_nothing() -> None:
    ours, theirs = whole_args(rollout_seed=3), whole_args(rollout_seed=4)
    for _ in range(2):
        assert read_section(RolloutConfig, ours).rollout_seed == 3
        assert read_section(RolloutConfig, theirs).rollout_seed == 4
        assert read_section(RolloutConfig, Namespace(rollout_seed=5)).rollout_seed == 5


def test_attributes_that_a_class_computes_are_read() -> None:
    class Args(Namespace):
        rollout_seed = 7

        @property
        def rollout_top_p(self) -> float:
            return 0.25

    flags = read_section(RolloutConfig, Args())
    assert (flags.rollout_seed, flags.rollout_top_p) == (7, 0.25)


def test_an_evaluation_does_not_change_the_args_of_training() -> None:
    args = make_args(use_rollout_routing_replay=True, use_score_centering=True)
    context = RunContext.from_state(make_state(args))
    evaluation = context.for_evaluation()
    assert evaluation.hook_args is not args and args.use_rollout_routing_replay
    assert not evaluation.hook_args.use_rollout_routing_replay
    assert not evaluation.config.off_policy.use_rollout_routing_replay
    assert not evaluation.config.algorithm.use_score_centering
    assert evaluation.config.rollout == context.config.rollout and evaluation.run is context.run
    plain = RunContext.from_state(make_state(make_args()))
    assert plain.for_evaluation() is plain


def test_the_border_costs_little() -> None:
    """Earlier, reading all sections once cost 607 us. The bar is 50 us per sample on a quiet machine, and a sample of
    the default rollout crosses the border at most once."""
    args = whole_args()
    find_context(args)
    best = float("inf")
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(10):
            find_context(args)
        best = min(best, (time.perf_counter() - began) / 10)
    assert best < 150e-6, best


def test_objects_of_a_loop_are_made_once_and_end_in_reverse() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        ended.append(name)

    async def use() -> list[asyncio.Semaphore]:
        objects = loop_objects()
        assert objects.get("a", lambda: "a", end) == objects.get("a", lambda: "other", end) == "a"
        objects.get("b", lambda: "b", end)
        found = [objects.semaphore("s", 2), loop_objects().semaphore("s", 9)]
        await objects.end("unknown")
        await objects.close()
        assert ended == ["b", "a"]
        assert objects.get("a", lambda: "new") == "new"
        return found

    first, again = asyncio.run(use())
    assert first is again and first._value == 2
    ended.clear()
    other, _ = asyncio.run(use())
    assert other is not first, "each loop has its objects"


def test_a_copy_of_args_reaches_the_same_run() -> None:
    args = make_args()
    state = make_state(args)
    assert find_context(copy.deepcopy(args)).run is state is find_context(Namespace()).run
