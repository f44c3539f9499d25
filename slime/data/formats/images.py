"""Reads columns of images and videos of `datasets` as they are stored: bytes and paths. Otherwise `datasets` decodes
every image of a row when the row is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def with_encoded_images(table: Dataset) -> Dataset:
    """Returns the table with {"bytes": ..., "path": ...} instead of decoded images and videos in its rows."""
    for name, feature in table.features.items():
        encoded = _encoded(feature)
        if encoded != feature:
            table = table.cast_column(name, encoded)
    return table


def _encoded(feature: object) -> object:
    """Returns a feature whose images are not decoded, at every depth."""
    from datasets import Image, LargeList, List, Video

    if isinstance(feature, Image | Video):
        return type(feature)(decode=False)
    if isinstance(feature, dict):
        return {name: _encoded(one) for name, one in feature.items()}
    if isinstance(feature, List):
        return List(_encoded(feature.feature), length=feature.length)
    return LargeList(_encoded(feature.feature)) if isinstance(feature, LargeList) else feature
