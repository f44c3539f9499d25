"""The connector of NeMo Gym: `nemo-gym:URL?data=FILE` is a running resource server, and a JSON Lines file of its tasks.

An episode follows NeMo Gym's simple agent. POST /seed_session begins it. The model answers `responses_create_params`,
and each call of a tool is a POST to the tool's name, until an answer has no call. POST /verify returns the reward. The
cookies of the resource server are kept during an episode.
"""

from __future__ import annotations

import itertools
import json
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from slime.environments.protocol import Object

_LABELS = ("label", "expected_answer", "answer")
_SHOWN = 300


class Connector:
    """A resource server, and the rows of its file."""

    def __init__(self, name: str, arguments: Object) -> None:
        unknown = sorted(set(arguments) - {"data", "timeout"})
        if unknown or "data" not in arguments:
            raise ValueError(
                f"arguments must be data=FILE and at most timeout=SECONDS, got {sorted(arguments)}; correct them"
            )
        self._url = name.rstrip("/")
        self._seconds = float(arguments.get("timeout", 600))
        with open(arguments["data"], encoding="utf-8") as file:
            self._rows = [json.loads(line) for line in file if line.strip()]
        self._connections: aiohttp.TCPConnector | None = None

    def _client(self) -> aiohttp.ClientSession:
        """Returns a client with separate cookies, over the connections that all episodes share."""
        if self._connections is None:
            self._connections = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(
            connector=self._connections,
            connector_owner=False,
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # servers on IP addresses have cookies, too
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._seconds),
        )

    async def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        if split is not None:
            raise ValueError(
                f"split must be left out for a file of tasks, got {split}; name the file of the split with data"
            )
        async with self._client() as client:
            await _answer(client.get(f"{self._url}/openapi.json"))
        found = []
        for number, row in enumerate(itertools.islice(self._rows, limit)):
            content = row["responses_create_params"]["input"]
            items = [{"role": "user", "content": content}] if isinstance(content, str) else content
            label = next((row[key] for key in _LABELS if key in row), None)
            label = label if label is None or isinstance(label, str) else json.dumps(label)
            found.append({"prompt": [_message(item) for item in items], "label": label, "task": number})
        return found

    async def run_episode(self, base_url: str, api_key: str, model: str, task: int) -> Object:
        row = self._rows[task]
        async with self._client() as client:
            await _answer(client.post(f"{self._url}/seed_session", json=row))
            params = {**row["responses_create_params"], "model": model}
            response = await self._converse(client, base_url, api_key, params)
            result = await _answer(client.post(f"{self._url}/verify", json={**row, "response": response}))
        known = ("reward", "response", *row)
        numbers = {k: v for k, v in result.items() if k not in known and isinstance(v, bool | int | float)}
        return {"reward": result["reward"], "metrics": numbers}

    async def _converse(
        self, client: aiohttp.ClientSession, base_url: str, api_key: str, params: Object
    ) -> Object:
        """Returns the model's last response, with the output of all responses and tools."""
        content = params["input"]
        items = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        headers = {"Authorization": f"Bearer {api_key}"}
        output: list[Object] = []
        while True:
            body = {**params, "input": items + output}
            asked = client.post(f"{base_url}/responses", json=body, headers=headers)
            response: Object = await _answer(asked)
            output += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if response.get("incomplete_details") or not calls:
                return {**response, "output": output}
            for call in calls:
                output.append(
                    {
                        "type": "function_call_output",
                        "call_id": call["call_id"],
                        "output": await self._call(client, call),
                    }
                )

    async def _call(self, client: aiohttp.ClientSession, call: Object) -> str:
        """Returns the text of a tool. An error of the tool is an answer that the model reads."""
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"the arguments must be JSON: {error}"})
        async with client.post(f"{self._url}/{call['name']}", json=arguments) as answer:
            return await answer.text()

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()


def _message(item: Object) -> Object:
    """Returns a chat message of an item of the API of responses."""
    content = item.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    role = item.get("role", "user")
    return {"role": "system" if role == "developer" else role, "content": content}


async def _answer(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Object:
    """Returns the JSON of an answer. Raises RuntimeError, with the address and the text, for a status of 400 or
    more."""
    try:
        async with request as answer:
            if answer.status >= 400:
                text = " ".join((await answer.text()).split())
                raise RuntimeError(
                    f"{answer.url} must answer with a status below 400, got {answer.status}: {text[:_SHOWN]}; "
                    "see the log of the server"
                )
            found: Object = await answer.json()
            return found
    except (TimeoutError, aiohttp.ClientConnectionError) as error:
        raise RuntimeError(
            f"the server must be reachable, got {type(error).__name__}: {error}; start it, or correct its URL"
        ) from error
