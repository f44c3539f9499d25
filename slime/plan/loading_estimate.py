"""Computes, from shapes, the bytes that a trainer rank reads from a Hugging Face checkpoint, and the host memory for
loading.

slime.megatron_backend.checkpoint.weights.load_hf reads as this file computes. The module imports neither torch nor
Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.checkpoints.hf_config import MAPPED_BYTES
from slime.config import Config
from slime.models.decoder import Hf
from slime.plan.memory_estimate import BYTES, Item, role_shape
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.plan.units import amount, count
from slime.roles import POLICY, get_roles


def loading(c: Config, hf: Hf) -> Iterator[Item]:
    """Yields the bytes that a rank of the pipeline stage with the most parameters reads, and its host memory at the
    peak.

    Yields no bytes read for a quantised checkpoint: its tensors are read whole, and their size depends on the files.
    """
    shape, stored = Shape.of(hf), stored_bytes(c, hf)
    roles = sorted(
        (role for role in get_roles(c) if not role.of_base(c)), key=lambda role: role is not POLICY
    )
    alike = [role for role in roles if role_shape(c, role, shape) is shape]
    others, models = [role.name for role in alike[1:]], len(alike)
    twice = f", for the {' and the '.join(others)} too" if others else ""
    kinds = list(rank_params(c, shape))
    if not hf.get("quantization_config"):
        for kind, params, share, ranks, _ in kinds:
            how = f"{share} x {stored} B{ranks}{twice}"
            yield Item(f"{kind}weights read", models * params * stored, how)
    size = BYTES[c.megatron.params_dtype]
    others_bytes = 0.0
    for role in (role for role in roles if role not in alike):
        own = list(rank_params(c, role_shape(c, role, shape), predicts=False))
        for kind, params, share, ranks, _ in own:
            yield Item(f"{kind}{role.name} read", params * stored, f"{share} x {stored} B{ranks}")
        others_bytes += sum(params for _, params, _, _, _ in own) * size
    elements, name = largest_slice(c, shape, whole=bool(hf.get("quantization_config")))
    weights = sum(params for _, params, _, _, _ in kinds) * size * models + others_bytes
    on_host = weights if c.cluster.device == "cpu" else 0.0
    how = f"{amount(on_host)} of weights + " if on_host else "weights go to the GPU; "
    yield Item(
        "host memory",
        on_host + elements * stored + MAPPED_BYTES,
        f"{how}one tensor, {name} x {stored} B + {amount(MAPPED_BYTES)} of mapped files",
    )


def stored_bytes(c: Config, hf: Hf) -> int:
    """Returns the bytes per element in the files: the dtype in config.json, or otherwise the trainer's dtype. Quantised
    tensors are in bfloat16 after reading."""
    said = hf.get("dtype") or hf.get("torch_dtype")
    return BYTES.get(str(said), BYTES[c.megatron.params_dtype])


def largest_slice(c: Config, shape: Shape, *, whole: bool) -> tuple[float, str]:
    """Returns the elements of the largest part of a tensor that a rank reads at once, and its arithmetic. With `whole`,
    tensors are not cut."""
    tp = 1 if whole else c.megatron.tensor_model_parallel_size
    etp = 1 if whole else c.megatron.expert_tensor_parallel
    found = [(shape.vocab, tp), (shape.ffn, tp), (shape.shared_ffn, tp), (shape.expert_ffn, etp)]
    rows, ranks = max(found, key=lambda pair: pair[0] / pair[1])
    return rows * shape.hidden / ranks, f"{count(rows * shape.hidden)}{f' / {ranks}' if ranks > 1 else ''}"
