"""Import paths of slime and of upstream vime that are no files here: other names of modules, and refused names.
Also a package that slime's plug-ins import.

`import slime` installs one finder behind the normal ones, so a file comes first. A path of `MOVED` is another name of
one of our modules. A path of `REFUSED` is a module whose names can be imported: a plug-in that imports such a name and
never calls it runs unchanged. A call of the name, an instance or a derived class raises ValueError with the remedy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_PROCESSES = "`vime train` places and starts the processes of a run; from Python, call vime.train"
_ENGINES = "vime starts the engines, and the router of the run takes the requests (docs/hooks.md)"
_FLAGS = "`vime train` parses the flags, `vime plan` checks them, and a hook gets them as args"
_LOG = "log numbers with slime.utils.logging_utils.log"
_TRAINER = "the trainer of `vime train` builds the model and moves its data; docs/hooks.md lists the hooks of training"
_SESSIONS = "the run's sessions take the requests of an agent: derive from BaseAdapter, or see docs/agents.md"
_CHECKPOINTS = "a run loads and saves its checkpoints itself; `vime export` writes Hugging Face's files"
_TIMES = "vime measures the parts of a step (perf/*_time)"
_ASYNC = "set --max-staleness: the default rollout function then generates ahead of training"
_SAVED = "--load-debug-rollout-data trains on saved rollouts, without engines"
_TRACES = (
    "--otlp-traces-endpoint sends the spans of trace_span and trace_event from the process of the rollouts"
)
_PROFILE = "--profile-steps A:B traces the training of those rollouts"
_FILES = "--save-debug-rollout-data writes the samples of a rollout, and --load-debug-rollout-data reads them"
_GROUPS = "torch.distributed makes groups; the trainer has made its own (megatron.core.parallel_state)"

PACKAGES = {"qwen_vl_utils": "slime.plug_ins.qwen_vl_utils"}
"""Another package whose functions slime's plug-ins call -> our module with the same functions, if it is missing."""
MOVED = {
    "observability.trace_utils": "plug_ins.spans",
    "rollout.sglang_streaming_rollout": "rollout.vllm_rollout",
    "rollout.sleep_rollout": "plug_ins.rollouts",
    "utils.distributed_utils": "plug_ins.groups",
    "utils.iter_utils": "utils.misc",
    "utils.memory_utils": "plug_ins.memory",
    "utils.seqlen_balancing": "plug_ins.balancing",
    "utils.trace_utils": "plug_ins.spans",
    "utils.typer_utils": "utils.external_utils.typer_utils",
}
"""A path below `slime` -> the module of ours that it means."""

REMEDIES = {
    "backends": _ENGINES,
    "backends.megatron_utils": _TRAINER,
    "ray": _PROCESSES,
    "router": _ENGINES,
    "utils.arguments": _FLAGS,
    "utils.ray_utils": _PROCESSES,
    "utils.timer": _TIMES,
    "utils.wandb_utils": _LOG,
}
"""A module that this project does not have, or a package with such modules -> what to do instead. Newer versions have
some modules of `utils` below `observability`."""

