"""Translates `--sglang-*` flags of existing launch scripts to `--vllm-*` flags, each with a remark.

A flag is translated, or accepted with the reason why the answers are the same without it, or it is an error with the
reason. The tables are in tables.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from slime.config.config_file import FlagGroup
from slime.config.near_names import nearest
from slime.config.problems import Problems
from slime.config.sections.cluster import ClusterConfig
from slime.hardware import HARDWARE
from slime.records.errors import FlagError
from vime.sglang_api import config_file
from vime.sglang_api.tables import ANY, ENGINE_DECIDES, MAPPED, REFUSED, RENAMED, UPSTREAM

PREFIX = "sglang_"
SPECULATIVE = ("algorithm", "num_steps", "num_draft_tokens", "eagle_topk", "draft_model_path")
_METHODS = {"NEXTN": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3"}


def translate_sglang(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    """Translates every `--sglang-*` group into flags that have an owner, with a remark. Raises ValueError for other
    flags."""
    out: list[FlagGroup] = []
    notes: list[str] = []
    speculative: dict[str, FlagGroup] = {}
    problems = Problems()
    if (expanded := problems.check(config_file.expand, groups, _spelled)) is not None:
        groups, notes = expanded
    else:
        groups = [group for group in groups if group.name not in config_file.FLAGS]
    spread = _spread(groups)
    for group in groups:
        if not group.name.startswith(PREFIX):
            ours = [_group(UPSTREAM[group.name], *group.values)] if group.name in UPSTREAM else [group]
            out += ours
            notes += [_remark(group, ours, "")] if group.name in UPSTREAM else []
            continue
        name = group.name.removeprefix(PREFIX)
        if name.startswith("speculative_") and name.removeprefix("speculative_") in SPECULATIVE:
            speculative[name.removeprefix("speculative_")] = group
            continue
        rule: Callable[..., tuple[list[FlagGroup], str]] = _translate
        if name in REPLICAS and spread:
            rule = _one_group
        if (translated := problems.check(rule, name, group, origin=group.origin)) is not None:
            new, why = translated
            out += new
            notes.append(_remark(group, new, why))
    if speculative and (joined := problems.check(_speculative_config, speculative)) is not None:
        out.append(joined)
        notes.append(
            _remark(next(iter(speculative.values())), [joined], "the --sglang-speculative-* flags together")
        )
    problems.report()
    return out, notes


def _spelled(groups: list[FlagGroup]) -> list[FlagGroup]:
    return translate_sglang(groups)[0]


def targets() -> dict[str, str]:
    """Maps each SGLang flag name (no prefix, underscores) to a text about its translation, for `vime flags`."""
    rows = {name: "--" + target.replace("_", "-") for name, target in RENAMED.items()}
    rows |= {name: "--" + target.replace("_", "-") for name, (target, _) in MAPPED.items()}
    rows |= {name: f"nothing: {why}" for name, why in ENGINE_DECIDES.items()}
    rows |= {name: doc for name, (_, doc) in SPECIAL.items()}
    rows["config"] = "the flags of the policy, and a --frozen-model for each other model"
    rows |= {f"speculative_{name}": "an entry of --vllm-speculative-config" for name in SPECULATIVE}
    return rows


def _group(name: str, *values: str) -> FlagGroup:
    return FlagGroup("--" + name.replace("_", "-"), name, list(values))


def _remark(old: FlagGroup, new: list[FlagGroup], why: str) -> str:
    became = " ".join(" ".join([g.typed, *g.values]) for g in new) or "nothing"
    return f"{' '.join([old.typed, *old.values])} becomes {became}" + (f" ({why})" if why else "")


def _translate(name: str, group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """Returns the flags that replace one SGLang flag, and the reason if it is not a plain renaming."""
    if name in RENAMED:
        return [_group(RENAMED[name], *group.values)], ""
    if name in MAPPED:
        target, values = MAPPED[name]
        value = _one(group)
        if value not in values:
            raise FlagError(
                group.typed,
                f"be one of {', '.join(values)} to have a vLLM counterpart",
                value,
                f"choose one of them, or leave it out and give --{target.replace('_', '-')}",
            )
        return (
            ([_group(target, values[value])], "") if values[value] != ANY else ([], "vLLM chooses it itself")
        )
    if name in ENGINE_DECIDES:
        return [], ENGINE_DECIDES[name]
    if name in SPECIAL:
        return SPECIAL[name][0](group)
    if name in REFUSED:
        instead = REFUSED[name].format(" ".join(group.values)).rstrip()
        raise FlagError(group.typed, "be left out", advice=instead)
    near = nearest(name, targets(), prefix="--sglang-")
    raise FlagError(
        group.typed,
        f"be left out: no flag of SGLang with this name is known here{near}",
        advice="`vime flags sglang` lists them",
    )


def _one(group: FlagGroup) -> str:
    if len(group.values) != 1:
        raise FlagError(group.typed, "be followed by one value", " ".join(group.values) or "none")
    return group.values[0]


def _number(group: FlagGroup) -> int:
    try:
        return int(_one(group))
    except ValueError as error:
        raise FlagError(group.typed, "be an integer", " ".join(group.values) or "none") from error


def _memory(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """Translates the memory fraction. SGLang's fraction covers weights and KV cache; vLLM's covers activations too.

    So the same number never uses more memory, but gives a smaller KV cache.
    """
    why = "vLLM counts activations in, so the KV cache is smaller than SGLang's at the same number"
    return [_group("vllm_gpu_memory_utilization", _one(group))], why


def _expert_parallel(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """Translates expert parallelism. vLLM spreads experts over all GPUs of an engine, or not at all."""
    if _number(group) > 1:
        return [_group("vllm_enable_expert_parallel")], "over all GPUs of an engine"
    return [], "one rank is no expert parallelism"


REPLICAS = ("dp_size", "data_parallel_size")


def _replicas(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    return [_group("vllm_data_parallel_size", _one(group))], ""


def _one_group(name: str, group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """Accepts flags about replicas of the attention. An engine of several nodes splits every layer over all its
    GPUs."""
    _number(group)
    return [], "an engine of several nodes splits its layers over all its GPUs, with the same answers"


def _spread(groups: list[FlagGroup]) -> bool:
    """Returns True if an engine needs several nodes. Other checks report values that are not numbers."""
    typed = {group.name: group.values[0] for group in groups if group.values}
    defaults = ClusterConfig()
    nodes = (
        HARDWARE[typed["gpu"]].gpus_per_node if typed.get("gpu") in HARDWARE else defaults.num_gpus_per_node
    )
    try:
        engine = int(typed.get("rollout_num_gpus_per_engine", defaults.rollout_num_gpus_per_engine))
        return engine > int(typed.get("num_gpus_per_node", nodes))
    except ValueError:
        return False


def _invariant(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    return [_group("vllm_batch_invariant")], "an answer does not depend on the other requests of its batch"


def _chunked_prefill(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    if _number(group) > 0:
        return [_group("vllm_max_num_batched_tokens", _one(group))], ""
    return [_group("vllm_no_enable_chunked_prefill")], ""


SPECIAL: dict[str, tuple[Callable[[FlagGroup], tuple[list[FlagGroup], str]], str]] = {
    "mem_fraction_static": (_memory, "--vllm-gpu-memory-utilization"),
    "dp_size": (_replicas, "--vllm-data-parallel-size, or nothing for an engine of several nodes"),
    "data_parallel_size": (_replicas, "--vllm-data-parallel-size, or nothing for an engine of several nodes"),
    "enable_deterministic_inference": (_invariant, "--vllm-batch-invariant"),
    "ep_size": (_expert_parallel, "--vllm-enable-expert-parallel when above 1"),
    "expert_parallel_size": (_expert_parallel, "--vllm-enable-expert-parallel when above 1"),
    "chunked_prefill_size": (
        _chunked_prefill,
        "--vllm-max-num-batched-tokens, or --vllm-no-enable-chunked-prefill when not above 0",
    ),
}
"""Flags that are not renamed: (function, text about the translation)."""


def _speculative_config(by_name: dict[str, FlagGroup]) -> FlagGroup:
    """Translates SGLang's chain speculation into vLLM's JSON. Tree speculation (eagle-topk above 1) has no
    counterpart."""
    typed = next(iter(by_name.values())).typed
    for needed in ("algorithm", "num_steps"):
        if needed not in by_name:
            raise FlagError(
                f"--sglang-speculative-{needed.replace('_', '-')}", f"be given with {typed}", "none"
            )
    steps = _number(by_name["num_steps"])
    if "eagle_topk" in by_name and _number(by_name["eagle_topk"]) != 1:
        got = _one(by_name["eagle_topk"])
        raise FlagError("--sglang-speculative-eagle-topk", "be 1", got, "vLLM drafts one chain, not a tree")
    if "num_draft_tokens" in by_name and _number(by_name["num_draft_tokens"]) != steps + 1:
        got = _one(by_name["num_draft_tokens"])
        raise FlagError(
            "--sglang-speculative-num-draft-tokens",
            f"be num-steps + 1 = {steps + 1}",
            got,
            "vLLM drafts one chain",
        )
    algorithm = _one(by_name["algorithm"])
    if algorithm not in _METHODS:
        raise FlagError("--sglang-speculative-algorithm", f"be one of {', '.join(_METHODS)}", algorithm)
    config: dict[str, str | int] = {"method": _METHODS[algorithm], "num_speculative_tokens": steps}
    if "draft_model_path" in by_name:
        config["model"] = _one(by_name["draft_model_path"])
    elif algorithm == "EAGLE":
        # Without a draft model SGLang's EAGLE runs the checkpoint's own multi-token-prediction layers.
        config["method"] = "mtp"
    return _group("vllm_speculative_config", json.dumps(config))
