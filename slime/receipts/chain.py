"""The file of a receipt: JSON lines, each with its own SHA-256 and the SHA-256 of the line before it.

    {"kind": "begin", ..., "number": 0, "previous": "", "hash": H0, "signature": S0}
    {"kind": "step", "rollout": 0, ..., "number": 1, "previous": H0, "hash": H1, "signature": S1}

A changed line does not have its hash. A line that is missing breaks the chain at the next one. Whoever can write the
file can also compute new hashes; only a signature prevents that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slime.receipts.keys import get_public, is_signed
from slime.tracking.run_files import Line, open_file, parse, read_lines

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Record: TypeAlias = Line
"""One line of a receipt."""


def compute_hash(record: Record) -> str:
    """Returns the SHA-256 of a record without its own hash and signature."""
    inner = {name: value for name, value in record.items() if name not in ("hash", "signature")}
    return hashlib.sha256(json.dumps(inner, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ChainWriter:
    """Appends records to a receipt. An existing file is continued: a run that resumes adds to its receipt."""

    def __init__(self, path: Path, key: Ed25519PrivateKey | None) -> None:
        self._path, self._key = path, key
        self._number, self._previous = 0, ""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._continue()

    def _continue(self) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the run was killed while it wrote the last line
            os.truncate(self._path, len(whole))
        if whole and (last := parse(whole.splitlines()[-1])) is not None:
            self._number, self._previous = last["number"] + 1, last["hash"]

    def append(self, kind: str, **fields: object) -> None:
        """Writes a record. It is on the disk when this method returns."""
        record: Record = {"kind": kind, **fields, "number": self._number, "previous": self._previous}
        record["public_key"] = "" if self._key is None else get_public(self._key)
        record["hash"] = compute_hash(record)
        if self._key is not None:
            record["signature"] = self._key.sign(bytes.fromhex(record["hash"])).hex()
        with open(self._path, "ab") as file:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._number, self._previous = self._number + 1, record["hash"]


def describe(record: Record) -> str:
    """Names a record for a message: "record 3 (step 2)"."""
    what = f"step {record['rollout']}" if record.get("kind") == "step" else str(record.get("kind"))
    return f"record {record.get('number')} ({what})"


def read_chain(run_dir: Path, name: str, public: str | None = None) -> list[Record]:
    """Returns the records of a receipt after a check of hashes, order and signatures. `public` is the key that must
    have signed; None accepts the key that the records name.

    Raises ValueError for the first record that breaks a rule.
    """
    found: list[Record] = []
    for record in _lines(run_dir, name):
        path = run_dir / name
        if record["hash"] != compute_hash(record):
            raise ValueError(
                f"{path}: {describe(record)} must have the hash {record['hash'][:16]}, got "
                f"{compute_hash(record)[:16]}; the record was changed after the run wrote it"
            )
        expected = found[-1]["hash"] if found else ""
        if record["previous"] != expected or record["number"] != len(found):
            after = f"after {describe(found[-1])}" if found else "at the begin"
            raise ValueError(
                f"{path}: records must follow each other, got {describe(record)} {after}; "
                f"{max(record['number'] - len(found), 1)} record(s) are missing or from another receipt"
            )
        _check_signature(path, record, public)
        found.append(record)
    if not found or found[0]["kind"] != "begin":
        raise ValueError(
            f"{run_dir / name} must begin with the record of a start, got none; restore the file"
        )
    return found


def _lines(run_dir: Path, name: str) -> Iterator[Record]:
    file = open_file(run_dir, name)
    if file is None:
        raise ValueError(f"RUN must have a receipt, got no {run_dir / name}; start the run with --receipt")
    with file:
        for number, line in enumerate(read_lines(file)):
            record = parse(line)
            if record is None or not {"hash", "previous", "number", "kind", "public_key"} <= record.keys():
                raise ValueError(
                    f"{run_dir / name} must have a record in each line, got {line[:60]!r} in line {number + 1}; "
                    "restore the file"
                )
            yield record


def _check_signature(path: Path, record: Record, public: str | None) -> None:
    signer = record["public_key"]
    if public is not None and signer != public:
        raise ValueError(
            f"{path}: {describe(record)} must be signed by the key {public[:16]}, got "
            f"{'no signature' if not signer else f'the key {signer[:16]}'}; give the public key of the run's "
            "--receipt-key"
        )
    if signer and not is_signed(signer, record["hash"], record.get("signature", "")):
        raise ValueError(
            f"{path}: {describe(record)} must have a signature of the key {signer[:16]}, got another one; the record "
            "was written by someone without the key"
        )
