"""Tests the data source: order, numbering, the buffer, and a restart that continues exactly."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_double import make_args, make_tokenizer, write_lines

from slime.data.source import PromptDataSource
from slime.rollout.data_source import RolloutDataSourceWithBuffer, pop_first
from slime.types import Sample


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"p{i}", "label": str(i), "metadata": {"tags": [i]}} for i in range(4)]
    return write_lines(tmp_path / "d.jsonl", rows)


def source_of(data, **flags) -> PromptDataSource:
    return PromptDataSource(make_args(prompt_data=data, label_key="label", **flags))


def prompts_of(groups) -> list[str]:
    return [group[0].prompt for group in groups]


def test_groups_are_numbered_copies(data):
    source = source_of(data, n_samples_per_prompt=3)
    assert issubclass(RolloutDataSourceWithBuffer, PromptDataSource) and len(source) == 4
    groups = source.get_samples(2)
    assert prompts_of(groups) == ["p0", "p1"]
    assert [[s.index for s in group] for group in groups] == [[0, 1, 2], [3, 4, 5]]
    assert [[s.group_index for s in group] for group in groups] == [[0, 0, 0], [1, 1, 1]]
    assert groups[1][2].label == "1" and groups[1][2].status is Sample.Status.PENDING
    groups[0][0].metadata["tags"].append("mine")
    assert groups[0][1].metadata == {"tags": [0]}
    assert source.prompts[0].metadata == {"tags": [0]}


def test_file_order_goes_round(data):
    source = source_of(data)
    assert prompts_of(source.get_samples(3) + source.get_samples(7)) == [f"p{i % 4}" for i in range(10)]
    assert (source.epoch, source.position) == (2, 2)


def test_shuffle_is_decided_by_seed_and_epoch(data):
    source = source_of(data, rollout_shuffle=True, rollout_seed=7)
    got = prompts_of(source.get_samples(8))
    want = []
    for epoch in range(2):
        order = list(range(4))
        random.Random(7 + epoch).shuffle(order)
        want += [f"p{i}" for i in order]
    assert got == want and want[:4] != want[4:]


def test_the_order_of_earlier_versions_is_kept(tmp_path):
    """A checkpoint from before the prompts were tables continues at the same prompt."""
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "label": "x"} for i in range(10)])
    source = source_of(data, rollout_shuffle=True, rollout_seed=42)
    saved = {"version": 1, "num_prompts": 10, "rollout_seed": 42, "rollout_shuffle": True, "epoch": 1}
    saved |= {"position": 8, "next_group_index": 18, "next_index": 36, "buffer": []}
    source.load_state_dict(saved)
    assert prompts_of(source.get_samples(4)) == ["p4", "p0", "p4", "p5"]


def test_buffer_goes_first_and_in_order(data):
    source = source_of(data)
    first, second, third = source.get_samples(3)
    second[0].response = "half"
    source.add_samples([second, third])
    groups = source.get_samples(3)
    assert prompts_of(groups) == ["p1", "p2", "p3"]
    assert groups[0][0].response == "half" and groups[2][0].index == 6
    with pytest.raises(ValueError, match="must have --n-samples-per-prompt 2 samples, got 1"):
        source.add_samples([first[:1]])


def newest_first(args, rollout_id, buffer, num_samples):
    assert rollout_id is None
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def greedy(args, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(len(buffer))]


def test_buffer_filter_path(data):
    source = source_of(data, buffer_filter_path="test_data_source.newest_first")
    source.add_samples(source.get_samples(3))
    assert prompts_of(source.get_samples(2)) == ["p2", "p1"]
    assert prompts_of(source.get_samples(2)) == ["p0", "p3"]
    source = source_of(data, buffer_filter_path="test_data_source.greedy")
    source.add_samples(source.get_samples(3))
    with pytest.raises(
        ValueError, match="--buffer-filter-path must return at most the 2 groups asked for, got 3"
    ):
        source.get_samples(2)


def filled_sample(sample: Sample) -> Sample:
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -1 / 3], text="é")
    sample.status = Sample.Status.ABORTED
    sample.weight_versions, sample.reward = [1, 2], {"score": 0.1}
    sample.metadata["start_rollout_id"] = 3
    return sample


def test_restart_continues_exactly(data, tmp_path):
    flags = {"rollout_shuffle": True, "save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    source = source_of(data, **flags)
    groups = source.get_samples(3)
    filled_sample(groups[1][0])
    source.add_samples([groups[1]])
    source.save(3)
    saved = source.state_dict()
    assert [p.name for p in (tmp_path / "ckpt" / "rollout").iterdir()] == ["data_state_3.json"]
    json.loads((tmp_path / "ckpt" / "rollout" / "data_state_3.json").read_text())

    again = source_of(data, **flags)
    again.load(3)
    assert again.state_dict() == saved
    want, got = source.get_samples(6), again.get_samples(6)
    assert [[s.to_dict() for s in group] for group in got] == [[s.to_dict() for s in group] for group in want]
    assert got[0][0].status is Sample.Status.ABORTED and got[0][0].rollout_log_probs == [-0.1, -1 / 3]


def test_a_position_that_slime_saved_continues(data, tmp_path):
    """slime visits the prompts of an epoch in the same order."""
    flags = {"rollout_shuffle": True, "n_samples_per_prompt": 2}
    whole = source_of(data, **flags)
    whole.get_samples(6)
    file = tmp_path / "load" / "rollout" / "global_dataset_state_dict_3.pt"
    file.parent.mkdir(parents=True)
    saved = {"epoch_id": 1, "sample_offset": 2, "sample_group_index": 6, "sample_index": 12, "metadata": {}}
    torch.save(saved, file)
    resumed = source_of(data, **flags, load=str(tmp_path / "load"))
    resumed.load(3)
    expected, got = whole.get_samples(5), resumed.get_samples(5)
    assert prompts_of(got) == prompts_of(expected)
    assert [s.index for group in got for s in group] == [s.index for group in expected for s in group]
    torch.save(saved | {"sample_offset": 9}, file)
    with pytest.raises(
        ValueError, match=r"--prompt-data must have at least the 9 prompts that .* has seen, got 4"
    ):
        resumed.load(3)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"_dict_3.pt must hold the data position that slime saved, got "):
        resumed.load(3)


def test_saved_state_does_not_change_afterwards(data):
    source = source_of(data)
    (group,) = source.get_samples(1)
    source.add_samples([group])
    state = source.state_dict()
    filled_sample(group[0])
    assert state["buffer"][0][0]["tokens"] == [] and state["buffer"][0][0]["metadata"] == {"tags": [0]}


def test_fresh_start_and_no_checkpoint(data, tmp_path):
    source = source_of(data, load=str(tmp_path))
    source.load(-1)
    assert source.position == 0
    source.save(0)  # without --save, nothing is written
    assert list(tmp_path.iterdir()) == [tmp_path / "d.jsonl"]
    with pytest.raises(
        ValueError, match=r"--load must hold the data position of rollout 4.*--start-rollout-id 0"
    ):
        source.load(4)


def test_other_data_or_order_is_refused(data, tmp_path):
    state = source_of(data).state_dict()
    with pytest.raises(ValueError, match=r"number of prompts in --prompt-data must be .* \(4\), got 3"):
        source_of(data + "@[:3]").load_state_dict(state)
    with pytest.raises(ValueError, match=r"--rollout-seed must be .* \(42\), got 1"):
        source_of(data, rollout_seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"--rollout-shuffle must be .* \(False\), got True"):
        source_of(data, rollout_shuffle=True).load_state_dict(state)


def test_what_json_cannot_hold_is_an_error_and_leaves_no_file(data, tmp_path):
    source = source_of(data, save=str(tmp_path / "ckpt"))
    (group,) = source.get_samples(1)
    group[0].multimodal_train_inputs = {"pixels": np.zeros(2)}
    source.add_samples([group])
    with pytest.raises(ValueError, match=r"a buffered sample must hold plain values .*, got ndarray"):
        source.save(0)
    assert not (tmp_path / "ckpt").exists()


def test_no_dataset():
    source = PromptDataSource(make_args(disable_rollout_global_dataset=True))
    groups = source.get_samples(2)
    assert [s.prompt for group in groups for s in group] == [""] * 4 and len(source) == 0
    source = PromptDataSource(make_args())
    source.add_samples([[Sample(index=i) for i in pair] for pair in ((0, 1), (2, 3))])
    assert [s.index for s in source.get_samples(1)[0]] == [0, 1]
    with pytest.raises(ValueError, match="--prompt-data must name a prompt file, got none"):
        source.get_samples(2)


def test_a_plug_in_gives_the_arguments_that_it_knows():
    """slime's data source needs two arguments for its buffer."""
    args = SimpleNamespace(prompt_data=None, n_samples_per_prompt=1)
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples([[Sample(index=0)], [Sample(index=1)]])
    taken = pop_first(args, None, source.buffer, 1)
    assert [s.index for (s,) in taken] == [0] and [s.index for (s,) in source.buffer] == [1]
    assert source._buffer_filter is pop_first


