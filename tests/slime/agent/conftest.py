"""Runs every test of a local sandbox with namespaces and without."""

from __future__ import annotations

import asyncio

import pytest
import sandbox_cases

from slime.agent.sandbox import LocalSandbox, SandboxError


@pytest.fixture(params=["namespaces", "processes"])
def isolation(request, namespaces_work):
    if request.param == "namespaces" and not namespaces_work:
        # The sandbox raises an error if it cannot give the isolation that the caller asked for.
        with pytest.raises(SandboxError, match="refuses") as refusal:
            asyncio.run(LocalSandbox(isolation="namespaces").start())
        pytest.skip(str(refusal.value))
    return request.param


@pytest.fixture(scope="session")
def namespaces_work():
    return sandbox_cases.namespaces_work()
