"""Tests `vime config`, `vime flags WORD`, `vime train --help` and shell completion, as a user types them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from slime.config.config_file import expand_config
from vime.cli import main
from vime.commands.completion import script
from vime.commands.flags import FIRST

FILE = """\
# Two kinds of values.
lr: 1e-6
colocate: true
rollout-temperature: 1
custom-generate-function-path: a.b
train-env-vars: {A: "x y"}
vllm-max-num-seqs: 64
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return str(path)


def test_yaml_is_what_config_reads(file, tmp_path, capsys):
    line = [file, "--lr", "2e-6", "--no-colocate", "--eval-prompt-data", "sums", "it's a file.jsonl"]
    assert main(["config", *line]) == 0
    (again := tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert expand_config(["--config", str(again)]) == expand_config(["--config", *line])
    assert main(["config", str(again)]) == 0
    assert capsys.readouterr().out == again.read_text()


def test_the_flags_are_those_of_a_run(file, capsys):
    """A repeated flag keeps its position and its values, as a run reads them."""
    hooks = ["--rollout-sample-hook-path", "json.dumps", "--rollout-sample-hook-path", "json.loads"]
    assert main(["config", file, *hooks, "--no-colocate", "--colocate", "--no-colocate"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["rollout-sample-hook-path"] == ["json.dumps", "json.loads"]
    assert content["colocate"] is False


def test_the_shell_form_is_an_array_of_bash(file, capsys):
    assert main(["config", file, "--lr", "2e-6", "--format", "shell"]) == 0
    shown = 'source /dev/stdin; printf "%s\\n" "${VIME_FLAGS[@]}"'
    done = subprocess.run(
        ["bash", "-c", shown], input=capsys.readouterr().out, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == expand_config(["--config", file, "--lr", "2e-6"]), done.stderr


def test_wrong_flags_are_named_together_with_their_line(file, capsys):
    Path(file).write_text(FILE + "bach-size: 3\nvllm-max-num-sqs: 1\n")
    assert main(["config", file, "--seed", "many"]) == 2
    said = capsys.readouterr().err
    assert f"{file}, line 8: --bach-size is not a known flag" in said
    assert (
        f"{file}, line 9: --vllm-max-num-sqs is not a flag of vLLM; did you mean --vllm-max-num-seqs?" in said
    )
    assert "--seed must be of type int, got 'many'" in said


def test_flags_are_searched_by_name_and_meaning(capsys):
    assert main(["flags", "staleness"]) == 0
    assert "--max-staleness" in capsys.readouterr().out
    assert main(["flags", "rollout-temperatur", "zzz"]) == 1
    said = capsys.readouterr().out
    assert (
        said
        == "no flag has rollout-temperatur and zzz in its name or help; did you mean --rollout-temperature?\n"
    )


def test_help_has_the_flags_that_people_set_first(capsys):
    """--help shows about twenty flags in sections. --help-all shows all flags, even together with --help."""
    for command in ("train", "plan"):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        shown = re.findall(r"^  (--\S+)", text, re.M)
        assert 20 <= len(shown) <= 26 and len(set(shown)) == len(shown) and text.count("\n") < 80
        assert [title for title in FIRST if f"\n{title}\n" in text] == list(FIRST)
        assert main([command, "--help-all"]) == 0
        whole = capsys.readouterr().out
        every = re.findall(r"^  (--\S+)", whole, re.M)
        assert set(shown) < set(every) and f"All {len(every)} flags: vime {command} --help-all" in text
        assert main([command, "--lr", "1", "--help", "--help-all"]) == 0
        assert capsys.readouterr().out == whole


def test_help_has_sections(capsys):
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    for title in ("Cluster: processes and devices", "Rollout: sampling", "Algorithm"):
        assert f"\n{title}\n" in text
    assert max(map(len, text.splitlines())) <= 115


COMPLETIONS = [
    (["pl"], ["plan", "plot"]),
    (["train", "--rollout-ba"], ["--rollout-backend", "--rollout-batch-size"]),
    (["plan", "--numa-binding", ""], ["auto", "off"]),
    (["completion", "z"], ["zsh"]),
    (["train", "--config", "scripts/set"], ["scripts/setup.sh"]),
]


@pytest.mark.parametrize(("words", "wanted"), COMPLETIONS)
def test_bash_completes(words, wanted, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _vime; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", f"{script('bash')}\n{ask}", "bash", "vime", *words], capture_output=True, text=True
    )
    assert done.stdout.split() == wanted, done.stderr


def test_zsh_runs_the_same_function_through_bashcompinit():
    text = script("zsh")
    assert text == "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" + script("bash")
    if shutil.which("zsh"):
        assert subprocess.run(["zsh", "-n"], input=text, text=True).returncode == 0


def test_another_shell_is_refused(capsys):
    assert main(["completion", "fish"]) == 2
    assert "completion must be asked for bash or zsh, got fish" in capsys.readouterr().err
