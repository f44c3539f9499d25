"""Checks the `--vllm-*` and `--router-*` flags with the parsers of vLLM and vllm-router.

The import of vLLM takes seconds, so vLLM is imported only when a `--vllm-*` flag is given. A flag for a setting that
this project sets itself (address, key, model, log-probs) is an error.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from slime import extras, operators
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config, FlagGroup
from slime.config.near_names import nearest
from slime.config.problems import Problems
from slime.models import decoder_of
from slime.roles.groups import several_nodes, trainer_ranks
from slime.roles.served import frozen_devices, top_tokens_of_policy
from slime.rules.listing import Row
from slime.weight_sync.registry import CHANNELS
from vime.vllm import fp8, versions
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.worker import adapter

_ADDRESS = "engines listen where the engine pool places them"
_NODES = "they follow from --rollout-num-gpus-per-engine and --num-gpus-per-node"
_KEY = "every server of a run gets the run's own key"
_MODEL = "engines serve --hf-checkpoint"
_SAMPLING = "training needs the log-probs of the distribution that was sampled from"
VLLM_RESERVED = {
    "host": _ADDRESS,
    "port": _ADDRESS,
    "uds": _ADDRESS,
    "grpc": _ADDRESS,
    "headless": _ADDRESS,
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "config": "give its entries as --vllm-* flags or in --custom-config-path",
    "api_key": _KEY,
    "middleware": _KEY,
    "model": _MODEL,
    "model_tag": _MODEL,
    "served_model_name": _MODEL,
    "logprobs_mode": _SAMPLING,
    "generation_config": "sampling is set by --rollout-temperature, --rollout-top-p and --rollout-top-k",
    "weight_transfer_config": "weights arrive through --update-weight-transport",
    "worker_cls": "a run needs workers of its own; --vllm-worker-extension-cls adds methods to them",
    "trust_remote_code": "use --trust-remote-code",
    "enable_return_routed_experts": "use --use-rollout-routing-replay",
}
ROUTER_RESERVED = {
    "api_key": _KEY,
    "prefill": "--prefill-num-servers says which engines are for prefill",
    "decode": "--prefill-num-servers says which engines are for prefill",
    "vllm_pd_disaggregation": "--prefill-num-servers says which engines are for prefill",
    "mini_lb": "the full router is used",
    "service_discovery": "the engine pool adds and removes workers itself",
}
MOST_GPUS = 4
"""The most GPUs per host in a measured run; see benchmarks/results."""


@functools.cache
def vllm_parser() -> argparse.ArgumentParser:
    """Returns the parser of vLLM's server. The import takes seconds. Raises ValueError when vLLM is not installed."""
    try:
        with versions.quiet_import():
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            class Parser(FlexibleArgumentParser):
                def error(self, message: str) -> NoReturn:
                    raise ValueError(message)

            make_parser: Callable[..., FlexibleArgumentParser] = Parser
            return versions.make_arg_parser(make_parser(allow_abbrev=False, add_help=False))
    except ImportError as error:
        raise ValueError(
            f"vLLM must be installed to check --vllm-* flags, got {error}; install the extra: {extras.install()}"
        ) from error


@functools.cache
def router_parser() -> argparse.ArgumentParser:
    """Returns vllm-router's parser without address and workers. Raises ValueError when vllm-router is not installed."""
    try:
        from vllm_router.router_args import RouterArgs
    except ImportError as error:
        raise ValueError(
            f"vllm-router must be installed to check --router-* flags, got {error}; install the extra: "
            f"{extras.install()}"
        ) from error
    parser = RaisingParser(allow_abbrev=False, add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=True)
    return parser


