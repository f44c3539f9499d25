"""The routes with which a client works: sessions, training, sampling, and the results of accepted requests."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from slime.protocols.tenants import TENANT_LOSSES, TenantSpec
from vime.service.limits import Refusal
from vime.service.service import TenantService, read_json
from vime.service.store import ACTIVE, DONE, FAILED, WAITING, Row
from vime.service.wire import AdamBody, ModelBody, SampleBody, check_ids, read_message, read_pass

Handler = Callable[[TenantService, str, web.Request], Awaitable[web.StreamResponse]]
SERVICE: web.AppKey[TenantService] = web.AppKey("service", TenantService)
LONG_POLL_S = 25.0
"""The client gives up a poll after 45 s."""
_CLIENT_BLOCK = 1_000_000_000
"""Numbers of sample requests per client of a sampling session."""
_BINARY = ("forward", "forward_backward", "sample")
"""Kinds of requests whose results are protobuf."""
NO_HEAD = "train_unembed=True has no effect, because the head gets no adapter here; pass train_unembed=False"
_log = logging.getLogger(__name__)


async def get_client_config(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Returns the switches of the client that this service needs."""
    return web.json_response(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, service.limits.body_bytes // 2),
            "sample_max_concurrent_requests": max(1, service.limits.queue_length // 2),
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
        }
    )


