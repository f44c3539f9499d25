"""Tests whole runs on two GPUs, several layouts at the same time: each process's GPUs, and the weights of the engines.

    tensor   trainer TP 2 with sequence parallelism, one engine TP 2 on the same two GPUs; weights by shared memory
    data     trainer DP 2, two engines of one GPU, each on a trainer's GPU; weights by shared memory
    apart    one trainer on the first GPU, one engine on the second; weights by NCCL
    experts  trainer EP 2 and one engine whose two ranks share the experts; weights by shared memory
    stages   trainer PP 2 with two virtual stages per rank, two engines of one GPU; weights by shared memory

    width    trainer TP 2 that shares the width of each expert, one engine TP 2; weights by shared memory
    uneven   trainer PP 2 with --pipeline-model-parallel-layout, two engines of one GPU; weights by shared memory
    copies   trainer DP 2, one engine with two data-parallel ranks; weights by shared memory
    deltas   one trainer on the first GPU, one engine on the second; deltas by NCCL
    files    trainer TP 2 with sequence parallelism, one engine TP 2; each rank's slices by files
    critic   policy and engine on the first GPU, the critic on the second; weights by shared memory
    teacher  trainer and engine on the first GPU, an engine with the teacher on the second; weights by shared memory
    history  as apart, with --record-memory-history
    shared   trainer DP 2, four engines, of which two share each GPU; weights by shared memory
    packed   one trainer on the first GPU, one engine on the second; weights by vLLM's own NCCL channel
    context  trainer CP 2 that gathers keys and values, two engines of one GPU; weights by shared memory

    same-one    trainer and one engine with experts on the first GPU, with --rlk-bitwise
    same-ranks  as tensor, and the ranks share the experts, with --rlk-bitwise
    same-width  as width, with --rlk-bitwise
    same-data   as data, and the trainer's ranks share the experts, with --rlk-bitwise

    same-glm    as same-one, with sigmoid scores and a shared expert
    same-glm-2  as same-ranks, with sigmoid scores and a shared expert

Each engine compares all of its weights with the trainer's after every update (--check-weight-update-equal). The
engines' memory is given in bytes, because vLLM's own measurement would count the other runs' memory. All layouts of a
group take as long as the slowest run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.cluster.placement import Gpu

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))  # its fixtures start runs and read their records
from train_fixtures import Launch, launched, published_weights, rows, samples, vime  # noqa: E402

pytestmark = pytest.mark.multi_gpu

LIMIT_S = int(os.environ.get("LAYOUT_LIMIT_S", "240"))
"""Time limit of a run in seconds; a machine with no file in its page cache may need more."""
ROLLOUTS, PROMPTS, SAMPLES = 2, 8, 4
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
ONE_QUEUE = ("--train-env-vars", '{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}')
LAYOUTS = {
    "tensor": (
        *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"),
        *TENSOR,
        *ONE_QUEUE,
    ),
    "data": ("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "1"),
    "apart": (
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *("--update-weight-transport", "nccl"),
    ),
    "experts": (
        *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"),
        *("--expert-model-parallel-size", "2", "--vllm-enable-expert-parallel"),
    ),
    "stages": (
        *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "1"),
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
}
SPLITS = {
    "width": (*LAYOUTS["tensor"], "--expert-tensor-parallel-size", "2"),
    "uneven": (
        *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "1"),
        *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et*5|t*7,L"),
    ),
    "copies": (
        *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"),
        *("--vllm-data-parallel-size", "2"),
    ),
    "shared": (*LAYOUTS["data"], "--rollout-engines-per-gpu", "2"),
    "context": (*LAYOUTS["data"], "--context-parallel-size", "2", "--cp-comm-type", "all_gather"),
}
CHANNELS = {
    "deltas": (*LAYOUTS["apart"], "--update-weight-mode", "delta"),
    "files": (*LAYOUTS["tensor"], "--update-weight-transport", "disk"),
    "packed": (
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *("--update-weight-transport", "vllm-nccl"),
    ),
    "critic": (
        *("--colocate", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1"),
        *("--advantage-estimator", "ppo", "--critic-devices", "own", "--critic-num-gpus-per-node", "1"),
    ),
    "history": (*LAYOUTS["apart"], "--record-memory-history"),
}
TEACHERS = {
    "teacher": (
        *("--colocate", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1"),
        *("--use-opd", "--opd-type", "vllm", "--opd-teacher-model", "{dense}"),
        *(
            "--opd-teacher-engine-args",
            "max-model-len=256",
            "enforce-eager",
            "gpu-memory-utilization=0.15",
            f"kv-cache-memory-bytes={1 << 30}",
        ),
    ),
}
WHOLE = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
SAME = {
    "same-one": ("--colocate", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1"),
    "same-ranks": (*LAYOUTS["tensor"], *WHOLE, "--vllm-enable-expert-parallel"),
    "same-width": SPLITS["width"],
    "same-data": (*LAYOUTS["data"], *WHOLE),
}
GLM = {"same-glm": SAME["same-one"], "same-glm-2": SAME["same-ranks"]}
GROUPS = {
    "layouts": LAYOUTS,
    "splits": SPLITS,
    "channels": CHANNELS,
    "teachers": TEACHERS,
    "same": SAME,
    "glm": GLM,
}
CASES = {layout: flags for group in GROUPS.values() for layout, flags in group.items()}
ENGINES = {
    "tensor": ["{0},{1}"],
    "data": ["{0}", "{1}"],
    "apart": ["{1}"],
    "experts": ["{0},{1}"],
    "stages": ["{0}", "{1}"],
    "width": ["{0},{1}"],
    "uneven": ["{0}", "{1}"],
    "copies": ["{0},{1}"],
    "deltas": ["{1}"],
    "files": ["{0},{1}"],
    "critic": ["{0}"],
    "history": ["{1}"],
    "shared": ["{0}", "{0}", "{1}", "{1}"],
    "packed": ["{1}"],
    "context": ["{0}", "{1}"],
    "same-one": ["{0}"],
    "same-ranks": ["{0},{1}"],
    "same-width": ["{0},{1}"],
    "same-data": ["{0}", "{1}"],
    "same-glm": ["{0}"],
    "same-glm-2": ["{0},{1}"],
}
"""GPUs that the engines of a layout must see. The policy's and a teacher's engine have the same name."""
EXPERTS, SHARED, DENSE = "qwen3-moe-tiny", "glm-moe-tiny", "qwen3-50m"


def gpus() -> list[str]:
    """Returns two GPUs of this host, as CUDA_VISIBLE_DEVICES names them, in the order of placement."""
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]
    return sorted(names, key=lambda name: Gpu("", "127.0.0.1", name).order)


def flags(root: Path, layout: str) -> list[str]:
    arch = EXPERTS if layout in {"experts", "width", *SAME, *GLM} else DENSE
    model, run_dir = root / (SHARED if "glm" in layout else arch), root / layout
    compared = ("--rlk-consistency", "audit", "--vllm-enforce-eager")
    if layout in SAME or layout in GLM:  # with CUDA graphs
        compared = ("--rlk-consistency", "strict", "--rlk-bitwise")
    return [
        *("--device", "cuda", "--hf-checkpoint", str(model), "--run-dir", str(run_dir)),
        *("--prompt-data", str(model / "arithmetic" / "train.jsonl"), "--rollout-shuffle"),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
        *("--custom-rm-path", "train_fixtures.parity_reward", "--num-rollout", str(ROLLOUTS)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--global-batch-size", str(PROMPTS * SAMPLES), "--rollout-max-response-len", "16"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--lr", "1e-4"),
        *("--num-gpus-per-node", "2", "--accumulate-allreduce-grads-in-fp32"),
        *("--check-weight-update-equal", *compared),
        *("--update-weight-buffer-size", "8000000"),  # an update has several buckets
        *("--vllm-max-model-len", "256", "--vllm-max-num-seqs", "32"),
        *("--vllm-gpu-memory-utilization", "0.15", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
        *("--save-debug-rollout-data", str(run_dir / "samples" / "{rollout_id}.pt")),
        *(word.format(dense=root / DENSE) if "{dense}" in word else word for word in CASES[layout]),
    ]


def script(root: Path, layouts: Iterable[str]) -> str:
    """Returns a script that runs the layouts in the background. It writes each run's output and exit code next to its
    records."""
    lines = []
    for place, layout in enumerate(layouts):
        command = shlex.join(
            ["timeout", "--kill-after=15", str(LIMIT_S), *vime("train", *flags(root, layout))]
        )
        out = shlex.quote(str(root / layout))
        lines.append(f"(sleep {2 * place}; {command} > {out}.out 2>&1; echo $? > {out}.code) &")
    return "\n".join([*lines, "wait"])


def environment() -> list[str]:
    """Returns variables for `env`: this process's package paths, and the settings of Ray that Launch leaves out."""
    path = [str(ROOT), str(ROOT / "tests" / "e2e"), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k.startswith("RAY_") and k != "RAY_ADDRESS"}
    kept |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ",".join(gpus())}
    return [f"{name}={value}" for name, value in kept.items()]


