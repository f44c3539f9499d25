"""Tests evaluation datasets, metrics by hand, replay files, and HTTP for hooks."""

from __future__ import annotations

import asyncio
import pickle
import random

import pytest
import torch
from aiohttp import web
from rollout_double import make_args, make_state, write_lines

from slime.config.schema import Config
from slime.rollout.debug_data import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout.eval_datasets import resolve_eval_datasets
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.metrics import (
    compute_statistics,
    ends_in_repetition,
    eval_metrics,
    pass_rate,
    rollout_metrics,
    sample_metrics,
)
from slime.rollout.state import request_seed
from slime.rollout.vllm_rollout import generate_rollout
from slime.types import Sample
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.http_utils import post

STATUS = Sample.Status


async def label_reward(args, sample):
    return {"right": float(sample.response == sample.label), "type": sample.metadata.get("rm_type")}


def config_of(**flags):
    return Config.from_args(make_args(**flags))


def evaluated(tmp_path, yaml_text=None, **flags):
    args = make_args(custom_rm_path="test_rollout_evaluation.label_reward", eval_reward_key="right", **flags)
    if yaml_text is not None:
        (tmp_path / "eval.yaml").write_text(yaml_text)
        args.eval_config = str(tmp_path / "eval.yaml")
    state = make_state(args)
    return args, state


def test_eval_prompt_data_falls_back_to_the_training_flags(tmp_path):
    args, _ = evaluated(
        tmp_path,
        eval_prompt_data=["a", "x.jsonl", "b", "y.jsonl@[0:5]"],
        eval_top_p=0.5,
        eval_temperature=0.0,
        rollout_stop=["\n"],
        n_samples_per_eval_prompt=4,
    )
    first, second = resolve_eval_datasets(Config.from_args(args))
    assert (first.name, first.path, second.name, second.path) == ("a", "x.jsonl", "b", "y.jsonl@[0:5]")
    assert (first.temperature, first.top_p, first.top_k, first.max_response_len) == (0.0, 0.5, -1, 8)
    assert (first.stop, first.n_samples_per_eval_prompt, first.input_key) == (["\n"], 4, "prompt")
    assert resolve_eval_datasets(config_of()) == []


@pytest.mark.parametrize("nested", [False, True])
def test_eval_config_file(tmp_path, nested):
    text = "defaults: {top_k: 5, rm_type: math}\ndatasets:\n- {name: a, path: x.jsonl, temperature: 0.2}\n"
    text += "- {name: b, path: y.jsonl, top_k: 7, label_key: answer, n_samples_per_eval_prompt: 3}\n"
    if nested:
        text = "eval:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    args, _ = evaluated(tmp_path, text, eval_top_k=1)
    first, second = resolve_eval_datasets(Config.from_args(args))
    assert (first.temperature, first.top_k, first.rm_type, first.label_key) == (0.2, 5, "math", None)
    assert (second.temperature, second.top_k, second.label_key) == (1.0, 7, "answer")
    assert (first.n_samples_per_eval_prompt, second.n_samples_per_eval_prompt) == (1, 3)


