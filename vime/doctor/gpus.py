"""Checks of NVIDIA GPUs: driver, CUDA, memory, peer access, NCCL. They use nvidia-smi, files and one Python process.

No check makes a CUDA context, so a health check needs no memory on a GPU that a run uses.
"""

from __future__ import annotations

import json
import re

from slime.checkpoints.hf_config import read_hf_config
from slime.models import read_decoder
from slime.system import delta_nets, extras
from vime.doctor.finding import GIB, MIB, Finding, WantedRun, judge, ok, problem, size, warning
from vime.doctor.machine import Machine, split_csv, words

QUERY = "index,name,memory.total,memory.used,compute_cap,ecc.errors.uncorrected.volatile.total"
LEAST_CAPABILITY = 8.0  # rl_kernel/dispatch.py
IDLE_MEMORY = GIB

# Runs in a separate process. A version number does not show whether torch finds the GPUs.
TORCH_PROBE = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "count": torch.cuda.device_count() if there else 0,
    "archs": torch.cuda.get_arch_list() if there else [],
    "nccl": torch.cuda.nccl.version() if there else None,
}))
"""


def check_driver(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks that the driver's major CUDA version is at least the major version that torch was built for."""
    if wanted.device != "cuda":
        return [ok("gpu", "not needed: this is a check for a run on CPUs")]
    output = machine.run("nvidia-smi")
    if output.code != 0:
        message = output.text.splitlines()[0] if output.text else "it failed"
        remedy = (
            "install the NVIDIA driver; start a container with --gpus all and the NVIDIA container toolkit"
        )
        return [problem("driver", f"nvidia-smi: {message}", remedy)]
    driver = re.search(r"Driver Version:\s*([\d.]+)", output.text)
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", output.text)
    built = machine.torch_cuda()
    found = f"driver {driver[1] if driver else 'unknown'}, CUDA {cuda[1] if cuda else 'unknown'}"
    if built is None:
        remedy = f"install torch with CUDA: {extras.install('gpu')}"
        return [problem("driver", f"{found}; torch has no CUDA or is not installed", remedy)]
    found += f"; torch is built for CUDA {built}"
    if cuda is None:
        return [warning("driver", found, "compare the driver's CUDA version with torch's by hand")]
    old = _numbers(cuda[1])[0] < _numbers(built)[0]
    older = _numbers(cuda[1]) < _numbers(built)
    remedy = f"install a driver for CUDA {built} or newer, or a torch for CUDA {cuda[1]}"
    return [judge("driver", found, remedy, fails=old, poor=older)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def gpu_rows(machine: Machine) -> list[list[str]]:
    output = machine.run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return split_csv(output.text) if output.code == 0 else []


def check_gpus(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Returns one finding per GPU: compute capability, uncorrected memory errors, memory in use."""
    if wanted.device != "cuda":
        return []
    rows = gpu_rows(machine)
    if not rows:
        return [
            problem(
                "gpu", "nvidia-smi lists no GPU", "start the container with --gpus all; check nvidia-smi -L"
            )
        ]
    findings = []
    for index, name, total, used, capability, errors in rows:
        found = f"{name}, {size(float(total) * MIB)}, compute capability {capability}"
        label = f"gpu {index}"
        if float(capability) < LEAST_CAPABILITY:
            findings.append(
                problem(label, found, f"use a GPU of compute capability {LEAST_CAPABILITY} or newer")
            )
        elif errors.isdecimal() and int(errors):
            remedy = "reset the GPU or replace it (nvidia-smi -q -d ECC)"
            findings.append(problem(label, f"{found}; {errors} uncorrected memory errors", remedy))
        elif float(used) * MIB > IDLE_MEMORY:
            remedy = "see nvidia-smi; end what is not yours to share, or leave this GPU out with CUDA_VISIBLE_DEVICES"
            findings.append(warning(label, f"{found}; {size(float(used) * MIB)} are in use", remedy))
        else:
            findings.append(ok(label, found))
    return findings


def check_torch_cuda(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the GPUs and the NCCL version that torch finds in a separate process."""
    if wanted.device != "cuda" or not gpu_rows(machine):
        return []  # an earlier check reports it
    output = machine.run(machine.python, "-c", TORCH_PROBE)
    last = output.text.splitlines()[-1] if output.text else ""
    if output.code != 0 or not last.startswith("{"):
        return [problem("torch and GPUs", f"torch could not be asked: {last}", extras.install("gpu"))]
    facts = json.loads(last)
    if not facts["count"]:
        remedy = "compare driver and torch (above); check CUDA_VISIBLE_DEVICES"
        return [problem("torch and GPUs", "torch finds no GPU", remedy)]
    findings = [ok("torch and GPUs", f"torch finds {facts['count']}, built for {words(facts['archs'])}")]
    nccl = facts["nccl"]
    version = ".".join(map(str, nccl)) if nccl else None
    remedy = f"install a torch that has NCCL: {extras.install('gpu')}"
    findings.append(judge("nccl", version or "torch has none", remedy, fails=version is None, poor=False))
    return findings


def check_peer_access(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks that the GPUs of this host can read each other's memory directly."""
    count = len(gpu_rows(machine)) if wanted.device == "cuda" else 0
    if count < 2:
        return []
    output = machine.run("nvidia-smi", "topo", "-p2p", "r")
    if output.code != 0:
        return [warning("peer access", "nvidia-smi topo -p2p r failed", "update the driver")]
    pairs = []
    for line in re.sub(r"\x1b\[\d+m", "", output.text).splitlines():  # its first line is underlined
        row = re.match(r"\s*GPU(\d+)\s+((?:X|[A-Z]+)(?:\s+(?:X|[A-Z]+))*)\s*$", line)
        if row:
            pairs += [(f"{row[1]}-{j}", cell) for j, cell in enumerate(row[2].split()) if cell != "X"]
    closed = [pair for pair, cell in pairs if cell != "OK"]
    found = f"{len(pairs) - len(closed)} of {len(pairs)} pairs of GPUs"
    remedy = (
        f"no peer access: {words(closed)}; data goes through host memory (IOMMU, ACS or a virtual machine)"
    )
    return [judge("peer access", found, remedy, fails=False, poor=bool(closed) or not pairs)]


def check_delta_nets(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the kernels of gated delta nets, unless the checkpoint has no such layers. Without the kernels, the layers
    run as plain PyTorch, which is a warning."""
    if wanted.device != "cuda":
        return []
    if wanted.hf_checkpoint is not None and read_decoder(read_hf_config(wanted.hf_checkpoint)).delta is None:
        return []
    installed = machine.installed(delta_nets.PACKAGE)
    hopper = any(row[4].startswith(f"{delta_nets.HOPPER}.") for row in gpu_rows(machine))
    why = delta_nets.obstacle(installed, machine.installed("triton"), hopper=hopper)
    if why is None:
        return [ok("gated delta nets", f"{delta_nets.PACKAGE} {installed}")]
    return [warning("gated delta nets", f"they train in plain PyTorch, slower: {why}", delta_nets.remedy())]