def test_limits_and_template_come_from_the_flags(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 99}')
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "a" * 9}])
    flags = {"hf_checkpoint": str(tmp_path / "model")}
    assert len(PromptDataSource(make_args(prompt_data=data, rollout_max_prompt_len=5, **flags))) == 1
    # A context of 9 tokens has room for a prompt of 8.
    assert len(PromptDataSource(make_args(prompt_data=data, rollout_max_context_len=9, **flags))) == 1
    assert len(PromptDataSource(make_args(prompt_data=data, rollout_max_context_len=10, **flags))) == 2
    assert len(PromptDataSource(make_args(prompt_data=data, **flags))) == 2
    source = PromptDataSource(make_args(prompt_data=data, apply_chat_template=True, **flags))
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 9}')
    with pytest.raises(ValueError, match="must be shorter than the model's context of 9 tokens"):
        PromptDataSource(make_args(prompt_data=data, **flags))
    assert source.get_samples(1)[0][0].prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_template_arguments_must_be_read_by_the_template(tmp_path):
    """The arguments are checked without --apply-chat-template too, because SFT, sessions and rows of messages use the
    template later."""
    make_tokenizer("{{ messages }}{{ style }}").save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "a"}])
    flags = {"hf_checkpoint": str(tmp_path / "model"), "prompt_data": data}
    assert len(PromptDataSource(make_args(apply_chat_template_kwargs={"style": "x"}, **flags))) == 1
    with pytest.raises(
        ValueError, match=r"--apply-chat-template-kwargs must name .* got styl; it reads messages"
    ):
        PromptDataSource(make_args(apply_chat_template_kwargs={"styl": "x"}, **flags))


