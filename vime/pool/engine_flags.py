"""Checks flags of engines and routers with the parser of their program, and derives an engine's settings from the run.

All backends share this module. It defines no flag: each backend names its prefixes and the flags that only a run sets.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypedDict, cast

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config, FlagGroup
from slime.config.fields import FlagSpec
from slime.config.near_names import nearest
from slime.config.problems import Problems
from slime.config.unsupported import Unsupported
from slime.models import family_for
from slime.models.quantized.quantization import QuantizationScheme
from slime.records.errors import FlagError, UnknownFlag
from slime.rules.listing import Row
from slime.system.start_cache import StartCache

KEY = "every server of a run gets the run's own key"
ROUTER_RESERVED = {
    "api_key": KEY,
    "prefill": "--prefill-num-servers sets the engines for prefill",
    "decode": "--prefill-num-servers sets the engines for prefill",
    "vllm_pd_disaggregation": "--prefill-num-servers sets the engines for prefill",
    "mini_lb": "the full router is used",
    "service_discovery": "the engine pool adds and removes workers itself",
}

DEADLINE = "one request may take --rollout-deadline-s"
SLIME_ROUTER_FLAGS = {
    "slime_router_middleware_paths": Unsupported(
        None, "the router runs no middleware; write a --custom-generate-function-path"
    ),
    "slime_router_health_check_failure_threshold": Unsupported(3, "use --router-health-failure-threshold"),
}
"""Flags of slime's own router that no backend supports."""
WITHOUT_ROUTER = {
    "slime_router_timeout": FlagSpec("slime_router_timeout", str, None, DEADLINE),
    "slime_router_max_connections": FlagSpec(
        "slime_router_max_connections",
        str,
        None,
        "requests in flight are bounded by --vllm-server-concurrency or --sglang-server-concurrency",
    ),
    "use_slime_router": FlagSpec(
        "use_slime_router",
        bool,
        False,
        "the engine's own router is always used; tokens and log-probs pass through it",
    ),
}
"""Flags of slime's own router that have no effect, with the reason."""


_NUMBERS = "numbers"
"""Entry of a StartCache: name of a flag that takes a number -> where the parser stores it, and "int" or "float"."""
_PLAIN_NUMBER = {"int": re.compile(r"\d{1,15}"), "float": re.compile(r"\d{1,15}(\.\d{1,15})?")}
"""Texts that every such flag accepts. The program's parser checks others, such as -1 and 4G."""


class RaisingParser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Checked(TypedDict):
    """The result of a check: where the parser stores the flag's value, whether it collects values, and the values."""

    dest: str
    collects: bool
    values: dict[str, object]


