"""Ranks together publish each weight of the model, bit by bit and each value once; each rank publishes its own shard.
The tests cover whole sets and deltas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import tiny_checkpoint, trained
from rank_processes import in_layouts, on_ranks
from safetensors.torch import load_file, save_file

from slime.megatron_backend.checkpoint.own_slices import OwnSlices
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.plan.model_shape import Shape
from slime.plan.update_estimate import compute_update_bytes
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.local_copy import CopyVersion as Version
from slime.weight_sync.delta.local_copy import LocalCopy
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.file_channel import FileChannel, require_checksums
from slime.weight_sync.publisher import Publisher

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "gpt_oss": {"tie_word_embeddings": False},
    "qwen3_next": {"tie_word_embeddings": False},
    "qwen3_5_moe_text": {"tie_word_embeddings": False},
    "deepseek_v3": {},
    "mimo": {"tie_word_embeddings": False},
}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": TP2,
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "dp": {},
}
DENSE = ("qwen3", "mimo")
FOUR: dict[str, dict[str, Any]] = {
    "tp-dp": TP2,
    "tp-ep": {
        **TP2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "etp-ep": {
        **TP2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    "pp-tp": {"pipeline_model_parallel_size": 2, **TP2},
    "cp-dp": {"context_parallel_size": 2},
}


def published(rank: int, directory: Path, config: Any, weight_dir: Path) -> dict[str, Any]:
    """Returns the slices that this rank publishes for the model in `directory`."""
    model = build_model(load_hf_config(directory), config, ddp=False)
    load_hf(model, directory)
    asked: list[int] = []

    def read(parameter: torch.Tensor) -> torch.Tensor:
        asked.append(id(parameter))
        return parameter.data

    own = OwnSlices(model)
    slices = list(own(read))
    assert not asked, "nothing is read before it is written"
    update = FileChannel(weight_dir).publish(slices, 1, checksums=True)
    assert len(asked) == len(set(asked)), "a parameter is read once"
    return {
        "delta": after_delta(model, own, directory, weight_dir),
        "given": sum(each.position.nbytes for each in slices),
        "shard": sum(x.nbytes for part in unwrapped(model) for x in part.parameters()),
        "info": update.info,
        "planned": compute_update_bytes(
            config.with_values(actor_num_gpus_per_node=dist.get_world_size()),
            Shape.of(load_hf_config(directory)),
        )[0],
    }


def after_delta(model: Any, own: OwnSlices, directory: Path, weight_dir: Path) -> dict[str, Any]:
    """Publishes a whole set of the live model, then a delta to the changed weights. Returns this rank's part, and the
    first rank's copy of the weights."""
    position = TrainerSettings(weight_dir / "deltas", 1 << 20, torch.device("cpu"), 60.0)
    snapshot, copy = Snapshot("xor", "sha256"), LocalCopy(weight_dir / "copy")
    export = Export(None, own)
    publisher = Publisher.of("disk", position, export, compare=False, snapshot=snapshot)
    for version in range(2):
        if version:
            load_hf(model, directory.with_name(f"{directory.name}-changed"))
        part = publisher.next(version, {"engine": 1})
        assert publisher.next(version, {"engine": 1}) is None
        assert part.weights.kind == ("delta" if version else "full")
        to = Version(part.weights.settings["chain"], version)
        if part.info and version:
            copy.patch(load_file(part.info["path"]), 0, to)
        elif part.info:
            copy.keep(part.info["path"], to)
    kept = sum(each.nbytes for each in snapshot._kept.values())
    return {"copy": copy.path, "kept": kept, "density": part.density}


def change(directory: Path) -> None:
    """Writes a second checkpoint next to it, in which every eleventh value differs."""
    changed = directory.with_name(f"{directory.name}-changed")
    shutil.copytree(directory, changed)
    tensors = load_file(changed / "model.safetensors")
    for i, tensor in enumerate(tensors.values()):
        tensor.view(-1)[i % 7 :: 11] *= 1.25
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})


def work(rank: int, root: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> None:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, config in in_layouts(layouts, rank, ranks, root):
        for name in MODELS:
            if "ep" not in layout or name not in DENSE:
                out[layout, name] = published(rank, root / name, config, root / f"{name}-{layout}")
    torch.save(out, root / f"rank{rank}-{ranks}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("slices")
    for name, shape in MODELS.items():
        tiny_checkpoint(root / name, name, **shape)
        change(root / name)
    return root


def assert_published(root: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> None:
    on_ranks(work, root, layouts, ranks, ranks=ranks)
    of_ranks = [torch.load(root / f"rank{rank}-{ranks}.pt") for rank in range(ranks)]
    for key in of_ranks[0]:
        layout, name = key
        wanted = trained(load_file(root / name / "model.safetensors"), root / name)
        first, *others = [found[key] for found in of_ranks]
        assert all(other["info"] == {} for other in others)
        got = load_file(first["info"]["path"])
        assert got.keys() == wanted.keys(), key
        for tensor, value in wanted.items():
            assert got[tensor].dtype == value.dtype and torch.equal(got[tensor], value), (key, tensor)
        require_checksums(wanted.keys(), wanted.__getitem__, first["info"]["checksums"])
        assert_delta(root, name, [found[key]["delta"] for found in of_ranks])
        given = [found[key]["given"] for found in of_ranks]
        assert given == [found[key]["delta"]["kept"] for found in of_ranks], key
        assert sum(given) == sum(x.nbytes for x in wanted.values()), key
        for found in of_ranks:
            assert 0 < found[key]["given"] <= found[key]["shard"], key
        if layout in ("dp", "ep"):  # the plan counts matrices
            planned = first["planned"] * ranks
            assert 0.97 * sum(given) < planned <= sum(given), (key, planned)
        if layout == "dp":  # a rank may have one parameter and one expert more than another
            assert max(given) - min(given) <= 2 * max(x.nbytes for x in wanted.values()), (name, given)


def assert_delta(root: Path, name: str, of_ranks: list[dict[str, Any]]) -> None:
    directory = root / f"{name}-changed"
    wanted = trained(load_file(directory / "model.safetensors"), directory)
    got = load_file(of_ranks[0]["copy"])
    assert got.keys() == wanted.keys(), name
    for tensor, value in wanted.items():
        assert got[tensor].dtype == value.dtype and torch.equal(got[tensor], value), (name, tensor)
    (density,) = {found["density"] for found in of_ranks}
    old = load_file(root / name / "model.safetensors")
    changed = sum((old[tensor] != value).sum().item() * value.itemsize for tensor, value in wanted.items())
    assert density == changed / sum(x.nbytes for x in wanted.values()), name


def test_two_ranks_publish_the_weights_that_one_has(root):
    assert_published(root, LAYOUTS, 2)


@pytest.mark.slow
def test_four_ranks_publish_the_weights_that_one_has(root):
    assert_published(root, FOUR, 4)
