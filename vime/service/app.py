"""The HTTP server: keys, limits of connections, bodies and time, errors as one line, and the list of routes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from vime.service import records, requests
from vime.service.limits import Refusal
from vime.service.service import TenantService

Handler = requests.Handler
Next = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)
_OPEN = {"/api/v1/healthz"}
"""Paths that need no key."""
_ROUTES = {
    "POST": {
        "client/config": requests.get_client_config,
        "client/dynamic_config": requests.get_dynamic_config,
        "create_session": requests.create_session,
        "session_heartbeat": requests.keep_session,
        "sessions/{session}/finish": requests.finish_session,
        "create_model": requests.create_model,
        "get_info": records.get_info,
        "forward_backward": requests.run_pass,
        "optim_step": requests.run_step,
        "save_weights": requests.save_weights,
        "save_weights_for_sampler": requests.save_weights,
        "save_weights_external": requests.save_weights,
        "load_weights": requests.load_weights,
        "unload_model": requests.unload_model,
        "create_sampling_session": requests.create_sampling_session,
        "join_sampling_session": requests.join_sampling_session,
        "asample": requests.sample,
        "retrieve_future": requests.retrieve_future,
        "retrieve_futures": requests.retrieve_futures,
        "cancel_future": requests.cancel_future,
        "telemetry": requests.accept_telemetry,
        "weights_info": records.get_weights_info,
    },
    "GET": {
        "healthz": records.get_health,
        "get_server_capabilities": records.get_capabilities,
        "training_runs": records.list_runs,
        "training_runs/{model}": records.get_run,
        "training_runs/{model}/checkpoints": records.list_checkpoints,
        "checkpoints": records.list_checkpoints,
        "sessions": records.list_sessions,
        "sessions/{session}": records.get_session,
        "samplers/{sampler}": records.get_sampler,
    },
    "DELETE": {"training_runs/{model}/checkpoints/{kind}/{name}": records.delete_checkpoint},
    "PUT": {"training_runs/{model}/checkpoints/{kind}/{name}/ttl": records.set_lifetime},
}


def make_app(service: TenantService) -> web.Application:
    """Returns the application. Its routes call functions with (service, tenant, request)."""
    app = web.Application(client_max_size=service.limits.body_bytes, middlewares=[_Guard(service).check])
    app[requests.SERVICE] = service
    for method, routes in _ROUTES.items():
        for path, handler in routes.items():
            app.router.add_route(method, f"/api/v1/{path}", _bind(service, handler))
    return app


def _bind(service: TenantService, handler: Handler) -> Next:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(service, request.get("tenant", ""), request)

    return handle


def write_error(status: int, message: str, retry_s: float | None = None) -> web.Response:
    """Returns an error as the client shows it: one line. A client retries only with `retry_s`, or after a 5xx."""
    headers = {"Retry-After": f"{max(0.1, retry_s):.1f}"} if retry_s is not None else {}
    if status == 429 and retry_s is None:
        headers["x-should-retry"] = "false"
    return web.json_response({"error": message}, status=status, headers=headers)


class _Guard:
    """Finds the tenant of each request, and bounds how many of a tenant's requests are open."""

    def __init__(self, service: TenantService) -> None:
        self._service, self._open = service, Counter[str]()

    @web.middleware
    async def check(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """Answers requests without a valid key before their body is read."""
        service = self._service
        if request.path in _OPEN:
            return await handler(request)
        tenant = service.keys.find(request.headers.get("X-API-Key", ""))
        if tenant is None:
            service.audit.refuse(None, 401, path=request.path[:100], address=request.remote)
            return write_error(401, "the key must be one of this service, got another; set TINKER_API_KEY")
        if self._open[tenant] >= service.limits.open_requests:
            service.audit.refuse(tenant, 429, path=request.path[:200])
            return write_error(429, "too many requests are open with this key; wait for their results", 1.0)
        self._open[tenant] += 1
        request["tenant"] = tenant
        try:
            async with asyncio.timeout(service.limits.body_seconds):
                await request.read()
            return await handler(request)
        except Refusal as refusal:
            service.audit.refuse(tenant, refusal.status, path=request.path[:200])
            return write_error(refusal.status, str(refusal), refusal.retry_s)
        except TimeoutError:
            return write_error(
                408, f"a body must arrive within {service.limits.body_seconds:.0f} s; send it again"
            )
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            return write_error(400, f"the request cannot be read: {error}")
        except web.HTTPException as error:
            return write_error(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
        except Exception as error:  # border to the client: the service outlives a request's fault
            _log.exception("%s %s failed", request.method, request.path)
            return write_error(500, f"{type(error).__name__}: {error}")
        finally:
            self._open[tenant] -= 1
