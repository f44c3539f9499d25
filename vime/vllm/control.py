"""Calls a vLLM server's control routes. Each call is one blocking request.

vLLM serves these routes only with VLLM_SERVER_DEV_MODE=1 in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlencode

from vime.pool.control import ADAPTER_HEADER, ControlError, EngineLoad, PauseMode, answers, request
from vime.vllm.caches.prefill import PATH as PREFILL_PATH
from vime.vllm.versions import finish_body
from vime.vllm.worker.middleware import KEEPS_CACHE, NEW_VERSION_HEADER, VERSIONS_HEADER

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""Names of the gauges that are read from the server's /metrics page. Each gauge has one value per engine process."""
_QUICK_S = 30.0
_SLOW_S = 600.0


class VllmControl:
    """Implements `vime.pool.control.Control` for the server at `url`, e.g. "http://127.0.0.1:8000".

    With the name of an `adapter`, updates and versions belong to this adapter, and an update waits until other
    adapters' updates have ended. The class is thread-safe: each call opens one connection.

    Every method except `is_healthy` raises ControlError when the engine answers with an error, and OSError when the
    engine does not answer in time.
    """

    def __init__(self, url: str, run_key: str, adapter: str = "") -> None:
        self.url = url
        self._headers = {ADAPTER_HEADER: adapter} if adapter else {}
        self._run_key = run_key

    def pause(self, mode: PauseMode = "keep", *, drops_cache: bool = True) -> None:
        """Stops generating. Running requests are frozen until `resume` (mode keep), ended with the tokens that they
        have (abort), or finished first (wait). Without `drops_cache`, the engine keeps all keys and values."""
        query = {"mode": mode} | ({} if drops_cache else KEEPS_CACHE)
        self._post("/pause", query=query, timeout_s=_SLOW_S)

    def resume(self) -> None:
        self._post("/resume")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", timeout_s=_SLOW_S)

    def update_weights(self, update_info: dict[str, object]) -> None:
        self._post("/update_weights", {"update_info": update_info}, timeout_s=_SLOW_S)

    def finish_weight_update(self, version: int) -> None:
        """Ends the update and makes `version` the live version. Later answers carry `version`."""
        headers = {NEW_VERSION_HEADER: str(version)}
        self._post("/finish_weight_update", finish_body(version), headers=headers, timeout_s=_SLOW_S)

    def reset_prefix_cache(self) -> None:
        """Drops all cached keys and values. Running requests compute theirs again when they continue."""
        answer = self._post(
            "/reset_prefix_cache", query={"reset_running_requests": "true"}, timeout_s=_SLOW_S
        )
        if not json.loads(answer)["success"]:
            raise ControlError(f"engine {self.url} must drop its prefix cache, got {answer.decode()}")

    def sleep(self, level: int, mode: PauseMode = "keep") -> None:
        """Frees device memory with vLLM's sleep mode. Keys and values are dropped. Level 1 moves the weights to host
        memory, and level 2 drops the weights."""
        self._post("/sleep", query={"level": str(level), "mode": mode}, timeout_s=_SLOW_S)

    def wake(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None:
        """Allocates device memory again, for the parts in `tags` or for all parts. After level 2 the weights are
        undefined until an update loads them."""
        self._post("/wake_up", query=[("tags", tag) for tag in tags], timeout_s=_SLOW_S)

    def use_prefill_engines(self, urls: Sequence[str]) -> None:
        """Gives the addresses of the engines that compute prompts for this engine."""
        self._post(PREFILL_PATH, list(urls))

    def weight_version(self) -> int:
        """Returns the version of the live weights. -1 means the weights of the checkpoint, without an adapter."""
        response, _ = request(
            self.url, self._run_key, "GET", "/health", headers=self._headers, timeout_s=_QUICK_S
        )
        return int(response.headers[VERSIONS_HEADER].split(",")[-1])

    def is_healthy(self, timeout_s: float) -> bool:
        """Returns True if /health answers 200 within `timeout_s`."""
        return answers(self.url, self._run_key, "/health", timeout_s=timeout_s)

    def model(self) -> str:
        """Returns the folder of the checkpoint that the server was started with."""
        _, answer = request(self.url, self._run_key, "GET", "/v1/models", timeout_s=_QUICK_S)
        return str(json.loads(answer)["data"][0]["root"])

    def load(self) -> EngineLoad | None:
        """Returns the load from the server's gauges: sums over its engine processes, and the mean usage of their KV
        caches.

        Returns None for a server without gauges (--vllm-disable-log-stats).
        """
        _, page = request(self.url, self._run_key, "GET", "/metrics", timeout_s=_QUICK_S)
        found: dict[str, list[float]] = {name: [] for name in GAUGES}
        for line in page.decode().splitlines():
            if (name := line.partition("{")[0]) in found:
                found[name].append(float(line.split()[-1]))
        missing = [name for name, values in found.items() if not values]
        if len(missing) == len(GAUGES):
            return None
        if missing:
            raise ControlError(
                f"engine {self.url} must have the metrics {', '.join(missing)}, got a page without them; use a vLLM "
                "that `vime doctor` accepts"
            )
        running, waiting, caches = found.values()
        return EngineLoad(round(sum(running)), round(sum(waiting)), sum(caches) / len(caches))

    def _post(
        self,
        path: str,
        body: object = None,
        *,
        query: dict[str, str] | Sequence[tuple[str, str]] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = _QUICK_S,
    ) -> bytes:
        path = f"{path}?{urlencode(query)}" if query else path
        own = {**self._headers, **(headers or {})}
        return request(self.url, self._run_key, "POST", path, body, headers=own, timeout_s=timeout_s)[1]
