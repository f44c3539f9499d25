"""Tests the rollout manager: from prompts to each rank's data, its hooks, and the data position of checkpoints."""

from __future__ import annotations

import io
import json
import threading

import numpy as np
import pytest
import torch
from rollout_double import EngineDouble, make_tokenizer, write_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import convert_samples_to_train_data
from slime.plan.flops import ForwardFlops
from slime.protocols import Evaluated, Logged
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.manager import RolloutManager
from slime.rules.resolve import resolve
from slime.tracking import StepLine, make_trackers
from slime.tracking.report import Reporter
from slime.types import Sample
from slime.utils import logging_utils

LOGGED: list[tuple] = []
FACTS = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 30000}


@pytest.fixture
def build(checkpoint, tmp_path):
    """Builds managers over 6 prompts "a len=1 :" ... "f len=6 :". Each rank's data stays here instead of in Ray."""
    made = []
    LOGGED.clear()

    def build_one(*, dp_size: int = 1, **flags) -> RolloutManager:
        rows = [{"input": f"{c} len={i + 1} :", "label": str(i)} for i, c in enumerate("abcdef")]
        given = {
            "hf_checkpoint": str(checkpoint),
            "prompt_data": write_lines(tmp_path / "prompts.jsonl", rows),
            "label_key": "label",
            "run_dir": str(tmp_path / "run"),
            "num_rollout": 3,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "rollout_num_gpus": 1,
            "micro_batch_size": 1,
            "device": "cpu",
            "custom_rm_path": "test_manager.parity_reward",
        }
        engine = None if flags.get("loss_type") == "sft_loss" else EngineDouble(make_tokenizer())
        made.append(RolloutManager(resolve(given | flags), engine, dp_size, FACTS, pack=lambda data: data))
        return made[-1]

    yield build_one
    for manager in made:
        manager.close()


async def parity_reward(args, sample):
    return float(sample.index % 2)


def prompts(batch) -> list[str]:
    return [prompt for data in batch.rank_data for prompt in data["prompt"]]


def test_a_rollout(build):
    """The prompts have 9 tokens, the responses 1 + 1 and 2 + 1 letters and end marks."""
    manager = build()
    batch = manager.generate(0)
    (data,) = batch.rank_data
    assert prompts(batch) == ["a len=1 :"] * 2 + ["b len=2 :"] * 2
    assert data["response_lengths"] == [2, 2, 3, 3] and data["total_lengths"] == [11, 11, 12, 12]
    tokenizer = manager.state.tokenizer
    assert tokenizer.decode(data["tokens"][2]) == "b len=2 :ab<|im_end|>"
    assert data["rollout_log_probs"][2].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert data["raw_reward"] == [0.0, 1.0, 0.0, 1.0]
    assert data["rewards"] == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)
    assert data["num_microbatches"] == [4] and data["global_batch_sizes"] == [4]
    assert batch.metrics["rollout/raw_reward"] == 0.5
    assert batch.metrics["rollout/response_len/mean"] == 2.5
    assert batch.metrics["perf/rollout_time"] > 0
    assert batch.tokens == 11 + 11 + 12 + 12
    hf = manager.hf_config
    assert batch.forward_flops == 2 * (ForwardFlops(hf)(11, 2) + ForwardFlops(hf)(12, 3)) > 0
    assert prompts(manager.generate(1))[::2] == ["c len=3 :", "d len=4 :"]


def test_the_curriculum_sees_the_groups_that_a_filter_drops(build, tmp_path):
    """Prompts a and b get equal rewards and are dropped. The second epoch leaves them out."""
    named = write_lines(
        tmp_path / "named.jsonl",
        [{"input": f"{c} len=1 :", "label": str(i)} for i, c in enumerate("abcd")],
    )
    filters = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    manager = build(
        prompt_data=f"letters={named}",
        curriculum=0.0,
        custom_rm_path="test_manager.first_two_equal",
        dynamic_sampling_filter_path=filters,
    )
    first, second = manager.generate(0), manager.generate(1)
    assert prompts(first)[::2] == prompts(second)[::2] == ["c len=1 :", "d len=1 :"]
    assert first.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 2
    assert first.metrics["rollout/curriculum/seen"] == 4
    assert first.metrics["rollout/curriculum/solved"] == 0.5
    assert first.metrics["rollout/curriculum/passed_over"] == 0
    assert second.metrics["rollout/curriculum/passed_over"] == 2
    assert "rollout/dynamic_filter/drop_zero_std_1.0" not in second.metrics
    assert second.metrics["rollout/raw_reward/letters"] == 0.5
    assert second.metrics["rollout/group_share/letters"] == 1


