"""The `vime` command: one line an error, exit code 2, no traceback, for whatever the user can put right."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence

from slime.config.fields import nearest
from slime.config.listing import megatron_rows, own_rows, row

COMMANDS = {
    "train": "run a training job from the flags of a launch script",
    "plan": "check the same flags and show what they mean; starts nothing",
    "export": "write a checkpoint as a Hugging Face directory",
    "audit": "where trainer and engine differ in a saved rollout of RUN_DIR",
    "plot": "draw the curves of run directories",
    "bench": "what rl_kernel changes: op, module and e2e measure it, report tells it",
    "doctor": "check whether this machine has what a run needs; --json",
    "flags": "list the flags of this project; --json lists every accepted flag with its owner",
}

MODULES = {"bench": "vime.bench.command", "doctor": "vime.doctor.command"}
"""Where a subcommand is, when it is not the module of its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is 0, or 2 for a ValueError, whose text goes to stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    command, rest = args[0], args[1:]
    try:
        return run(command, rest)
    except ValueError as error:
        print(f"vime {command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`vime flags | head`) has seen enough; Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(command: str, argv: list[str]) -> int:
    """Call the subcommand's own `main(argv)`; its modules are imported only now."""
    if command not in COMMANDS:
        near = nearest(command, COMMANDS, prefix="vime ")
        raise ValueError(f"the command must be one of {', '.join(COMMANDS)}, got {command}{near}")
    if command in ("train", "plan") and any(a in ("-h", "--help") for a in argv):
        print(f"usage: vime {command} --flag value ...   ({COMMANDS[command]})\n")
        if command == "plan":
            print(
                "--gpu-memory-gib N, of the plan alone: do the flags fit GPUs of N GiB (exit status 1 if\n"
                "not), and what is offloaded there\n"
            )
        return flags_main([])
    if command == "flags":
        return flags_main(argv)
    return importlib.import_module(MODULES.get(command, f"vime.{command}")).main(argv) or 0


def usage() -> str:
    """The text of `vime --help`."""
    lines = [f"  vime {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vime COMMAND [ARGUMENTS]      RL post-training: vLLM rollout, Megatron training",
            "",
            *lines,
            "",
            "A first run:  bash scripts/run-tiny-grpo.sh",
            "Flags keep the names of slime, Megatron (--lr) and vLLM (--vllm-max-num-seqs).",
            "`vime plan FLAGS` explains what a set of them means;",
            "`vime plan --gpu gb200 FLAGS` also whether that fits such GPUs, which need not be here;",
            "`vime plan --gpu-memory-gib 80 FLAGS` the same for GPUs of 80 GiB.",
        ]
    )


def flags_main(argv: Sequence[str]) -> int:
    """`vime flags`: our own flags as text, or with --json every accepted flag (imports Megatron and vLLM)."""
    if list(argv) == ["--json"]:
        from vime.engine.flags import list_flags
        from vime.engine.sglang_flags import targets

        rows = [*own_rows(), *megatron_rows(), *list_flags()]
        rows += [
            row(
                "--sglang-" + name.replace("_", "-"),
                "translated",
                None,
                "SGLang spelling",
                translated_to=target,
            )
            for name, target in targets().items()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    if argv and argv not in (["--help"], ["-h"]):
        raise ValueError(f"flags takes --json or nothing, got {' '.join(argv)}")
    owner = None
    for entry in own_rows():
        if entry["owner"] != owner:
            owner = entry["owner"]
            print(f"\n{owner.removeprefix('slime.config.')}")
        default = "" if entry["default"] in (None, False, [], {}) else f" [{entry['default']}]"
        choices = f" ({'|'.join(map(str, entry['choices']))})" if entry["choices"] else ""
        print(f"  {entry['flag']:<44} {entry['help']}{choices}{default}")
    print("\nmegatron-core, vLLM (--vllm-*) and vllm-router (--router-*) flags: vime flags --json")
    return 0
