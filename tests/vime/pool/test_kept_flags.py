"""Tests that a start takes over the checks of --vllm-* flags of an earlier start, and never a wrong flag."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.vllm.server_flags import VLLM

FLAGS = ["--vllm-max-num-seqs", "64", "--vllm-kv-cache-memory-bytes", "1G"]
CODE = """
import json, sys
from slime.config.config_file import split_argv
from vime.vllm.server_flags import VLLM
try:
    print(json.dumps(VLLM.parse(split_argv(sys.argv[1:]))), "torch" in sys.modules)
except ValueError as error:
    print(error)
"""


def parsed(cache: Path, *flags: str) -> str:
    """Parses flags in a new process, as a start does."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *flags],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_second_start_with_the_same_flags_does_not_import_vllm(tmp_path: Path) -> None:
    first, second = parsed(tmp_path, *FLAGS), parsed(tmp_path, *FLAGS)
    assert first.endswith(" True") and second == first.removesuffix("True") + "False"
    assert json.loads(second.rpartition(" ")[0])["backend_args"] == {
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 1 << 30,
    }
    assert "--vllm-max-num-seqs must be valid" in parsed(tmp_path, *FLAGS, "--vllm-max-num-seqs", "many")
    other = parsed(tmp_path, "--vllm-max-num-seqs", "96", "--vllm-gpu-memory-utilization", "0.25")
    assert other.endswith(" False"), "a number of a known flag needs no parser"
    assert json.loads(other.rpartition(" ")[0]) == {
        "backend_args": {"max_num_seqs": 96, "gpu_memory_utilization": 0.25},
        "backend_argv": ["--max-num-seqs", "96", "--gpu-memory-utilization", "0.25"],
    }
    assert parsed(tmp_path, "--vllm-kv-cache-memory-bytes", "2G").endswith(" True"), (
        "only the parser reads units"
    )


def test_vllms_parser_accepts_every_plain_number() -> None:
    """Each flag that is stored as a number gives the same value without the parser."""
    numbers = VLLM.numbers()
    assert {"max_num_seqs", "kv_cache_memory_bytes", "max_model_len"} < {
        name for name, (_, kind) in numbers.items() if kind == "int"
    }
    assert numbers["gpu_memory_utilization"] == ["gpu_memory_utilization", "float"]
    assert not {"port", "chat_template", "additional_config", "speculative_config"} & numbers.keys()
    for name, (dest, kind) in numbers.items():
        for text in ("0", "7", "007", "131072", *(["0.25"] if kind == "float" else [])):
            found = VLLM._typed([f"--{name.replace('_', '-')}", text], name)
            assert found == {dest: int(text) if kind == "int" else float(text)}, name
            assert type(found[dest]).__name__ == kind
