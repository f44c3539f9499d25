"""Where commands of a model run. The names that plug-ins of slime import are here, too."""

from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.protocol import ExecResult, FileContent, Limits, Sandbox, SandboxError

__all__ = ["ExecResult", "FileContent", "Limits", "LocalSandbox", "Sandbox", "SandboxError"]
