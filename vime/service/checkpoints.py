"""The checkpoints of models: their names, folders and rows. A path is tinker://MODEL/weights/NAME.

A folder is written under a temporary name and renamed, and its row is written together with the request's result. So a
checkpoint without a row is left over from a killed process, and is replaced.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

from slime.protocols.tenants import TenantTrainer
from vime.service.limits import Refusal, TenantLimits
from vime.service.store import Row, Store, Value

Change = tuple[str, tuple[Value, ...]]
"""A statement for the store, with its values."""

SAVES = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""Maps a kind of request to the part of the path."""
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Maps the part of the path to the checkpoint's type in lists."""
SNAPSHOTS_PER_MODEL = 16
"""Number of unnamed sampler checkpoints that a model keeps."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,127}")
_SCHEME = "tinker://"


class Checkpoints:
    """Writes, finds and deletes checkpoints below `folder`."""

    def __init__(self, store: Store, folder: Path, limits: TenantLimits) -> None:
        self._store, self._folder, self._limits = store, folder, limits

    def check_name(self, tenant: str, fields: Row) -> None:
        """Raises Refusal for a name that cannot be a folder, and for a tenant whose checkpoints are too large."""
        name = fields.get("path")
        if name is not None and not _NAME.fullmatch(str(name)):
            raise Refusal(
                400,
                f"a checkpoint's name must have letters, digits and . _ = -, got {str(name)[:60]!r}; rename it",
            )
        used = sum(row["bytes"] for row in self._store.find("checkpoints", tenant))
        if used > self._limits.checkpoint_bytes:
            raise Refusal(
                403,
                f"checkpoints must have at most {self._limits.checkpoint_bytes} bytes, got {used}; delete some of them",
            )

    def require_new(self, model: Row, body: bytes) -> None:
        """Raises ValueError if the name of a training checkpoint exists and the client set `overwrite` to false."""
        fields = json.loads(body)
        path = f"{_SCHEME}{model['id']}/weights/{fields.get('path')}"
        if fields.get("overwrite") is False and self._store.get("checkpoints", model["tenant"], path):
            raise ValueError(f"the checkpoint {path} must be new, got an existing name; set overwrite")

    def save(
        self, trainer: TenantTrainer, model: Row, row: Row, fields: Row
    ) -> tuple[dict[str, Value], list[Change]]:
        """Writes the files. Returns the client's result, and the changes of the store that belong to it."""
        kind, adapter, seq = row["kind"], model["adapter"], row["seq"]
        lasting = fields.get("path") is not None or kind == "save_weights"
        name = str(fields.get("path") or (f"{seq:06d}" if lasting else f"unnamed-{seq}"))
        path = f"{_SCHEME}{model['id']}/{SAVES[kind]}/{name}"
        folder = self._folder / adapter / f"{SAVES[kind]}-{seq}"
        partial = folder.with_name(f"{folder.name}.partial")
        for old in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        if kind == "save_weights":
            trainer.save_state(adapter, partial, optimizer=True)
        else:
            trainer.export_peft(adapter, partial)
        partial.rename(folder)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        seconds = fields.get("ttl_seconds")
        values: dict[str, Value] = {
            **{
                "path": path,
                "tenant": model["tenant"],
                "model": model["id"],
                "kind": SAVES[kind],
                "name": name,
            },
            **{"folder": str(folder), "spec": model["spec"], "created": time.time(), "bytes": size},
            "expires": None if seconds is None else time.time() + float(str(seconds)),
            **{"metadata": json.dumps(fields.get("user_metadata")), "lasting": int(lasting)},
        }
        marks = ", ".join("?" * len(values))
        changes: list[Change] = [
            (
                f"INSERT OR REPLACE INTO checkpoints ({', '.join(values)}) VALUES ({marks})",
                tuple(values.values()),
            )
        ]
        result: dict[str, Value] = {"path": path, "type": kind}
        if (sampler := fields.get("sampler")) is not None:  # its id was chosen when the request was accepted
            mode, session = str(fields.get("kind", "snapshot")), str(fields["session"])
            if mode == "inflight":
                changes.append(
                    ("UPDATE samplers SET path = ? WHERE model = ? AND kind = ?", (path, model["id"], mode))
                )
            changes.append(
                (
                    "INSERT OR REPLACE INTO samplers (id, tenant, session, path, model, kind) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (sampler, model["tenant"], session, path, model["id"], mode),
                )
            )
            result = {"sampling_session_id": sampler, "type": kind}
        return result, changes

    def find(self, tenant: str, path: str, *kinds: str) -> Row:
        """Returns the tenant's checkpoint. A Refusal is the same for a path of another tenant and for no path."""
        row = self._store.get("checkpoints", tenant, path)
        if row is None or not Path(row["folder"]).is_dir():
            raise Refusal(
                404, f"the checkpoint must be one of yours, got {path[:200]!r}; list your checkpoints"
            )
        if kinds and row["kind"] not in kinds:
            raise Refusal(
                400, f"the checkpoint must be of {' or '.join(kinds)}, got {path[:200]!r}; choose another"
            )
        return row

    def delete(self, row: Row) -> None:
        self._store.remove("checkpoints", path=row["path"])
        shutil.rmtree(row["folder"], ignore_errors=True)

    def expire(self, busy: set[str]) -> None:
        """Deletes checkpoints after their time, and each model's oldest unnamed ones, except the folders `busy`."""
        old = self._store.query("SELECT * FROM checkpoints WHERE expires < ?", time.time())
        old += self._store.query(
            "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY model ORDER BY created DESC) AS age "
            "FROM checkpoints WHERE lasting = 0) WHERE age > ?",
            SNAPSHOTS_PER_MODEL,
        )
        for row in old:
            if row["folder"] not in busy:
                self.delete(row)

    def remove_left_over(self) -> None:
        """Deletes folders that no row has. Called before any request runs."""
        known = {row["folder"] for row in self._store.query("SELECT folder FROM checkpoints")}
        for folder in self._folder.glob("*/*"):
            if str(folder) not in known:
                shutil.rmtree(folder, ignore_errors=True)
