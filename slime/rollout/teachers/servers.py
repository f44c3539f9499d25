"""This module scores tokens with teachers on servers that the user has started, over SGLang's or vLLM's HTTP protocol.

The servers score at temperature 1. The run's engines use `slime.protocols.RolloutEngine` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from slime.peers import http
from slime.protocols import ScoreResult

if TYPE_CHECKING:
    from slime.vision.inputs import ImageInputs

Row = tuple[float | None, int]
"""Log-prob and token id."""
_models: dict[str, str] = {}


class _Teacher:
    """A server at an address. The address of a server that needs a key is http://:KEY@HOST:PORT."""

    path = ""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        self.url = bare.geturl()
        """The server's URL without the key, so that errors may print it."""
        key = parts.password or parts.username
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _route(self) -> str:
        """Returns the address with its path; an address without a path gets the protocol's path."""
        return self.url if urlsplit(self.url).path.strip("/") else self.url.rstrip("/") + self.path

    async def _post(self, body: object, deadline_s: float) -> Any:
        return await http.post(self._route, body, headers=self._headers, deadline_s=deadline_s)

    def _check_text(self, images: ImageInputs | None) -> None:
        if images is not None:
            raise ValueError(
                f"a teacher of samples with images must be a frozen model of the run, got the server {self.url}; give "
                "--frozen-model"
            )

    def _result(self, rows: list[Row], top: list[list[Row]], wanted: list[int], top_k: int) -> ScoreResult:
        """Returns the last rows, those of the tokens `wanted`. Raises ValueError if the server scored other tokens."""
        rows = rows[-len(wanted) :]
        if [token for _, token in rows] != wanted:
            raise ValueError(
                f"the teacher must score the {len(wanted)} tokens of the response, got {len(rows)} other ones from "
                f"{self.url}; its server must use the policy's token ids"
            )
        if not top_k:
            return ScoreResult(_floats(rows))
        top = [position[:top_k] for position in top[-len(wanted) :]]
        if {len(position) for position in top} != {top_k}:
            raise ValueError(
                f"the teacher must give its {top_k} most probable tokens (--opd-top-k) at each position, got "
                f"{min(map(len, top), default=0)} from {self.url}; vLLM takes --max-logprobs {top_k}"
            )
        ids = np.array([[token for _, token in position] for position in top], np.int32)
        return ScoreResult(_floats(rows), (ids, np.stack([_floats(position) for position in top])))


class SglangTeacher(_Teacher):
    """Scores with SGLang's /generate, which returns the log-probs of a prompt and generates no token."""

    path = "/generate"

    async def score(
        self,
        token_ids: list[int],
        *,
        start: int,
        top_k: int = 0,
        deadline_s: float,
        images: ImageInputs | None = None,
    ) -> ScoreResult:
        self._check_text(images)
        body = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": max(start - 1, 0),
            **({"top_logprobs_num": top_k} if top_k else {}),
        }
        meta = (await self._post(body, deadline_s))["meta_info"]
        rows = [(row[0], row[1]) for row in meta["input_token_logprobs"]]
        top = [
            [(row[0], row[1]) for row in position or ()] for position in meta.get("input_top_logprobs") or ()
        ]
        return self._result(rows, top, token_ids[start:], top_k)


class VllmTeacher(_Teacher):
    """Scores with vLLM's /v1/completions and prompt_logprobs. The server also generates one token, its minimum."""

    path = "/v1/completions"

    async def score(
        self,
        token_ids: list[int],
        *,
        start: int,
        top_k: int = 0,
        deadline_s: float,
        images: ImageInputs | None = None,
    ) -> ScoreResult:
        self._check_text(images)
        if self._route not in _models:
            at = self._route.removesuffix("/completions") + "/models"
            listed: Any = await http.get(at, headers=self._headers, deadline_s=deadline_s)
            _models[self._route] = listed["data"][0]["id"]
        body = {
            "model": _models[self._route],
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
        }
        reply = await self._post(body, deadline_s)
        scored: list[dict[str, Any] | None] = reply["choices"][0]["prompt_logprobs"][start:]
        rows: list[Row] = [
            (entry[str(token)]["logprob"] if entry else None, token)
            for token, entry in zip(token_ids[start:], scored, strict=True)
        ]
        # The entry of the token itself is always present, and its rank may be above top_k.
        ranked = [sorted((entry or {}).items(), key=lambda item: item[1]["rank"]) for entry in scored]
        top = [[(value["logprob"], int(token)) for token, value in entry] for entry in ranked]
        return self._result(rows, top, token_ids[start:], top_k)


def _floats(rows: list[Row]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value, _ in rows], np.float32)


SERVERS: dict[str, type[SglangTeacher] | type[VllmTeacher]] = {"sglang": SglangTeacher, "vllm": VllmTeacher}
