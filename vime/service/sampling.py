"""Executes sample requests on the sampler: many at a time, with turns of tenants, and few adapters in its memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from slime.protocols.tenants import TenantSampler
from vime.service.limits import TokenBudget
from vime.service.store import CANCELLED, DONE, FAILED, WAITING, Row, Store
from vime.service.tasks import FairOrder, Finished, write_failure
from vime.service.wire import SampleBody, write_samples

_log = logging.getLogger(__name__)


class AdapterSlots:
    """Keeps at most `most` adapters in the sampler, and unloads the one that was not used for the longest time."""

    def __init__(self, sampler: TenantSampler, most: int) -> None:
        self._sampler, self._most = sampler, most
        self._users: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()

    @property
    def busy(self) -> set[str]:
        """Returns the folders of adapters that are in the sampler."""
        return set(self._users)

    @asynccontextmanager
    async def use(self, folder: str | None) -> AsyncIterator[str | None]:
        """Yields the adapter's name while it is in the sampler, or None for the base."""
        if folder is None:
            yield None
            return
        await self._take(folder)
        try:
            yield _name_adapter(folder)
        finally:
            async with self._changed:
                self._users[folder] -= 1
                self._changed.notify_all()

    async def _take(self, folder: str) -> None:
        async with self._changed:
            while folder not in self._users:
                if len(self._users) >= self._most:
                    idle = [name for name, users in self._users.items() if users == 0]
                    if not idle:
                        await self._changed.wait()
                        continue
                    await self._sampler.unload(_name_adapter(idle[0]))
                    del self._users[idle[0]]
                await self._sampler.load(_name_adapter(folder), Path(folder))
                self._users[folder] = 0
            self._users[folder] += 1
            self._users.move_to_end(folder)

    async def drop(self, folder: str) -> bool:
        """Unloads an adapter that nobody uses. Returns False if a request uses it."""
        async with self._changed:
            if self._users.get(folder, 0):
                return False
            if folder in self._users:
                await self._sampler.unload(_name_adapter(folder))
                del self._users[folder]
            return True


def _name_adapter(folder: str) -> str:
    """Returns the name of an adapter: the last two parts of its folder, which are unique."""
    return "-".join(Path(folder).parts[-2:])


class SamplingQueue:
    """Runs up to `most` sample requests at a time. The others wait in the store."""

    def __init__(
        self,
        store: Store,
        sampler: TenantSampler,
        finished: Finished,
        budget: TokenBudget,
        adapters: int,
        most: int,
    ) -> None:
        self._store, self._sampler, self._finished, self._budget = store, sampler, finished, budget
        self.slots = AdapterSlots(sampler, adapters)
        self._most, self._turns, self._work = most, FairOrder(), asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="sampling queue")

    async def stop(self) -> None:
        """Ends the running requests without a result; the next process executes them."""
        tasks = [*self._running.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._work.set()

    def cancel(self, request: str) -> None:
        """Ends a request whose client does not want the result."""
        self._store.finish(request, CANCELLED, write_failure("the client has cancelled the request", "user"))
        if request in self._running:
            self._running[request].cancel()
        self._finished.notify(request)

    async def _run(self) -> None:
        while True:
            self._work.clear()
            row = None
            if len(self._running) < self._most:
                waiting = self._store.query(
                    "SELECT r.id, r.tenant, s.path FROM requests r JOIN samplers s ON r.owner = s.id "
                    "WHERE r.status = ? ORDER BY r.created, r.rowid",
                    WAITING,
                )
                row = self._turns.choose(other for other in waiting if other["id"] not in self._running)
            if row is None:
                await self._work.wait()
                continue
            request = row["id"]
            task = self._running[request] = asyncio.create_task(self._sample(row))
            task.add_done_callback(self._ended(request))

    def _ended(self, request: str) -> Callable[[asyncio.Task[None]], None]:
        def end(task: asyncio.Task[None]) -> None:
            self._running.pop(request, None)
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
            self.wake()

        return end

    async def _sample(self, row: Row) -> None:
        request, tenant = row["id"], row["tenant"]
        stored = self._store.query("SELECT body, owner FROM requests WHERE id = ?", request)[0]
        body = msgspec.json.decode(stored["body"] or b"", type=SampleBody)
        try:
            folder = None
            if row["path"] is not None:
                checkpoint = self._store.get("checkpoints", tenant, row["path"])
                if checkpoint is None:
                    raise ValueError(
                        f"the checkpoint must exist, got the deleted {row['path']}; save it again"
                    )
                folder = checkpoint["folder"]
            async with self.slots.use(folder) as adapter:
                result = await self._sampler.sample(
                    adapter,
                    body.prompt_tokens(),
                    body.sampling(),
                    n=body.num_samples,
                    prompt_logprobs=bool(body.prompt_logprobs),
                    top_k_prompt=body.topk_prompt_logprobs,
                    top_k_sample=body.topk_sample_logprobs,
                )
            self._budget.add(tenant, sum(len(sequence.tokens) for sequence in result.sequences))
            self._store.finish(request, DONE, write_samples(result, body))
        except ValueError as error:
            self._store.finish(request, FAILED, write_failure(str(error), "user"))
        except Exception as error:  # border to the sampler: the service outlives a failed request
            _log.exception("request %s failed", request)
            self._store.finish(request, FAILED, write_failure(f"{type(error).__name__}: {error}", "server"))
        self._finished.notify(request, stored["owner"])
