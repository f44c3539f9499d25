"""Models of the Hugging Face hub. Only this module turns the name of a model into a local directory."""

from __future__ import annotations

import re
from pathlib import Path

from slime.records.errors import FlagError

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
"""Patterns of the downloaded files: configuration, weights and tokenizer. Copies of the weights in other formats are
skipped."""


def is_hub_name(name: str) -> bool:
    """Returns whether `name` may be OWNER/MODEL on the hub: its form fits, and the current directory has no folder
    OWNER."""
    return _NAME.fullmatch(name) is not None and not Path(name).parent.exists()


def local_checkpoint(name: str, flag: str, *, download: bool) -> str:
    """Returns the directory of a checkpoint: the local copy if `name` is a model on the hub, otherwise `name`.

    With `download`, missing or outdated files are downloaded first, and a failure raises ValueError with the reason.
    Without it, the network is not used, and a model without a local copy keeps its name.
    """
    if not is_hub_name(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download))
    except (OSError, ValueError) as error:
        if not download:
            return name
        reason = str(error).partition("\n")[0]
        raise FlagError(
            flag,
            "be a directory, or a model of the Hugging Face hub that can be downloaded",
            f"{name} ({reason})",
            "check the path, or the name, the network and HF_HUB_OFFLINE",
        ) from error
