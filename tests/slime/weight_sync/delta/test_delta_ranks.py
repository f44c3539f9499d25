"""Two trainer ranks send deltas of their own slices, by file and by broadcast. An engine's host gets the bits that
one rank would give, and a rank that fails or is killed leaves the last version."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import forks, on_ranks
from safetensors.torch import load_file

from slime.protocols import WeightSet, WeightUpdate
from slime.weight_sync.channel import Export, Receiver, TrainerSettings, Worker
from slime.weight_sync.delta.loader import DeltaLoader
from slime.weight_sync.delta.local_copy import CopyVersion, LocalCopy
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.group import TransferGroup
from slime.weight_sync.publisher import Publisher
from slime.weight_sync.registry import CHANNELS
from slime.weight_sync.slices import Slice
from slime.weight_sync.slices import SlicePosition as SlicePlace
from slime.weight_sync.transfer import find_channel

CPU = torch.device("cpu")
ENGINE, RECEIVERS = "engine-0-1", {"engine-0-1": 1}
SHAPES = {
    "embed": (40, 16),
    "experts": (4, 6, 10),
    "norm": (16,),
    "out": (12, 32),
    "scale": (),
    "tall": (129, 3),
}
AXES = {"embed": 0, "experts": 0, "out": 1}
"""Index at which a tensor is cut for the two ranks. Other tensors are whole on one rank."""
VERSIONS = (0, 1, 3, 4)


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    found["scale"] = found["scale"].float()
    for i in range(version):
        for tensor in found.values():
            tensor.view(-1)[i :: 5 + i] *= 1.5
        found["experts"][1, 2, 3] = float("nan")
    return found


def own(version: int, rank: int) -> Iterator[Slice]:
    """Yields a rank's slices, for two ranks."""
    for number, (name, tensor) in enumerate(weights(version).items()):
        where = [(0, size) for size in tensor.shape]
        if name in AXES:
            middle = tensor.shape[AXES[name]] // 4
            where[AXES[name]] = (middle, tensor.shape[AXES[name]]) if rank else (0, middle)
        elif number % 2 != rank:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        position = SlicePlace(name, dtype, tuple(tensor.shape), tuple(where))
        yield Slice(position, lambda position=position, tensor=tensor: position.of(tensor))


class Trainer:
    """A rank's publisher; `export` returns the weights of the requested version."""

    def __init__(self, root: Path, transport: str, encoding: str, export: Callable[[int], Export]) -> None:
        self.version = 0
        position = TrainerSettings(root / "weights", 600, CPU, 60.0)
        self.publisher = Publisher.of(
            *(transport, position, Export(None, lambda: export(self.version).slices())),
            compare=False,
            snapshot=Snapshot(encoding, "xxh3-128"),
        )

    def parts(self, version: int) -> Iterator[WeightUpdate]:
        self.version = version
        while (part := self.publisher.next(version, RECEIVERS)) is not None:
            yield part


class Engine:
    """An engine's worker without a model, which handles messages as the real worker does."""

    def __init__(self, root: Path) -> None:
        self.worker = Worker(CPU, 0, ENGINE, str(root / "weights"), str(root / "local"))
        self.copy = LocalCopy(root / "local")
        self.receivers: dict[str, Receiver] = {}
        self.loader = DeltaLoader(self.worker)

    def take(self, message: Mapping[str, Any]) -> None:
        weights, channel = WeightSet.of(message.get("weights")), message["channel"]
        if channel not in self.receivers:
            self.receivers[channel] = CHANNELS[channel].load().on_engine(self.worker)
        with self.receivers[channel].receive(message["info"]) as part:
            if part is None:
                return
            if weights.kind == "full":
                self.loader.keep(part, weights)
                return
            with self.loader.whole(part, weights) as whole:
                assert whole is None or whole.shapes == {n: list(shape) for n, shape in SHAPES.items()}


def updated(trainer: Trainer, engine: Engine | None, version: int) -> list[WeightUpdate]:
    """Updates the engine, which is in the first rank's process. The next part is requested while the engine loads
    one. Raises RuntimeError when the broadcast is given up, as in the driver when all its engines run."""
    found: list[WeightUpdate] = []
    with ThreadPoolExecutor(1) as thread:
        taking: Future[None] | None = None
        for part in itertools.chain(trainer.parts(version), [None]):
            if taking is not None:
                taking.result()
                if find_channel(found[-1]).is_abandoned(found[-1].info):
                    raise RuntimeError("the broadcast is given up")
            if part is None:
                break
            found.append(part)
            taking = thread.submit(engine.take, part.message()) if engine is not None else None
    if engine is not None:
        engine.loader.finish()
    return found