class PrefixOwner:
    """Owns the flags with one prefix. The parser of the project that defines the flags checks them."""

    def __init__(
        self,
        prefix: str,
        project: str,
        fields: str,
        reserved: dict[str, str],
        parser: Callable[[], argparse.ArgumentParser],
        fixed: Mapping[str, str] = MappingProxyType({}),
        kept: StartCache | None = None,
    ) -> None:
        """`kept` has the values of flags that an earlier start has checked. For these flags, nothing is imported."""
        self.prefix, self.project, self.reserved, self.parser = prefix, project, reserved, parser
        self._fields, self._fixed, self._kept = fields, fixed, kept

    def options(self) -> dict[str, argparse.Action]:
        """Maps each long option's name, with underscores and without its first dashes, to its argparse action."""
        actions = self.parser()._actions
        return {o[2:].replace("-", "_"): a for a in actions for o in a.option_strings if o.startswith("--")}

    def parse(self, groups: list[FlagGroup]) -> dict[str, object]:
        """Checks every flag. Returns `*_args` (typed values) and `*_argv` (the flags as the project spells them)."""
        argv: dict[int | str, list[str]] = {}
        fields: dict[str, Any] = {}
        problems = Problems()
        if self._kept is not None and groups:
            self._kept.load()
        for number, group in enumerate(groups):
            problems.check(self._take, number, group, fields, argv, origin=group.origin)
        problems.report()
        if self._kept is not None:
            self._kept.save()
        return {
            f"{self._fields}_args": fields,
            f"{self._fields}_argv": [t for group in argv.values() for t in group],
        }

    def _take(
        self, number: int, group: FlagGroup, fields: dict[str, Any], argv: dict[int | str, list[str]]
    ) -> None:
        """Checks one flag and puts it into `fields` and `argv`."""
        # vLLM reads --flag.key value as an entry of a JSON flag.
        name, dot, key = group.name.removeprefix(self.prefix).partition(".")
        tokens = [f"--{name.replace('_', '-')}{dot}{key}", *group.values]
        flag = self._checked(name, tokens, group)
        if flag is None:
            return
        dest, typed = flag["dest"], flag["values"]
        if flag["collects"]:
            typed = {dest: [*fields.get(dest, []), *cast(list[object], typed[dest])]}
        fields.update(typed)
        # vLLM warns about a flag that is given twice, so only the last is kept. Collected values and entries of a
        # JSON flag are all kept.
        argv[number if dot or flag["collects"] else dest] = tokens

    def _checked(self, name: str, tokens: list[str], group: FlagGroup) -> _Checked | None:
        """Checks one flag, or returns the result of an earlier start. Returns None for a flag with the value that the
        servers of a run get anyway."""
        key = json.dumps(tokens)
        if self._kept is not None:
            if (kept := self._kept.get(key)) is not None:
                return cast(_Checked, kept)
            if (number := self._plain_number(tokens)) is not None:
                return number
        options = self.options()
        if name not in options:
            near = nearest(name, options, prefix=f"--{self.prefix[:-1]}-")
            raise UnknownFlag(group.typed, f"a flag of {self.project}", advice=near)
        dest = options[name].dest
        if dest in self.reserved:
            if group.values and group.values == [self._fixed.get(dest)]:
                return None
            raise FlagError(group.typed, "be left out", advice=self.reserved[dest])
        collects = isinstance(options[name], argparse._AppendAction)
        flag = _Checked(dest=dest, collects=collects, values=self._typed(tokens, group.typed))
        if self._kept is not None:
            self._kept.put(key, flag)
            self._kept.put(_NUMBERS, self.numbers())
        return flag

    def _plain_number(self, tokens: list[str]) -> _Checked | None:
        """Returns the result for a number without an import, if an earlier start has stored that the flag takes
        numbers."""
        name, *values = tokens
        known = cast(dict[str, list[str]], self._kept.get(_NUMBERS) or {}) if self._kept is not None else {}
        dest, kind = known.get(name.removeprefix("--").replace("-", "_"), ("", ""))
        if not dest or len(values) != 1 or not _PLAIN_NUMBER[kind].fullmatch(values[0]):
            return None
        number = int(values[0]) if kind == "int" else float(values[0])
        return _Checked(dest=dest, collects=False, values={dest: number})

    def numbers(self) -> dict[str, list[str]]:
        """Maps the name of each option that takes any number to its dest and to "int" or "float". Reserved options are
        left out. Imports the project."""
        found = {}
        for name, action in self.options().items():
            any_value = type(action) is argparse._StoreAction and not action.choices and action.nargs is None
            if any_value and action.dest not in self.reserved and (kind := _number_kind(action.type)):
                found[name] = [action.dest, kind]
        return found

    def _typed(self, tokens: list[str], typed: str) -> dict[str, Any]:
        """Returns the value that the project's parser gives to one flag, if JSON can represent the value."""
        unset = object()
        parser = self.parser()
        collecting = {a.dest for a in parser._actions if isinstance(a, argparse._AppendAction)}
        namespace = argparse.Namespace(
            **{a.dest: None if a.dest in collecting else unset for a in parser._actions}
        )
        try:
            parsed = vars(parser.parse_args(tokens, namespace))
        except ValueError as error:
            detail = str(error).partition(": ")[2] or error
            choices = self.options()[tokens[0][2:].partition(".")[0].replace("-", "_")].choices
            near = nearest(tokens[-1], map(str, choices), prefix="") if choices else ""
            raise FlagError(typed, f"be valid for {self.project}", f"{detail}{near}") from error
        if parsed.pop("model_tag", unset) not in (unset, None):
            raise FlagError(typed, "have no more values than it takes", f"{' '.join(tokens[1:])!r}")
        plain = {k: _plain(v) for k, v in parsed.items() if v is not unset}
        return {k: v for k, v in plain.items() if v is not None}

    def rows(self) -> Iterator[Row]:
        """Yields one row per flag of this project, for `vime flags`. Imports the project."""
        for name, action in self.options().items():
            if action.dest in self.reserved:
                continue
            flag = name.replace("_", "-")
            yield {
                "flag": f"--{self.prefix[:-1]}-{flag}",
                "owner": self.project,
                "default": None if action.default is argparse.SUPPRESS else _plain(action.default),
                "help": " ".join((action.help or "").split()),
                "choices": _plain(list(action.choices)) if action.choices else None,
                "translated_to": f"{self.project} --{flag}",
            }


