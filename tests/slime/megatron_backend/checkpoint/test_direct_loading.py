"""Loading reads only a rank's slices: the tests count the bytes that safetensors returns, on two ranks and on one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron_cases import VOCAB, make_config, tiny_checkpoint, trained
from rank_processes import in_layouts, on_ranks
from safetensors.torch import load_file, save_file

from slime.checkpoints import hf_files
from slime.checkpoints.hf_config import open_weights
from slime.megatron_backend.checkpoint.export import export_checkpoint
from slime.megatron_backend.checkpoint.live_table import named
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.decoder import DeltaNet
from slime.models.hybrid import ByKeyHead, GatedQkv
from slime.models.layouts import Direct, GateUp, GateUpTensor, GroupedQkv, Sizes, SwappedHalves, Vocab
from slime.models.slices import Piece, pieces
from slime.plan.loading_estimate import loading

MODELS = {
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "gpt_oss": {"tie_word_embeddings": False},
    "qwen3_next": {"tie_word_embeddings": False},
    "qwen3_5_moe_text": {"tie_word_embeddings": False},
    "deepseek_v3": {},
    "mimo": {"tie_word_embeddings": False},
}
SHARDED = ("qwen3_moe", "gpt_oss")
"""Models that each layout writes to several files."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
}


class Counting:
    """An open file that counts the bytes of every tensor and slice that it returns."""

    def __init__(self, file: Any, given: list[int]) -> None:
        self.file, self.given = file, given

    def __enter__(self) -> Any:
        return self.file.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self.file.get_slice(name), self.given)


class CountingSlice:
    def __init__(self, stored: Any, given: list[int]) -> None:
        self.stored, self.given = stored, given

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, where: Any) -> torch.Tensor:
        tensor = self.stored[where]
        self.given.append(tensor.nbytes)
        return tensor


