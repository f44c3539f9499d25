"""Sandboxes that run a model's commands. The package exports the names that plug-ins of slime import."""

from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.modal import ModalSandbox
from slime.agent.sandbox.plug_ins import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ensure_agent_user,
    exec_and_wait,
    make_sandbox,
)
from slime.agent.sandbox.protocol import ExecResult, FileContent, Limits, Sandbox, SandboxError
from slime.system.upstream import refused_names

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "ContainerSandbox",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "Limits",
    "LocalSandbox",
    "ModalSandbox",
    "Sandbox",
    "SandboxError",
    "ensure_agent_user",
    "exec_and_wait",
    "make_sandbox",
]
__getattr__ = refused_names("slime.agent.sandbox")
