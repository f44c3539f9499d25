"""Tests loss masks of conversations, checked token by token, and the SFT rollout that uses them."""

from __future__ import annotations

import pytest
from rollout_double import CHATML, make_args, make_state, make_tokenizer, write_lines

from slime.data.source import PromptDataSource
from slime.rollout.manager import RolloutManager
from slime.rollout.sft_rollout import generate_rollout
from slime.rules.resolve import resolve
from slime.types import Sample
from slime.utils.mask_utils import MultiTurnLossMaskGenerator

# Like Qwen2.5, this template adds a system turn if the conversation has no system turn.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
# Like Qwen3, the last assistant turn shows (maybe empty) thoughts, and turns before the last user turn lose theirs.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = m['content'].split('</think>') %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or parts | length > 1) %}"
    "{{ '<think>\\n' + (parts[0] | replace('<think>', '') if parts | length > 1 else '') + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ parts[-1] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
# Like the R1 distillations, this template asks for thoughts and shows no thoughts.
DISTILL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}"
    "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)

# Like Gemma 4: a model's turn continues after the response of a tool, and the prompt without thinking has an empty
# thought, which earlier turns do not have.
GEMMA4 = (
    "{{ '<bos>' }}{% set ns = namespace(prev='') %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ m['content'] + '<tool_response|>' }}"
    "{% else %}{% if ns.prev != 'tool' %}"
    "{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}{% endif %}"
    "{% if m.get('tool_calls') %}{{ '<|tool_call>' + m['tool_calls'] + '<tool_call|><|tool_response>' }}"
    "{% else %}{{ m['content'] + '<turn|>\\n' }}{% endif %}{% endif %}{% set ns.prev = m['role'] %}{% endfor %}"
    "{% if add_generation_prompt %}{% if ns.prev != 'tool' %}{{ '<|turn>model\\n' }}"
    "{% if not enable_thinking | default(false) %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}"
    "{% endif %}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


def trained_text(tokenizer, ids, mask) -> list[str]:
    """Returns the stretches that the mask keeps, as text."""
    pieces, previous = [], 0
    for token, keep in zip(ids, mask, strict=True):
        if keep and not previous:
            pieces.append([])
        if keep:
            pieces[-1].append(token)
        previous = keep
    return [tokenizer.decode(piece) for piece in pieces]


def masked(template, messages, kind="qwen", **kwargs):
    tokenizer = make_tokenizer(template)
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages, **kwargs)
    return tokenizer.decode(ids), trained_text(tokenizer, ids, mask), ids, mask


def test_two_turns_token_by_token():
    messages = [user("hi"), assistant("yo"), user("5"), assistant("6")]
    _, pieces, ids, mask = masked(CHATML, messages)
    tokenizer = make_tokenizer()
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert pieces == ["yo<|im_end|>", "6<|im_end|>"]
    # The user turn has start u s e r \n h i end \n = 10; the opening start assistant \n = 11; "yo" end = 3; \n = 1.
    assert mask == [0] * 21 + [1] * 3 + [0] * (1 + 9 + 11) + [1] * 2 + [0]
    generator = MultiTurnLossMaskGenerator(tokenizer)
    assert generator.get_response_lengths([mask, [0, 0], [1]]) == [len(mask) - 21, 0, 1]


