"""Tests that a start takes over the checks of --vllm-* flags of an earlier start, and never a wrong flag."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
