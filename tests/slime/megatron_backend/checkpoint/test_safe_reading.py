"""No file of a forged checkpoint runs code in any reader."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import slime
from slime.checkpoints.checkpoint_files import CHECKSUMS, write_sums
from slime.megatron_backend.checkpoint.adapter_records import stored_lora
from slime.megatron_backend.checkpoint.distributed import (
    load_checkpoint,
    save_checkpoint,
    stored_parts,
)
from slime.megatron_backend.checkpoint.export import trained_parts
from slime.megatron_backend.checkpoint.safe_reading import MetadataReader
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from vime.commands.checkpoint import main as verify

pytestmark = pytest.mark.usefixtures("single_rank")


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def index(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Attack()))


def hidden_index(path: Path) -> None:
    """Writes a correct index with an attack among its fields."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data = Attack()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def records(path: Path) -> None:
    torch.save({"shape": Attack()}, path / "common.pt")


def place_outside(path: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def stored_object(path: Path) -> None:
    """Replaces the random generators, which Megatron saves as an object among the tensors."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    (key,) = (key for key, value in metadata.storage_data.items() if key.fqn.startswith("rng"))
    place, content = metadata.storage_data[key], io.BytesIO()
    torch.save([Attack()], content)
    file = path / "__9_9.distcp"
    file.write_bytes(content.getvalue())
    place.relative_path, place.offset, place.length = file.name, 0, len(content.getvalue())
    assert isinstance(metadata.state_dict_metadata[key.fqn], BytesStorageMetadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, single_rank):
    hf = tmp_path_factory.mktemp("hf")
    tiny_checkpoint(hf, "qwen3")
    parts = trainer(hf)
    train_step(*parts, sequences(0))
    return hf, parts


def trainer(hf):
    config = make_config(lr=1e-3)
    model = build_model(load_hf_config(hf), config)
    load_hf(model, hf)
    return model, *build_optimizer(model, config, total_steps=10)


READERS = {
    "resume": lambda folder, parts: load_checkpoint(folder, *parts),
    "weights": lambda folder, parts: load_checkpoint(folder, parts[0]),
    "export": lambda folder, parts: stored_parts(folder, parts[0], iteration=1).read(),
    "layers of prediction": lambda folder, parts: trained_parts(folder, 1),
    "adapters": lambda folder, parts: stored_lora(folder, 1),
    "verify": lambda folder, parts: verify(["verify", str(folder)]),
}


@pytest.mark.parametrize("attack", [index, hidden_index, records, stored_object, place_outside])
def test_no_reader_runs_code_of_a_checkpoint(saved, tmp_path, monkeypatch, attack):
    """The checksums belong to the attack, so that no checksum stops it."""
    _, parts = saved
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint(tmp_path / "checkpoint", 1, *parts)
    attack(path)
    (path / CHECKSUMS).unlink()
    write_sums(path, {})
    failed = []
    for name, read in READERS.items():
        try:
            read(tmp_path / "checkpoint", parts)
        except ValueError as error:
            assert "\n" not in str(error), (name, error)
            failed.append(name)
    assert not Path("attacked").exists()
    # Records with a class are Megatron's own, and only their weights are read. Readers of weights need no generators.
    wanted = {"index": 4, "hidden_index": 0, "records": 0, "stored_object": 2, "place_outside": 4}
    assert len(failed) == wanted[attack.__name__], failed


def test_the_reader_gives_what_torch_reads(saved, tmp_path):
    path = save_checkpoint(tmp_path, 1, *saved[1])
    safe, plain = MetadataReader(path).read_metadata(), dcp.FileSystemReader(path).read_metadata()
    assert safe.state_dict_metadata == plain.state_dict_metadata
    assert safe.storage_data == plain.storage_data


UNSAFE = re.compile(
    r"(?<!class )\b(FileSystemReader|load_(common_state_dict|tensors_metadata|sharded_metadata|plain_tensors))\("
    r"|\bpickle\.loads?\(|weights_only=False|allow_pickle=True|yaml\.(unsafe_|full_)load"
    r"|\bUnsafeLoader\b|\b(shelve|dill|joblib)\."
)
OWN_BYTES = {"vime/start/fork_call.py", "vime/api/functions.py"}
"""Files that unpickle bytes of this program: from the pipe of a forked child, and from the folder of a hook file that
`vime.train` wrote. Both bytes and hook file are code of the caller."""


def test_nothing_else_in_the_packages_reads_a_file_in_a_way_that_runs_code():
    root = Path(slime.__file__).parents[1]
    files = [path for package in ("slime", "vime", "rl_kernel") for path in (root / package).rglob("*.py")]
    found = {str(path.relative_to(root)) for path in files if UNSAFE.search(path.read_text())}
    assert found == OWN_BYTES
    for path in files:
        for call in re.findall(r"torch\.load\(.*", path.read_text()):
            assert "weights_only=True" in call, (path, call)
