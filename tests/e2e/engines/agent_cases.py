"""A plug-in like slime's examples/coding_agent_rl over a real engine: adapter, sandbox, harness, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_double import make_args
from session_cases import QUESTION, TEMPLATE, check
from transformers import AutoTokenizer

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter, ResponsesAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.harness.common import environment_of, run_command
from slime.agent.sandbox import LocalSandbox, Sandbox, exec_and_wait
from slime.rollout.state import GenerateState
from slime.types import Sample

ASKS = {
    "OpenAIAdapter": ("OPENAI_BASE_URL", "/chat/completions", "messages"),
    "ResponsesAdapter": ("OPENAI_BASE_URL", "/responses", "input"),
    "AnthropicAdapter": ("ANTHROPIC_BASE_URL", "/v1/messages", "messages"),
}
AGENT = """
import json, os, sys, urllib.request
variable, path, field = sys.argv[1:4]
said = []

def ask(path, **more):
    body = json.dumps({"model": "its-own-name", field: said, "max_tokens": 12, **more}).encode()
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(os.environ[variable] + path, body, headers)).read().decode()

def text(answer):
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    return (answer.get("content") or answer["output"][0]["content"])[0]["text"]

for question in (sys.argv[4], "and 5 more"):
    said.append({"role": "user", "content": question})
    if path == "/v1/messages":
        assert json.loads(ask(path + "/count_tokens"))["input_tokens"] > 5
    said.append({"role": "assistant", "content": text(json.loads(ask(path)))})
said.append({"role": "user", "content": "and 6"})
events = ask(path, stream=True)
assert events.count("data: ") > 3, events
open("answer.txt", "w").write(said[1]["content"])
"""


class Program(BaseHarness):
    """The agent above."""

    name = "program"

    def __init__(self, asks: tuple[str, str, str]) -> None:
        self.asks = asks

    async def install_cli(self, sb: Sandbox) -> None:
        await sb.write_file("agent.py", AGENT)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None: ...

    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        words = " ".join(f"'{word}'" for word in (*self.asks, prompt))
        command, env = f"/usr/bin/python3 agent.py {words}", environment_of(ctx)
        return await run_command(
            sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec
        )


class PlugIn:
    """What such a plug-in keeps for a process, and its generate function."""

    def __init__(self, adapter: type[BaseAdapter], tokenizer: Any) -> None:
        self.adapter = adapter(tokenizer=tokenizer, sglang_url="http://127.0.0.1:1")
        runner = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger}
        self.handle = run_app_in_thread(self.adapter.app, host="127.0.0.1", runner_kwargs=runner)
        self.harness = Program(ASKS[adapter.__name__])

    async def generate(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        key = str(sample.session_id)
        self.adapter.open_session(key, sampling_defaults=sampling_params, max_context_tokens=500)
        try:
            async with LocalSandbox(network="loopback") as sandbox:
                await self.harness.install_cli(sandbox)
                code = await self.harness.run(
                    sandbox,
                    workdir=str(sandbox.workdir),
                    session_id=key,
                    adapter_url=f"http://127.0.0.1:{self.handle.port}",
                    time_budget_sec=60,
                    prompt=QUESTION,
                )
                said = await sandbox.read_file(".harness/trajectory.jsonl")
                assert code == 0, said
                passed, _ = await exec_and_wait(
                    sandbox, cmd="test -s answer.txt", time_budget_sec=10, tag="evaluation"
                )
            return await self.adapter.finish_session(
                key, base_sample=sample, reward=float(passed == 0), extra_metadata={"agent_rc": code}
            )
        finally:
            await self.adapter.finish_session(key)


@pytest.mark.parametrize("adapter", [OpenAIAdapter, ResponsesAdapter, AnthropicAdapter])
def test_a_coding_agents_plug_in_makes_samples(served: Any, adapter: type[BaseAdapter]) -> None:
    checkpoint = served.stack.checkpoint
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, chat_template=TEMPLATE)
    args = make_args(rollout_max_response_len=16, rollout_deadline_s=90.0)
    args.rollout_state = state = GenerateState(args, served.pool.client(), tokenizer)
    plug_in = PlugIn(adapter, tokenizer)
    try:
        for again in range(2):  # a group that is drawn again has the same key
            sample = Sample(prompt="x", index=3, session_id="rollout/3", label="l", metadata={"again": again})
            (made,) = state.run(plug_in.generate(args, sample, state.sampling_params))
            check(made, checkpoint, served.stack.version)
            assert made.reward == 1.0 and made.label == "l" and made.session_id == "rollout/3"
            assert made.metadata["agent_rc"] == 0 and made.metadata["again"] == again
    finally:
        plug_in.handle.stop()
        state.close()