class RaisingParser(argparse.ArgumentParser):
    """Parser that raises ValueError instead of ending the process, as its base class would."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class PrefixOwner:
    """Owns the flags with one prefix. The parser of the project that defines the flags checks them."""

    def __init__(
        self,
        prefix: str,
        project: str,
        fields: str,
        reserved: dict[str, str],
        parser: Callable[[], argparse.ArgumentParser],
    ) -> None:
        self.prefix, self.project, self.reserved, self.parser = prefix, project, reserved, parser
        self._fields = fields

    def options(self) -> dict[str, argparse.Action]:
        """Maps each long option's name, with underscores and without its first dashes, to its argparse action."""
        actions = self.parser()._actions
        return {o[2:].replace("-", "_"): a for a in actions for o in a.option_strings if o.startswith("--")}

    def parse(self, groups: list[FlagGroup]) -> dict[str, object]:
        """Checks every flag. Returns `*_args` (typed values) and `*_argv` (the flags as the project spells them)."""
        argv: dict[int | str, list[str]] = {}
        given: dict[str, Any] = {}
        problems = Problems()
        for number, group in enumerate(groups):
            problems.check(self._take, number, group, given, argv, origin=group.origin)
        problems.report()
        return {
            f"{self._fields}_args": given,
            f"{self._fields}_argv": [t for group in argv.values() for t in group],
        }

    def _take(
        self, number: int, group: FlagGroup, given: dict[str, Any], argv: dict[int | str, list[str]]
    ) -> None:
        """Checks one flag and puts it into `given` and `argv`."""
        options = self.options()
        # vLLM reads --flag.key value as an entry of a JSON flag.
        name, dot, key = group.name.removeprefix(self.prefix).partition(".")
        if name not in options:
            near = nearest(name, options, prefix=f"--{self.prefix[:-1]}-")
            raise ValueError(f"{group.typed} is not a flag of {self.project}{near}")
        dest = options[name].dest
        if dest in self.reserved:
            raise ValueError(f"{group.typed} must be left out; {self.reserved[dest]}")
        tokens = [f"--{name.replace('_', '-')}{dot}{key}", *group.values]
        typed = self._typed(tokens, group.typed)
        collects = isinstance(options[name], argparse._AppendAction)
        given.update({dest: given.get(dest, []) + typed[dest]} if collects else typed)
        # vLLM warns about a flag that is given twice, so only the last is kept. Collected values and entries of a
        # JSON flag are all kept.
        argv[number if dot or collects else dest] = tokens

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
            said = str(error).partition(": ")[2] or error
            choices = self.options()[tokens[0][2:].partition(".")[0].replace("-", "_")].choices
            near = nearest(tokens[-1], map(str, choices), prefix="") if choices else ""
            raise ValueError(f"{typed} must be valid for {self.project}, got {said}{near}") from error
        if parsed.pop("model_tag", unset) not in (unset, None):
            raise ValueError(f"{typed} must have no more values than it takes, got {' '.join(tokens[1:])!r}")
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


def _plain(value: object) -> Any:
    """Returns the value as JSON stores it, or None for an object that JSON cannot represent, such as a config class."""
    try:
        return json.loads(json.dumps(sorted(value) if isinstance(value, set) else value))
    except TypeError:
        return None


VLLM = PrefixOwner("vllm_", "vLLM", "backend", VLLM_RESERVED, vllm_parser)
ROUTER = PrefixOwner("router_", "vllm-router", "router", ROUTER_RESERVED, router_parser)


