"""The engine's side: one copy of the weights per host, which deltas change in place.

    DIR/model.safetensors   the weights by HF name
    DIR/state.json          {"chain", "version"} of a complete copy. The file is removed while the copy changes: a
                            process that dies meanwhile leaves no copy that looks complete.
    DIR/lock                held by the process that changes the copy

All workers on a host use the copy. The first worker that gets an update changes the copy, and the others
find it already changed. A `chain` is the series of a whole set and the deltas that follow it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from slime.system.disk_space import DiskSpaceGuard, require_free_bytes
from slime.weight_sync.delta.payload import apply
from slime.weight_sync.delta.threads import for_tensors

FILE, STATE, LOCK = "model.safetensors", "state.json", "lock"
FLAG = "--update-weight-local-checkpoint-dir"


class RefusedError(RuntimeError):
    """Raised if a delta cannot be applied to this host's copy. The trainer must send the whole set."""


@dataclass(frozen=True)
class CopyVersion:
    """Identifies the weights of a copy: those of `version` in `chain`."""

    chain: str
    version: int


class LocalCopy:
    """The copy in `directory`. The directory is created when it is first needed."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.path = self.directory / FILE

    def keep(self, source: str, version: CopyVersion) -> None:
        """Copies the safetensors file `source`, unless another worker has already done so."""
        with self._locked():
            if self.state() == version:
                return
            self._forget()
            partial = self.path.with_suffix(".partial")
            require_free_bytes(
                FLAG, self.directory, os.path.getsize(source), "this host's copy of the weights"
            )
            try:
                with DiskSpaceGuard(FLAG, self.directory, "this host's copy of the weights"):
                    shutil.copyfile(source, partial)
                    os.replace(partial, self.path)
            finally:
                partial.unlink(missing_ok=True)
            self._remember(version)

    def patch(self, payloads: Mapping[str, Tensor], base: int, version: CopyVersion) -> None:
        """Changes the copy from version `base` to `version`, unless another worker has already done so. Raises
        RefusedError for a copy with other weights, and for payloads that do not produce the trainer's tensors; in both
        cases the copy is not used again."""
        with self._locked():
            found = self.state()
            if found == version:
                return
            if found != CopyVersion(version.chain, base):
                raise RefusedError(
                    f"a delta to version {version.version} must be applied to version {base}, got "
                    f"{_describe_version(found, version.chain)} in {self.directory}"
                )
            self._forget()
            self._change(payloads, version)
            self._remember(version)

    def _change(self, payloads: Mapping[str, Tensor], version: CopyVersion) -> None:
        whole = np.memmap(self.path, np.uint8, "r+")
        at = 8 + int(whole[:8].view("<u8")[0])
        try:
            header = json.loads(whole[8:at].tobytes())
            header.pop("__metadata__", None)
            offsets = {name: tuple(map(int, header[name]["data_offsets"])) for name in header}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RefusedError(f"the copy must be a safetensors file, got {self.path} ({error!r})") from error
        if differ := sorted(header.keys() ^ payloads.keys()):
            raise RefusedError(
                f"a delta must have the tensors of the copy, got {len(differ)} that differ: {', '.join(differ[:8])}"
            )

        def changed(name: str) -> str | None:
            first, last = offsets[name]
            return apply(whole[at + first : at + last], payloads[name])

        # No call waits for the disk: other processes see the change, and if the host ends, the chain ends too.
        found = zip(header, for_tensors().map(changed, header), strict=True)
        wrong = [f"{name} ({why})" for name, why in found if why is not None]
        if wrong:
            raise RefusedError(
                f"a delta to version {version.version} must give the trainer's weights, got {len(wrong)} tensors that "
                f"differ: {', '.join(sorted(wrong)[:8])}"
            )

    def state(self) -> CopyVersion | None:
        """Returns the chain and version of the copy, or None without a complete copy."""
        try:
            found = CopyVersion(**json.loads((self.directory / STATE).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None
        return found if isinstance(found.chain, str) and type(found.version) is int else None

    def _forget(self) -> None:
        (self.directory / STATE).unlink(missing_ok=True)

    def _remember(self, version: CopyVersion) -> None:
        partial = self.directory / f"{STATE}.partial"
        partial.write_text(json.dumps({"chain": version.chain, "version": version.version}), encoding="utf-8")
        os.replace(partial, self.directory / STATE)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.directory / LOCK).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel frees the lock of a process that dies
            yield


def _describe_version(found: CopyVersion | None, chain: str) -> str:
    if found is None:
        return "no complete copy"
    return f"version {found.version}{'' if found.chain == chain else ' of an older whole set'}"
