"""Runs plug-ins with the shapes of slime's examples on a real engine. Plug-ins with several turns train a step. One
plug-in has adapter, sandbox, harness and evaluation, like coding_agent_rl.

test_backend_conformance.py runs these tests on its engine, which still serves after them.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from aiohttp import web
from engine_fixtures import Stack, hf_log_probs
from plug_in_shapes import RESULT, TURNS
from rollout_double import ListSource, make_args
from session_cases import QUESTION, TEMPLATE, check
from trainer_cases import make_config, rank_data
from transformers import AutoTokenizer

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter, ResponsesAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.harness.common import get_environment, run_command
from slime.agent.sandbox import LocalSandbox, Sandbox, exec_and_wait, plug_ins
from slime.agent.trajectory import fan_out_sample_segments
from slime.config import Config
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns
from slime.environments.figures import figures as environment_figures
from slime.hooks import SingletonMeta, load_function
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.peers.http import get_host_info
from slime.rollout.state import GenerateState
from slime.rollout.vllm_rollout import generate_rollout
from slime.sessions.environments import generate
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
    """The harness of the agent above."""

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
        command, env = f"/usr/bin/python3 agent.py {words}", get_environment(ctx)
        return await run_command(
            sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec
        )


def test_an_adapter_in_a_process_without_a_run_uses_a_router(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's check of a rollout gives an adapter the router's address and a few flags."""
    monkeypatch.setattr("slime.rollout.state._entered", [])
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint, chat_template=TEMPLATE)
    flags = SimpleNamespace(rollout_max_context_len=400, vllm_tool_call_parser=None)
    spec = stack.pool.client()
    adapter = AnthropicAdapter(tokenizer=tokenizer, vllm_url=spec.router_url, rollout_args=flags)
    monkeypatch.delenv("VIME_RUN_KEY", raising=False)
    with pytest.raises(ValueError, match="VIME_RUN_KEY must hold the key"):
        adapter.open_session("a")
    monkeypatch.setattr("vime.pool.external.LEAST_KEY", len(Stack.key))
    monkeypatch.setenv("VIME_RUN_KEY", Stack.key)
    handle = run_app_in_thread(adapter.app)

    async def main() -> list[Sample]:
        key = adapter.open_session("b", sampling_defaults={"max_new_tokens": 16, "temperature": 1.0})
        url = f"http://127.0.0.1:{handle.port}"
        async with anthropic.AsyncAnthropic(base_url=url, auth_token=key, api_key=None) as client:
            said: Any = [{"role": "user", "content": QUESTION}]
            await client.messages.create(model="any", max_tokens=16, messages=said)
        segments = await adapter.finish_session("b")
        return fan_out_sample_segments(Sample(index=3), segments, 1.0, tokenizer)

    try:
        (sample,) = asyncio.run(main())
    finally:
        handle.stop()
    sample.check()
    assert (sample.reward, sample.rollout_id) == (1.0, 3) and set(sample.weight_versions) == {stack.version}
    length = sample.response_length
    expected = hf_log_probs(stack.checkpoint, sample.tokens[:-length], sample.tokens[-length:], 1.0)
    assert sample.rollout_log_probs == pytest.approx(expected.tolist(), abs=1e-4)


