"""Runs unchanged third-party programs as agents of sessions, and checks their samples.

    pip install --target PACKAGES openai-agents smolagents mini-swe-agent langgraph langchain-openai claude-agent-sdk
    python benchmarks/agent_programs.py PACKAGES [NAME]

Each program runs in a separate process with a session over a real vLLM engine on CPUs, with a tiny random model. Such
a model writes no JSON. Therefore `Calls` adds the tool calls to its answers, in the order in which the program needs
them. The tokens are the model's. The script ends with exit status 1 unless each program succeeds with its expected
samples and without a prefix mismatch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/slime"), str(ROOT / "tests/slime/sessions")]

from engine_fixtures import Stack  # noqa: E402
from rollout_double import make_args  # noqa: E402
from session_double import TOOLS  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from slime.agent.harness.program import endpoint  # noqa: E402
from slime.config import Config  # noqa: E402
from slime.rollout.state import GenerateState  # noqa: E402
from slime.sessions import open_session  # noqa: E402
from slime.sessions.messages import Reply, ToolCall  # noqa: E402
from slime.types import Sample  # noqa: E402

CONTEXT = 16384
TIME_S = 240
AGENTS_SDK = """
import asyncio, sys
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI

@function_tool
def add(a: int, b: int) -> str:
    "The sum of a and b."
    return str(a + b)

async def main():
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="sums", instructions="Use the tool.", model=model, tools=[add])
    found = Runner.run_streamed(agent, "what is 12 + 34", max_turns=5)
    async for _ in found.stream_events():
        pass
    again = [*found.to_input_list(), {"role": "user", "content": "and 5 more"}]
    result = await Runner.run(agent, again, max_turns=5)
    print("final:", result.final_output)

