"""Reads the files or the dataset that a prompt flag names into a memory-mapped table, with Hugging Face `datasets`.

Owns the file formats, the names of hub datasets, the slice, and the file and line of a row in error messages. A table
is stored in the cache of `datasets` (HF_DATASETS_CACHE) and is made again when the file changes.

The table stores JSON as text, which is parsed row by row. The JSON reader of `datasets` would turn a text such as
2024-01-01 into a date, and would add every row's fields to each row.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slime import bridges
from slime.bridges.datasets import LOCK
from slime.data.formats.images import with_encoded_images
from slime.data.formats.other import require_commas, what_to_do
from slime.environments.hubs import is_environment
from slime.environments.rows import prompt_file
from slime.records.errors import FlagError
from slime.system.cache_folder import CACHE, find_cache_folder
from slime.system.disk_space import DiskSpaceGuard
from slime.types import Json

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_HUB = re.compile(r"^[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}$")
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_ROWS_PER_BATCH = 100_000
"""Rows per record batch. Each start reads all batch headers, which for 1,000 rows is close to the whole table."""

Row: TypeAlias = dict[str, Any]
"""A row of a prompt file: maps a column to its value."""
_ONE_KIND = "name one file, or move the others"
_SOURCE = "name a file, a folder or a dataset NAME[:CONFIG[:SPLIT]] of the Hugging Face hub"
_LONGEST_FIELD = 2**31 - 1
"""Longest field of a CSV file in characters. Python's own limit of 131,072 is too small for a long prompt."""


@dataclass(frozen=True)
class FileSource:
    """Files with the same suffix, or a dataset of the hub."""

    name: str
    files: tuple[Path, ...]
    """The files in the order of their names. Empty for a dataset of the hub."""
    flag: str
    part: slice | None = None
    """The slice `@[a:b]` of the name, or None."""

    @property
    def suffix(self) -> str:
        """Returns the suffix of the files, or "" for a dataset of the hub."""
        return self.files[0].suffix if self.files else ""

    @property
    def is_json(self) -> bool:
        """Returns True if a row of the table is JSON text."""
        return self.suffix in (".jsonl", ".json")

    def row(self, stored: Row, where: RowLocation) -> Row | None:
        """Returns a stored row, or None for an empty line. Raises ValueError for text that is not a JSON object."""
        if not self.is_json:
            if self.suffix != ".csv":
                return {name: _present(value) for name, value in stored.items()}
            if not list(stored.values())[-1]:
                _check_fields(self.files)  # pandas fills a line that is too short with empty fields
            return stored
        text = stored["text"].removeprefix("\ufeff")
        if not text.strip():
            return None
        try:
            row = parse_json(text)
        except ValueError as error:
            raise ValueError(
                f"{where}: line must be JSON, got {text.strip()!r:.80} ({error}); fix the line"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: must be a JSON object, got {type(row).__name__}; one object per prompt"
            )
        return row


@dataclass(frozen=True)
class RowLocation:
    """A row of a table. Its text is "file:line", which is computed only for an error."""

    source: FileSource
    number: int
    """Index of the row in the table of `source`, from 0."""

    def __str__(self) -> str:
        number, source = self.number, self.source
        for file in source.files[:-1]:
            rows = len(read_table(replace(source, files=(file,))))
            if number < rows:
                break
            number -= rows
        else:
            file = source.files[-1] if source.files else Path(source.name)
        if source.suffix == ".jsonl":
            return f"{file}:{number + 1}"
        if source.suffix == ".csv":
            return f"{file}:{next(line for i, (line, _) in enumerate(_csv_lines(file)) if i == number + 1)}"
        return f"{file}: {'entry' if source.suffix == '.json' else 'row'} {number + 1}"


def parse_json(text: str) -> Json:
    """Parses a JSON text. Raises ValueError for text that is not JSON, is too deep, or has half of a surrogate pair."""
    try:
        value: Json = json.loads(text)
    except RecursionError as error:
        raise ValueError(
            "JSON must nest less deeply, got too many brackets inside each other; nest fewer"
        ) from error
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(
                f"text must be Unicode, got {code}, which is half of a surrogate pair; write the whole character"
            ) from error
    return value


