"""Prompt files -> Prompt records. Owns the file formats, the columns, the chat template and the length limit.

A row that cannot be read is an error with file and line. No row is skipped and no prompt is truncated. Prompts over
the limit are left out, and a warning counts them.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from slime.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_ROWS_AT_A_TIME = 1024
_TEMPLATE_BYTES = 4096
"""More than a chat template adds to a prompt."""


@dataclass(frozen=True)
class Columns:
    """The columns of a file, and how a prompt becomes text. The field names are the names of the flags.

    "a.b" means field b of column a, for example "reward_model.ground_truth".
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str | None = "tools"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """The longest sequence of a model, and what loads its tokenizer, which few files need."""

    tokens: int
    tokenizer: Callable[[], PreTrainedTokenizerBase]


def read_file(path: str, flag: str = "--prompt-data") -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .json, .parquet or .csv file, in order. `path@[a:b]` is the slice rows[a:b].

    ValueError with `flag` for a missing file or another file type, and with file and line for a wrong row.
    """
    return (row for _, row in _read_rows(path, flag))


def prompt_file(spec: str) -> Path:
    """The file of `path` or `path@[a:b]`."""
    match = _SLICE.match(spec)
    return Path(match["path"] if match else spec)


def load_prompts(
    path: str,
    columns: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_len: int | None = None,
    flag: str = "--prompt-data",
    limit_flag: str = "--rollout-max-prompt-len",
    context: Context | None = None,
) -> list[Prompt]:
    """All prompts of a file.

    With `columns.apply_chat_template`, the text is the rendered template, open for the assistant's turn, and a plain
    string becomes one user turn. Without it, strings and message lists do not change. Tool descriptions are in
    `metadata["tools"]`. Prompts with more than `max_prompt_len` tokens are left out with a warning.

    ValueError with file and line for a missing column or a wrong type. ValueError if no prompt remains, or if a prompt
    leaves no room in `context`. No engine of the model accepts such a prompt.
    """
    if tokenizer is None and (columns.apply_chat_template or max_prompt_len is not None):
        raise ValueError(
            f"tokenizer must be given for the chat template and the length limit of {path}, got None"
        )
    places: list[str] = []
    prompts = []
    for where, row in _read_rows(path, flag):
        places.append(where)
        prompts.append(_to_prompt(row, where, columns, tokenizer))
    if not prompts:
        raise ValueError(
            f"{flag} must hold at least one prompt, got none in {path}; check the file and its slice"
        )
    if max_prompt_len is None:
        if context is not None:
            _require_room(prompts, places, context, columns.apply_chat_template_kwargs, limit_flag)
        return prompts
    assert tokenizer is not None
    lengths = prompt_lengths([p.text for p in prompts], tokenizer, columns.apply_chat_template_kwargs)
    kept = [p for p, length in zip(prompts, lengths, strict=True) if length <= max_prompt_len]
    if len(kept) < len(prompts):
        logger.warning(
            "%d of %d prompts in %s are longer than %s %d tokens (longest: %d) and are left out",
            *(len(prompts) - len(kept), len(prompts), path, limit_flag, max_prompt_len, max(lengths)),
        )
    if not kept:
        raise ValueError(
            f"{limit_flag} must leave at least one prompt, got {max_prompt_len} while the shortest of "
            f"{len(prompts)} prompts in {path} has {min(lengths)} tokens; raise the limit"
        )
    return kept


def _require_room(
    prompts: list[Prompt],
    places: list[str],
    context: Context,
    template_kwargs: dict[str, Any],
    limit_flag: str,
) -> None:
    """ValueError if a prompt has `context.tokens` tokens or more. Tokenises only prompts that may be that long."""
    sizes = [len(p.text if isinstance(p.text, str) else json.dumps(p.text)) for p in prompts]
    # A token is at least one byte and a character at most four, so a shorter text has fewer tokens.
    doubtful = [i for i, size in enumerate(sizes) if 4 * size + _TEMPLATE_BYTES >= context.tokens]
    if not doubtful:
        return
    tokenizer = context.tokenizer()
    # A text with more than this many characters is too long whatever its tokens are; tokenising it may take minutes.
    certain = context.tokens * max(map(len, tokenizer.get_vocab()))
    unclear = [i for i in doubtful if sizes[i] <= certain]
    lengths = dict(
        zip(
            unclear,
            prompt_lengths([prompts[i].text for i in unclear], tokenizer, template_kwargs),
            strict=True,
        )
    )
    too_long = [i for i in doubtful if i not in lengths or lengths[i] >= context.tokens]
    if too_long:
        worst = max(too_long, key=lambda i: sizes[i])
        size = f"{lengths[worst]} tokens" if worst in lengths else f"{sizes[worst]} characters"
        raise ValueError(
            f"prompts must be shorter than the model's context of {context.tokens} tokens (max_position_embeddings), "
            f"got {len(too_long)} of {len(prompts)} that are not; the longest has {size} at {places[worst]}; "
            f"shorten them, or leave them out with {limit_flag}"
        )


def filter_long_prompt(
    samples: list[Sample], tokenizer: PreTrainedTokenizerBase, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens (None: all). Logs the number of dropped samples."""
    if processor is not None:
        raise ValueError(
            "processor must be None, got a multimodal processor; only text prompts are supported"
        )
    if max_length is None:
        return samples
    lengths = prompt_lengths([sample.prompt for sample in samples], tokenizer, {})
    kept = [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_length]
    if len(kept) < len(samples):
        logger.warning(
            "%d of %d prompts exceed %d tokens and are left out",
            *(len(samples) - len(kept), len(samples), max_length),
        )
    return kept