class Tasks(ListSource):
    """Tasks of the coding-agent stand-in."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        groups = super().get_samples(num_groups)
        for sample in (sample for group in groups for sample in group):
            sample.prompt = [{"role": "user", "content": [{"type": "text", "text": sample.prompt}]}]
            check = "python3 -c 'import add; assert add.add(1, 2) == 3; print(\"checked\")'"
            sample.metadata = {"image": "repository", "workdir": "/testbed", "eval_cmd": check}
        return groups


class PlugIn:
    """The state of such a plug-in in a process, and its generate function."""

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
    state = GenerateState(Config.from_args(args), served.pool.client(), tokenizer, hook_args=args).enter()
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


def rolled_out(stack: Stack, shape: str) -> list[Sample]:
    """Returns 4 groups of 2 samples from a generate function of `plug_in_shapes`, which posts to the run's gateway."""
    args = make_args(
        custom_generate_function_path=f"plug_in_shapes.{shape}",
        custom_rm_path="plug_in_shapes.reward",
        reward_key="score",
        rollout_batch_size=4,
        rollout_deadline_s=90.0,
    )
    facts, tokenizer = stack.pool.facts, AutoTokenizer.from_pretrained(stack.checkpoint)
    args.sglang_router_ip, args.sglang_router_port = facts["sglang_router_ip"], facts["sglang_router_port"]
    state = GenerateState(Config.from_args(args), stack.pool.client(), tokenizer, hook_args=args).enter()
    try:
        groups = generate_rollout(args, 0, ListSource(args, [f"{n}+{n}=" for n in range(4)])).samples
    finally:
        state.close()
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("shape", ["retool", "search", "environment"])
def test_a_plug_in_of_several_turns_trains_a_step(stack: Stack, tmp_path: Path, shape: str) -> None:
    """The engine returns log-probs for the model's own tokens, and the tool's tokens are not trained on."""
    samples = rolled_out(stack, shape)
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    result = tokenizer.encode(RESULT, add_special_tokens=False)
    assert len(samples) == 8 and {sample.reward["score"] for sample in samples} == {0.0, 1.0}
    for sample in samples:
        sample.check()
        length, mask = sample.response_length, sample.loss_mask
        response = sample.tokens[-length:]
        assert [token for token, on in zip(response, mask, strict=True) if not on] == result * (TURNS - 1)
        expected = hf_log_probs(stack.checkpoint, sample.tokens[:-length], response, 1.0).tolist()
        own = [value if on else 0.0 for value, on in zip(expected, mask, strict=True)]
        assert sample.rollout_log_probs == pytest.approx(own, abs=1e-4)
    model = str(stack.checkpoint)
    config = make_config(
        tmp_path, hf_checkpoint=model, load=model, ref_load=model, reward_key="score", max_tokens_per_gpu=64
    )
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store")
    try:
        (step,) = trainer.train(0, rank_data(trainer.config, samples)).steps
    finally:
        trainer.close()
    assert step["train/grad_norm"] > 0 and math.isfinite(step["train/loss"])
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.parametrize("package", ["slime", "vime"])
def test_the_coding_agent_example_runs_as_it_is(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The stand-in has the imports and calls of slime's example, or of upstream vime's. Its agent reaches the adapter
    at this host's address, corrects the program, and passes the check in a fresh sandbox."""
    source = Path(__file__).parents[2] / "coding_agent_rl"
    folder = tmp_path / f"coding_agent_{package}"
    folder.mkdir()
    for file in source.glob("*.py"):
        text = file.read_text(encoding="utf-8").replace("slime", package).replace("SLIME", package.upper())
        (folder / file.name).write_text(
            text if package == "slime" else text.replace("sglang_", "vllm_"), encoding="utf-8"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plug_ins, "POLL_S", 0.2)
    monkeypatch.setenv("ADAPTER_BIND_HOST", get_host_info()[1])
    template = "{% if x is defined %}<|im_start|>{{ x }}<|im_end|>{% endif %}" + TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint, chat_template=template)
    path = f"coding_agent_{package}.generate.generate"
    args = make_args(
        hf_checkpoint=str(stack.checkpoint),
        custom_generate_function_path=path,
        rollout_max_response_len=16,
        rollout_max_context_len=400,
        rollout_deadline_s=90.0,
        apply_chat_template_kwargs={"x": "1"},
    )
    vars(args).update({name: value for name, value in stack.pool.facts.items() if "router_" in name})
    state = GenerateState(Config.from_args(args), stack.pool.client(), tokenizer, hook_args=args).enter()
    try:
        groups = generate_rollout(args, 0, Tasks(args, ["fix the sum", "fix it again"])).samples
        service = load_function(f"coding_agent_{package}.generate.Service")(args)
    finally:
        state.close()
        SingletonMeta.clear_all_instances()
    service.served["claude_code"][2].stop()
    assert not service.served["claude_code"][1].startswith("http://127.") or get_host_info()[1] == "127.0.0.1"
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 4
    for sample in samples:
        sample.check()
        assert (sample.reward, sample.metadata["agent_exit_code"]) == (1.0, 0)
        assert sample.metadata["session"]["turns"] == 2 and sum(sample.loss_mask or []) >= 2
        length = sample.response_length
        assert "1<|im_end|>" in tokenizer.decode(sample.tokens[:-length])
        expected = hf_log_probs(stack.checkpoint, sample.tokens[:-length], sample.tokens[-length:], 1.0)
        trained = [i for i, on in enumerate(sample.loss_mask or []) if on]
        found = [(sample.rollout_log_probs or [])[i] for i in trained]
        assert found == pytest.approx(expected[trained].tolist(), abs=1e-4)


