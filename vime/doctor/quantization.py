"""Checks that engines on this machine run the scheme of a quantised checkpoint."""

from __future__ import annotations

from slime.checkpoints.hf_config import read_hf_config
from slime.models import family_for
from slime.records.errors import FlagError
from vime.doctor.finding import Finding, WantedRun, judge, ok, problem
from vime.doctor.gpus import gpu_rows
from vime.doctor.machine import Machine
from vime.vllm.quantized.machines import EngineSupport, cpu_support, gpu_support

_NAME = "quantisation"


def check_quantization(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Returns one finding: the scheme of --hf-checkpoint, and whether engines here run it. The result is empty without
    a checkpoint."""
    if wanted.hf_checkpoint is None:
        return []
    try:
        hf = read_hf_config(wanted.hf_checkpoint)
        if not hf.get("quantization_config"):
            return [ok(_NAME, f"none: plain weights in {wanted.hf_checkpoint}")]
        scheme = family_for(hf).scheme(hf)
    except FlagError as error:
        return [problem(_NAME, error.finding, error.advice)]
    if scheme is None:
        method = hf["quantization_config"].get("quant_method")
        return [
            problem(
                *(_NAME, f"{method}: no update of the engines can bring weights in this scheme"),
                f"write a copy in bfloat16: python scripts/dequantize.py {wanted.hf_checkpoint} OUT_DIR",
            )
        ]
    if wanted.device == "cpu":
        found = cpu_support(hf, scheme, machine.read("/proc/cpuinfo") or "")
    else:
        capabilities = [float(row[4]) for row in gpu_rows(machine)]
        if not capabilities:
            return [ok(_NAME, scheme.title)]  # another check reports that no GPU was found
        found = gpu_support(scheme, min(capabilities))
    return [_finding(scheme.title, found)]


def _finding(title: str, found: EngineSupport) -> Finding:
    remedy = (
        "use a checkpoint in bfloat16"
        if not found.runs
        else "use it for tests and small models, or use a GPU"
    )
    return judge(_NAME, f"{title}: {found.text}", remedy, fails=not found.runs, poor=found.slow)
