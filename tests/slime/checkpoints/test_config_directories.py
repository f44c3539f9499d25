"""Tests paths of flags: a path that a run could not read or write is an error that names the flag."""

from pathlib import Path

import pytest
from config_cases import good_argv, write_model

from slime.checkpoints.checkpoint_dir import resumed_iteration, start_directory, start_iteration
from slime.rules import parse_args


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def directory(root: Path, *names: str, record: str = "") -> str:
    """Makes a folder with these files, and with the record of the latest checkpoint if it is given."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"model_type": "qwen3"}' if name == "config.json" else "")
    root.mkdir(exist_ok=True)
    if record:
        (root / "latest_checkpointed_iteration.txt").write_text(record)
    return str(root)


@pytest.mark.parametrize(
    ("flag", "names", "record", "message"),
    [
        ("--ref-load", (), "", "got {path}, which holds neither; leave it out to use --hf-checkpoint"),
        ("--ref-load", ("config.json", "pytorch_model.bin"), "", "got {path}, which holds neither"),
        ("--ref-load", ("iter_0000004/metadata.json",), "", "got {path}, which holds neither"),
        (
            "--ref-load",
            ("release/metadata.json",),
            "release",
            "must hold a checkpoint that can be read, got {path}: {path}/latest_checkpointed_iteration.txt must ",
        ),
        (
            "--ref-load",
            ("iter_0000004/common.pt",),
            "4",
            "must name a complete checkpoint, got 4 but {path}/iter_",
        ),
        (
            "--load",
            ("config.json",),
            "",
            "--load must hold model.safetensors or model.safetensors.index.json beside",
        ),
        (
            "--load",
            ("metadata.json",),
            "",
            "--load must name the folder of all iterations, got one of them, {path}",
        ),
        (
            "--load",
            ("iter_0000004/metadata.json",),
            "5",
            "latest_checkpointed_iteration.txt must name a complete checkpoint, got 5 but there is no iter_0000005; ",
        ),
    ],
)
def test_directories_that_the_trainer_could_not_read_are_refused(
    argv, tmp_path, flag, names, record, message
):
    path = directory(tmp_path / "given", *names, record=record)
    with pytest.raises(ValueError) as error:
        parse_args([*argv, flag, path])
    assert message.format(path=path) in str(error.value)
    assert str(error.value).startswith(f"{flag} must ") and "\n" not in str(error.value)
    assert ".old" not in str(error.value)
    parse_args([*argv, "--debug-rollout-only", flag, path])  # no trainer reads it


def test_directories_that_the_trainer_can_read_are_taken(argv, tmp_path):
    single = directory(tmp_path / "single", "config.json", "model.safetensors")
    sharded = directory(tmp_path / "sharded", "model.safetensors.index.json")
    saved = directory(tmp_path / "saved", "iter_0000004/metadata.json", record="4")
    aside = directory(tmp_path / "aside", ".iter_0000004.old/metadata.json", record="4")
    for path in (single, sharded, saved, aside):
        assert parse_args([*argv, "--use-kl-loss", "--ref-load", path]).checkpoint.ref_load == path
    # A run that saves to its --load folder starts without a folder, or with the files of a killed save.
    cut_off = directory(tmp_path / "cut_off", "iter_0000001/metadata.json", ".iter_0000002.partial/common.pt")
    for path in (single, saved, cut_off, directory(tmp_path / "empty"), str(tmp_path / "absent")):
        assert parse_args([*argv, "--load", path, "--save", path]).checkpoint.load == path
    # The folder may also have the records of a run, whose config.json does not describe a model.
    records = directory(tmp_path / "records")
    (tmp_path / "records" / "config.json").write_text('{"rollout": {}}')
    assert start_directory(parse_args([*argv, "--load", records, "--save", records])) != records
    # A run that resumes without a reference does not read --ref-load.
    parse_args([*argv, "--load", saved, "--ref-load", "absent"])


@pytest.mark.parametrize("flag", ["--load", "--save"])
def test_a_file_is_no_folder_of_checkpoints(argv, tmp_path, flag):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{flag} must name a directory, got the file {tmp_path}/file; "):
        parse_args([*argv, flag, str(tmp_path / "file")])


def test_prompt_slices_name_existing_files(argv, tmp_path):
    assert parse_args([*argv, "--prompt-data", f"{tmp_path}/prompts.jsonl@[0:1]"]).data.prompt_data.endswith(
        "@[0:1]"
    )


def test_checkpoint_of_two_models(argv, tmp_path):
    write_model(tmp_path / "model", vocab_size=63)
    with pytest.raises(
        ValueError, match="tokenizer whose ids fit the model, got token id 63 and vocab_size 63"
    ):
        parse_args(argv)
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert parse_args(argv).data.num_rollout == 3
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"--hf-checkpoint must hold a valid config\.json"):
        parse_args(argv)


CONVERTED = ("release/.metadata", "release/common.pt")  # a plan checks that it exists, and a run reads it


def test_converted_checkpoints_are_taken(argv, tmp_path):
    """The flags are those of slime's scripts: the reference and the first weights, or a folder to save to and resume
    from."""
    path = directory(tmp_path / "model_torch_dist", *CONVERTED, record="release\n")
    saved = directory(tmp_path / "saved")
    config = parse_args([*argv, "--use-kl-loss", "--ref-load", path, "--load", saved, "--save", saved])
    assert start_directory(config) == path and resumed_iteration(config) is None
    alone = parse_args([*argv, "--load", path])
    assert start_directory(alone) == path and resumed_iteration(alone) is None


def test_a_reference_that_nothing_reads_is_noted(argv, tmp_path):
    converted = directory(tmp_path / "converted", *CONVERTED, record="release")
    saved = directory(tmp_path / "saved", "iter_0000004/metadata.json", record="4")
    said = f"--ref-load {converted} is not read: the weights come from --load {saved}, and nothing needs a reference"
    flags = [*argv, "--load", saved, "--ref-load", converted]
    assert said in parse_args(flags).notes
    assert not [note for note in parse_args([*flags, "--use-kl-loss"]).notes if "is not read" in note]
    assert not [note for note in parse_args([*argv, "--load", saved]).notes if "is not read" in note]


def test_iterations_of_both_folders_can_be_chosen(argv, tmp_path):
    files = ("iter_0000004/metadata.json", "iter_0000007/metadata.json")
    saved, other = (directory(tmp_path / name, *files, record="7") for name in ("saved", "other"))
    flags = [*argv, "--ref-load", other, "--ref-ckpt-step", "4"]
    assert start_iteration(parse_args(flags)) == 4
    with pytest.raises(
        ValueError, match=r"--ref-ckpt-step must name an iteration in .*other, got 5; it has 4, 7"
    ):
        parse_args([*argv, "--ref-load", other, "--ref-ckpt-step", "5"])
    with pytest.raises(
        ValueError, match="--ref-load must be given with --ref-ckpt-step, got only --ref-ckpt-step 5"
    ):
        parse_args([*argv, "--ref-ckpt-step", "5"])
    resumed = parse_args([*argv, "--load", saved, "--ckpt-step", "4", "--ref-load", other])
    assert resumed_iteration(resumed) == 4
    anew = parse_args([*argv, "--load", saved, "--ckpt-step", "4", "--ref-load", other, "--finetune"])
    assert (resumed_iteration(anew), start_directory(anew), start_iteration(anew)) == (None, saved, 4)
    first = parse_args([*argv, "--load", directory(tmp_path / "empty"), "--ref-load", other, "--finetune"])
    assert (start_directory(first), start_iteration(first)) == (other, None)
