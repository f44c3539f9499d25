"""The memory of a lightning indexer while it selects the tokens that queries see.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from slime.config import Config
from slime.models.latent import MOST_SCORES, Indexer, Latent
from slime.plan.model_shape import Shape
from slime.plan.units import amount, count

_PAIR_BYTES = 10
"""Bytes per (query, key) pair in addition to the heads' scores: the sum over heads, its mask, and the sort."""


def own_indexer(shape: Shape) -> Indexer | None:
    """Returns the sizes of the model's indexers, or None for a model without an indexer."""
    found = (kind.attention.index for kind in shape.kinds if isinstance(kind.attention, Latent))
    return next((index for index in found if index is not None and not index.shared), None)


def longest_sequence(c: Config, tokens: int) -> int:
    """Returns the most tokens of a sequence in a micro-batch with `tokens` tokens per rank."""
    prompt, response = c.rollout.rollout_max_prompt_len, c.rollout.rollout_max_response_len
    both = None if prompt is None or response is None else prompt + response
    row = tokens * c.megatron.context_parallel_size
    return min(c.rollout.rollout_max_context_len or both or row, row)


def selection_memory(c: Config, shape: Shape, tokens: int, size: int) -> tuple[float, str]:
    """Returns the most bytes of one layer's selection for `tokens` tokens per rank in a dtype with `size` bytes, and
    their arithmetic. The bytes are 0 if each query sees all previous tokens.

    The indexer's queries of all heads and its key exist four times while they are rotated. The scores of a part of the
    queries, and the selection in int32, come with three of these copies. Tensor-parallel ranks compute the same
    selection for all tokens.
    """
    index = own_indexer(shape)
    keys = longest_sequence(c, tokens)
    if index is None or keys <= index.topk:
        return 0.0, ""
    one = tokens * (index.heads + 1) * index.size * size
    scores = min(MOST_SCORES, tokens * keys * index.heads)
    pairs = scores * (4 + _PAIR_BYTES / index.heads)
    if one > pairs + 4 * tokens * index.topk:
        return 4.0 * one, f"4 x {amount(one)} of the indexer's queries"
    found = 4 * tokens * index.topk
    how = f"3 x {amount(one)} of the indexer's queries + {count(scores)} scores in fp32 + {amount(found)} selected"
    return 3 * one + pairs + found, how