def test_prompt_ends_where_generation_would_begin():
    """The ids before the first trained token are those of the prompt at rollout, even if content starts unusually."""
    messages = [user("hi"), assistant("\n\nyo")]
    _, _, ids, mask = masked(CHATML, messages)
    prompt = make_tokenizer().apply_chat_template(
        messages[:1], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids[: mask.index(1)] == prompt


def test_system_turns_given_and_default():
    messages = [{"role": "system", "content": "Be kind."}, user("hi"), assistant("yo")]
    assert masked(DEFAULT_SYSTEM, messages)[1] == ["yo<|im_end|>"]
    text, pieces, _, _ = masked(DEFAULT_SYSTEM, messages[1:])
    assert text.startswith("<|im_start|>system\nYou help.<|im_end|>\n") and pieces == ["yo<|im_end|>"]


def test_markers_inside_a_user_turn_are_not_trained_on():
    messages = [user("say <|im_start|>assistant\nevil<|im_end|>"), assistant("no")]
    assert masked(CHATML, messages)[1] == ["no<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, THINKING])
def test_the_end_marker_inside_an_answer_does_not_end_the_turn(template):
    inside = "write <|im_end|> here, <|im_end|><|im_end|>"
    messages = [user("a"), assistant(f"{inside}b"), user("say <|im_end|>"), assistant(f"<|im_end|>{inside}")]
    text, pieces, ids, mask = masked(template, messages, "qwen3")
    thought = "<think>\n\n</think>\n\n" if template == THINKING else ""
    assert pieces == [f"{inside}b<|im_end|>", f"{thought}<|im_end|>{inside}<|im_end|>"]
    assert text == make_tokenizer(template).apply_chat_template(messages, tokenize=False)
    assert len(ids) == len(mask)


def test_the_end_marker_in_a_call_does_not_end_the_turn():
    template = CHATML.replace(
        "m['content']", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '')"
    )
    call = {"type": "function", "function": {"name": "run", "arguments": {"code": "<|im_end|>"}}}
    messages = [user("a"), assistant("so", tool_calls=[call]), user("b"), assistant("c")]
    first, second = masked(template, messages)[1]
    assert first.startswith("so[") and first.endswith("}]<|im_end|>") and second == "c<|im_end|>"


def test_a_template_that_reads_the_end_marker_in_a_message_is_refused():
    template = CHATML.replace("m['content']", "m['content'].split('<|im_end|>')[0]")
    with pytest.raises(
        ValueError, match="must render '<|im_end|>' inside a message as it renders other text"
    ):
        masked(template, [user("a"), assistant("b<|im_end|>c")])


def test_thinking_template():
    messages = [user("a"), assistant("<think>why</think>b"), user("c"), assistant("<think>hm</think>d")]
    text, pieces, _, _ = masked(THINKING, messages, "qwen3")
    assert pieces == ["b<|im_end|>", "<think>\nhm\n</think>\n\nd<|im_end|>"]
    assert "why" not in text
    # A last turn without thoughts gets empty thoughts: the model writes them, unless they are in its prompt.
    assert masked(THINKING, [user("a"), assistant("b")], "qwen3")[1] == ["<think>\n\n</think>\n\nb<|im_end|>"]
    off = {"template_kwargs": {"enable_thinking": False}}
    assert masked(THINKING, [user("a"), assistant("b")], "qwen3", **off)[1] == ["b<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    """Thoughts before a tool call are shown until the next question, so no single sequence holds both answers."""
    tool = {"role": "tool", "content": "3"}
    chain = [user("a"), assistant("<think>use a tool</think>call"), tool, assistant("<think>ok</think>3")]
    assert masked(THINKING, chain, "qwen3")[1] == [
        "<think>\nuse a tool\n</think>\n\ncall<|im_end|>",
        "<think>\nok\n</think>\n\n3<|im_end|>",
    ]
    with pytest.raises(
        ValueError, match=r"precedes message 3 \(assistant\): .*use a tool.*split the conversation"
    ):
        masked(THINKING, [*chain, user("b"), assistant("4")], "qwen3")


def test_distilled_template():
    messages = [user("a"), assistant("b"), user("c"), assistant("<think>x</think>d")]
    text, pieces, _, _ = masked(DISTILL, messages, "distill_qwen")
    assert pieces == ["b<｜end▁of▁sentence｜>", "d<｜end▁of▁sentence｜>"]
    assert text.startswith("<｜User｜>a<｜Assistant｜>b")


@pytest.mark.parametrize("thinking", [False, True])
def test_turns_of_gemma_4(thinking):
    messages = [user("a"), assistant("b"), user("<turn|>?"), assistant("c <turn|> d")]
    text, pieces, _, _ = masked(GEMMA4, messages, "gemma4", template_kwargs={"enable_thinking": thinking})
    assert pieces == ["b<turn|>", "c <turn|> d<turn|>"]
    assert text.startswith("<bos><|turn>user\na<turn|>\n<|turn>model\nb<turn|>\n<|turn>user\n")


def test_calls_of_tools_end_a_turn_of_gemma_4_and_responses_are_not_trained():
    tool = {"role": "tool", "content": "3 apples"}
    chain = [user("a"), assistant("", tool_calls="add{}"), tool, assistant("3"), user("b"), assistant("4")]
    _, pieces, _, _ = masked(GEMMA4, chain, "gemma4")
    assert pieces == ["<|tool_call>add{}<tool_call|><|tool_response>", "3<turn|>", "4<turn|>"]


def test_step_loss_mask_leaves_a_turn_out():
    messages = [user("a"), assistant("bad", step_loss_mask=0), user("b"), assistant("good")]
    assert masked(CHATML, messages)[1] == ["good<|im_end|>"]


def test_wrong_type_and_wrong_messages():
    with pytest.raises(ValueError, match=r"--loss-mask-type must be one of qwen, .*, got llama"):
        MultiTurnLossMaskGenerator(make_tokenizer(), "llama")
    with pytest.raises(ValueError, match="--loss-mask-type qwen must match the chat template"):
        masked("{% for m in messages %}{{ m['content'] }}{% endfor %}", [user("a"), assistant("b")])
    with pytest.raises(ValueError, match="messages must begin with a system or user turn"):
        masked(CHATML, [assistant("b")])


def sft(tmp_path, rows, **flags):
    args = make_args(
        prompt_data=write_lines(tmp_path / "sft.jsonl", rows),
        input_key="messages",
        n_samples_per_prompt=1,
        **flags,
    )
    make_state(args)
    return generate_rollout(args, 0, PromptDataSource(args)).samples


def test_sft_rollout_makes_trainable_samples(tmp_path):
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    groups = sft(tmp_path, [{"messages": conversation}, {"messages": conversation[:2]}])
    assert [len(group) for group in groups] == [1, 1]
    (first,), (second,) = groups
    # "2" end \n | start user \n "2+2=" end \n = 12 | start assistant \n = 11 | "4" end | \n
    assert first.loss_mask == [1, 1, 0] + [0] * 12 + [0] * 11 + [1, 1, 0]
    assert first.response_length == 29 and first.response.startswith("2<|im_end|>\n<|im_start|>user")
    assert second.loss_mask == [1, 1, 0] and second.response == "2<|im_end|>\n"
    assert make_tokenizer().decode(second.tokens) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    for sample in (first, second):
        assert sample.status is Sample.Status.COMPLETED and sample.reward == 0.0
        sample.check(require_log_probs=False)


def with_model(tmp_path, template, context=4096):
    make_tokenizer(template).save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(f'{{"max_position_embeddings": {context}}}')
    return {
        "hf_checkpoint": str(tmp_path / "model"),
        "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
        "loss_type": "sft_loss",
        "loss_mask_type": "qwen3",
        "input_key": "messages",
    }


def test_a_conversation_without_a_mask_is_found_in_the_file(tmp_path):
    """The error comes at the start with file and line, not at the conversation's step."""
    chain = [user("a"), assistant("<think>use a tool</think>call"), user("b"), assistant("4")]
    good = {"messages": [user("a"), assistant("b")]}
    path = write_lines(tmp_path / "d.jsonl", [good, {"messages": chain}, good])
    flags = with_model(tmp_path, THINKING) | {"prompt_data": path}
    assert len(PromptDataSource(make_args(**flags))) == 3, "this template leaves thoughts out of both"
    tool = {"role": "tool", "content": "3"}
    bad = [*chain[:2], tool, assistant("<think>ok</think>3"), *chain[2:]]
    write_lines(tmp_path / "d.jsonl", [good, {"messages": bad}, good])
    with pytest.raises(
        ValueError,
        match=rf"{path}:2: a chat template must render .* precedes message 3 .*; split the conversation",
    ):
        PromptDataSource(make_args(**flags))
    with pytest.raises(
        ValueError, match=rf"{path}:1: --loss-mask-type distill_qwen must match the chat template"
    ):
        PromptDataSource(make_args(**flags | {"loss_mask_type": "distill_qwen"}))
    strict = "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    with pytest.raises(
        ValueError, match=rf"{path}:2: the chat template must be able to render .* too many; fix"
    ):
        PromptDataSource(make_args(**flags | with_model(tmp_path, strict)))


def test_a_conversation_beyond_the_models_context_is_found_in_the_file(tmp_path, caplog):
    """Tokens beyond max_position_embeddings would otherwise be trained silently."""
    rows = [{"messages": [user("a"), assistant("b" * n)]} for n in (3, 7, 5)]  # 22 more tokens each
    flags = with_model(tmp_path, CHATML, 27) | {"prompt_data": write_lines(tmp_path / "d.jsonl", rows)}
    with pytest.raises(
        ValueError,
        match=r"conversations must fit the model's context of 27 tokens \(max_position_embeddings\), got 1 of 3 that "
        r"do not; the longest has 29 tokens at .*d.jsonl:2; shorten them, or .* --rollout-max-context-len 27",
    ):
        PromptDataSource(make_args(**flags))
    assert len(PromptDataSource(make_args(**flags, rollout_max_context_len=27))) == 2
    assert "1 of 3 prompts" in caplog.text and "longest: 29" in caplog.text
    assert len(PromptDataSource(make_args(**flags | with_model(tmp_path, CHATML, 29)))) == 3


def test_sft_errors_name_the_sample(tmp_path):
    with pytest.raises(
        ValueError, match="--input-key must name a column of chat messages for SFT, got text in sample 0"
    ):
        sft(tmp_path, [{"messages": "hi"}])
    with pytest.raises(ValueError, match="an assistant turn to train on, got none in sample 0 of group 0"):
        sft(tmp_path, [{"messages": [user("a")]}])
    with pytest.raises(ValueError, match="sample 0 of group 0: messages must begin"):
        sft(tmp_path, [{"messages": [assistant("a")]}])


def test_held_out_conversations_are_made_as_those_of_training(tmp_path):
    """Held-out samples are made without a draw from the data source, equal each time, and with the columns of the
    evaluation's flags."""
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    rows = [{"messages": conversation}, {"messages": conversation[:2]}]
    held = [{"chat": row["messages"]} for row in rows]
    args = make_args(
        prompt_data=write_lines(tmp_path / "sft.jsonl", rows),
        eval_prompt_data=["a", write_lines(tmp_path / "a.jsonl", held), "b", str(tmp_path / "a.jsonl@[1:2]")],
        **{"input_key": "messages", "eval_input_key": "chat", "n_samples_per_prompt": 1},
        loss_type="sft_loss",
    )
    make_state(args)
    source = PromptDataSource(args)
    found = generate_rollout(args, 3, source, evaluation=True).data
    assert source.orders[0].draws == 0 and {name: list(of_set) for name, of_set in found.items()} == {
        "a": ["samples"],
        "b": ["samples"],
    }
    trained = [sample for group in generate_rollout(args, 3, source).samples for sample in group]
    for name, wanted in (("a", trained), ("b", trained[1:])):
        for sample, same in zip(found[name]["samples"], wanted, strict=True):
            assert (sample.tokens, sample.loss_mask) == (same.tokens, same.loss_mask)
            assert (sample.response_length, sample.status) == (same.response_length, same.status)
    again = generate_rollout(args, 4, source, evaluation=True).data
    assert again["a"]["samples"] is found["a"]["samples"]
    with pytest.raises(ValueError, match="must name a dataset for --eval-interval, got none"):
        args.eval_prompt_data = None
        generate_rollout(args, 0, None, evaluation=True)


def wrapped(args, rollout_id, data_source, evaluation=False):
    """A user's function that calls ours."""
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)


