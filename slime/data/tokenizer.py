"""Loads the tokenizer of a checkpoint. The source is a local directory, and the checkpoint's own code runs only with
--trust-remote-code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.records.errors import FlagError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The files that map text to ids. A chat template or a padding side does not change this map.
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model")

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The names that transformers 4 and 5 write for the class that adds nothing to tokenizer.json."""


def tokenizer_fingerprint(directory: str) -> str | None:
    """Returns the first 16 hex digits of the SHA-256 over the vocabulary files in `directory`, or None without such
    files."""
    digest, found = hashlib.sha256(), False
    for name in _VOCABULARY_FILES:
        path = Path(directory) / name
        if path.is_file():
            found = True
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16] if found else None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the SHA-256 over the settings that change the ids of a text or of a rendered conversation."""
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        transformers.__version__,
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        None if backend is not None else tokenizer_fingerprint(str(tokenizer.name_or_path)),
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that the tokenizer puts before a text, such as BOS. A prompt does not get the ids that the
    tokenizer puts after a text, because the model continues the prompt."""
    letter = "a"
    alone, whole = tokenizer.encode(letter, add_special_tokens=False), tokenizer.encode(letter)
    starts = (i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
    return list(whole[: next(starts, 0)])


def opened(ids: list[int], opening: list[int]) -> list[int]:
    """Returns the ids of a raw text with `opening` before them, unless the text contains the opening already."""
    return ids if ids[: len(opening)] == opening else opening + ids


def load_tokenizer(
    name_or_path: str, *, trust_remote_code: bool = False, **kwargs: object
) -> PreTrainedTokenizerBase:
    """Returns the Hugging Face tokenizer stored at `name_or_path`.

    A path that looks local (it exists, or starts with "." or "/") never uses the network. Other keyword arguments go to
    `from_pretrained`. Raises ValueError if the directory has no tokenizer.
    """
    path = Path(name_or_path)
    if not path.exists() and (path.is_absolute() or str(name_or_path).startswith(".")):
        raise FlagError("--hf-checkpoint", "name an existing directory", name_or_path, "check the path")
    try:
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(path).from_pretrained(
            str(name_or_path),
            trust_remote_code=trust_remote_code,
            local_files_only=path.exists(),
            **kwargs,
        )
    except Exception as error:  # border: the tokenizers package raises bare Exception, transformers any error
        raise _not_loaded(name_or_path, str(error)) from error
    # Without the files, transformers makes a tokenizer of the model type that has no tokens.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise _not_loaded(name_or_path, "it makes no token of the text 'a'")
    return tokenizer


def shared_tokenizer(name_or_path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Returns `load_tokenizer` of the checkpoint. This process loads it once, until a file of the folder changes. A
    load takes about a second. Callers must not change the tokenizer."""
    folder = Path(name_or_path)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    state = tuple(
        (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()
    )
    return _loaded(name_or_path, trust_remote_code, state)


@functools.lru_cache(maxsize=1)
def _loaded(name_or_path: str, trust_remote_code: bool, state: object) -> PreTrainedTokenizerBase:
    return load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)


def _not_loaded(name_or_path: str, why: str) -> ValueError:
    return ValueError(
        f"--hf-checkpoint must hold a tokenizer that transformers can load, got {name_or_path} ({why}"
        "); check for tokenizer.json, or pass --trust-remote-code if it needs code of its own"
    )


def _tokenizer_class(path: Path) -> Any:
    """Returns AutoTokenizer, or the class that it would choose for a checkpoint with a complete tokenizer.json. The
    import of AutoTokenizer takes 2.5 s more, as it imports every model's code."""
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        settings = {}
    generic = settings.get("tokenizer_class") in _GENERIC and "auto_map" not in settings
    if generic and (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


_TEXTS_AT_A_TIME = 1024


def prompt_lengths(texts: list[str], raw: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns each text's number of tokens. A text with `raw` has no chat template, so it gets the tokenizer's
    BOS."""
    opening = opening_ids(tokenizer)
    lengths: list[int] = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        ids = tokenizer(texts[start : start + _TEXTS_AT_A_TIME], add_special_tokens=False)["input_ids"]
        some = raw[start : start + _TEXTS_AT_A_TIME]
        lengths += [len(opened(row, opening) if plain else row) for row, plain in zip(ids, some, strict=True)]
    return lengths


def require_template_reads(
    options: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises ValueError for an argument that no chat template of the tokenizer reads. `name` is the option in the
    error."""
    templates = tokenizer.chat_template
    if not options or not templates:
        return
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    read: set[str] = set()
    for text in [templates] if isinstance(templates, str) else templates.values():
        environment = _compile_jinja_template(text).environment
        read |= meta.find_undeclared_variables(environment.parse(text))
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if unread := sorted(options.keys() - read - own.keys()):
        raise ValueError(
            f"{name} must name arguments that the chat template reads, got {', '.join(unread)}; it reads "
            f"{', '.join(sorted(read))}"
        )
