"""`vime plan` returns the status of `vime train` and prints the same message: one function decides for both."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from make_model import main as make_model

from vime.cli import main
from vime.driver import _read
from vime.memory.sizes import RequestedSizes
from vime.plan.command import main as plan
from vime.run.lock import lock
from vime.start import checks
from vime.start.checks import check_run, plans_other_machine

Change = Callable[[Path, list[str], ExitStack], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(["--arch", "qwen3-tiny", "--random", "--arithmetic", str(folder)])
    rows = folder / "arithmetic" / "train.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:64]))  # each command checks all rows
    return folder


@pytest.fixture
def argv(made: Path, tmp_path: Path) -> list[str]:
    """Returns flags of a run that can start on two cores."""
    shutil.copytree(made, tmp_path / "model")
    words = f"--hf-checkpoint {tmp_path}/model --prompt-data {tmp_path}/model/arithmetic/train.jsonl"
    words += f" --input-key prompt --label-key label --rm-type math --run-dir {tmp_path}/run --save {tmp_path}/save"
    words += " --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8"
    words += " --device cpu --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --apply-chat-template"
    return words.split()


def without(*patterns: str) -> Change:
    def change(folder: Path, argv: list[str], stack: ExitStack) -> None:
        for pattern in patterns:
            for file in (folder / "model").glob(pattern):
                file.unlink()

    return change


def with_flags(flags: str) -> Change:
    def change(folder: Path, argv: list[str], stack: ExitStack) -> None:
        argv += flags.format(dir=folder).split()

    return change


def written(name: str, text: str, flags: str = "") -> Change:
    def change(folder: Path, argv: list[str], stack: ExitStack) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        argv += flags.format(dir=folder).split()

    return change


def default_ranks(folder: Path, argv: list[str], stack: ExitStack) -> None:
    place = argv.index("--actor-num-gpus-per-node")
    del argv[place : place + 2]


def in_use(name: str) -> Change:
    return lambda folder, argv, stack: lock("--run-dir", folder / name, stack)


def router_port_in_use(folder: Path, argv: list[str], stack: ExitStack) -> None:
    held = stack.enter_context(socket.socket())
    held.bind(("127.0.0.1", 0))
    held.listen()
    argv += ["--vllm-router-port", str(held.getsockname()[1])]


INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
WRONG: dict[str, tuple[Change, str]] = {
    "8 ranks by default": (default_ranks, "the cluster must have 9 devices (4.5 CPUs) for 8 trainer ranks"),
    "more engines than cores": (
        with_flags("--rollout-num-gpus 4096"),
        "and 4096 rollout devices (--rollout-num-gpus), got ",
    ),
    "no tokenizer": (without("*token*"), "--hf-checkpoint must hold a tokenizer that transformers can load"),
    "a broken tokenizer": (written("model/tokenizer.json", "{"), "must hold a valid tokenizer.json"),
    "no weights": (
        without("*.safetensors*", "make_model.json"),
        "--hf-checkpoint must have weights, got no file",
    ),
    "no config": (without("config.json"), "config.json"),
    "strict on a CPU": (with_flags("--rlk-fast strict"), "--rlk-fast strict must run the fast"),
    "a run directory in use": (in_use("run"), "--run-dir must not be in use by another run"),
    "a folder of checkpoints in use": (in_use("save"), "--save must not be in use by another run"),
    "a run directory that is a file": (
        written("run", ""),
        "--run-dir must be a directory that this user can write",
    ),
    "a run directory below a file": (
        written("file", "", "--run-dir {dir}/file/run"),
        "can write to and lock, got",
    ),
    "metrics of another run": (
        written("run/metrics.jsonl", "{}\n"),
        "--run-dir must be a folder without metrics",
    ),
    "prefill": (
        with_flags("--rollout-num-gpus 2 --prefill-num-servers 2"),
        "--prefill-num-servers must be below the number of engines",
    ),
    "a router's port in use": (
        router_port_in_use,
        "--vllm-router-port must be a free port of 127.0.0.1, got ",
    ),
    "no tracker": (with_flags("--use-trackio"), "trackio"),
    "no prompts": (with_flags("--prompt-data {dir}/none.jsonl"), "--prompt-data must"),
    "a wrong row": (
        written("bad.jsonl", '{"prompt": 5}\n', "--prompt-data {dir}/bad.jsonl"),
        "bad.jsonl:1: ",
    ),
    "an unknown flag": (with_flags("--lrr 1"), "--lrr is not a known flag"),
    "a wrong model": (
        written("model/config.json", json.dumps({"model_type": "qwen9"})),  # its tensors are those of Llama
        "config.json must give hidden_size, got none",
    ),
    "two problems": (with_flags("--lrr 1 --prompt-data {dir}/none.jsonl"), "2 problems:"),
    "too little room": (with_flags("--run-dir {dir}/other"), "MiB of room for "),
}


@pytest.mark.parametrize("name", WRONG)
def test_plan_and_train_refuse_the_same_with_the_same_words(argv, tmp_path, capsys, monkeypatch, name):
    change, message = WRONG[name]
    full = type(shutil.disk_usage("/"))(1 << 40, 1 << 40, 1000)
    if name == "too little room":  # a mock, because a test cannot fill a disk
        monkeypatch.setattr("slime.system.disk_space.shutil.disk_usage", lambda place: full)
    if name == "8 ranks by default":  # on a machine of two cores
        monkeypatch.setattr("slime.cluster.host_resources.host_resources", lambda: {"CPU": 2.0})
    with ExitStack() as stack:
        change(tmp_path, argv, stack)
        before = sorted(tmp_path.rglob("*"))
        said = []
        for command in ("plan", "train"):
            assert main([command, *argv]) == 2
            said.append(capsys.readouterr().err.partition(f"vime {command}: ")[2])
        assert said[0] == said[1] and message in said[0]
        assert sorted(tmp_path.rglob("*")) == before, "a check makes no file"


def without_flag(flag: str) -> Change:
    def change(folder: Path, argv: list[str], stack: ExitStack) -> None:
        place = argv.index(flag)
        del argv[place : place + 2]

    return change


NO_MODEL = "--hf-checkpoint must be a directory with a config.json"
MISSING = {
    "no checkpoint": (without_flag("--hf-checkpoint"), "--hf-checkpoint must be given"),
    "no folder": (with_flags("--hf-checkpoint {dir}/none"), NO_MODEL),
    "no model of the hub": (with_flags("--hf-checkpoint nobody/none"), "--hf-checkpoint must be a directory"),
    "no length": (without_flag("--num-rollout"), "--num-rollout must be given"),
    "no batch": (without_flag("--rollout-batch-size"), "--rollout-batch-size must be given"),
}


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("name", MISSING)
def test_one_report_has_what_is_missing_and_the_errors_of_the_data(
    argv, tmp_path, capsys, monkeypatch, name, command
):
    change, message = MISSING[name]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with ExitStack() as stack:
        change(tmp_path, argv, stack)
        assert main([command, *argv, "--label-key", "lable"]) == 2
    said = capsys.readouterr().err
    assert message in said and "column 'lable' is missing" in said and "Traceback" not in said


def test_plan_and_train_accept_the_same(argv, tmp_path, capsys):
    """The checks of `vime train` before it starts anything pass, and `vime plan` returns 0."""
    before = sorted(tmp_path.rglob("*"))
    assert check_run(argv, _read, download=True).data.num_rollout == 2
    assert main(["plan", *argv]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    epochs = [word for word in argv if word not in ("--num-rollout", "2")]
    epochs = [
        *argv[: argv.index("--num-rollout")],
        *argv[argv.index("--num-rollout") + 2 :],
        "--num-epoch",
        "1",
    ]
    assert check_run(epochs, _read, download=True).data.num_rollout > 2
    assert main(["plan", *epochs]) == 0


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (without("*token*", "*.safetensors*", "make_model.json"), "--gpu h100"),
        (without("*token*", "*.safetensors*"), "--gpu-memory-gib 80"),
        (without("*token*", "*.safetensors*"), "--device cuda"),
        (without("*.safetensors*"), ""),
    ],
    ids=["named GPU", "sizes", "no GPU here", "a shape"],
)
def test_a_plan_for_another_machine_needs_no_files_of_it(
    argv, made, tmp_path, capsys, monkeypatch, change, flags
):
    """A model that was made without weights is a shape, which only plans accept."""
    monkeypatch.setattr(checks, "device_memory", lambda config: None)
    if not flags:
        note = json.loads((tmp_path / "model" / "make_model.json").read_text())
        (tmp_path / "model" / "make_model.json").write_text(json.dumps({**note, "weights": None}))
    with ExitStack() as stack:
        change(tmp_path, argv, stack)
    place = argv.index("--device")
    words = [*argv[:place], *argv[place + 2 :]] if flags else argv
    assert plan([*words, *flags.split()]) == 0


def test_a_folder_without_weights_is_planned_unless_a_device_is_named(argv, tmp_path, capsys):
    """slime's launch scripts are planned so, on a machine for which they were not made."""
    for file in [*(tmp_path / "model").glob("*.safetensors*"), tmp_path / "model" / "make_model.json"]:
        file.unlink()
    place = argv.index("--device")
    words = [*argv[:place], *argv[place + 2 :]]
    assert main(["plan", *words]) == 0
    assert "has no weights, which `vime train` needs" in capsys.readouterr().out
    assert main(["train", *words]) == 2
    assert "--hf-checkpoint must have weights" in capsys.readouterr().err


def test_a_cluster_that_a_run_joins_has_devices_elsewhere(argv, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with ExitStack() as stack:
        default_ranks(tmp_path, argv, stack)
    assert check_run(argv, _read).world_size == 8
    assert not plans_other_machine(check_run(argv, _read), RequestedSizes())


def test_a_model_of_the_hub_without_a_copy_is_one_line_and_no_request(argv, tmp_path, capsys, monkeypatch):
    """The plan must not query the hub for the tokenizer. Without a network, that took 45 s and 23 lines of retries."""
    asked = []

    def look_up(host, *more, **options):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    argv[argv.index("--hf-checkpoint") + 1] = "nobody/none"
    assert main(["plan", *argv]) == 2
    assert asked == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vime plan: --hf-checkpoint must be a directory with a config.json, got ")
    assert line.endswith("hf download nobody/none (vime train does so)")
