"""Reads config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.checkpoints.checkpoint_dir import HF_INDEX
from slime.checkpoints.hub import is_hub_name
from slime.checkpoints.quantized_headers import TensorHeader, check_quantized_headers
from slime.models import FAMILIES, family_for
from slime.models.decoder import Hf
from slime.models.llama_like import FIRST_LAYER, TENSORS, describe_tensors
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.models.slices import Where

_LISTED = 4
"""Number of folders that an error names."""
MAPPED_BYTES = 64 * 2**20
"""Bytes after which loading closes the files that it read from. Pages of open files count as memory of a process."""


class Slices(Protocol):
    """A tensor of an open safetensors file. safetensors has no type for it. Only the indexed part is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, where: Where) -> Tensor: ...


class OpenFile(Protocol):
    """The used methods of an open safetensors file."""

    def __enter__(self) -> OpenFile: ...

    def __exit__(self, kind: object, error: object, trace: object, /) -> object: ...

    def keys(self) -> list[str]: ...

    def metadata(self) -> dict[str, str] | None: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> Slices: ...


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """Returns config.json of a Hugging Face checkpoint directory. Raises ValueError if it is missing or not a JSON
    object.

    The settings of a multimodal model's text model (`text_config`) are moved to the top level, where other models have
    them. `model_type` stays the type of the whole model. Fields that the files of a family leave out have transformers'
    values, or follow from other fields. For a model_type without a family, `tensors` describes the tensors
    (slime.models.llama_like).
    """
    content = read_config_json(checkpoint)
    text = content.get("text_config")
    found = {**text, **content, "text_config": None} if isinstance(text, dict) else content
    family = FAMILIES.get(str(content.get("model_type")))
    if family is None:
        return {**found, **_describe(Path(checkpoint))}
    return {**family.defaults, **found, **family.derived(found)}


def _describe(checkpoint: Path) -> dict[str, object]:
    """Returns the record of the tensors of a checkpoint with safetensors files or their index."""
    index = read_index(checkpoint)
    names = read_tensor_names(checkpoint) if index is None else set(index)
    if names is None:
        return {}
    shapes = {}
    for name in FIRST_LAYER:
        file = (
            checkpoint / index[name]
            if index and name in index
            else next(checkpoint.glob("*.safetensors"), None)
        )
        if name in names and file is not None and file.is_file():
            with open_weights(file, "np") as weights:
                shapes[name] = tuple(open_tensor(weights, name, file).get_shape())
    return {TENSORS: describe_tensors(names, shapes, FAMILIES)}


def read_config_json(checkpoint: str | Path) -> dict[str, Any]:
    """Returns config.json unchanged."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        found = [
            file.parent for depth in ("*", "*/*") for file in sorted(path.parent.glob(f"{depth}/config.json"))
        ]
        what = f"did you mean {' or '.join(map(str, found[:_LISTED]))}?" if found else "check the path"
        if is_hub_name(str(checkpoint)):
            what = f"if that is a name on the Hugging Face hub: hf download {checkpoint} (vime train does so)"
        raise FlagError("--hf-checkpoint", "be a directory with a config.json", checkpoint, what)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FlagError("--hf-checkpoint", "hold a valid config.json", f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise FlagError("--hf-checkpoint", "hold a JSON object in config.json", type(content).__name__)
    return content


def require_readable(file: Path) -> None:
    """Raises ValueError if the file exists and this user may not read it."""
    if file.exists() and not os.access(file, os.R_OK):
        mode = stat.S_IMODE(file.stat().st_mode)
        raise ValueError(
            f"{file} must be readable for the user of the run, got mode {mode:04o} for user id {os.getuid()}; let its "
            f"owner run: chmod a+r {file}"
        )


def open_weights(file: Path, framework: str) -> OpenFile:
    """Opens a file with `safetensors.safe_open`. Raises ValueError with the file's path if it is missing, truncated or
    not a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        opened: OpenFile = safe_open(file, framework=framework)
        return opened
    except (SafetensorError, OSError) as error:
        require_readable(file)  # for an unreadable file, safetensors reports that it does not exist
        got = f"{file.stat().st_size} bytes: {error}" if file.is_file() else "no such file"
        raise ValueError(
            f"{file} must be a whole safetensors file, got {got}; download or copy the checkpoint again"
        ) from error


def open_tensor(weights: OpenFile, name: str, file: Path) -> Slices:
    """Returns the slices of one tensor in an open file. Raises ValueError if the file lacks a tensor that the index
    lists."""
    from safetensors import SafetensorError

    try:
        return weights.get_slice(name)
    except SafetensorError as error:
        raise ValueError(
            f"{file} must have the tensor {name} as in {HF_INDEX}, got {error}; download the checkpoint again"
        ) from error


