"""Serves SGLang's control routes on an engine server: pause, continue, weights from a folder, and their version.

A trainer that uses SGLang's protocol controls a vLLM engine with these routes. The weights go through the receiver of
live weights (weight_receiver), which reads files below the weight directory only, and refuses tensors that are not the
checkpoint's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from vime.sglang_api.request import CONTROL_ROUTES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PATHS = {path for _, path in CONTROL_ROUTES}


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Continue(msgspec.Struct, forbid_unknown_fields=True):
    torch_empty_cache: bool = True  # no effect: vLLM keeps its allocator's memory


class _Update(msgspec.Struct, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    keep_pause: bool = False
    flush_cache: bool = True
    # These fields have no effect here.
    torch_empty_cache: bool = False
    token_step: int = 0
    # `_update` raises an error for these fields.
    is_async: bool = False
    recapture_cuda_graph: bool = False
    manifest: object = None


Body = TypeVar("Body", bound=msgspec.Struct)
_UNSERVED = ("is_async", "recapture_cuda_graph", "manifest")
_FORMATS = (None, "auto", "safetensors")


@dataclass
class Controlled:
    """An engine as these routes use it. `llm`: vLLM's AsyncLLM. `version` returns the version of its weights.
    `set_version` sets the version in later answers."""

    llm: AsyncLLM
    version: Callable[[], int]
    set_version: Callable[[AsyncLLM, int], Awaitable[None]]
    abort_all: Callable[[], Awaitable[None]] = field(repr=False)


async def answer(engine: Controlled, path: str, body: bytes) -> tuple[int, dict[str, object]]:
    """Returns status and record for a request to one of `CONTROL_ROUTES`. Raises ValueError for a body that cannot be
    served."""
    if path == "/get_weight_version":
        return 200, {"weight_version": str(engine.version())}
    if path == "/pause_generation":
        return await _pause(engine, _read(path, body, _Pause).mode)
    if path == "/continue_generation":
        _read(path, body, _Continue)
        await engine.llm.resume_generation()
        return 200, {"status": "ok", "message": "generation continues"}
    return await _update(engine, _read(path, body, _Update))


def _read(path: str, body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"the body of {path} must have fields of SGLang, got {body[:80]!r}: {error}; send those alone"
        ) from None


async def _pause(engine: Controlled, mode: str) -> tuple[int, dict[str, object]]:
    """Pauses generation. New requests wait in all three modes.

    Running requests end with the tokens that they have (abort), stay with their keys and values (in_place), or stay
    without them (retract) and compute them again when they continue.
    """
    await engine.llm.pause_generation(mode="abort" if mode == "abort" else "keep", clear_cache=False)
    if mode == "retract":
        await engine.llm.reset_prefix_cache(reset_running_requests=True)
    return 200, {"status": "ok", "message": f"generation is paused ({mode})"}


async def _update(engine: Controlled, request: _Update) -> tuple[int, dict[str, object]]:
    """Loads the weights of a folder. An engine that is not paused first finishes its requests, as SGLang's does."""
    for name in _UNSERVED:
        if getattr(request, name):
            raise ValueError(
                f"{name} must be left out, got {getattr(request, name)!r}; this engine does not serve it"
            )
    if request.load_format not in _FORMATS:
        raise ValueError(
            f"load_format must be auto or safetensors, got {request.load_format!r}; leave it out"
        )
    version = None if request.weight_version is None else _number(request.weight_version)
    if request.abort_all_requests:
        await engine.abort_all()
    paused = await engine.llm.is_paused()
    if not paused:
        await engine.llm.pause_generation(mode="wait", clear_cache=False)
    try:
        done, message = await _load(engine, request.model_path, version)
    finally:
        if not paused and not request.keep_pause:
            await engine.llm.resume_generation()
    if done and request.flush_cache and not await engine.llm.reset_prefix_cache():
        done, message = (
            False,
            "the weights are new, but running requests keep old keys and values; pause with retract",
        )
    return 200 if done else 400, {"success": done, "message": message, "num_paused_requests": 0}


async def _load(engine: Controlled, folder: str, version: int | None) -> tuple[bool, str]:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    try:
        await engine.llm.start_weight_update()
        part = {"channel": "disk", "info": {"path": folder}}
        await engine.llm.update_weights(WeightTransferUpdateRequest(update_info=part))
        await engine.llm.finish_weight_update()
    except Exception as error:  # border of the engine's process, whose errors have no other type
        return False, f"the weights of {folder} must be loadable, got: {error}"
    if version is not None:
        await engine.set_version(engine.llm, version)
    return True, f"the weights of {folder} are loaded"


def _number(version: str) -> int:
    try:
        return int(version)
    except ValueError:
        raise ValueError(
            f"weight_version must be a whole number, got {version!r}; send the number of rollouts behind the weights"
        ) from None
