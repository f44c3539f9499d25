"""Plug-ins in the shapes of slime's examples train a step: their results pass the border check and reach the trainer.

A server answers /generate as the gateway does. tests/e2e/engines/conformance/agent_cases.py has a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from aiohttp import web
from plug_in_shapes import RESULT
from rollout_double import ListSource, make_args, make_state
from trainer_cases import rank_data

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.vllm_rollout import generate_rollout
from slime.utils.types import Sample

WRITTEN = "ab?"


@pytest.fixture(scope="module")
def router() -> Iterator[int]:
    """Yields the port of a server that answers WRITTEN to every prompt, with log-probs."""

    async def generate(request: web.Request) -> web.Response:
        prompt = (await request.json())["input_ids"]
        ids = [64 + ord(letter) % 30 for letter in WRITTEN]
        meta = {
            "output_token_logprobs": [[-4.5, token, None] for token in ids],
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
        }
        return web.json_response({"text": WRITTEN, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    handle = run_app_in_thread(app)
    yield handle.port
    handle.stop()


TURN, TOOL = len(WRITTEN), len(RESULT)
DIALOGUE = [*[1] * TURN, *[0] * TOOL, *[1] * TURN]


@pytest.mark.parametrize(
    ("name", "mask", "siblings"),
    [
        ("retool", DIALOGUE, 1),
        ("search", DIALOGUE, 1),
        ("environment", DIALOGUE, 1),
        ("stream", [1] * TURN, 1),
        ("several", [1] * TURN, 2),
        ("judged", [1] * TURN, 1),
    ],
)
def test_what_a_plug_in_returns_trains_a_step(
    build, router: int, name: str, mask: list[int], siblings: int
) -> None:
    here = "plug_in_shapes"
    args = make_args(
        custom_generate_function_path=f"{here}.{name}", custom_rm_path=f"{here}.reward", reward_key="score",
        rollout_batch_size=4,
    )  # fmt: skip
    if name in ("several", "judged"):
        args.reward_key = args.custom_rm_path = None
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", router
    make_state(args)
    groups = generate_rollout(args, 0, ListSource(args, [f"q{n}:" for n in range(4)])).samples
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 8 * siblings
    for sample in samples:
        sample.check(require_log_probs=name != "judged")
        assert sample.loss_mask == mask and sample.status is Sample.Status.COMPLETED
        assert sample.response_length == len(mask)
    trainer = build(reward_key=args.reward_key)
    (step,) = trainer.train(0, rank_data(trainer.config, samples)).steps
    assert step["train/grad_norm"] > 0 and step["train/loss"] == step["train/loss"]
