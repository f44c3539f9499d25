"""What `vime service` refuses before it starts, and the limits of a key."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.protocols.tenants import TenantTrainer
from vime.service.app import write_error
from vime.service.audit import AuditLog
from vime.service.command import main
from vime.service.engine import TenantEngine
from vime.service.keys import TenantKeys
from vime.service.limits import Refusal, TenantLimits, TokenBudget
from vime.service.service import ServiceSettings, TenantService
from vime.service.store import ACTIVE, FAILED, WAITING, Row
from vime.testing.tiny_model import write_tiny_model


def make_no_trainer() -> TenantTrainer:
    raise AssertionError("a service that was not started must not make its trainer")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TenantService]:
    """A service that accepts requests and runs none: its trainer and its engine are not started."""
    base = write_tiny_model(tmp_path / "tiny")
    settings = ServiceSettings(base, "tiny", tmp_path / "data", 259)
    limits = TenantLimits(models_per_tenant=1, queue_length=2)
    yield (made := TenantService(settings, limits, make_no_trainer, TenantEngine(base, 1, 8, 64, tmp_path)))
    made.store.close()
    made.audit.close()


def add_model(service: TenantService, tenant: str) -> Row:
    session: Row = {
        "id": f"session-{tenant}",
        "tenant": tenant,
        "created": 0.0,
        "seen": 4e9,
        "status": ACTIVE,
    }
    service.store.add("sessions", {**session, "metadata": "{}", "name": None})
    model: Row = {"id": f"model-{tenant}", "tenant": tenant, "session": session["id"], "spec": "{}"}
    state = {"adapter": f"m{tenant}", "metadata": "{}", "created": 0.0, "seen": 0.0, "status": ACTIVE}
    service.store.add("models", {**model, **state})
    return service.model(tenant, f"model-{tenant}")


def test_requests_that_wait(service: TenantService) -> None:
    """A third request of a key is refused until one ends. A repeated one and another key's are accepted."""
    alice, bob = add_model(service, "alice"), add_model(service, "bob")
    for seq in (0, 1):
        service.accept_training(alice, seq, "forward", b"{}")
    with pytest.raises(Refusal, match="requests that wait must be at most 2; retry in 1 s") as refused:
        service.accept_training(alice, 2, "forward", b"{}")
    answer = write_error(refused.value.status, str(refused.value), refused.value.retry_s)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1.0")
    assert service.accept_training(alice, 1, "forward", b"{}") == "model-alice:1"
    assert service.accept_training(bob, 0, "forward", b"{}") == "model-bob:0"


def test_models_per_tenant(service: TenantService) -> None:
    add_model(service, "alice")
    with pytest.raises(Refusal, match="models must be at most 1 per key") as refused:
        asyncio.run(service.make_way("alice"))
    assert refused.value.status == 403
    asyncio.run(service.make_way("bob"))


def test_a_gap_of_a_dead_client(service: TenantService) -> None:
    """Requests behind one that never arrived fail with its number, and the model continues after them. Requests that
    came after the given time stay, and those of a model without a gap."""
    alice, bob = add_model(service, "alice"), add_model(service, "bob")
    gap = service.accept_training(alice, 1, "forward", b"{}")
    whole = service.accept_training(bob, 0, "forward", b"{}")
    service._give_up_gap(alice, time.time() - 60)
    assert find_status(service, "alice", gap) == WAITING
    for model in (alice, bob):
        service._give_up_gap(model, time.time())
    failed = service.store.get("requests", "alice", gap)
    assert failed is not None and failed["status"] == FAILED
    assert b"request 0 of this model never arrived; repeat the requests from 0 on" in failed["result"]
    assert service.model("alice", alice["id"])["next_seq"] == 2
    assert find_status(service, "bob", whole) == WAITING


def find_status(service: TenantService, tenant: str, request: str) -> str:
    row = service.store.get("requests", tenant, request)
    assert row is not None
    return str(row["status"])


def test_a_context_beyond_the_base_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "max_position_embeddings": 1024}))
    with pytest.raises(ValueError, match="--tokens-per-sequence must be at most 1024.* got 4096; give"):
        main(["--base", str(tmp_path)])


def test_keys_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = TenantKeys(path).add_missing(["alice"])["alice"]
    assert TenantKeys(path).find(key) == "alice"
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="keys.json must be readable only by its owner, got mode 644"):
        TenantKeys(path)


def test_a_flood_of_refusals_has_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per tenant and status within the interval. Later lines count the refusals without a line."""
    monkeypatch.setattr("vime.service.audit.REFUSAL_S", 3600.0)
    log = AuditLog(tmp_path / "audit.jsonl")
    for _ in range(1000):
        log.refuse("alice", 429, path="/api/v1/asample")
    log.refuse("alice", 404, path="/api/v1/asample")
    log.refuse(None, 401, path="/api/v1/sessions")
    monkeypatch.setattr("vime.service.audit.REFUSAL_S", 0.0)
    log.refuse("alice", 429, path="/api/v1/forward_backward")
    monkeypatch.setattr("vime.service.audit.REFUSAL_S", 3600.0)
    log.refuse("alice", 429, path="/api/v1/forward_backward")
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    found = [(line["tenant"], line["status"], line.get("left_out")) for line in lines]
    expected = [
        ("alice", 429, None),
        ("alice", 404, None),
        (None, 401, None),
        ("alice", 429, 999),
        ("alice", 429, 1),
    ]
    assert found == expected


def test_tokens_per_minute() -> None:
    """A refused request says for how long the client must wait. Another tenant has its own budget."""
    budget = TokenBudget(600)
    budget.take("alice", 590)
    with pytest.raises(Refusal, match="tokens per minute must be at most 600, got 60 more") as refused:
        budget.take("alice", 60)
    assert refused.value.status == 429
    assert refused.value.retry_s == pytest.approx(5.0, abs=0.5)
    budget.take("bob", 600)
    with pytest.raises(Refusal, match="at most 600 tokens, got 601") as impossible:
        budget.require_possible(601)
    assert (impossible.value.status, impossible.value.retry_s) == (400, None)
