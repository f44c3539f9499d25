"""Tests the settings of an engine's workers, in vLLM's flag and together with the user's value of that flag."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.worker.settings import EngineSettings

FLAG = "--additional-config"
SETTINGS = {"gate": "/run/gate", "temperature": 0.7, "routed_experts": True, "bitwise": ("norm", "head")}


def config(flags: list[str]) -> Any:
    """Returns the flag as vLLM's configuration has it."""
    return SimpleNamespace(additional_config=json.loads(flags[1]) if flags else {})


@pytest.mark.parametrize("changed", [{}, *({name: value} for name, value in SETTINGS.items()), SETTINGS])
def test_workers_get_what_the_run_has_set(changed: dict[str, Any]) -> None:
    settings = EngineSettings(**changed)
    flags = settings.flags()
    assert bool(flags) == bool(changed)
    assert EngineSettings.from_config(config(flags)) == settings


def test_the_hash_of_a_configuration_has_no_path() -> None:
    found = config(EngineSettings(**SETTINGS).flags())
    assert EngineSettings.take(found).gate == "/run/gate"
    assert EngineSettings.from_config(found) == EngineSettings(**{**SETTINGS, "gate": None})


@pytest.mark.parametrize("given", [(FLAG, '{"own": 1}'), (f'{FLAG}={{"own": 1}}',)])
def test_the_users_own_value_stays(given: tuple[str, ...]) -> None:
    spec = VllmSpec(
        model_path="m", log_path="l", weight_dir="/w", run_key="k", port=9, temperature=0.5, vllm_argv=given
    )
    command = VllmServer(spec).command()
    assert command.count(FLAG) == 1 and command[:-1].index(FLAG) == len(command) - 2
    assert json.loads(command[-1]) == {"own": 1, "vime": {"temperature": 0.5}}
    assert EngineSettings().flags(given) == [FLAG, '{"own": 1}']


@pytest.mark.parametrize("text", ["", "{", "[1]", "7"])
def test_another_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--vllm-additional-config must be one JSON object, got"):
        EngineSettings().flags((FLAG, text))
