"""`vime completion bash|zsh`: prints a shell script that completes commands, flags, choices and file names.

The script contains all names, so TAB does not start Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.fields import spelled
from slime.rules.flags import own_flags
from vime.commands import COMMANDS

SHELLS = ("bash", "zsh")
FLAG_COMMANDS = ("train", "plan", "config", "soak")


def main(argv: Sequence[str]) -> int:
    """Prints the script of a shell. Raises ValueError for an unknown shell."""
    if list(argv) in (["-h"], ["--help"]):
        print("usage: vime completion bash|zsh      bash: source <(vime completion bash)")
        return 0
    if list(argv) not in [[shell] for shell in SHELLS]:
        raise ValueError(
            f"completion must be asked for {' or '.join(SHELLS)}, got {' '.join(argv) or 'none'}; "
            "bash: source <(vime completion bash)"
        )
    print(script(argv[0]))
    return 0


def script(shell: str) -> str:
    """Returns the completion script. zsh runs the bash function through bashcompinit."""
    head = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return head + BODY.format(
        commands=" ".join(COMMANDS),
        flag_commands="|".join(FLAG_COMMANDS),
        flags=" ".join(["--config", *flags(), "--gpu-memory-gib", "--host-memory-gib", "--compare"]),
        choices="\n".join(f"        {flag}) values='{' '.join(values)}' ;;" for flag, values in choices()),
    )


def flags() -> list[str]:
    """Returns this project's flags. Megatron's and vLLM's flags are left out, because listing them takes seconds."""
    return [spelled(name) for name in own_flags()]


def choices() -> list[tuple[str, list[str]]]:
    """Returns flags with a fixed set of values."""
    return [
        (spelled(name), [str(value) for value in spec.choices])
        for name, spec in own_flags().items()
        if spec.choices
    ]


BODY = """_vime() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} values=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
    completion) values="bash zsh" ;;
    engines) values="list add remove" ;;
    bench) values="op module e2e report plan" ;;
    {flag_commands})
        case $before in
{choices}
        esac
        if [[ $word == --* ]]; then
            values="{flags}"
        fi
        ;;
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    fi
    if ((${{#COMPREPLY[@]}} == 0)); then
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _vime vime"""
