"""Tests scripts/run-qwen3-4b-grpo.sh without a GPU: `vime plan` accepts its flags, and it reports missing inputs at
once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import make_tiny_model
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scale_layout import scaled

from vime import cli

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("MODE", "MODEL", "DATA", "OUT", "NUM_GPUS", "PLAN", "SETUP", "PYTHON", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model.main([str(folder)])
    return folder


PLANS_HERE = """#!/bin/sh
[ "$2 $3 $4" = "-m vime plan" ] || exec "$REAL_PYTHON" "$@"
printf '%s\\0' "$PWD" "$@" >"$0.told"
"""
"""A Python interpreter that only records the arguments of `vime plan`, whose imports take 7 s. The test process
plans."""


def launch(
    *flags: str, path: str = "", script: Path = ROOT / "scripts" / "run-qwen3-4b-grpo.sh", **given: str
) -> subprocess.CompletedProcess[str]:
    """Runs the script with no variables of its own except `given`; `path` is a folder that comes first on PATH."""
    inherited = {k: v for k, v in os.environ.items() if k not in ASKED and not k.startswith("RAY_")}
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python")
        python.write_text(PLANS_HERE)
        python.chmod(0o755)
        env = inherited | {"SETUP": "0", "PYTHON": str(python), "REAL_PYTHON": sys.executable} | given
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}" if path else env["PATH"]
        done = subprocess.run(["bash", str(script), *flags], env=env, capture_output=True, text=True)
        told = python.with_name("python.told")
        if done.returncode == 0 and told.exists():
            folder_of_script, *argv = told.read_text().split("\0")[:-1]
            planned(done, folder_of_script, argv[argv.index("plan") :])
    return done


def planned(done: subprocess.CompletedProcess[str], folder: str, argv: list[str]) -> None:
    """Runs `vime plan` as the script would, and adds its output to `done`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        done.returncode = cli.main(argv)
    done.stdout += out.getvalue()
    done.stderr += err.getvalue()


def write(path: Path, row: dict, number: int = 40) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row] * number), path)
    else:
        path.write_text((json.dumps(row) + "\n") * number)
    return path


CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
GSM8K = {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}
DAPO = {"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "data_source": "math_dapo"}


@pytest.mark.parametrize(
    ("mode", "gpus", "name", "row", "lines"),
    [
        pytest.param(
            "colocate",
            "1",
            "gsm8k.jsonl",
            GSM8K,
            ["1 rank: tensor parallel 1", "1 vLLM server x 1", "one after the"],
            marks=pytest.mark.slow,
        ),
        (
            "disaggregated",
            "8",
            "d.parquet",
            DAPO,
            ["4 ranks: tensor parallel 2 x data parallel 2", "side by side"],
        ),
    ],
)
def test_plan_of_the_flags(tiny, tmp_path, mode, gpus, name, row, lines):
    """Both modes plan the layouts of GSM8K and DAPO-Math-17k; the last value of a repeated flag wins."""
    data = write(tmp_path / name, row)
    out = tmp_path / "out"
    done = launch(
        *("--num-rollout", "7"),
        **{
            "PLAN": "1",
            "MODE": mode,
            "NUM_GPUS": gpus,
            "DATA": str(data),
            "MODEL": str(tiny / "base"),
            "OUT": str(out),
        },
    )
    assert done.returncode == 0, done.stderr
    wanted = [*lines, f"{data}: 40 prompts", "7 rollouts = 7 optimizer steps", f"run directory {out}/grpo"]
    assert all(line in done.stdout for line in wanted), done.stdout
    assert "SMOKE" not in done.stderr and not out.exists()


def test_without_a_model_it_is_loudly_a_smoke_run(tmp_path):
    """Without inputs, the script uses random weights of the true shape and sums as prompts and labels, and saves
    nothing."""
    done = launch(PLAN="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "PLAN: NUM_GPUS not given and no GPU here, planned for the 8 of examples/qwen3-4b/" in done.stderr
    assert "SMOKE RUN: MODEL was not given, so the weights are random" in done.stderr
    made = tmp_path / "plan-qwen3-4b"
    for line in (
        "qwen3, 4.02 G parameters, bfloat16 on cuda",
        "8 ranks: tensor parallel 2 x data parallel 4",
        "10 rollouts = 10 optimizer steps",
        f"{made}/arithmetic/train.jsonl: 7844 prompts",
    ):
        assert line in done.stdout, done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan-qwen3-4b"]
    assert not list(made.glob("*.safetensors"))


@pytest.mark.slow
def test_a_plan_for_gpus_that_are_not_here(tmp_path):
    """The script passes the option to `vime plan`. If the user gives an engine flag that the script also sets,
    one is left."""
    flags = ("--gpu-memory-gib", "80", "--vllm-gpu-memory-utilization", "0.3")
    done = launch(*flags, PLAN="1", NUM_GPUS="2", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "\n  fits a GPU of 80 GiB\n" in done.stdout
    assert "  fits a GPU of 80 GiB: 7.49 GiB of weights in 24.00 GiB, 0.3 of it" in done.stdout
    assert done.stdout.count("vLLM --gpu-memory-utilization") == 1
    done = launch(*flags, PLAN="1", NUM_GPUS="2", OUT=str(tmp_path), MODE="disaggregated")
    # the launcher chose these flags
    assert "memory: --optimizer-cpu-offload --optimizer-offload-fraction" in done.stderr
    assert "\n  fits a GPU of 80 GiB\n" in done.stdout


@pytest.mark.slow
def test_a_smoke_run_and_a_real_one_share_no_folder(tiny, tmp_path):
    """Both runs have no OUT. The script starts in a folder of links, because the default OUT is next to the
    scripts."""
    for entry in ("scripts", "examples", "rl_kernel", "slime", "vime"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    script = tmp_path / "scripts" / "run-qwen3-4b-grpo.sh"
    data = str(write(tmp_path / "gsm8k.jsonl", GSM8K))
    for given, folder in (({}, "qwen3-4b-smoke"), ({"MODEL": str(tiny / "base"), "DATA": data}, "qwen3-4b")):
        done = launch(script=script, PLAN="1", **given)
        assert f"run directory runs/{folder}/grpo\n" in done.stdout, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["qwen3-4b-smoke"]


@pytest.mark.slow
def test_paths_are_those_of_the_caller(tiny, tmp_path, monkeypatch):
    write(tmp_path / "p.jsonl", {"text": "1+1="})
    shutil.copytree(tiny / "base", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    done = launch(PLAN="1", MODEL="model", DATA="p.jsonl@[2:4]", OUT="out")
    assert "DATA must have the columns question and answer or prompt and label or" in done.stderr
    assert "got ['text']; name them with --input-key" in done.stderr and done.returncode == 2
    done = launch(
        "--input-key", "text", "--rm-type", "random", "--wrong", PLAN="1", MODEL="model", DATA="p.jsonl"
    )
    assert "vime plan: --wrong is not a known flag" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"MODE": "async"}, "MODE must be one of colocate, disaggregated, fp8, lora, got async"),
        ({"NUM_GPUS": "0"}, "NUM_GPUS must be a whole number above 0, got 0"),
        ({"MODEL": "nowhere"}, "MODEL must be a folder with a config.json, got"),
        ({"DATA": "nowhere.jsonl"}, "DATA must be a prompt file that exists, got"),
        ({"MODEL": "."}, "DATA must be given with MODEL, got none"),
        (
            {"PLAN": "1", "MODE": "disaggregated", "NUM_GPUS": "1"},
            "NUM_GPUS must be 2 or more with MODE=disaggregated",
        ),
        ({"PLAN": "1", "PYTHON": "no-python"}, "PYTHON must be an interpreter, got no-python"),
        ({"PLAN": "1", "RAY_ADDRESS": "127.0.0.1:1", "PYTHON": "no-python"}, "PYTHON must be an interpreter"),
    ],
)
def test_what_is_wrong_is_said_at_once(tiny, monkeypatch, given, message):
    monkeypatch.chdir(tiny / "base")
    done = launch(**given)
    assert done.returncode == 2 and f"run-qwen3-4b-grpo: {message}" in done.stderr


def test_a_model_with_experts_is_refused(tmp_path):
    """The script's flags are for a dense model. A file that is not a model's config.json is an error as well."""
    data = write(tmp_path / "d.jsonl", GSM8K)
    given = {"PLAN": "1", "MODEL": str(tmp_path), "DATA": str(data)}
    for number in ("num_experts", "n_routed_experts"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_moe", number: 128}))
        done = launch(**given)
        assert done.returncode == 2 and done.stdout == ""
        assert f"MODEL must be dense, got {tmp_path} with 128 experts a layer" in done.stderr
        launcher = re.search(r"scripts/run-\S+-grpo\.sh", done.stderr)
        assert launcher and (ROOT / launcher[0]).is_file()
    (tmp_path / "config.json").write_text("{")
    done = launch(**given)
    assert done.returncode == 2 and "must hold a valid config.json" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs")
def test_without_gpus_it_names_the_script_that_needs_none():
    done = launch()
    assert done.returncode == 2 and done.stdout == ""
    assert "a GPU must be there, got none (nvidia-smi is not on PATH)" in done.stderr
    assert "on a CPU: bash scripts/run-tiny-grpo.sh" in done.stderr
    joined = launch(RAY_ADDRESS="127.0.0.1:1")
    assert "NUM_GPUS must be given where this machine shows no GPU" in joined.stderr


SMI = """#!/bin/sh
if [ "$1" = topo ]; then
    printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n\\n  NV#  = bonded NVLinks\\n'
else
    printf '0, NVIDIA H200, 143771 MiB, 1 MiB\\n1, NVIDIA H200, 143771 MiB, 3 MiB\\n'
fi
"""


@pytest.mark.parametrize(
    ("answer", "given", "out", "err"),
    [
        (SMI, {"NUM_GPUS": "3"}, "NVLink: NV18\n", "NUM_GPUS must be at most the 2 of this machine, got 3"),
        (
            SMI,
            {"CUDA_VISIBLE_DEVICES": "1", "NUM_GPUS": "2"},
            "=1 leaves 1\n",
            "at most the 1 of this machine, got 2",
        ),
        (
            SMI,
            {"CUDA_VISIBLE_DEVICES": ""},
            "leaves 0\n",
            "a GPU must be there, got none (CUDA_VISIBLE_DEVICES= ",
        ),
        (
            SMI.replace("NV18", "SYS"),
            {"PYTHON": "no"},
            "NVLink: none found\n",
            "note: without NVLink, weights and",
        ),
        (
            "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n",
            {},
            "",
            "got none (nvidia-smi says: NVIDIA-SMI has",
        ),
    ],
)
def test_what_it_finds_of_gpus(tmp_path, answer, given, out, err):
    """The nvidia-smi double answers as on a host with two GPUs, or with a broken driver."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(answer)
    smi.chmod(0o755)
    done = launch(path=str(tmp_path), **given)
    assert done.returncode == 2 and err in done.stderr, done.stderr
    assert out in done.stdout
    if out:
        assert "0, NVIDIA H200, 143771 MiB, 1 MiB\n1, NVIDIA H200" in done.stdout


TOLD = """#!/bin/sh
case "$*" in
    "-P -m vime plan "*) shift 4 && printf '%s\\n' "$@" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
"""A Python interpreter that prints the flags of `vime plan`, one per line. The test process plans, which imports
vLLM once."""


@pytest.mark.parametrize(
    ("smi", "flags", "given", "ranks"),
    [
        (SMI, [], {}, 2),
        (SMI.replace("\\n1, NVIDIA H200, 143771 MiB, 3 MiB", ""), [], {}, 1),
        pytest.param(SMI, [], {"NUM_GPUS": "4"}, 4, marks=pytest.mark.slow),
        pytest.param(SMI, ["--num-gpus-per-node", "4"], {}, 4, marks=pytest.mark.slow),
        (SMI, ["--num-gpus-per-node=8"], {"NUM_GPUS": "4"}, 4),
    ],
)
def test_a_plan_is_for_the_gpus_that_are_there_or_given(tiny, tmp_path, capsys, smi, flags, given, ranks):
    for name, text in {"nvidia-smi": smi, "told": TOLD}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    data = write(tmp_path / "d.jsonl", GSM8K)
    paths = {"MODEL": str(tiny / "base"), "DATA": str(data), "PYTHON": str(tmp_path / "told")}
    done = launch(*flags, path=str(tmp_path), PLAN="1", **paths, **given)
    assert done.returncode == 0 and "planned for 2" not in done.stderr, done.stderr
    asked = done.stdout[done.stdout.index("--device\n") :].splitlines()  # after nvidia-smi's output
    assert cli.main(["plan", *asked]) == 0
    printed = capsys.readouterr().out
    assert f"{ranks} rank{'s' if ranks > 1 else ''}: tensor parallel" in printed, printed


LAUNCHERS = sorted(path.stem for path in (ROOT / "scripts").glob("run-*-grpo.sh") if "tiny" not in path.name)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_has_the_same_help_and_a_folder_of_examples(name):
    """A launcher is one line; scripts/lib/launch.sh has all of its code."""
    done = subprocess.run(["bash", f"scripts/{name}.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"bash scripts/{name}.sh --lr 2e-6" in done.stdout
    assert len((ROOT / f"scripts/{name}.sh").read_text().splitlines()) <= 5
    assert (ROOT / "examples" / name.removeprefix("run-").removesuffix("-grpo") / "colocated.yaml").is_file()


def test_a_layout_of_several_nodes_needs_a_cluster(tiny):
    script = ROOT / "scripts" / "run-glm-4.5-air-grpo.sh"
    data = str(tiny / "train.jsonl")
    for given, message in (
        ({"NUM_GPUS": "8"}, "NUM_GPUS must be left out for a layout of 4 nodes"),
        (
            {},
            "RAY_ADDRESS must be given for a layout of 4 nodes (examples/glm-4.5-air/colocated.yaml), got none",
        ),
    ):
        done = launch(script=script, MODEL=str(tiny / "base"), DATA=data, **given)
        assert done.returncode == 2 and f"run-glm-4.5-air-grpo: {message}" in done.stderr
    done = launch(
        script=ROOT / "scripts" / "run-qwen3-32b-grpo.sh", MODE="disaggregated", NUM_GPUS="8", PLAN="1"
    )
    assert "NUM_GPUS must be left out for a layout of 2 nodes" in done.stderr, "8 GPUs train and 8 generate"


def test_a_layout_is_fitted_to_fewer_gpus_with_a_note(capsys):
    layout = ROOT / "examples" / "qwen3-30b-a3b" / "colocated.yaml"
    sizes = "--expert-model-parallel-size 2"
    given = "--actor-num-gpus-per-node 2 --num-gpus-per-node 2"
    assert scaled(layout, 2) == f"{given} {sizes}".split()
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == f"note: --expert-model-parallel-size is 2 for 2 GPUs, {layout} has 8"
    assert scaled(layout, 8) == ["--actor-num-gpus-per-node", "8", "--num-gpus-per-node", "8"]
    small = ROOT / "examples" / "qwen3-4b" / "disaggregated.yaml"
    assert scaled(small, 3)[4:] == ["--rollout-num-gpus", "1"]
    assert scaled(small, 2)[6:] == ["--tensor-model-parallel-size", "1", "--no-sequence-parallel"]


@pytest.mark.parametrize("name", ["learning-curves", "test-gpu"])
def test_help_is_the_header_and_sets_up_nothing(name):
    script = ROOT / "scripts" / f"{name}.sh"
    for flag in ("-h", "--help"):
        done = subprocess.run(["bash", str(script), flag], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and f"bash scripts/{name}.sh" in done.stdout
        assert (
            "set -euo" not in done.stdout
            and script.read_text().splitlines()[1] == f"# {done.stdout.splitlines()[0]}"
        )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs")
def test_learning_curves_ask_for_a_gpu_before_anything_else():
    done = subprocess.run(["bash", str(ROOT / "scripts/learning-curves.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "learning-curves: a GPU must be there, got none; on a CPU: DEVICE=cpu\n"


def test_the_run_itself_gets_the_flags(tiny, tmp_path):
    """The run ends at the first error of `vime train`, before it starts anything."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    data = write(tmp_path / "d.jsonl", GSM8K)
    done = launch(
        "--lrr", "1", path=str(tmp_path), MODEL=str(tiny / "base"), DATA=str(data), OUT=str(tmp_path / "o")
    )
    assert done.returncode == 2 and "vime train: --lrr is not a known flag; did you mean --lr?" in done.stderr
    assert not (tmp_path / "o").exists()