def watch(launch: Launch) -> dict[tuple[str, str], str]:
    """Waits until all runs have ended. Returns (weight directory, engine's name) -> the GPUs that its server sees."""
    seen: dict[tuple[str, str], str] = {}
    end = time.monotonic() + LIMIT_S + 60
    while launch.process.poll() is None and time.monotonic() < end:
        for pid in launch.find(r"vime\.pool\.supervise"):
            try:
                env = psutil.Process(pid).environ()
            except psutil.Error:  # it has ended meanwhile
                continue
            if "VIME_ENGINE" in env and "VIME_WEIGHT_DIR" in env:
                seen[env["VIME_WEIGHT_DIR"], env["VIME_ENGINE"]] = env.get("CUDA_VISIBLE_DEVICES", "")
        try:
            launch.process.wait(1)
        except subprocess.TimeoutExpired:
            continue
    launch.finish(10)
    return seen


Runs = tuple[Path, dict[tuple[str, str], str]]
"""The directory of a group's runs, and the result of `watch`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the models of all layouts."""
    root = tmp_path_factory.mktemp("layouts")
    for arch in (DENSE, EXPERTS, SHARED):
        make = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--arch", arch, "--random"]
        subprocess.run([*make, "--arithmetic", "--device", "cpu", str(root / arch)], check=True, timeout=120)
    config, weights = root / SHARED / "config.json", root / SHARED / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"routed_scaling_factor": 2.5}))
    tensors = load_file(weights)
    for name in (name for name in tensors if name.endswith("e_score_correction_bias")):  # 0 in a new model
        tensors[name] = torch.linspace(-0.05, 0.05, len(tensors[name]))
    save_file(tensors, weights, {"format": "pt"})
    return root


