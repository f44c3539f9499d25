"""Finds the part of a model in which trainer and transformers differ: a rotary embedding, two exchanged tensors, or the
first layer with another output."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.checkpoints.hf_config import read_hf_config
from slime.checkpoints.hf_files import Files, write_tensors
from slime.config import Config
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.conformance.computed import compute_hidden, compute_log_probs
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.parallel import ParallelInfo
from slime.models import read_decoder

MOST_SWAPS = 60
"""Maximum number of pairs of tensors that are exchanged for a trial."""


def explain_difference(
    folder: Path,
    config: Config,
    info: ParallelInfo,
    batch: Sequence[Tensor],
    *,
    wanted: Tensor,
    frequencies: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
    limit: float,
) -> str:
    """Returns a sentence with the part that is wrong. `wanted`, `frequencies` and `outputs` are transformers'
    log-probs, rotary frequencies and hidden states. Log-probs that differ by at most `limit` are equal."""
    rotary = _wrong_frequencies(folder, frequencies)
    if rotary:
        return rotary
    model = build_model(read_hf_config(folder), config, ddp=False)

    def agrees(candidate: Path) -> bool:
        load_hf(model, candidate)
        with torch.no_grad():
            found = compute_log_probs(model, batch, info)
        return bool((found - wanted).abs().max() <= limit)

    swapped = _swapped_tensors(folder, agrees)
    if swapped:
        return swapped
    load_hf(model, folder)
    return _first_layer(model, batch, outputs)


def _wrong_frequencies(folder: Path, frequencies: Mapping[str, Tensor]) -> str:
    for number, rope in enumerate(read_decoder(read_hf_config(folder)).ropes if frequencies else ()):
        own = rope.frequencies()
        same = [other for other in frequencies.values() if other.shape == own.shape]
        if not any(torch.allclose(own, other, rtol=1e-5, atol=0) for other in same):
            sizes = sorted({other.numel() for other in frequencies.values()})
            found = f"{own.numel()} where transformers has {' or '.join(map(str, sizes))}"
            if same:
                pair = int((own - same[0]).abs().argmax())
                found = f"{own[pair]:.6g} for pair {pair} where transformers has {same[0][pair]:.6g}"
            return (
                f"rotary embedding {number} of the Decoder must have transformers' frequencies, got {found}; "
                "check the family's rope"
            )
    return ""


def _swapped_tensors(folder: Path, agrees: Callable[[Path], bool]) -> str:
    files = Files(folder)
    tensors = {name: files.get(name)[...].clone() for name in files.names()}
    for first, second in itertools.islice(_pairs(tensors), MOST_SWAPS):
        swap = dict(zip(_members(tensors, first), _members(tensors, second), strict=True))
        swap |= {b: a for a, b in swap.items()}
        with tempfile.TemporaryDirectory() as name:
            candidate = Path(name)
            shutil.copy(folder / "config.json", candidate)
            write_tensors({swap.get(n, n): x for n, x in tensors.items()}, candidate / "model.safetensors")
            if agrees(candidate):
                return (
                    f"{first} and {second} must not change places, got equal log-probs only with one in the place of "
                    "the other; check their rows in the family's table"
                )
    return ""


def _kind(name: str) -> str:
    """Returns a tensor's name with {} for the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", ".{}", name)


def _members(tensors: Mapping[str, Tensor], kind: str) -> list[str]:
    return sorted(name for name in tensors if _kind(name) == kind)


def _pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yields two kinds of tensors in layers with the same number of tensors and the same shapes."""
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in sorted(tensors):
        if "{}" in _kind(name):
            shapes[_kind(name)].append(tuple(tensors[name].shape))
    for first, second in itertools.combinations(shapes, 2):
        if shapes[first] == shapes[second]:
            yield first, second


def _first_layer(model: nn.Module, batch: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    found: list[Tensor] = []
    decoder = unwrap(model).decoder

    def keep(_: nn.Module, __: object, output: tuple[Tensor, object]) -> None:
        found.append(output[0].detach().flatten(0, -2))

    def keep_input(_: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        hidden = named["hidden_states"] if "hidden_states" in named else inputs[0]
        found.append(hidden.detach().flatten(0, -2))

    handles = [layer.register_forward_hook(keep) for layer in decoder.layers[:-1]]
    handles.append(decoder.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    with torch.no_grad():
        compute_hidden(model, batch)
    for handle in handles:
        handle.remove()
    for number, (own, other) in enumerate(zip(found, outputs, strict=False)):
        error = ((own[: len(other)] - other).abs().max() / other.abs().max()).item()
        if error > 1e-4:
            part = f"layer {number - 1}" if number else "the embedding"
            return f"the output of {part} is the first that differs, by {error:.1e} relative to the largest value"
    return "the last layer, the final norm or the head differs, and no part before them"
