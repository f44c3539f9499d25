"""Tests rows of preference pairs: text and messages, with and without a prompt, each named error, and the rollout."""

from __future__ import annotations

import pytest
from rollout_double import make_args, make_state, make_tokenizer, write_lines

from slime.config.sections.data import DataConfig
from slime.config.sections.megatron import MegatronConfig
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns
from slime.data.siblings import plan_held_out, plan_together
from slime.data.source import PromptDataSource
from slime.rollout.sft_rollout import generate_pairs

PAIR = RowColumns(input_key="prompt", chosen_key="chosen", rejected_key="rejected")
HF = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def loaded(tmp_path, row):
    return load_prompts(write_lines(tmp_path / "pairs.jsonl", [row]), PAIR)[0]


OLD = {"step_loss_mask": 0}
WANTED = {
    "chosen": [user("1+1", **OLD), assistant("2")],
    "rejected": [user("1+1", **OLD), assistant("3")],
}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": [user("1+1")], "chosen": [assistant("2")], "rejected": [assistant("3")]},
        {"chosen": [user("1+1"), assistant("2")], "rejected": [user("1+1"), assistant("3")]},
        {"prompt": "1+1", "chosen": [user("1+1"), assistant("2")], "rejected": [user("1+1"), assistant("3")]},
    ],
)
def test_every_form_of_a_pair(tmp_path, row):
    prompt = loaded(tmp_path, {"metadata": {"source": "a"}, **row})
    assert prompt.metadata == {"source": "a", **WANTED} and prompt.text == WANTED["chosen"]


def test_turns_that_both_have_are_not_trained(tmp_path):
    start = [user("a"), assistant("b"), user("c")]
    row = {"prompt": start, "chosen": "d", "rejected": [assistant("e"), user("f"), assistant("g")]}
    found = loaded(tmp_path, row).metadata
    old = [{**turn, **OLD} for turn in start]
    assert found["chosen"] == [*old, assistant("d")]
    assert found["rejected"] == [*old, assistant("e"), user("f"), assistant("g")]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "a", "chosen": "b"}, "column 'rejected' is missing, got columns .*set --rejected-key"),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "column 'rejected' must be a text or a list of messages",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "the responses of a pair must differ in an assistant",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            r"column 'prompt' is missing, got columns \['chosen', 'rejected'\]; set --input-key",
        ),
        ({"prompt": "a", "chosen": [{"content": "x"}], "rejected": "c"}, "must be an object with a role"),
        (
            {"prompt": "a", "chosen": [{"from": "gpt", "value": "x"}], "rejected": "c"},
            "must have role and content, got .*the form of ShareGPT; convert each with",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, rule):
    with pytest.raises(ValueError, match=f"pairs.jsonl:1: .*{rule}|{rule}"):
        loaded(tmp_path, row)


def test_pairs_become_samples(tmp_path):
    rows = [{"prompt": f"{i}+1", "chosen": "2", "rejected": "34"} for i in range(3)]
    args = make_args(
        prompt_data=write_lines(tmp_path / "pairs.jsonl", rows),
        input_key="prompt",
        loss_type="dpo",
        rollout_batch_size=3,
        n_samples_per_prompt=1,
    )
    make_state(args, None)
    groups = generate_pairs(args, 0, PromptDataSource(args)).samples
    tokenizer = make_tokenizer()
    assert len(groups) == 3
    for i, (chosen, rejected) in enumerate(groups):
        assert chosen.rollout_id == rejected.rollout_id == i and chosen.group_index == rejected.group_index
        for sample, answer, sign in ((chosen, "2", 1.0), (rejected, "34", -1.0)):
            assert sample.columns["preference"] == [sign] * sample.response_length
            trained = [
                t
                for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
                if m
            ]
            assert tokenizer.decode(trained) == answer + "<|im_end|>"
            assert f"{i}+1" in tokenizer.decode(sample.tokens)
    args.eval_prompt_data = ["held", write_lines(tmp_path / "held.jsonl", rows[1:])]
    held = generate_pairs(args, 0, None, evaluation=True).data["held"]["samples"]
    for one, same in zip(held, [sample for pair in groups[1:] for sample in pair], strict=True):
        assert (one.tokens, one.loss_mask, one.columns) == (same.tokens, same.loss_mask, same.columns)
    assert [one.rollout_id for one in held] == [0, 0, 1, 1]


