"""Tests names of vLLM that no type checker sees: routes, flags, variables, and attributes that it adds to a model's
modules.

The tests check them in the vLLM that is first on the path: the installed vLLM, and the oldest in test_vllm_oldest.
"""

from __future__ import annotations

import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import uvicorn
import vllm
import vllm_names
from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from slime.rollout.sampling import NAMES
from vime.pool.asgi import KEY_VARIABLE
from vime.pool.control import ControlError, request
from vime.vllm.control import GAUGES, VllmControl
from vime.vllm.cpu import draft as cpu_draft
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import VLLM, VLLM_RESERVED, vllm_parser
from vime.vllm.versions import installed
from vime.vllm.worker.live_quantized import _PLAIN_KERNELS

KEY = "k"
FOLDER = Path(vllm.__file__).parent


def spec(**more: Any) -> VllmSpec:
    return VllmSpec(model_path="m", log_path="l", weight_dir="/w", run_key=KEY, port=9, **more)


SPECS = {
    "cpu": spec(stateful=True, sleeps=True),
    "cuda": spec(device="cuda", dtype="bfloat16", sleeps=True, reports_experts=True, trust_remote_code=True),
    "drafts": spec(vllm_argv=("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')),
    "no log": spec(vllm_argv=("--disable-log-stats",)),
    "whole images": spec(whole_images=True),
    "first node": spec(device="cuda", nodes=2),
    "second node": spec(device="cuda", nodes=2, node=1),
}


@pytest.mark.parametrize("kind", SPECS)
def test_every_server_is_started_with_flags_that_it_knows(kind: str) -> None:
    server = VllmServer(SPECS[kind])
    server._master = "127.0.0.1:29500"
    parsed = vllm_parser().parse_args(server.command()[4:])
    assert (parsed.model, parsed.served_model_name, parsed.port) == ("m", ["policy"], 9)
    assert parsed.disable_chunked_mm_input == SPECS[kind].whole_images
    assert parsed.weight_transfer_config.backend == "vime" and parsed.logprobs_mode == "processed_logprobs"


def test_settings_that_this_project_makes_are_flags() -> None:
    """The oldest vLLM lacks one flag: its towers take pixels that the processor has normalised."""
    lacks = {"mm_device_do_normalize"} if installed() == vllm_names.OLDEST else set()
    assert VLLM_RESERVED.keys() - {action.dest for action in vllm_parser()._actions} == lacks


def test_flags_of_our_commands_and_pages_are_flags_of_vllm() -> None:
    found = vllm_names.shipped_options()
    assert {"max_model_len", "gpu_memory_utilization", "quantization"} <= found
    assert not found - VLLM.options().keys()


def test_variables_are_those_that_vllm_reads() -> None:
    found = vllm_names.variables()
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_HOST_IP", "VLLM_WORKER_MULTIPROC_METHOD"} <= found
    assert not found - envs.environment_variables.keys()


def test_sampling_parameters_are_arguments() -> None:
    given = {
        *NAMES.values(),
        "seed",
        "include_stop_str_in_output",
        "logprobs",
        "prompt_logprobs",
        "output_kind",
    }
    assert (
        not (given | {"skip_clone", "max_tokens"})
        - inspect.signature(SamplingParams.from_optional).parameters.keys()
    )


def test_modules_have_the_attributes_by_which_a_live_model_is_read() -> None:
    assert not vllm_names.unnamed_attributes(), "add each to a table of vllm_names"
    assert not vllm_names.missing_attributes(FOLDER, vllm_names.GIVEN)
    if installed() != vllm_names.OLDEST:
        assert not vllm_names.missing_attributes(FOLDER, vllm_names.NEWER)


def test_kernels_of_fp8_have_the_names_by_which_they_are_known() -> None:
    text = "".join(
        file.read_text() for file in (FOLDER / "model_executor" / "kernels" / "linear").rglob("*.py")
    )
    assert not [
        name for name in {*_PLAIN_KERNELS[1:]} - vllm_names.NEWER.keys() if f"class {name}(" not in text
    ]


def test_what_replaces_a_function_of_vllm_has_the_names_of_its_arguments() -> None:
    """vLLM calls them with these names. If a replacement has types, the type checker compares them."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
    from vllm.utils import cpu_triton_utils

    assert arguments(cpu_draft.expand) == arguments(cpu_triton_utils._expand_kernel_impl)
    assert len(arguments(finalize_layerwise_processing)) == 2
    if installed() != vllm_names.OLDEST:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        assert {"expert_map", "topk_weights", "topk_ids"} <= set(arguments(CPUUnquantizedExperts.apply))


def arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def engine() -> Any:
    """Returns a double that has only the methods of vLLM's engine client with their arguments."""
    double = create_autospec(AsyncLLM, instance=True)
    double.output_handler = None
    double.output_processor = SimpleNamespace(
        request_states={"one": SimpleNamespace(detokenizer=None, lora_name=None)}, parent_requests={}
    )
    double.reset_prefix_cache.return_value = True
    double.wake_up.return_value = True
    double.is_paused.return_value = False  # otherwise the middleware resets the cache again (return_cache)
    return double


@pytest.fixture(scope="module")
def url(engine: Any) -> Iterator[str]:
    """Serves vLLM's own routes in front of the double, as this project's servers do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        app = vllm_names.app_of(
            vllm_parser().parse_args(["--middleware", "vime.vllm.worker.middleware.RunKeyMiddleware"])
        )
        app.state.engine_client = engine
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
        listening.close()


PART = {"channel": "disk", "info": {"path": "w"}}
CALLS: dict[str, tuple[Callable[[VllmControl], Any], str, tuple[Any, ...]]] = {
    "keep": (lambda control: control.pause("keep"), "pause_generation", ("keep",)),
    "abort": (lambda control: control.pause("abort"), "pause_generation", ("abort",)),
    "wait": (lambda control: control.pause("wait"), "pause_generation", ("wait",)),
    "resume": (VllmControl.resume, "resume_generation", ()),
    "start": (VllmControl.start_weight_update, "start_weight_update", ()),
    "update": (lambda control: control.update_weights(PART), "update_weights", ()),
    "finish": (lambda control: control.finish_weight_update(7), "finish_weight_update", ()),
    "reset": (VllmControl.reset_prefix_cache, "reset_prefix_cache", (True,)),
    "sleep": (lambda control: control.sleep(2), "sleep", (2, "keep")),
    "wake": (lambda control: control.wake(["weights", "kv_cache"]), "wake_up", (["weights", "kv_cache"],)),
    "abort all": (lambda control: control._post("/abort_requests", {}), "abort", (["one"], True)),
}
"""A call of this project's client, the method of vLLM's engine that it reaches, and the arguments that the method
must get."""


@pytest.mark.parametrize("call", CALLS)
def test_each_call_of_our_client_reaches_the_engine(call: str, url: str, engine: Any) -> None:
    """vLLM's own routes read each call's path, query and body, and the client reads the answer."""
    made, name, wanted = CALLS[call]
    method = getattr(engine, name)
    method.reset_mock()
    made(VllmControl(url, KEY))
    method.assert_awaited_once()
    got = [*method.await_args.args, *method.await_args.kwargs.values()]
    assert all(argument in got for argument in wanted)
    if call == "update":
        assert [request.update_info for request in got] == [PART]


def test_routes_that_are_asked_elsewhere(url: str) -> None:
    control = VllmControl(url, KEY)
    assert control.is_healthy(9) and control.weight_version() >= -1
    for path in ("/v1/completions", "/inference/v1/generate"):
        # The body is missing, but the route exists.
        with pytest.raises(ControlError, match=r"got HTTP (?!404)"):
            request(url, KEY, "POST", path, {}, timeout_s=9)
    for path in ("/v1/models", "/metrics"):  # `model` and `load` read these; the double has no models
        try:
            request(url, KEY, "GET", path, timeout_s=9)
        except ControlError as error:
            assert "got HTTP 404" not in str(error)
    logged = (Path(vllm.__file__).parent / "v1/metrics/loggers.py").read_text()
    assert all(f'"{name}"' in logged for name in GAUGES)
    with pytest.raises(ControlError, match="got HTTP 404"):
        request(url, KEY, "POST", "/pauses", timeout_s=9)
