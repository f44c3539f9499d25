"""Where and with what a benchmark ran, as lines of a report. Reads the environment of a run and of rl_kernel.bench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.tracking.environment import mask_secrets
from vime.bench.compare import flatten

PACKAGES = ("torch", "triton", "vllm", "vllm-router", "megatron-core", "transformers", "ray", "numpy")


def facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Hardware, driver, versions and commit, as far as the environment says them."""
    gpus = environment.get("gpus")
    cpu = environment.get("cpu")
    told = dict(flatten(environment))
    if isinstance(gpus, list) and gpus:
        kinds = dict.fromkeys(
            f"{gpu['name']}, {gpu['memory_mib']} MiB, driver {gpu['driver']}" for gpu in gpus
        )
        seen = told.get("variables.CUDA_VISIBLE_DEVICES")
        count = f"{len(seen.split(','))} of {len(gpus)}" if seen else str(len(gpus))
        yield "Hardware", f"{count} x " + "; ".join(kinds)
    elif told.get("gpu"):
        yield "Hardware", f"{told['gpu']}, driver {told.get('gpu_facts.driver_version', 'unknown')}"
    elif isinstance(cpu, Mapping):
        yield (
            "Hardware",
            f"no GPU; {cpu.get('usable_cores')} of {cpu.get('cores')} cores of {cpu.get('model')}",
        )
    else:
        yield "Hardware", f"no GPU; CPU {cpu or 'unknown'}"
    python = told.get("python.version", told.get("python"))
    versions = {name: told.get(f"packages.{name}", told.get(name)) for name in PACKAGES}
    known = [f"{name} {version}" for name, version in {"Python": python, **versions}.items() if version]
    yield "Versions", ", ".join(known) or "unknown"
    yield "Commit", str(told.get("git.commit") or told.get("commit") or "unknown")


def rollouts_of(config: Mapping[str, Any]) -> Iterator[str]:
    """How many answers of what length to which prompts, and what rewards them; nothing where no flags are known."""
    told = {path.rpartition(".")[2]: value for path, value in flatten(config)}
    if not told.get("prompt_data"):
        return
    file = "/".join(Path(told["prompt_data"]).parts[-3:])
    reward = told.get("custom_rm_path") or told.get("rm_type")
    yield (
        f"{told['rollout_batch_size']} prompts x {told['n_samples_per_prompt']} answers of at most "
        f"{told['rollout_max_response_len']} tokens, prompts of `{file}`, reward `{reward}`"
    )


def folded(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "<details>", f"<summary>{title}</summary>", "", "```text")
    yield from (f"{path}: {json.dumps(value)}" for path, value in flatten(mask_secrets(values)))
    yield from ("```", "", "</details>")
