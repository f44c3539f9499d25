"""Trains tiny models of families in one child process, publishes them, and compares their log-probs with vLLM's."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, MULTIMODAL, engine_shape
from family_record import note
from megatron_cases import make_config, tiny_checkpoint
from offline_engine import offline_engine
from rank_processes import on_ranks
from rollout_double import make_tokenizer
from safetensors.torch import save_file

from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices

TOKENS = [3, 7, 50, 21, 9, 88, 40, 2, 11, 63, 5, 29]
"""Number of tokens; it is larger than the window of tiny Mistral."""

REMOTE_KINDS = ("mimo",)
"""Families that have a configuration class neither in transformers nor in vLLM."""
REMOTE = """from transformers import {base}Config


class FamilyConfig({base}Config):
    model_type = "{kind}"
"""


def with_remote_config(directory: Path, kind: str) -> None:
    """Writes the configuration class that the family's published checkpoints contain, because transformers has no
    class for it."""
    (directory / "configuration_family.py").write_text(REMOTE.format(base="Qwen2", kind=kind))
    file = directory / "config.json"
    said = json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "configuration_family.FamilyConfig"}}
    file.write_text(json.dumps(said | {"architectures": ["MiMoForCausalLM"]}))


TEXT_ONLY: dict[str, dict[str, Any]] = {
    **{kind: {"language_model_only": True} for kind in MULTIMODAL},
    "gemma4": {"hf_overrides": {"architectures": ["Gemma4ForCausalLM"]}},  # its processor needs torchvision
}
"""Settings of vLLM for the text model of a checkpoint with a tower."""
WITH_PROCESSOR = ("kimi_k25",)
"""Families whose vLLM model reads the checkpoint's tokenizer and image processor, without images too."""
KIMI_CODE = """from transformers import AutoTokenizer
from vllm.transformers_utils.processors.kimi_k25 import KimiK25Processor
from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor


class ImageProcessor(KimiK25FusedVisionProcessor):
    pass


class Processor(KimiK25Processor):
    @classmethod
    def from_pretrained(cls, folder, *unused, **settings):
        return cls(ImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), 0)
"""
KIMI_PROCESSOR = {
    "auto_map": {
        "AutoImageProcessor": "kimi_processing.ImageProcessor",
        "AutoProcessor": "kimi_processing.Processor",
    },
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 16,
        "patch_limit_on_one_side": 4,
        "fixed_output_tokens": None,
        "in_patch_limit_each_frame": 16,
        "in_patch_limit_video": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
}


def write_kimi_processor(directory: Path) -> None:
    """Writes a tokenizer, the code and settings of processors for small images, and the architecture's name, as
    published checkpoints have them."""
    hf_config = json.loads((directory / "config.json").read_text())
    hf_config["architectures"] = ["KimiK25ForConditionalGeneration"]
    (directory / "config.json").write_text(json.dumps(hf_config))
    make_tokenizer().save_pretrained(directory)
    (directory / "kimi_processing.py").write_text(KIMI_CODE)
    (directory / "preprocessor_config.json").write_text(json.dumps(KIMI_PROCESSOR))


def train(_: int, root: Path, names: Sequence[str], dtype: str | None, checksums: bool) -> None:
    """Trains each model in a child process. It saves the log-probs before and after a step of plain gradient descent,
    and both published updates. A model that fails has its traceback instead. For a quantised checkpoint, it also saves
    the weights that were quantised."""
    from slime.checkpoints.hf_config import read_hf_config
    from slime.checkpoints.hf_files import Files
    from slime.megatron_backend.checkpoint.weights import export_hf
    from slime.megatron_backend.conformance.computed import publish_versions
    from slime.megatron_backend.parallel import init_parallel
    from slime.models import family_for
    from slime.models.quantized.quantized_checkpoint import QuantizedWeights
    from slime.weight_sync.quantized import quantize_slices

    device = init_parallel(0, 1, make_config(), init_method=f"file://{root}/store").device
    tokens = torch.tensor(TOKENS, device=device)

    def versions(name: str) -> list[Any]:
        hf = read_hf_config(root / name)
        scheme = family_for(hf).scheme(hf)

        def export(model: torch.nn.Module, version: int) -> Any:
            slices = whole_slices(export_hf(model))
            if scheme is None:
                return slices
            plain = {key: value.contiguous() for key, value in export_hf(model)}
            save_file(plain, root / f"{name}-plain-{version}.safetensors")
            return quantize_slices(slices, QuantizedWeights.from_files(Files(root / name), scheme))

        config = make_config(params_dtype=dtype or CASES[name].dtype)
        channel = FileChannel(root / f"{name}-weights")
        return publish_versions(root / name, config, channel, tokens, checksums=checksums, export=export)

    found: dict[str, list[Any] | str] = {}
    for name in names:
        try:
            found[name] = versions(name)
        except Exception:  # border of this process: one model that fails must not end the others
            found[name] = traceback.format_exc()
    torch.save(found, root / "trained.pt")


