"""Tests frozen models in addition to the policy: the configuration of their engines, and the pool that combines all
models."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
import yaml
from config_cases import good_argv, write_model
from engine_double import DoubleServer

from slime.config import Config
from slime.config.sections.off_policy import count_ties
from slime.data.limits.context import longest_sequence
from slime.plan.fit import MachineSizes
from slime.protocols import NoEngines
from slime.roles.served import ServedModel, served_models, teachers
from slime.rollout_backend import RolloutBackend
from vime.backends import parse_config, require_reachable, served_engines
from vime.plan.command import describe
from vime.pool.router import RouterSpec
from vime.pool.served import ServedModels
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

KEY = "served-key"


def parts_of(c: Config) -> list[tuple[ServedModel, RolloutBackend, Config]]:
    """The model, the backend and the settings of the engines of each served model."""
    return [(engines.model, engines.backend, engines.settings) for engines in served_engines(c)]


def argv(root: Path, *more: str) -> list[str]:
    teacher = write_model(root / "teacher", num_hidden_layers=6)
    flags = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-model", f"math={teacher}", str(teacher)]
    return [*good_argv(root), *flags, "--opd-top-k", "50", "--rollout-temperature", "0.7", *more]


def test_the_engines_of_a_teacher_have_their_own_settings(tmp_path: Path) -> None:
    policys = ("--vllm-max-num-seqs", "7", "--router-policy", "random", "--vllm-server-concurrency", "9")
    own = ("--opd-teacher-engine-args", "max-model-len=128", "enforce-eager")
    c = parse_config(argv(tmp_path, *policys, *own))
    (policy, _, same), (math, _, teachers), (default, _, _) = parts_of(c)
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
    assert '{"vime": {"temperature": 0.7}}' in VllmServer(spec).command()
    plain = VllmServer(VllmSpec(**settings, run_key="", log_path="")).command()
    assert "--additional-config" not in plain


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (("--use-score-centering", "--score-centering-top-k", "32"), 32),
        (("--replay-kept-tokens", "40", "--rollout-top-p", "0.9"), 40 + count_ties(40)),
        ((), 0),
    ],
)
def test_the_policys_engines_give_as_many_ids_as_its_loss_reads(tmp_path: Path, flags, number) -> None:
    """The plan shows the settings, and a pool has the settings of the model's record."""
    c = parse_config([*good_argv(tmp_path), *flags])
    ((policy, _, _),) = parts_of(c)
    assert policy.top_tokens == engine_settings(c)["top_tokens"] == number


def test_a_teacher_on_sglang(tmp_path: Path) -> None:
    """The teacher's engines are SGLang's, and the policy's are vLLM's; SGLang is not installed here."""
    given = argv(tmp_path, "--opd-teacher-engine-args", "mem-fraction-static=0.5")
    given[given.index("--opd-type") + 1], given[given.index("--rollout-temperature") + 1] = "sglang", "1"
    c = parse_config(given)
    (_, policys, _), (teacher, backend, own), _ = parts_of(c)
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
        (
            ("--opd-teacher-engine-args", "model=x"),
            "model=x must be left out; engines serve --opd-teacher-model",
        ),
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


def test_a_sample_may_be_as_long_as_its_teachers_can_score(tmp_path: Path) -> None:
    """A teacher generates one token more than it scores. Without a teacher, only the model's config.json counts."""
    plain = parse_config(good_argv(tmp_path))
    assert longest_sequence(plain) == (256, "max_position_embeddings")
    assert longest_sequence(parse_config([*good_argv(tmp_path), "--vllm-max-model-len", "128"])) == (
        *(128, "--vllm-max-model-len"),
    )
    same = parse_config(argv(tmp_path))
    assert longest_sequence(same) == (255, "one less than max_position_embeddings of teacher-math")
    shorter = parse_config(argv(tmp_path, "--opd-teacher-engine-args", "max-model-len=128"))
    said = "one less than --opd-teacher-engine-args max-model-len of teacher-math"
    assert longest_sequence(shorter) == (127, said) == longest_sequence(Config.from_args(shorter.namespace()))
    assert longest_sequence(parse_config(argv(tmp_path, "--vllm-max-model-len", "64"))) == (
        *(64, "--vllm-max-model-len"),
    )


