"""Provides a generate function in the shape of slime's example of several turns over images: it calls the model's
processor itself, posts the images with each request, and appends what an environment shows. Two environments: one
shows a text, and one shows a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.rm_hub.math_utils import extract_answer
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine
from slime.utils.types import Sample

OPENING = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


class Environment:
    """Ends after `turns` answers."""

    def __init__(self, sample: Sample, turns: int, *, shows: str) -> None:
        self.label, self.left, self.shows = sample.label, turns, shows

    def step(self, text: str) -> tuple[dict[str, Any], bool]:
        self.left -= 1
        score = float(grade_answer_verl(extract_answer(text) or text, self.label))
        return {"score": score}, self.left == 0

    def format_observation(self, found: dict[str, Any]) -> dict[str, Any]:
        if self.shows == "text":
            return {"role": "tool", "content": f"score {found['score']}"}
        pixels = np.random.default_rng(self.left).integers(
            0, 255, (24, 24 + 8 * self.left, 3), dtype=np.uint8
        )
        parts = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "again"}]
        return {"role": "user", "content": parts}


def process(processor: Any, text: str, inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any], list[str]]:
    """Returns the ids of a text, the tensors of its images, and the images for the engine."""
    out = processor(text=text, **build_processor_kwargs(inputs))
    tensors = {name: value for name, value in out.items() if name not in ("input_ids", "attention_mask")}
    return (
        out["input_ids"][0],
        tensors,
        [encode_image_for_rollout_engine(one) for one in inputs["images"] or []],
    )


def encode_observation(
    state: GenerateState, args: Any, message: dict[str, Any]
) -> tuple[list[int], dict, list, dict]:
    from qwen_vl_utils import process_vision_info

    render, kwargs = state.tokenizer.apply_chat_template, args.apply_chat_template_kwargs or {}
    before = render(OPENING, tokenize=False, add_generation_prompt=False, **kwargs)
    whole = render([*OPENING, message], tokenize=False, add_generation_prompt=True, **kwargs)
    images, videos = process_vision_info([message])
    inputs = {"images": images, "videos": videos}
    ids, tensors, data = process(state.processor, whole, inputs)
    return ids[len(state.tokenizer.encode(before, add_special_tokens=False)) :], tensors, data, inputs


async def ask(args: Any, sample: Sample, params: dict[str, Any], images: list[str]) -> dict[str, Any]:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    return await post(url, body | ({"image_data": images} if images else {}))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert not args.partial_rollout
    state, params = GenerateState(args), sampling_params.copy()
    environment = Environment(sample, args.max_turns, shows=args.shows)
    ids, tensors, images = process(state.processor, sample.prompt, sample.multimodal_inputs)
    sample.tokens, parts = list(ids), [tensors]
    sample.loss_mask, sample.rollout_log_probs = [], []
    sample.multimodal_inputs = {"images": list(sample.multimodal_inputs["images"]), "videos": None}
    while True:
        answer = await ask(args, sample, params, images)
        meta = answer["meta_info"]
        rows = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[row[1] for row in rows],
            log_probs=[row[0] for row in rows],
            trainable=True,
            meta_info=meta,
        )
        found, done = environment.step(answer["text"])
        if done:
            break
        ids, tensors, more, inputs = encode_observation(state, args, environment.format_observation(found))
        sample.append_response_tokens(args, tokens=ids, log_probs=[0.0] * len(ids), trainable=False)
        images += more
        sample.multimodal_inputs["images"].extend(inputs["images"] or [])
        if tensors:
            parts.append(tensors)
    names = parts[0].keys()
    merged = {name: [part[name] for part in parts] for name in names}
    sample.multimodal_train_inputs = {name: torch.cat(values) for name, values in merged.items()}
    sample.response = state.tokenizer.decode(sample.tokens[-sample.response_length :])
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate_ours(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Calls the processor itself, and leaves the request to the run's own generate function."""
    from slime.rollout.sglang_rollout import generate as own

    state = GenerateState(args)
    ids, sample.multimodal_train_inputs, _ = process(state.processor, sample.prompt, sample.multimodal_inputs)
    sample.tokens = list(ids)
    return await own(args, sample, sampling_params)


async def generate_rendered(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Has the shape of upstream vime's example: the engine renders the messages and processes their images, and each
    turn posts the rendered request again with more ids. Observations are texts."""
    from vime.rollout.vllm_rollout import (
        _build_inference_sampling_params,
        _coerce_flat_int_token_ids,
        _mm_render_response_to_generate_body,
    )
    from vllm.entrypoints.serve.disagg.mm_serde import decode_mm_kwargs_item

    state, environment = GenerateState(args), Environment(sample, args.max_turns, shows="text")
    base = f"http://{args.vllm_router_ip}:{args.vllm_router_port}"
    messages = []
    for message in sample.prompt:
        parts = [
            {"type": "image_url", "image_url": {"url": encode_image_for_rollout_engine(part["image"])}}
            if part["type"] == "image"
            else part
            for part in message["content"]
        ]
        messages.append({**message, "content": parts})
    rendered = await post(
        f"{base}/v1/chat/completions/render", {"model": args.hf_checkpoint, "messages": messages}
    )
    body = _mm_render_response_to_generate_body(rendered, args.hf_checkpoint)
    sample.tokens, sample.loss_mask = _coerce_flat_int_token_ids(body["token_ids"]), []
    body.pop("request_id", None)
    body["sampling_params"] = _build_inference_sampling_params(sampling_params)
    while True:
        body["token_ids"] = list(sample.tokens)
        (choice,) = (await post(f"{base}/inference/v1/generate", body))["choices"]
        log_probs = [one["logprob"] for one in choice["logprobs"]["content"]]
        sample.append_response_tokens(args, tokens=choice["token_ids"], log_probs=log_probs, trainable=True)
        found, done = environment.step(state.tokenizer.decode(choice["token_ids"]))
        if done:
            break
        ids, *_ = encode_observation(state, args, environment.format_observation(found))
        sample.append_response_tokens(args, tokens=ids, log_probs=[0.0] * len(ids), trainable=False)
    items = [decode_mm_kwargs_item(one).get_data() for one in body["features"]["kwargs_data"]["image"]]
    sample.multimodal_train_inputs = {
        "pixel_values": torch.cat([item["pixel_values"] for item in items]),
        "image_grid_thw": torch.cat([item["image_grid_thw"].reshape(1, -1) for item in items]),
    }
    sample.response = state.tokenizer.decode(sample.tokens[-sample.response_length :])
    sample.status = Sample.Status.COMPLETED
    return sample