def of_ranks(rank: int, root: Path) -> tuple[Callable[[int], Export], Engine | None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    return lambda version: Export(None, lambda: own(version, rank)), None if rank else Engine(root)


def updates(rank: int, root: Path, transport: str, encoding: str) -> None:
    export, engine = of_ranks(rank, root)
    trainer = Trainer(root, transport, encoding, export)
    for version in VERSIONS:
        parts = updated(trainer, engine, version)
        assert transport == "disk" or not version or len(parts) > 2
        if engine is not None:
            copy = engine.copy.path.read_bytes()
            torch.save((copy, parts[0].density, parts[0].weights), root / f"two-{version}")
    dist.destroy_process_group()


def of_one_rank(root: Path, encoding: str) -> Iterator[tuple[bytes, float, WeightSet]]:
    trainer = Trainer(root, "disk", encoding, lambda version: Export(weights(version).items))
    engine = Engine(root)
    for version in VERSIONS:
        (part,) = updated(trainer, engine, version)
        assert all(torch.equal(x, y) for x, y in pairs(engine.copy, version))
        yield engine.copy.path.read_bytes(), part.density, part.weights


def pairs(copy: LocalCopy, version: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the bits per tensor in the copy, with the trainer's bits."""
    found, wanted = load_file(copy.path), weights(version)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        yield found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize(("transport", "encoding"), [("disk", "xor"), ("nccl", "overwrite")])
def test_two_ranks_give_the_bits_that_one_gives(tmp_path: Path, transport: str, encoding: str) -> None:
    on_ranks(updates, tmp_path, transport, encoding, ranks=2)
    for version, (copy, density, sent) in zip(VERSIONS, of_one_rank(tmp_path / "one", encoding), strict=True):
        got, share, found = torch.load(tmp_path / f"two-{version}", weights_only=False)
        assert got == copy, version
        assert share == density and (0 < share < 1) == (version > 0)
        assert (found.kind, found.base_version) == (sent.kind, sent.base_version)
        assert found.settings.get("tensors") == sent.settings.get("tensors")


def fails(rank: int, root: Path) -> None:
    """Rank 0 once has a tensor of another dtype."""
    export, engine = of_ranks(rank, root)

    def other(version: int) -> Iterator[Slice]:
        for each in own(version, rank):
            name, _, *rest = vars(each.position).values()
            yield Slice(SlicePlace(name, "float16", *rest), each.values) if name == "norm" else each

    broken = rank == 0
    trainer = Trainer(
        root, "disk", "xor", lambda v: Export(None, lambda: other(v)) if v == 2 and broken else export(v)
    )
    for version in (0, 1):
        updated(trainer, engine, version)
    with pytest.raises(RuntimeError) as raised:
        updated(trainer, engine, 2)
    (root / f"error-{rank}").write_text(str(raised.value))
    if engine is not None:
        assert all(torch.equal(x, y) for x, y in pairs(engine.copy, 1))
    (part,) = updated(trainer, engine, 3)
    assert part.weights.kind == "full"
    if engine is not None:
        assert all(torch.equal(x, y) for x, y in pairs(engine.copy, 3))
    dist.destroy_process_group()


def test_a_rank_that_fails_fails_all_and_the_whole_set_comes_next(tmp_path: Path) -> None:
    on_ranks(fails, tmp_path, ranks=2)
    said = "norm must keep its dtype, shape and slices, got float16 [16] at [[0, 16]] after bfloat16 [16] at [[0, 16]]"
    assert (tmp_path / "error-0").read_text() == said
    assert (tmp_path / "error-1").read_text() == (
        f"all trainer ranks must compare their weights with the last version, got '{said}' on rank 0; see the log of "
        "trainer-0"
    )


def deadly(act: Callable[..., Any], calls: int, ready: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps `act`: after `calls` calls, the next call kills the process as soon as it is `ready`."""
    count = itertools.count(1)

    def wrapped(*args: Any) -> Any:
        if next(count) <= calls:
            return act(*args)
        while not ready():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    return wrapped


def dies(rank: int, root: Path, transport: str) -> None:
    """Rank 1 is killed when it writes or sends its part of version 2. The engine has a bucket of this version by
    then."""
    export, engine = of_ranks(rank, root)
    trainer = Trainer(root, transport, "xor", export)
    for version in (0, 1):
        updated(trainer, engine, version)
    taken = root / "taken"
    if rank:
        os.pwrite = deadly(os.pwrite, 1, lambda: True)
        TransferGroup.start = deadly(TransferGroup.start, 2, taken.exists)  # type: ignore[method-assign]
    elif engine is not None:
        take = engine.take
        engine.take = lambda message: (take(message), taken.touch())[0]  # type: ignore[method-assign]
    try:
        updated(trainer, engine, 2)
    except (RuntimeError, ValueError) as error:
        (root / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    if engine is not None and transport == "nccl":
        with pytest.raises(ValueError, match=r"a delta must have all 6 tensors, got [1-5];"):
            engine.loader.finish()  # the engine does not serve
    os._exit(0)  # this does not wait for a dead rank


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_a_rank_killed_in_a_delta_leaves_the_last_version(tmp_path: Path, transport: str) -> None:
    context = forks()
    ranks = [context.Process(target=dies, args=(rank, tmp_path, transport)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL]
    said = (tmp_path / "error-0").read_text()
    if transport == "nccl":
        assert said == "RuntimeError: the broadcast is given up"
    engine = Engine(tmp_path)
    state = engine.copy.state()
    assert state is not None and state.version == 1
    assert all(torch.equal(x, y) for x, y in pairs(engine.copy, 1))
    published = {path.parent.name for path in tmp_path.glob("weights/*/*.safetensors")}
    assert published == ({"weights-0", "delta-1"} if transport == "disk" else {"weights-0"})
    # This is the run that starts again.
    trainer = Trainer(tmp_path, "disk", "xor", lambda version: Export(weights(version).items))
    for version, kind in ((2, "full"), (3, "delta")):
        (part,) = updated(trainer, engine, version)
        assert part.weights.kind == kind
        assert engine.copy.state() == CopyVersion(part.weights.settings["chain"], version)
        assert all(torch.equal(x, y) for x, y in pairs(engine.copy, version))
