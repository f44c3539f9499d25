"""The draft model of an engine that speculates with the checkpoint's own layers of multi-token prediction.

vLLM keeps such a draft in its model runner, beside the model, with embedding and head of the model. An update of
weights brings the layers too if the trainer trains them. Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slime.models import Hf, family_for
from vime.vllm.worker.live_quantised import Quantised
from vime.vllm.worker.live_weights import holds, live_tensors, shard_of


def predicted_names(names: Iterable[str], hf_config: Hf) -> set[str]:
    """The names in `names` that are of layers of multi-token prediction."""
    return set(family_for(hf_config).prediction_names(names, hf_config))


def trained_shapes(stored: dict[str, list[int]], hf_config: Hf) -> dict[str, list[int]]:
    """Those tensors of a checkpoint, name -> shape, that an update of trained layers brings: all but the copies of
    embedding and head."""
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
    """HF names in `names` whose live value in the draft differs from `get_tensor(name)`, sorted. `update` has the names
    of all parts. ValueError for a name that is not live. Embedding and head are those of the model, which is compared
    by itself."""
    seen, wrong = set(), set()
    for name, module, live in live_draft_tensors(draft, target, update):
        if name not in names:
            continue
        seen.add(name)
        if not holds(live, shard_of(get_tensor(name), module, live.shape)):
            wrong.add(name)
    if unseen := set(names) - seen:
        raise ValueError(
            f"every tensor of an update must be live to be compared, got {sorted(unseen)[:8]} in the file only"
        )
    return sorted(wrong)


def live_draft_tensors(
    draft: Any, target: nn.Module, update: Collection[str]
) -> Iterator[tuple[str, object, torch.Tensor | Quantised]]:
    """As `live_tensors`, of the draft of a model. Embedding and head, which it has of the model, have other names."""
    if not hasattr(draft, "packed_modules_mapping"):
        draft.packed_modules_mapping = getattr(target, "packed_modules_mapping", {})
    mapper = getattr(draft, "hf_to_vllm_mapper", None)
    of_files = {live: file for file, live in getattr(mapper, "orig_to_new_prefix", {}).items()}
    for path, module, live in live_tensors(draft, update):
        path = path.replace(".mtp_block.", ".")  # vLLM's own level
        start = next((start for start in of_files if path.startswith(start)), "")
        yield of_files.get(start, "") + path.removeprefix(start), module, live
