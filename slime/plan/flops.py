"""FLOPs of a forward pass, from the decoder that config.json describes. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections import Counter

from slime.models import Hf, read_decoder
from slime.plan.model_shape import Shape


class PredictionFlops:
    """FLOPs of a training pass through the layers of multi-token prediction: forward, and backward for inputs and
    weights in the layers. The head is a constant there, so its backward is for inputs only.

    Each layer computes all tokens of a sample, those of a shared prompt too. The head computes the response tokens.
    """

    def __init__(self, hf: Hf) -> None:
        decoder = read_decoder(hf)
        self._layers, shape = decoder.predictions, Shape.from_decoder(decoder)
        self._per_token = 2 * shape.active_predicting + sum(x.attention.token_flops for x in self._layers)
        self._head = 2 * shape.hidden * shape.vocab * len(self._layers)

    def __call__(self, length: float, response_length: float) -> float:
        """Returns the FLOPs of a sample. The arguments are those of `ForwardFlops`."""
        attention = sum(x.attention.pair_flops * _pairs(length, x.sees) for x in self._layers)
        return float(3 * (self._per_token * length + attention) + 2 * self._head * response_length)


class ForwardFlops:
    """Least FLOPs of a forward pass over a sample, for a model with gated MLPs.

    The layers need two FLOPs per weight and token. Attention needs FLOPs for each (query, key) pair of a causal mask: L
    (L + 1) / 2 pairs, or fewer with a sliding window or an indexer. In a layer with experts, only a token's experts,
    the shared experts and the router count. The head counts for the response tokens only, because the loss and the
    log-probs need no other logits. The trainer computes no other logits (--rlk-fast off does, and discards them).
    slime's count includes the head over all tokens, which gives more where prompts are long. The count omits norms,
    rotations, biases, the embedding's look-up, the scores of an indexer and the recomputation of a checkpointed
    backward.
    """

    def __init__(self, hf: Hf) -> None:
        decoder = read_decoder(hf)
        shape = Shape.from_decoder(decoder)
        further = sum(layer.attention.token_flops for layer in decoder.layers)
        self._per_token = 2 * shape.active + further
        self._head = 2 * decoder.hidden * decoder.vocab
        self._per_pair: Counter[int | None] = Counter()
        for layer in decoder.layers:
            self._per_pair[layer.sees] += layer.attention.pair_flops

    def __call__(self, length: float, response_length: float) -> float:
        """Returns the FLOPs of a sample of `length` tokens, whose last `response_length` tokens are the response."""
        attention = sum(flops * _pairs(length, window) for window, flops in self._per_pair.items())
        return float(self._per_token * length + attention + self._head * response_length)


def _pairs(length: float, window: int | None) -> float:
    """Returns the number of (query, key) pairs of a causal mask over `length` tokens. Each token sees at most `window`
    tokens."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) / 2 + (length - seen) * seen