def remarks(config: Config) -> Iterator[str]:
    """Yields notes on the engines, for the user. Raises ValueError when the installed vLLM is too old."""
    version = versions.installed()
    if config.num_engines and version is not None and (remark := versions.check(version)):
        yield remark
    if config.cluster.device == "cpu" and "gpu_memory_utilization" in config.engine.backend_args:
        yield (
            "--vllm-gpu-memory-utilization has no effect on CPU engines: their KV cache is as large as "
            "--vllm-kv-cache-memory-bytes says"
        )
    if config.cluster.device == "cpu" and config.engine.backend_env:
        yield "--vllm-batch-invariant has no effect on CPU engines: vLLM has it on GPUs alone"
    yield from fp8.remarks(config)
    if several := several_nodes(config):
        yield f"{' and '.join(several)}: several hosts have not been run in this version"
    elif config.num_engines and config.nodes_per_engine > 1:
        yield (
            f"engines of {config.nodes_per_engine} nodes: run in this version as processes of one host, on CPUs, and "
            "not yet on several hosts"
        )
    elif config.cluster.device == "cuda":
        apart = 0 if config.cluster.colocate else config.cluster.rollout_num_gpus
        if (gpus := trainer_ranks(config) + apart + frozen_devices(config)) > MOST_GPUS:
            yield f"{gpus} GPUs: runs on more than {MOST_GPUS} of a host have not been made in this version"


def _given_parallel(config: Config, name: str) -> int | None:
    return config.engine.backend_args.get(name)


def engine_tensor_parallel(config: Config) -> int:
    """Returns the number of GPUs over which an engine splits each layer. The default is the engine's GPUs divided by
    the data and pipeline parallel sizes."""
    other = (_given_parallel(config, "data_parallel_size") or 1) * (
        _given_parallel(config, "pipeline_parallel_size") or 1
    )
    return _given_parallel(config, "tensor_parallel_size") or max(
        config.cluster.rollout_num_gpus_per_engine // other, 1
    )


def check_engine_size(config: Config) -> None:
    """Checks that the parallel sizes given to vLLM multiply to --rollout-num-gpus-per-engine."""
    names = ("data_parallel_size", "pipeline_parallel_size")
    data, pipeline = (_given_parallel(config, name) or 1 for name in names)
    tensor = engine_tensor_parallel(config)
    if data * pipeline * tensor != config.cluster.rollout_num_gpus_per_engine:
        raise ValueError(
            "--rollout-num-gpus-per-engine must equal the product of --vllm-tensor-parallel-size, "
            "--vllm-pipeline-parallel-size and --vllm-data-parallel-size, got "
            f"{config.cluster.rollout_num_gpus_per_engine} and {tensor} * {pipeline} * {data} = "
            f"{tensor * pipeline * data}"
        )