def _present(value: object) -> object:
    """Returns `value` without fields that are None, at every depth. Arrow adds every row's fields to each row."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def split_slice(spec: str) -> tuple[str, slice | None]:
    """Splits "data.jsonl@[a:b]" into ("data.jsonl", slice(a, b)). The second value is None without a slice."""
    match = _SLICE.match(spec)
    if match is None:
        return spec, None
    return match["path"], slice(*(int(match[end]) if match[end] else None for end in ("start", "stop")))


def find_source(spec: str, flag: str = "--prompt-data") -> FileSource:
    """Finds the files or the hub dataset for `path`, `folder` or `name[:config[:split]]`, with an optional `@[a:b]`.

    For an environment (`slime.environments.hubs`), this writes the file of its tasks. A text that looks like a path, or
    that exists, is never looked up on the hub. Raises ValueError with `flag` for a missing file, for another file type,
    and for a folder without such files or with files of several types.
    """
    name, part = split_slice(spec)
    path = Path(name)
    if is_environment(name) and not path.exists():
        return FileSource(name, (prompt_file(name, flag, find_cache_folder()),), flag, part)
    kinds = ", ".join(SUFFIXES)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if len(suffixes := sorted({p.suffix for p in found})) != 1:
            got = f"{', '.join(suffixes) or 'none'} in {path}"
            raise FlagError(flag, f"name a folder with files of one kind of {kinds}", got, _ONE_KIND)
        return FileSource(name, tuple(found), flag, part)
    if path.suffix not in SUFFIXES and not path.exists() and _HUB.match(name):
        return FileSource(name, (), flag, part)
    if path.suffix not in SUFFIXES:
        raise FlagError(flag, f"be a file of kind {kinds}", path, f"to read it, {what_to_do(path)}")
    if not path.is_file():
        raise FlagError(flag, "name an existing file", path, "check the path")
    return FileSource(name, (path,), flag, part)


def prompt_files(spec: str, flag: str = "--prompt-data") -> list[Path]:
    """Returns the files of a prompt flag, or an empty list for a dataset of the hub."""
    return list(find_source(spec, flag).files)


def read_table(source: FileSource) -> Dataset:
    """Returns all rows of `source`, memory-mapped. JSON is in the column "text", and empty lines of .jsonl are rows.

    Raises ValueError with file and line for text that is not UTF-8, and with the file for a file that cannot be read.
    """
    import datasets
    import pyarrow

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # errors are raised anyway
    folder = find_cache_folder()
    try:
        with DiskSpaceGuard(CACHE, folder, "a copy of the prompts"), bridges.applied(LOCK):
            table = with_encoded_images(_build(source, folder) if source.files else _from_hub(source))
            if source.suffix == ".json":
                print_of = table._fingerprint[:40]
                table = table.map(
                    functools.partial(_entries, files=source.files),
                    **{"batched": True, "batch_size": 1, "with_indices": True},
                    new_fingerprint=f"{print_of}-entries",
                )
            return table
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowInvalid, OSError) as error:
        for file in source.files:
            if source.suffix == ".csv":
                _check_fields((file,))
            elif source.is_json:
                for _ in _lines(file):
                    pass
        kind = {".csv": "CSV", ".parquet": "Parquet", ".arrow": "Arrow"}.get(source.suffix, "JSON")
        reason = error.__cause__ or error
        raise ValueError(f"{source.name}: file must be {kind} ({reason}); write it again") from error


def _build(source: FileSource, folder: Path) -> Dataset:
    from datasets import Dataset, Features, Value
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    files = [file.resolve() for file in source.files if file.stat().st_size]
    if not files:
        return Dataset.from_dict({"text": []})
    stats = [file.stat() for file in files]
    # `datasets` derives the table's name from these values, so a changed file gets a new table.
    changes = [(str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns)) for stat in stats]
    options: dict[str, object] = {}
    if source.is_json:
        options = {
            "features": Features({"text": Value("string")}),
            "sample_by": "line" if source.suffix == ".jsonl" else "document",
        }
    elif source.suffix == ".csv":
        columns = _csv_columns(source.files)
        options = {
            "features": Features({name: Value("string") for name in columns}),
            "keep_default_na": False,
        }
    else:
        _check_types(files)
    if source.suffix == ".parquet":
        # The builder's own schema is that of the first row group, and fails for a group without rows.
        options = {"batch_size": 10_000}
    builders = {".csv": Csv, ".parquet": Parquet, ".arrow": Arrow}
    builder = builders.get(source.suffix, Text)(
        cache_dir=str(folder),
        writer_batch_size=_ROWS_PER_BATCH,
        data_files=DataFilesDict(train=DataFilesList([str(file) for file in files], changes)),
        **options,
    )
    builder.download_and_prepare()
    splits = builder.info.splits
    if not splits or not splits["train"].num_examples:
        return Dataset.from_dict({name: [] for name in builder.info.features or ()})
    table: Dataset = builder.as_dataset("train")
    return table


def _check_types(files: list[Path]) -> None:
    """Raises ValueError for a column of a Parquet or Arrow file with a type that a table of `datasets` cannot store."""
    import pyarrow
    from datasets import Features

    for file in files:
        for field in _schema(file):
            try:
                Features.from_arrow_schema(pyarrow.schema([field]))
            except (ValueError, NotImplementedError) as error:
                kind = "a map" if "map<" in str(field.type) else "this type"
                raise ValueError(
                    f"{file}: column {field.name!r} must not hold {kind}, got {field.type}; leave the column out, or "
                    "write it as a struct or as JSON text"
                ) from error


def _schema(file: Path) -> pyarrow.Schema:
    import pyarrow
    import pyarrow.parquet

    if file.suffix == ".parquet":
        return pyarrow.parquet.read_schema(file)
    with pyarrow.memory_map(str(file)) as data:
        try:
            return pyarrow.ipc.open_stream(data).schema
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(data).schema


def _from_hub(source: FileSource) -> Dataset:
    """Returns the dataset `name[:config[:split]]`. The default split is train."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    name, config, split = (*source.name.split(":"), None, None)[:3]
    try:
        table: Dataset = load_dataset(name, config, split=split or "train")
        return table
    except ConnectionError as error:
        raise FlagError(
            source.flag,
            _SOURCE,
            f"{source.name}, which is no file, and the hub does not answer ({error})",
            "check the path, or the network and HF_HUB_OFFLINE",
        ) from error
    except (DatasetNotFoundError, ValueError) as error:
        raise FlagError(
            source.flag, _SOURCE, f"{source.name} ({error})", "check the name, or log in"
        ) from error


