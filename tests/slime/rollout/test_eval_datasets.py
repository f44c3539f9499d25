"""Tests settings of evaluation datasets: the fields of the file are checked before anything starts."""

from __future__ import annotations

import pytest
from rollout_double import make_args, make_state, write_lines

from slime.config.schema import Config, read_section
from slime.config.sections.rollout import RolloutConfig
from slime.rollout.eval_datasets import check_evaluation, resolve_eval_datasets
from slime.rollout.evaluation import _sampling_params
from slime.rollout.vllm_rollout import generate_rollout


def resolved(tmp_path, text: str, **flags):
    (tmp_path / "eval.yaml").write_text(text)
    return resolve_eval_datasets(
        Config.from_args(make_args(eval_config=str(tmp_path / "eval.yaml"), **flags))
    )


def one(setting: str) -> str:
    return f"datasets: [{{name: a, path: x.jsonl, {setting}}}]"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temperature: hot", "temperature of dataset 'a' must be a number, got 'hot' \\(str\\); fix"),
        ("temperature: true", "temperature of dataset 'a' must be a number, got True \\(bool\\)"),
        ("temperature: -0.1", "temperature of dataset 'a' must be 0 or more, got -0.1"),
        ("temperature: .nan", "temperature of dataset 'a' must be a finite number, got nan"),
        ("top_p: 1.5", r"top_p of dataset 'a' must lie in \(0, 1\], got 1.5"),
        ("top_k: 0", r"top_k of dataset 'a' must be -1 \(off\) or above 0, got 0"),
        ("top_k: 5.0", "top_k of dataset 'a' must be a whole number, got 5.0"),
        ("max_response_len: 64.0", "max_response_len of dataset 'a' must be a whole number, got 64.0"),
        ("max_response_len: 99999999999", "max_response_len of dataset 'a' must be at most 2147483647"),
        ("max_prompt_len: '64'", "max_prompt_len of dataset 'a' must be a whole number, got '64'"),
        ("max_context_len: 0", "max_context_len of dataset 'a' must be above 0, got 0"),
        ("n_samples_per_eval_prompt: 0", "n_samples_per_eval_prompt of dataset 'a' must be above 0"),
        ("n_samples_per_eval_prompt: [2]", "n_samples_per_eval_prompt of dataset 'a' must be a whole number"),
        ("min_new_tokens: -1", "min_new_tokens of dataset 'a' must be 0 or more, got -1"),
        ("min_new_tokens: 9", "min_new_tokens of dataset 'a' must be at most max_response_len 8, got 9"),
        ("stop: 5", "stop of dataset 'a' must be a text or a list of texts, got 5"),
        ("stop: [x, 5]", "stop of dataset 'a' must be a text or a list of texts"),
        ("stop_token_ids: [x]", "stop_token_ids of dataset 'a' must be a list of token ids"),
        ("apply_chat_template: 1", "apply_chat_template of dataset 'a' must be true or false, got 1"),
        ("apply_chat_template_kwargs: [x]", "apply_chat_template_kwargs of dataset 'a' must be a mapping"),
        ("metadata_overrides: x", "metadata_overrides of dataset 'a' must be a mapping"),
        ("label_key: 5", "label_key of dataset 'a' must be a text, got 5"),
        ("input_key: ''", "input_key of dataset 'a' must be a text, got ''"),
        ("rm_type: mth", "rm_type of dataset 'a' must be one of .*, got 'mth'; did you mean 'math'"),
        ("metadata_overrides: {rm_type: zzz}", "rm_type in metadata_overrides of dataset 'a' must be one of"),
        ("rm_type: remote_rm", "--rm-url must be given with rm_type remote_rm of dataset 'a'"),
        ("custom_rm_path: no.such", "custom_rm_path of dataset 'a' must name a module that can be imported"),
        (
            "custom_generate_function_path: x",
            "custom_generate_function_path of dataset 'a' must be a dotted path",
        ),
        ("max_response_len: null", "max_response_len of dataset 'a' must be a number, got none"),
        ("temprature: 1", "dataset 'a' must have known settings, got 'temprature'; did you mean temperature"),
    ],
)
def test_a_wrong_setting_names_dataset_and_key(tmp_path, setting, message):
    with pytest.raises(ValueError, match=f"(--eval-config: )?{message}"):
        resolved(tmp_path, one(setting))
    with pytest.raises(ValueError, match=message.replace("dataset 'a' must have", "defaults must have")):
        resolved(tmp_path, f"defaults: {{{setting}}}\ndatasets: [{{name: a, path: x.jsonl}}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: x.jsonl", "must hold `datasets` as a list or mapping of settings"),
        ("datasets: {a: x.jsonl}", "must hold `datasets` as a list or mapping of settings"),
        ("datasets: [x.jsonl]", "must hold `datasets` as a list or mapping of settings"),
        ("defaults: 5\ndatasets: [{name: a, path: x}]", "and `defaults` as settings, got .* and 5"),
        ("default: {top_k: 1}\ndatasets: [{name: a, path: x}]", r"`defaults` only, got \['default'\]"),
        ("datasets: [{name: 5, path: x}]", "every dataset a name and a path, got {'name': 5"),
        ("datasets: [{name: a, path: [x]}]", "every dataset a name and a path"),
        (
            "defaults: {name: b}\ndatasets: [{name: a, path: x}]",
            "defaults must have known settings, got 'name'",
        ),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        resolved(tmp_path, text)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "eval.yaml").write_bytes(b"datasets: \xff")
    with pytest.raises(ValueError, match=r"--eval-config must be YAML, got .*eval\.yaml"):
        resolve_eval_datasets(Config.from_args(make_args(eval_config=str(tmp_path / "eval.yaml"))))