@pytest.mark.parametrize("long", ["chosen", "rejected"])
def test_limits_look_at_both_responses(tmp_path, caplog, long):
    """Limits also apply to the rejected response."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "1+1", "chosen": "2", "rejected": "3"} for _ in range(3)]
    rows[1] = {**rows[1], long: "x" * 40}  # 64 tokens
    path = write_lines(tmp_path / "pairs.jsonl", rows)

    def load(context, **flags):
        (tmp_path / "model/config.json").write_text(f'{{"max_position_embeddings": {context}}}')
        args = make_args(
            prompt_data=path,
            hf_checkpoint=str(tmp_path / "model"),
            loss_type="dpo",
            rollout_function_path="slime.rollout.sft_rollout.generate_pairs",
            **flags,
        )
        return len(PromptDataSource(args))

    assert load(64) == 3 == load(64, rollout_max_context_len=64)
    assert load(64, rollout_max_context_len=63) == 2 == load(64, rollout_max_prompt_len=63)
    assert "1 of 3 prompts" in caplog.text
    with pytest.raises(
        ValueError, match=rf"context of 63 tokens .* got 1 of 3 .* has 64 tokens at {path}:2; "
    ):
        load(63)


def test_a_pair_without_a_mask_is_found_in_the_file(tmp_path):
    make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model/config.json").write_text("{}")
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    flags = {"loss_type": "dpo", "rollout_function_path": "slime.rollout.sft_rollout.generate_pairs"}
    with pytest.raises(ValueError, match=rf"{path}:1: --loss-mask-type qwen must match the chat template"):
        PromptDataSource(make_args(prompt_data=path, hf_checkpoint=str(tmp_path / "model"), **flags))


def test_samples_of_a_rollout_share_a_micro_batch():
    lengths, rollouts = [9, 3, 4, 4, 8, 8, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]
    dynamic = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16, global_batch_size=4)
    found = plan_together(dynamic, MegatronConfig(), lengths, rollouts, 2, HF, lengths)
    bins = [of_bin for rank in found.ranks for step in rank for of_bin in step]
    assert all(b[k + 1] == b[k] + 1 and b[k] % 2 == 0 for b in bins for k in range(0, len(b), 2))
    assert sorted(i for b in bins for i in b) == list(range(8))
    assert found.global_batch_sizes == [4]
    static = DataConfig(micro_batch_size=2, global_batch_size=4)
    found = plan_together(static, MegatronConfig(), lengths, rollouts, 1, HF, lengths)
    assert found.ranks == [[[[0, 1, 2, 3], [4, 5, 6, 7]]]]


def test_a_held_out_set_of_any_size_fills_every_rank():
    """One rank and several ranks have the same micro-batches. The smallest micro-batch is repeated and does not count
    then."""
    lengths, rollouts = [9, 3, 4, 4, 8, 8, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]
    dynamic = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16, global_batch_size=64)
    static = DataConfig(micro_batch_size=3, global_batch_size=64)

    def plan(data, dp_size, together=True, size=8):
        found, counted = plan_held_out(
            *(data, MegatronConfig(), lengths[:size], rollouts[:size], dp_size, HF), together=together
        )
        assert found.step_samples == [list(range(size))] and found.global_batch_sizes == [
            len(set(rollouts[:size]))
        ]
        return [rank[0] for rank in found.ranks], counted

    assert plan(dynamic, 1) == ([[[0, 1, 6, 7], [2, 3], [4, 5]]], [3])
    assert plan(dynamic, 2) == ([[[0, 1, 6, 7], [4, 5]], [[2, 3], [2, 3]]], [2, 1])
    assert plan(static, 2) == ([[[0, 1, 2, 3, 4, 5]], [[6, 7]]], [1, 1])
    assert plan(static, 4, together=False, size=1) == ([[[0]]] * 4, [1, 0, 0, 0])
    assert plan(static, 1, together=False) == ([[[0, 1, 2], [3, 4, 5], [6, 7]]], [3])