def _entries(
    batch: dict[str, list[str]], numbers: list[int], files: tuple[Path, ...]
) -> dict[str, list[str]]:
    """Returns the entries of a .json file as JSON texts."""
    path = [file for file in files if file.stat().st_size][numbers[0]]
    try:
        rows = json.loads(batch["text"][0].removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}{line}: file must be JSON ({error}); fix it, or name it .jsonl") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{path}: file must hold a list of objects, got {type(rows).__name__}; wrap it in [ ]"
        )
    return {"text": [json.dumps(row) for row in rows]}


def _csv_columns(files: tuple[Path, ...]) -> list[str]:
    """Returns the columns of the files. Raises ValueError if two files differ in them, or if a file has a column
    twice."""
    starts = [list(itertools.islice(_csv_lines(file), 2)) for file in files]
    headers = [start[0][1] if start else [] for start in starts]
    for file, start, header in zip(files, starts, headers, strict=True):
        require_commas(file, start)
        if any(len(fields) > len(header) for _, fields in start):
            _check_fields((file,))  # pandas would read the first field of such rows as an index
        if header != headers[0] or len(set(header)) < len(header):
            raise ValueError(
                f"{file}:1: columns must have different names and be those of {files[0]}, got {header}; fix the header"
            )
    return headers[0]


@functools.cache
def _check_fields(files: tuple[Path, ...]) -> None:
    """Raises ValueError for the first line of csv files that does not have a field for each column."""
    for file in files:
        width = None
        for line, fields in _csv_lines(file):
            width = width or len(fields)
            if len(fields) != width:
                raise ValueError(
                    f"{file}:{line}: line must have {width} fields as the header does; fix the line"
                )


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the last line, fields) per row, the header first. Empty lines are left out, as in pandas."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(_lines(path))
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]
        raise ValueError(
            f"{path}:{reader.line_num}: line must be CSV, got {reason}; put such a field into quotes, or "
            "end lines with a line feed"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file. Raises ValueError with file and line for bytes that are not UTF-8."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: line must be UTF-8, got byte 0x{raw[error.start]:02x} at position "
                    f"{error.start}; save the file as UTF-8"
                ) from error