def _number_kind(convert: object) -> str | None:
    """Returns "int" or "float" if `convert` makes numbers of this type from texts, otherwise None. A parser of JSON
    does not accept 007."""
    if not callable(convert):
        return None
    try:
        values = [convert("007"), convert("12345")]
    except Exception:  # border: functions of another program may raise any error
        return None
    kinds = {type(value) for value in values}
    return next(iter(kinds)).__name__ if values == [7, 12345] and kinds in ({int}, {float}) else None


def _plain(value: object) -> Any:
    """Returns the value as JSON stores it, or None for an object that JSON cannot represent, such as a config class."""
    try:
        return json.loads(json.dumps(sorted(value) if isinstance(value, set) else value))
    except TypeError:
        return None


def requested_parallel(config: Config, name: str) -> int | None:
    return config.engine.backend_args.get(name)


def engine_tensor_parallel(config: Config) -> int:
    """Returns the number of GPUs over which an engine splits each layer. The default is the engine's GPUs divided by
    the data and pipeline parallel sizes."""
    other = (requested_parallel(config, "data_parallel_size") or 1) * (
        requested_parallel(config, "pipeline_parallel_size") or 1
    )
    return requested_parallel(config, "tensor_parallel_size") or max(
        config.cluster.rollout_num_gpus_per_engine // other, 1
    )


def check_engine_heads(config: Config) -> None:
    """Checks that every GPU of a tensor-parallel engine gets the same number of heads.

    Query heads are divided equally. Key/value heads are divided equally, or copied to the same number of GPUs each.
    """
    if not config.num_engines:
        return
    hf_config = read_hf_config(config.rollout.hf_checkpoint)
    heads = hf_config.get("num_attention_heads")
    if not heads:
        return
    shared, size = hf_config.get("num_key_value_heads") or heads, engine_tensor_parallel(config)
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    if size in fitting:
        return
    engine_is_one_group = size == config.cluster.rollout_num_gpus_per_engine
    near = [max(n for n in fitting if n < size), *[n for n in fitting if n > size][:1]]
    flag = "--rollout-num-gpus-per-engine" if engine_is_one_group else "--vllm-tensor-parallel-size"
    raise FlagError(
        flag,
        f"divide the model's {heads} attention heads"
        f"{f' and fit its {shared} key/value heads' if heads % size == 0 else ''}",
        size,
        f"use {' or '.join(map(str, near))}",
    )


def common_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of an engine server of any backend: keyword arguments of
    `vime.pool.engine_server.EngineSpec`."""
    return {
        "model_path": config.rollout.hf_checkpoint,
        "weight_dir": config.weight_update.weight_dir,
        "local_checkpoint_dir": config.weight_update.update_weight_local_checkpoint_dir,
        "device": config.cluster.device,
        "dtype": default_dtype(config),
        "tensor_parallel_size": engine_tensor_parallel(config),
        "trust_remote_code": config.train.trust_remote_code,
        "env": config.engine.backend_env if config.cluster.device == "cuda" else {},
        "start_timeout_s": config.fault_tolerance.engine_start_timeout_s,
        "nodes": config.nodes_per_engine,
    }


def engine_dtype(config: Config) -> str:
    """Returns torch's name of the dtype in which engines compute. Code that compares log-probs needs this name.

    For engines with quantised weights the name ends in "+" and the value of --vllm-quantization, or the kind of the
    checkpoint's weights. "auto" stays "auto", because only the engine then determines its dtype.
    """
    dtype = config.engine.backend_args.get("dtype") or default_dtype(config)
    quantization = config.engine.backend_args.get("quantization")
    if quantization is None and (scheme := _checkpoint_scheme(config)) is not None:
        quantization = "int4" if scheme.kind == "int4" else "fp8"
    return _DTYPE_ALIASES.get(dtype, dtype) + (f"+{quantization}" if quantization else "")


def default_dtype(config: Config) -> str:
    """Returns the dtype of engines without a flag for it: the trainer's. An engine with a quantised checkpoint computes
    in bfloat16 if the trainer computes in float32, because no kernel for such weights has float32."""
    dtype = config.megatron.params_dtype
    return "bfloat16" if dtype == "float32" and _checkpoint_scheme(config) is not None else dtype


def _checkpoint_scheme(config: Config) -> QuantizationScheme | None:
    hf = read_hf_config(config.rollout.hf_checkpoint)
    return family_for(hf).scheme(hf)


_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