def loaded(directory: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Returns this rank's model, and the bytes that were read for it."""
    given: list[int] = []
    hf_files.open_weights = lambda file, framework: Counting(open_weights(file, framework), given)  # type: ignore[assignment]
    model = build_model(load_hf_config(directory), config, ddp=False)
    said = load_hf(model, directory)
    return model, {
        "said": said,
        "planned": sum(
            item.bytes for item in loading(config, load_hf_config(directory)) if "read" in item.name
        ),
        "given": given,
        "shard": sum(held_bytes(name, x) for part in unwrapped(model) for name, x in named(part)),
        "weights": {name: tensor.clone() for name, tensor in export_hf(model)},
    }


def held_bytes(name: str, tensor: torch.Tensor) -> int:
    """Returns the bytes of a model's tensor without rows of padding."""
    rows = len(tensor)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        first = rows * parallel_state.get_tensor_model_parallel_rank()
        rows = min(max(VOCAB - first, 0), rows)
    return rows * tensor[0].nbytes


def work(rank: int, root: Path) -> None:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, config in in_layouts(LAYOUTS, rank, 2, root):
        for name in MODELS:
            if layout != "ep" or name not in ("qwen3", "mimo"):
                model, out[layout, name] = loaded(root / name, config)
                if name in SHARDED:
                    save_hf(model, root / name, root / f"{name}-{layout}", max_shard_bytes=40_000)
    torch.save(out, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("direct")
    for name, shape in MODELS.items():
        tiny_checkpoint(root / name, name, **shape)
    return root


@pytest.fixture(scope="module")
def ranks(root):
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


def test_a_rank_reads_its_shard_and_no_more(root, ranks):
    for rank in ranks:
        for key, found in rank.items():
            assert sum(found["given"]) == found["said"] == found["shard"], key


def test_the_plan_counts_the_same_bytes(ranks):
    """The plan counts the matrices of the stage with the most matrices. The tiny vocabulary does not divide evenly."""
    for key in ranks[0]:
        read = [rank[key]["said"] for rank in ranks]
        most = sum(read) / 2 if key[0] == "tp" else max(read)
        assert 0.97 * most < ranks[0][key]["planned"] < most


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_file(root, ranks, name):
    original = load_file(root / name / "model.safetensors")
    for layout in LAYOUTS:
        for rank in ranks:
            if (layout, name) in rank:
                got = rank[layout, name]["weights"]
                assert got.keys() == trained(original, root / name).keys()
                assert all(torch.equal(tensor, original[n]) for n, tensor in got.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHARDED)
def test_an_export_in_several_files_is_bitwise_the_source(root, ranks, name, layout):
    out = root / f"{name}-{layout}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    written = {}
    for file in files:
        of_file = load_file(file)
        assert len(of_file) == 1 or sum(tensor.nbytes for tensor in of_file.values()) <= 40_000
        assert all(index["weight_map"][tensor] == file.name for tensor in of_file)
        written |= of_file
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    wanted = transformers.AutoModelForCausalLM.from_pretrained(root / name).state_dict()
    got = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in got.items())


DELTA = DeltaNet(keys=2, values=4, key_dim=3, value_dim=5, taps=4)
SIZES = Sizes(groups=2, head_dim=3, vocab=5, padded_vocab=8, delta=DELTA)
WIDTHS = [2 * rows for rows in DELTA.widths]


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Direct(), [(4, 6)]),
        (Direct(axis=0), [(4,)]),
        (Direct(axis=1), [(4, 6)]),
        (Vocab(), [(5, 4)]),
        (GroupedQkv(), [(12, 4), (6, 4), (6, 4)]),
        (GroupedQkv(), [(12,), (6,), (6,)]),
        (GateUp(), [(8, 4), (8, 4)]),
        (GateUpTensor(), [(16, 4)]),
        (GatedQkv(), [(24, 4), (6, 4), (6, 4)]),
        (SwappedHalves(), [(4, 8)]),
        (ByKeyHead(parts=((0, 1, 2),)), [(sum(WIDTHS[:3]), 1, 4)]),
        (
            ByKeyHead(parts=((0, 1, 2, 3), (4, 5)), by_head=True),
            [(sum(WIDTHS[:4]), 6), (sum(WIDTHS[4:]), 6)],
        ),
    ],
)
def test_pieces_are_what_join_and_shard_give(layout, shapes):
    """The pieces are equal with more ranks than key/value heads, too."""
    parts = [torch.randn(shape) for shape in shapes]
    full = layout.join(parts, SIZES)
    for ranks in (1, 2, 4):
        for rank in range(ranks) if full.shape[layout.axis or 0] % ranks == 0 else ():
            wanted = layout.shard(full, rank, ranks)
            got = torch.full_like(wanted, torch.nan)
            for piece in pieces(layout, tuple(shapes), SIZES, rank, ranks):
                mine, source = piece.of(got), torch.zeros(())
                if piece.part is not None:
                    source = layout.columns(parts[piece.part][piece.where]).reshape(mine.shape)
                mine[:] = source
            assert torch.equal(got, wanted)


def test_rows_of_equal_distances_are_one_piece():
    sizes = Sizes(groups=4, head_dim=2, vocab=10, padded_vocab=16)
    assert pieces(Vocab(), ((10, 4),), sizes, 0, 2) == (Piece(0, 0, 8, 0, 0),)
    assert pieces(Vocab(), ((10, 4),), sizes, 1, 2) == (Piece(0, 0, 2, 0, 8), Piece(0, 2, 6, None, 0))
    half = pieces(GroupedQkv(), ((16, 4), (8, 4), (8, 4)), sizes, 1, 2)
    assert [(piece.part, piece.source, piece.size, piece.count, piece.step) for piece in half] == [
        *((0, 8, 4, 2, 8), (1, 4, 2, 2, 8), (2, 4, 2, 2, 8)),
    ]
    assert half[1].targets == [4, 5, 12, 13]


