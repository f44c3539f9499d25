"""Tests --rollout-backend sglang: its flags, its server's command line, and the parsing of answers. With an engine:
e2e/engines/conformance/test_backend_conformance.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_cases import good_argv

from slime.checkpoints.divergence import DivergedError
from slime.config import Config
from slime.protocols import WeightUpdate
from slime.weight_sync.transfer import load
from vime import backends
from vime.commands import serve
from vime.plan.command import topology
from vime.pool.control import ControlError
from vime.pool.router_client import Transient
from vime.sglang.client import PARAMETERS, Answer, parse_result, request_params
from vime.sglang.control import SglangControl
from vime.sglang.server import SglangServer, SglangSpec

SGLANG = ["--rollout-backend", "sglang"]


def parsed(root: Path, *more: str) -> Config:
    return backends.parse_config([*good_argv(root), *SGLANG, *more])


def test_flags_reach_sglang_as_they_stand(tmp_path: Path) -> None:
    c = parsed(
        tmp_path,
        *(
            "--sglang-mem-fraction-static",
            "0.7",
            "--sglang-enable-metrics",
            "--sglang-cuda-graph-bs",
            "1",
            "2",
        ),
        *(
            "--sglang-server-concurrency",
            "9",
            "--sglang-router-policy",
            "cache_aware",
            "--router-log-level",
            "info",
        ),
    )
    assert c.engine.backend_argv == [
        *("--mem-fraction-static", "0.7", "--enable-metrics", "--cuda-graph-bs", "1", "2")
    ]
    assert c.engine.router_argv == ["--policy", "cache_aware", "--log-level", "info"]
    facts = c.engine.engine_facts
    assert (facts.project, facts.router, facts.memory_share) == ("SGLang", "sglang-router", 0.7)
    assert c.engine.server_concurrency == 9 and c.weight_update.update_weight_transport == "disk"
    args = c.namespace()
    assert (args.sglang_server_concurrency, args.sglang_mem_fraction_static) == (9, "0.7")
    assert args.sglang_enable_metrics is True and args.sglang_router_ip is None
    notes = "\n".join(c.notes)
    assert "never against a SGLang server" in notes and "SGLang ignores the seeds" in notes
    c.save_json(tmp_path / "saved.json")
    assert Config.from_dict(json.loads((tmp_path / "saved.json").read_text())) == c


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--vllm-max-num-seqs 3", "--vllm-max-num-seqs must be left out with --rollout-backend sglang"),
        (
            "--sglang-api-key x",
            "--sglang-api-key must be left out; every server of a run gets the run's own key",
        ),
        ("--sglang-tp-size 2", "--sglang-tp-size must be left out; an engine splits each layer"),
        ("--sglang-config x.yaml", "--sglang-config must name a file, got x.yaml (No such file"),
        ("--sglang-mem-fraction-static x", "--sglang-mem-fraction-static must be a number, got x"),
        ("--sglang-server-concurrency 0", "--sglang-server-concurrency must be above 0, got 0"),
        ("--sglang-router-ip 127.0.0.1", "the run starts its own sglang-router"),
        (
            "--router-polcy random",
            "--router-polcy is not a flag of sglang-router; did you mean --router-policy",
        ),
        (
            "--update-weight-transport nccl --no-colocate --rollout-num-gpus 1",
            "must be disk with --rollout-backend",
        ),
        (
            "--check-weight-update-equal",
            "--check-weight-update-equal must go with --rollout-backend vllm, got sglang",
        ),
        ("--use-rollout-routing-replay", "--use-rollout-routing-replay must go with --rollout-backend vllm"),
        (
            "--device cuda --update-weight-transport disk",
            "--colocate on GPUs must go with --rollout-backend vllm",
        ),
    ],
)
def test_what_sglang_does_not_do_is_one_line(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        parsed(tmp_path, *more.split())
    assert said in str(error.value)


def test_a_run_needs_sglang_or_servers_started_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="must find sglang, got none installed; pip install sglang, or name engines"
    ):
        backends.BACKENDS["sglang"].require_reachable(parsed(tmp_path))
    monkeypatch.setenv("VIME_RUN_KEY", "k" * 64)
    apart = ("--no-colocate", "--rollout-external-engine-addrs", "127.0.0.1:9", "--weight-dir", str(tmp_path))
    with pytest.raises(ValueError, match=r"must answer at 127\.0\.0\.1:9"):
        backends.BACKENDS["sglang"].require_reachable(parsed(tmp_path, *apart))
    with pytest.raises(
        ValueError, match="vime serve must be given engines of --rollout-backend vllm, got sglang"
    ):
        serve.main(["engine", "127.0.0.1:9", *good_argv(tmp_path), *SGLANG, *apart])


def test_the_plan_shows_the_servers_options(tmp_path: Path) -> None:
    c = parsed(tmp_path, "--sglang-page-size", "16", "--router-log-level", "info")
    assert "engines   2 SGLang servers x 1 cpu, behind one sglang-router" in list(topology(c))
    lines = [" ".join(line.split()) for line in backends.backend_for(c).command_lines(c)]
    assert "--sglang-page-size SGLang --page-size 16" in lines
    assert "(set for you) SGLang --tp-size 1" in lines
    assert "--router-log-level sglang-router --log-level info" in lines


def spec(root: Path, **more: Any) -> SglangSpec:
    return SglangSpec(
        model_path="m", weight_dir="w", run_key="s3cret" * 8, log_path=str(root / "log"), port=7, **more
    )


def test_the_servers_command_has_no_key(tmp_path: Path) -> None:
    server = SglangServer(
        spec(tmp_path, dtype="bfloat16", device="cuda", sglang_argv=("--dtype", "half"), env={"A": "1"})
    )
    assert server.command()[1:] == [
        *("-m", "vime.sglang.serve", "--model-path", "m", "--host", "127.0.0.1", "--port", "7"),
        *("--tp-size", "1", "--device", "cuda", "--dtype", "half"),
    ]
    made = server.environment()
    assert (made["A"], made["VIME_RUN_KEY"]) == ("1", "s3cret" * 8)
    assert made["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


def test_sglang_gets_the_key_and_logs_none(tmp_path: Path) -> None:
    """`sglang` is a folder with a launch_server here, because SGLang has no build for CPUs."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/launch_server.py").write_text(
        "import logging, pathlib, sys\n"
        "logging.basicConfig(level=20, force=True)\n"
        "logging.info('args=%s', sys.argv)\n"
        "logging.info('a line of 7')\n"
        "print(len(sys.argv[-1]), 's3cret' in pathlib.Path('/proc/self/cmdline').read_text(), sys.argv[1:-1])\n"
    )
    server = SglangServer(spec(tmp_path))
    path = {**server.environment(), "PYTHONPATH": f"{tmp_path}:{server.environment()['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, *server.command()[1:]], env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("48 False ['--model-path', 'm',") and "'--api-key']" in done.stdout
    assert (
        "s3cret" not in done.stderr and "'--api-key', '***'" in done.stderr and "a line of 7" in done.stderr
    )


def answer(**meta: Any) -> Answer:
    rows = [[-0.5, 3, None], [-0.25, 4, None]]
    record = {
        "text": "ab",
        "output_ids": [3, 4],
        "meta_info": {"finish_reason": {"type": "stop", "matched": 4}, "output_token_logprobs": rows} | meta,
    }
    return msgspec.json.decode(json.dumps(record), type=Answer)


@pytest.mark.parametrize(
    ("meta", "versions", "of_tokens"),
    [
        ({}, [-1], [-1, -1]),
        ({"weight_version": "default"}, [-1], [-1, -1]),
        ({"weight_version": "4"}, [4], [4, 4]),
        (
            {"weight_version": 4, "weight_versions": [{"version": 4, "start": 0, "end": 2}]},
            [4],
            [4, 4],
        ),
        (
            {
                "weight_version": "4",
                "weight_versions": [
                    {"version": "default", "start": 0, "end": 1},
                    {"version": "4", "start": 1, "end": 2},
                ],
            },
            [-1, 4],
            [-1, 4],
        ),
    ],
)
def test_the_versions_of_an_answer(meta: dict[str, Any], versions: list[int], of_tokens: list[int]) -> None:
    result = parse_result(answer(prompt_tokens=6, cached_tokens=2, **meta))
    assert result.weight_versions == versions
    assert result.token_columns == {"token_versions": of_tokens}
    assert (result.token_ids, result.log_probs, result.text) == ([3, 4], [-0.5, -0.25], "ab")
    assert (result.finish_reason, result.prompt_tokens, result.cached_tokens) == ("stop", 6, 2)


def test_what_an_answer_may_lack() -> None:
    empty = answer(finish_reason={"type": "abort", "message": "in the queue"}, output_token_logprobs=[])
    empty.output_ids = []
    assert (parse_result(empty).finish_reason, parse_result(empty).token_ids) == ("abort", [])
    with pytest.raises(ValueError, match="one log-prob per token, got 1 for 2 tokens"):
        parse_result(answer(output_token_logprobs=[[-0.5, 3, None]]))
    with pytest.raises(
        DivergedError, match="got nan at token 1 of a response with the weights after rollout 2"
    ):
        parse_result(answer(output_token_logprobs=[[-0.5, 3, None], [None, 4, None]], weight_version="3"))
    with pytest.raises(Transient, match="gave the request up"):
        parse_result(answer(finish_reason={"type": "abort", "message": "no memory", "status_code": 503}))
    with pytest.raises(ValueError, match="finish_reason must be one of"):
        parse_result(answer(finish_reason={"type": "odd"}))


def test_the_parameters_of_a_request() -> None:
    given = {"max_new_tokens": 5, "top_p": None, "temperature": 0.5, "spaces_between_special_tokens": False}
    assert request_params(given) == {
        "no_stop_trim": True,
        "max_new_tokens": 5,
        "temperature": 0.5,
    }
    with pytest.raises(
        ValueError, match="max_new_tokens must be given, got none; SGLang would stop after 128"
    ):
        request_params({"temperature": 1.0})
    with pytest.raises(ValueError, match=r"must be among \[.*\], got \['logit_bias'\]"):
        request_params({"max_new_tokens": 1, "logit_bias": {"1": 1.0}})  # sglang-router drops it
    assert "seed" not in PARAMETERS


def test_parts_of_another_channel_and_modes_that_sglang_lacks() -> None:
    control = SglangControl("http://127.0.0.1:9", "k")
    with pytest.raises(
        ValueError, match="--update-weight-transport must be disk with SGLang's engines, got ipc"
    ):
        control.update_weights({"channel": "ipc", "info": {}})
    with pytest.raises(ValueError, match="mode must be one of keep, abort, got wait"):
        control.pause("wait")


class Recorder(ThreadingHTTPServer):
    """A server that records path and body per POST, and always answers with `answer`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.seen: list[tuple[str, Any]] = []
        self.answer: dict[str, Any] = {"success": True, "weight_version": "default"}

    class Handler(BaseHTTPRequestHandler):
        server: Recorder

        def do_GET(self) -> None:
            body = json.dumps(self.server.answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.server.seen.append((self.path, json.loads(self.rfile.read(size))))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None: ...


def test_an_update_on_a_paused_engine_and_on_one_that_joins() -> None:
    server = Recorder()
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        control = SglangControl(f"http://127.0.0.1:{server.server_port}", "k")
        update = WeightUpdate(5, "disk", {"path": "/w/weights-5/model.safetensors"})
        control.pause()
        load(control, update)
        control.resume()
        load(control, update)
        asked = {"model_path": "/w/weights-5", "weight_version": "5", "flush_cache": True}
        assert server.seen == [
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", {**asked, "keep_pause": True}),
            ("/flush_cache", {}),
            ("/continue_generation", {}),
            ("/update_weights_from_disk", {**asked, "keep_pause": False}),
            ("/flush_cache", {}),
        ]
        assert control.weight_version() == -1
        server.answer = {"success": False, "message": "no such file"}
        with pytest.raises(ControlError, match="must load /w/weights-5, got .*no such file"):
            load(control, update)
        server.shutdown()