class WordServer:
    """A resource server with NeMo Gym's routes, in a thread. The reward is the share of odd characters."""

    def __init__(self) -> None:
        self.seeded: list[Any] = []
        self.verified: dict[float, str] = {}
        app = web.Application()
        app.router.add_get("/openapi.json", self.describe)
        app.router.add_post("/seed_session", self.seed)
        app.router.add_post("/verify", self.verify)
        self.handle = run_app_in_thread(app, host="127.0.0.1")

    async def describe(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def seed(self, request: web.Request) -> web.Response:
        self.seeded.append(await request.json())
        response = web.json_response({})
        response.set_cookie("session", str(len(self.seeded)))
        return response

    async def verify(self, request: web.Request) -> web.Response:
        row = await request.json()
        text = row["response"]["output"][0]["content"][0]["text"]
        share = sum(ord(character) % 2 for character in text) / max(1, len(text))
        self.verified[share] = text
        return web.json_response({**row, "reward": share, "session": int(request.cookies["session"])})


def test_episodes_of_an_environment_make_samples(served: Any, tmp_path: Path) -> None:
    """The connector of NeMo Gym needs no package. Each episode has cookies of its own."""
    server, checkpoint = WordServer(), served.stack.checkpoint
    rows = [
        {"responses_create_params": {"input": f"{QUESTION} {number}"}, "answer": "l"} for number in range(3)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"nemo-gym:http://127.0.0.1:{server.handle.port}?data={tmp_path / 'tasks.jsonl'}"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, chat_template=TEMPLATE)
    args = make_args(rollout_max_response_len=16, rollout_deadline_s=90.0)
    state = GenerateState(Config.from_args(args), served.pool.client(), tokenizer, hook_args=args).enter()

    async def all_of() -> list[Any]:
        found = load_prompts(text, RowColumns(input_key="prompt"))
        samples = [Sample(prompt=one.text, index=n, metadata=one.metadata) for n, one in enumerate(found)]
        return await asyncio.gather(*(generate(args, one, state.sampling_params) for one in samples))

    try:
        made = [sample for one in state.run(all_of()) for sample in one]
    finally:
        state.close()
        server.handle.stop()
    assert [sample.label for sample in made] == ["l"] * 3 and len(server.seeded) == 3
    for sample in made:
        sample.check()
        assert sample.metadata["session"]["ended"] == "done" and sample.rollout_log_probs is not None
        whole = tokenizer.decode(sample.tokens[-sample.response_length :])
        assert whole.startswith(server.verified[sample.reward])
        start = len(sample.tokens) - sample.response_length
        expected = hf_log_probs(checkpoint, sample.tokens[:start], sample.tokens[start:], 1.0).tolist()
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)
    found = environment_figures(made)
    assert found["environment/session"] == 2.0, "each of the three episodes has a cookie of its own"
