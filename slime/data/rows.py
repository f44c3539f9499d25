"""Turns a row of a prompt file into a Prompt record. Owns the columns, the chat template and the errors of a row."""

from __future__ import annotations

import ast
import contextlib
import datetime
import decimal
import difflib
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slime.config.foreign_rewards import RAW_PROMPT
from slime.data.files import Row, RowLocation, parse_json, read_table
from slime.data.media.row import RowMedia, without_media
from slime.loss_mask import tool_rule, tool_schemas
from slime.records.errors import FlagError, StatedError
from slime.types import Message, Metadata, Prompt, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_LOOKED_AT = 8
"""Number of first rows of a table that are searched for a column which a row lacks."""
_NAME = re.compile(r"[\w./:-]+")
"""Pattern of a tool's name."""
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["']\w+["']\s*:""")
"""Pattern of the beginning of a list of records, in JSON or in Python's own form."""
_ROLE = re.compile(r"""["']role["']\s*:""")
OWN_KEYS = frozenset(
    (
        "tools",
        "chosen",
        "rejected",
        "session",
        "turn_rewards",
        "start_rollout_id",
        "prompt_index",
        "sampling",
        "removed",
    )
)
"""Keys of a sample's metadata that a run writes and reads. A column that no flag names does not fill them."""


@dataclass(frozen=True)
class RowColumns:
    """The columns of a file, and the settings that turn a prompt into text. The field names are the names of the flags.

    "a.b" means field b of column a, for example "reward_model.ground_truth".
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str | None = "tools"
    chosen_key: str | None = None
    """Column of the chosen response, together with `rejected_key`. Each row then has two responses, which become
    conversations in the metadata."""
    rejected_key: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    conversations: bool = False
    """True if each prompt is a conversation to train on."""
    left_out: tuple[str, ...] = ()
    """Columns that do not reach the metadata."""
    multimodal_keys: dict[str, object] = field(default_factory=dict)
    """Kind of media -> column, such as {"image": "images"}."""
    whole_rows: bool = False
    """True if the metadata also have empty cells, and the prompt as it is in the row. Rewards of other trainers read
    whole rows."""

    @property
    def used(self) -> set[str]:
        """Returns the columns that the flags name."""
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        media = map(str, self.multimodal_keys.values())
        return {key for key in (*keys, self.chosen_key, self.rejected_key, *media) if key is not None}


def to_prompt(
    row: Row, where: RowLocation, columns: RowColumns, tokenizer: PreTrainedTokenizerBase | None
) -> Prompt:
    """Returns the prompt of a row. Raises ValueError with file and line for a missing column or a wrong type."""
    pair = None if columns.chosen_key is None else _pair(row, columns, where)
    text = pair["chosen"] if pair is not None else _column(row, columns.input_key, "--input-key", where)
    if (columns.apply_chat_template or columns.conversations) and pair is None:
        text = _cell(text, columns.input_key, where)
    if text in ("", []):
        raise ValueError(
            f"{where}: column {columns.input_key!r} must hold a prompt, got {text!r}; fix the line"
        )
    media = RowMedia(row, columns.multimodal_keys, where) if columns.multimodal_keys else None
    if media and isinstance(text, str) and (columns.apply_chat_template or media.has_markers(text)):
        text = [{"role": "user", "content": text}]
    if isinstance(text, list):
        text = [_message(entry, columns.input_key, where, media) for entry in text]
    elif not isinstance(text, str):
        raise FlagError(
            f"{where}: column {columns.input_key!r}",
            "be a string or a list of messages",
            type(text).__name__,
            "check --input-key",
        )
    raw = text if media is None else without_media(text)
    if media is not None:
        media.take_all() if isinstance(text, str) else media.require_all_used()
    label = None if columns.label_key is None else _label(row, columns.label_key, where)
    own = _parsed(row.get(columns.metadata_key) or {}, dict, columns.metadata_key, "--metadata-key", where)
    metadata = _others(row, columns) | own | (pair or {})
    tools = None
    if columns.tool_key is not None and row.get(columns.tool_key) not in (None, "", []):
        tools = _parsed(row[columns.tool_key], list, columns.tool_key, "--tool-key", where)
        tools = [_tool(entry, columns.tool_key, where) for entry in tools]
        metadata = {**metadata, "tools": tools}
    if columns.whole_rows:
        metadata = {**metadata, RAW_PROMPT: raw}
    if columns.apply_chat_template:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        assert tokenizer is not None
        text = rendered(messages, tokenizer, columns.apply_chat_template_kwargs, tools, where)
    if media is None:
        return Prompt(text, label, metadata)
    return Prompt(text, label, metadata, tuple(media.images), tuple(media.videos))


def _others(row: Row, columns: RowColumns) -> Metadata:
    """Returns the columns that no flag names, for the metadata. Columns with bytes, such as images, are left out, and
    empty cells unless the metadata need whole rows. Dates and decimal numbers become text, as JSON needs."""
    skipped = OWN_KEYS.union(columns.used, columns.left_out)
    found: Metadata = {}
    for name, value in row.items():
        if name not in skipped and (value is not None or columns.whole_rows):
            with contextlib.suppress(TypeError):
                found[name] = _json(value)
    return found


def _json(value: object) -> object:
    """Returns `value` as a JSON value. Raises TypeError for a value without a form in JSON, such as bytes."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_json(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _json(one) for name, one in value.items()}
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _column(row: Row, key: str, flag: str, where: RowLocation) -> object:
    value = row.get(key)
    if key not in row and "." in key:  # "reward_model.ground_truth": a field of a column
        value = row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        problem = "is empty" if key in row else "is missing"
        remedy = "fix the line, as other rows have it, or " if _others_have(key, where) else ""
        got = sorted(map(str, row))
        raise StatedError(
            f"{where}: column {key!r}", problem, f"columns {got}", f"{remedy}set {flag}{_near(key, row)}"
        )
    return value


def _others_have(key: str, where: RowLocation) -> bool:
    """Returns true if one of the first rows of the table has a value in this column."""
    table = read_table(where.source)
    locations = (RowLocation(where.source, number) for number in range(min(len(table), _LOOKED_AT)))
    rows = (
        where.source.row(table[location.number], location)
        for location in locations
        if location.number != where.number
    )
    return any(row is not None and row.get(key) is not None for row in rows)


def _near(key: str, row: Row) -> str:
    """Returns a hint with the column whose name is closest to `key`, such as "Task" for "task"."""
    inner = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    names = {name.strip().casefold(): name for name in map(str, [*inner, *row])}
    found = difflib.get_close_matches(key.strip().casefold(), names, n=1)
    near = names[found[0]] if found and key not in row else None
    return "" if near is None else f", did you mean {near!r}?"


def _label(row: Row, key: str, where: RowLocation) -> object:
    label = _column(row, key, "--label-key", where)
    if (isinstance(label, str) and not label.strip()) or (
        isinstance(label, float) and not math.isfinite(label)
    ):
        raise FlagError(
            f"{where}: column {key!r}", "hold a label", f"{label!r}", "fix the line, or set --label-key"
        )
    return label


def _message(entry: object, key: str, where: RowLocation, media: RowMedia | None = None) -> Message:
    if isinstance(entry, dict) and {"from", "value"} <= set(entry) and "role" not in entry:
        raise ValueError(
            f"{where}: every message of column {key!r} must have role and content, got {entry!r:.80}, which is "
            'the form of ShareGPT; convert each with {"role": {"human": "user", "gpt": "assistant"}.get(m["from"], '
            'm["from"]), "content": m["value"]}'
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ValueError(
            f"{where}: every message of column {key!r} must be an object with a role, got {entry!r:.80}; "
            "fix the line"
        )
    message = {name: value for name, value in entry.items() if value is not None}
    content = message.get("content", "" if entry["role"] == "assistant" else None)
    if isinstance(content, list) and media is not None:
        parts = [media.read_part(part) or _read_part_text(part, key, where) for part in content]
        message["content"] = [{"type": "text", "text": x} if isinstance(x, str) else x for x in parts]
    elif isinstance(content, str) and media is not None:
        message["content"] = media.split(content)
    elif isinstance(content, list):
        message["content"] = "".join(_read_part_text(part, key, where) for part in content)
    elif not isinstance(content, str):
        raise ValueError(
            f"{where}: the content of every message of column {key!r} must be a text, or a list of text parts, got "
            f"{content!r:.80} ({type(content).__name__}); fix the line"
        )
    return message


def _pair(row: Row, columns: RowColumns, where: RowLocation) -> dict[str, list[Message]]:
    """Returns a row's two conversations: the prompt's messages, if any, and a response. A response that begins with a
    system or user turn is a whole conversation. Turns that both conversations share are not trained on."""
    prompt = _cell(row.get(columns.input_key), columns.input_key, where)
    before = _messages(prompt, "user", columns.input_key, where) if prompt else []
    found = {}
    for name, key in (("chosen", columns.chosen_key), ("rejected", columns.rejected_key)):
        assert key is not None
        value = _cell(_column(row, key, f"--{name}-key", where), key, where)
        turns = _messages(value, "assistant", key, where)
        if turns[0]["role"] == "assistant" and not before:
            _column(row, columns.input_key, "--input-key", where)  # raises an error for a missing prompt
        found[name] = turns if turns[0]["role"] != "assistant" else [*before, *turns]
        require_conversation(found[name], key, where)
    same = 0
    for ours, theirs in zip(*found.values(), strict=False):
        if ours != theirs:
            break
        same += 1
    for name, turns in found.items():
        if not any(turn["role"] == "assistant" for turn in turns[same:]):
            raise ValueError(
                f"{where}: the responses of a pair must differ in an assistant's turn, got nothing after the "
                f"{same} messages that both have in the {name} one; fix the line"
            )
        found[name] = [{**turn, "step_loss_mask": 0} for turn in turns[:same]] + turns[same:]
    return found


def is_message_list(value: object) -> bool:
    """Returns true if `value` is a list of chat messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(m, dict) and isinstance(m.get("role"), str) and len(m) > 1 for m in value)


def message_text(value: object) -> bool:
    """Returns true if `value` is the JSON text of a list of chat messages."""
    if not isinstance(value, str) or not _LIKE_MESSAGES.match(value):
        return False
    with contextlib.suppress(ValueError):
        return is_message_list(parse_json(value))
    return False


def _cell(value: object, key: str, where: RowLocation) -> object:
    """Returns the chat messages of a cell with a JSON list of messages, in a format without lists (CSV), else `value`.
    Raises ValueError for a text that looks like such a list but is not JSON."""
    if not isinstance(value, str) or not _LIKE_MESSAGES.match(value) or not _ROLE.search(value):
        return value
    in_csv = where.source.suffix == ".csv"
    try:
        found = parse_json(value)
    except ValueError as error:
        is_python = is_message_list(_python_list(value))
        if not in_csv and not is_python:
            return value
        kind = "the text of a Python list" if is_python else f"text that is no JSON ({error})"
        raise ValueError(
            f"{where}: column {key!r} must hold a text, or a list of chat messages as JSON text, got {kind}: "
            f"{value!r:.80}; write the cell with json.dumps(messages), or the file as JSON Lines"
        ) from error
    return found if in_csv and is_message_list(found) else value


def _python_list(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _messages(value: object, role: str, key: str, where: RowLocation) -> list[Message]:
    """Returns a text as one turn of `role`, and messages without a change."""
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value:
        return [_message(entry, key, where) for entry in value]
    raise ValueError(
        f"{where}: column {key!r} must be a text or a list of messages, got {value!r:.80}; fix the line"
    )


def require_conversation(text: str | list[Message], key: str, where: RowLocation) -> None:
    """Raises ValueError unless a row of SFT has chat messages with an assistant's turn to train on."""
    if not isinstance(text, list):
        raise FlagError(
            f"{where}: column {key!r}",
            "hold chat messages for SFT",
            "text",
            "set --input-key, and leave --apply-chat-template off",
        )
    turns = [message for message in text if message["role"] == "assistant"]
    if text[0]["role"] == "assistant" or not any(turn.get("step_loss_mask", 1) for turn in turns):
        raise ValueError(
            f"{where}: messages of column {key!r} must begin with a system or user turn and have an assistant turn to "
            f"train on, got roles {[message['role'] for message in text]}; fix the line"
        )


def _read_part_text(part: object, key: str, where: RowLocation) -> str:
    """Returns the text of a part of a message's content."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f'{where}: every part of a message\'s content in column {key!r} must be {{"type": "text", "text": ...}}, '
            f"got {part!r:.80}; give --multimodal-keys for images and videos, and leave out other parts"
        )
    return str(part["text"])


def _parsed(value: object, kind: type[T], key: str, flag: str, where: RowLocation) -> T:
    """Returns `value` as a `kind`. A string is parsed as JSON, because csv and parquet files often contain JSON."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise FlagError(
                f"{where}: column {key!r}", "be JSON", f"{value!r:.80} ({error})", f"set {flag}"
            ) from error
    if not isinstance(value, kind):
        want = "an object" if kind is dict else "a list"
        raise FlagError(f"{where}: column {key!r}", f"be {want}", type(value).__name__, f"set {flag}")
    return value


def _tool(entry: object, key: str, where: RowLocation) -> object:
    """Returns an entry of a tools column: an object, the JSON text of an object, or the name of a function."""
    if isinstance(entry, str) and _NAME.fullmatch(entry):
        return entry
    found = entry
    if isinstance(entry, str):
        with contextlib.suppress(ValueError):
            found = parse_json(entry)
    rule = tool_rule(found) if isinstance(found, dict) else "be an object, the JSON text of one, or a name"
    if rule is not None:
        raise ValueError(f"{where}: each tool of column {key!r} must {rule}, got {entry!r:.80}; fix the line")
    return found


def render_chat(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, object],
    tools: Tools | None = None,
) -> str:
    """Returns the text that a model continues: the messages in the chat template, open for the assistant's turn."""
    options: dict[str, Any] = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    return str(tokenizer.apply_chat_template(without_media(messages), tools=tool_schemas(tools), **options))


def rendered(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, object],
    tools: Tools | None,
    where: RowLocation,
) -> str:
    """Calls `render_chat` for a row. Raises ValueError with file and line for any error of the template."""
    try:
        return render_chat(messages, tokenizer, template_kwargs, tools)
    except Exception as error:  # border: a chat template is a program of the model's author
        raise FlagError(
            f"{where}: the chat template",
            "be able to render the prompt",
            f"{type(error).__name__}: {error}",
            "fix the line, or check the tokenizer's chat template and --apply-chat-template-kwargs",
        ) from error
