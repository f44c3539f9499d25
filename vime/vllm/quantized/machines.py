"""Describes which machines run an engine with the weights of a quantised checkpoint, and with which products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models import family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.quantized.quantization import QuantizationScheme
from slime.records.errors import FlagError
from vime.pool.engine_flags import engine_tensor_parallel
from vime.vllm.quantized.layers import EngineReading, engine_layers

_FP8_PRODUCTS = 8.9
"""Least compute capability of a GPU with products in fp8."""
_CPU_STEP = 32
"""The kernel for int4 on CPUs computes this number of rows and columns at a time."""
_TILES = "amx_tile"
"""Flag of a CPU with the matrix instructions that vLLM's kernels for quantised weights need."""


@dataclass(frozen=True)
class EngineSupport:
    """The result of the check whether an engine can run a scheme."""

    runs: bool
    text: str
    """The engine's matrix products, or the reason why the engine does not start."""
    slow: bool = False
    """True if the engine is only fast enough for tests and small models."""


def gpu_support(scheme: QuantizationScheme, capability: float) -> EngineSupport:
    """Returns the support by a GPU of a compute capability that the project supports."""
    if scheme.kind == "int4":
        return EngineSupport(True, "engines dequantise int4 in vLLM's products with bfloat16")
    if capability >= _FP8_PRODUCTS:
        return EngineSupport(True, "engines multiply in fp8")
    text = f"engines dequantise fp8, because products in fp8 need compute capability {_FP8_PRODUCTS}"
    return EngineSupport(True, text)


def planned_support(config: Config, hf: Hf, scheme: QuantizationScheme) -> EngineSupport:
    """Returns the support by the devices of a run. The compute capability of its GPUs is unknown."""
    if config.cluster.device == "cpu":
        return cpu_support(hf, scheme, read_cpu())
    found = gpu_support(scheme, _FP8_PRODUCTS)
    return (
        found
        if scheme.kind == "int4"
        else EngineSupport(True, f"{found.text} from compute capability 8.9 on")
    )


def cpu_support(hf: Hf, scheme: QuantizationScheme, cpu: str) -> EngineSupport:
    """Returns the support by a CPU. `cpu` is the text of /proc/cpuinfo."""
    if _TILES in cpu.split():
        return EngineSupport(
            True, "engines use vLLM's kernels for CPUs with AMX, which this project has not run"
        )
    experts = read_decoder(hf).experts is not None
    if (
        scheme.kind != "int4"
        and scheme.method == "compressed-tensors"
        and (experts or not _rounds_inputs(hf))
    ):
        part = "experts" if experts else "products with unrounded activations"
        return EngineSupport(
            False, f"vLLM has no {part} in {scheme.title} (compressed-tensors) for CPUs without AMX"
        )
    if scheme.kind == "int4" and not experts:
        return EngineSupport(True, "engines use vLLM's kernel for int4 on CPUs")
    return EngineSupport(True, "engines compute in plain PyTorch on a CPU without AMX", slow=True)


def _rounds_inputs(hf: Hf) -> bool:
    """Returns True if each group of compressed-tensors names a form of the activations."""
    groups: dict[str, Any] = hf["quantization_config"].get("config_groups") or {}
    return all(group.get("input_activations") for group in groups.values())


def read_cpu() -> str:
    """Returns the text of /proc/cpuinfo, or no text on a system without it."""
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def check_cpu(config: Config) -> None:
    """Raises ValueError for engines on CPUs that cannot run the experts or the scheme of their checkpoint."""
    if not config.num_engines or config.cluster.device != "cpu":
        return
    hf = read_hf_config(config.rollout.hf_checkpoint)
    decoder = read_decoder(hf)
    if decoder.experts and not decoder.gated:
        raise FlagError(
            "--hf-checkpoint",
            "have experts with a gate for engines of --device cpu",
            f"experts without a gate in {config.rollout.hf_checkpoint}",
            "vLLM runs them on GPUs only",
        )
    scheme = family_for(hf).scheme(hf)
    if scheme is None:
        return
    if not (found := planned_support(config, hf, scheme)).runs:
        raise FlagError(
            "--hf-checkpoint",
            "have a scheme that engines of --device cpu run",
            f"{scheme.title} in {config.rollout.hf_checkpoint}: {found.text}",
            "use a GPU, or a checkpoint in bfloat16",
        )
    if (odd := _find_odd_shape(hf, scheme, engine_tensor_parallel(config))) is not None:
        raise FlagError(
            "--hf-checkpoint",
            f"have layers in int4 with multiples of {_CPU_STEP} rows and columns on each rank with --device cpu",
            odd,
            "use a checkpoint whose `ignore` has this layer, or one in bfloat16",
        )


def _find_odd_shape(hf: Hf, scheme: QuantizationScheme, ranks: int) -> str | None:
    """Returns the first layer that vLLM's kernel for int4 on CPUs cannot compute, with its shape on a rank. Experts do
    not use this kernel."""
    reading = EngineReading(scheme)
    for layer in engine_layers(hf, ranks) if scheme.kind == "int4" else ():
        rows = sum(layer.rows) // (ranks if layer.split == "rows" else 1)
        columns = layer.columns // (ranks if layer.split == "columns" else 1)
        if (rows % _CPU_STEP or columns % _CPU_STEP) and not layer.is_expert and reading.quantizes(layer):
            return f"{rows} x {columns} in {layer.name}"
    return None
