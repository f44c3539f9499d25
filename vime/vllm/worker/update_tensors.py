"""Reads which tensors a weight update of an engine brings from the checkpoint that the engine serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from slime.checkpoints.hf_config import read_hf_config
from slime.models import Hf, family_for
from vime.vllm.worker import draft

_HEAD = "lm_head.weight"


class CheckpointTensors:
    """The tensors of an engine's checkpoint, which its updates bring."""

    def __init__(self, folder: str, *, tied: bool) -> None:
        self._folder, self._tied = folder, tied
        self._hf_config = read_hf_config(folder)
        self._shapes: dict[bool, dict[str, list[int]] | None] = {}

    def predicted_names(self, names: Iterable[str]) -> set[str]:
        """Returns the names in `names` that belong to layers of multi-token prediction. An engine that does not
        speculate does not load these tensors."""
        return draft.predicted_names(names, self._hf_config)

    def require(self, received: dict[str, list[int]], where: str) -> None:
        """Raises ValueError unless the tensors that `where` brings, by name and shape, are the checkpoint's."""
        expected = self._read(trained=bool(self.predicted_names(received)))
        if expected is not None:
            expected = without_unsent_tower(expected, received, self._hf_config)
            ignores = family_for(self._hf_config).ignores
            expected = {
                name: shape for name, shape in expected.items() if name in received or not ignores(name)
            }
        require_same_tensors(received, expected, tied=self._tied, where=where)

    def every_update(self) -> dict[str, list[int]]:
        """Returns name -> shape of the tensors that each update brings, or an empty dictionary if updates may differ.

        Updates differ with a vision tower, with layers of multi-token prediction, which some runs do not train, and
        with tensors that a model may leave unused.
        """
        expected, family = self._read(trained=False), family_for(self._hf_config)
        if expected is None or family.tower_names(expected, self._hf_config):
            return {}
        if any(map(family.ignores, expected)):
            return {}
        return expected if self._read(trained=True) == expected else {}

    def with_head(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors, and the embedding a second time as the head. An engine needs this if the files of a tied
        checkpoint repeat the head, because vLLM then keeps a separate head."""
        _, (embedding,) = family_for(self._hf_config).find("embedding.word_embeddings.weight")
        for name, tensor in tensors:
            if name != _HEAD:
                yield name, tensor
            if name == embedding:
                yield _HEAD, tensor

    def _read(self, *, trained: bool) -> dict[str, list[int]] | None:
        if trained not in self._shapes:
            self._shapes[trained] = checkpoint_shapes(self._folder, trained=trained)
        return self._shapes[trained]


def without_unsent_tower(
    expected: dict[str, list[int]], received: Collection[str], hf_config: Hf
) -> dict[str, list[int]]:
    """Returns the tensors that an update must bring. The trainer of a run without images has no vision tower, so an
    update brings all of the tower's tensors or none."""
    family = family_for(hf_config)
    if family.tower_names(received, hf_config):
        return expected
    tower = set(family.tower_names(expected, hf_config))
    return {name: shape for name, shape in expected.items() if name not in tower}


def checkpoint_shapes(model_path: str, *, trained: bool = False) -> dict[str, list[int]] | None:
    """Returns the name in the weight table -> shape of every tensor of the served checkpoint that an update brings, or
    None for a checkpoint without safetensors files.

    These are all tensors, but tensors of layers of multi-token prediction only if the layers are `trained`.
    """
    shapes = {}
    for shard in _shards(model_path):
        with safe_open(shard, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    if not shapes:
        return None
    hf_config = read_hf_config(model_path)
    family = family_for(hf_config)
    shapes = {family.table_name(name): shape for name, shape in shapes.items()}
    names = shapes.keys() - draft.predicted_names(shapes, hf_config)
    if trained:
        names |= draft.trained_shapes(shapes, hf_config).keys()
    return {name: shape for name, shape in shapes.items() if name in names}


def _shards(model_path: str) -> Iterator[Path]:
    yield from sorted(Path(model_path).glob("*.safetensors"))


def require_same_tensors(
    received: dict[str, list[int]], expected: dict[str, list[int]] | None, *, tied: bool, where: str
) -> None:
    """Raises ValueError unless `received` are exactly the tensors of `expected`. A tied lm_head may be on one side
    only."""
    optional = {_HEAD} if tied else set()
    if expected is None:
        return
    for name in (received.keys() ^ expected.keys()) - optional:
        side = "missing from" if name in expected else "not in the checkpoint but in"
        raise ValueError(f"a weight update must hold the checkpoint's tensors, got {name} {side} {where}")
    for name in received.keys() & expected.keys():
        if received[name] != expected[name]:
            raise ValueError(
                f"{name} must have shape {expected[name]} as in the checkpoint, got {received[name]}"
            )