def test_null_overrides_the_flag_where_none_is_a_value(tmp_path):
    flags = {"rollout_stop": ["\n"], "rollout_stop_token_ids": [3], "rollout_max_context_len": 99}
    names = ("stop", "stop_token_ids", "max_context_len", "max_prompt_len", "label_key", "tool_key")
    text = one(", ".join(f"{name}: null" for name in names))
    (config,) = resolved(tmp_path, text, **flags, label_key="label", rollout_max_prompt_len=5)
    assert [getattr(config, name) for name in names] == [None] * len(names)
    args = make_args(**flags)
    params = _sampling_params(read_section(RolloutConfig, args), config)
    assert params["stop"] is params["stop_token_ids"] is params["max_context_len"] is None
    (config,) = resolved(tmp_path, "defaults: {stop: x, rm_type: f1}\n" + one("stop: null, rm_type: null"))
    assert config.stop is None and config.rm_type is None
    (config,) = resolved(tmp_path, one("temperature: null, top_p: null"), rollout_top_p=0.5)
    assert (config.temperature, config.top_p) == (1.0, 0.5), "no value: the flag's"
    (config,) = resolved(tmp_path, one("max_response_len: null"), rollout_max_context_len=50)
    assert config.max_response_len is None and config.max_context_len == 50


def test_a_reward_function_of_the_user_knows_its_own_names(tmp_path):
    (config,) = resolved(tmp_path, one("rm_type: exact"), custom_rm_path="my.reward")
    assert config.rm_type == "exact"
    (config,) = resolved(tmp_path, one("rm_type: boxed_math, top_k: -1, stop: [a], temperature: 0"))
    assert (config.rm_type, config.stop, config.temperature) == ("boxed_math", ["a"], 0)


def test_the_shorter_of_two_limits_counts(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * n, "label": "1"} for n in (3, 9, 20)])
    text = (
        f"datasets: [{{name: a, path: {path}, max_prompt_len: 15, max_context_len: 8, max_response_len: 2}}]"
    )
    (tmp_path / "eval.yaml").write_text(text)
    args = make_args(eval_config=str(tmp_path / "eval.yaml"), rm_type="f1", label_key="label")
    make_state(args)
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert [sample.prompt for sample in data["a"]["samples"]] == ["xxx"]


def test_it_is_a_rule_of_the_start(tmp_path, checkpoint):
    path = write_lines(tmp_path / "d.jsonl", [{"input": "x", "label": "1"}])
    (tmp_path / "eval.yaml").write_text("datasets: [{name: held, path: d.jsonl, top_p: 7}]")
    flags = f"--hf-checkpoint {checkpoint} --prompt-data {path} --num-rollout 1 --rollout-batch-size 1"
    flags += f" --rollout-max-response-len 8 --eval-interval 1 --eval-config {tmp_path / 'eval.yaml'}"
    flags += " --n-samples-per-prompt 2 --rm-type math --label-key label"
    from vime.backends import parse_config

    with pytest.raises(ValueError, match=r"top_p of dataset 'held' must lie in"):
        parse_config(flags.split(), (check_evaluation,))