REFUSED: dict[str, tuple[str, str]] = {
    "agent.adapters.common": (
        "ADAPTER_KEY REASONING_PARSER_KEY Reply Session TOKENIZER_KEY TOOL_PARSER_KEY "
        "call_sglang_generate call_vllm_generate",
        _SESSIONS,
    ),
    "agent.sandbox": ("DockerSandbox", "ContainerSandbox runs commands in a container (docs/hooks.md)"),
    "backends.megatron_utils.actor": ("MegatronTrainRayActor", _TRAINER),
    "backends.megatron_utils.arguments": (
        "megatron_parse_args set_default_megatron_args validate_args",
        _FLAGS,
    ),
    "backends.megatron_utils.checkpoint": ("load_checkpoint save_checkpoint", _CHECKPOINTS),
    "backends.megatron_utils.cp_utils": (
        "gather_and_reduce_log_dict get_chunked_loss_masks maybe_padded_total_lengths reduce_train_step_metrics",
        _TRAINER,
    ),
    "backends.megatron_utils.data": (
        "DataIterator gather_log_data get_batch get_data_iterator log_rollout_data",
        _TRAINER,
    ),
    "backends.megatron_utils.hf_checkpoint_saver": ("save_hf_model", _CHECKPOINTS),
    "backends.megatron_utils.initialize": ("init is_megatron_main_rank", _TRAINER),
    "backends.megatron_utils.loss": (
        "get_values loss_function sft_loss_function value_loss_function",
        _TRAINER,
    ),
    "backends.megatron_utils.megatron_to_hf": ("convert_to_hf", _CHECKPOINTS),
    "backends.megatron_utils.model": (
        "forward_only initialize_model_and_optimizer save train train_one_step",
        _TRAINER,
    ),
    "backends.megatron_utils.model_provider": ("LinearForLastLayer get_model_provider_func", _TRAINER),
    "backends.megatron_utils.update_weight.common": ("all_gather_param named_params_and_buffers", _TRAINER),
    "backends.sglang_utils.arguments": ("add_sglang_arguments sglang_parse_args validate_args", _ENGINES),
    "backends.sglang_utils.external": ("discover_external_engines get_server_info", _ENGINES),
    "backends.sglang_utils.sglang_config": ("ModelConfig ServerGroupConfig SglangConfig", _ENGINES),
    "backends.sglang_utils.sglang_engine": ("SGLangEngine launch_server_process", _ENGINES),
    "backends.vllm_utils.arguments": ("add_vllm_arguments validate_args vllm_parse_args", _ENGINES),
    "backends.vllm_utils.deployment": ("start_rollout_servers", _ENGINES),
    "backends.vllm_utils.external": ("discover_external_engines get_server_info", _ENGINES),
    "backends.vllm_utils.vllm_config": ("ModelConfig ServerGroupConfig VllmConfig", _ENGINES),
    "backends.vllm_utils.vllm_engine": ("VLLMEngine", _ENGINES),
    "data.archive": ("RolloutArchive", _FILES),
    "observability.logging_utils": ("finish_tracking init_tracking", _LOG),
    "observability.profile_utils": ("TrainProfiler", _PROFILE),
    "observability.rollout_data_utils": ("load_debug_rollout_data save_debug_rollout_data", _FILES),
    "observability.timer": ("Timer inverse_timer timer with_defer", _TIMES),
    "observability.wandb_utils": ("init_wandb_common init_wandb_primary init_wandb_secondary", _LOG),
    "plug_ins.groups": ("destroy_process_group init_gloo_group init_process_group", _GROUPS),
    "plug_ins.spans": ("bind_trace_carrier export_trace import_trace trace_next_attempt", _TRACES),
    "ray.actor_group": ("RayTrainGroup", _PROCESSES),
    "ray.buffer": (
        "Buffer",
        "derive your data source from slime.rollout.data_source.RolloutDataSourceWithBuffer",
    ),
    "ray.placement_group": (
        "allocate_train_group create_actor_group create_placement_groups create_rollout_manager "
        "create_training_group create_training_models",
        _PROCESSES,
    ),
    "ray.ray_actor": ("RayActor", _PROCESSES),
    "ray.rollout": ("RolloutManager RolloutServer ServerGroup", _PROCESSES),
    "ray.train_actor": ("TrainRayActor", _PROCESSES),
    "ray.utils": ("Lock add_default_ray_env_vars", _PROCESSES),
    "rollout.forge_load": ("generate_rollout", _SAVED),
    "rollout.fully_async_distributed": ("DistributedRollout RolloutScheduler", _ASYNC),
    "rollout.fully_async_rollout": ("AsyncRolloutWorker get_global_worker stop_global_worker", _ASYNC),
    "rollout.generate_hub.benchmarkers": (
        "generate_with_random_osl",
        "`vime bench` measures engines with responses of chosen lengths",
    ),
    "rollout.sglang_rollout": (
        "_apply_vllm_routed_experts",
        "call generate of this module, which makes the request and takes the answer",
    ),
    "router.middleware_hub.radix_tree_middleware": (
        "RadixTreeMiddleware postprocess_sample_with_radix_tree",
        _ENGINES,
    ),
    "router.router": ("SlimeRouter run_router", _ENGINES),
    "utils.arguments": (
        "get_slime_extra_args_provider parse_args parse_megatron_role_args reset_arg slime_validate_args",
        _FLAGS,
    ),
    "utils.data": ("get_minimum_num_micro_batch_size process_rollout_data", _TRAINER),
    "utils.flops_utils": (
        "calculate_fwd_flops",
        "vime reports the trainer's FLOPs (perf/actor_train_tflops)",
    ),
    "utils.health_monitor": ("RolloutHealthMonitor", _ENGINES),
    "utils.http_utils": ("run_router terminate_process", _ENGINES),
    "utils.misc": ("Box FunctionRegistry chunk_named_params_by_size function_registry", _PROCESSES),
    "utils.profile_utils": ("TrainProfiler", _PROFILE),
    "utils.ray_utils": ("Box", _PROCESSES),
    "utils.routing_replay": (
        "RoutingReplay get_routing_replay_compute_topk register_routing_replay",
        "--use-rollout-routing-replay replays the experts of the rollout",
    ),
    "utils.tensor_backper": ("TensorBackuper", _TRAINER),
    "utils.timer": ("Timer inverse_timer timer with_defer", _TIMES),
    "utils.tracking_utils": ("finish_tracking init_tracking", _LOG),
    "utils.train_metric_utils": ("log_perf_data_raw", _LOG),
    "utils.types": ("MultimodalTypes ParamInfo", _TRAINER),
    "utils.wandb_utils": ("init_wandb_common init_wandb_primary init_wandb_secondary", _LOG),
}
"""A path below `slime` -> its refused names, and what to do instead. A path of a file has further names that work."""


