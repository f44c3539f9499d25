"""Runs launch scripts with stand-ins: their training commands, their harmlessness, and scripts that are none."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from slime.agent.init import landlock
from vime.rehearse.capture import Captured, capture_launches
from vime.rehearse.changes import Flags
from vime.rehearse.fitting import fit_flags
from vime.rehearse.guess import guess_config
from vime.rehearse.made import keep_made
from vime.rehearse.shrink import shrink_config

pytestmark = pytest.mark.skipif(not landlock.version(), reason="a script runs only under Landlock")
RAY = """#!/bin/bash
set -e
p${KILL:=kill} -9 ray
ARGS=(--lr 1e-6 --prompt-data "a file.jsonl")
NVLINK=$(nvidia-smi topo -m | grep -o 'NV[0-9]*' | wc -l)
GPUS=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
ray start --head --num-gpus 8
ray job submit --address=http://127.0.0.1:8265 --runtime-env-json='{"env_vars": {"A": "b"}}' \\
    -- python3 train.py --actor-num-gpus-per-node $GPUS --tensor-model-parallel-size $((1 + NVLINK)) "${ARGS[@]}"
ray "st"op
"""


def capture(tmp_path: Path, text: str, deadline_s: float = 30.0) -> Captured:
    (tmp_path / "project").mkdir(exist_ok=True)
    script = tmp_path / "project" / "run.sh"
    script.write_text(text)
    return capture_launches(script, [], tmp_path / "out", gpus=8, deadline_s=deadline_s)


def test_a_script_of_ray_is_captured(tmp_path: Path) -> None:
    (launch,) = capture(tmp_path, RAY).launches
    layout = ["--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "2"]
    assert launch.argv == [*layout, "--lr", "1e-6", "--prompt-data", "a file.jsonl"]
    assert launch.variables == {"A": "b"}


def test_files_that_the_script_makes_are_kept(tmp_path: Path) -> None:
    """The rows are in the layer over the project. Where a user may not have layers, the script cannot make them."""
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "project" / "data" / "old.jsonl").write_text("old")
    text = """#!/bin/bash
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p data/base
echo new > data/rows.jsonl && echo {} > data/base/config.json
vime train --hf-checkpoint data/base --prompt-data "data/rows.jsonl@[0:2]" --eval-prompt-data x data/old.jsonl
"""
    captured = capture(tmp_path, text)
    project, kept = tmp_path / "project", tmp_path / "kept"
    launch, made = keep_made(captured.launches[-1], project, tmp_path / "out" / "layer", kept)
    assert not (project / "data" / "rows.jsonl").exists()
    if not captured.remarks:
        assert made == ["data/base", "data/rows.jsonl"]
        assert launch.argv[1:4:2] == [str(kept / "data/base"), str(kept / "data/rows.jsonl") + "@[0:2]"]
        assert (kept / "data/rows.jsonl").read_text() == "new\n"
        assert (kept / "data/base/config.json").read_text() == "{}\n"
    assert launch.argv[-1] == "data/old.jsonl"


def test_the_sandbox_may_be_inside_the_project(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert capture(tmp_path, "#!/bin/bash\nvime train --lr 2\n").launches[0].argv == ["--lr", "2"]


def test_a_script_changes_nothing_outside_its_folder(tmp_path: Path) -> None:
    """A redirection, a program by its absolute path, an installer, a signal and a connection have no effect."""
    victim = subprocess.Popen(["sleep", "60"])
    outside = tmp_path / "outside"
    outside.mkdir()
    text = f"""#!/bin/bash
echo x > {outside}/redirected
/usr/bin/touch {outside}/touched
mkdir -p {outside}/made
python -m pip install no-such-package-of-vime && echo recorded
kill -9 {victim.pid}
python - <<'END'
import socket
for step in (lambda: open("{outside}/python", "w"), lambda: socket.create_connection(("127.0.0.1", 9), 1)):
    try:
        step()
        print("DONE")
    except PermissionError:
        print("refused")
    except OSError as error:
        print("no network", error)
