"""Low-rank adapters without torch: the products of a model that get an adapter, and PEFT's adapter_config.json.

An adapter belongs to a module of the Hugging Face model, as in PEFT: `y += scale * x @ A.T @ B.T` with A [rank, inputs]
and B [outputs, rank]. Megatron fuses some modules. The rows of a family's weight table define how.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.config import Config
from slime.models.decoder import Hf
from slime.models.family import Family
from slime.models.layouts import Row
from slime.records.errors import FlagError

ALL = "all-linear"
PREFIX = "adapters."
"""Prefix of the adapters' names among the model's parameters."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Prefix of the tensors' names in a PEFT file."""

_LINEAR = re.compile(r"decoder\.layers\.\{i\}\..*\b(linear_\w+|in_proj|out_proj)\.weight")
"""Matches the products of a layer. It does not match routers, which a router replay reads, and gates of shared
experts."""
_OF_ONE_EXPERT = re.compile(r"experts\.\d+\.")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": (None,),
    "layers_pattern": (None,),
    "layer_replication": (None,),
    "target_parameters": (None,),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "ensure_weight_tying": (False,),
}
"""Settings of PEFT that could change the adapter's computation, its position or its base, with the values that change
nothing. An empty value, such as None, False or [], is accepted for every setting."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights with which PEFT subtracts the first adapter from the base."""
_READ = ("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "base_model_name_or_path")
_NO_EFFECT = (
    *("auto_mapping", "peft_version", "revision", "inference_mode", "megatron_config", "megatron_core"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
"""Fields about the origin or the loading of an adapter, and sub-fields of the settings above."""


@dataclass(frozen=True)
class Lora:
    """The adapters of a run."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL,)
    excluded: tuple[str, ...] = ()
    """Modules without an adapter, named like `targets`."""

    @classmethod
    def of(cls, config: Config) -> Lora | None:
        """Returns the adapters of a run, or None for a run that trains the model's weights."""
        flags = config.lora
        if not flags.lora_rank:
            return None
        targets, excluded = tuple(flags.target_modules or (ALL,)), tuple(flags.exclude_modules or ())
        return cls(flags.lora_rank, flags.lora_alpha, flags.lora_dropout, targets, excluded)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        """Returns whether the module, given by its Hugging Face name, gets an adapter. Its row must be one of
        `linear_rows`."""
        if _named(module, self.excluded):
            return False
        return self.targets == (ALL,) or _named(module, self.targets)

    def check(self, modules: Iterable[str]) -> None:
        """Raises ValueError unless each name matches a module that can have an adapter, and one gets an adapter."""
        modules = sorted(modules)
        known = sorted({module.rpartition(".")[2] for module in modules})
        for flag, names in (("--target-modules", self.targets), ("--exclude-modules", self.excluded)):
            for name in names:
                if name != ALL and not any(_named(module, [name]) for module in modules):
                    raise FlagError(
                        flag,
                        "name modules of the model",
                        f"{name}, which matches none",
                        f"it has {', '.join(known)}",
                    )
        if not any(map(self.adapts, modules)):
            raise FlagError(
                "--exclude-modules",
                "leave a module with an adapter",
                " ".join(self.excluded),
                "leave some out",
            )
        for name in self.excluded:
            if _OF_ONE_EXPERT.search(name):
                raise FlagError(
                    "--exclude-modules",
                    "name modules of all experts of a layer",
                    name,
                    f"give {name.rpartition('.')[2]}, as all experts of a layer have adapters or none has",
                )
        for target in self.targets:
            if target == ALL and len(self.targets) > 1:
                raise FlagError(
                    "--target-modules",
                    f"be {ALL} alone or names",
                    " ".join(self.targets),
                    "leave out one of both",
                )

    def peft(self, base: str, modules: Iterable[str]) -> dict[str, object]:
        """Returns the adapter_config.json for adapters of `modules` over the checkpoint `base`."""
        last = {module.rpartition(".")[2] for module in modules}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": sorted(last) if self.targets == (ALL,) else sorted(self.targets),
            "exclude_modules": sorted(self.excluded) or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "use_dora": False,
            "use_rslora": False,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
        }


def _named(module: str, names: Iterable[str]) -> bool:
    """Returns whether a name is the module's whole name, or its end after a dot."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def sends_adapters(config: Config) -> bool:
    """Returns whether updates send only adapters to the engines, which have the base."""
    return bool(config.lora.lora_rank) and not config.lora.lora_merge


def linear_rows(family: Family) -> Iterator[Row]:
    """Yields the rows of products that can have an adapter: rows whose tensors are weights of modules in the files."""
    for row in family.rows:
        if _LINEAR.fullmatch(row.megatron) and all(name.endswith(".weight") for name in row.hf):
            yield row


def get_module(hf_name: str) -> str:
    """Returns the module of a weight: its Hugging Face name without ".weight"."""
    return hf_name.removesuffix(".weight")


def get_adapted_module(hf_name: str, family: Family) -> str:
    """Returns the module of a weight in transformers' model, by which PEFT names an adapter."""
    in_files, in_model = family.module_prefix
    module = get_module(hf_name)
    return in_model + module.removeprefix(in_files) if module.startswith(in_files) else module


def list_modules(family: Family, hf: Hf, experts: int) -> Iterator[str]:
    """Yields the names of all modules of a model that could have an adapter, and some names that only other models of
    the family have."""
    for row in linear_rows(family):
        for name in row.hf:
            for i in range(int(hf["num_hidden_layers"])):
                for e in range(experts) if row.is_expert else (0,):
                    yield get_adapted_module(name, family).replace("{i}", str(i)).replace("{e}", str(e))


def read_peft(directory: str | Path) -> tuple[Lora, str | None]:
    """Returns the adapters that a PEFT directory describes, and the base that it names. Raises ValueError for a
    directory without adapter_config.json, and for settings that this project does not support or recognise."""
    path = Path(directory) / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlagError(
            "--lora-load",
            f"name a PEFT directory with {CONFIG_FILE}",
            f"{directory}: {error}",
            "check the path",
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path} must hold an object, got {type(settings).__name__}; save the adapter again with PEFT"
        )
    if not (Path(directory) / WEIGHTS_FILE).is_file():
        raise FlagError(
            "--lora-load",
            f"name a PEFT directory with {WEIGHTS_FILE}",
            f"{directory} without it",
            "save the adapter with safe_serialization=True",
        )
    _require_plain(settings, path)
    rank, alpha, targets = settings.get("r"), settings.get("lora_alpha"), settings.get("target_modules")
    if isinstance(targets, str) and targets == ALL:
        targets = [ALL]
    if (
        not isinstance(rank, int)
        or rank < 1
        or not isinstance(alpha, int | float)
        or not math.isfinite(alpha)
    ):
        raise ValueError(f"r and lora_alpha in {path} must be numbers above 0, got {rank} and {alpha}")
    if not isinstance(targets, list) or not targets:
        raise ValueError(
            f"target_modules in {path} must be a list of module names, got {targets!r}; write the names that its "
            "expression matches"
        )
    excluded = settings.get("exclude_modules") or []
    if not isinstance(excluded, list):
        raise ValueError(
            f"exclude_modules in {path} must be a list of module names, got {excluded!r}; write the names that its "
            "expression matches"
        )
    base, dropout = settings.get("base_model_name_or_path"), float(settings.get("lora_dropout") or 0.0)
    return Lora(rank, float(alpha), dropout, tuple(sorted(targets)), tuple(sorted(excluded))), base


def _require_plain(settings: dict[str, object], path: Path) -> None:
    """Raises ValueError unless the settings describe plain LoRA over the base as its checkpoint holds it."""
    kind = settings.get("init_lora_weights")
    if isinstance(kind, str) and kind.lower().startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"init_lora_weights in {path} must leave the base as it is, got {kind}; PEFT subtracted the first "
            "adapter from it: save_pretrained with path_initial_model_for_weight_conversion writes an adapter over "
            "the plain base"
        )
    for name, neutral in _NEUTRAL.items():
        value = settings.get(name)
        # PEFT reads {} as the settings of a variant, all at their defaults.
        if value not in neutral and (value or value == {}):
            raise ValueError(
                f"{name} in {path} must be {neutral[0]}, got {value}; this version trains plain LoRA adapters"
            )
    for name in settings.keys() - _NEUTRAL.keys() - {*_READ, *_NO_EFFECT}:
        if settings[name]:
            raise ValueError(
                f"{path} must have known settings alone, got {name} = {settings[name]}; remove it if it changes "
                "nothing that the adapter computes"
            )
