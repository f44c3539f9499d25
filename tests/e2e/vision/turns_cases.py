"""Conversations of several turns with images on a real engine: log-probs equal transformers' if the model samples the
id of an image before a later image, and plug-ins that call the processor themselves train a step.

test_engine_images.py imports the tests, because they share its engine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_double import make_args
from trainer_cases import make_config, rank_data
from vision_models import IDS, log_probs

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.media.media import list_media
from slime.data.media.positions import find_runs
from slime.data.source import PromptDataSource
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.models import read_decoder
from slime.peers import http
from slime.rollout.state import GenerateState
from slime.rollout.vllm_rollout import generate_rollout
from slime.types import Sample
from slime.vision.inputs import ImageInputs
from slime.vision.runs import shift

MARK, PAD = "<|vision_start|><|image_pad|><|vision_end|>", IDS["<|image_pad|>"]


@pytest.mark.parametrize(
    ("sampled", "known"),
    [([PAD], False), ([PAD, PAD, 7, PAD], False), ([PAD], True), ([PAD] * 7, True), ([7, PAD, PAD], True)],
)
def test_an_image_id_that_the_model_sampled_is_text(stack: Any, sampled: list[int], known: bool) -> None:
    """The later image has 6 ids. Without its place, a run of sampled ids must be shorter than the image."""
    one, first = stack.prompt(f"{MARK}a", stack.draw(2, 32, 32))
    two, second = stack.prompt(f"tool:{MARK}b", stack.draw(3, 24, 16))
    response = [65, *sampled, 66]
    tokens = one + response + two
    images = stack.media.locate(first, one) + shift(stack.media.locate(second, two), len(one + response))
    if not known:
        images = first + second
    text = [len(one) + number for number, token in enumerate(response) if token == PAD]
    (result,) = stack.sample(tokens, images, max_new_tokens=3)
    expected = log_probs(stack.models[0], tokens + result.token_ids, images, text)
    scores = torch.from_numpy(stack.score(tokens, images).log_probs.copy())
    torch.testing.assert_close(scores, expected[: len(tokens) - 1], rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.tensor(result.log_probs), expected[len(tokens) - 1 :], rtol=0, atol=2e-5)
    vision = read_decoder(read_hf_config(stack.checkpoint)).vision
    runs = find_runs(torch.tensor(tokens), list_media(images, vision), vision, "s")
    own = {index for run in runs for index in range(run.start, run.start + run.length)}
    assert own == {i for i, token in enumerate(tokens) if token == PAD} - set(text)


def roll_out(stack: Any, folder: Path, function: str, **more: object) -> list[Sample]:
    """Returns the samples of two rows, each with two images, that a generate function of image_plug_in makes."""
    rows = []
    for number in range(2):
        for name in "ab":
            stack.draw(10 * number + ord(name), 24, 32).save(folder / f"{number}{name}.png")
        rows.append(
            {"prompt": "<image>1+1?<image>", "images": [f"{number}a.png", f"{number}b.png"], "label": "2"}
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = make_args(
        prompt_data=str(folder / "rows.jsonl"),
        label_key="label",
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
        hf_checkpoint=str(stack.checkpoint),
        custom_generate_function_path=f"image_plug_in.{function}",
        rm_type="math",
        rollout_deadline_s=90.0,
    )
    facts = stack.pool.facts
    for name in ("sglang_router_ip", "sglang_router_port", "vllm_router_ip", "vllm_router_port"):
        setattr(args, name, facts[name])
    for name, value in more.items():
        setattr(args, name, value)
    state = GenerateState(
        Config.from_args(args), stack.pool.client(), stack.tokenizer, hook_args=args
    ).enter()
    http.set_own_servers(http.OwnServers(**facts["own_servers"][0]))
    try:
        groups = generate_rollout(args, 0, PromptDataSource(args)).samples
    finally:
        http.set_own_servers()
        state.close()
    return [sample for group in groups for sample in group]


def check_samples(stack: Any, folder: Path, samples: list[Sample]) -> None:
    """The log-probs of the trained tokens are transformers', and a trainer computes the same."""
    for number, sample in enumerate(samples):
        sample.check()
        inputs = sample.multimodal_train_inputs
        images = inputs if isinstance(inputs, ImageInputs) else Tensors(inputs)
        response = range(len(sample.tokens) - sample.response_length, len(sample.tokens))
        on = sample.loss_mask or [1] * sample.response_length
        text = [i for i, mask in zip(response, on, strict=True) if mask and sample.tokens[i] == PAD]
        expected = log_probs(stack.models[0], sample.tokens, images, text)[-sample.response_length :]
        own = torch.where(torch.tensor(on).bool(), expected, 0.0)
        torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), own, rtol=0, atol=2e-5)
        sample.reward = float(number % 2)
    model = str(stack.checkpoint)
    config = make_config(
        *(folder,), hf_checkpoint=model, load=model, ref_load=model, max_tokens_per_gpu=512,
        multimodal_keys={"image": "images"}, rollout_batch_size=2, global_batch_size=4,
    )  # fmt: skip
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{folder}/store")
    try:
        (step,) = trainer.train(0, rank_data(trainer.config, samples)).steps
    finally:
        trainer.close()
    assert step["train/grad_norm"] > 0 and math.isfinite(step["train/loss"])
    assert step["train/train_rollout_logprob_abs_diff"] < 2e-5


class Tensors:
    """A plug-in's tensors in the form that `log_probs` reads."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = lambda: tensors


@pytest.mark.parametrize("shows", ["text", "picture"])
def test_a_plug_in_of_several_turns_trains_a_step(stack: Any, tmp_path: Path, shows: str) -> None:
    turns = 3 if shows == "text" else 2  # the engine takes three images per prompt
    samples = roll_out(stack, tmp_path, "generate", max_turns=turns, shows=shows, partial_rollout=False)
    for sample in samples:
        grids = sample.multimodal_train_inputs["image_grid_thw"]
        assert len(grids) == len(sample.multimodal_inputs["images"]) == (2 if shows == "text" else 3)
        assert {0, 1} == set(sample.loss_mask)
    check_samples(stack, tmp_path, samples)


def test_a_plug_in_for_upstreams_routes_trains_a_step(stack: Any, tmp_path: Path) -> None:
    """As in upstream's script, there is no --apply-chat-template: the prompt is a list of messages."""
    samples = roll_out(stack, tmp_path, "generate_rendered", max_turns=2, apply_chat_template=False)
    check_samples(stack, tmp_path, samples)


def test_the_runs_generate_takes_a_plug_ins_tensors(stack: Any, tmp_path: Path) -> None:
    samples = roll_out(stack, tmp_path, "generate_ours")
    assert all(isinstance(sample.multimodal_train_inputs, dict) for sample in samples)
    check_samples(stack, tmp_path, samples)
