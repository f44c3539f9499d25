"""Programs that are agents: any command with `run_agent`, Claude Code and Codex by name."""

from slime.agent.harness.claude_code import CLAUDE_CODE, ClaudeCodeHarness
from slime.agent.harness.codex import CODEX, CodexHarness
from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.harness.program import run_agent

__all__ = [
    "CLAUDE_CODE",
    "CODEX",
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "HarnessContext",
    "run_agent",
]
