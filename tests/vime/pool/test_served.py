"""Frozen models beside the policy: the configuration of their engines, and the pool of all of them as one."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from config_cases import good_argv, write_model
from engine_double import DoubleServer

from slime.protocols import NoEngines
from vime.backends import models_of, parse_config, require_reachable
from vime.plan import describe
from vime.pool.router import RouterSpec
from vime.pool.served import ServedModels
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

KEY = "served-key"


def argv(root: Path, *more: str) -> list[str]:
    teacher = write_model(root / "teacher", num_hidden_layers=6)
    flags = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-model", f"math={teacher}", str(teacher)]
    return [*good_argv(root), *flags, "--opd-top-k", "50", "--rollout-temperature", "0.7", *more]


def test_the_engines_of_a_teacher_have_their_own_settings(tmp_path: Path) -> None:
    policys = ("--vllm-max-num-seqs", "7", "--router-policy", "random", "--vllm-server-concurrency", "9")
    own = ("--opd-teacher-engine-args", "max-model-len=128", "enforce-eager")
    c = parse_config(argv(tmp_path, *policys, *own))
    (policy, _, same), (math, _, teachers), (default, _, _) = models_of(c)
    assert same is c and (policy.name, math.name, default.name) == (
        "policy",
        "teacher-math",
        "teacher-default",
    )
    settings = engine_settings(teachers)
    assert settings["model_path"] == math.checkpoint
    assert settings["vllm_argv"] == ("--max-model-len", "128", "--enforce-eager")
    assert (teachers.engine.router_argv, teachers.cluster.colocate) == ([], False)
    spec = VllmSpec(
        **settings | {"top_tokens": math.top_tokens, "temperature": math.temperature},
        run_key="",
        log_path="",
    )
    assert "--max-logprobs 50" in " ".join(VllmServer(spec).command())
    assert VllmServer(spec).environment()["VIME_LOGITS_TEMPERATURE"] == "0.7"
    assert (
        "VIME_LOGITS_TEMPERATURE"
        not in VllmServer(VllmSpec(**settings, run_key="", log_path="")).environment()
    )


def test_a_teacher_on_sglang(tmp_path: Path) -> None:
    """Its engines are SGLang's beside the policy's of vLLM; they are not installed here."""
    given = argv(tmp_path, "--opd-teacher-engine-args", "mem-fraction-static=0.5")
    given[given.index("--opd-type") + 1], given[given.index("--rollout-temperature") + 1] = "sglang", "1"
    c = parse_config(given)
    (_, policys, _), (teacher, backend, own), _ = models_of(c)
    assert (policys.name, backend.name, teacher.temperature) == ("vllm", "sglang", 1.0)
    assert own.engine.backend_argv == ["--mem-fraction-static", "0.5"]
    assert (own.engine.engine_facts.memory_share, own.engine.rollout_backend) == (0.5, "sglang")
    with pytest.raises(ValueError, match="--opd-type sglang must find sglang, got none installed"):
        require_reachable(c)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--opd-teacher-engine-args", "max-len=1"),
            "--opd-teacher-engine-args max-len=1 is not a flag of vLLM",
        ),
        (("--opd-teacher-engine-args", "model=x"), "model=x must be left out; engines serve --opd-teacher-model"),
        (
            ("--opd-teacher-num-gpus-per-engine", "3"),
            "the engines of teacher-math must fit their model, got: --opd-teacher-num-gpus-per-engine must divide",
        ),
        (
            ("--opd-teacher-engine-args", "max-model-len=4"),
            "got: --opd-teacher-engine-args max-model-len must hold the longest rollout, got 4",
        ),
    ],
)
def test_what_a_teachers_engines_cannot_be(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_config(argv(tmp_path, *flags))
    assert said in str(error.value)


def test_the_plan_has_all_models(tmp_path: Path) -> None:
    told = describe(parse_config(argv(tmp_path, "--device", "cuda")), 80 * 2**30, [])
    lines = [line.strip() for line in told.splitlines()]
    assert any(
        line.startswith("teacher-math 1 vLLM server x 1 cuda, behind one vllm-router") for line in lines
    )
    assert any(line.startswith("needs     4 GPUs") for line in lines)
    first = lines.index("Memory of an engine of teacher-default, per GPU")
    assert lines[first + 1].startswith("weights")
    assert any(line.startswith("logits") and "2048 tokens x 64 x 10 B" in line for line in lines[first:])
    assert any("fits a GPU of 80 GiB" in line for line in lines[first:])


def test_pools_start_together_and_end_together(tmp_path: Path) -> None:
    """The trainer is waited for while the servers of all models run; a teacher's engine may restart again after each
    update."""

    def pool(name: str) -> VllmEnginePool:
        spec = VllmSpec(
            model_path="",
            run_key=KEY,
            log_path=str(tmp_path / f"{name}.log"),
            weight_dir=str(tmp_path),
            start_timeout_s=30,
        )
        router = RouterSpec(run_key=KEY, log_path=str(tmp_path / f"{name}-router.log"))
        return VllmEnginePool([spec], router, spawn=DoubleServer, health_check_interval_s=0.5, max_restarts=1)

    math, code = pool("math"), pool("code")
    all_of_them = ServedModels(NoEngines(), {"teacher-math": math, "teacher-code": code})
    seen: list[bool] = []

    def meanwhile(check: object) -> None:
        assert callable(check)
        check()
        seen.extend(one._members[0].handle is not None for one in (math, code))

    try:
        all_of_them.start(meanwhile)
        assert seen == [True, True] and len(math.engine_urls) == len(code.engine_urls) == 1
        clients = all_of_them.facts["frozen_engines"]
        assert {name: client.router_url for name, client in clients.items()} == {
            "teacher-math": math.router_url,
            "teacher-code": code.router_url,
        }
        for _ in range(2):
            before = math.engine_urls
            psutil.Process(math._members[0].handle._process.pid).kill()
            end = time.monotonic() + 30
            while math.engine_urls in (before, []):
                assert time.monotonic() < end
                time.sleep(0.05)
            all_of_them.check_health()
            assert math._members[0].restarts == 1
            all_of_them.publish(1)
            assert math._members[0].restarts == 0
    finally:
        all_of_them.stop()
    assert all(one._members[0].handle.poll() is not None for one in (math, code))


def test_a_failed_start_ends_all(tmp_path: Path) -> None:
    def fails(check: object) -> None:
        raise RuntimeError("the trainer failed")

    spec = VllmSpec(model_path="", run_key=KEY, log_path=str(tmp_path / "t.log"), weight_dir=str(tmp_path))
    router = RouterSpec(run_key=KEY, log_path=str(tmp_path / "r.log"))
    teacher = VllmEnginePool([spec], router, spawn=DoubleServer)
    pools = ServedModels(NoEngines(), {"teacher-default": teacher})
    with pytest.raises(RuntimeError, match="the trainer failed"):
        pools.start(fails)
    assert teacher._members[0].handle.poll() is not None
    pools.stop()