@pytest.fixture(scope="module")
def runs_of(models: Path) -> Callable[[str], Runs]:
    """Returns a function that makes all runs of a group at its first call. A parametrized fixture would make them once
    per test, because pytest compares the positions of parameters."""

    begun: dict[str, Runs | None] = {}

    def make_runs(group: str) -> Runs:
        if group not in begun:
            begun[group] = None
            command = ["env", *environment(), "bash", "-c", script(models, GROUPS[group])]
            with launched(command, models / f"{group}.out") as launch:
                begun[group] = models, watch(launch)
        runs = begun[group]
        assert runs is not None, "an earlier test could not make the runs of this group"
        return runs

    return make_runs


LAYOUT_CASES = [
    pytest.param(group, layout, id=f"{group}-{layout}")
    for group, layouts in GROUPS.items()
    for layout in layouts
]
ENGINE_CASES = [case for case in LAYOUT_CASES if case.values[1] in ENGINES]


@pytest.mark.parametrize(("group", "layout"), LAYOUT_CASES)
def test_a_run_ends_well_and_its_engines_agree_with_the_trainer(
    runs_of: Callable[[str], Runs], group: str, layout: str
) -> None:
    root, _ = runs_of(group)
    run_dir, code = root / layout, (root / f"{layout}.code").read_text().strip()
    logs = "".join(
        f"\n== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in run_dir.glob("logs/*.log")
    )
    assert code == "0", f"exit code {code}:\n{(root / f'{layout}.out').read_text()[-3000:]}{logs}"
    trained, drawn = rows(run_dir, "train/step"), rows(run_dir, "rollout/step")
    assert sorted(trained) == sorted(drawn) == list(range(ROLLOUTS))
    assert all(row["train/grad_norm"] > 0 for row in trained.values())
    for rollout, row in drawn.items():
        found = samples(run_dir, rollout)
        assert len(found) == PROMPTS * SAMPLES
        assert row["consistency/tokens"] == sum(sample["response_length"] for sample in found)
        assert row["consistency/not_comparable_tokens"] == 0
        assert row["consistency/abs_dlogp_mean"] < 0.02 and row["consistency/abs_dlogp_max"] < 0.5
        if layout in SAME or layout in GLM:
            assert row["consistency/bitwise_equal_tokens"] == row["consistency/tokens"]


@pytest.mark.parametrize(("group", "layout"), ENGINE_CASES)
def test_engines_see_the_gpus_of_their_layout(
    runs_of: Callable[[str], Runs], group: str, layout: str
) -> None:
    root, seen = runs_of(group)
    weights = str(published_weights(root / layout))
    found = {name: its for (directory, name), its in seen.items() if directory == weights}
    wanted = [places.format(*gpus()) for places in ENGINES[layout]]
    assert found == {f"engine-{place}-1": names for place, names in enumerate(wanted)}