def test_messages_keep_the_template_arguments(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}])
    source = PromptDataSource(make_args(prompt_data=data, apply_chat_template_kwargs={"style": "plain"}))
    (group,) = source.get_samples(1)
    assert group[0].apply_chat_template_kwargs == {"style": "plain"}
    group[0].prompt[0]["content"] = "changed"
    assert group[1].prompt == [{"role": "user", "content": "a"}]


def test_each_flipped_bit_of_a_saved_position_is_found(data, tmp_path):
    """A flipped bit of the position would skip or repeat a prompt, and the numbers of groups would still be right."""
    flags = {"rollout_shuffle": True, "save": str(tmp_path), "load": str(tmp_path)}
    source = source_of(data, **flags)
    source.get_samples(3)
    source.save(0)
    path = tmp_path / "rollout" / "data_state_0.json"
    right = path.read_bytes()
    other = source_of(data, **flags)
    for bit in range(8 * len(right)):
        flipped = bytearray(right)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="data position|must be what"):
            other.load(0)
    assert (other.epoch, other.position, other.next_index) == (0, 0, 0)
    path.write_bytes(right)
    other.load(0)
    assert other.state_dict() == source.state_dict()


def test_a_position_of_an_earlier_version_has_no_checksum(data, tmp_path, caplog):
    source = source_of(data, save=str(tmp_path), load=str(tmp_path))
    source.get_samples(3)
    source.save(0)
    path = tmp_path / "rollout" / "data_state_0.json"
    state = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_text(json.dumps(state | {"version": 1}))
    again = source_of(data, load=str(tmp_path))
    again.load(0)
    assert again.position == 3 and "has no checksum: an earlier version saved it" in caplog.text
    for damaged in (json.dumps(state), "[]", "", "[" * 5000):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="must be the data position as it was saved, got a damaged file"):
            again.load(0)


def test_places_of_prompts_are_told_once(data):
    source = source_of(data)
    groups = source.get_samples(5)
    numbers = [group[0].group_index for group in groups]
    assert source.get_locations(numbers[:2]) == [[0, 0, 0, 0], [0, 1, 1, 1]]
    assert source.get_locations(numbers) == [
        None,
        None,
        [0, 2, 2, 2],
        [0, 3, 3, 3],
        [0, 4, 4, 0],
    ]  # the next epoch
