"""The connector of OpenEnv: `openenv:URL` is a server that runs, and `openenv:OWNER/NAME` an environment of the hub.

The package starts an environment of the hub with uv, or with Docker for `docker=true`. An episode is one `reset` and
the steps until the environment is done. Its reward is the sum of the rewards of the steps.

Each observation becomes a message, and each answer an action. If the action has one required field, the answer's text
is its value. Otherwise the answer must be a JSON object with the fields of the action, which the first message names.
With tools (`CallToolAction`), the model gets them as functions, and an answer without a call ends the episode.

Other arguments: `message` is the name of the field of an observation that the model reads (default: the whole
observation, as JSON), `system` a first message for the model, `steps` the maximum number of steps, and `reset.NAME` an
argument of `reset`. An environment without a list of tasks has `tasks` episodes, whose seeds count from 0.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.environments.protocol import Foreign, Object

_SEEDS = 256
"""Number of tasks of an environment that lists none, if the run gives no number."""
_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the schemas of actions that call tools."""


class Connector:
    """An environment of OpenEnv. The server creates a session for each episode."""

    def __init__(self, name: str, arguments: Object) -> None:
        from openenv import GenericEnvClient

        self._client = GenericEnvClient
        self._name = name
        self._docker = bool(arguments.pop("docker", False))
        self._message, self._system = arguments.pop("message", None), arguments.pop("system", None)
        self._steps = int(arguments.pop("steps", 100))
        self._reset = {key[6:]: arguments.pop(key) for key in list(arguments) if key.startswith("reset.")}
        if arguments:
            raise ValueError(
                "arguments must be among docker, message, system, steps and reset.NAME, got "
                f"{sorted(arguments)}; correct them"
            )
        self._owner: Foreign = None
        self._url = name if "://" in name else ""
        self._schema: Object = {}
        self._tools: list[Object] = []

    async def _open(self) -> None:
        """Starts the environment unless its server runs, and reads the schema of its actions."""
        if self._schema:
            return
        if not self._url:
            self._owner = await self._client.from_env(self._name, use_docker=self._docker)
            self._url = self._owner.base_url
        found = await _get(f"{_http(self._url)}/schema")
        self._schema = found["action"]
        if self._schema.get("title") in _TOOLS:
            async with self._client(base_url=self._url) as session:
                await session.reset(**self._reset)
                listed = (await session.step({"type": "list_tools"})).observation
            self._tools = [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool.get("description") or "",
                        "parameters": tool.get("input_schema")
                        or tool.get("inputSchema")
                        or {"type": "object"},
                    },
                }
                for tool in listed["tools"]
            ]

    async def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        await self._open()
        tasks = await self._listed(split)
        if tasks is None:
            if split is not None:
                raise ValueError(
                    f"split must be left out for an environment that lists no tasks, got {split}; leave it out"
                )
            tasks = [{"seed": seed} for seed in range(_SEEDS if limit is None else limit)]
        async with self._client(base_url=self._url) as session:
            first = await session.reset(**self._reset, **({"seed": 0} if "seed" in tasks[0] else {}))
        prompt = self._opening(first.observation)
        return [{"prompt": prompt, "label": None, "task": task} for task in itertools.islice(tasks, limit)]

    async def _listed(self, split: str | None) -> list[Object] | None:
        """Returns the arguments of `reset` for each task that the environment lists, or None if it lists none."""
        import httpx

        try:
            names = await _get(f"{_http(self._url)}/list_environments")
            splits = [one["name"] for one in await _get(f"{_http(self._url)}/{names[0]}/splits")]
        except (httpx.HTTPStatusError, LookupError):
            return None
        chosen = split or ("train" if "train" in splits else splits[0])
        if chosen not in splits:
            raise ValueError(f"split must be one of {', '.join(splits)}, got {chosen}; correct it")
        url = f"{_http(self._url)}/{names[0]}/num_tasks"
        number = (await _get(url, {"split": chosen}))["num_tasks"]
        return [{"split": chosen, "index": index} for index in range(number)]

    def _opening(self, observation: Foreign) -> list[Object]:
        """Returns the first messages: the fields of an action, if the model must write them, and the observation."""
        required = self._schema.get("required") or []
        system = [] if self._system is None else [str(self._system)]
        if not self._tools and len(required) != 1:
            fields = {name: one.get("type") for name, one in self._schema.get("properties", {}).items()}
            system.append(f"Answer with one JSON object with these fields: {json.dumps(fields)}")
        messages = [{"role": "system", "content": "\n".join(system)}] if system else []
        return [*messages, {"role": "user", "content": self._text(observation)}]

    def _text(self, observation: Foreign) -> str:
        """Returns an observation as the model reads it."""
        if self._message is not None:
            return str(observation[self._message])
        hidden = ("done", "reward", "metadata")
        return json.dumps({key: value for key, value in observation.items() if key not in hidden})

    def _action(self, text: str) -> Object:
        """Returns the action of an answer's text. Raises ValueError for a text without an action."""
        required = self._schema.get("required") or []
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if len(required) == 1:
            is_action = isinstance(value, dict) and required[0] in value
            return value if is_action else {required[0]: text}
        if not isinstance(value, dict):
            raise ValueError(f"an answer must be a JSON object, got {text[:80]!r}; its episode ends")
        return value

    async def run_episode(self, base_url: str, api_key: str, model: str, task: Object) -> Object:
        from openai import AsyncOpenAI

        await self._open()
        total, steps = 0.0, 0
        async with (
            self._client(base_url=self._url) as session,
            AsyncOpenAI(
                base_url=base_url,
                api_key=api_key,
                max_retries=0,
                timeout=None,  # ok: --session-deadline-s limits the episode
            ) as api,
        ):
            result = await session.reset(**self._reset, **task)
            messages: list[Foreign] = self._opening(result.observation)
            tools = {"tools": self._tools} if self._tools else {}
            while not result.done and steps < self._steps:
                answer = await api.chat.completions.create(model=model, messages=messages, **tools)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                actions = self._actions(message)
                if not actions:
                    break
                for call_id, action in actions:
                    result = await session.step(action)
                    total, steps = total + (result.reward or 0.0), steps + 1
                    said = {"role": "user", "content": self._text(result.observation)}
                    messages.append(said | ({"role": "tool", "tool_call_id": call_id} if call_id else {}))
        return {"reward": total, "metrics": {"steps": steps}}

    def _actions(self, message: Foreign) -> list[tuple[str | None, Object]]:
        """Returns the actions of an answer, each with the id of its call. A text without an action gives none."""
        if self._tools:
            return [
                (
                    call.id,
                    {
                        "type": "call_tool",
                        "tool_name": call.function.name,
                        "arguments": json.loads(call.function.arguments),
                    },
                )
                for call in message.tool_calls or []
            ]
        try:
            return [(None, self._action((message.content or "").strip()))]
        except ValueError:
            return []

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()


def _http(url: str) -> str:
    return url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/")


async def _get(url: str, body: Object | None = None) -> Foreign:
    """Returns the JSON of a GET, or of a POST with a body."""
    import httpx

    async with httpx.AsyncClient(timeout=60) as client:
        answer = await (client.get(url) if body is None else client.post(url, json=body))
        answer.raise_for_status()
        return answer.json()
