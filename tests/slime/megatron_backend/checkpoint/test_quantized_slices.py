"""Ranks together read a quantised checkpoint, and publish its weights in its scheme. The result equals to the bit what
one rank quantises, also if ranks cut the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import tiny_checkpoint
from quantize import quantize_checkpoint
from rank_processes import in_layouts, on_ranks
from safetensors.torch import load_file

from slime.checkpoints.hf_files import Files
from slime.megatron_backend.checkpoint.own_slices import OwnSlices
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.models import family_for
from slime.models.quantized.quantized_checkpoint import QuantizedWeights
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.local_copy import CopyVersion, LocalCopy
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.publisher import Publisher
from slime.weight_sync.quantized import quantize_export

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": TP2,
    "ep": {"expert_model_parallel_size": 2},
}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def fp8(rows: int, columns: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [rows, columns]}


def int4(size: int) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": GROUP | {"group_size": size}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("qwen3_moe", fp8(16, 16)),
    "fp8-cut": ("qwen3_moe", fp8(128, 24)),
    "int4": ("qwen3_moe", int4(8)),
    "fp8-latent": ("deepseek_v3", fp8(128, 128)),
}
"""Name -> family and scheme. Tensor-parallel ranks cut the blocks of "fp8-cut" and "fp8-latent"."""


def make(root: Path, name: str, **shape: Any) -> Path:
    kind, said = MODELS[name]
    tiny_checkpoint(root / f"{name}-plain", kind, **shape)
    quantize_checkpoint(root / f"{name}-plain", root / name, said)
    return root / name


def export_of(directory: Path, config: Any) -> Export:
    hf = load_hf_config(directory)
    model = build_model(hf, config, ddp=False)
    load_hf(model, directory)
    scheme = family_for(hf).scheme(hf)
    assert scheme is not None
    given = Export(lambda: export_hf(model), OwnSlices(model))
    return quantize_export(given, QuantizedWeights.from_files(Files(directory), scheme))


def work(rank: int, root: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> None:
    found: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for layout, config in in_layouts(layouts, rank, ranks, root):
        for name in MODELS:
            export = export_of(root / name, config)
            weight_dir = root / f"{name}-{layout}"
            update = FileChannel(weight_dir).publish(export.slices(), 1)
            whole = dict(export.gathered())
            delta(export, weight_dir / "deltas")
            if rank == 0:
                file = load_file(update.info["path"])
                assert file.keys() == whole.keys()
                assert all(same(file[each], whole[each]) for each in file), (layout, name)
                found[layout, name] = file
    if rank == 0:
        torch.save(found, root / f"found-{ranks}.pt")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def delta(export: Export, directory: Path) -> None:
    """Publishes a whole set and a delta without a change, which a host's copy takes."""
    settings = TrainerSettings(directory, 1 << 20, torch.device("cpu"), 60.0)
    given = Publisher.of("disk", settings, export, compare=False, snapshot=Snapshot("xor", "sha256"))
    copy = LocalCopy(directory / "copy")
    for version in range(2):
        part = given.next(version, {"engine": 1})
        assert given.next(version, {"engine": 1}) is None
        assert part is not None and part.weights.kind == ("delta" if version else "full")
        to = CopyVersion(part.weights.settings["chain"], version)
        if part.info and version:
            assert part.density == 0
            copy.patch(load_file(part.info["path"]), 0, to)
        elif part.info:
            copy.keep(part.info["path"], to)


def test_two_ranks_publish_what_one_rank_quantizes(tmp_path: Path) -> None:
    for name in MODELS:
        make(tmp_path, name)
    on_ranks(work, tmp_path, {"one": {}}, 1, ranks=1)
    on_ranks(work, tmp_path, LAYOUTS, 2, ranks=2)
    alone = torch.load(tmp_path / "found-1.pt")
    together = torch.load(tmp_path / "found-2.pt")
    assert together.keys() == {(layout, name) for layout in LAYOUTS for name in MODELS}
    for (layout, name), found in together.items():
        wanted = alone["one", name]
        stored = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == wanted.keys() <= stored.keys(), (layout, name)
        for each, tensor in wanted.items():
            assert same(found[each], tensor), (layout, name, each)
            assert (tensor.dtype, tensor.shape) == (stored[each].dtype, stored[each].shape), (name, each)


def refused(rank: int, root: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> None:
    for _, config in in_layouts(layouts, rank, ranks, root):
        with pytest.raises(
            ValueError, match=r"weight must have whole groups of 32 on each trainer rank, got columns"
        ):
            list(export_of(root / "int4", config).slices())


def test_groups_that_ranks_would_cut_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "int4", ("qwen3", int4(32)))
    make(tmp_path, "int4", intermediate_size=96)
    on_ranks(refused, tmp_path, {"tp": TP2}, 2, ranks=2)