class RefusedName(type):
    """The class of each refused name: a class whose use raises ValueError, and whose attributes are refused, too."""

    remedy: str

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, object], **kwargs: object) -> None:
        super().__init__(name, bases, body)
        for base in bases:
            if isinstance(base, RefusedName):
                raise _error(base, "derived class")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise _error(cls, "call")

    def __getattr__(cls, name: str) -> RefusedName:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__module__}.{cls.__qualname__} has no attribute {name!r}", name=name)
        return _make(cls.__module__, f"{cls.__qualname__}.{name}", cls.remedy)


def _error(name: RefusedName, use: str) -> ValueError:
    return ValueError(f"{describe(name)} must not be used in vime, got a {use}; {name.remedy}")


def describe(name: RefusedName) -> str:
    """Returns the full path of a refused name."""
    return f"{name.__module__}.{name.__qualname__}"


def _make(module: str, name: str, remedy: str) -> RefusedName:
    return RefusedName(name, (), {"__module__": module, "remedy": remedy})


def refused_names(module: str) -> Callable[[str], RefusedName]:
    """Returns the `__getattr__` of a module of slime, such as "slime.utils.misc": it makes the module's refused
    names."""
    names, remedy = REFUSED[module.partition(".")[2]]

    def find(name: str) -> RefusedName:
        if name not in names.split():
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        return _make(module, name, remedy)

    return find


class Finder:
    """Finds and loads `PACKAGES` and the paths of `MOVED` and of `REFUSED`. It implements importlib.abc.MetaPathFinder
    and Loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a path below `slime` or of a package in `PACKAGES`, or None."""
        if name in PACKAGES:
            return ModuleSpec(name, self)  # type: ignore[arg-type]  # no instance of the abstract class
        root, _, rest = name.partition(".")
        if root != "slime" or not rest:
            return None
        package = any(other.startswith(f"{rest}.") for other in REFUSED)
        if rest not in MOVED and rest not in REFUSED and not package:
            return None
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]  # no instance of the abstract class

    def create_module(self, spec: ModuleSpec) -> None:
        """Does nothing. The import system makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module of refused names. A moved module is registered under its other name, too."""
        name = module.__name__
        rest = name.partition(".")[2]
        if name in PACKAGES:
            sys.modules[name] = importlib.import_module(PACKAGES[name])
        elif rest in MOVED:
            sys.modules[name] = importlib.import_module(f"slime.{MOVED[rest]}")
        elif rest in REFUSED:
            names, remedy = REFUSED[rest]
            for one in names.split():
                setattr(module, one, _make(name, one, remedy))


def install() -> None:
    """Adds the finder behind the others, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def remedy_for(path: str) -> str | None:
    """Returns what to do about a module below `slime` that does not exist, or None if `REMEDIES` does not have the
    module."""
    return REMEDIES.get(path.replace("observability.", "utils.", 1))


def package_remedy(path: str) -> str | None:
    """Returns what to do about any module of the longest package in `REMEDIES` that contains the module."""
    while path:
        if path in REMEDIES:
            return REMEDIES[path]
        path = path.rpartition(".")[0]
    return None
