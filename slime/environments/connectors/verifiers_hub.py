"""The connector of `verifiers`: `verifiers:NAME` is a module with a taskset, or with `load_environment`.

Versions from 0.2 have tasksets. An argument is a field of the taskset's config, or of the environment's config if it
has a dot: `agent.harness.id=bash`. Without an argument, an agent runs in a process of this machine. An agent whose
environment defines no harness has no tools. `load_environment` of versions 0.1.14 to 0.3 gets the arguments as
keywords.

Episodes send their key in the header x-api-key, because `verifiers` reads other keys from environment variables.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.environments.protocol import Foreign, Object

_EPISODES = 256
"""Number of episodes that share servers. `verifiers` keeps a client for each address until its servers end."""


def _taskset_config(name: str, arguments: Object) -> Foreign:
    """Returns the config of the environment whose taskset is `name`, with a local runtime for each agent."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    fields: Object = {"taskset": {"id": name}}
    for key, value in arguments.items():
        *outer, last = key.split(".") if "." in key or key == "id" else ["taskset", key]
        part = fields
        for one in outer:
            part = part.setdefault(one, {})
        part[last] = value
    kind = env_config_type(name, str(fields.get("id", "")))
    for role, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            agent = fields.setdefault(role, {})
            agent.setdefault("runtime", {"type": "subprocess"})
            if field.default.harness is None and default_harness_id(name) == "bash":
                agent.setdefault("harness", {"id": "null"})
    return resolve_env_config(fields)


class _Serving:
    """One environment with its servers, and its number of episodes."""

    def __init__(self, environment: Foreign) -> None:
        self.environment = environment
        self.episodes = self.running = 0
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._open = False

    async def start(self) -> None:
        async with self._opening:
            if not self._open:
                await self._stack.enter_async_context(self.environment.serving())
                self._open = True

    async def stop(self) -> None:
        await self._stack.aclose()


class _Taskset:
    """An environment of `verifiers.v1`."""

    def __init__(self, name: str, arguments: Object) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self._config = _taskset_config(name, arguments)
        self._load = load_environment
        self._serving = _Serving(load_environment(self._config))
        self._tasks: list[Foreign] = []
        self._source: Foreign = None

    def _task(self, number: int) -> Foreign:
        """Returns the task with this number. The taskset makes tasks in a fixed order, and may make them forever."""
        self._source = iter(self._serving.environment.taskset) if self._source is None else self._source
        self._tasks += itertools.islice(self._source, max(0, number + 1 - len(self._tasks)))
        return self._tasks[number]

    def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        taskset = self._serving.environment.taskset
        if split is not None:
            raise ValueError(f"split must be left out for a taskset, got {split}; leave it out")
        if limit is None and not getattr(taskset, "bounded", not taskset.INFINITE):
            raise ValueError(
                "tasks must be given for a taskset that makes tasks forever, got none; add tasks=1000"
            )
        rows: list[Object] = []
        for number in itertools.count() if limit is None else range(limit):
            try:
                data = self._task(number).data
            except IndexError:
                break
            messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            text = data.prompt if isinstance(data.prompt, str | None) else data.prompt_text
            messages.append({"role": "user", "content": text or data.name or f"task {number}"})
            rows.append({"prompt": messages, "label": getattr(data, "answer", None), "task": number})
        return rows

    async def run_episode(self, base_url: str, api_key: str, model: str, task: int) -> Object:
        from verifiers.v1 import EvalClientConfig, ModelContext

        if self._serving.episodes == _EPISODES:
            self._serving = _Serving(self._load(self._config))
        serving = self._serving
        serving.episodes += 1
        serving.running += 1
        try:
            await serving.start()
            client = EvalClientConfig(
                base_url=base_url, api_key_var="VIME_NO_KEY", headers={"x-api-key": api_key}
            )
            context = ModelContext(model=model, client=client)
            episode = await serving.environment.run_episode(self._task(task), context)
        finally:
            serving.running -= 1
            if serving is not self._serving and not serving.running:
                await serving.stop()
        errors = [*episode.errors, *itertools.chain(*(trace.errors for trace in episode.traces))]
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        metrics = {name: one.score for trace in traces for name, one in trace.rewards.items() if one}
        metrics |= {name: one for trace in traces for name, one in trace.metrics.items() if one is not None}
        return {"reward": sum(trace.reward for trace in traces) / len(traces), "metrics": metrics}

    async def close(self) -> None:
        await self._serving.stop()


class _Classic:
    """An environment that a function `load_environment` makes."""

    def __init__(self, name: str, arguments: Object) -> None:
        import verifiers
        from openai import DefaultAsyncHttpxClient

        self._environment = verifiers.load_environment(name, **arguments)
        self._http = DefaultAsyncHttpxClient(timeout=None)  # ok: --session-deadline-s limits the episode
        self._rows: dict[str | None, Foreign] = {}

    def _dataset(self, split: str | None) -> Foreign:
        if split not in (None, "train", "eval"):
            raise ValueError(f"split must be train or eval, got {split}; correct it")
        if split not in self._rows:
            source = self._environment
            self._rows[split] = source.get_eval_dataset() if split == "eval" else source.get_dataset()
        return self._rows[split]

    def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        dataset = self._dataset(split)
        return [
            {"prompt": row["prompt"], "label": row.get("answer"), "task": [split, number]}
            for number, row in enumerate(itertools.islice(dataset, limit))
        ]

    async def run_episode(self, base_url: str, api_key: str, model: str, task: list[Foreign]) -> Object:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        split, number = task
        api = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=self._http)
        client = OpenAIChatCompletionsClient(api)
        row = dict(self._dataset(split)[number])
        output = await self._environment.run_rollout(row, client, model, {})
        if error := output.get("error"):
            raise RuntimeError(error["error_chain_repr"])
        metrics = {name: one for name, one in (output.get("metrics") or {}).items() if one is not None}
        return {"reward": output["reward"], "metrics": metrics}

    async def close(self) -> None:
        await self._http.aclose()


class Connector:
    """An environment of `verifiers`."""

    def __init__(self, name: str, arguments: Object) -> None:
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        tasksets = importlib.util.find_spec("verifiers.v1.tasksets")
        own = tasksets and importlib.util.find_spec(f"verifiers.v1.tasksets.{module}")
        classic = not own and hasattr(importlib.import_module(module), "load_environment")
        self._inner: _Classic | _Taskset = (_Classic if classic else _Taskset)(name, arguments)

    async def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        return self._inner.load_prompts(split, limit)

    async def run_episode(self, base_url: str, api_key: str, model: str, task: Foreign) -> Object:
        return await self._inner.run_episode(base_url, api_key, model, task)

    async def close(self) -> None:
        await self._inner.close()
