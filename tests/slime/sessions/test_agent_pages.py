"""Runs the first example of docs/agents.md as printed, with an engine that has scripted answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rollout_double import CHATML, make_args, make_state
from session_double import END, QwenParser, Scripted

from slime.types import Sample


def parser(args: Any, tokenizer: Any) -> QwenParser:
    return QwenParser()


def test_the_first_agent_answers_and_is_scored(caplog: Any) -> None:
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    names: dict[str, Any] = {}
    exec(re.search(r'^```python title="my_agent\.py"\n(.*?)^```$', page, re.M | re.S)[1], names)
    args = make_args(rollout_max_response_len=40)
    args.chat_parser_path = "test_agent_pages.parser"
    engine = Scripted(lambda prompt: "it is 46" + END)
    engine.tokenizer.chat_template = CHATML
    state = make_state(args, engine.tokenizer)
    state.engine = engine

    async def run(label: str) -> tuple[list[Sample], list[float]]:
        sample = Sample(prompt="12+34=", label=label, index=3, session_id="rollout/3")
        made = await names["generate"](args, sample, state.sampling_params)
        return made, await names["score"](args, made)

    (made,), rewards = state.run(run("46"))
    assert rewards == [1.0] and state.run(run("47"))[1] == [0.0]
    assert made.response == "it is 46" + END and made.loss_mask == [1] * made.response_length
    assert engine.calls[0][0] == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    used = names["connections"].cache_info()
    assert (used.misses, used.hits) == (1, 1), "making connections blocks the loop for all other samples"
    assert not caplog.messages