def read_index(checkpoint: Path) -> dict[str, str] | None:
    """Returns HF tensor name -> name of its file, from the index of a checkpoint in several files. Returns None without
    an index."""
    if not (index := checkpoint / HF_INDEX).is_file():
        return None
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        require_readable(index)
        raise ValueError(
            f"{index} must hold a valid weight_map, got {error!r}; download or copy the checkpoint again"
        ) from error
    return weight_map


def with_own_quantization(hf: Hf, checkpoint: str | Path) -> Hf:
    """Returns `hf`, the config.json of a model, with `quantization_config` of the checkpoint whose files are read. The
    files of --ref-load may be plain while those of --hf-checkpoint are quantised, and the reverse. For files without a
    config.json, `hf` is returned unchanged."""
    if not (Path(checkpoint) / "config.json").is_file():
        return hf
    plain = {key: value for key, value in hf.items() if key != "quantization_config"}
    own = read_hf_config(checkpoint).get("quantization_config")
    return plain | ({"quantization_config": own} if own else {})


def read_tensor_names(checkpoint: Path) -> set[str] | None:
    """Returns the names of a checkpoint's tensors. Returns None without safetensors files."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return None
    if (index := read_index(checkpoint)) is not None:
        return set(index)
    names = set[str]()
    for file in files:
        with open_weights(file, "np") as tensors:
            names |= set(tensors.keys())
    return names


def check_checkpoint_shapes(checkpoint: str | Path, hf_config: Hf, flag: str = "--hf-checkpoint") -> None:
    """Raises ValueError for the first file that is missing or truncated, for the first tensor whose shape does not
    match config.json, for missing layers, or for a quantised weight without its scales.

    `flag` names the checkpoint. The function reads safetensors headers only. It checks the parts that every dense
    decoder has (embedding, MLP, number of layers). The trainer and the engine compare all tensors when they load them.
    A checkpoint without safetensors files is not checked here.
    """
    family = family_for(hf_config)
    scheme = family.scheme(hf_config)
    hidden, ffn = hf_config.get("hidden_size"), hf_config.get("intermediate_size")
    expected = {
        "embed_tokens.weight": [hf_config.get("vocab_size"), hidden],
        "mlp.gate_proj.weight": [ffn, hidden],
        "mlp.down_proj.weight": [hidden, ffn],
    }
    layers, headers = set(), dict[str, TensorHeader]()
    folder = Path(checkpoint)
    files = set(folder.glob("*.safetensors"))
    if files:  # `vime plan` also works with only the JSON files
        files |= {folder / name for name in (read_index(folder) or {}).values()}
    for file in sorted(files):
        with open_weights(file, "np") as tensors:
            names = list(tensors.keys())
            if scheme is not None:
                parts = {name: tensors.get_slice(name) for name in names}
                headers |= {
                    name: TensorHeader(tuple(part.get_shape()), part.get_dtype(), str(file))
                    for name, part in parts.items()
                }
            others = {*family.prediction_names(names, hf_config), *family.tower_names(names, hf_config)}
            for name in set(names) - others:
                layers |= set(re.findall(r"\blayers\.(\d+)\.", name))
                for suffix, shape in expected.items():
                    got = list(tensors.get_slice(name).get_shape()) if name.endswith(suffix) else shape
                    if got != shape:
                        raise FlagError(
                            f"{name} in {file}",
                            f"have shape {shape}, as in config.json",
                            got,
                            f"the weights of {flag} and the config.json are not of one model",
                        )
    if files and len(layers) != hf_config.get("num_hidden_layers"):
        raise FlagError(
            flag,
            f"hold {hf_config.get('num_hidden_layers')} layers, as in its config.json",
            f"{len(layers)} in {checkpoint}",
        )
    if scheme is not None:
        check_quantized_headers(headers, scheme, flag)


def require_weight_files(checkpoint: str | Path) -> None:
    """Raises ValueError for a checkpoint whose index names weight files that are all missing. The check is for a run: a
    plan works with only the JSON files."""
    folder = Path(checkpoint)
    names = sorted(set((read_index(folder) or {}).values()))
    if names and not any((folder / name).exists() for name in names):
        raise FlagError(
            "--hf-checkpoint",
            "have the files that its index names",
            f"none of {len(names)}, such as {names[0]}, in {folder}",
            "download or copy the checkpoint again",
        )


def largest_token_id(checkpoint: str) -> int | None:
    """Returns the highest token id in tokenizer.json, or None if the checkpoint has no such file."""
    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FlagError("--hf-checkpoint", "hold a valid tokenizer.json", f"{path}: {error}") from error
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=None)
