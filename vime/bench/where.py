"""Where and with what a benchmark ran, as lines of a report. Reads the environment of a run and of rl_kernel.bench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.tracking.environment import mask_secrets
from vime.bench.compare import flatten
from vime.bench.record import flags_of

PACKAGES = ("torch", "triton", "vllm", "vllm-router", "megatron-core", "transformers", "ray", "numpy")


def facts(
    environment: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Hardware, driver, versions and commit, as far as the environment says them; of a run with `config`, the hardware
    that it used."""
    told = dict(flatten(environment))
    yield "Hardware", _machine(told) if config is None else used_hardware(environment, config)
    python = told.get("python.version", told.get("python"))
    versions = {name: told.get(f"packages.{name}", told.get(name)) for name in PACKAGES}
    known = [f"{name} {version}" for name, version in {"Python": python, **versions}.items() if version]
    yield "Versions", ", ".join(known) or "unknown"
    yield "Commit", str(told.get("git.commit") or told.get("commit") or "unknown")


def _machine(told: Mapping[str, Any]) -> str:
    if told.get("gpu"):
        return f"{told['gpu']}, driver {told.get('gpu_facts.driver_version', 'unknown')}"
    return f"no GPU; CPU {told.get('cpu') or 'unknown'}"


def used_hardware(environment: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What a run was given of its machine: a host may have more GPUs, and a run on a CPU any number of them."""
    flags = flags_of(config)
    if flags["device"] == "cpu":
        cpu = environment["cpu"]
        return f"CPU, {cpu['usable_cores']} of {cpu['cores']} cores of {cpu['model']}"
    trainers, engines = (
        flags["actor_num_nodes"] * flags["actor_num_gpus_per_node"],
        flags["rollout_num_gpus"] or 0,
    )
    used = max(trainers, engines) if flags["colocate"] else trainers + engines
    gpus = environment["gpus"]
    kinds = dict.fromkeys(f"{gpu['name']}, {gpu['memory_mib']} MiB, driver {gpu['driver']}" for gpu in gpus)
    if used > len(gpus):
        return f"{used} x {'; '.join(kinds)} (looked at on one host, which has {len(gpus)})"
    return (
        f"{used} of {len(gpus)} x {'; '.join(kinds)}" if used < len(gpus) else f"{used} x {'; '.join(kinds)}"
    )


def rollouts_of(config: Mapping[str, Any]) -> Iterator[str]:
    """How many answers of what length to which prompts, and what rewards them; nothing where no flags are known."""
    told = flags_of(config)
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
