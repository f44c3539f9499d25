"""This module defines the record of an engine column: the argument of a request, and the storage of the answer.

A column with one number per token needs no such record, because `Sample.columns` stores its values under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.protocols.engines import Arrays, GenerateResult
from slime.types import Sample, SamplingParams

if TYPE_CHECKING:
    from slime.config.schema import Config


@dataclass(frozen=True)
class EngineColumn:
    """A column of an engine's answer that a sample stores in fields.

    Example::

        TOP_COLUMN = EngineColumn(TOP, fields, asked=lambda c: c.algorithm.centred_ids, append=append)
    """

    name: str
    """The column's name in a request and in `GenerateResult.columns`."""
    fields: tuple[str, ...]
    """The fields of a sample that hold the column."""
    asked: Callable[[Config], int]
    """Returns the argument of a request, or 0 for a run that does not read the column."""
    append: Callable[[Sample, Arrays], None]
    """Adds an answer's arrays to a sample that has the answer's tokens already."""
    check: Callable[[Sample, GenerateResult, int, SamplingParams], None] = lambda *_: None
    """`check(sample, result, argument, sampling_params)`: ValueError, with the sample's name, for a wrong answer."""
    known: Callable[[Sample], int] | None = None
    """For a column whose rows begin with the prompt: returns the number of a sample's tokens that have rows. The
    request asks for the rows after them, and a sample stores rows of tokens that another sample trains on."""
