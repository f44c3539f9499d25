"""The task of the coding-agent stand-in: a workspace, its change as a patch, and the check in a fresh sandbox."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from slime.agent import sandbox as agent_sandbox
from slime.agent.adapters.common import flatten_content
from slime.agent.sandbox import Sandbox, exec_and_wait
from slime.utils.types import Sample

from .sandbox import create_sandbox

PROMPT = "Read PROBLEM_STATEMENT.md and fix the program."
LEFT_OUT = "':(exclude)PROBLEM_STATEMENT.md' ':(exclude).harness/'"


class Result(NamedTuple):
    reward: float
    applied: bool


def get_metadata(sample: Sample) -> dict:
    data = sample.metadata or {}
    question = next((m["content"] for m in sample.prompt if m["role"] == "user"), "")
    return {
        "instance_id": data.get("instance_id", "unknown"),
        "image": data.get("image"),
        "workdir": data.get("workdir"),
        "problem_statement": data.get("problem_statement") or flatten_content(question),
        "eval_cmd": data.get("eval_cmd"),
    }


async def prepare_workspace(box: Sandbox, workdir: str, task: dict) -> str:
    """Returns the tree of the files before the agent starts."""
    await agent_sandbox.ensure_agent_user(box, workdir)
    await box.write_file(f"{workdir}/PROBLEM_STATEMENT.md", task["problem_statement"], user="agent")
    return await tree(box, workdir)


async def tree(box: Sandbox, workdir: str) -> str:
    command = f"cd {shlex.quote(workdir)} && git add -A -- . {LEFT_OUT} && git write-tree"
    _, out, _ = await box.exec(command, user="agent", timeout=60, check=True)
    return out.strip()


async def git_diff(box: Sandbox, workdir: str, baseline: str) -> str:
    now = await tree(box, workdir)
    command = f"cd {shlex.quote(workdir)} && git diff --binary {baseline} {now}"
    _, out, _ = await box.exec(command, user="agent", timeout=60, check=True)
    return out


async def run_evaluation(task: dict, *, diff_text: str, timeout_sec: int) -> Result:
    """Applies the patch in a fresh sandbox, and runs the check there. 1.0 if the check ends with exit code 0."""
    folder = shlex.quote(task["workdir"])
    async with create_sandbox(task["image"]) as box:
        await agent_sandbox.ensure_agent_user(box, task["workdir"])
        await box.write_file("/tmp/change.diff", diff_text, user="agent")
        code, _, _ = await box.exec(f"cd {folder} && git apply /tmp/change.diff", user="agent", check=False)
        if diff_text.strip() and code:
            return Result(0.0, False)
        code, said = await exec_and_wait(
            box,
            cmd=f"cd {folder} && {task['eval_cmd']}",
            user="agent",
            time_budget_sec=timeout_sec,
            tag="evaluation",
            want_output=True,
        )
        return Result(float(code == 0 and "checked" in said), True)
