"""Sessions take images in the three dialects: the engine gets the processed images, and the sample has them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from session_double import END, Scripted, converse
from transformers import AutoTokenizer
from vision_cases import draw_image, encode_image, write_processor

from slime.sessions import Session
from slime.sessions.messages import PlainParser
from slime.types import Sample
from slime.vision.inputs import ImageInputs

IMAGE = "<|image_pad|>"


class Seeing(Scripted):
    """Records the images of each request."""

    def __init__(self, folder: str) -> None:
        super().__init__(lambda _: "blue" + END)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images: list[ImageInputs | None] = []

    async def generate(self, *args: Any, images: ImageInputs | None = None, **kwargs: Any) -> Any:
        self.images.append(images)
        return await super().generate(*args, **kwargs)


def data(color: str) -> str:
    return base64.b64encode(encode_image(draw_image((56, 56), color))).decode()


def parts(dialect: str, color: str, text: str) -> list[dict[str, Any]]:
    """The content of a message with an image, in the form of a dialect."""
    url = f"data:image/png;base64,{data(color)}"
    if dialect == "chat/completions":
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    if dialect == "responses":
        return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    source = {"type": "base64", "media_type": "image/png", "data": data(color)}
    return [{"type": "image", "source": source}, {"type": "text", "text": text}]


async def post(session: Session, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {session.api_key}", "x-api-key": session.api_key}
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            f"{session.base_url}/{path}", json={"model": session.model, **body}, headers=headers
        ) as answer,
    ):
        return answer.status, await answer.json()


def run(folder: Path, agent: Any) -> tuple[list[Sample], Seeing]:
    checkpoint = write_processor(folder / "model")
    found: list[Seeing] = []

    def prepare(_: Scripted, state: Any) -> None:
        state.engine = Seeing(checkpoint)
        state.tokenizer = state.engine.tokenizer
        found.append(state.engine)

    samples, _ = converse(
        agent, lambda _: "", prepare=prepare, parser=PlainParser(), hf_checkpoint=checkpoint
    )
    return samples, found[0]


@pytest.mark.parametrize("dialect", ["chat/completions", "responses", "messages"])
def test_an_image_reaches_the_engine_and_the_sample(dialect: str, tmp_path: Path) -> None:
    field = "input" if dialect == "responses" else "messages"

    async def agent(session: Session) -> None:
        first = {"role": "user", "content": parts(dialect, "blue", "color?")}
        body = {field: [first], "max_tokens": 40} if dialect == "messages" else {field: [first]}
        status, answer = await post(session, dialect, body)
        assert status == 200, answer
        second = {"role": "user", "content": parts(dialect, "red", "and now?")}
        reply = {"role": "assistant", "content": "blue"}
        status, answer = await post(session, dialect, body | {field: [first, reply, second]})
        assert status == 200, answer

    (sample,), engine = run(tmp_path, agent)
    one, two = engine.images
    assert one is not None and two is not None and len(one.items) == 1 and len(two.items) == 2
    assert two.items[0] == one.items[0] and two.items[1].key != one.items[0].key
    pad = engine.tokenizer.convert_tokens_to_ids(IMAGE)
    # 56 x 56 pixels are 4 x 4 patches, which are 2 x 2 ids
    assert [prompt.count(pad) for prompt in engine.prompts] == [4, 8]
    assert sample.tokens[: len(engine.prompts[1])] == engine.prompts[1]
    assert sample.multimodal_train_inputs == two
    assert [image.getpixel((28, 28)) for image in sample.multimodal_inputs["images"]] == [
        (0, 0, 255),
        (255, 0, 0),
    ]
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.multimodal_train_inputs == two


def test_a_tool_returns_an_image(tmp_path: Path) -> None:
    async def agent(session: Session) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": parts("chat/completions", "green", "done")},
        ]
        status, answer = await post(session, "chat/completions", {"messages": messages})
        assert status == 200, answer
        result = {"type": "tool_result", "tool_use_id": "c1", "content": parts("messages", "green", "done")}
        use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        turns = [("user", "look"), ("assistant", [use]), ("user", [result])]
        body = {"messages": [{"role": role, "content": content} for role, content in turns], "max_tokens": 9}
        status, answer = await post(session, "messages", body)
        assert status == 200, answer
        items = [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": parts("responses", "green", "done")},
        ]
        status, answer = await post(session, "responses", {"input": items})
        assert status == 200, answer

    _, engine = run(tmp_path, agent)
    keys = {images.keys for images in engine.images if images is not None}
    assert len(engine.images) == 3 and len(keys) == 1


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be its content in base64"),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, "must be its content in base64"),
        (
            {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}},
            "must be its content in base64",
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "must be valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "must be readable"),
        ({"type": "input_audio", "input_audio": {}}, "got a part of type input_audio"),
    ],
)
def test_a_bad_image_ends_the_session_with_its_reason(
    part: dict[str, Any], match: str, tmp_path: Path
) -> None:
    async def agent(session: Session) -> None:
        status, answer = await post(
            session, "chat/completions", {"messages": [{"role": "user", "content": [part]}]}
        )
        assert status == 400 and match in answer["error"]["message"]

    (sample,), engine = run(tmp_path, agent)
    assert engine.images == [] and sample.metadata["session"]["ended"] == "media"
