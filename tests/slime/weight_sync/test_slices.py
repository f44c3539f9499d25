"""Several ranks write one file of whole tensors, each rank its slices. The tests cover the files that a failing or a
killed rank leaves, and how much of the file a reader of slices touches."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_processes import on_ranks
from safetensors.torch import load_file

from slime.weight_sync.channel import Worker
from slime.weight_sync.file_channel import FileChannel, FileReceiver, require_checksums
from slime.weight_sync.slices import OfAllRanks, Slice, SlicePosition, require_whole, whole_slices

SHAPES = {
    "rows": (6, 5),
    "columns": (4, 8),
    "middle": (3, 4, 5),
    "vector": (7,),
    "scalar": (),
    "empty": (0, 3),
}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["columns"] = found["columns"].bfloat16()
    found["vector"] = found["vector"].double()
    return found


def cut(name: str, tensor: torch.Tensor, axis: int, ends: list[int]) -> Iterator[Slice]:
    """Cuts `tensor` into pieces that end at `ends` of `axis`."""
    for start, end in itertools.pairwise([0, *ends, tensor.shape[axis]]):
        where = [(0, size) for size in tensor.shape]
        where[axis] = start, end
        dtype = str(tensor.dtype).removeprefix("torch.")
        position = SlicePosition(name, dtype, tuple(tensor.shape), tuple(where))
        yield Slice(position, lambda position=position: position.of(tensor))


def sliced(version: int) -> list[Slice]:
    tensors = weights(version)
    axes = {"rows": (0, [2, 3]), "columns": (1, [3]), "middle": (1, [1]), "vector": (0, [4])}
    found = [piece for name, how in axes.items() for piece in cut(name, tensors[name], *how)]
    return [*found, *whole_slices((name, tensors[name]) for name in ("scalar", "empty"))]


def assert_holds(path: str, version: int) -> None:
    found, wanted = load_file(path), weights(version)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_slices_in_any_order_make_whole_tensors(tmp_path: Path) -> None:
    update = FileChannel(tmp_path).publish(reversed(sliced(1)), 1, checksums=True)
    assert_holds(update.info["path"], 1)
    assert update.size_bytes == sum(tensor.nbytes for tensor in weights(1).values())
    require_checksums(SHAPES, weights(1).__getitem__, update.info["checksums"])
    damaged = weights(1)
    damaged["columns"][3, 7] += 1
    with pytest.raises(
        ValueError, match=r"got 1 tensors that differ: columns \(--check-weight-update-equal\)"
    ):
        require_checksums(SHAPES, damaged.__getitem__, update.info["checksums"])


def test_two_axes_cut_at_once(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    parts = itertools.product([(0, 1), (1, 3)], [(0, 3), (3, 4)], [(0, 2), (2, 5)])
    places = [SlicePosition("x", "float32", (3, 4, 5), where) for where in parts]
    slices = [Slice(position, lambda position=position: position.of(whole)) for position in places]
    path = FileChannel(tmp_path).publish(slices, 1).info["path"]
    assert torch.equal(load_file(path)["x"], whole)


def test_every_value_comes_once() -> None:
    first, second = (SlicePosition("a", "float32", (4, 2), ((i, i + 2), (0, 2))) for i in (0, 2))
    require_whole([first, second])
    with pytest.raises(RuntimeError, match=r"must publish each value of a once, got 16 of 32 bytes"):
        require_whole([first])
    with pytest.raises(RuntimeError, match=r"got 48 of 32 bytes"):
        require_whole([first, second, first])
    with pytest.raises(
        RuntimeError, match=r"a must have one shape and dtype on all ranks, got \[4, 2\] float32"
    ):
        require_whole([first, SlicePosition("a", "bfloat16", (4, 2), ((2, 4), (0, 2)))])


def position(name: str, rank: int) -> SlicePosition:
    return SlicePosition(name, "float32", (4,), ((2 * rank, 2 * rank + 2),))


def tells_its_places(rank: int, root: Path) -> None:
    """In the second round, only rank 1 has another order. In the third round it has a tensor that rank 0 lacks."""
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    made: list[list[list[str]]] = []

    def make(of_ranks: list[list[SlicePosition]]) -> int:
        made.append([[each.name for each in places] for places in of_ranks])
        return len(made)

    kept = OfAllRanks(make)
    for name, times, order in (
        ("first", 2, "ab"),
        ("second", 3, "ba"),
        ("third", 1, "abc"),
        ("last", 2, "ba"),
    ):
        mine = order if rank else "ab"
        for _ in range(times):
            try:
                found = str(kept.get([position(letter, rank) for letter in mine]))
            except RuntimeError as error:
                found = str(error)
            with (root / f"told-{rank}").open("a") as file:
                file.write(f"{name} {found}\n")
    assert made == [[["a", "b"], ["a", "b"]], *[[["a", "b"], ["b", "a"]]] * 2]
    dist.destroy_process_group()


def test_ranks_tell_their_places_once(tmp_path: Path) -> None:
    """Ranks send them again after a change on any rank, and after an error."""
    on_ranks(tells_its_places, tmp_path, ranks=2)
    wrong = "the ranks must publish each value of c once, got 8 of 16 bytes; report this as a bug"
    told = ["first 1"] * 2 + ["second 2"] * 3 + [f"third {wrong}"] + ["last 3"] * 2
    for rank in range(2):
        assert (tmp_path / f"told-{rank}").read_text().splitlines() == told


Values = Callable[[Path], None]


def fails(root: Path) -> None:
    raise ValueError("--x must be y, got z; do that")


def dies(root: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank(rank: int, root: Path, fault: Values) -> None:
    """Version 1 is published. In version 2, rank 1 does `fault` while it writes."""
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    channel = FileChannel(root / "weights")
    mine = sliced(1)[rank::2]
    update = channel.publish(mine, 1)
    assert bool(update.info) == (rank == 0)

    def values() -> torch.Tensor:
        fault(root)
        raise AssertionError("the fault ends this rank's writing")

    second = sliced(2)[rank::2]
    if rank:
        second[-1] = Slice(second[-1].position, values)
    try:
        channel.publish(second, 2)
    except (ValueError, RuntimeError) as error:
        (root / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    if fault is not dies:
        assert rank or not (root / "weights/weights-2").exists()  # rank 0 removes it
        channel.publish(sliced(3)[rank::2], 3)
    os._exit(0)  # this does not wait for a dead rank


def test_a_rank_that_fails_fails_all_and_the_next_version_comes(tmp_path: Path) -> None:
    on_ranks(rank, tmp_path, fails, ranks=2)
    assert (tmp_path / "error-1").read_text() == "ValueError: --x must be y, got z; do that"
    assert (tmp_path / "error-0").read_text() == (
        "ValueError: all trainer ranks must write version 2 of the weights, got '--x must be y, got z; do that' on "
        "rank 1; see the log of trainer-1"
    )
    assert_holds(str(tmp_path / "weights/weights-1/model.safetensors"), 1)
    assert_holds(str(tmp_path / "weights/weights-3/model.safetensors"), 3)


def test_a_rank_killed_in_a_write_leaves_the_old_version(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        on_ranks(rank, tmp_path, dies, ranks=2)
    assert [x.parent.name for x in tmp_path.glob("weights/*/*.safetensors")] == ["weights-1"]
    assert_holds(str(tmp_path / "weights/weights-1/model.safetensors"), 1)
    # Files of the killed run do not stop the next publication.
    again = FileChannel(tmp_path / "weights").publish(sliced(2), 2)
    assert_holds(again.info["path"], 2)


def with_folders_of_their_own(rank: int, root: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    try:
        FileChannel(root / f"weights-of-{rank}").publish(sliced(1)[rank::2], 1)
    except ValueError as error:
        (root / f"error-{rank}").write_text(str(error))
    dist.destroy_process_group()


def test_ranks_that_share_no_folder_say_so(tmp_path: Path) -> None:
    on_ranks(with_folders_of_their_own, tmp_path, ranks=2)
    said = (tmp_path / "error-1").read_text()
    assert said.startswith("--weight-dir must be a folder that the hosts of all trainer ranks see, got no ")
    assert said in (tmp_path / "error-0").read_text()
    assert not list((tmp_path / "weights-of-0").iterdir())


def mapped_bytes(path: str) -> int:
    """Returns the bytes of the file that this process has touched through its mappings."""
    found, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            of_file = line.endswith(path)
        elif of_file and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_a_reader_touches_the_rows_that_it_takes(tmp_path: Path) -> None:
    """One of two workers narrows whole tensors before it copies them, as vLLM's loaders do."""
    tensors = {f"layer.{i}": torch.randn(1024, 1024) for i in range(8)}
    update = FileChannel(tmp_path).publish(whole_slices(tensors.items()), 1)
    size = 8 * 4 * 1024**2
    receiver = FileReceiver(Worker(torch.device("cpu"), 1, None, str(tmp_path)))
    with receiver.receive(update.info) as part:
        got = {name: part.get(name)[512:].clone() for name in part.shapes}
        touched = mapped_bytes(update.info["path"])
    assert all(torch.equal(got[name], tensor[512:]) for name, tensor in tensors.items())
    assert size / 2 <= touched <= 0.6 * size  # the kernel maps some pages around each touched page