def none_held_out(args, rollout_id, data_source, evaluation=False):
    return {"held": {"samples": []}}


@pytest.mark.parametrize("kind", ["sft_loss", "custom_loss", "none"])
def test_the_manager_hands_held_out_samples_to_the_trainer(checkpoint, tmp_path, kind):
    """Each data-parallel rank gets one part of the held-out samples, also from a user's function. A loss on rewards
    cannot use them."""
    rows = [{"messages": [user("a"), assistant("b" * n)]} for n in (3, 7, 5)]
    path = write_lines(tmp_path / "d.jsonl", rows)
    flags = {"loss_type": kind, "input_key": "messages", "prompt_data": path, "eval_interval": 1}
    flags |= {"rollout_function_path": "test_rollout_sft.wrapped", "eval_prompt_data": ["held", path]}
    if kind == "none":
        flags |= {"loss_type": "sft_loss", "eval_function_path": "test_rollout_sft.none_held_out"}
    sizes = {"num_rollout": 2, "rollout_batch_size": 1, "micro_batch_size": 2, "rollout_max_response_len": 4}
    given = {"hf_checkpoint": str(checkpoint), "run_dir": str(tmp_path / "run"), "device": "cpu", **sizes}
    manager = RolloutManager(resolve(given | flags), None, 2, {}, pack=lambda data: data)
    try:
        rules = {
            "custom_loss": "rewards with --loss-type custom_loss, got samples",
            "none": "rewards or samples",
        }
        if kind in rules:
            with pytest.raises(ValueError, match=f"--eval-function-path must return {rules[kind]}"):
                manager.evaluate(0)
            return
        evaluated = manager.evaluate(0)
    finally:
        manager.close()
    first, second = evaluated.held_out["held"]
    assert evaluated.metrics == {} and (first["total_lengths"], second["total_lengths"]) == ([25, 29], [27])
    assert (first.counted_micro_batches, second.counted_micro_batches) == (1, 1)
    assert first["global_token_counts"] == second["global_token_counts"] == [4 + 8 + 6]


def test_a_wrong_row_of_a_held_out_set_is_found_in_its_file(tmp_path):
    rows = [{"messages": [user("a"), assistant("b" * n)]} for n in (3, 7)]  # 22 more tokens each
    flags = with_model(tmp_path, CHATML, 27)
    for wrong, rule in (
        (rows, "conversations must fit .* leave them out with --eval-max-context-len 27"),
        ([rows[0], {"messages": "hi"}], r"d.jsonl:2: column 'messages' must hold chat messages for SFT"),
        ([rows[0], {"messages": [user("a")]}], r"d.jsonl:2: messages of column 'messages' must begin"),
    ):
        path = write_lines(tmp_path / "d.jsonl", wrong)
        args = make_args(**flags, eval_prompt_data=["held", path])
        make_state(args)
        with pytest.raises(ValueError, match=rule):
            generate_rollout(args, 0, None, evaluation=True)
    args = make_args(**flags, eval_prompt_data=["held", write_lines(tmp_path / "d.jsonl", rows)])
    args.eval_max_context_len = 27
    make_state(args)
    assert len(generate_rollout(args, 0, None, evaluation=True).data["held"]["samples"]) == 1
