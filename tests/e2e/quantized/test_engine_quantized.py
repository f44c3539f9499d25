"""A real vLLM on CPUs keeps the scheme of a quantised checkpoint, and takes updates in this scheme.

On CPUs without AMX, vLLM has kernels for linear layers in int4 only. The arithmetic of fp8 and of experts is that of
our plain kernels there (vime.vllm.cpu.fp8, vime.vllm.cpu.quantized).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from family_engine import TOKENS, train, versions_of
from megatron_cases import tiny_checkpoint
from offline_engine import OfflineEngine, offline_engine
from quantization_cases import COMPRESSED
from quantize import find_routers, quantization_config, quantize_checkpoint
from rank_processes import on_ranks
from safetensors.torch import load_file, save_file

from slime.models.quantized.int4 import unpack
from slime.models.quantized.quantization import FUSED, read_scheme, rounded, spread
from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.refusals import refusals
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.publisher import Publisher

pytestmark = pytest.mark.e2e

AGREES = 0.02
"""Largest mean difference of log-probs over tokens between engine and trainer, in nats, if both have the checkpoint's
weights in bfloat16."""
ROUNDED = {"fp8": 0.1, "int4": 0.4, "rows": 0.2, "blocks": 0.1}
"""The same after a step: the engine has the trainer's weights rounded to the scheme. The step changes the log-probs by
more than 1."""
FP8_INPUTS = 0.1
"""The first bound for schemes in fp8, because engines round the activations of linear layers, too."""
DENSE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = DENSE | {"moe_intermediate_size": 128, "num_experts": 8, "mlp_only_layers": [0]}
SHAPES = {"qwen3": DENSE, "qwen3_moe": MOE}


def quantized_checkpoint(
    directory: Path, kind: str, scheme: str, shape: dict[str, Any] | None = None
) -> None:
    """Writes a tiny checkpoint. With experts, int4 quantises only experts, as in Kimi-K2-Thinking."""
    plain = directory.with_name(f"{directory.name}-plain")
    tiny_checkpoint(plain, kind, **(shape or SHAPES[kind]))
    experts_only = scheme == "int4" and kind == "qwen3_moe"
    if scheme in COMPRESSED:
        given = COMPRESSED[scheme] | {"ignore": ["lm_head"]}
    else:
        given = quantization_config(scheme, experts_only=experts_only, routers=find_routers(plain))
    quantize_checkpoint(plain, directory, given)
    shutil.rmtree(plain)


@contextmanager
def served(
    root: Path, kind: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OfflineEngine, list[Any]]]:
    """Yields an engine with a tiny checkpoint, and (log-probs, update) of the trainer before and after a step."""
    quantized_checkpoint(root / "tiny", kind, scheme)
    on_ranks(train, root, ["tiny"], "float32", True, ranks=1)
    versions = versions_of((root, torch.load(root / "trained.pt", weights_only=False)), "tiny")
    with offline_engine(root / "tiny", root / "tiny-weights", monkeypatch, dtype="bfloat16") as engine:
        yield engine, versions


def check_deltas(engine: OfflineEngine, weight_dir: Path, first: WeightUpdate, second: WeightUpdate) -> None:
    """Sends the second weights as a delta from the first. The log-probs are equal to the bit to those of the whole
    set."""
    settings = TrainerSettings(weight_dir / "series", 1 << 20, torch.device("cpu"), 60.0)
    tensors = load_file(first.info["path"])
    given = Publisher.of(
        *("disk", settings, Export(tensors.items)), compare=True, snapshot=Snapshot("xor", "sha256")
    )
    found = []
    for version, update in enumerate((first, second)):
        tensors.update(load_file(update.info["path"]))
        part = given.next(version, {"engine-0": 1})
        assert part is not None and part.weights.kind == ("delta" if version else "full")
        assert given.next(version, {"engine-0": 1}) is None
        engine.take(part)
        assert not refusals(part)
        found.append(engine.log_probs(TOKENS))
    engine.take(second)
    assert torch.equal(found[1], engine.log_probs(TOKENS)) and not torch.equal(found[1], found[0])


def check_errors(engine: OfflineEngine, weight_dir: Path, first: WeightUpdate, second: WeightUpdate) -> None:
    """The engine has the second weights. It finds other weights, one changed value, and missing scales."""
    with pytest.raises(RuntimeError, match=r"live weights must equal the trainer's, got \d+ that differ: "):
        engine.take(first, load=False)
    engine.take(second)
    norm = engine.worker.model_runner.model.model.layers[1].post_attention_layernorm
    norm.weight.data[3] += 0.5
    changed = "got 1 that differ: model.layers.1.post_attention_layernorm.weight"
    with pytest.raises(RuntimeError, match=changed):
        engine.take(second, load=False)
    tensors = load_file(second.info["path"])
    lost = next(name for name in sorted(tensors) if "weight_scale" in name)
    del tensors[lost]
    (weight_dir / "lost").mkdir()
    save_file(tensors, weight_dir / "lost" / "model.safetensors")
    path = str(weight_dir / "lost" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{lost} missing from the file"):
        engine.take(WeightUpdate(5, "disk", {"path": path}))


def check_rounded(engine: OfflineEngine, trained: dict[str, torch.Tensor]) -> None:
    """Compares the engine's weights with those of --round-weights, which the trainer rounds in its forward pass: all
    are equal to the bit."""
    scheme = read_scheme({"quantization_config": quantization_config("int4")})
    assert scheme is not None
    found = dict(engine_weights(engine))
    assert len(found) > 7
    for names, weight in found.items():
        wanted = torch.cat([rounded(trained[f"{name}.weight"], scheme) for name in names])
        assert torch.equal(weight.float(), wanted)


def engine_weights(engine: OfflineEngine) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields modules and their joined weight in an engine with INT4. A product of vLLM's kernel with unit vectors is
    the weight that the kernel dequantises."""
    for path, layer in engine.worker.model_runner.model.named_modules():
        parent, _, last = path.rpartition(".")
        if hasattr(layer, "w13_weight_packed"):
            experts = parent if last == "routed_experts" else path
            for expert, codes in enumerate(layer.w13_weight_packed):
                shape = (len(codes), 8 * codes.shape[1])
                weight = unpack(codes, shape[1]) * spread(layer.w13_weight_scale[expert], (1, 32), shape)
                yield (f"{experts}.{expert}.gate_proj", f"{experts}.{expert}.up_proj"), weight.bfloat16()
        elif hasattr(layer, "weight_packed"):
            units = torch.eye(layer.input_size_per_partition, dtype=torch.bfloat16)
            parts = [
                part for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if FUSED[part] == last
            ]
            yield (
                tuple(f"{parent}.{part}" for part in parts or [last]),
                layer.quant_method.apply(layer, units).T,
            )


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("qwen3_moe", "fp8"),
        ("qwen3", "int4"),
        pytest.param("qwen3", "fp8", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "int4", marks=pytest.mark.slow),
        pytest.param("qwen3", "rows", marks=pytest.mark.slow),
        pytest.param("qwen3", "blocks", marks=pytest.mark.slow),
    ],
)
def test_engines_keep_the_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scheme: str
) -> None:
    """The trainer reads the checkpoint in bfloat16. Its first update gives the engine the weights that it has. Updates
    have the checkpoint's tensors, so their checksums and names are compared as usual."""
    with served(tmp_path, kind, scheme, monkeypatch) as (engine, ((before, first), (after, second))):
        stored, brought = load_file(tmp_path / "tiny" / "model.safetensors"), load_file(first.info["path"])
        codes = "weight_packed" if scheme == "int4" else "weight"
        quantized = [name for name in stored if name.endswith(codes) and stored[name].dtype != torch.float32]
        assert quantized and all(brought[name].dtype == stored[name].dtype for name in quantized)
        same = [(stored[name].view(torch.uint8) == brought[name].view(torch.uint8)) for name in quantized]
        assert torch.cat([each.flatten() for each in same]).float().mean() > 0.999
        agrees = AGREES if scheme == "int4" else FP8_INPUTS
        start = engine.log_probs(TOKENS)
        assert (start - before).abs().mean() < agrees
        for update, expected, bound in ((first, before, agrees), (second, after, ROUNDED[scheme])):
            engine.take(update)
            found = engine.log_probs(TOKENS)
            assert (found - expected).abs().mean() < bound
        if scheme == "int4":
            check_rounded(engine, load_file(tmp_path / "tiny-plain-1.safetensors"))
        assert (found - before).abs().mean() > 1
        check_deltas(engine, tmp_path / "tiny-weights", first, second)
        check_errors(engine, tmp_path / "tiny-weights", first, second)
        engine.take(first)
        assert (engine.log_probs(TOKENS) - start).abs().max() < agrees
