"""Runs Codex without a terminal. This project never ran it: a test checks its command and files with a substitute."""

from __future__ import annotations

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

# Codex runs in our sandbox. Codex's sandbox cannot be nested in it, so it is switched off.
_FLAGS = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"
_CONFIG = """\
model = "{model}"
model_provider = "session"

[model_providers.session]
name = "session"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


class CodexHarness(BaseHarness):
    name = "codex"

    async def install_cli(self, sb: Sandbox) -> None:
        await install(sb, "codex", "CODEX_TARBALL")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Writes a configuration with a separate provider, because the environment changes only OpenAI's address."""
        text = _CONFIG.format(model=ctx.model_label, base_url=get_environment(ctx)["OPENAI_BASE_URL"])
        await sb.write_file(f"{find_home(sb)}/.codex/config.toml", text, user="agent")

    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        command = f"codex exec {_FLAGS} {setting('CODEX_EXTRA_ARGS') or ''} {shlex.quote(prompt)}"
        return await run_command(
            sb,
            workdir=ctx.workdir,
            start_cmd=command,
            env={**get_environment(ctx), **extra_environment("CODEX_EXTRA_ENVS")},
            time_budget_sec=time_budget_sec,
        )


CODEX = CodexHarness()
