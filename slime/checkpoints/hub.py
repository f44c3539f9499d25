"""Models of the Hugging Face hub: the one place that turns the name of a model into a local directory."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
"""Configuration, weights and tokenizer. Copies of the weights in other formats are left out."""


def is_hub_name(name: str) -> bool:
    """Whether `name` may be OWNER/MODEL on the hub: its form fits, and there is no folder OWNER here."""
    return _NAME.fullmatch(name) is not None and not Path(name).parent.exists()


def local_checkpoint(name: str, flag: str, *, download: bool) -> str:
    """The directory of a checkpoint: the local copy if `name` is a model of the hub, else `name`.

    With `download`, what is missing or outdated is downloaded first, and ValueError says why it cannot be. Without it,
    the network is not used, and a model without a local copy keeps its name.
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
        raise ValueError(
            f"{flag} must be a directory, or a model of the Hugging Face hub that can be downloaded, got {name} "
            f"({reason}); check the path, or the name, the network and HF_HUB_OFFLINE"
        ) from error