asyncio.run(main())
"""
SMOLAGENTS = """
import os
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''The sum of two numbers.

    Args:
        a: one number
        b: the other
    '''
    return a + b

model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, stream_outputs=True)
print("final:", agent.run("what is 12 + 34"))
"""
LANGGRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

@tool
def add(a: int, b: int) -> int:
    "The sum of a and b."
    return a + b

model = ChatOpenAI(model="policy").bind_tools([add])

def ask(state):
    return {"messages": [model.invoke(state["messages"])]}

graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")
agent = graph.compile()
asked = {"messages": [("system", "Use the tool."), ("user", "what is 12 + 34")]}
for state in agent.stream(asked, stream_mode="values"):
    pass
state = agent.invoke({"messages": [*state["messages"], ("user", "and 5 more")]})
print("final:", state["messages"][-1].content)
"""
CLAUDE_SDK = """
import asyncio
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool

@tool("add", "The sum of a and b.", {"a": int, "b": int})
async def add(given):
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}

async def main():
    options = ClaudeAgentOptions(
        system_prompt="Use the tool.",
        mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
        tools=[],
        allowed_tools=["mcp__sums__add"],
        setting_sources=[],
        max_turns=4,
        model="policy",
    )
    async for message in query(prompt="what is 12 + 34", options=options):
        if isinstance(message, ResultMessage):
            assert message.subtype == "success", message
            print("final:", message.result)

asyncio.run(main())
"""
SUM = ("add", {"a": 12, "b": 34})
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MINI = [
    "-m",
    "minisweagent.run.mini",
    "-m",
    "openai/policy",
    "-t",
    "count the files",
    "-y",
    "--exit-immediately",
]
Call = tuple[str, dict[str, Any]] | None
PROGRAMS: dict[str, tuple[list[str], list[Call], int]] = {
    "openai-agents, chat completions": ([AGENTS_SDK, "chat"], [SUM, None, SUM, None], 1),
    "openai-agents, responses": ([AGENTS_SDK, "responses"], [SUM, None, SUM, None], 1),
    # The program repeats its calls as text in its own format, which the model did not write.
    "smolagents": ([SMOLAGENTS], [SUM, ("final_answer", {"answer": "46"})], 2),
    "langgraph": ([LANGGRAPH], [SUM, None, SUM, None], 1),
    # The package has the program Claude Code, which sends the requests.
    "claude-agent-sdk": ([CLAUDE_SDK], [("mcp__sums__add", SUM[1]), None], 1),
    "mini-swe-agent": (MINI, [("bash", {"command": "ls | wc -l"}), ("bash", {"command": DONE})], 1),
}
"""Program -> (arguments of `python`, whose first may be the text of a file; tool call of each answer, None for an
answer without a call; number of samples)."""


class Calls:
    """A `slime.sessions.messages.ChatParser` that adds the next call to each answer."""

    tools = True

    def __init__(self, calls: list[Call]) -> None:
        self.calls = list(calls)

    def parse(self, text: str, *_: object) -> Reply:
        call = self.calls.pop(0) if self.calls else None
        if call is None:
            return Reply(text)
        name, arguments = call
        return Reply(text, None, (ToolCall(name, json.dumps(arguments), f"call_{len(self.calls)}"),))


async def run_program(
    state: GenerateState, name: str, packages: str, folder: Path
) -> tuple[list[Sample], int, str]:
    """Runs one program. Returns the samples of its session, its exit code and its output."""
    words, calls, _ = PROGRAMS[name]
    if "\n" in words[0]:
        (file := folder / "program.py").write_text(words[0], encoding="utf-8")
        words = [str(file), *words[1:]]
    sample = Sample(prompt=name, index=0, session_id=f"rollout/{name}")
    # The tiny model's turns could end at any token, and an answer that ends by length has no call.
    params = state.sampling_params | {"stop_token_ids": [2], "max_new_tokens": 200}
    async with open_session(state.args, sample, params, parser=Calls(calls)) as session:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": packages,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **endpoint(session.base_url, session.api_key),
        }
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, *words),
            env=env,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(program.communicate(), TIME_S)
    return session.samples(), program.returncode or 0, said.decode(errors="replace")


def well(name: str, samples: list[Sample], code: int, said: str) -> bool:
    """Prints a line about a program. Returns False, and prints its output, if its result is not the expected one."""
    record = samples[0].metadata["session"]
    tokens = sum(len(sample.tokens) for sample in samples)
    trained = sum(sum(sample.loss_mask or []) for sample in samples)
    print(
        f"{name}: exit code {code}, ended {record['ended']}, {record['turns']} turns, "
        f"{record['tool_calls']} tool calls, {record['samples']} samples, "
        f"prefix mismatches {record['prefix_mismatch']}, {tokens} tokens, {trained} of the model",
        flush=True,
    )
    for sample in samples:
        sample.check()
    _, calls, count = PROGRAMS[name]
    found = (code, record["ended"], record["turns"], record["samples"], record["prefix_mismatch"])
    if found == (0, "done", len(calls), count, 0):
        return True
    print(record, said[-3000:])
    return False


@contextmanager
def serving(folder: Path) -> Iterator[GenerateState]:
    """Yields the state of a rollout over a real engine with a context of CONTEXT tokens."""
    stack = Stack(folder)
    file = stack.checkpoint / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"max_position_embeddings": CONTEXT}
    file.write_text(json.dumps(config), encoding="utf-8")
    stack.pool.start()
    try:
        stack.push(stack.checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint, chat_template=TOOLS)
        args: Any = make_args(rollout_max_response_len=200, rollout_deadline_s=90.0)
        config_of_run = Config.from_args(args)
        state = GenerateState(config_of_run, stack.pool.client(), tokenizer, hook_args=args).enter()
        try:
            yield state
        finally:
            state.close()
    finally:
        stack.pool.stop()


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as state:
        home = Path(name) / "home"
        home.mkdir()
        results = []
        for program in PROGRAMS:
            if len(sys.argv) > 2 and sys.argv[2] not in program:
                continue
            found = state.run(run_program(state, program, sys.argv[1], home))
            results.append(well(program, *found))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
