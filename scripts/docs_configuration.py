"""`python scripts/docs_configuration.py`: writes docs/configuration.md from the flags that the code declares.

A test fails if the page is out of date. The page explains Megatron's and vLLM's own flags but does not list them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.config.fields import FlagSpec, spelled
from slime.config.schema import SECTIONS
from slime.rules.flags import section_flags
from slime.rules.listing import flags_without_effect, unsupported_flags
from vime.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/configuration.md")
COMMAND = "python scripts/docs_configuration.py"

TITLES = {
    "cluster": "Cluster: devices, nodes, who shares GPUs",
    "train": "Trainer",
    "lora": "Adapters (LoRA)",
    "weight_update": "Weight transfer",
    "rollout": "Rollout: sampling and its hooks",
    "sessions": "Sessions of agents",
    "engine": "Engines",
    "data": "Data and batch sizes",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "algorithm": "Algorithm and loss",
    "critic": "Critic",
    "distillation": "On-policy distillation",
    "off_policy": "Off-policy correction and routing replay",
    "reward": "Rewards",
    "fault_tolerance": "Fault tolerance",
    "logging": "Logging",
    "debug": "Debugging and profiling",
    "kernels": "rl_kernel",
    "megatron": "Megatron: layout, precision, optimizer",
}

INTRO = f"""# Configuration

This page lists every flag that vime owns. It is generated: `{COMMAND}` writes it from the code, and a test
fails when it is out of date. `vime flags` prints the same list in a terminal.

**How values are given.** A flag and its field have the same name: `--rollout-batch-size 32` sets `rollout_batch_size`.
A flag without a value is a switch. A switch also accepts `true` and `false`, and `--no-NAME` turns it off. A list takes
several values after one flag. An object is JSON, for example `--train-env-vars '{{"NAME": "1"}}'`.

**Files of flags.** `vime train --config FILE.yaml` reads a flat YAML mapping of flags. Keys have no leading dashes;
dashes and underscores mean the same. A flag on the command line replaces the file's. An unknown key is an error that
names the nearest flag. `vime config FILE.yaml` prints the flags of a file as YAML or as a shell array.

```yaml
colocate: true                        # a switch; false is --no-colocate
lr: 1e-6                              # a value
eval-prompt-data: [gsm8k, test.jsonl] # several values
train-env-vars: {{NAME: "1"}}           # an object
load: null                            # not given
```

**Who owns a flag.** Each flag has exactly one owner:

| Flag | Owner | Where to find it |
| --- | --- | --- |
| the tables below | vime | this page, `vime flags` |
| `--vllm-NAME` | vLLM: passed to each engine without the prefix | `vime flags --json`, vLLM's documentation |
| `--router-NAME` | vllm-router: passed to the router without the prefix | `vime flags --json` |
| any field of Megatron-core's model, optimizer or data-parallel configuration | Megatron-core | `vime flags --json` |
| `--sglang-NAME` | translated, or passed to SGLang: [Coming from slime](from-slime.md) | `vime flags sglang` |

A flag without an owner is an error that names the nearest known flag. `vime plan` prints the resolved values and starts
nothing. Each run saves them in `config.json` of its run directory, with `***` for keys, tokens and logins in addresses.

**Types.** `switch` is true or false. `list of` takes several values. `object` is JSON. "none" means that the flag
has no value until you give one. Its meaning then describes the run without it.
"""

UNSUPPORTED_INTRO = """
## Accepted at the default only

slime and Megatron scripts use these flags. vime accepts them at the value in the column *Accepted*. Any other value is
an error.

| Flag | Accepted | Why, and what to use instead |
| --- | --- | --- |
"""

NO_EFFECT_INTRO = """
## Accepted without effect

slime and Megatron scripts use these flags. vime accepts any value and does not need the flag. `vime plan` notes each
one.

| Flag | Why it is not needed |
| --- | --- |
"""


def cell(text: str) -> str:
    """Returns plain text as the content of a table cell. Flags and function signatures become code."""
    if signature := re.match(r"(async )?fn\(.*?\)( -> (\([^)]*\)|[\w .|]+))?", text):
        return f"Import path of `{signature[0]}`{cell(text[signature.end() :])}"
    for character in "\\|*<>":
        text = text.replace(character, {"<": "&lt;", ">": "&gt;"}.get(character, "\\" + character))
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*\w", lambda flag: f"`{flag[0]}`", text)


def kind_of(spec: FlagSpec) -> str:
    """Returns the page's name for a flag's type."""
    name = {bool: "switch", int: "integer", float: "number", str: "text", dict: "object"}.get(
        spec.kind, "text"
    )
    many = spec.many or spec.append
    return f"list of {name}" if many and name != "object" else name


def shown(value: Any) -> str:
    """Returns the page's text for a default value."""
    if value in (None, [], {}, ""):
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"`{value}`"


def meaning(spec: FlagSpec) -> str:
    """Returns the help text of a flag, with its choices."""
    text = cell(spec.help)
    if re.match(r"[a-z]+[ ,;:-]", text):
        text = text[0].upper() + text[1:]
    text = f"{text}." if text else ""
    choices = ", ".join(f"`{choice}`" for choice in spec.choices or ())
    return f"{text} One of {choices}." if choices else text


def lines() -> Iterator[str]:
    """Yields the lines of the page."""
    yield INTRO
    for section, cls in SECTIONS.items():
        source = Path(inspect.getfile(cls)).relative_to(ROOT)
        yield f"\n## {TITLES[section]}\n\nOwner: `{source}`.\n"
        yield "| Flag | Type | Default | Meaning |\n| --- | --- | --- | --- |"
        specs = dict(section_flags(cls))
        if section == "engine":
            specs["rollout_backend"] = replace(specs["rollout_backend"], choices=tuple(BACKENDS))
            specs |= {name: spec for backend in BACKENDS.values() for name, spec in backend.specs.items()}
        for name, spec in specs.items():
            yield f"| `{spelled(name)}` | {kind_of(spec)} | {shown(spec.default)} | {meaning(spec)} |"
    yield UNSUPPORTED_INTRO.rstrip("\n")
    for name, entry in unsupported_flags(BACKENDS).items():
        yield f"| `{spelled(name)}` | {shown(entry.default)} | {cell(entry.why)} |"
    yield NO_EFFECT_INTRO.rstrip("\n")
    for name, spec in flags_without_effect(BACKENDS).items():
        yield f"| `{spelled(name)}` | {cell(spec.help)} |"


def page() -> str:
    """Returns the whole page."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
