"""Lists every flag that parse_args accepts, as rows. `vime flags` and the test of all flags use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slime.config.core_table import core_flags
from slime.config.fields import FlagSpec, spelled
from slime.config.megatron_flags import HISTORICAL, MODEL_ARGS, core_config_classes
from slime.config.schema import SECTIONS
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED, Unsupported
from slime.rules.backend import BackendFlags
from slime.rules.flags import own_flags, section_flags
from slime.rules.parser import NO_BACKENDS

Row = dict[str, Any]


def row(
    flag: str,
    owner: str,
    default: object,
    help: str,
    choices: Iterable[object] | None = None,
    translated_to: str | None = None,
) -> Row:
    """Returns one line of the listing. The keys are the same for every owner."""
    return {
        "flag": flag,
        "owner": owner,
        "default": default,
        "help": help,
        "choices": list(choices) if choices else None,
        "translated_to": translated_to,
    }


def own_rows(backends: Mapping[str, BackendFlags] = NO_BACKENDS) -> Iterator[Row]:
    """Yields the flags that this project implements, then those that it accepts at their default or without effect."""
    for section, cls in SECTIONS.items():
        for name, spec in section_flags(cls).items():
            choices = backends if name == "rollout_backend" else spec.choices
            yield row(spelled(name), f"slime.config.{section}", spec.default, spec.help, choices)
        if section == "engine":
            for backend in backends.values():
                for name, spec in backend.specs.items():
                    yield row(spelled(name), f"slime.config.{section}", spec.default, spec.help, spec.choices)
    for name, entry in unsupported_flags(backends).items():
        yield row(spelled(name), "not supported yet", entry.default, f"only the default: {entry.why}")
    for name, spec in flags_without_effect(backends).items():
        yield row(spelled(name), "no effect", spec.default, spec.help)


def unsupported_flags(backends: Mapping[str, BackendFlags]) -> dict[str, Unsupported]:
    """Returns flags that are accepted at their default only, with those of the backends."""
    return UNSUPPORTED | {name: e for backend in backends.values() for name, e in backend.unsupported.items()}


def flags_without_effect(backends: Mapping[str, BackendFlags]) -> dict[str, FlagSpec]:
    """Returns flags that are accepted with any value, with those of the backends."""
    return NO_EFFECT | {
        name: spec for backend in backends.values() for name, spec in backend.no_effect.items()
    }


def megatron_rows() -> Iterator[Row]:
    """Yields Megatron's flags (imports megatron.core), each with the field that it sets."""
    for name, spec in MODEL_ARGS.items():
        yield _megatron_row(name, spec, "compared with config.json of --hf-checkpoint")
    fields = {f.name for cls in core_config_classes() for f in dataclasses.fields(cls)}
    for name, entry in HISTORICAL.items():
        assert entry.field in fields, entry.field
        spec = entry.spec or FlagSpec(name, bool, False, "")
        value = "" if entry.spec else f" = {entry.value}"
        yield _megatron_row(name, spec, f"megatron-core {entry.field}{value}")
    taken = {*own_flags(), *UNSUPPORTED, *NO_EFFECT}
    for name, flag in core_flags().items():
        if name in taken:
            continue  # this project reads the core field itself, or does not support it yet
        yield _megatron_row(name, flag.spec, f"{flag.spec.help}{' = False' if flag.negated else ''}")


def _megatron_row(name: str, spec: FlagSpec, becomes: str) -> Row:
    return row(spelled(name), "megatron-core", spec.default, spec.help or becomes, spec.choices, becomes)
