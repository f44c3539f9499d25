"""Stores the content of groups with the package straw: each writing thread has its own writer and files.

The package stores records in large files that writers append to, and gives a reference to each record. A reference
exists only for a complete record, so a killed writer leaves no half-written group that anybody reads.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias, TypeVar

from straw import Record, RecordSetRef, SharedFilesystemStore
from straw.backend import FilesystemBackend
from straw.errors import CorruptData, InvalidReference, QueueError, UnsafeRecovery

from slime.config.schema import Config
from slime.records.errors import FlagError
from slime.rollout.straw.folder import RUN_ID, Plain, QueueFolder

T = TypeVar("T")
Reference: TypeAlias = Plain
"""A reference as plain data, see `straw.RecordSetRef`."""
DAMAGED = (CorruptData, InvalidReference)
"""Errors of a record that cannot be read."""


class Storage:
    """The content of a queue. All methods but `make_store` and `close` may be called in every thread."""

    def __init__(self, folder: QueueFolder, config: Config) -> None:
        flags = config.rollout
        self.folder, self._run = folder, folder.path.name
        self._options = {
            "segment_target_bytes": flags.rollout_queue_segment_mib * 2**20,
            "online_gc": flags.rollout_queue_online_gc,
        }
        declared = flags.rollout_storage_declaration
        declaration = None if declared is None else json.loads(Path(declared).read_text(encoding="utf-8"))
        self._backend = {"profile": flags.rollout_storage_profile, "declaration": declaration}
        self._threads = ThreadPoolExecutor(flags.rollout_io_concurrency, thread_name_prefix="rollout-queue")
        self._local = threading.local()
        self._stores: list[SharedFilesystemStore] = []

    def make_store(self) -> SharedFilesystemStore:
        """Returns a store with its own writer. Raises ValueError for a folder of another run."""
        self.folder.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            backend = FilesystemBackend(self.folder.store, **self._backend)
            store = SharedFilesystemStore(self.folder.store, self._run, backend=backend, **self._options)
        except UnsafeRecovery as error:
            raise FlagError(
                RUN_ID, "name the queue of this run", f"{self.folder.store} ({error})", "name another queue"
            ) from error
        self._stores.append(store)
        return store

    async def write(self, text: bytes, tags: Mapping[str, str] | None = None) -> Reference:
        """Stores a record, on the disk when it returns. `tags` name the lease that an answer belongs to."""
        return await self.run(self._write, text, dict(tags or {}))

    async def read(self, reference: Reference) -> bytes:
        """Returns a record. Raises an error of DAMAGED if the file does not have the written content."""
        return await self.run(self.read_now, reference)

    def read_now(self, reference: Reference) -> bytes:
        """Implements `read` in the caller's thread."""
        try:
            records = list(self._store.read(RecordSetRef.from_dict(reference)))
        except DAMAGED:
            raise
        except (QueueError, OSError) as error:  # a file that was cut, or removed
            raise CorruptData(str(error)) from error
        return bytes(records[0].payload)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Runs a function in one of --rollout-io-concurrency threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Closes the writers of this process."""
        self._threads.shutdown(wait=True)
        for store in self._stores:
            store.close()
        self._stores.clear()

    @property
    def _store(self) -> SharedFilesystemStore:
        """Returns the store of the calling thread."""
        if not hasattr(self._local, "store"):
            self._local.store = self.make_store()
        found: SharedFilesystemStore = self._local.store
        return found

    def _write(self, text: bytes, tags: dict[str, str]) -> Reference:
        name = uuid.uuid4().hex
        reference = self._store.publish([Record(name, text, metadata=tags)], submission_id=name)
        return asdict(reference)
