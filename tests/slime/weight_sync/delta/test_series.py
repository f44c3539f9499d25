"""Tests the trainer's series of deltas with the host's copy: the copy's weights after each update, and rejected
deltas."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.protocols import WeightSet, WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.local_copy import CopyVersion, LocalCopy, RefusedError
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.publisher import Publisher

ENGINE = {"engine-0-1": 1}
SHAPES = {"embed": (40, 16), "layers.0.norm": (16,), "layers.0.odd": (3, 5, 7), "scale": (), "tall": (129, 3)}
Tensors = dict[str, torch.Tensor]


def weights(version: int) -> Tensors:
    """Returns all values of version 0; each later version changes values in one tensor after the other."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    found["scale"] = found["scale"].float()
    for i in range(version):
        found[list(SHAPES)[i % len(SHAPES)]].view(-1)[: i + 1] += i + 1.0
    return found


class Trainer:
    """A publisher of weights that the test sets."""

    def __init__(self, root: Path, transport: str = "disk", *, encoding: str = "xor") -> None:
        self.tensors = weights(0)
        self.written: list[tuple[str, list[str]]] = []
        position = TrainerSettings(root, 4096, torch.device("cpu"), 60.0)
        self.publisher = Publisher.of(
            *(transport, position, Export(lambda: self.tensors.items())),
            compare=False,
            snapshot=Snapshot(encoding, "xxh3-128"),
            written=lambda folder, engines: self.written.append((folder.name, engines)),
        )

    def update(self, version: int, receivers: dict[str, int] = ENGINE) -> WeightUpdate:
        """Returns the only part of `weights(version)`."""
        self.tensors = weights(version)
        part = self.publisher.next(version, receivers)
        assert part is not None and self.publisher.next(version, receivers) is None
        json.dumps(part.message())
        return part


def take(copy: LocalCopy, part: WeightUpdate) -> None:
    """Applies a part to the copy, as an engine's worker does."""
    settings = part.weights.settings
    position = CopyVersion(settings["chain"], settings["version"])
    if part.weights.kind == "full":
        copy.keep(part.info["path"], position)
    else:
        payloads = load_file(part.info["path"])
        assert len(payloads) == settings["tensors"]
        copy.patch(payloads, part.weights.base_version, position)


def assert_holds(copy: LocalCopy, wanted: Tensors) -> None:
    found = load_file(copy.path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_whole_set_then_deltas(tmp_path: Path, encoding: str) -> None:
    trainer, copy = Trainer(tmp_path / "weights", encoding=encoding), LocalCopy(tmp_path / "local")
    versions = (0, 1, 2, 5, 6, 6)
    kinds, shares = [], []
    for version in versions:
        part = trainer.update(version)
        kinds.append((part.weights.kind, part.weights.base_version, part.lasting))
        shares.append(part.density)
        take(copy, part)
        take(copy, part)  # another worker finds that the work is done
        assert_holds(copy, weights(version))
    whole = ("full", None, True)
    deltas = [("delta", base, False) for base in (0, 1, 2, 5)]
    assert kinds == [whole, *deltas, whole]  # version 6 was requested again
    values = sum(tensor.nbytes for tensor in weights(0).values())
    assert shares == [1.0, 2 / values, 4 / values, (6 + 4 + 10) / values, 12 / values, 1.0]
    stems = ["weights" if kind == "full" else "delta" for kind, *_ in kinds]
    names = [f"{stem}-{version}" for stem, version in zip(stems, versions, strict=True)]
    assert trainer.written == [(name, ["engine-0-1"]) for name in names]


def test_without_engines_and_after_a_cut_off_series_the_whole_set_comes(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "weights")
    assert trainer.update(0, {}).weights.kind == "full"
    assert trainer.update(1).weights.kind == "delta"
    assert trainer.update(2, {}).weights.kind == "full"
    file = trainer.publisher.file(2)  # the version of the engines: deltas may follow
    assert file.weights.settings["version"] == 2 and file.weights.kind == "full"
    trainer.tensors = weights(3)
    assert trainer.publisher.next(3, ENGINE).weights.kind == "delta"  # the test does not request its end
    assert trainer.publisher.next(3, {"engine-0-2": 1}).weights.kind == "full"
    file = trainer.publisher.file(3)
    assert file.weights == WeightSet() and file.lasting
    assert load_file(file.info["path"])["tall"].equal(weights(3)["tall"])


def test_a_delta_on_another_version_is_refused(tmp_path: Path) -> None:
    trainer, copy, late = Trainer(tmp_path / "weights"), *(LocalCopy(tmp_path / n) for n in ("a", "b"))
    parts = [trainer.update(version) for version in range(3)]
    take(copy, parts[0])
    with pytest.raises(
        RefusedError, match=r"a delta to version 2 must be applied to version 1, got version 0 in"
    ):
        take(copy, parts[2])
    assert_holds(copy, weights(0))  # the copy is unchanged, and version 1 can follow
    take(copy, parts[1])
    with pytest.raises(RefusedError, match="must be applied to version 0, got no complete copy in"):
        take(late, parts[1])
    other = Trainer(tmp_path / "others")
    take(copy, other.update(1))
    with pytest.raises(RefusedError, match="to version 1, got version 1 of an older whole set"):
        take(copy, parts[2])


def test_damage_is_named_and_the_whole_set_repairs_it(tmp_path: Path) -> None:
    trainer, copy = Trainer(tmp_path / "weights"), LocalCopy(tmp_path / "local")
    take(copy, trainer.update(0))
    part = trainer.update(2)
    path = Path(part.info["path"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # safetensors sorts by dtype and name, so this is the end of "tall"
    path.write_bytes(data)
    with pytest.raises(
        RefusedError, match=r"must give the trainer's weights, got 1 tensors that differ: tall "
    ):
        take(copy, part)
    assert copy.state() is None
    with pytest.raises(RefusedError, match="got no complete copy"):
        take(copy, trainer.update(3))
    take(copy, trainer.update(3))  # this is the second request
    assert_holds(copy, weights(3))
    # Another program has changed the copy.
    data = bytearray(copy.path.read_bytes())
    data[-1] ^= 1
    copy.path.write_bytes(data)
    with pytest.raises(RefusedError, match="1 tensors that differ: "):
        take(copy, trainer.update(4))


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    trainer, copy = Trainer(tmp_path / "weights"), LocalCopy(tmp_path / "local")
    take(copy, trainer.update(0))
    part = trainer.update(1)
    payloads = load_file(part.info["path"])
    payloads["more"] = payloads.pop("embed")
    with pytest.raises(RefusedError, match="the tensors of the copy, got 2 that differ: embed, more"):
        copy.patch(payloads, 0, CopyVersion(part.weights.settings["chain"], 1))
    trainer.tensors = weights(2)
    trainer.tensors["scale"] = trainer.tensors["scale"].bfloat16()
    with pytest.raises(
        RuntimeError,
        match=r"scale must keep its dtype, shape and slices, got bfloat16 \[\] at \[\] after float32",
    ):
        trainer.publisher.next(2, ENGINE)


def test_workers_of_a_host_change_the_copy_once(tmp_path: Path) -> None:
    """An xor that is applied twice would restore the old values."""
    trainer = Trainer(tmp_path / "weights")
    first, second = trainer.update(0), trainer.update(4)
    with ThreadPoolExecutor(6) as workers:
        for part in (first, second):
            list(workers.map(lambda _, part=part: take(LocalCopy(tmp_path / "local"), part), range(6)))
    assert_holds(LocalCopy(tmp_path / "local"), weights(4))
