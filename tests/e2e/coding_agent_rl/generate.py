"""A generate function with the imports and calls of slime's coding-agent example, in this project's own words.

One sample is one task: the agent edits a repository in a sandbox, and a fresh sandbox checks the change. The test that
uses this file also runs it with `slime` replaced by `vime`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from contextlib import asynccontextmanager

from slime.agent.adapters import AnthropicAdapter, ResponsesAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import Sandbox
from slime.utils.misc import SingletonMeta, get_current_node_ip
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

from . import swe
from .sandbox import create_sandbox

logger = logging.getLogger(__name__)
AGENTS = {"claude_code": (ClaudeCodeHarness, AnthropicAdapter), "codex": (CodexHarness, ResponsesAdapter)}
PUBLIC_HOST = os.environ.get("ADAPTER_PUBLIC_HOST", "auto")
BIND_HOST = os.environ.get("ADAPTER_BIND_HOST", "127.0.0.1")
GUARD_S = float(os.environ.get("SWE_ROLLOUT_GUARD_SEC", "120"))
_starts = asyncio.Semaphore(int(os.environ.get("SWE_BOOT_CONCURRENCY", "16")))


class Service(metaclass=SingletonMeta):
    """The adapters of this process, one per kind of agent."""

    def __init__(self, args):
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.context = int(getattr(args, "rollout_max_context_len", 0) or 0)
        self.router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        self.served = {}

    def endpoint(self, agent):
        if agent not in self.served:
            adapter = AGENTS[agent][1](
                tokenizer=self.tokenizer,
                sglang_url=self.router,
                tool_parser=getattr(self.args, "sglang_tool_call_parser", None),
                reasoning_parser=getattr(self.args, "sglang_reasoning_parser", None),
                fork_threshold_tokens=int(os.environ.get("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS") or 0),
                rollout_args=self.args,
            )
            handle = run_app_in_thread(
                adapter.app,
                host=BIND_HOST,
                port=0,
                thread_name=f"{agent}-adapter",
                runner_kwargs={"handler_cancellation": True, "access_log_class": FilteredAccessLogger},
            )
            host = get_current_node_ip() if PUBLIC_HOST == "auto" else PUBLIC_HOST
            self.served[agent] = (adapter, f"http://{host}:{handle.port}", handle)
        return self.served[agent]


@asynccontextmanager
async def started(image: str, harness) -> Sandbox:
    """A sandbox with the agent's program."""
    box = create_sandbox(image)
    async with _starts:
        await box.__aenter__()
        await harness.install_cli(box)
    try:
        yield box
    finally:
        await box.__aexit__(None, None, None)


async def generate(args, base_sample: Sample, sampling_params, evaluation: bool = False):
    """Runs the agent on the task of the sample, and returns the samples of its session."""
    service = Service(args)
    agent = (base_sample.metadata or {}).get("agent", "claude_code")
    harness = AGENTS[agent][0]()
    adapter, url, _ = service.endpoint(agent)
    task = swe.get_metadata(base_sample)
    if not task["image"] or not task["workdir"]:
        return aborted(base_sample, "no image")
    name = base_sample.session_id or f"task-{secrets.token_hex(8)}"
    base_sample.session_id = name
    adapter.open_session(
        name,
        sampling_defaults=sampling_params,
        max_context_tokens=service.context,
        apply_chat_template_kwargs={
            **(getattr(args, "apply_chat_template_kwargs", None) or {}),
            **(base_sample.apply_chat_template_kwargs or {}),
        },
    )
    try:
        async with asyncio.timeout(GUARD_S):
            async with started(task["image"], harness) as box:
                baseline = await swe.prepare_workspace(box, task["workdir"], task)
                code = await harness.run(
                    box,
                    workdir=task["workdir"],
                    session_id=name,
                    adapter_url=url,
                    time_budget_sec=60,
                    prompt=swe.PROMPT,
                )
                change = await swe.git_diff(box, task["workdir"], baseline)
            result = await swe.run_evaluation(task, diff_text=change, timeout_sec=60)
            samples = await adapter.finish_session(
                name,
                base_sample=base_sample,
                reward=float(result.reward),
                extra_metadata={"instance_id": task["instance_id"], "agent": agent},
            )
            for one in samples:
                one.metadata = {**(one.metadata or {}), "agent_exit_code": code}
            return samples or aborted(base_sample, "no request")
    except TimeoutError:
        return aborted(base_sample, "time")
    finally:
        await adapter.drop_session(name, wait_timeout=30)


def aborted(sample: Sample, reason: str):
    logger.warning("task ended without samples: %s", reason)
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.reward, sample.remove_sample = 0.0, True
    sample.status = Sample.Status.ABORTED
    sample.metadata = {**(sample.metadata or {}), "abort_reason": reason}
    return [sample]