def test_eval_config_by_name_and_the_plug_in_path(tmp_path):
    args, _ = evaluated(tmp_path, "datasets: {a: {path: x.jsonl}, b: {path: y.jsonl}}")
    assert [config.name for config in resolve_eval_datasets(Config.from_args(args))] == ["a", "b"]
    (config,) = build_eval_dataset_configs(args, [{"name": "c", "path": "z.jsonl"}], {"top_p": 0.1})
    assert (config.name, config.top_p) == ("c", 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "datasets: [{name: a, path: x, temprature: 1}]",
            r"known settings, got 'temprature'; did you mean temperature",
        ),
        ("datasets: [{name: a}]", "every dataset a name and a path, got {'name': 'a'}"),
        ("datasets: [{name: a, path: x}, {name: a, path: y}]", r"different names, got \['a'\]"),
        ("sets: []", "--eval-config must hold a `datasets` entry"),
        ("datasets: [", "--eval-config must be YAML"),
    ],
)
def test_eval_config_errors(tmp_path, text, message):
    args, _ = evaluated(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        resolve_eval_datasets(Config.from_args(args))


def test_eval_flag_errors(tmp_path):
    with pytest.raises(ValueError, match="--eval-prompt-data must be pairs of name and path, got 1"):
        resolve_eval_datasets(config_of(eval_prompt_data=["x.jsonl"]))
    with pytest.raises(ValueError, match=r"--eval-config must name an existing file, got .*none\.yaml"):
        resolve_eval_datasets(config_of(eval_config=str(tmp_path / "none.yaml")))
    args = make_args()
    make_state(args)
    with pytest.raises(ValueError, match="--eval-prompt-data or --eval-config must name a dataset"):
        generate_rollout(args, 0, None, evaluation=True)


def test_two_datasets_in_one_pass(tmp_path):
    short = write_lines(
        tmp_path / "short.jsonl", [{"prompt": f"q len={n} :", "label": "ab<|im_end|>"} for n in (2, 3)]
    )
    long = write_lines(tmp_path / "long.jsonl", [{"q": "q len=7 :", "a": "abcde"}])
    text = f"datasets:\n- {{name: short, path: {short}, label_key: label, n_samples_per_eval_prompt: 2}}\n"
    text += (
        f"- {{name: long, path: {long}, input_key: q, label_key: a, max_response_len: 5, rm_type: exact}}\n"
    )
    args, state = evaluated(tmp_path, text, log_passrate=True)
    data = generate_rollout(args, 4, None, evaluation=True).data
    assert list(data) == ["short", "long"]
    assert data["short"]["rewards"] == [1.0, 1.0, 0.0, 0.0] and data["short"]["truncated"] == [False] * 4
    assert data["long"]["rewards"] == [1.0] and data["long"]["truncated"] == [True]
    assert data["long"]["samples"][0].reward["type"] == "exact"
    assert [s.index for s in data["short"]["samples"]] == [0, 1, 2, 3]
    seeds = {seed for _, _, seed in state.engine.calls}
    want = {request_seed(42, f"eval/short/4/{i}", 0) for i in range(4)} | {
        request_seed(42, "eval/long/4/0", 0)
    }
    assert seeds == want and state.progress == (5, 5)
    limits = {text: params["max_new_tokens"] for text, params, _ in state.engine.calls}
    assert limits == {"q len=2 :": 8, "q len=3 :": 8, "q len=7 :": 5}

    metrics = eval_metrics(Config.from_args(args), data)
    assert metrics["eval/short"] == 0.5 and metrics["eval/long"] == 1.0
    assert metrics["eval/short-truncated_ratio"] == 0.0 and metrics["eval/long-truncated_ratio"] == 1.0
    assert metrics["eval/short-pass@1"] == 0.5 and metrics["eval/short-pass@2"] == 0.5
    assert "eval/long-pass@2" not in metrics and metrics["eval/long-pass@1"] == 1.0
    assert metrics["eval/short/response_len/mean"] == 3.5 and metrics["eval/long/truncated_ratio"] == 1.0
    assert metrics["eval/short/zero_std/count_1.0"] == metrics["eval/short/zero_std/count_0.0"] == 1
    again = generate_rollout(args, 4, None, evaluation=True).data
    assert [s.to_dict() for s in again["short"]["samples"]] == [s.to_dict() for s in data["short"]["samples"]]


def test_evaluation_has_its_own_context_limit(tmp_path):
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": "q len=7 :", "label": "0"}, {"prompt": "x" * 30, "label": "0"}]
    )
    args, state = evaluated(
        tmp_path,
        eval_prompt_data=["d", path],
        rollout_max_context_len=10,
        eval_max_context_len=12,
        label_key="label",
    )
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert [s.response for s in data["d"]["samples"]] == ["abc"]  # 9 + 3 tokens; the long prompt is left out
    assert "max_context_len" not in state.engine.calls[0][1]


