"""The control routes of one SGLang server, as the engine pool calls them. Each call is one blocking request.

SGLang loads weights from a folder, and changes their version in the same call. So `update_weights` only stores the
update's folder, and `finish_weight_update` sends the request that loads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.pool.control import CHECKPOINT_VERSION, ControlError, PauseMode, answers, request

CHANNEL = "disk"
"""The only value of --update-weight-transport that SGLang's engines support."""
UNNAMED = "default"
"""SGLang's version of the checkpoint's weights."""
_MODES = {"keep": "retract", "abort": "abort"}
_QUICK_S, _SLOW_S = 30.0, 600.0


class SglangControl:
    """Implements `vime.pool.control.Control` for the server at `url`. Raises errors as `vime.vllm.control.VllmControl`
    does."""

    def __init__(self, url: str, run_key: str) -> None:
        self.url = url
        self._run_key = run_key
        self._folder: str | None = None
        self._paused = False

    def pause(self, mode: PauseMode = "keep", *, drops_cache: bool = True) -> None:
        """Pauses the generation. Running requests wait without their keys and values (keep: SGLang's retract), or end
        with the tokens that they have (abort)."""
        assert drops_cache, "check_weights requires --flush-cache-interval 1"
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode}; SGLang has no other")
        self._post("/pause_generation", {"mode": _MODES[mode]}, timeout_s=_SLOW_S)
        self._paused = True

    def resume(self) -> None:
        self._post("/continue_generation", {})
        self._paused = False

    def start_weight_update(self) -> None:
        self._folder = None

    def update_weights(self, message: dict[str, Any]) -> None:
        """Stores the update's folder from a `slime.protocols.WeightUpdate.message` of the file channel."""
        if message["channel"] != CHANNEL:
            raise ValueError(
                f"--update-weight-transport must be {CHANNEL} with SGLang's engines, got {message['channel']}; leave "
                "the flag out"
            )
        self._folder = str(Path(message["info"]["path"]).parent)

    def finish_weight_update(self, version: int) -> None:
        """Loads the stored folder as `version`. A paused server stays paused."""
        assert self._folder is not None, "a folder comes first"
        asked = {
            "model_path": self._folder,
            "weight_version": str(version),
            "flush_cache": True,
            "keep_pause": self._paused,
        }
        answer = self._post("/update_weights_from_disk", asked, timeout_s=_SLOW_S)
        if not json.loads(answer)["success"]:
            raise ControlError(f"engine {self.url} must load {self._folder}, got {answer.decode()}")

    def reset_prefix_cache(self) -> None:
        """Drops all cached keys and values. Running requests compute their keys and values again when they continue."""
        self._post("/flush_cache", {}, timeout_s=_SLOW_S)

    def sleep(self, level: int, mode: PauseMode = "keep") -> None:
        raise NotImplementedError(
            "an SGLang server cannot share a GPU with the trainer: such flags are errors"
        )

    def wake(self, tags: Sequence[str] = ()) -> None:
        raise NotImplementedError(
            "an SGLang server cannot share a GPU with the trainer: such flags are errors"
        )

    def use_prefill_engines(self, urls: Sequence[str]) -> None:
        raise NotImplementedError("--prefill-num-servers is refused with SGLang's servers")

    def weight_version(self) -> int:
        """Returns the version of the live weights. -1 means the checkpoint's weights."""
        _, answer = request(self.url, self._run_key, "GET", "/model_info", timeout_s=_QUICK_S)
        return parse_version(json.loads(answer)["weight_version"])

    def is_healthy(self, timeout_s: float) -> bool:
        """Returns whether /health answers 200 within `timeout_s`. An idle SGLang generates a token to answer."""
        return answers(self.url, self._run_key, "/health", timeout_s=timeout_s)

    def model(self) -> str:
        """Returns the checkpoint folder with which the server was started."""
        _, answer = request(self.url, self._run_key, "GET", "/model_info", timeout_s=_QUICK_S)
        return str(json.loads(answer)["model_path"])

    def load(self) -> None:
        """Returns None, because SGLang's servers count requests only with --enable-metrics."""

    def _post(self, path: str, body: object, *, timeout_s: float = _QUICK_S) -> bytes:
        return request(self.url, self._run_key, "POST", path, body, timeout_s=timeout_s)[1]


def parse_version(version: str | int) -> int:
    """Converts SGLang's spelling of a version to a number. The checkpoint's version is -1."""
    return CHECKPOINT_VERSION if version == UNNAMED else int(version)
