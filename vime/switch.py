"""Reads flags from environment variables, for launch scripts that cannot be edited. Only this file reads them.

    VIME_RL_KERNEL=0|1            --rlk-fast off|auto
    VIME_RLK_FAST=MODE            --rlk-fast MODE
    VIME_RLK_CONSISTENCY=MODE     --rlk-consistency MODE
    VIME_RL_KERNEL_OPS=A,B        --rl-kernel-ops A,B

A flag for the same setting has priority. Upstream vime's launcher has two more variables. A flag or a variable above
that contradicts them is an error, because upstream defines no priority:

    RL_KERNEL_MODE=off|auto|strict    --rlk-fast off|auto|strict
    RL_KERNEL_MODE=audit              --rlk-fast strict --rlk-consistency audit
    RL_KERNEL_ALIGNED=1               --rlk-bitwise --rlk-consistency strict; 0 has no effect

slime has a variable for its trainer, with the same rule:

    OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1    --round-weights; 0 has no effect
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.config import FlagGroup
from slime.config.fields import FALSE_WORDS, TRUE_WORDS, spelled
from slime.records.errors import FlagError

FLAG_NAMES = {
    "VIME_RL_KERNEL": "rlk_fast",
    "VIME_RLK_FAST": "rlk_fast",
    "VIME_RLK_CONSISTENCY": "rlk_consistency",
    "VIME_RL_KERNEL_OPS": "rl_kernel_ops",
}
MODES: dict[str, dict[str, str]] = {
    "off": {"rlk_fast": "off"},
    "auto": {"rlk_fast": "auto"},
    "audit": {"rlk_fast": "strict", "rlk_consistency": "audit"},
    "strict": {"rlk_fast": "strict"},
}
"""Maps RL_KERNEL_MODE of upstream's launcher to the flags with the same meaning. Both strict and audit run without
fallback."""
ALIGNED: dict[str, dict[str, str]] = {"0": {}, "1": {"rlk_bitwise": "", "rlk_consistency": "strict"}}
"""Maps the launcher's RL_KERNEL_ALIGNED to flags: 1 makes the engine's arithmetic equal to the trainer's."""
FAKE_INT4: dict[str, dict[str, str]] = {"0": {}, "1": {"round_weights": ""}}
"""Maps slime's OPEN_TRAINING_INT4_FAKE_QAT_FLAG to flags."""
SAME = {"enable_rl_kernel": "rlk_fast", "rl_kernel_strict": "rlk_fast"}
"""Other spellings of a flag."""
MEANS = {"enable_rl_kernel": "auto", "rl_kernel_strict": "strict"}
"""The value of such a spelling."""


def from_environment(
    groups: list[FlagGroup], environ: Mapping[str, str]
) -> tuple[list[FlagGroup], list[str]]:
    """Returns the flags to add to `groups` from the environment, and a note for each variable.

    Raises ValueError if two variables contradict each other, if upstream's variable contradicts a flag, or if
    VIME_RL_KERNEL is neither yes nor no. The flag's own check covers other values. Its error then names the variable.
    """
    typed = {SAME.get(group.name, group.name): group.typed for group in groups}
    added: dict[str, FlagGroup] = {}
    remarks: dict[str, str] = {}
    for variable, name in FLAG_NAMES.items():
        text = environ.get(variable, "")
        if not text:
            continue
        if name in typed:
            remarks[variable] = f"{variable}={text} has no effect, as {typed[name]} is given"
            continue
        value = _mode(variable, text) if variable == "VIME_RL_KERNEL" else text
        before = added.get(name)
        if before is not None and before.values != [value] and "off" in (value, *before.values):
            raise FlagError(variable, f"agree with {before.typed}", text, "unset one of them")
        added[name] = FlagGroup(variable, name, [value])
        remarks[name] = f"{variable}={text} is taken as {spelled(name)} {value}"
    _add_upstreams(groups, environ, added, remarks)
    return list(added.values()), list(remarks.values())


def _add_upstreams(
    groups: list[FlagGroup], environ: Mapping[str, str], added: dict[str, FlagGroup], remarks: dict[str, str]
) -> None:
    """Adds the flags of upstream's variables to `added`, and their notes to `remarks`."""
    for variable, settings in (
        ("RL_KERNEL_MODE", MODES),
        ("RL_KERNEL_ALIGNED", ALIGNED),
        ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", FAKE_INT4),
    ):
        mode = environ.get(variable)
        if not mode:
            continue
        if mode not in settings:
            raise ValueError(
                f"{variable} must be one of {', '.join(settings)}, got {mode!r}; check the spelling"
            )
        by_name = {SAME.get(group.name, group.name): group for group in (*added.values(), *groups)}
        for name, value in settings[mode].items():
            group = by_name.get(name)
            if group is None:
                added[name] = FlagGroup(variable, name, [value] if value else [])
            elif (found := MEANS.get(group.name) or " ".join(group.values)) != value:
                raise FlagError(
                    f"{variable}={mode}",
                    f"agree with {group.typed}",
                    f"{found} and not {value}",
                    "unset one of them",
                )
        flags = " ".join(f"{spelled(name)} {value}".rstrip() for name, value in settings[mode].items())
        remarks[variable] = f"{variable}={mode} " + (f"is taken as {flags}" if flags else "has no effect")


def _mode(variable: str, text: str) -> str:
    if text.lower() in TRUE_WORDS:
        return "auto"
    if text.lower() in FALSE_WORDS:
        return "off"
    raise ValueError(f"{variable} must be 0 or 1, got {text!r}; VIME_RLK_FAST takes off, auto or strict")