def of_file(root: Path, judge: dict[str, object], *more: str, name: str = "judge") -> list[str]:
    """Returns the flags of a run whose file has an actor and one frozen model."""
    checkpoint = write_model(root / "judge", num_hidden_layers=6)
    actor = {"name": "actor", "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}
    group = {"worker_type": "regular", "num_gpus": 2, **judge}
    frozen = {"name": name, "model_path": str(checkpoint), "update_weights": False, "server_groups": [group]}
    (root / "models.yaml").write_text(yaml.safe_dump({"vllm": [actor, frozen]}))
    return [*good_argv(root), "--vllm-config", str(root / "models.yaml"), *more]


def test_a_judge_of_a_file(tmp_path: Path) -> None:
    """The judge has two engines, whose settings are those of its entry."""
    given = of_file(
        tmp_path, {"overrides": {"max-model-len": 128}}, "--device", "cuda", "--vllm-max-num-seqs", "7"
    )
    c = parse_config(given)
    (policy, _, _), (judge, _, own) = parts_of(c)
    assert (policy.name, judge.name, c.engine.policy_name) == ("policy", "judge", "actor")
    assert (judge.frozen, judge.temperature, own.num_engines) == (True, 1.0, 2)
    settings = engine_settings(own)
    assert settings["vllm_argv"] == ("--max-model-len", "128")
    assert settings["model_path"] == str(tmp_path / "judge")
    lines = [line.strip() for line in describe(c, MachineSizes(80 * 2**30), []).splitlines()]
    assert any(line.startswith("judge     2 vLLM servers x 1 cuda, behind one vllm-router") for line in lines)
    assert "Memory of an engine of judge, per GPU" in lines
    c.save_json(tmp_path / "saved.json")
    assert Config.from_dict(json.loads((tmp_path / "saved.json").read_text())) == c


def test_a_teacher_of_a_file(tmp_path: Path) -> None:
    """The entry replaces --opd-teacher-model."""
    flags = ("--use-opd", "--opd-type", "vllm", "--opd-top-k", "5", "--rollout-temperature", "0.7")
    c = parse_config(of_file(tmp_path, {}, *flags, name="teacher"))
    (model,) = teachers(c).values()
    assert list(teachers(c)) == ["default"] and (model.top_tokens, model.temperature) == (5, 0.7)
    own = str(tmp_path / "judge")
    with pytest.raises(ValueError, match=r"--opd-teacher-model and teacher-math in .* must not be combined"):
        parse_config(of_file(tmp_path, {}, *flags, "--opd-teacher-model", own, name="teacher-math"))
    with pytest.raises(
        ValueError, match=r"--opd-type must be vllm with teacher in .*models.yaml, got sglang"
    ):
        parse_config(of_file(tmp_path, {}, *flags[:3], "--opd-type", "sglang", name="teacher"))


def test_a_frozen_model_teaches_by_its_name(tmp_path: Path) -> None:
    """The model has one set of engines. Its settings are those of a teacher."""
    flags = ("--use-opd", "--opd-type", "vllm", "--opd-top-k", "5", "--rollout-temperature", "0.7")
    c = parse_config(of_file(tmp_path, {}, *flags, "--opd-teacher-model", "judge", name="judge"))
    assert list(teachers(c)) == ["default"] and len(served_models(c)) == 2
    (model,) = teachers(c).values()
    assert (model.name, model.top_tokens, model.temperature) == ("judge", 5, 0.7)
    assert model == served_models(c)[1] and model.file
    c = parse_config(of_file(tmp_path, {}, *flags, "--opd-teacher-model", "math=judge", name="judge"))
    assert {source: model.name for source, model in teachers(c).items()} == {"math": "judge"}
    c.save_json(tmp_path / "saved.json")
    assert teachers(Config.from_dict(json.loads((tmp_path / "saved.json").read_text()))) == teachers(c)
    own = str(tmp_path / "judge")
    for extra, said in (
        (
            ("--opd-teacher-num-gpus", "2"),
            "--opd-teacher-model must be given with --opd-teacher-num-gpus, got only 2",
        ),
        (
            ("--opd-teacher-model", "math=judge", own),
            "--opd-teacher-model and judge in .* must not be combined",
        ),
        (
            ("--opd-teacher-model", "jugde"),
            "--opd-teacher-model must name a Hugging Face directory, got jugde",
        ),
    ):
        named = ("--opd-teacher-model", "judge") if "num-gpus" in extra[0] else ()
        with pytest.raises(ValueError, match=said):
            parse_config(of_file(tmp_path, {}, *flags, *named, *extra, name="judge"))


@pytest.mark.parametrize(
    ("judge", "name", "said"),
    [
        (
            {"overrides": {"max-len": 1}},
            "judge",
            "overrides of judge in FILE: max-len=1 is not a flag of vLLM",
        ),
        (
            {"overrides": {"model": "x"}},
            "judge",
            "must be left out; engines serve model_path of judge in FILE",
        ),
        (
            {"num_gpus": 3, "num_gpus_per_engine": 3},
            "judge",
            "num_gpus_per_engine of judge in FILE must divide",
        ),
        (
            {"num_gpus": 3, "num_gpus_per_engine": 2},
            "judge",
            "num_gpus of judge in FILE must be a multiple of num_gpus_per_engine of judge in FILE, got 3",
        ),
        ({"overrides": {"max-model-len": 4}}, "judge", "overrides of judge in FILE: max-model-len must hold"),
        ({}, "policy", "name of a model in FILE must be given once, got policy"),
        ({}, "a judge", "FILE must have a name of letters, digits, dots and dashes"),
    ],
)
def test_what_a_model_of_a_file_cannot_be(
    tmp_path: Path, judge: dict[str, object], name: str, said: str
) -> None:
    with pytest.raises(ValueError) as error:
        parse_config(of_file(tmp_path, judge, name=name))
    assert said in str(error.value).replace(str(tmp_path / "models.yaml"), "FILE")


def test_engines_for_prefill_and_decode_are_planned(tmp_path: Path) -> None:
    flags = ("--device", "cuda", "--no-colocate", "--rollout-num-gpus", "3", "--prefill-num-servers")
    c = parse_config([*good_argv(tmp_path), *flags, "1"])
    said = "3 vLLM servers x 1 cuda, 1 for prefill and 2 for decode, behind one vllm-router"
    assert said in describe(c, MachineSizes(80 * 2**30), [])
    with pytest.raises(
        ValueError, match="--prefill-num-servers must be below the number of engines, got 3 of 3"
    ):
        parse_config([*good_argv(tmp_path), *flags, "3"])


def test_the_plan_has_all_models(tmp_path: Path) -> None:
    told = describe(parse_config(argv(tmp_path, "--device", "cuda")), MachineSizes(80 * 2**30), [])
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
    """The run waits for the trainer while every model's servers run. A teacher's engine may restart again after
    each update."""

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
    all_of_them = ServedModels(math, {"teacher-code": code}, "actor")
    seen: list[bool] = []

    try:
        all_of_them.launch()
        all_of_them.check_launched()
        seen.extend(one._members[0].handle is not None for one in (math, code))
        all_of_them.wait_ready()
        assert seen == [True, True] and len(math.engine_urls) == len(code.engine_urls) == 1
        facts = all_of_them.facts
        (client,) = facts["frozen_engines"].values()
        assert client.router_url == code.router_url
        routers = {"actor": math.facts["router_url"], "teacher-code": code.facts["router_url"]}
        assert facts["model_routers"] == routers
        for name, (ip, port) in facts["sglang_model_routers"].items():
            assert f"http://{ip}:{port}" == routers[name]
        assert [server["urls"][1] for server in facts["own_servers"]] == [math.router_url, code.router_url]
        for _ in range(2):
            before = code.engine_urls
            psutil.Process(code._members[0].handle._process.pid).kill()
            end = time.monotonic() + 30
            while code.engine_urls in (before, []):
                assert time.monotonic() < end
                time.sleep(0.05)
            all_of_them.check_health()
            assert code._members[0].restarts == 1
            all_of_them.allow_restarts()
            assert code._members[0].restarts == 0
    finally:
        all_of_them.stop()
    assert all(one._members[0].handle.poll() is not None for one in (math, code))


def test_a_failed_start_ends_all(tmp_path: Path) -> None:
    spec = VllmSpec(model_path="", run_key=KEY, log_path=str(tmp_path / "t.log"), weight_dir=str(tmp_path))
    router = RouterSpec(run_key=KEY, log_path=str(tmp_path / "r.log"))
    teacher = VllmEnginePool([spec], router, spawn=DoubleServer)
    pools = ServedModels(NoEngines(), {"teacher-default": teacher})
    pools.launch()
    psutil.Process(teacher._members[0].handle._process.pid).kill()
    with pytest.raises(RuntimeError, match="SIGKILL"):
        pools.wait_ready()
    assert teacher._members[0].handle.poll() is not None and teacher._router.poll() is not None
    pools.stop()


def test_an_error_names_the_model_and_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy for a full GPU names --vllm-gpu-memory-utilization, which does not set a teacher's memory."""
    *_, engines = served_engines(parse_config(argv(tmp_path)))
    teacher = NoEngines()

    def fail() -> None:
        raise RuntimeError("an engine must start, got no memory; lower --vllm-gpu-memory-utilization")

    monkeypatch.setattr(teacher, "wait_ready", fail)
    pools = ServedModels(
        NoEngines(), {"teacher-default": teacher}, "actor", {"teacher-default": engines.spelled}
    )
    with pytest.raises(RuntimeError) as error:
        pools.wait_ready()
    assert str(error.value) == (
        "the engines of teacher-default failed: an engine must start, got no memory; lower "
        "--opd-teacher-engine-args gpu-memory-utilization"
    )
