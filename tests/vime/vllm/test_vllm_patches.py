"""Every symbol of vLLM that this project replaces exists in the installed version, and in the oldest."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from slime import bridges
from slime.bridges import Patch
from vime.vllm.patches import PATCHES
from vime.vllm.versions import installed


@pytest.mark.parametrize(
    "patch", [one for each in PATCHES.values() for one in each], ids=lambda one: one.symbol
)
def test_the_symbol_exists(patch: Patch) -> None:
    version = installed()
    if version is None:
        pytest.skip("vLLM is not installed")
    is_needed = SpecifierSet(patch.versions).contains(version, prereleases=True)
    assert bridges.exists(patch) or not is_needed
