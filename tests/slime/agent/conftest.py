"""Every test of a local sandbox runs with namespaces and without."""

from __future__ import annotations

import asyncio

import pytest
import sandbox_cases

from slime.agent.sandbox import LocalSandbox, SandboxError


@pytest.fixture(params=["namespaces", "processes"])
def isolation(request, namespaces_work):
    if request.param == "namespaces" and not namespaces_work:
        # The other branch: this host refuses namespaces, and says so instead of running with less.
        with pytest.raises(SandboxError, match="refuses"):
            asyncio.run(LocalSandbox(isolation="namespaces").start())
        return "auto"
    return request.param


@pytest.fixture(scope="session")
def namespaces_work():
    return sandbox_cases.namespaces_work()