async def first_two_equal(args, sample):
    return 1.0 if sample.prompt[0] in "ab" else float(sample.index % 2)


def test_samples_that_fill_no_step_are_no_work(build):
    """There are four samples in steps of three: the fourth is generated and not trained on."""
    batch = build(global_batch_size=3).generate(0)
    assert batch.metrics["rollout/samples_left_out"] == 1
    assert "rollout/samples_left_out" not in build().generate(0).metrics
    (data,) = batch.rank_data
    assert data["total_lengths"] == [11, 11, 12] and batch.tokens == 34
    split = build(global_batch_size=3, dp_size=3).generate(0)  # the same work in three parts
    assert [d["total_lengths"] for d in split.rank_data] == [[11], [11], [12]]
    assert (split.tokens, split.forward_flops) == (batch.tokens, batch.forward_flops)


def test_hooks_see_the_router(build):
    manager = build()
    assert (manager.args.vllm_router_ip, manager.args.vllm_router_port) == ("127.0.0.1", 30000)
    assert manager.state.args is manager.args
    assert not hasattr(manager.config, "vllm_router_port")


def test_data_parallel_ranks(build):
    batch = build(dp_size=2).generate(0)
    assert [data["sample_indices"] for data in batch.rank_data] == [[0, 2], [1, 3]]
    assert len(batch.rank_data[0]["tokens"]) == 2


def test_each_group_of_trainer_ranks_has_all_samples(build):
    """A critic has separate ranks: first come the parts of the policy's ranks, then those of the critic's."""
    flags = {"advantage_estimator": "ppo", "actor_num_gpus_per_node": 1}
    batch = build(**flags, critic_num_gpus_per_node=2).generate(0)
    assert [sorted(data["partition"]) for data in batch.rank_data] == [[0, 1, 2, 3], [0, 2], [1, 3]]
    assert batch.tokens == sum(batch.rank_data[0]["total_lengths"])
    alike = build(**flags, critic_devices="own").generate(0)
    assert len(alike.rank_data) == 2 and alike.rank_data[0] is alike.rank_data[1]  # stored once


def test_sft_has_no_engine(build, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]}
        for text in ("yo", "hello")
    ]
    manager = build(
        loss_type="sft_loss",
        rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
        prompt_data=write_lines(tmp_path / "chats.jsonl", rows),
        input_key="messages",
        label_key=None,
        n_samples_per_prompt=1,
        custom_rm_path=None,
    )
    batch = manager.generate(0)
    (data,) = batch.rank_data
    assert data["response_lengths"] == [4, 7]  # "yo", the end mark and a line break that is not trained on
    assert [mask.tolist() for mask in data["loss_masks"]] == [[1] * 3 + [0], [1] * 6 + [0]]
    assert "rollout_log_probs" not in data and data["rewards"] == [0.0, 0.0]
    assert list(batch.metrics) == ["perf/rollout_time", "perf/make_data_time", "perf/rollout_rss_gib"]
    assert batch.tokens == sum(data["total_lengths"])


def negated(args, samples):
    raw = [s.reward for s in samples]
    return raw, [-r for r in raw]


def twice_the_reward(args, samples):
    config = Config.from_args(_without_hook(args))
    data = convert_samples_to_train_data(config, Hooks(config), samples)
    return data | {"rewards": [2 * r for r in data["raw_reward"]]}


def _without_hook(args):
    return type(args)(**{**vars(args), "custom_convert_samples_to_train_data_path": None})


def record_and_say_done(rollout_id, args, samples, extra, time):
    LOGGED.append((rollout_id, args, samples, dict(extra), time))
    return True


def record_only(rollout_id, args, samples, extra, time):
    LOGGED.append((rollout_id, args, samples, dict(extra), time))


def record_eval(rollout_id, args, data, extra):
    LOGGED.append((rollout_id, args, data, dict(extra)))
    return True


def test_custom_rewards_and_conversion(build):
    (data,) = build(custom_reward_post_process_path="test_manager.negated").generate(0).rank_data
    assert data["rewards"] == [0.0, -1.0, 0.0, -1.0]
    path = "test_manager.twice_the_reward"
    (data,) = build(custom_convert_samples_to_train_data_path=path).generate(0).rank_data
    assert data["rewards"] == [0.0, 2.0, 0.0, 2.0]


