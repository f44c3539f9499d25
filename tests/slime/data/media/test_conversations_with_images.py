"""Tests SFT on conversations with images: ids, loss mask and processed images of the samples."""

import pytest
from rollout_double import make_args, make_tokenizer, write_lines
from vision_cases import TEMPLATE, draw_image, encode_image, write_processor

from slime.algo.losses import SFT_ROLLOUT
from slime.config import Config
from slime.data.source import PromptDataSource
from slime.data.tokenizer import load_tokenizer
from slime.rollout.sft_rollout import generate_rollout
from slime.rollout.state import GenerateState
from slime.rules.data import check_media

TURNS = [
    {"role": "user", "content": "<image>What color?"},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "And <image>?"},
    {"role": "assistant", "content": "blue"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_processor(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, size in {"red": (56, 56), "blue": (56, 84)}.items():
        (tmp_path / f"{name}.png").write_bytes(encode_image(draw_image(size, name)))
    return write_lines(tmp_path / "rows.jsonl", [{"messages": TURNS, "images": ["red.png", "blue.png"]}])


def flags(rows, model, **more):
    options = {
        "input_key": "messages", "loss_type": "sft_loss", "rollout_function_path": SFT_ROLLOUT,
        "n_samples_per_prompt": 1, "rollout_batch_size": 1, "multimodal_keys": {"image": "images"},
    }  # fmt: skip
    return make_args(prompt_data=rows, hf_checkpoint=model, **options, **more)


@pytest.mark.parametrize(
    "apply_chat_template", [False, True]
)  # slime's script for SFT on geometry gives the flag
def test_a_conversation_has_ids_of_its_images_and_no_loss_on_them(rows, model, apply_chat_template):
    args = flags(rows, model, apply_chat_template=apply_chat_template)
    state = GenerateState(Config.from_args(args), None, load_tokenizer(model)).enter()
    ((sample,),) = generate_rollout(args, 0, PromptDataSource(args)).samples
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What color?<|im_end|>\n"
        "<|im_start|>assistant\nred<|im_end|>\n"
        "<|im_start|>user\nAnd <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nblue<|im_end|>\n"
    )
    pictures = [draw_image((56, 56), "red"), draw_image((56, 84), "blue")]
    theirs = state.processor(text=[text], images=pictures, return_tensors="pt")
    assert sample.tokens == theirs["input_ids"][0].tolist()
    assert [item.tokens for item in sample.multimodal_train_inputs.items] == [4, 6]
    assert sample.multimodal_train_inputs.tensors()["pixel_values"].equal(theirs["pixel_values"])
    response = sample.tokens[-sample.response_length :]
    trained = [token for token, keep in zip(response, sample.loss_mask, strict=True) if keep]
    assert state.tokenizer.decode(trained) == "red<|im_end|>blue<|im_end|>"
    assert response.count(state.processor.image_token_id) == 6


def test_image_tokens_count_for_the_longest_conversation(rows, model):
    def source(limit):
        return PromptDataSource(flags(rows, model, rollout_max_context_len=limit))

    args = flags(rows, model)
    _state = GenerateState(Config.from_args(args), None, load_tokenizer(model)).enter()
    length = len(generate_rollout(args, 0, PromptDataSource(args)).samples[0][0].tokens)
    assert len(source(length)) == 1
    with pytest.raises(ValueError, match=f"the shortest of 1 prompts in .* has {length} tokens"):
        source(length - 1)


def test_a_template_without_images_is_an_error(rows, model, tmp_path):
    import shutil

    other = shutil.copytree(model, tmp_path / "other")
    make_tokenizer(TEMPLATE.replace("IMAGE", "")).save_pretrained(other)
    args = flags(rows, str(other))
    _state = GenerateState(Config.from_args(args), None, load_tokenizer(str(other))).enter()
    with pytest.raises(
        ValueError, match=r"a rendered prompt must have one <\|image_pad\|> per image, got 2 fewer"
    ):
        generate_rollout(args, 0, PromptDataSource(args))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"multimodal_keys": {"audio": "sounds"}},
            "--multimodal-keys must name columns of image and video, got 'audio'",
        ),
        (
            {"multimodal_keys": {"image": ["a"]}},
            "must map each kind of media to the name of a column, got \\['a'\\]",
        ),
        ({"multimodal_keys": {"image": "a"}, "loss_type": "dpo"}, "be left out with --loss-type dpo"),
    ],
)
def test_wrong_keys_are_errors(values, text):
    with pytest.raises(ValueError, match=text):
        check_media(Config.from_flat(values))