def prompt_lengths(
    texts: list[str | list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Number of tokens of each prompt. Message lists are rendered first, open for the assistant's turn."""
    rendered = [
        text if isinstance(text, str) else render_chat(text, tokenizer, template_kwargs) for text in texts
    ]
    lengths: list[int] = []
    for start in range(0, len(rendered), _ROWS_AT_A_TIME):
        ids = tokenizer(rendered[start : start + _ROWS_AT_A_TIME], add_special_tokens=False)["input_ids"]
        lengths += [len(row) for row in ids]
    return lengths


def render_chat(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    tools: list[Any] | None = None,
) -> str:
    """The text that a model continues: the chat template of the messages, open for the assistant's turn."""
    options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    return str(tokenizer.apply_chat_template(messages, tools=tools, **options))


def _to_prompt(
    row: dict[str, Any], where: str, columns: Columns, tokenizer: PreTrainedTokenizerBase | None
) -> Prompt:
    text = _column(row, columns.input_key, "--input-key", where)
    if text in ("", []):
        raise ValueError(
            f"{where}: column {columns.input_key!r} must hold a prompt, got {text!r}; fix the line"
        )
    if isinstance(text, list):
        text = [_message(entry, columns.input_key, where) for entry in text]
    elif not isinstance(text, str):
        raise ValueError(
            f"{where}: column {columns.input_key!r} must be a string or a list of messages, "
            f"got {type(text).__name__}; check --input-key"
        )
    label = None if columns.label_key is None else _column(row, columns.label_key, "--label-key", where)
    metadata = _parsed(
        row.get(columns.metadata_key) or {}, dict, columns.metadata_key, "--metadata-key", where
    )
    tools = None
    if columns.tool_key is not None and row.get(columns.tool_key):
        tools = _parsed(row[columns.tool_key], list, columns.tool_key, "--tool-key", where)
        metadata = {**metadata, "tools": tools}
    if columns.apply_chat_template:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        assert tokenizer is not None
        try:
            text = render_chat(messages, tokenizer, columns.apply_chat_template_kwargs, tools)
        except (ValueError, jinja2.TemplateError) as error:
            raise ValueError(
                f"{where}: --apply-chat-template must be able to render the prompt, got {error}; "
                "fix the line, or check the tokenizer's chat template and --apply-chat-template-kwargs"
            ) from error
    return Prompt(text=text, label=label, metadata=metadata)


def _column(row: dict[str, Any], key: str, flag: str, where: str) -> Any:
    value = row.get(key)
    if key not in row and "." in key:  # "reward_model.ground_truth": a field of a column
        value = row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        problem = "is empty" if key in row else "is missing"
        raise ValueError(
            f"{where}: column {key!r} {problem}, got columns {sorted(map(str, row))}; set {flag}"
        )
    return value


def _message(entry: Any, key: str, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ValueError(
            f"{where}: every message of column {key!r} must be an object with a role, got {entry!r:.80}; "
            "fix the line"
        )
    # Parquet stores one struct type for all messages, so a field that this message does not have is None.
    return {name: value for name, value in entry.items() if value is not None}


def _parsed(value: Any, kind: type, key: str, flag: str, where: str) -> Any:
    """`value` as a `kind`. A string is parsed as JSON, because csv and parquet files often contain JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: column {key!r} must be JSON, got {value!r:.80} ({error}); set {flag}"
            ) from error
    if not isinstance(value, kind):
        want = "an object" if kind is dict else "a list"
        raise ValueError(f"{where}: column {key!r} must be {want}, got {type(value).__name__}; set {flag}")
    return value


def _read_rows(spec: str, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) pairs of a file or of a slice. `place` is "file:line" for error messages."""
    match, path = _SLICE.match(spec), prompt_file(spec)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ValueError(
            f"{flag} must be a file of kind {', '.join(readers)}, got {path}; convert or rename it"
        )
    if not path.is_file():
        raise ValueError(f"{flag} must name an existing file, got {path}; check the path")
    rows = readers[path.suffix](path)
    if not match:
        return rows
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    # A negative index counts from the end, so all rows are read first.
    if (start or 0) < 0 or (stop or 0) < 0:
        return iter(list(rows)[start:stop])
    return itertools.islice(rows, start, stop)


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            line = _decoded(raw, where)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: line must be JSON, got {line.strip()!r:.80} ({error}); fix the line"
                ) from error
            yield where, _object(row, where)


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads("".join(_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: file must be JSON ({error}); fix it, or name it .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{path}: file must hold a list of objects, got {type(rows).__name__}; wrap it in [ ]"
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}: entry {number}", _object(row, f"{path}: entry {number}")


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: file must be Parquet ({error}); write it again") from error
    with file:
        number = 0
        for batch in file.iter_batches(_ROWS_AT_A_TIME):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(_lines(path))
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            raise ValueError(
                f"{where}: line must have {len(reader.fieldnames or [])} fields as the header does; "
                "fix the line"
            )
        yield where, row


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            yield _decoded(raw, f"{path}:{number}")


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: line must be UTF-8, got byte 0x{line[error.start]:02x} at position {error.start}; "
            "save the file as UTF-8"
        ) from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}; one object per prompt")
    return row