END
python3 train.py --lr 1
"""
    try:
        captured = capture(tmp_path, text)
        assert captured.launches[-1].argv == ["--lr", "1"]
        assert list(outside.iterdir()) == []
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    log = (tmp_path / "out" / "script.log").read_text()
    assert "recorded" in log and "DONE" not in log and "Permission denied" in log
    assert any("mkdir" in remark for remark in captured.remarks)


def test_a_script_without_end_is_ended(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"the script must end within 2 s, got .*run.sh still running"):
        capture(
            tmp_path, "#!/bin/bash\nsetsid /bin/sleep 77 &\nwhile true; do /bin/sleep 1; done\n", deadline_s=2
        )
    assert time.monotonic() - start < 20
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/bash\necho nothing to do\nexit 3\n", "the script must start a training .* exit code 3 .*"),
        ("#!/bin/bash\nif then\n", "the script must start a training"),
    ],
)
def test_a_script_without_training_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture(tmp_path, text)


def test_a_file_that_is_no_script_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.sh").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match="the script must be a shell script, got .*picture.sh"):
        capture_launches(tmp_path / "picture.sh", [], tmp_path / "out", gpus=8, deadline_s=5)
    with pytest.raises(ValueError, match="the script must be a file that exists, got nowhere.sh"):
        capture_launches(Path("nowhere.sh"), [], tmp_path / "out", gpus=8, deadline_s=5)


def test_a_layout_is_cut_to_the_processes_that_fit() -> None:
    sizes = [
        "--tensor-model-parallel-size",
        "8",
        "--pipeline-model-parallel-size",
        "4",
        "--sequence-parallel",
    ]
    words = [*sizes, "--expert-model-parallel-size", "16", "--actor-num-nodes", "8", "--rm-type", "math"]
    flags = Flags.from_argv([*words, "--update-weight-mode", "delta", "--rollout-batch-size", "64"])
    fit_flags(flags, Path("model"), Path("out"), processes=2, made_tokenizer=False)
    assert flags.value("tensor_model_parallel_size") == "2" and flags.has("sequence_parallel")
    assert flags.value("pipeline_model_parallel_size") == "1"
    assert flags.value("expert_model_parallel_size") == "2"
    assert flags.value("actor_num_nodes") == "1" and flags.value("actor_num_gpus_per_node") == "2"
    assert flags.value("rm_type") == "math" and flags.value("update_weight_mode") == "delta"
    (change,) = [change for change in flags.changes if change.flag == "--pipeline-model-parallel-size"]
    assert (change.before, change.after) == ("4", "1") and "2 trainer processes" in change.why


def test_a_tiny_model_has_every_kind_of_layer() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = {"num_hidden_layers": 48, "layer_types": kinds * 12, "hidden_size": 2048, "vocab_size": 151936}
    tiny = shrink_config({**config, "num_experts": 512, "num_experts_per_tok": 10, "head_dim": 256}, 2, None)
    assert tiny["layer_types"] == ["linear_attention", "full_attention"] and tiny["num_hidden_layers"] == 2
    assert (tiny["num_experts"], tiny["num_experts_per_tok"], tiny["vocab_size"]) == (8, 2, 151936)


def test_a_tiny_model_has_every_letter_of_a_pattern() -> None:
    config = {"num_hidden_layers": 52, "hybrid_override_pattern": "MEMEM*EM", "n_groups": 8}
    tiny = shrink_config({**config, "mamba_num_heads": 64, "ssm_state_size": 128}, 2, None)
    assert tiny["hybrid_override_pattern"] == "ME*" and tiny["num_hidden_layers"] == 3
    assert (tiny["mamba_num_heads"], tiny["n_groups"], tiny["ssm_state_size"]) == (8, 2, 32)


def test_lists_of_one_entry_per_layer_are_cut() -> None:
    config = {
        "num_hidden_layers": 6,
        "indexer_types": ["full"] * 6,
        "mlp_only_layers": [0, 5],
        "eos_token_id": [1, 2],
    }
    tiny = shrink_config(config, 2, None)
    assert tiny["indexer_types"] == ["full"] * 2 and tiny["mlp_only_layers"] == [0]
    assert tiny["eos_token_id"] == [1, 2] and tiny["num_hidden_layers"] == 2


def test_flags_of_another_family_need_its_config() -> None:
    with pytest.raises(
        ValueError, match="--hf-checkpoint must have a config.json here, or flags of a Qwen or Llama"
    ):
        guess_config(Flags.from_argv(["--hf-checkpoint", "nowhere", "--multi-latent-attention"]))


def test_the_stand_ins_are_files_of_the_package() -> None:
    assert os.access(Path(capture_launches.__code__.co_filename).with_name("shim.sh"), os.R_OK)
