"""Finds the tokens of each image of a sample. Engine and trainer use these rules, so that both agree.

An image with a `start` begins at that token. Any other image takes the first run of its token id that is long enough
and follows the images before it. So an image id that the model sampled is a text token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from slime.vision.inputs import ImageInputs, MediaFile, MediaKind


def next_run(indices: Sequence[int], cursor: int, length: int, start: int | None = None) -> int | None:
    """Returns the number in `indices` at which the next `length` neighbouring indices begin, or None.

    `indices` are the tokens with the id of an image, in ascending order. The search begins at number `cursor`, and with
    `start` only the run that begins at token `start` counts.
    """
    last = len(indices) - length
    if start is not None:
        cursor = max(cursor, bisect_left(indices, start))
        last = min(last, cursor) if cursor < len(indices) and indices[cursor] == start else -1
    for number in range(cursor, last + 1):
        if indices[number + length - 1] - indices[number] == length - 1:
            return number
    return None


def locate(inputs: ImageInputs, tokens: Sequence[int], ids: Mapping[MediaKind, Sequence[int]]) -> ImageInputs:
    """Returns the images with their `start` in `tokens`, which no model has sampled. `ids` are the token ids that stand
    for an image and for a video. An image whose tokens are missing keeps its `start`; a later check reports it."""
    waiting = {
        kind: iter([index for index, token in enumerate(tokens) if token in set(own)])
        for kind, own in ids.items()
    }
    found: list[MediaFile] = []
    for item in inputs.items:
        mine = list(islice(waiting.get(item.kind, iter(())), item.tokens))
        found.append(replace(item, start=mine[0]) if len(mine) == item.tokens and mine else item)
    return ImageInputs(tuple(found))


def shift(inputs: ImageInputs, tokens: int) -> ImageInputs:
    """Returns the images of a later turn, which follows `tokens` tokens."""
    return ImageInputs(
        tuple(
            item if item.start is None else replace(item, start=item.start + tokens) for item in inputs.items
        )
    )
