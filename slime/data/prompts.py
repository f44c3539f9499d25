"""Reads prompt files into Prompt records. Owns the checks, their cached results, and the length limit.

A row that cannot be read is an error with file and line. No row is skipped and no prompt is truncated. Prompts over the
limit are left out, and a warning has their number. `datasets` caches the checks of a file with the file's table
(slime.data.files), so only the first start reads all rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, overload

import numpy as np

from slime.data.files import FileSource, Row, RowLocation, find_source, read_table
from slime.data.limits.context import ContextLimits, PromptRows, check_prompt_lengths
from slime.data.limits.conversations import Masks
from slime.data.media.check import MediaCheck
from slime.data.media.row import RowMedia, without_media
from slime.data.openings import warn_about_rows
from slime.data.rows import (
    RowColumns,
    rendered,
    require_conversation,
    to_prompt,
)
from slime.data.tokenizer import prompt_lengths, tokenizer_identity
from slime.records.errors import FlagError
from slime.types import Metadata, Prompt

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LabelCheck = Callable[[object, Metadata], None]
"""`check(label, metadata)` raises ValueError for a label that the reward of the row cannot use."""

_ROWS_AT_A_TIME = 1024
_ROWS_PER_PROCESS = 100_000
"""Number of rows above which several processes share a check."""
_MASKS_PER_PROCESS = 5_000
"""Number of rows above which several processes share a check of loss masks. A mask takes about a millisecond."""
_LOOKED_AT = 8
"""Number of first prompts of a file for which warnings are logged."""
_CHECKED = ("row", "size", "list", "tokens")
"""The columns that a check makes."""
_VERSION = 9
"""Version of the checks. With a new version, every file is checked again."""


class Prompts(Sequence[Prompt]):
    """The prompts of a file. Each access makes a new record from the memory-mapped table, and no record is stored."""

    def __init__(
        self,
        table: Dataset,
        source: FileSource,
        columns: RowColumns,
        tokenizer: PreTrainedTokenizerBase | None,
        rows: np.ndarray,  # [prompts] uint32: the prompts' rows in the table
        unread: int = 0,
        media: MediaCheck | None = None,
    ) -> None:
        self._table, self._source, self._columns = table, source, columns
        self._tokenizer, self._rows, self._media = tokenizer, rows, media
        self.unread = unread
        """Number of rows of the file that were left out because of `most_bytes`."""

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Prompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | Prompts:
        if isinstance(index, slice):
            return self._with_rows(self._rows[index], 0)
        number = int(self._rows[index])
        where = RowLocation(self._source, number)
        row = self._source.row(self._table[number], where)
        assert row is not None, f"{where} was not empty when it was checked"
        return to_prompt(row, where, self._columns, self._tokenizer)

    def first(self, most: int) -> Iterator[tuple[RowLocation, Row]]:
        """Yields the first rows of the file with their RowLocation."""
        for number in map(int, self._rows[:most]):
            where = RowLocation(self._source, number)
            yield where, self._source.row(self._table[number], where) or {}

    def require_files(self) -> None:
        """Raises ValueError with file and line for a prompt whose image is a file that does not exist. The checks of an
        earlier start may be in the cache."""
        features, keys = self._table.features, self._columns.multimodal_keys
        if not keys or (
            not self._source.is_json
            and not any("string" in str(features.get(str(key))) for key in keys.values())
        ):
            return
        for number in map(int, self._rows):
            where = RowLocation(self._source, number)
            row = self._source.row(self._table[number], where) or {}
            RowMedia(row, keys, where).require_files()

    def locate(self, index: int) -> str:
        """Returns file and line of a prompt."""
        return str(RowLocation(self._source, int(self._rows[index])))

    def select(self, indices: np.ndarray) -> Prompts:
        """Returns the prompts at these indices, or those that a mask selects."""
        return self._with_rows(self._rows[indices], self.unread)

    def _with_rows(self, rows: np.ndarray, unread: int) -> Prompts:
        return Prompts(self._table, self._source, self._columns, self._tokenizer, rows, unread, self._media)

    def lengths(self, indices: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        """Returns the number of tokens per prompt, [indices] uint32. The result is cached."""
        rows = self._rows[indices]
        if not len(rows):
            return np.empty(0, np.uint32)
        whole = int(rows[-1] - rows[0]) + 1 == len(rows)
        picked = self._table.select(range(int(rows[0]), int(rows[-1]) + 1) if whole else rows)
        count = functools.partial(
            _count,
            rows=rows,
            source=self._source,
            columns=self._columns,
            template=self._tokenizer,
            tokenizer=tokenizer,
            media=self._media,
        )
        what = f"{hashlib.sha256(rows.data).hexdigest()} {self._media}"
        key = _key(self._table, self._columns, self._tokenizer, tokenizer, what)
        return _read_column(_mapped(picked, count, ("tokens",), key), "tokens")


def read_file(path: str, flag: str = "--prompt-data") -> Iterator[Row]:
    """Yields the rows of a file, a folder or a hub dataset, in order. `path@[a:b]` is the slice rows[a:b].

    Raises ValueError with `flag` for a missing file or another file type, and with file and line for a wrong row.
    """
    source = find_source(path, flag)
    table = read_table(source)
    for number in _part(table, source):
        if (row := source.row(table[number], RowLocation(source, number))) is not None:
            yield row


def load_prompts(
    path: str,
    columns: RowColumns,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_len: int | None = None,
    flag: str = "--prompt-data",
    limit_flag: str = "--rollout-max-prompt-len",
    context: ContextLimits | None = None,
    check_label: LabelCheck | None = None,
    conversations: bool = False,
    masks: Masks | None = None,
    most_bytes: int | None = None,
    media: MediaCheck | None = None,
) -> Prompts:
    """Returns all prompts of a file, a folder or a hub dataset (`slime.data.files.find_source`).

    With `columns.apply_chat_template`, the text is the rendered template, open for the assistant's turn. A plain string
    becomes one user turn. Without it, strings and message lists do not change. Tool descriptions are in
    `metadata["tools"]`. Prompts over `max_prompt_len` tokens are left out with a warning. With `conversations`, SFT
    must be able to train on each row. With `masks`, the trained conversations must have a loss mask and fit the model's
    context, and `max_prompt_len` limits the longest one. `most_bytes` limits the bytes that are read.

    Raises ValueError with file and line for a missing column, a wrong type, a message list that the chat template
    cannot render, or what `check_label` and `media` refuse. The text of `check_label` is in the cache's key, so it must
    name all settings of the check. Raises ValueError if no prompt remains, or if a prompt leaves no room in `context`.
    """
    if tokenizer is None and (columns.apply_chat_template or max_prompt_len is not None):
        raise ValueError(
            f"tokenizer must be given for the chat template and the length limit of {path}, got None"
        )
    source = find_source(path, flag)
    table = read_table(source)
    whole = part = _part(table, source)
    if most_bytes is not None and part:
        part = part[: max(1, most_bytes * len(table) // max(table.data.nbytes, 1))]
    template = tokenizer if columns.apply_chat_template else None
    check = functools.partial(
        _check, part.start, source, columns, template, check_label, conversations, masks, media
    )
    what = f"{part.start}:{part.stop} {check_label} {conversations} {masks and masks.identity} {media}"
    key = _key(table, columns, template, None, what)
    with _unicode(table, source, part):
        rows, sizes, lists, lengths = _checked(table, part, check, key, slow=masks is not None)
    if not len(rows):
        raise FlagError(flag, "hold at least one prompt", f"none in {path}", "check the file and its slice")
    prompts = Prompts(table, source, columns, template, rows, len(whole) - len(part), media)
    prompts.require_files()
    warn_about_rows(prompts.first(_LOOKED_AT), columns, tokenizer)
    if max_prompt_len is not None:
        if masks is None:
            assert tokenizer is not None
            lengths = prompts.lengths(np.arange(len(prompts)), tokenizer)
        fits = _fits(lengths, max_prompt_len, path, limit_flag)
        prompts, sizes, lists, lengths = prompts.select(fits), sizes[fits], lists[fits], lengths[fits]
    if masks is not None:
        masks.require_fit(lengths, prompts.locate)
    if context is not None:
        check_prompt_lengths(PromptRows(sizes, lists, prompts.lengths, prompts.locate), context, limit_flag)
    return prompts


def _checked(
    table: Dataset, part: range, check: Callable[..., dict[str, list[int]]], key: str, *, slow: bool
) -> list[np.ndarray]:
    """Returns the columns _CHECKED for a part of the table. `slow` is true for a check of conversations."""
    if not part:
        return [np.empty(0, np.uint32) for _ in _CHECKED]
    each = _MASKS_PER_PROCESS if slow else _ROWS_PER_PROCESS
    checked = _mapped(table.select(part), check, _CHECKED, key, rows_per_process=each)
    return [_read_column(checked, name) for name in _CHECKED]


def _fits(lengths: np.ndarray, max_prompt_len: int, path: str, limit_flag: str) -> np.ndarray:
    """Returns a mask of the prompts with at most `max_prompt_len` tokens. Raises ValueError if no prompt is left."""
    kept = lengths <= max_prompt_len
    if (few := int(kept.sum())) < len(lengths):
        logger.warning(
            "%d of %d prompts in %s are longer than %s %d tokens (longest: %d) and are left out",
            *(len(lengths) - few, len(lengths), path, limit_flag, max_prompt_len, lengths.max()),
        )
    if not few:
        raise FlagError(
            limit_flag,
            "leave at least one prompt",
            f"{max_prompt_len} while the shortest of {len(lengths)} prompts in {path} has "
            f"{lengths.min()} tokens",
            "raise the limit",
        )
    return kept


def _part(table: Dataset, source: FileSource) -> range:
    """Returns the rows of the slice. Empty lines do not count for the slice, and may be in the result."""
    if source.part is None:
        return range(len(table))
    if source.suffix != ".jsonl" or not len(table):
        return range(len(table))[source.part]
    lines = _mapped(table, _not_empty, ("row",), f"{table._fingerprint[:40]}-lines")
    rows = _read_column(lines, "row")[source.part]
    return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)


@contextmanager
def _unicode(table: Dataset, source: FileSource, part: range) -> Iterator[None]:
    """Raises ValueError with the RowLocation of the first row in a Parquet file whose bytes are not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        for number in part:
            try:
                table[number]
            except UnicodeDecodeError:
                raise ValueError(
                    f"{RowLocation(source, number)}: texts must be UTF-8 ({error}); write the file again"
                ) from error
        raise


