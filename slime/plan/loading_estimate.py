"""Computes, from shapes, the bytes that a trainer rank reads from a Hugging Face checkpoint, and the host memory for
loading.

slime.megatron_backend.checkpoint.weights.load_hf reads as this file computes. The module imports neither torch nor
Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.checkpoints.checkpoint_dir import holds_hf_weights, start_directory
from slime.checkpoints.hf_config import MAPPED_BYTES, with_own_quantization
from slime.config import Config
from slime.models import family_for
from slime.models.decoder import Hf
from slime.plan.memory_estimate import Item, role_shape
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.plan.scheme_bytes import count_quantized
from slime.plan.units import BYTES, amount, count
from slime.roles import POLICY, get_roles


def loading(c: Config, hf: Hf) -> Iterator[Item]:
    """Yields the bytes that a rank of the pipeline stage with the most parameters reads, and its host memory at the
    peak.

    The bytes of a parameter of a quantised checkpoint are the mean over the model. There are no bytes read for tensors
    that are read whole, because their size depends on the files.
    """
    files = first_files(c, hf)
    shape, stored = Shape.of(files), stored_bytes(c, hf)
    roles = sorted(
        (role for role in get_roles(c) if not role.of_base(c)), key=lambda role: role is not POLICY
    )
    alike = [role for role in roles if role_shape(c, role, shape) is shape]
    others, models = [role.name for role in alike[1:]], len(alike)
    twice = f", for the {' and the '.join(others)} too" if others else ""
    kinds = list(rank_params(c, shape))
    for kind, params, share, ranks, *_ in kinds if not reads_whole(files) else ():
        each = mean_file_bytes(shape, stored, experts=bool(kind))
        yield Item(f"{kind}weights read", models * params * each, f"{share} x {each:.4g} B{ranks}{twice}")
    size = BYTES[c.megatron.params_dtype]
    others_bytes = 0.0
    for role in (role for role in roles if role not in alike):
        own = list(rank_params(c, role_shape(c, role, shape), predicts=False))
        for kind, params, share, ranks, *_ in own:
            yield Item(f"{kind}{role.name} read", params * stored, f"{share} x {stored} B{ranks}")
        others_bytes += sum(one.params for one in own) * size
    elements, name = largest_slice(c, shape, whole=reads_whole(files))
    weights = sum(one.params for one in kinds) * size * models + others_bytes
    on_host = weights if c.cluster.device == "cpu" else 0.0
    how = f"{amount(on_host)} of weights + " if on_host else "weights go to the GPU; "
    yield Item(
        "host memory",
        on_host + elements * stored + MAPPED_BYTES,
        f"{how}one tensor, {name} x {stored} B + {amount(MAPPED_BYTES)} of mapped files",
    )


def first_files(c: Config, hf: Hf) -> Hf:
    """Returns `hf` with the quantisation of the files from which the policy starts: --load, --ref-load or
    --hf-checkpoint. Megatron's checkpoints are plain."""
    directory = start_directory(c)
    if directory == c.rollout.hf_checkpoint:
        return hf
    if holds_hf_weights(directory):
        return with_own_quantization(hf, directory)
    return {key: value for key, value in hf.items() if key != "quantization_config"}


def stored_bytes(c: Config, hf: Hf) -> int:
    """Returns the bytes per element in the files: the dtype in config.json, or otherwise the trainer's dtype. Quantised
    tensors are in bfloat16 after reading."""
    dtype_name = hf.get("dtype") or hf.get("torch_dtype")
    return BYTES.get(str(dtype_name), BYTES[c.megatron.params_dtype])


def mean_file_bytes(shape: Shape, plain: float, *, experts: bool) -> float:
    """Returns the mean bytes of a parameter in the files, for the routed experts or for all other parameters. `plain`
    is the number of bytes of an element of a tensor that is not quantised."""
    whole = shape.count_params(shape.kinds, 1 if shape.tied else 2)
    found = count_quantized(shape)
    if found is None:
        return plain
    small, of = (found.experts, whole.experts) if experts else (found.others, whole.total - whole.experts)
    return plain + (found.bytes - plain) * small / max(1, of)


def reads_whole(hf: Hf) -> bool:
    """Returns True if the family reads quantised tensors whole, and not by the slices of a rank."""
    return bool(hf.get("quantization_config")) and family_for(hf).scheme(hf) is None


def largest_slice(c: Config, shape: Shape, *, whole: bool) -> tuple[float, str]:
    """Returns the elements of the largest part of a tensor that a rank reads at once, and its arithmetic. With `whole`,
    tensors are not cut."""
    tp = 1 if whole else c.megatron.tensor_model_parallel_size
    etp = 1 if whole else c.megatron.expert_tensor_parallel
    found = [(shape.vocab, tp), (shape.ffn, tp), (shape.shared_ffn, tp), (shape.expert_ffn, etp)]
    rows, ranks = max(found, key=lambda pair: pair[0] / pair[1])
    return rows * shape.hidden / ranks, f"{count(rows * shape.hidden)}{f' / {ranks}' if ranks > 1 else ''}"