def check_engine_nodes(config: Config) -> None:
    """Checks an engine of several nodes. It runs in vLLM's multi-node mode, with one model over all its GPUs."""
    if not config.num_engines or config.nodes_per_engine == 1:
        return
    spread = f"an engine of {config.nodes_per_engine} nodes (--num-gpus-per-node {config.cluster.num_gpus_per_node})"
    if (backend := config.engine.backend_args.get("distributed_executor_backend", "mp")) != "mp":
        raise ValueError(
            f"--vllm-distributed-executor-backend must be mp with {spread}, got {backend}; leave the flag out"
        )
    if (replicas := _given_parallel(config, "data_parallel_size") or 1) > 1:
        raise ValueError(
            f"--vllm-data-parallel-size must be 1 with {spread}, got {replicas}; lower --rollout-num-gpus-per-engine, "
            "which gives more engines"
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
    raise ValueError(
        f"{flag} must divide the model's {heads} attention heads"
        f"{f' and fit its {shared} key/value heads' if heads % size == 0 else ''}, got {size}; "
        f"use {' or '.join(map(str, near))}"
    )


def check_weight_channel(config: Config) -> None:
    """Checks that the weight channel and --check-weight-update-equal work with the engine's parallel sizes.

    A broadcast numbers the workers of an engine by their tensor-parallel rank. Data-parallel replicas and pipeline
    stages repeat these ranks, so a broadcast needs engines that are tensor parallel only. With the other channels, a
    worker needs no rank to find the files or the shared GPU memory. A pipeline stage loads only its own layers, but
    --check-weight-update-equal compares every tensor of an update on every worker.
    """
    data, pipeline = (_given_parallel(config, f"{name}_parallel_size") or 1 for name in ("data", "pipeline"))
    transport = config.weight_update.update_weight_transport
    if CHANNELS[transport].tensor_parallel_only and data * pipeline > 1:
        raise ValueError(
            f"--update-weight-transport {transport} must go with engines that are tensor parallel only, got "
            f"--vllm-data-parallel-size {data} and --vllm-pipeline-parallel-size {pipeline}; use disk, or more "
            "engines of fewer GPUs"
        )
    if config.weight_update.check_weight_update_equal and pipeline > 1:
        raise ValueError(
            "--check-weight-update-equal must go with engines of one pipeline stage, got "
            f"--vllm-pipeline-parallel-size {pipeline}; leave out one of the two"
        )


def check_context_length(config: Config) -> None:
    """Checks that --vllm-max-model-len, if given as a number, is at least the longest sequence of a rollout."""
    longest = config.rollout.rollout_max_context_len or config.rollout.rollout_max_response_len
    limit = config.engine.engine_facts.context
    if limit is not None and longest is not None and limit < longest:
        raise ValueError(
            f"--vllm-max-model-len must hold the longest rollout, got {limit} for {longest} tokens; "
            "raise it or lower --rollout-max-response-len"
        )


def common_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of an engine server of any backend: keyword arguments of
    `vime.pool.engine_server.EngineSpec`."""
    return {
        "model_path": config.rollout.hf_checkpoint,
        "weight_dir": config.weight_update.weight_dir,
        "local_checkpoint_dir": config.weight_update.update_weight_local_checkpoint_dir,
        "device": config.cluster.device,
        "dtype": config.megatron.params_dtype,
        "tensor_parallel_size": engine_tensor_parallel(config),
        "trust_remote_code": config.train.trust_remote_code,
        "env": config.engine.backend_env if config.cluster.device == "cuda" else {},
        "start_timeout_s": config.fault_tolerance.engine_start_timeout_s,
        "nodes": config.nodes_per_engine,
    }


def engine_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of every vLLM server, as fields of `vime.vllm.server.VllmSpec`. `vllm_argv` overrides the
    others."""
    on_cpu = config.cluster.device == "cpu"
    return common_settings(config) | {
        "vllm_argv": tuple(fp8.in_blocks(config.engine.backend_argv)),
        "sleeps": gives_memory(config),
        **adapter.settings(config),
        "bitwise": operators.bitwise(config),
        "tells_experts": config.off_policy.use_rollout_routing_replay,
        "top_tokens": top_tokens_of_policy(config),
        "cache_bytes": _cache_bytes(config),
        # GPUs also serve frozen models of families that are not trained here
        "stateful": on_cpu and decoder_of(read_hf_config(config.rollout.hf_checkpoint)).stateful,
    }


def _cache_bytes(config: Config) -> int:
    """Returns the cache bytes of an engine on CPUs that runs all requests of a rollout at once."""
    checkpoint, batch = config.rollout.hf_checkpoint, config.data.rollout_batch_size
    longest = config.rollout.rollout_max_response_len or 0
    at_once = (batch or cpu_engine.MOST_REQUESTS) * config.data.n_samples_per_prompt
    return cpu_engine.cache_bytes(read_hf_config(checkpoint), longest, at_once)


def gives_memory(config: Config) -> bool:
    """Returns True if engines free their device memory while the trainer uses the device; see VllmEnginePool."""
    return config.cluster.colocate and config.cluster.device == "cuda"


def engine_dtype(config: Config) -> str:
    """Returns torch's name of the dtype in which engines compute. Code that compares log-probs needs this name.

    With --vllm-quantization the name ends in "+" and the quantization. "auto" stays "auto", because only the engine
    then determines its dtype.
    """
    given = config.engine.backend_args.get("dtype") or config.megatron.params_dtype
    quantization = config.engine.backend_args.get("quantization")
    return _DTYPE_ALIASES.get(given, given) + (f"+{quantization}" if quantization else "")


_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