async def get_dynamic_config(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    return web.json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


async def accept_telemetry(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts the client's events and stores none."""
    return web.json_response({"status": "accepted"})


async def create_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    fields, name, now = read_json(await request.read()), secrets.token_hex(16), time.time()
    service.store.add(
        "sessions",
        {
            **{"id": name, "tenant": tenant, "created": now, "seen": now, "status": ACTIVE},
            "metadata": json.dumps(fields.get("user_metadata") or {}),
            "name": str(fields["display_name"]) if fields.get("display_name") else None,
        },
    )
    service.audit.write(tenant, "create_session", session=name, client=str(fields.get("sdk_version"))[:40])
    return web.json_response({"type": "create_session", "session_id": name})


async def keep_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    service.session(tenant, str(read_json(await request.read()).get("session_id")))
    return web.json_response({"type": "session_heartbeat"})


async def finish_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    name = request.match_info["session"]
    if service.store.get("sessions", tenant, name) is None:
        raise Refusal(404, "the session must be one of yours, got another id; create a session")
    await service.end_session(tenant, name)
    service.audit.write(tenant, "finish_session", session=name)
    return web.Response(status=204)


def _answer_future(request: str, model: str | None = None, samples: list[str] | None = None) -> web.Response:
    return web.json_response({"request_id": request, "model_id": model, "sample_sequence_ids": samples})


async def _add_model(
    service: TenantService, tenant: str, session: str, number: int, spec: str, metadata: object
) -> Row:
    """Returns the session's model with this number, which is made if it does not exist."""
    name = f"{session}:train:{number}"
    service.session(tenant, session)
    if service.store.get("models", tenant, name) is None:
        await service.make_way(tenant)
        now = time.time()
        service.store.add(
            "models",
            {
                **{"id": name, "tenant": tenant, "session": session, "spec": spec},
                **{"adapter": f"m{secrets.token_hex(6)}", "metadata": json.dumps(metadata or {})},
                **{"created": now, "seen": now, "status": ACTIVE},
            },
        )
    return service.model(tenant, name)


async def create_model(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    body = await request.read()
    fields = msgspec.json.decode(body, type=ModelBody)
    service.require_base(fields.base_model)
    lora = fields.lora_config
    if not 1 <= lora.rank <= service.limits.rank:
        raise Refusal(400, f"rank must be 1 to {service.limits.rank}, got {lora.rank}; choose a smaller rank")
    _require_adam(fields.optimizer_config)
    spec = TenantSpec(lora.rank, seed=lora.seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp)
    spec_text = msgspec.json.encode(spec).decode()
    model = await _add_model(
        service, tenant, fields.session_id, fields.model_seq_id, spec_text, fields.user_metadata
    )
    answer = _answer_future(service.accept_training(model, 0, "create_model", body), model["id"])
    if lora.train_unembed:  # the client's default; the client logs a note of this header
        answer.headers["x-deprecation-note"] = NO_HEAD
        service.audit.write(tenant, "no_head_adapter", request=f"{model['id']}:0")
        _log.warning("model %s of %s: %s", model["id"], tenant, NO_HEAD)
    return answer


def _require_adam(optimizer: Row) -> None:
    """Raises Refusal for another optimizer than the service's."""
    if (kind := optimizer.get("type", "adamw")) != "adamw":
        raise Refusal(400, f"the optimizer must be adamw, got {str(kind)[:40]}; leave the optimizer out")


def _accept(
    service: TenantService, model: Row, seq: int, kind: str, body: bytes, check: Callable[[], int]
) -> web.Response:
    """Accepts a request of a model. `check` returns its tokens, or raises the error that becomes its result."""
    try:
        tokens = check()
        service.budget.require_possible(tokens)
    except (ValueError, msgspec.MsgspecError, Refusal) as error:
        return _answer_future(service.fail_training(model, seq, kind, body, str(error)), model["id"])
    return _answer_future(service.accept_training(model, seq, kind, body, tokens), model["id"])


async def run_pass(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts a forward or a forward_backward."""
    body = await request.read()
    message = read_message(body)
    model = service.model(tenant, message.model_id)
    vocabulary, most = service.settings.vocabulary, service.limits.tokens_per_sequence

    def check() -> int:
        work = read_pass(message)
        for number, datum in enumerate(work.data):
            check_ids(datum.tokens, vocabulary, f"tokens of datum {number}")
            check_ids(datum.inputs.get("target_tokens", ()), vocabulary, f"target_tokens of datum {number}")
            if len(datum.tokens) > most:
                raise ValueError(
                    f"a datum must have at most {most} tokens, got {len(datum.tokens)}; shorten it"
                )
        return work.count_tokens()

    kind = "forward" if message.forward_only else "forward_backward"
    return _accept(service, model, message.seq_id, kind, body, check)


async def run_step(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    body = await request.read()
    fields = read_json(body)
    model = service.model(tenant, str(fields["model_id"]))

    def check() -> int:
        if "adam_params" not in fields:
            raise ValueError("the optimizer must be adamw, got another; send AdamParams")
        msgspec.convert(fields["adam_params"], AdamBody).checked()
        return 0

    return _accept(service, model, int(str(fields["seq_id"])), "optim_step", body, check)


async def save_weights(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts a save of any kind. The id of an unnamed sampler is chosen now, so that a repeated request has it too."""
    fields = read_json(await request.read())
    model = service.model(tenant, str(fields["model_id"]))
    if fields.get("sampling_session_seq_id") is not None:
        session = model["session"]
        fields |= {"session": session, "sampler": f"{session}:sample:{fields['sampling_session_seq_id']}"}

    def check() -> int:
        service.checkpoints.check_name(tenant, fields)
        if fields.get("age_encryption_recipients"):
            raise ValueError(
                "age_encryption_recipients must be empty, got some; this service encrypts no files"
            )
        return 0

    body, kind = json.dumps(fields, sort_keys=True).encode(), request.path.rsplit("/", 1)[1]
    return _accept(service, model, int(str(fields["seq_id"])), kind, body, check)


async def load_weights(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts a load into a model, or a new model with a checkpoint's state."""
    fields = read_json(await request.read())
    if isinstance(optimizer := fields.get("optimizer_config"), dict):
        _require_adam(optimizer)
    content = {"path": fields.get("path"), "optimizer": bool(fields.get("optimizer"))}
    if fields.get("session_id") is not None:
        spec = _find_state(service, tenant, fields)["spec"]
        session, number, seq = str(fields["session_id"]), int(str(fields["model_seq_id"])), 0
        model = await _add_model(service, tenant, session, number, spec, fields.get("user_metadata"))
    else:
        model, seq = service.model(tenant, str(fields["model_id"])), int(str(fields["seq_id"]))

    def check() -> int:
        checkpoint = _find_state(service, tenant, fields)
        if _shape(model) != _shape(checkpoint):
            raise ValueError(
                "a loaded adapter must have the model's rank and layers, got others; make a new client"
            )
        return 0

    with contextlib.suppress(
        Refusal
    ):  # the folder is part of the body; `check` reports a checkpoint that is gone
        content["folder"] = _find_state(service, tenant, fields)["folder"]
    return _accept(service, model, seq, "load_weights", json.dumps(content, sort_keys=True).encode(), check)


def _find_state(service: TenantService, tenant: str, fields: Row) -> Row:
    if fields.get("weights_access_token"):
        raise Refusal(
            400, "weights_access_token must be absent, got one; a key reads only its own checkpoints"
        )
    service.require_base(str(fields["base_model"]) if fields.get("base_model") else None)
    return service.checkpoints.find(tenant, str(fields.get("path")), "weights")


def _shape(row: Row) -> dict[str, object]:
    return {name: value for name, value in json.loads(row["spec"]).items() if name != "seed"}


async def unload_model(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts the end of a model after its requests so far."""
    model = service.model(tenant, str(read_json(await request.read())["model_id"]))
    newest = service.store.query("SELECT max(seq) AS seq FROM requests WHERE owner = ?", model["id"])[0][
        "seq"
    ]
    return _answer_future(service.accept_training(model, newest + 1, "unload_model", b"{}"), model["id"])


async def create_sampling_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    fields = read_json(await request.read())
    session = service.session(tenant, str(fields["session_id"]))
    name = f"{session['id']}:sample:{int(str(fields['sampling_session_seq_id']))}"
    path = None
    if fields.get("model_path") is not None:
        path = str(service.checkpoints.find(tenant, str(fields["model_path"]), "sampler_weights")["path"])
    elif fields.get("base_model") is None:
        raise Refusal(400, "a sampling session must have model_path or base_model, got neither; give one")
    service.require_base(str(fields["base_model"]) if fields.get("base_model") else None)
    if service.store.get("samplers", tenant, name) is None:
        service.store.add(
            "samplers",
            {"id": name, "tenant": tenant, "session": session["id"], "path": path, "kind": "snapshot"},
        )
        service.audit.write(tenant, "create_sampling_session", sampler=name)
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})


async def join_sampling_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    sampler = service.sampler(tenant, str(read_json(await request.read())["sampling_session_id"]))
    service.store.change("samplers", sampler["id"], clients=sampler["clients"] + 1)
    return web.json_response({"type": "join_sampling_session", "client_counter": sampler["clients"]})


async def sample(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Accepts a sample request, which also computes log-probs of prompts."""
    body, limits = await request.read(), service.limits
    fields = msgspec.json.decode(body, type=SampleBody)
    if fields.sampling_session_id is None or fields.seq_id is None:
        raise Refusal(400, "sampling_session_id and seq_id must be given, got none; create a sampling client")
    if fields.target_prompt_logprobs is not None or fields.prompt_alt_tokens_k:
        raise Refusal(
            400, "target_prompt_logprobs and prompt_alt_tokens_k must be absent, got one; leave them out"
        )
    if fields.record_stability_info:
        raise Refusal(
            400,
            "record_stability_info must be false, got true, because only the loss stable_reinforce reads it; choose "
            f"one of {', '.join(TENANT_LOSSES)}",
        )
    sampler = service.sampler(tenant, fields.sampling_session_id)
    service.session(tenant, sampler["session"])
    length = len(fields.prompt_tokens())
    answer = fields.sampling_params.max_tokens or 1
    if not length or length + answer > limits.tokens_per_sequence:
        raise Refusal(
            400,
            f"prompt and max_tokens must be 1 to {limits.tokens_per_sequence} tokens, got {length} and {answer}; "
            "shorten them",
        )
    if not 1 <= fields.num_samples <= limits.samples_per_request:
        raise Refusal(
            400,
            f"num_samples must be 1 to {limits.samples_per_request}, got {fields.num_samples}; split the request",
        )
    check_ids(fields.prompt_tokens(), service.settings.vocabulary, "the prompt")
    service.budget.require_possible(length)
    identity = service.accept(tenant, sampler["id"], fields.seq_id, "sample", body, length)
    service.sampling.wake()
    return _answer_future(identity, samples=[f"{identity}:{number}" for number in range(fields.num_samples)])


def _write_result(row: Row) -> web.Response:
    content = row["result"]
    assert isinstance(content, bytes)
    binary = row["kind"] in _BINARY and row["status"] == DONE
    return web.Response(body=content, content_type="application/x-protobuf" if binary else "application/json")


async def retrieve_future(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Returns the result of an accepted request, or 408 while it waits or runs."""
    name = str(read_json(await request.read())["request_id"])
    end = time.monotonic() + LONG_POLL_S
    while True:
        row = service.store.get("requests", tenant, name)
        if row is None:
            raise Refusal(
                404, "the request must be one of yours, got another id; its result may have been deleted"
            )
        if row["status"] != WAITING:
            return _write_result(row)
        if (left := end - time.monotonic()) <= 0:
            state = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(state, status=408)
        await service.finished.wait(name, left)


async def retrieve_futures(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Returns which requests of a sampling session's client have ended since `prev_cursor`."""
    fields = read_json(await request.read())
    target = fields["target"]
    assert isinstance(target, dict)
    owner = str(service.sampler(tenant, str(target["sampling_session_id"]))["id"])
    client, cursor = int(target.get("cloned_sampler_id") or 0), int(str(fields.get("prev_cursor") or 0))
    retrieved = fields.get("retrieved_request_ids") or []
    assert isinstance(retrieved, list)
    for name in retrieved:
        known = service.store.get("requests", tenant, str(name))
        if known is not None and known["owner"] == owner and known["status"] != WAITING:
            service.store.change("requests", str(name), body=None, result=b"")
    wait_s = LONG_POLL_S if fields.get("timeout") is None else min(LONG_POLL_S, float(str(fields["timeout"])))
    end = time.monotonic() + wait_s
    while True:
        rows = service.store.query(
            "SELECT id, status, finished, length(result) AS size FROM requests WHERE tenant = ? AND owner = ? AND "
            "finished > ? AND seq / ? = ? ORDER BY finished LIMIT 1000",
            *(tenant, owner, cursor, _CLIENT_BLOCK, client),
        )
        if rows or (left := end - time.monotonic()) <= 0:
            break
        await service.finished.wait(owner, left)
    completions = [
        {"state": "failed", "request_id": row["id"]}
        if row["status"] == FAILED
        else {"state": "finished", "request_id": row["id"]}
        for row in rows
    ]
    return web.json_response({"completions": completions, "cursor": rows[-1]["finished"] if rows else cursor})


async def cancel_future(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Ends a sample request. Training requests cannot be cancelled, since later ones build on them."""
    name = str(read_json(await request.read())["request_id"])
    row = service.store.get("requests", tenant, name)
    if row is None:
        raise Refusal(
            404, "the request must be one of yours, got another id; its result may have been deleted"
        )
    if row["kind"] == "sample":
        service.sampling.cancel(name)
    return web.Response(status=204)
