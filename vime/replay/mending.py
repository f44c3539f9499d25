"""Files of torch.save whose content was damaged after the run wrote them.

torch does not read an entry whose CRC-32 is wrong. A replay shall name the damaged sample instead of the file, so it
reads such a file with new checksums.
"""

from __future__ import annotations

import struct
import zipfile
from io import BytesIO
from pathlib import Path

_HEADER = 30
"""Bytes of the fixed part of an entry's header in a ZIP file. Its last four bytes are the lengths of name and extra."""


def mended(template: str, rollout: int, to: Path) -> str:
    """Returns `template` if the file of `rollout` has its checksums, otherwise the path of a copy with new ones."""
    path = Path(template.format(rollout_id=rollout))
    if not is_damaged(path):
        return template
    write_mended(path, to)
    return str(to).replace("{", "{{").replace("}", "}}")


def is_damaged(path: Path | BytesIO) -> bool:
    """Returns whether an entry of the file does not have its checksum. Raises ValueError if the file is no ZIP file."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is not None
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(
            f"{path} must be a file that the run saved, got {error}; restore the file"
        ) from error


def write_mended(path: Path, to: Path) -> None:
    """Writes a copy of the file in which the checksums fit the bytes."""
    to.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as written:
        for entry in file.infolist():
            start = entry.header_offset + _HEADER
            name, extra = struct.unpack("<HH", content[start - 4 : start])
            begin = start + name + extra
            written.writestr(entry.filename, content[begin : begin + entry.file_size])
