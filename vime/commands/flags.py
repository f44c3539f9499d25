"""`vime flags`: lists every flag by section, flags that contain a word, or all flags as JSON. Also prints `vime train
--help`."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence

from slime.config.fields import spelled
from slime.config.near_names import nearest
from slime.rules.listing import Row, megatron_rows
from vime.backends import BACKENDS, public_rows

_WIDTH, _FLAG_WIDTH = 110, 42
TITLES = {
    "cluster": "Cluster: processes and devices",
    "train": "Training",
    "weight_update": "Weights to the engines",
    "rollout": "Rollout: sampling",
    "engine": "Engines",
    "data": "Data and batch sizes",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "algorithm": "Algorithm",
    "off_policy": "Old samples and importance correction",
    "reward": "Rewards",
    "fault_tolerance": "Fault tolerance",
    "logging": "Logging",
    "debug": "Debugging",
    "kernels": "Operators of rl_kernel",
    "megatron": "Megatron: parallelism and optimizer",
    "not supported yet": "Accepted at their default only",
    "no effect": "Accepted without effect",
}


def main(argv: Sequence[str]) -> int:
    """Lists flags. Returns 1 if no flag has the given words. Raises ValueError for an unknown option."""
    words = [word for word in argv if not word.startswith("--")]
    options = [word for word in argv if word.startswith("--")]
    if options == ["--json"] and not words:
        print(json.dumps(list(all_rows()), indent=1))
        return 0
    if options and options != ["--help"]:
        raise ValueError(f"flags takes --json or words to search for, got {' '.join(argv)}")
    if not words:
        print(listing(public_rows()))
        print(
            "\nmegatron-core, vLLM (--vllm-*) and vllm-router (--router-*): `vime flags WORD`, `vime flags --json`"
        )
        return 0
    return search(words)


def all_rows() -> Iterator[Row]:
    """Yields every flag that a run accepts, with its owner. Imports Megatron and vLLM, which takes seconds."""
    seen: set[str] = set()
    for row in itertools.chain(
        public_rows(), megatron_rows(), *(backend.rows() for backend in BACKENDS.values())
    ):
        if row["flag"] not in seen:  # two backends may have a flag with the same name
            seen.add(row["flag"])
            yield row


def search(words: Sequence[str]) -> int:
    """Prints the flags whose name or help contains every word."""
    rows = list(all_rows())
    wanted = [word.lower().replace("_", "-") for word in words]
    found = [r for r in rows if all(word in f"{r['flag']} {r['help']}".lower() for word in wanted)]
    if not found:
        near = nearest(words[0], [r["flag"][2:] for r in rows])
        print(f"no flag has {' and '.join(words)} in its name or help{near}")
        return 1
    print(listing(found))
    return 0


def listing(rows: Iterator[Row] | Sequence[Row]) -> str:
    """Formats flags under a title for each owner, with choices and defaults."""
    lines, owner = list[str](), None
    for entry in rows:
        if entry["owner"] != owner:
            owner = entry["owner"]
            name = owner.removeprefix("slime.config.")
            lines.append(f"\n{TITLES.get(name, name)}")
        lines += _entry(entry)
    return "\n".join(lines).lstrip("\n")


def _entry(entry: Row) -> Iterator[str]:
    text = " ".join(str(entry["help"] or "").split())
    if entry["choices"]:
        text += f" ({'|'.join(map(str, entry['choices']))})"
    if entry["default"] not in (None, False, [], {}, ""):
        text += f" [{_short(entry['default'])}]"
    flag = f"  {entry['flag']}"
    wrapped = textwrap.wrap(text, _WIDTH - _FLAG_WIDTH) or [""]
    if len(flag) >= _FLAG_WIDTH:
        yield flag
    else:
        yield f"{flag:<{_FLAG_WIDTH}}{wrapped.pop(0)}".rstrip()
    for line in wrapped:
        yield " " * _FLAG_WIDTH + line


def _short(value: object) -> str:
    return textwrap.shorten(str(value), 40, placeholder="...")


FIRST = {
    "Model and data": ("hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template"),
    "Reward": ("rm_type", "custom_rm_path"),
    "GPUs": ("actor_num_gpus_per_node", "colocate", "rollout_num_gpus", "tensor_model_parallel_size"),
    "Batches": (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_max_response_len",
        "max_tokens_per_gpu",
    ),
    "Training": ("num_rollout", "lr", "advantage_estimator", "loss_type", "lora_rank"),
    "Evaluation and records": ("eval_prompt_data", "eval_interval", "save", "save_interval", "run_dir"),
}
"""The flags that users set first, as the sections of `vime train --help`."""


def help_text(command: str, what: str, *, everything: bool = False) -> str:
    """Returns the text of `vime train --help` and `vime plan --help`; with `everything`, of --help-all."""
    options = {
        "train": "",
        "plan": (
            "\nOf the plan alone: --gpu-memory-gib N checks the flags against GPUs of N GiB (exit status 1 when they "
            "do not\nfit) and shows what is offloaded there; --host-memory-gib N does so for hosts of N GiB. "
            "`vime plan --compare\nRUN_DIR` shows the plan of a run next to what it measured. `vime plan --search GPUS "
            "--gpu KIND` ranks\nlayouts by their predicted time, with --lengths, --simulate and --plot.\n"
        ),
    }[command]
    rows = list(public_rows())
    more = "" if everything else f"\n\nAll {len(rows)} flags: vime {command} --help-all"
    return (
        f"usage: vime {command} [--config FILE.yaml ...] [--FLAG VALUE ...]\n\n{what[0].upper()}{what[1:]}.\n\n"
        "A file holds flags as a YAML mapping; the command line wins over files, later files over earlier ones.\n"
        f"Search all flags, also Megatron's and vLLM's: vime flags WORD\n{options}\n"
        f"{listing(rows if everything else first_rows(rows))}{more}"
    )


def first_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the flags of FIRST, with their section as owner."""
    by_flag = {row["flag"]: row for row in rows}
    for section, names in FIRST.items():
        for name in names:
            yield {**by_flag[spelled(name)], "owner": section}