def test_custom_rollout_log(build):
    manager = build(custom_rollout_log_function_path="test_manager.record_and_say_done")
    left = {name for name in manager.generate(1).metrics if not name.startswith("rl_kernel/")}
    of_the_process = {"perf/make_data_time", "perf/rollout_rss_gib"}  # the hook cannot compute them
    assert left == {"rollout/raw_reward", *of_the_process}  # slime's trainer logs it
    ((rollout_id, args, samples, extra, seconds),) = LOGGED
    assert rollout_id == 1 and args is manager.args and seconds > 0
    assert all(isinstance(s, Sample) for s in samples) and len(samples) == 4
    assert extra["rollout/raw_reward"] == 0.5
    other = build(custom_rollout_log_function_path="test_manager.record_only")
    assert (
        other.generate(0).metrics["rollout/raw_reward"] == 0.5
    )  # it does not report that nothing more shall be logged


def test_evaluation_and_its_log_hook(build, tmp_path):
    rows = [{"input": "x len=2 :", "label": "x"}, {"input": "y len=9 :", "label": "y"}]
    flags = {
        "eval_prompt_data": ["tiny", write_lines(tmp_path / "eval.jsonl", rows)],
        "n_samples_per_eval_prompt": 2,
        "eval_interval": 1,
    }
    metrics = build(**flags).evaluate(3).metrics
    assert metrics["eval/tiny"] == 0.5 and metrics["eval/tiny-truncated_ratio"] == 0.5
    manager = build(**flags, custom_eval_rollout_log_function_path="test_manager.record_eval")
    assert manager.evaluate(3) == Evaluated({}, [])
    ((rollout_id, args, data, extra),) = LOGGED
    assert rollout_id == 3 and args is manager.args and list(data) == ["tiny"]
    assert extra["eval/tiny"] == 0.5


def logged_rows(run_dir, key: str) -> dict[int, dict[str, float]]:
    """Returns step -> its metrics in metrics.jsonl. Each metric must occur once."""
    found: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.pop("step_key") == key:
            step = found.setdefault(row.pop("step"), {})
            assert not step.keys() & row.keys() - {"time"}
            step |= row
    return found


def test_a_plug_in_of_slime_logs_a_rollout_and_an_evaluation(build, tmp_path):
    """examples/plugins/answer_metrics.py logs through the driver's reporter to metrics.jsonl and TensorBoard. The
    files have the run's own metrics under the same step, and the plug-in's figures."""
    rows = [{"input": "x len=2 :", "label": "x"}, {"input": "y len=9 :", "label": "y"}]
    flags = {
        "eval_prompt_data": ["tiny", write_lines(tmp_path / "eval.jsonl", rows)],
        "n_samples_per_eval_prompt": 2,
        "eval_interval": 1,
        "log_passrate": True,
    }
    plain = build(**flags)
    wanted, wanted_eval = plain.generate(1).metrics, plain.evaluate(2).metrics
    manager = build(
        **flags,
        use_tensorboard=True,
        custom_rollout_log_function_path="answer_metrics.log_rollout",
        custom_eval_rollout_log_function_path="answer_metrics.log_evaluation",
    )
    report = Reporter(
        manager.config, make_trackers(manager.config, tmp_path, 0), StepLine(stream=(screen := io.StringIO()))
    )
    batch = manager.generate(1)
    assert "rollout/raw_reward" not in batch.metrics  # the plug-in has it
    report.rollout(1, batch)
    report.evaluation(2, manager.evaluate(2))
    report.close()
    (step, found), (eval_step, found_eval) = (
        item for key in ("rollout/step", "eval/step") for item in logged_rows(tmp_path, key).items()
    )
    assert (step, eval_step) == (1, 2)
    same = {name for name in wanted if name.startswith("rollout/")}
    assert {name: found[name] for name in same} == {name: wanted[name] for name in same} and len(same) > 10
    assert wanted.keys() <= found.keys()  # the times of perf/ differ
    assert {name: found_eval[name] for name in wanted_eval} == wanted_eval
    assert found_eval["eval/tiny-pass@2"] == 1.0 and found_eval["eval/tiny/response_len/max"] == 4
    assert found["answers/solved_prompts"] == 1.0 and found["answers/right"] == 2
    assert found["answers/right_response_len/max"] == wanted["rollout/response_len/max"]
    assert "0.500" in screen.getvalue() and "eval at step 2:" in screen.getvalue()
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "rollout"))
    shown.Reload()
    (point,) = shown.Scalars("answers/right")
    assert (point.step, point.value) == (1, 2.0)


def log_beside(rollout_id, args, samples, extra, time):
    """Adds to the run's own metrics, in this thread and in a separate one."""
    own = {"mine/samples": np.float32(len(samples)), "rollout/step": rollout_id}
    logging_utils.log(args, own, step_key="rollout/step")
    later = {"mine/at": torch.tensor(0.25), "train/step": 7}
    thread = threading.Thread(target=logging_utils.log, args=(args, later, "train/step"))
    thread.start()
    thread.join()