def _not_empty(batch: dict[str, list[str]], numbers: list[int]) -> dict[str, list[int]]:
    return {"row": [n for n, text in zip(numbers, batch["text"], strict=True) if text.strip()]}


def _check(
    first: int,
    source: FileSource,
    columns: RowColumns,
    tokenizer: PreTrainedTokenizerBase | None,
    check_label: LabelCheck | None,
    conversations: bool,
    masks: Masks | None,
    media: MediaCheck | None,
    batch: dict[str, list[object]],
    numbers: list[int],
) -> dict[str, list[int]]:
    """Returns the row, the size and the kind (a list or a text) per prompt, and with `masks` the number of tokens in
    the longest conversation. The size is the number of characters and of tokens of images. Raises ValueError with the
    RowLocation of the first wrong row."""
    rows, sizes, lists, lengths = [], [], [], []
    for number, values in zip(numbers, zip(*batch.values(), strict=True), strict=True):
        where = RowLocation(source, first + number)
        row = source.row(dict(zip(batch, values, strict=True)), where)
        if row is None:
            continue
        prompt = to_prompt(row, where, columns, tokenizer)
        if check_label is not None:
            try:
                check_label(prompt.label, prompt.metadata)
            except ValueError as error:
                raise ValueError(
                    f"{where}: column {columns.label_key!r} must hold a label that the reward can use, got "
                    f"{prompt.label!r:.80} ({error}); fix the line"
                ) from error
        text = prompt.text
        if conversations:
            require_conversation(text, columns.input_key, where)
        if media is not None:
            media.check(prompt, where)
        rows.append(first + number)
        size = len(text if isinstance(text, str) else json.dumps(without_media(text)))
        sizes.append(size + (0 if media is None else media.count_images(prompt)))
        lists.append(int(not isinstance(text, str)))
        added = 0 if media is None or masks is None else media.count_added(prompt)
        lengths.append(0 if masks is None else masks.measure(prompt, where) + added)
    return dict(zip(_CHECKED, (rows, sizes, lists, lengths), strict=True))


