"""Runs Claude Code without a terminal. This project never ran it: a test checks its command and files with a
substitute."""

from __future__ import annotations

import json
import shlex

from slime.agent.harness.common import (
    BaseHarness,
    HarnessContext,
    find_home,
    get_environment,
    install,
    run_command,
)
from slime.agent.sandbox import Sandbox
from slime.agent.settings import extra_environment, setting

_FLAGS = "--permission-mode bypassPermissions --output-format stream-json --verbose"


class ClaudeCodeHarness(BaseHarness):
    name = "claude_code"

    async def install_cli(self, sb: Sandbox) -> None:
        await install(sb, "claude", "CC_TARBALL")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Writes the consent for which the program would prompt at its first start."""
        consent = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
        for file in (".claude.json", ".claude/settings.json"):
            await sb.write_file(f"{find_home(sb)}/{file}", consent, user="agent")

    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        command = f"claude -p {shlex.quote(prompt)} {_FLAGS} {setting('CC_EXTRA_ARGS') or ''}".rstrip()
        env = get_environment(ctx)
        key = env.pop("ANTHROPIC_API_KEY")
        env = {
            **env,
            # The program prompts for consent before it uses a key, but not for a token.
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **extra_environment("CC_EXTRA_ENVS"),
        }
        return await run_command(
            sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec
        )


CLAUDE_CODE = ClaudeCodeHarness()
