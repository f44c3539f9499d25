"""Executes training requests: in each model's order, with turns of tenants, and every request exactly once.

The state of an adapter is in the trainer's memory. A snapshot on disk has the state after some request; the requests
after it stay in the store. So a new process (or a trainer that failed in the middle of a request) loads the snapshot
and computes these requests again, without changing their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from slime.protocols.tenants import TenantSpec, TenantTrainer
from vime.service.checkpoints import SAVES, Change, Checkpoints
from vime.service.store import ACTIVE, DONE, ENDED, FAILED, WAITING, Row, Store
from vime.service.tasks import FairOrder, Finished, write_failure
from vime.service.wire import AdamBody, read_message, read_pass, write_pass

_log = logging.getLogger(__name__)
_CHANGES = ("forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change an adapter's state."""
_ENDS_STEP = ("optim_step", "load_weights")
"""Kinds after which an adapter has no gradients, so that a snapshot is complete."""


class TrainingQueue:
    """Runs one request at a time in its own thread. `make_trainer` is called in that thread."""

    def __init__(
        self,
        store: Store,
        make_trainer: Callable[[], TenantTrainer],
        checkpoints: Checkpoints,
        finished: Finished,
        folder: Path,
        snapshot_s: float,
    ) -> None:
        self._store, self._make_trainer, self._checkpoints = store, make_trainer, checkpoints
        self._finished, self._folder, self._snapshot_s = finished, folder, snapshot_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._turns, self._work = FairOrder(), asyncio.Event()
        self._loaded: dict[str, float] = {}
        """Maps the id of each model in the trainer's memory to the time of its last snapshot."""
        self._task: asyncio.Task[None] | None = None
        self._current: asyncio.Task[None] | None = None
        self.running: str | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._trainer = await loop.run_in_executor(self._thread, self._make_trainer)
        self._task = asyncio.create_task(self._run(), name="training queue")

    async def stop(self) -> None:
        """Ends after the running request, whose result is stored."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._current is not None:
            await asyncio.wait([self._current])
        await asyncio.to_thread(self._thread.shutdown)

    def wake(self) -> None:
        self._work.set()

    async def _run(self) -> None:
        while True:
            self._work.clear()
            row = self._turns.choose(
                self._store.query(
                    "SELECT r.id, r.tenant, r.owner, r.seq, r.kind FROM requests r JOIN models m ON r.owner = m.id "
                    "WHERE r.status = ? AND m.status = ? AND r.seq = m.next_seq ORDER BY r.created",
                    WAITING,
                    ACTIVE,
                )
            )
            if row is None:
                await self._work.wait()
                continue
            self._current = asyncio.create_task(self._execute(row))
            await asyncio.shield(self._current)

    async def _call(self, function: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _execute(self, row: Row) -> None:
        request, model = (
            row["id"],
            self._store.query("SELECT * FROM models WHERE id = ?", row["owner"])[0],
        )
        body = bytes(self._store.query("SELECT body FROM requests WHERE id = ?", request)[0]["body"] or b"")
        self.running = request
        rows: list[Change] = []
        try:
            await self._load(model)
            if row["kind"] in SAVES:
                self._checkpoints.require_new(model, body)
            result, status = await self._call(lambda: self._apply(model, row, body, rows)), DONE
        except ValueError as error:
            status, result = FAILED, write_failure(str(error), "user")
        except Exception as error:  # border to the trainer: the service outlives a failed request
            _log.exception("request %s failed", request)
            await self._forget(model)
            status, result = FAILED, write_failure(f"{type(error).__name__}: {error}", "server")
        finally:
            self.running = None
        assert isinstance(result, bytes)
        following = self._find_next(model["id"], row["seq"] + 1)
        rows += [
            (
                "UPDATE requests SET status = ?, result = ?, finished = ? WHERE id = ?",
                (status, result, self._store.next_order(), request),
            ),
            ("UPDATE models SET next_seq = ?, seen = ? WHERE id = ?", (following, time.time(), model["id"])),
        ]
        self._store.write(rows)
        if row["seq"] == 0 and status == FAILED:
            await self.end(model["id"])
        self._finished.notify(request)
        if status == DONE:
            await self._after(model, row)

    def _find_next(self, model: str, seq: int) -> int:
        """Returns the first number from `seq` on whose request has not ended before its turn."""
        ended = self._store.query(
            "SELECT seq FROM requests WHERE owner = ? AND seq >= ? AND status != ?", model, seq, WAITING
        )
        numbers = {other["seq"] for other in ended}
        while seq in numbers:
            seq += 1
        return seq

    def skip(self, model: Row) -> None:
        """Passes over requests that have ended before their turn."""
        if self.running is None or not self.running.startswith(f"{model['id']}:"):
            self._store.change(
                "models", model["id"], next_seq=self._find_next(model["id"], model["next_seq"])
            )
        self.wake()

    async def _after(self, model: Row, row: Row) -> None:
        """Writes a snapshot if it is time for one, and drops the bodies that it covers."""
        name = model["id"]
        if row["kind"] == "unload_model":
            await self.end(name)
        last = self._loaded.get(name)
        forced = row["kind"] == "load_weights"  # the checkpoint may be deleted
        if last is None or row["kind"] not in _ENDS_STEP:
            return
        if not forced and time.monotonic() - last < self._snapshot_s:
            return
        folder = self._folder / model["adapter"] / f"state-{row['seq']}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        await self._call(lambda: self._trainer.save_state(model["adapter"], folder, optimizer=True))
        self._store.write(
            [
                (
                    "UPDATE models SET snapshot_seq = ?, snapshot = ? WHERE id = ?",
                    (row["seq"], str(folder), name),
                ),
                ("UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ?", (name, row["seq"])),
            ]
        )
        self._loaded[name] = time.monotonic()
        for older in folder.parent.iterdir():
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)

    def _apply(self, model: Row, row: Row, body: bytes, rows: list[Change]) -> bytes:
        """Runs a request in the trainer's thread and returns the result. Adds to `rows` the changes that the store must
        save together with the result."""
        kind, adapter = row["kind"], model["adapter"]
        if kind in ("forward", "forward_backward"):
            work = read_pass(read_message(body))
            run = self._trainer.forward if work.forward_only else self._trainer.forward_backward
            return write_pass(run(adapter, work.data, work.loss))
        fields = json.loads(body)
        if kind == "optim_step":
            params = msgspec.convert(fields["adam_params"], AdamBody).checked()
            return json.dumps({"metrics": self._trainer.optim_step(adapter, params)}).encode()
        if kind == "load_weights":
            self._trainer.load_state(adapter, Path(fields["folder"]), optimizer=fields["optimizer"])
            return json.dumps({"path": fields["path"], "model_id": model["id"], "type": kind}).encode()
        if kind in ("create_model", "unload_model"):
            return json.dumps({"model_id": model["id"], "type": kind}).encode()
        result, written = self._checkpoints.save(self._trainer, model, row, fields)
        rows += written
        return json.dumps(result).encode()

    async def _load(self, model: Row) -> None:
        """Brings the model's state into the trainer's memory, if it is not there."""
        name, adapter = model["id"], model["adapter"]
        if name in self._loaded:
            return
        spec = TenantSpec(**json.loads(model["spec"]))
        await self._call(lambda: self._trainer.add(adapter, spec))
        self._loaded[name] = time.monotonic()
        again = self._store.query(
            f"SELECT id, seq, kind, body FROM requests WHERE owner = ? AND seq > ? AND status = ? AND kind IN "
            f"({', '.join('?' * len(_CHANGES))}) ORDER BY seq",
            *(name, model["snapshot_seq"], DONE, *_CHANGES),
        )
        try:
            if model["snapshot"] is not None:
                folder = Path(model["snapshot"])
                await self._call(lambda: self._trainer.load_state(adapter, folder, optimizer=True))
            for row in again:
                await self._call(partial(self._apply, model, row, row["body"] or b"", []))
        except ValueError as error:
            raise RuntimeError(
                f"the state of model {name} must be computed again, got {error}; load a saved state"
            ) from error
        if again:
            _log.info("computed %d requests of model %s again after its last snapshot", len(again), name)

    async def _forget(self, model: Row) -> None:
        """Drops a state that may be half changed. The next request loads it from the snapshot."""
        if self._loaded.pop(model["id"], None) is not None:
            with contextlib.suppress(Exception):  # border to the trainer, which may have failed while adding
                await self._call(lambda: self._trainer.remove(model["adapter"]))

    async def release(self, name: str) -> None:
        """Frees the memory of a model whose client is away. Its next request loads it again."""
        for model in self._store.query("SELECT * FROM models WHERE id = ?", name):
            await self._forget(model)

    async def end(self, name: str) -> None:
        """Ends a model: its waiting requests fail, its memory and its snapshots are freed."""
        for model in self._store.query("SELECT * FROM models WHERE id = ?", name):
            self._store.change("models", name, status=ENDED)
            self.give_up(name, "the model has ended; create a training client from a saved state")
            await self._forget(model)
            shutil.rmtree(self._folder / model["adapter"], ignore_errors=True)

    def give_up(self, name: str, message: str) -> None:
        """Fails the model's requests that wait."""
        for row in self._store.query("SELECT id FROM requests WHERE owner = ? AND status = ?", name, WAITING):
            if row["id"] != self.running:
                self._store.finish(row["id"], FAILED, write_failure(message, "user"))
                self._finished.notify(row["id"])
