"""Runs programs of others as agents of sessions on a real engine: LangGraph, and the Claude Agent SDK with Claude Code.

The programs and their expected turns are those of benchmarks/agent_programs.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import agent_programs
import pytest

from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PACKAGES = ("langgraph==1.2.22", "langchain-openai==1.7.4", "claude-agent-sdk==0.2.184")
INSTALL_S = 400


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the packages, which the environment of this project does not have."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        pytest.skip(f"the packages of the programs cannot be installed: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerateState]:
    with agent_programs.serving(tmp_path_factory.mktemp("programs")) as made:
        yield made


@pytest.mark.parametrize("program", ["langgraph", "claude-agent-sdk"])
def test_a_program_of_others_makes_samples(
    packages: Path, state: GenerateState, tmp_path: Path, program: str
) -> None:
    samples, code, said = state.run(agent_programs.run_program(state, program, str(packages), tmp_path))
    assert agent_programs.well(program, samples, code, said), said
    assert "final:" in said
