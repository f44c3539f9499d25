"""The service's records on disk, in one SQLite file: sessions, models, requests with their results, checkpoints.

Each statement is committed before the answer goes to the client, so a killed process loses no accepted request. One
thread uses the store. Every reader names the tenant, so that no row of another tenant can be returned.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Value = str | int | float | bytes | None
Row = Mapping[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL,
    status TEXT NOT NULL, metadata TEXT NOT NULL, name TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, adapter TEXT NOT NULL, spec TEXT NOT NULL,
    metadata TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, status TEXT NOT NULL,
    next_seq INTEGER NOT NULL DEFAULT 0, snapshot_seq INTEGER NOT NULL DEFAULT -1, snapshot TEXT);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    digest TEXT NOT NULL, body BLOB, tokens INTEGER NOT NULL, status TEXT NOT NULL, result BLOB,
    created REAL NOT NULL, finished INTEGER, UNIQUE (owner, seq));
CREATE INDEX IF NOT EXISTS requests_by_status ON requests (status, tenant);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, path TEXT, model TEXT, kind TEXT NOT NULL,
    clients INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    folder TEXT NOT NULL, spec TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL, expires REAL,
    metadata TEXT NOT NULL, lasting INTEGER NOT NULL);
"""
WAITING, DONE, FAILED, CANCELLED = "waiting", "done", "failed", "cancelled"
"""The states of a request."""
ACTIVE, ENDED = "active", "ended"
"""The states of a session and of a model."""


class Store:
    """Reads and writes the rows. Call `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        path.chmod(0o600)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_SCHEMA)
        newest = self._connection.execute("SELECT max(finished) FROM requests").fetchone()[0]
        self._order = newest or 0

    def close(self) -> None:
        self._connection.close()

    def next_order(self) -> int:
        """Returns a number that grows over all calls and restarts: the order in which requests finished."""
        self._order = max(self._order + 1, time.time_ns() // 1000)
        return self._order

    def add(self, table: str, values: Row) -> None:
        """Inserts a row."""
        marks = ", ".join("?" * len(values))
        self._connection.execute(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", [*values.values()]
        )

    def change(self, table: str, key: str, **values: Value) -> None:
        """Sets columns of the row with the primary key `key`."""
        columns = ", ".join(f"{name} = ?" for name in values)
        primary = "path" if table == "checkpoints" else "id"
        self._connection.execute(f"UPDATE {table} SET {columns} WHERE {primary} = ?", [*values.values(), key])

    def find(self, table: str, tenant: str, **values: Value) -> list[Row]:
        """Returns the tenant's rows that have these values, ordered by their insertion."""
        where = "".join(f" AND {name} IS ?" for name in values)
        found = self._connection.execute(
            f"SELECT * FROM {table} WHERE tenant = ?{where} ORDER BY rowid", [tenant, *values.values()]
        )
        return [dict(row) for row in found]

    def get(self, table: str, tenant: str, key: str) -> Row | None:
        """Returns the tenant's row with this primary key."""
        found = self.find(table, tenant, **{"path" if table == "checkpoints" else "id": key})
        return found[0] if found else None

    def remove(self, table: str, **values: Value) -> None:
        where = " AND ".join(f"{name} IS ?" for name in values)
        self._connection.execute(f"DELETE FROM {table} WHERE {where}", [*values.values()])

    def query(self, text: str, *values: Value) -> list[Row]:
        """Returns the rows of all tenants that a statement selects. Only the queues may call this method, and no
        client's request."""
        return [dict(row) for row in self._connection.execute(text, values)]

    def write(self, statements: Sequence[tuple[str, tuple[Value, ...]]]) -> None:
        """Runs statements as one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for text, values in statements:
                self._connection.execute(text, values)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def finish(self, request: str, status: str, result: bytes) -> None:
        """Writes the result of a request. A request finishes once: a cancelled one keeps its state."""
        self._connection.execute(
            "UPDATE requests SET status = ?, result = ?, finished = ? WHERE id = ? AND status = ?",
            [status, result, self.next_order(), request, WAITING],
        )
