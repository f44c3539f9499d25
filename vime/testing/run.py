"""A whole run of the tiny model on the CPU: engine, router, Ray and trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.api.launch import train
from vime.api.live import LiveRun
from vime.testing.generation import ROWS


def start_tiny_run(
    model: Path, folder: Path, rows: Sequence[Mapping[str, object]] = ROWS, **flags: object
) -> LiveRun:
    """Trains the tiny model for two rollouts, and returns the finished run.

    Args:
        model: the Hugging Face folder of the model.
        folder: where the prompts and the run directory go.
        rows: lines of the prompt file, with `prompt` and `label`.
        flags: keywords of `vime.train`: `reward`, `generate`, `filter`, and flags with underscores.

    Raises ValueError for a wrong flag or function, and RuntimeError for a run that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
    settings: dict[str, object] = {
        **{"device": "cpu", "colocate": True, "actor_num_gpus_per_node": 1, "hf_checkpoint": str(model)},
        **{
            "prompt_data": str(data),
            "input_key": "prompt",
            "label_key": "label",
            "apply_chat_template": True,
        },
        **{"num_rollout": 2, "rollout_batch_size": len(rows), "n_samples_per_prompt": 2},
        **{"rollout_max_response_len": 16, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 2048},
        **{"lr": 1e-3, "run_dir": str(folder / "run")},
    }
    if not {"reward", "rm_type", "custom_rm_path"} & set(flags):
        settings["rm_type"] = "random"
    return train(settings, **flags)  # type: ignore[arg-type]  # the keywords of `train` are among them
