"""Tests the rules of prefill engines, and the connectors of engines with a role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import good_argv

from vime.backends import parse_config
from vime.vllm.caches.connector import transfer_flags
from vime.vllm.caches.flags import require_connector
from vime.vllm.server import VllmServer, VllmSpec

FLAG = "--prefill-num-servers"
THREE = ["--rollout-num-gpus", "3", FLAG, "1"]


def argv(tmp_path: Path, *flags: str) -> list[str]:
    return [*(token for token in good_argv(tmp_path) if token != "--colocate"), *THREE, *flags]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vllm-no-enable-prefix-caching"], "be left out with --vllm-no-enable-prefix-caching"),
        (
            ["--rollout-backend", "sglang", "--update-weight-transport", "disk"],
            "be left out with --rollout-backend sglang",
        ),
        (
            ["--rollout-external-engine-addrs", "127.0.0.1:1"],
            "be left out with --rollout-external-engine-addrs",
        ),
        ([FLAG, "3"], "be below the number of engines, got 3 of 3"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_config(argv(tmp_path, *flags))
    assert f"{FLAG} must {message}" in str(error.value)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--device", "cuda", "--colocate"], "--colocate on GPUs"),
        (
            ["--num-gpus-per-node", "1", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"],
            "engines of several nodes",
        ),
    ],
)
def test_engines_that_cannot_pass_keys_and_values(tmp_path: Path, flags: list[str], where: str) -> None:
    config = parse_config(argv(tmp_path, *flags))
    assert config.engine.prefill_num_servers is None
    note = f"{FLAG} 1 has no effect with {where}: each engine reads prompts and writes answers"
    assert config.notes.count(note) == 1


def test_engines_on_gpus_need_a_connector(tmp_path: Path) -> None:
    on_gpus = argv(tmp_path, "--device", "cuda")
    with pytest.raises(
        ValueError, match=f"{FLAG} must have the package nixl on GPUs, got none; pip install nixl"
    ):
        require_connector(parse_config(on_gpus))
    own = '{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}'
    require_connector(parse_config([*on_gpus, "--vllm-kv-transfer-config", own]))
    require_connector(parse_config(argv(tmp_path)))


def spec(role: str, device: str = "cpu", **more: object) -> VllmSpec:
    fields = {"model_path": "m", "run_key": "k", "log_path": "logs/engine-2.log", "weight_dir": "/w"}
    return VllmSpec(**fields, role=role, device=device, **more)  # type: ignore[arg-type]


def test_the_connector_follows_from_role_and_device() -> None:
    assert transfer_flags(spec("both")) == []
    option, text = transfer_flags(spec("prefill"))
    found = json.loads(text)
    assert option == "--kv-transfer-config"
    assert found["kv_connector"] == "SharedFileConnector"
    assert found["kv_connector_extra_config"] == {"shared_storage_path": "/w/prompts", "name": "engine-2"}
    assert json.loads(transfer_flags(spec("decode", "cuda"))[1])["kv_connector"] == "NixlConnector"


def test_the_users_connector_replaces_it() -> None:
    own = ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}')
    command = VllmServer(spec("decode", vllm_argv=own)).command()
    assert command.count("--kv-transfer-config") == 1 and own[1] in command
