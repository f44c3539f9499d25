"""Tests the unchanged plug-ins of examples/plugins, and the small modules that plug-ins import.

Plug-ins that read tensors of trainer ranks run in test_trainer_parallel.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollout_double import ListSource, make_args, make_state
from train_data_cases import border

from slime.data.train_data import convert_samples_to_train_data
from slime.hooks import load_function
from slime.rollout import sglang_rollout
from slime.rollout.rewards import async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.vllm_rollout import generate_rollout
from slime.types import Sample
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta

STATUS = Sample.Status


def rollout(args, source, **added):
    """Runs a rollout with the keys that --custom-config-path adds to `args`."""
    vars(args).update(added)
    state = make_state(args)
    try:
        return generate_rollout(args, 0, source).samples, state.engine.calls
    finally:
        state.close()


def test_several_agents_are_siblings_of_one_rollout():
    args = make_args(
        custom_generate_function_path="agents.solve_and_review", custom_rm_path="agents.score", group_rm=False
    )
    source = ListSource(args, ["q: len=2 :", "r: len=3 :"])
    for sample in (groups := source.get_samples(2)) and [s for group in groups for s in group]:
        sample.label = "ab" if sample.group_index == 0 else "zz"
    source.add_samples(groups)
    found, calls = rollout(args, source)
    assert [len(group) for group in found] == [4, 4] and len(calls) == 8
    for group, reward in zip(found, (1.0, 0.0), strict=True):
        assert [s.train_metadata["agent"] for s in group] == ["solver", "reviewer"] * 2
        assert [s.rollout_id for s in group] == [group[0].index] * 2 + [group[2].index] * 2
        assert {s.reward for s in group} == {reward}
        assert group[1].prompt.startswith(group[0].prompt + group[0].response)
        for sample in group:
            sample.check()
    assert len({seed for _, _, seed in calls}) == 8
    data = convert_samples_to_train_data(*border(), [s for group in found for s in group])
    assert len(set(data["rollout_ids"])) == 4
    first = sum(s.response_length for s in found[0][:2])
    assert data["rollout_mask_sums"][:2] == [first, first]


def test_a_retried_sample_is_reset_and_rebuilt():
    """Eight letters do not fit in four tokens; the second attempt keeps two of them and stops again."""
    args = make_args(
        custom_generate_function_path="retry.until_it_ends", custom_rm_path="test_plug_ins.length_reward",
        rollout_max_response_len=4, rollout_batch_size=1, n_samples_per_prompt=1,
    )  # fmt: skip
    ((sample,),), calls = rollout(args, ListSource(args, ["q: len=8 :"]), max_attempts=3, kept_tokens=2)
    assert sample.attempts == 3 and sample.status is STATUS.TRUNCATED
    assert [text for text, _, _ in calls] == ["q: len=8 :", "q: len=8 :ab", "q: len=8 :ab"]
    assert len({seed for _, _, seed in calls}) == 3
    assert sample.response == "abcd" and sample.response_length == 4 and sample.loss_mask == [1] * 4
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.1, -0.2])
    # The count is from the last attempt only.
    assert sample.prefix_cache_info.total_prompt_tokens == len(sample.tokens) - 2
    assert Sample.from_dict(sample.to_dict()).attempts == 3
    sample.check()


async def length_reward(args, sample, **kwargs):
    return float(sample.response_length)


def test_a_reward_asks_a_remote_model():
    asked = []

    async def generate(request: web.Request) -> web.Response:
        asked.append((await request.json())["text"])
        return web.json_response({"text": " Yes" if "2" in asked[-1].split("Right answer:")[0] else " no"})

    async def scenario() -> list[float]:
        app = web.Application()
        app.router.add_post("/generate", generate)
        async with TestServer(app) as server:
            args = make_args(custom_rm_path="remote_judge.score")
            args.judge_url = str(server.make_url("/generate"))
            samples = [
                Sample(index=i, prompt="1+1=", response=text, label="2") for i, text in enumerate("23")
            ]
            return list(await asyncio.gather(*(async_rm(args, sample) for sample in samples)))

    SingletonMeta.clear_all_instances()
    assert asyncio.run(scenario()) == [1.0, 0.0]
    assert len(asked) == 2 and all("Right answer: 2" in text for text in asked)
    SingletonMeta.clear_all_instances()


def test_a_data_source_makes_prompts_and_resumes(tmp_path):
    args = make_args(custom_rm_path="test_plug_ins.length_reward", save=str(tmp_path), load=str(tmp_path))
    make = load_function("sums.SumSource", flag="--data-source-path")
    source = make(args)
    groups, _ = rollout(args, source)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]]
    assert all(str(eval(s.prompt.rstrip("="))) == s.label for group in groups for s in group)
    source.save(4)
    expected = [s.prompt for (s, _) in source.get_samples(2)]
    again = make(args)
    again.load(4)
    assert [s.prompt for (s, _) in again.get_samples(2)] == expected


def test_a_singleton_is_one_object_per_class():
    class Client(metaclass=SingletonMeta):
        def __init__(self, name="first"):
            self.name = name

    class Other(Client):
        pass

    found = []
    threads = [threading.Thread(target=lambda: found.append(Client())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for x in found}) == 1 and Client("second").name == "first"
    assert Other() is not Client() and Other() is Other()
    SingletonMeta.clear_all_instances()
    assert Client("third").name == "third"
    SingletonMeta.clear_all_instances()


def test_run_uses_the_loop_of_the_rollout():
    async def here():
        return asyncio.get_running_loop()

    args = make_args()
    state = make_state(args)
    assert run(here()) is state.run(here())

    async def nested():
        return run(here())

    with pytest.raises(RuntimeError, match="must not be called in a coroutine, got a call in one; await"):
        run(nested())
    state.close()
    code = (
        "import asyncio\nfrom vime.utils.async_utils import run\n"
        "async def two():\n    await asyncio.sleep(0)\n    return id(asyncio.get_running_loop())\n"
        "print(run(two()) == run(two()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_hooks_without_a_rollout_id_get_the_one_that_is_set():
    args = make_args(rollout_sample_hook_path=["test_plug_ins.note_rollout"])
    set_current_rollout_id(7)
    try:
        asyncio.run(apply_rollout_sample_hooks(args, sample := Sample()))
        asyncio.run(apply_rollout_sample_hooks(args, other := Sample(), rollout_id=3))
    finally:
        set_current_rollout_id(None)
    assert (sample.metadata["seen"], other.metadata["seen"]) == (7, 3)


def note_rollout(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen"] = rollout_id


def test_fully_asynchronous_rollouts_are_the_default_function():
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert (
        load_function(path)
        is sglang_rollout.generate_rollout
        is load_function(path.replace("slime", "vime", 1))
    )
