"""Tests the import of vision code without torchvision, in a child process. A real engine that uses it: qwen3-5 in
tests/e2e/engines/test_engine_families.py."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import sys
from vime.vllm import patches
from vime.vllm.cpu import vision as cpu_vision
for _ in range(2): patches.apply("server on CPUs")
assert sum(isinstance(finder, cpu_vision.WithoutTorchvision) for finder in sys.meta_path) == 1
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize, tvF
from transformers.utils.import_utils import is_torchvision_available
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
assert smart_resize(56, 84) == (56, 84)
assert not is_torchvision_available() and not [name for name in sys.modules if name.startswith("torchvision")]
try:
    tvF.resize
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="for environments without torchvision")
def test_only_what_uses_torchvision_fails() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "torchvision must be installed for videos, got a use of re"
    )