def test_late_responses_are_left_out_and_reported(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": p, "label": "abc<|im_end|>"} for p in ("q", "late")])
    args, _ = evaluated(tmp_path, eval_prompt_data=["d", path], label_key="label")
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert data["d"]["rewards"] == [1.0] and len(data["d"]["samples"]) == 2
    metrics = eval_metrics(Config.from_args(args), data)
    assert metrics["eval/d"] == 1.0 and metrics["eval/d-aborted_ratio"] == 0.5
    args.eval_prompt_data = ["e", path + "@[1:]"]
    with pytest.raises(
        TimeoutError, match=r"no response of evaluation dataset e within it; last: .*connection refused"
    ):
        generate_rollout(args, 0, None, evaluation=True)


def sample(reward, length, group, status=STATUS.COMPLETED, **fields):
    mask = fields.pop("loss_mask", [1] * length)
    return Sample(
        reward=reward, response_length=length, loss_mask=mask, group_index=group, status=status, **fields
    )


def test_rollout_metrics_by_hand():
    groups = [
        [sample(1.0, 4, 0), sample(1.0, 6, 0, STATUS.TRUNCATED, response="ab" * 60)],
        [sample(0.0, 2, 1, loss_mask=[1, 0]), sample(1.0, 8, 1, non_generation_time=2.0)],
    ]
    groups[0][0].prefix_cache_info = Sample.PrefixCacheInfo(cached_tokens=3, total_prompt_tokens=12)
    groups[1][0].spec_info = Sample.SpecInfo(
        spec_accept_token_num=6, spec_draft_token_num=8, spec_verify_ct=2, completion_token_num=8
    )
    metrics = rollout_metrics(config_of(rollout_num_gpus=2, log_passrate=True), groups, rollout_time_s=4.0)
    assert metrics == {
        "rollout/response_len/mean": 4.75,  # 4, 6, 1, 8 trained tokens
        "rollout/response_len/median": 5.0,
        "rollout/response_len/max": 8,
        "rollout/response_len/min": 1,
        "rollout/truncated_ratio": 0.25,
        "rollout/repetition_frac": 0.25,
        "rollout/zero_std/count_1.0": 1,
        "rollout/prefix_cache_hit_rate": 0.25,
        "rollout/avg_cached_tokens_per_sample": 0.75,
        "rollout/spec_accept_rate": 0.75,
        "rollout/spec_accept_length": 4.0,
        "rollout/raw_reward": 0.75,
        "rollout/passrate/pass@1": 0.75,
        "rollout/passrate/pass@2": 1.0,
        "perf/rollout_time": 4.0,
        "perf/non_generation_time/mean": 0.5,
        "perf/non_generation_time/median": 0.0,
        "perf/non_generation_time/max": 2.0,
        "perf/non_generation_time/min": 0.0,
        "perf/tokens_per_gpu_per_sec": 20 / 4 / 2,
        "perf/longest_sample_tokens_per_sec": 2.0,
        "perf/longest_sample_non_generation_time": 2.0,
        "perf/longest_sample_tokens_per_sec_without_non_generation": 4.0,
        "perf/effective_tokens_per_gpu_per_sec": 19 / 4 / 2,
        "perf/longest_effective_sample_tokens_per_sec": 2.0,
        "perf/longest_effective_sample_non_generation_time": 2.0,
        "perf/longest_effective_sample_tokens_per_sec_without_non_generation": 4.0,
    }
    groups[1][1].non_generation_time = 5.0  # most of the time was in earlier rollouts
    later = rollout_metrics(config_of(), groups, rollout_time_s=4.0)
    assert later["perf/longest_sample_non_generation_time"] == 5.0
    assert not [name for name in later if name.endswith("without_non_generation")]
    groups[1][1].non_generation_time = 0.0
    assert not [name for name in rollout_metrics(config_of(), groups, 4.0) if "non_generation" in name]


def test_optional_metrics_by_hand():
    args = config_of(
        log_multi_turn=True, log_correct_samples=True, reward_key="score", log_reward_category="kind"
    )
    group = [
        sample({"score": 1, "kind": "ok"}, 6, 0, loss_mask=[1, 1, 0, 0, 1, 1]),
        sample({"score": 0, "kind": "format"}, 2, 0),
    ]
    metrics = sample_metrics(args.logging, args.reward.reward_key, [group])
    assert metrics["error_cat/ok"] == metrics["error_cat/format"] == 0.5
    assert metrics["multi_turn/raw_response_len/mean"] == 4.0
    assert metrics["multi_turn/wo_obs_response_len/mean"] == 3.0
    assert (metrics["multi_turn/rounds/max"], metrics["multi_turn/rounds/min"]) == (2, 1)
    assert metrics["correct_response_len/mean"] == 4.0


def test_a_small_negative_reward_is_counted_as_zero():
    groups = [[sample(value, 4, g), sample(value, 6, g)] for g, value in enumerate((-0.0, -0.04, 0.0))]
    counts = {k: v for k, v in rollout_metrics(config_of(), groups, 4.0).items() if "zero_std" in k}
    assert counts == {"rollout/zero_std/count_0.0": 3} and list(counts) == ["rollout/zero_std/count_0.0"]
    assert check_reward_nonzero_std(make_args(), groups[1]).reason == "zero_std_0.0"


def test_pass_rate_by_hand():
    # The groups of 4 have 1 and 2 right: pass@1 = (1/4 + 2/4) / 2, pass@2 = (1 - 3/6 + 1 - 1/6) / 2, pass@4 = 1.
    rates = pass_rate([[1, 0, 0, 0], [0, 1.0, 1.0, 0.5]])
    assert rates == pytest.approx({"pass@1": 0.375, "pass@2": 2 / 3, "pass@4": 1.0})
    assert compute_statistics([3.0, 1.0]) == {"mean": 2.0, "median": 2.0, "max": 3.0, "min": 1.0}


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("", False),
        ("a" * 99, False),
        ("a" * 100, True),
        ("start " + "so I check it again. " * 5, True),
        ("so I check it again. " * 3, False),
        ("x" + "abcdefghij" * 10 + "abc", True),  # the text is cut in the middle of the unit
        ("a" * 200 + " end", False),
        ("".join(chr(33 + i % 90) for i in range(180)), False),
        ("".join(chr(33 + (i * i) % 90) for i in range(150)) * 4, True),
    ],
)
def test_repetition(text, loops):
    assert ends_in_repetition(text) is loops