Trained = tuple[Path, dict[str, list[Any] | str]]


def trained_models(
    root: Path,
    names: Sequence[str],
    *,
    shapes: Mapping[str, dict[str, Any]] | None = None,
    dtype: str | None = None,
    checksums: bool = True,
) -> Trained:
    """Returns `root`, and per model the log-probs before and after a step, each with its update. `shapes` (name of a
    case -> sizes) and `dtype` replace those of the cases."""
    for name in names:
        case = CASES[name]
        tiny_checkpoint(root / name, case.kind, **(engine_shape(case) | (shapes or {}).get(name, {})))
        if case.kind in REMOTE_KINDS:
            with_remote_config(root / name, case.kind)
        if case.kind in WITH_PROCESSOR:
            write_kimi_processor(root / name)
    on_ranks(train, root, names, dtype, checksums, ranks=1)
    return root, torch.load(root / "trained.pt", weights_only=False)


def versions_of(trained: Trained, name: str) -> list[Any]:
    """Returns (log-probs, update) for both versions."""
    versions = trained[1][name]
    assert not isinstance(versions, str), f"the trainer of {name} failed:\n{versions}"
    return versions


def certain(differences: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns all tokens' differences. In bfloat16 it drops the largest, because rounding may change a token's
    expert."""
    return differences if dtype == "float32" else differences.sort().values[:-1]


def check_engine(
    trained: Trained,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float = 1e-5,
    dtype: str | None = None,
    *,
    empty: bool = False,
) -> None:
    """vLLM gives the trainer's log-probs after the load, after an update, and after the first weights again. With
    `empty`, it starts with made-up weights."""
    root, _ = trained
    (before, first), (after, second) = versions_of(trained, name)
    assert (before - after).abs().max() > max(0.01, 10 * tolerance)
    settings: dict[str, Any] = {"dtype": dtype or CASES[name].dtype}
    settings |= {"trust_remote_code": True} if CASES[name].kind in (*REMOTE_KINDS, *WITH_PROCESSOR) else {}
    settings |= {"load_format": "dummy"} if empty else {}
    settings |= TEXT_ONLY.get(CASES[name].kind, {})
    if CASES[name].kind in WITH_PROCESSOR:
        settings["skip_tokenizer_init"] = False
        # After an import of numba, vLLM's worker on CPUs does not start: `_rebind_kernels` reads `vars` of every object
        # in loaded modules as a dict, and an object of numba's library has another type there.
        monkeypatch.setattr("vllm.utils.import_utils.is_numba_available", lambda: False)
    with offline_engine(root / name, root / f"{name}-weights", monkeypatch, **settings) as engine:
        difference = certain((engine.log_probs(TOKENS) - before).abs(), settings["dtype"]).mean()
        assert (difference < tolerance) != empty
        if not empty:
            note(name, "engine_before", difference)
        for what, update, expected in (("after", second, after), ("again", first, before)):
            engine.take(update)
            difference = certain((engine.log_probs(TOKENS) - expected).abs(), settings["dtype"])
            print("DIFF", what, difference.mean(), difference.max(), difference)
            assert difference.mean() < tolerance and difference.max() < 5 * tolerance
            note(name, f"engine_{what}", difference.mean())
