"""The routes that read and delete a tenant's records (models, checkpoints, sessions), and that list the service's
abilities."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from aiohttp import web

from vime.service.checkpoints import TYPES
from vime.service.limits import Refusal
from vime.service.service import TenantService, read_json
from vime.service.store import Row


def _write_time(value: object) -> str | None:
    return None if value is None else datetime.fromtimestamp(float(str(value)), UTC).isoformat()


def _write_checkpoint(row: Row) -> dict[str, object]:
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}",
        "checkpoint_type": TYPES[row["kind"]],
        "time": _write_time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["bytes"],
        "user_metadata": json.loads(row["metadata"]),
        "expires_at": _write_time(row["expires"]),
    }


def _read_page(request: web.Request) -> tuple[int, int]:
    """Returns (offset, limit)."""
    return max(0, int(request.query.get("offset", 0))), min(
        1000, max(0, int(request.query.get("limit", 100)))
    )


def _find_model(service: TenantService, tenant: str, name: str) -> Row:
    """Returns a model of the tenant, also one that has ended."""
    row = service.store.get("models", tenant, name)
    if row is None:
        raise Refusal(404, "the training run must be one of yours, got another id; list your training runs")
    return row


async def get_health(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def get_capabilities(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    model = {
        "model_name": service.settings.name,
        "max_context_length": service.limits.tokens_per_sequence,
        "trainable": True,
        "sampleable": True,
    }
    return web.json_response({"supported_models": [model]})


async def get_info(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    model = service.model(tenant, str(read_json(await request.read())["model_id"]))
    data = {
        "model_name": service.settings.name,
        "tokenizer_id": str(service.settings.base.resolve()),
    }
    return web.json_response(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": model["id"],
            "is_lora": True,
            "lora_rank": json.loads(model["spec"])["rank"],
            "model_name": service.settings.name,
        }
    )


def _write_run(service: TenantService, row: Row) -> dict[str, object]:
    saved = service.store.find("checkpoints", row["tenant"], model=row["id"])
    last = {
        kind: [_write_checkpoint(other) for other in saved if other["kind"] == kind][-1:] for kind in TYPES
    }
    return {
        "training_run_id": row["id"],
        "base_model": service.settings.name,
        "model_owner": row["tenant"],
        "is_lora": True,
        "lora_rank": json.loads(row["spec"])["rank"],
        "last_request_time": _write_time(row["seen"]),
        "last_checkpoint": next(iter(last["weights"]), None),
        "last_sampler_checkpoint": next(iter(last["sampler_weights"]), None),
        "user_metadata": json.loads(row["metadata"]),
    }


async def get_run(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    return web.json_response(_write_run(service, _find_model(service, tenant, request.match_info["model"])))


async def list_runs(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    rows, (offset, limit) = service.store.find("models", tenant)[::-1], _read_page(request)
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    runs = [_write_run(service, row) for row in rows[offset : offset + limit]]
    return web.json_response({"training_runs": runs, "cursor": cursor})


async def list_checkpoints(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    """Lists a model's checkpoints, or the tenant's."""
    if (name := request.match_info.get("model")) is not None:
        rows = service.store.find("checkpoints", tenant, model=_find_model(service, tenant, name)["id"])
        return web.json_response({"checkpoints": [_write_checkpoint(row) for row in rows]})
    rows, (offset, limit) = service.store.find("checkpoints", tenant)[::-1], _read_page(request)
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    found = [_write_checkpoint(row) for row in rows[offset : offset + limit]]
    return web.json_response({"checkpoints": found, "cursor": cursor})


def _find_checkpoint(service: TenantService, tenant: str, request: web.Request) -> Row:
    parts = [request.match_info[part] for part in ("model", "kind", "name")]
    return service.checkpoints.find(tenant, f"tinker://{'/'.join(parts)}")


async def delete_checkpoint(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    row = _find_checkpoint(service, tenant, request)
    if not await service.sampling.slots.drop(row["folder"]):
        raise Refusal(409, "a checkpoint in use cannot be deleted; wait for its samples", 1.0)
    service.checkpoints.delete(row)
    service.audit.write(tenant, "delete_checkpoint", path=row["path"], bytes=row["bytes"])
    return web.Response(status=204)


async def set_lifetime(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    row = _find_checkpoint(service, tenant, request)
    seconds = read_json(await request.read()).get("ttl_seconds")
    expires = None if seconds is None else time.time() + float(str(seconds))
    service.store.change("checkpoints", row["path"], expires=expires)
    return web.Response(status=204)


async def get_weights_info(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    path = str(read_json(await request.read()).get("tinker_path"))
    spec = json.loads(str(service.checkpoints.find(tenant, path)["spec"]))
    parts = {"train_unembed": False, **{name: spec[name] for name in ("train_mlp", "train_attn")}}
    return web.json_response(
        {"base_model": service.settings.name, "is_lora": True, "lora_rank": spec["rank"], **parts}
    )


async def list_sessions(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    rows, (offset, limit) = service.store.find("sessions", tenant)[::-1], _read_page(request)
    return web.json_response({"sessions": [row["id"] for row in rows[offset : offset + limit]]})


async def get_session(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    row = service.store.get("sessions", tenant, request.match_info["session"])
    if row is None:
        raise Refusal(404, "the session must be one of yours, got another id; list your sessions")
    return web.json_response(
        {
            "training_run_ids": [
                model["id"] for model in service.store.find("models", tenant, session=row["id"])
            ],
            "sampler_ids": [
                sampler["id"] for sampler in service.store.find("samplers", tenant, session=row["id"])
            ],
            "user_metadata": json.loads(row["metadata"]),
            "display_name": row["name"],
        }
    )


async def get_sampler(service: TenantService, tenant: str, request: web.Request) -> web.Response:
    row = service.sampler(tenant, request.match_info["sampler"])
    return web.json_response(
        {"sampler_id": row["id"], "base_model": service.settings.name, "model_path": row["path"]}
    )