def test_repetition_of_any_text():
    """The repetition check equals the definition, unit by unit, over texts of few letters, in which loops are
    common."""

    def by_definition(text: str) -> bool:
        lengths = {unit: max(100, 4 * unit) for unit in range(1, 201)}
        return any(
            len(text) >= n and all(text[-i] == text[-i - unit] for i in range(1, n - unit + 1))
            for unit, n in lengths.items()
        )

    draw = random.Random(0)
    found = []
    for _ in range(300):
        unit = "".join(draw.choices("ab", k=draw.randint(1, 60)))
        text = "".join(draw.choices("ab", k=5)) + unit * draw.randint(1, 9) + "a" * draw.randint(0, 1)
        found.append(ends_in_repetition(text))
        assert found[-1] is by_definition(text), text
    assert 50 < sum(found) < 250


def test_replay_files_hold_plain_values(tmp_path):
    groups = [
        [sample(1.0, 2, g, index=2 * g + i, tokens=[1, 2, 3], metadata={"k": [g]}) for i in range(2)]
        for g in (4, 5, 6)
    ]
    groups[0][0].status = STATUS.TRUNCATED
    template = str(tmp_path / "dump" / "rollout_{rollout_id}.pt")
    assert save_debug_rollout_data(template, 3, groups).name == "rollout_3.pt"
    loaded = load_debug_rollout_data(template, 3)
    assert [[s.to_dict() for s in g] for g in loaded] == [[s.to_dict() for s in g] for g in groups]
    assert [g[0].group_index for g in load_debug_rollout_data(template, 3, subsample=0.5)] == [4, 5]
    assert save_debug_rollout_data(template, 3, groups, evaluation=True).name == "rollout_eval_3.pt"
    with pytest.raises(
        ValueError, match=r"--load-debug-rollout-data must name a saved rollout, got no file .*_7\.pt"
    ):
        load_debug_rollout_data(template, 7)
    with pytest.raises(ValueError, match="--load-debug-rollout-data-subsample must lie in"):
        load_debug_rollout_data(template, 3, subsample=2)
    with pytest.raises(ValueError, match=r"must hold no braces but \{rollout_id\}"):
        save_debug_rollout_data(str(tmp_path / "{step}.pt"), 3, groups)
    torch.save({"samples": [pickle.Pickler]}, tmp_path / "rollout_8.pt")
    with pytest.raises(ValueError, match="--load-debug-rollout-data must hold plain values"):
        load_debug_rollout_data(str(tmp_path / "rollout_{rollout_id}.pt"), 8)


def test_post_retries_and_gives_up():
    seen = []

    async def handle(request):
        seen.append((request.headers.get("Authorization"), await request.json()))
        if request.path == "/flaky" and len(seen) == 1:
            return web.Response(status=503)
        if request.path == "/wrong":
            return web.Response(status=400, text="no such field")
        if request.path == "/text":
            return web.Response(text="hello")
        return web.json_response({"ok": len(seen)}, status=503 if request.path == "/down" else 200)

    async def main():
        app = web.Application()
        app.router.add_post("/{name}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            assert await post(f"{base}/flaky", {"a": 1}, headers={"Authorization": "Bearer k"}) == {"ok": 2}
            assert seen == [("Bearer k", {"a": 1})] * 2
            with pytest.raises(ValueError, match="must accept the request, got HTTP 400: no such field"):
                await post(f"{base}/wrong", {})
            with pytest.raises(ValueError, match="must answer in JSON, got 'hello'"):
                await post(f"{base}/text", {})
            with pytest.raises(
                TimeoutError, match=r"2 failed attempts; the last one with ConnectionError: HTTP 503"
            ):
                await post(f"{base}/down", {}, max_retries=1)
            with pytest.raises(TimeoutError, match=r"must answer within 0\.3 s"):
                await post(f"{base}/down", {}, deadline_s=0.3)
        finally:
            await runner.cleanup()

    asyncio.run(main())
