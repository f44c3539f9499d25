"""The parts of a running service, and the rules that its routes share: tenants' permissions and accepted requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slime.protocols.tenants import TenantSampler, TenantTrainer
from vime.service.audit import AuditLog
from vime.service.checkpoints import Checkpoints
from vime.service.keys import TenantKeys
from vime.service.limits import Refusal, TenantLimits, TokenBudget
from vime.service.sampling import SamplingQueue
from vime.service.store import ACTIVE, ENDED, FAILED, WAITING, Row, Store
from vime.service.tasks import Finished, write_failure
from vime.service.training import TrainingQueue

RETRY_S = 1.0


@dataclass(frozen=True)
class ServiceSettings:
    """A service's settings, from the command line."""

    base: Path
    """The checkpoint of the base."""
    name: str
    """The base's name for clients."""
    data: Path
    vocabulary: int
    """Number of token ids of the base."""
    snapshot_seconds: float = 30.0
    idle_seconds: float = 300.0
    """Seconds without a heartbeat after which a client counts as away."""
    keep_seconds: float = 86400.0
    """Seconds for which results and models of clients that are away are kept."""
    adapters: int = 8
    """Adapters in the sampler at the same time."""
    samples: int = 64
    """Sample requests that run at the same time."""


class TenantService:
    """Holds the parts. `start` builds trainer and sampler, `stop` ends after the running training request."""

    def __init__(
        self,
        settings: ServiceSettings,
        limits: TenantLimits,
        make_trainer: Callable[[], TenantTrainer],
        sampler: TenantSampler,
    ) -> None:
        self.settings, self.limits = settings, limits
        settings.data.mkdir(parents=True, exist_ok=True)
        settings.data.chmod(0o700)
        self.keys = TenantKeys(settings.data / "keys.json")
        self.audit = AuditLog(settings.data / "audit.jsonl")
        self.store = Store(settings.data / "requests.sqlite3")
        self.finished, self.budget = Finished(), TokenBudget(limits.tokens_per_minute)
        self.checkpoints = Checkpoints(self.store, settings.data / "checkpoints", limits)
        self.checkpoints.remove_left_over()
        self.training = TrainingQueue(
            self.store,
            make_trainer,
            self.checkpoints,
            self.finished,
            settings.data / "models",
            settings.snapshot_seconds,
        )
        self.sampling = SamplingQueue(
            self.store, sampler, self.finished, self.budget, settings.adapters, settings.samples
        )
        self._care: asyncio.Task[None] | None = None

    async def start(self) -> None:
        now = time.time()  # while no service ran, no client could send a heartbeat
        self.store.write([("UPDATE sessions SET seen = ? WHERE status = ?", (now, ACTIVE))])
        await self.training.start()
        self.sampling.start()
        self._care = asyncio.create_task(self._take_care(), name="care")

    async def stop(self) -> None:
        if self._care is not None:
            self._care.cancel()
            await asyncio.gather(self._care, return_exceptions=True)
        await self.sampling.stop()
        await self.training.stop()
        self.store.close()
        self.audit.close()

    # What belongs to a tenant

    def session(self, tenant: str, name: str) -> Row:
        """Returns the tenant's open session, and records that its client has just sent a request."""
        row = self.store.get("sessions", tenant, name)
        if row is None:
            raise Refusal(404, "the session must be one of yours, got another id; create a session")
        if row["status"] != ACTIVE:
            raise Refusal(410, "the session has ended; create a session")
        self.store.change("sessions", name, seen=time.time())
        return row

    def model(self, tenant: str, name: str) -> Row:
        """Returns the tenant's model, which has not ended."""
        row = self.store.get("models", tenant, name)
        if row is None:
            raise Refusal(404, "the model must be one of yours, got another id; create a training client")
        if row["status"] != ACTIVE:
            raise Refusal(410, "the model has ended; create a training client from a saved state")
        self.store.change("sessions", row["session"], seen=time.time())
        return row

    def sampler(self, tenant: str, name: str) -> Row:
        row = self.store.get("samplers", tenant, name)
        if row is None:
            raise Refusal(
                404, "the sampling session must be one of yours, got another id; create a sampling client"
            )
        return row

    def require_base(self, name: str | None) -> None:
        if name is not None and name not in (self.settings.name, str(self.settings.base)):
            raise Refusal(
                400,
                f"the base model must be {self.settings.name}, got {name[:100]!r}; this service has one base",
            )

    # What is accepted

    def accept(self, tenant: str, owner: str, seq: int, kind: str, body: bytes, tokens: int = 0) -> str:
        """Writes a request into the store, and returns its id. The same request again returns the same id."""
        request, digest = f"{owner}:{seq}", hashlib.sha256(kind.encode() + body).hexdigest()
        known = self.store.get("requests", tenant, request)
        if known is not None:
            if known["digest"] != digest:
                raise Refusal(
                    400,
                    f"the number of a request must be new, got {seq} for another request; use one client per model",
                )
            return request
        waiting = self.store.query(
            "SELECT count(*) AS n FROM requests WHERE status = ? AND tenant = ?", WAITING, tenant
        )[0]["n"]
        if waiting >= self.limits.queue_length:
            raise Refusal(
                429,
                f"requests that wait must be at most {self.limits.queue_length}; retry in {RETRY_S:.0f} s",
                RETRY_S,
            )
        self.budget.take(tenant, tokens)
        self.store.add(
            "requests",
            {
                **{
                    "id": request,
                    "tenant": tenant,
                    "owner": owner,
                    "seq": seq,
                    "kind": kind,
                    "digest": digest,
                },
                **{"body": body, "tokens": tokens, "status": WAITING, "created": time.time()},
            },
        )
        self.audit.write(tenant, kind, request=request, bytes=len(body), tokens=tokens)
        return request

    def accept_training(self, model: Row, seq: int, kind: str, body: bytes, tokens: int = 0) -> str:
        """Accepts one of the next requests of a model, as `accept` does."""
        ahead = seq - model["next_seq"]
        known = self.store.get("requests", model["tenant"], f"{model['id']}:{seq}")
        if known is None and not 0 <= ahead <= self.limits.queue_length:
            raise Refusal(
                400,
                f"the number of a request must be at least {model['next_seq']}, got {seq}; use one client per model",
            )
        request = self.accept(model["tenant"], model["id"], seq, kind, body, tokens)
        self.training.wake()
        return request

    def fail_training(self, model: Row, seq: int, kind: str, body: bytes, message: str) -> str:
        """Accepts a request of a model as one that has failed. Without it, the model would wait for this number."""
        request = self.accept(model["tenant"], model["id"], seq, kind, body)
        self.store.finish(request, FAILED, write_failure(message, "user"))
        self.finished.notify(request)
        self.training.skip(model)
        return request

    async def make_way(self, tenant: str) -> None:
        """Ends a model whose client is away if the tenant has too many models. Raises Refusal without such a model."""
        models = self.store.find("models", tenant, status=ACTIVE)
        if len(models) < self.limits.models_per_tenant:
            return
        away = {row["id"] for row in self.store.find("sessions", tenant) if self._is_away(row)}
        for model in models:
            if model["session"] in away:
                await self.training.end(model["id"])
                return
        raise Refusal(
            403,
            f"models must be at most {self.limits.models_per_tenant} per key, got one more; close another session",
        )

    async def end_session(self, tenant: str, name: str) -> None:
        """Ends a session with its models. Named checkpoints stay."""
        self.store.change("sessions", name, status=ENDED)
        for model in self.store.find("models", tenant, session=name, status=ACTIVE):
            await self.training.end(model["id"])
        for sampler in self.store.find("samplers", tenant, session=name):
            for row in self.store.find("requests", tenant, owner=sampler["id"], status=WAITING):
                self.sampling.cancel(row["id"])

    # Work without a request

    def _is_away(self, session: Row) -> bool:
        return bool(session["status"] != ACTIVE or time.time() - session["seen"] > self.settings.idle_seconds)

    async def _take_care(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, self.settings.idle_seconds / 2))
            now = time.time()
            for session in self.store.query("SELECT * FROM sessions WHERE status = ?", ACTIVE):
                tenant, name, away = session["tenant"], session["id"], self._is_away(session)
                if now - session["seen"] > self.settings.keep_seconds:
                    await self.end_session(tenant, name)
                    continue
                for model in self.store.find("models", tenant, session=name, status=ACTIVE):
                    self._give_up_gap(model, now if away else now - self.settings.idle_seconds)
                    if away:
                        await self.training.release(model["id"])
            self.checkpoints.expire(self.sampling.slots.busy)
            old = int((now - self.settings.keep_seconds) * 1e6)
            self.store.write(
                [
                    (
                        "DELETE FROM requests WHERE finished < ? AND owner NOT IN "
                        "(SELECT id FROM models WHERE status = ? AND snapshot_seq < requests.seq)",
                        (old, ACTIVE),
                    )
                ]
            )

    def _give_up_gap(self, model: Row, latest: float) -> None:
        """Fails requests that have waited since `latest` for an earlier request, which their client did not send.

        The client has died, or it has given up the earlier request after many refusals.
        """
        missing = model["next_seq"]
        if self.store.find("requests", model["tenant"], owner=model["id"], seq=missing):
            return
        waiting = self.store.find("requests", model["tenant"], owner=model["id"], status=WAITING)
        if waiting and min(row["created"] for row in waiting) <= latest:
            self.training.give_up(
                model["id"],
                f"request {missing} of this model never arrived; repeat the requests from {missing} on",
            )
            self.store.change("models", model["id"], next_seq=max(row["seq"] for row in waiting) + 1)

    def describe(self) -> dict[str, object]:
        """Returns the facts that the service prints when it is ready."""
        return {"base": self.settings.name, "data": str(self.settings.data), "tenants": self.keys.tenants}


def read_json(body: bytes) -> dict[str, object]:
    """Returns the object of a body. Raises Refusal for other bodies."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(body or b"{}"), dict):
            return read
    raise Refusal(400, "the body must be a JSON object, got something else; use the client of the protocol")
