"""Makes a prompt file of an environment's tasks, so that --prompt-data reads it as any other file.

The file is in the cache of `datasets`. Its name is a hash of its content, so that an unchanged environment keeps the
cached checks of its prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from slime.environments.hubs import Environment, find_environment
from slime.environments.process import START_S, EnvironmentFault, get_process
from slime.records.errors import FlagError

KEY = "environment_task"
"""Key in a sample's metadata for {"environment": its text, "task": the value of its connector, "label": ...}."""
COLUMNS = {"input_key": "prompt", "label_key": None, "metadata_key": "metadata"}
"""The flags of columns, and the columns of the file. Tasks may lack a label, so that it is in the metadata."""


_files: dict[tuple[str, Path], Path] = {}


def prompt_file(text: str, flag: str, folder: Path) -> Path:
    """Returns the file in `folder` with the tasks of an environment. The first call in a process loads the environment,
    whose process then waits for episodes until `close_processes`.

    Raises ValueError with `flag` if the environment cannot be loaded, or has no tasks.
    """
    if (text, folder) not in _files:
        _files[text, folder] = _written(find_environment(text, flag), flag, folder)
    return _files[text, folder]


def _written(environment: Environment, flag: str, folder: Path) -> Path:
    text = environment.text
    try:
        call = get_process(environment, flag).call(
            "load_prompts", split=environment.split, limit=environment.tasks
        )
        rows = call.result(START_S)
    except (TimeoutError, EnvironmentFault) as error:
        said = str(error) or f"no tasks after {START_S:g} s"
        raise FlagError(
            flag, "name an environment with tasks", f"{text!r}: {said}", "correct its arguments"
        ) from error
    assert isinstance(rows, list)
    if not rows:
        raise FlagError(flag, "name an environment with tasks", f"none in {text!r}", "correct its arguments")
    content = "".join(_line(environment, row) for row in rows)
    path = folder / "environments" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(content, encoding="utf-8")
        written.replace(path)
    return path


def _line(environment: Environment, row: object) -> str:
    assert isinstance(row, dict)
    chosen = {"environment": environment.text, "task": row["task"], "label": row["label"]}
    return json.dumps({"prompt": row["prompt"], "metadata": {KEY: chosen}}) + "\n"