def _count(
    batch: dict[str, list[object]],
    numbers: list[int],
    rows: np.ndarray,
    source: FileSource,
    columns: RowColumns,
    template: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase,
    media: MediaCheck | None,
) -> dict[str, list[int]]:
    """Returns the number of tokens per prompt of the checked `rows`. Message lists are rendered, open for the
    assistant's turn."""
    texts, raw, added = [], [], []
    for number, values in zip(numbers, zip(*batch.values(), strict=True), strict=True):
        where = RowLocation(source, int(rows[number]))
        row = source.row(dict(zip(batch, values, strict=True)), where)
        assert row is not None
        prompt = to_prompt(row, where, columns, template)
        text, tools = prompt.text, prompt.metadata.get("tools")
        raw.append(template is None and isinstance(text, str))
        if not isinstance(text, str):
            text = rendered(text, tokenizer, columns.apply_chat_template_kwargs, tools, where)
        texts.append(text)
        added.append(0 if media is None else media.count_added(prompt))
    lengths = prompt_lengths(texts, raw, tokenizer)
    return {"tokens": [length + more for length, more in zip(lengths, added, strict=True)]}


def _mapped(
    table: Dataset,
    function: Callable[..., dict[str, list[int]]],
    names: tuple[str, ...],
    key: str,
    *,
    rows_per_process: int | None = None,
) -> Dataset:
    """Returns the columns `names`, uint32, that `function` makes from batches of rows. The cache stores them next to
    the table under `key`."""
    from datasets import Features, Value

    each = rows_per_process or len(table) + 1
    workers = min(len(table) // each, len(os.sched_getaffinity(0)), 16)
    return table.map(
        function,
        batched=True,
        batch_size=_ROWS_AT_A_TIME,
        writer_batch_size=_ROWS_PER_PROCESS,
        with_indices=True,
        remove_columns=table.column_names,
        features=Features({name: Value("uint32") for name in names}),
        new_fingerprint=key,
        num_proc=workers if workers > 1 else None,
    )


def _read_column(table: Dataset, name: str) -> np.ndarray:
    column: np.ndarray = table.data.column(name).to_numpy()
    return column


def _key(
    table: Dataset,
    columns: RowColumns,
    template: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: str,
) -> str:
    """Returns the cache's key of a result: a hash over every input of the result."""
    identities = [None if one is None else tokenizer_identity(one) for one in (template, tokenizer)]
    parts = [_VERSION, table._fingerprint, dataclasses.asdict(columns), identities, rows]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
