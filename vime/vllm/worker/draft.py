"""Reads the draft model of an engine that speculates with the checkpoint's own layers of multi-token prediction.

vLLM keeps such a draft in its model runner, next to the model, and shares the model's embedding and head with it. An
update of weights brings the layers too if the trainer trains them. Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slime.models import Hf, family_for
from vime.vllm.worker.live_quantized import Quantized
from vime.vllm.worker.live_weights import cut_shard, holds, live_tensors


def predicted_names(names: Iterable[str], hf_config: Hf) -> set[str]:
    """Returns the names in `names` that belong to layers of multi-token prediction."""
    return set(family_for(hf_config).prediction_names(names, hf_config))


def trained_shapes(stored: dict[str, list[int]], hf_config: Hf) -> dict[str, list[int]]:
    """Returns the tensors of a checkpoint, name -> shape, that an update of trained layers brings. Copies of embedding
    and head are left out."""
    names = predicted_names(stored, hf_config)
    names -= family_for(hf_config).prediction_copies(names, hf_config).keys()
    return {name: stored[name] for name in names}


def differing_draft_tensors(
    draft: nn.Module,
    target: nn.Module,
    names: Collection[str],
    get_tensor: Callable[[str], torch.Tensor],
    update: Collection[str],
) -> list[str]:
    """Returns HF names in `names` whose live value in the draft differs from `get_tensor(name)`, sorted.

    `update` holds every part's names. Raises ValueError for a name that is not live. Embedding and head belong to the
    model, which is compared separately.
    """
    seen, wrong = set(), set()
    for name, module, live in live_draft_tensors(draft, target, update):
        if name not in names:
            continue
        seen.add(name)
        if not holds(live, cut_shard(get_tensor(name), module, live.shape)):
            wrong.add(name)
    if unseen := set(names) - seen:
        raise ValueError(
            f"every tensor of an update must be live to be compared, got {sorted(unseen)[:8]} in the file only"
        )
    return sorted(wrong)


def live_draft_tensors(
    draft: Any, target: nn.Module, update: Collection[str]
) -> Iterator[tuple[str, object, torch.Tensor | Quantized]]:
    """Yields the live tensors of a model's draft, as `live_tensors` does. Embedding and head, which the draft shares
    with the model, have other names."""
    if not hasattr(draft, "packed_modules_mapping"):
        draft.packed_modules_mapping = getattr(target, "packed_modules_mapping", {})
    mapper = getattr(draft, "hf_to_vllm_mapper", None)
    file_prefixes = {live: file for file, live in getattr(mapper, "orig_to_new_prefix", {}).items()}
    for path, module, live in live_tensors(draft, update):
        path = path.replace(".mtp_block.", ".")  # vLLM's additional level
        start = next((start for start in file_prefixes if path.startswith(start)), "")
        yield file_prefixes.get(start, "") + path.removeprefix(start), module, live
