"""Several ranks read checkpoints of slime's converter. Each rank reads its own parts, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import VOCAB, make_config, tiny_checkpoint
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch_dist_cases import convert, release

from slime.megatron_backend.checkpoint.torch_dist import MetadataReader, load_torch_dist
from slime.megatron_backend.checkpoint.torch_dist_save import save_torch_dist
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, load_weights
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
}
SOURCES: dict[str, dict[str, Any]] = {
    "qwen2": {"stack": True, "vocab_rows": 128, "cut": 2},  # tied: the last stage has a copy of the embedding
    "qwen3": {"vocab_rows": VOCAB + 1},
    "glm4_moe": {"vocab_rows": 256, "cut": 3},
}
SHAPES = {
    "qwen2": {"head_dim": 16},
    "glm4_moe": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False},
}
CASES = [(kind, layout) for kind in SOURCES for layout in LAYOUTS if layout != "ep" or "moe" in kind]
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "head_dim": 64,
}
MIB = 2**20


def start(root: Path, rank: int, ranks: int, **layout: Any) -> Any:
    config = make_config(**layout)
    init_parallel(rank, ranks, config, init_method=f"file://{root}/store-{'-'.join(layout)}")
    return config


def read_on_rank(rank: int, root: Path) -> None:
    for layout, sizes in LAYOUTS.items():
        config = start(root, rank, 2, **sizes)
        for kind in [kind for kind, of_kind in CASES if of_kind == layout]:
            hf_config = load_hf_config(root / kind)
            model = build_model(hf_config, config, ddp=False)
            for parameter in model.parameters():
                parameter.fill_(3.0)
            load_weights(model, str(root / f"{kind}_torch_dist"))
            right = build_model(hf_config, config, ddp=False)
            load_hf(right, root / kind)
            same = [
                torch.equal(tensor, right.state_dict()[name])
                for name, tensor in model.state_dict().items()
                if tensor is not None
            ]
            full = dict(export_hf(model))
            torch.save({"own": same, "full": full}, root / f"{kind}-{layout}-{rank}.pt")
        destroy_parallel()


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Returns the results of two ranks for each source in each layout."""
    root = tmp_path_factory.mktemp("read")
    config = start(root, 0, 1, seed=1234)
    assert config is not None
    try:
        for kind, options in SOURCES.items():
            tiny_checkpoint(root / kind, kind, **SHAPES[kind])
            convert(root / kind, release(root / f"{kind}_torch_dist"), **options)
    finally:
        destroy_parallel()
    on_ranks(read_on_rank, root, ranks=2)
    return root


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_every_rank_has_its_part_of_the_hugging_face_tensors(read, kind, layout):
    hf = load_file(read / kind / "model.safetensors")
    for rank in range(2):
        got = torch.load(read / f"{kind}-{layout}-{rank}.pt")
        assert got["own"] and all(got["own"])  # it has the bits that load_hf gives this rank, with padding
        assert got["full"].keys() == hf.keys()
        for name, tensor in got["full"].items():
            assert torch.equal(tensor, hf[name]), name


def write_large(rank: int, root: Path) -> None:
    config = start(root, rank, 1, seed=1)
    model = build_model(load_hf_config(root / "large"), config, ddp=False)
    for parameter in model.parameters():
        parameter.fill_(1.0)
    save_torch_dist(model, root, "large")


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def read_large(rank: int, root: Path) -> None:
    config = start(root, rank, 1, seed=2)
    tiny = build_model(load_hf_config(root / "tiny"), config, ddp=False)
    # This imports and allocates everything that is needed once.
    load_torch_dist(tiny, root / "tiny_torch_dist" / "release")
    model = build_model(load_hf_config(root / "large"), config, ddp=False)
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak
    before = _status_kib("VmRSS")
    load_torch_dist(model, root / "release")
    peak = _status_kib("VmHWM")
    stored = MetadataReader(root / "release").read_metadata().storage_data.values()
    shard = sum(parameter.nbytes for parameter in unwrap(model).parameters())
    assert all(bool((parameter == 1).all()) for name, parameter in model.named_parameters())
    record = {"grew": (peak - before) * 1024, "shard": shard, "part": max(item.length for item in stored)}
    torch.save(record, root / "memory.pt")


def test_reading_needs_memory_for_its_own_part_and_one_stored_part(tmp_path):
    """A second copy of only gate and up would be half of the model."""
    tiny_checkpoint(tmp_path / "large", "qwen3", **LARGE)
    tiny_checkpoint(tmp_path / "tiny", "qwen3")
    start(tmp_path, 0, 1, fp32=True)
    try:
        convert(tmp_path / "tiny", release(tmp_path / "tiny_torch_dist"))
    finally:
        destroy_parallel()
    on_ranks(write_large, tmp_path, ranks=1)
    on_ranks(read_large, tmp_path, ranks=1)
    got = torch.load(tmp_path / "memory.pt")
    assert got["shard"] > 150 * MIB > 8 * got["part"]
    assert got["grew"] < got["shard"] + got["part"] + 16 * MIB
    print({name: f"{value / MIB:.1f} MiB" for name, value in got.items()})