@pytest.fixture
def single_rank(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder, file: file.unlink(),
            r"{file} must be a whole safetensors file, got no such file",
        ),
        (
            lambda folder, file: os.truncate(file, file.stat().st_size - 4),
            r"{file} must be a whole safetensors file, got \d+ bytes",
        ),
        (
            lambda folder, file: save_file({"other": torch.ones(1)}, file),
            r"{file} must have the tensor model\.[\w.]+ as in model.safetensors.index.json, got ",
        ),
        (
            lambda folder, file: save_file({n: x[:1].clone() for n, x in load_file(file).items()}, file),
            r"self_attn.o_proj.weight must have shape \[64, 128\] as in config.json, got \[1, 128\] in {file}",
        ),
    ],
    ids=["missing", "truncated", "another-tensor", "another-shape"],
)
def test_a_damaged_shard_is_named(single_rank, root, tmp_path, damage, message):
    model = build_model(load_hf_config(root / "qwen3"), make_config(), ddp=False)
    load_hf(model, root / "qwen3")
    save_hf(model, root / "qwen3", tmp_path / "shards", max_shard_bytes=60_000)
    where = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / "shards" / where["model.layers.1.self_attn.o_proj.weight"]
    damage(tmp_path, file)
    with pytest.raises(ValueError, match=message.format(file=file)):
        load_hf(model, tmp_path / "shards")


def work_of_memory(rank: int, root: Path, ranks: int) -> None:
    config = make_config(tensor_model_parallel_size=ranks)
    init_parallel(rank, ranks, config, init_method=f"file://{root}/store-{ranks}", local_rank=rank)
    model = build_model(load_hf_config(root), config, ddp=False)
    for parameter in model.parameters():
        parameter.data.zero_()  # this allocates the pages
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak
    before = resident("VmRSS")
    load_hf(model, root)
    torch.save({"more": resident("VmHWM") - before}, root / f"memory-{ranks}-{rank}.pt")
    destroy_parallel()


def resident(kind: str) -> int:
    """Returns the bytes of this process in memory."""
    return 1024 * int(
        next(x for x in Path("/proc/self/status").read_text().splitlines() if kind in x).split()[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_is_the_shard_and_one_tensor(tmp_path, ranks):
    """A model of 630 MB is in one file. Its largest tensor has 131 MB."""
    tiny_checkpoint(
        tmp_path,
        "qwen3",
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
    )
    assert 600e6 < (tmp_path / "model.safetensors").stat().st_size < 700e6
    on_ranks(work_of_memory, tmp_path, ranks, ranks=ranks)
    for rank in range(ranks):
        more = torch.load(tmp_path / f"memory-{ranks}-{rank}.pt")["more"]
        print(f"{ranks} ranks: {more / 1e6:.0f} MB more than the shard")
        assert more < 32000 * 1024 * 4 / ranks + 64 * 2**20 + 20e6


def work_of_export(rank: int, root: Path) -> None:
    given = {"hf_checkpoint": str(root / "hf")}
    export_checkpoint(make_config(**given), None, root / "converted", "torch_dist")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    config = make_config(**given, load=str(root / "converted"))
    export_checkpoint(config, None, root / "again", "hf", max_shard_bytes=64 * 2**20)
    torch.save({"more": resident("VmHWM") - before}, root / "export.pt")


@pytest.mark.slow
def test_an_export_never_holds_the_whole_model(tmp_path):
    """The model has 1.2 GB, and its largest parameter 34 MB. Memory has one file (67 MB), the parameter, torch's read
    buffer, and the allocators' reserve. Measured: up to 222 MB.
    """
    tiny_checkpoint(
        tmp_path / "hf",
        "qwen3",
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20, "vocab_size": 8000},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
    )
    size = (tmp_path / "hf/model.safetensors").stat().st_size
    on_ranks(work_of_export, tmp_path, ranks=1)
    more = torch.load(tmp_path / "export.pt")["more"]
    print(f"{more / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB")
    assert size > 1.2e9 and more < size / 4
    original = load_file(tmp_path / "hf/model.safetensors")
    written = {
        n: x for file in (tmp_path / "again").glob("*.safetensors") for n, x in load_file(file).items()
    }
    assert written.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())
