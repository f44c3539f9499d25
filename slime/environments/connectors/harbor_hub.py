"""The connector of Harbor: `harbor:FOLDER` is a task, or a folder with tasks (`task.toml`, `instruction.md`, tests).

An episode is a trial of a task: its container, an agent, and the tests, which write the reward. An argument is a field
of Harbor's TrialConfig: `agent.name=terminus-2` (the default), `environment.type=docker`, `timeout_multiplier=2`. The
agent finds the model in the variables of OpenAI's and of Anthropic's clients. For agents that use Anthropic's API, give
`agent.model_name=anthropic/policy`.

Other arguments: `reward` is the name of the reward if the tests write several, and `trials_dir` a folder in which
Harbor's records of the trials stay.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.environments.protocol import Object


class Connector:
    """The tasks of a folder."""

    def __init__(self, name: str, arguments: Object) -> None:
        from harbor.models.trial.config import TrialConfig

        folder = Path(name).expanduser().resolve()
        if not folder.is_dir():
            raise FileNotFoundError(f"the name must be a folder that exists, got {folder}; check the path")
        found = [folder] if (folder / "task.toml").is_file() else sorted(folder.iterdir())
        self._tasks = [path for path in found if (path / "task.toml").is_file()]
        self._reward = arguments.pop("reward", None)
        records = arguments.pop("trials_dir", None)
        self._keeps = records is not None
        self._folder = Path(records) if records else Path(tempfile.mkdtemp(prefix="vime-harbor-"))
        self._fields: Object = {"agent": {}, "environment": {}}
        for key, value in arguments.items():
            *outer, last = key.split(".")
            part = self._fields
            for one in outer:
                part = part.setdefault(one, {})
            part[last] = value
        agent = self._fields["agent"]
        if "import_path" not in agent:
            agent.setdefault("name", "terminus-2")
        agent.setdefault("model_name", "openai/{model}")
        parts = [(self._fields, TrialConfig)]
        for role in ("agent", "environment", "verifier"):
            parts.append((self._fields.get(role, {}), TrialConfig.model_fields[role].annotation))
        for fields, kind in parts:
            if unknown := sorted(set(fields) - set(kind.model_fields)):
                raise ValueError(
                    f"an argument must be a field of {kind.__name__}, got {', '.join(unknown)}; correct its name"
                )

    async def load_prompts(self, split: str | None, limit: int | None) -> list[Object]:
        if split is not None:
            raise ValueError(
                f"split must be left out for a folder of tasks, got {split}; name the folder of the split"
            )
        found = []
        for path in itertools.islice(self._tasks, limit):
            file = path / "instruction.md"
            text = file.read_text(encoding="utf-8").strip() if file.is_file() else path.name
            found.append({"prompt": [{"role": "user", "content": text}], "label": None, "task": str(path)})
        return found

    def _config(self, base_url: str, api_key: str, model: str, task: str) -> object:
        from harbor.models.trial.config import TrialConfig

        agent = self._fields["agent"]
        variables = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
        }
        own = {"model_name": agent["model_name"].replace("{model}", model)}
        own["env"] = {**variables, **agent.get("env", {})}
        fields = {**self._fields, "agent": {**agent, **own}}
        return TrialConfig.model_validate({**fields, "task": {"path": task}, "trials_dir": self._folder})

    async def run_episode(self, base_url: str, api_key: str, model: str, task: str) -> Object:
        from harbor.trial.trial import Trial

        trial = await Trial.create(self._config(base_url, api_key, model, task))
        try:
            result = await trial.run()
        finally:
            if not self._keeps:
                folder = trial.paths.trial_dir
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        rewards = (result.verifier_result.rewards if result.verifier_result else None) or {}
        if not result.reward_valid:
            error = result.exception_info
            said = (
                f"{error.exception_type}: {error.exception_message}" if error else "the tests wrote no reward"
            )
            raise RuntimeError(said)
        name = self._reward or ("reward" if "reward" in rewards or len(rewards) > 1 else next(iter(rewards)))
        if name not in rewards:
            raise ValueError(
                f"the tests must write the reward {name}, got {sorted(rewards)}; give reward=NAME"
            )
        return {"reward": rewards[name], "metrics": rewards}

    async def close(self) -> None:
        if not self._keeps:
            shutil.rmtree(self._folder, ignore_errors=True)
