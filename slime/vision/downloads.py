"""Downloads images that a row names by URL. A file is downloaded once, and stays in the cache of `datasets`."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from slime.records.errors import FlagError
from slime.system.cache_folder import find_cache_folder

_LIMIT_S = 30.0
_MOST_BYTES = 100 * 2**20
"""Largest file that is downloaded."""


def read_url(url: str) -> bytes:
    """Returns the content of an http or https URL."""
    name = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    path = find_cache_folder() / "images" / "downloads" / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        content = _download(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(f"{path}.{os.getpid()}-{threading.get_ident()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
    return content


def _download(url: str) -> bytes:
    request = Request(url, headers={"User-Agent": "vime"})
    try:
        with urlopen(request, timeout=_LIMIT_S) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise FlagError(
            "an image",
            "be at an address that answers",
            f"{url[:200]} ({error})",
            "fix the row, or save the file",
        ) from error
    if len(content) > _MOST_BYTES:
        raise FlagError("an image", f"have at most {_MOST_BYTES} bytes", url[:200], "make it smaller")
    return content