def log_evaluation_as_a_rollout(rollout_id, args, data, extra):
    logging_utils.log(args, {"mine/eval": 1, "rollout/step": rollout_id}, step_key="rollout/step")


def test_what_else_a_plug_in_logs_goes_with_the_next_answer(build, tmp_path):
    rows = [{"input": "x len=2 :", "label": "x"}]
    flags = {"eval_prompt_data": ["tiny", write_lines(tmp_path / "eval.jsonl", rows)], "eval_interval": 1}
    manager = build(
        **flags,
        custom_rollout_log_function_path="test_manager.log_beside",
        custom_eval_rollout_log_function_path="test_manager.log_evaluation_as_a_rollout",
    )
    batch = manager.generate(1)
    assert "rollout/raw_reward" in batch.metrics
    assert batch.logged == [
        Logged({"mine/at": 0.25}, 7, "train/step"),
        Logged({"mine/samples": 4.0}, 1, "rollout/step"),
    ]
    evaluated = manager.evaluate(2)
    assert "eval/tiny" in evaluated.metrics
    assert evaluated.logged == [Logged({"mine/eval": 1.0}, 2, "rollout/step")]
    assert manager.generate(2).logged[1].metrics == {"mine/samples": 4.0}  # each metric comes once


def test_data_position_is_saved_and_loaded(build, tmp_path):
    """A checkpoint includes the position. A manager that loads rollout 2 continues with the third pair of prompts."""
    folder = tmp_path / "ckpt"
    flags = {"save": str(folder), "load": str(folder), "save_interval": 2}
    manager = build(**flags)
    manager.load(0)  # there is no position yet, so it starts fresh
    batches = [manager.generate(i, saves=i > 0) for i in range(3)]
    names = sorted(path.name for path in (folder / "rollout").iterdir())
    assert names == ["data_state_1.json", "data_state_2.json"]
    resumed = build(**flags)
    resumed.load(2)
    again = resumed.generate(2)
    assert prompts(again) == prompts(batches[2]) == ["e len=5 :"] * 2 + ["f len=6 :"] * 2
    for a, b in zip(again.rank_data[0]["tokens"], batches[2].rank_data[0]["tokens"], strict=True):
        assert torch.equal(a, b)
    assert again.rank_data[0]["sample_indices"] == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="--load must hold the data position of rollout 0"):
        build(**flags).load(1)


@pytest.mark.parametrize(("staleness", "left"), [(0, [0, 3, 4]), (1, [0, 2, 3, 4])])
def test_positions_of_rollouts_that_may_be_the_last(build, tmp_path, staleness, left):
    """Ctrl-C saves the last step. So the manager keeps positions of rollouts that may be the last, and removes
    older positions except those of a checkpoint."""
    flags = {"save": str(tmp_path), "load": str(tmp_path), "max_staleness": staleness, "colocate": False}
    manager = build(**flags)
    for rollout in range(5):
        if staleness:
            manager.state.allow(rollout + staleness, rollout)
        manager.generate(rollout, saves=rollout == 0, may_be_last=True)
    names = sorted(path.name for path in (tmp_path / "rollout").iterdir())
    assert names == [f"data_state_{i}.json" for i in left]


def test_replay_of_saved_samples(build, tmp_path):
    template = str(tmp_path / "debug" / "{rollout_id}.pt")
    batch = build(save_debug_rollout_data=template).generate(5)
    replay = build(load_debug_rollout_data=template)
    replay.state.engine = None
    again = replay.generate(5)
    for name, column in batch.rank_data[0].items():
        other = again.rank_data[0][name]
        pairs = zip(column, other, strict=True)
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs), name
    half = build(load_debug_rollout_data=template, load_debug_rollout_data_subsample=0.5, global_batch_size=2)
    assert half.generate(5).rank_data[0]["sample_indices"] == [0, 1]


def one_bad_group(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(1)
    for sample in groups[0]:
        sample.tokens, sample.response_length, sample.reward = [1, 2, 3], 2, 1.0
    for sample in groups[0][1:]:
        sample.rollout_log_probs = [-1.0, -1.0]
    return RolloutFnTrainOutput(groups)


def test_samples_of_a_custom_rollout_are_checked(build):
    manager = build(rollout_function_path="test_manager.one_bad_group", global_batch_size=2)
    with pytest.raises(
        ValueError, match="rollout_log_probs must .* got none for 2 tokens of sample 0 of group 0"
    ):
        manager.generate(0)
