"""Runs the `vime` command. An error that the user can fix is one line with exit code 2, without a traceback.

Imports the standard library only, so that it can print such a line if no other package is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from slime.system.extras import IS_CHECKOUT, missing
from slime.system.import_path import show_packages
from slime.system.imports import uncollected
from vime.commands import COMMANDS, MODULES, WORK
from vime.run import interrupts
from vime.run.output import lasting_output, print_any_text
from vime.run.surroundings import keep_bytecode, use_utf8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    The exit code is 0, or 2 for a ValueError, whose text goes to stderr, or 128 + the number of the signal that ended
    the command. Without `argv`, this command is the whole process, so its modules are kept from the garbage collector.
    """
    if argv is None:
        show_packages(os.environ)
    args = list(sys.argv[1:] if argv is None else argv)
    command, rest = (args[0], args[1:]) if args else ("help", [])
    if sys.platform != "linux":
        print(_elsewhere(sys.platform), file=sys.stderr)
        return 2
    use_utf8(os.environ)
    print_any_text()
    if argv is None and command in WORK:
        keep_bytecode(os.environ)
    try:
        with lasting_output() if command in WORK else contextlib.nullcontext():
            return run(command, rest, freeze=argv is None)
    except KeyboardInterrupt as interrupt:
        print(f"vime {command}: interrupted{interrupts.by(interrupt)}", file=sys.stderr)
        return interrupts.exit_code(interrupt)
    except ValueError as error:
        print(f"vime {command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        line = missing(error, f"vime {command}")
        if line is None:
            raise
        print(line, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe (`vime flags | head`). Python's flush at exit must not raise an error either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(command: str, argv: list[str], *, freeze: bool) -> int:
    """Imports the subcommand's module and calls its `main(argv)`."""
    if command in ("-h", "--help", "help"):
        print(usage(), flush=True)
        return 0
    if command in ("-V", "--version", "version"):
        from vime.commands.version import version_lines

        print("\n".join(version_lines()))
        return 0
    if command not in COMMANDS:
        from slime.config.near_names import nearest

        near = nearest(command, COMMANDS, prefix="vime ")
        raise ValueError(f"the command must be one of {', '.join(COMMANDS)}, got {command}{near}")
    if command in ("train", "plan") and (asked := {"-h", "--help", "--help-all"} & set(argv)):
        from vime.commands.flags import help_text

        print(help_text(command, COMMANDS[command], everything="--help-all" in asked))
        return 0
    with interrupts.nothing_to_end(command), uncollected(freeze=freeze):
        module = importlib.import_module(MODULES.get(command, f"vime.commands.{command}"))
    return module.main(argv) or 0


def _elsewhere(platform: str) -> str:
    """Returns the line for a system on which vime does not run."""
    name = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    instead = "WSL 2" if platform == "win32" else "a Linux machine"
    return f"vime must run on Linux, got {name}; use {instead} or a Linux container"


def usage() -> str:
    """Returns the text of `vime --help`."""
    lines = [f"  vime {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vime COMMAND [ARGUMENTS]      RL post-training: vLLM rollout, Megatron training",
            "",
            *lines,
            "",
            "vime --version names the version, the commit and the packages that a run depends on.",
            *(["A first run:  bash scripts/run-tiny-grpo.sh"] if IS_CHECKOUT else []),
            "Flags keep the names of slime, Megatron (--lr) and vLLM (--vllm-max-num-seqs).",
            "`vime plan FLAGS` explains what a set of them means;",
            "`vime plan --gpu gb200 FLAGS` also whether that fits such GPUs, which need not be here;",
            "`vime plan --gpu-memory-gib 80 --host-memory-gib 500 FLAGS` the same for GPUs and hosts of these sizes.",
        ]
    )
