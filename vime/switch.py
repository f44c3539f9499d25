"""The rl_kernel switch as environment variables, for launch scripts that cannot be edited. Only this file reads them.

    VIME_RL_KERNEL=0|1            --rlk-fast off|auto
    VIME_RLK_FAST=MODE            --rlk-fast MODE
    VIME_RLK_CONSISTENCY=MODE     --rlk-consistency MODE
    VIME_RL_KERNEL_OPS=A,B        --rl-kernel-ops A,B

A flag for the same setting has priority.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.config import FlagGroup
from slime.config.fields import FALSE_WORDS, TRUE_WORDS, spelled

FLAG_OF = {
    "VIME_RL_KERNEL": "rlk_fast",
    "VIME_RLK_FAST": "rlk_fast",
    "VIME_RLK_CONSISTENCY": "rlk_consistency",
    "VIME_RL_KERNEL_OPS": "rl_kernel_ops",
}
SAME = {"enable_rl_kernel": "rlk_fast", "rl_kernel_strict": "rlk_fast"}
"""Other spellings of a flag."""


def from_environment(
    groups: list[FlagGroup], environ: Mapping[str, str]
) -> tuple[list[FlagGroup], list[str]]:
    """`groups` with the flags from the environment, and a note for each variable.

    ValueError if two variables contradict each other, or VIME_RL_KERNEL is neither yes nor no. The flag's own check
    covers other values. Its error then names the variable.
    """
    typed = {SAME.get(group.name, group.name): group.typed for group in groups}
    added: dict[str, FlagGroup] = {}
    remarks: dict[str, str] = {}
    for variable, name in FLAG_OF.items():
        text = environ.get(variable, "")
        if not text:
            continue
        if name in typed:
            remarks[variable] = f"{variable}={text} has no effect, as {typed[name]} is given"
            continue
        value = _mode(variable, text) if variable == "VIME_RL_KERNEL" else text
        before = added.get(name)
        if before is not None and before.values != [value] and "off" in (value, *before.values):
            raise ValueError(f"{variable} must agree with {before.typed}, got {text}; unset one of them")
        added[name] = FlagGroup(variable, name, [value])
        remarks[name] = f"{variable}={text} is taken as {spelled(name)} {value}"
    return list(added.values()), list(remarks.values())


def _mode(variable: str, text: str) -> str:
    if text.lower() in TRUE_WORDS:
        return "auto"
    if text.lower() in FALSE_WORDS:
        return "off"
    raise ValueError(f"{variable} must be 0 or 1, got {text!r}; VIME_RLK_FAST takes off, auto or strict")
