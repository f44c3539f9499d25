"""Tests generated texts for files that users write: YAML, prompt files and config.json give a result or a
ValueError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from make_model import build_config
from switch_bench.settings import _load

from slime.config.config_file import FlagGroup, read_config_file
from slime.config.custom_config import custom_entries
from slime.data.files import _check_fields, _csv_columns
from slime.data.tokenizer import load_tokenizer
from slime.models import MOST_LAYERS, read_decoder
from slime.models.vision import Vision
from slime.plan.model_shape import Shape

TAGS = (
    "!!bool x|!!timestamp x|!!int x|!!float x|2026-99-99|!!python/object:os.system ls|!x y|&a [*a]|!!set x|{[1]: 2}"
    "|\x00"
)
FRAGMENTS = st.sampled_from(
    [*TAGS.split("|"), "a: ", "- ", "\n", "  ", "[", "]", "{", "}", "'", '"', "|", "? ", "1", "%"]
)
YAML = st.lists(FRAGMENTS | st.text(max_size=3), max_size=10).map("".join)


def yaml_readers(path: Path) -> list[Callable[[], object]]:
    group = FlagGroup("--custom-config-path", "custom_config_path", [str(path)])
    return [lambda: read_config_file(path), lambda: custom_entries([group]), lambda: _load(path)]


@pytest.mark.parametrize("text", TAGS.split("|"))
def test_tags_of_yaml_are_no_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    for form in (f"lr: {text}", text, f"{text}: 1"):
        path.write_text(form)
        for read in yaml_readers(path):
            try:
                read()
            except ValueError as error:
                assert str(path) in str(error) or "must" in str(error)


def test_any_yaml(fuzz: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"

    def check(text: str) -> None:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        for read in yaml_readers(path):
            with contextlib.suppress(ValueError):
                read()

    fuzz(check, YAML)


def test_any_csv(fuzz: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        _check_fields.cache_clear()
        for read in (_csv_columns, _check_fields):
            try:
                read((path,))
            except ValueError as error:
                assert str(path) in str(error)

    parts = st.sampled_from([b"a", b",", b"\r", b"\n", b"\r\n", b'"', b"\x00", b"\xff", b"x" * 140_000])
    fuzz(check, st.lists(parts, max_size=12).map(b"".join))


@pytest.mark.parametrize("content", [b"a,b\rc\n1,2\n", b"a\rb"])
def test_a_lone_carriage_return_of_csv_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"x\.csv:1: line must be CSV, got new-line character seen in unquoted field"
    ):
        _csv_columns((tmp_path / "x.csv",))


def test_a_long_field_of_csv_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a," + "b" * 200_000 + "\n1,2\n")
    assert [len(name) for name in _csv_columns((tmp_path / "x.csv",))] == [1, 200_000]


CONFIGS = {
    arch: json.loads(build_config(arch).to_json_string(use_diff=False))
    for arch in ("qwen3-30b-a3b", "glm-4.5-air")
}


def test_any_value_in_config_json(fuzz: Callable[..., None]) -> None:
    leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
    values = leaves | st.lists(leaves, max_size=2) | st.dictionaries(st.text(max_size=3), leaves, max_size=2)

    def check(case: tuple[str, str, object]) -> None:
        arch, name, value = case
        for read in (read_decoder, Shape.of):
            with contextlib.suppress(ValueError):
                read({**CONFIGS[arch], name: value})

    names = sorted({name for config in CONFIGS.values() for name in config})
    fuzz(check, st.tuples(st.sampled_from(sorted(CONFIGS)), st.sampled_from(names), values))


@pytest.mark.parametrize("value", ["x", [], {}, -1, 0, 1.5, True, 2**70])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "model_type"])
def test_sizes_of_config_json_are_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} in config.json must be"):
        read_decoder({**CONFIGS["qwen3-30b-a3b"], name: value})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace"])
def test_a_number_of_layers_has_a_limit(name: str) -> None:
    """Each layer has a record: a number of 2**30 once filled the memory of the host."""
    read_decoder({**CONFIGS["glm-4.5-air"], name: 1 if name == "first_k_dense_replace" else MOST_LAYERS})
    with pytest.raises(
        ValueError, match=f"{name} in config.json must be a number from . to 10,000, got 10001"
    ):
        read_decoder({**CONFIGS["glm-4.5-air"], name: MOST_LAYERS + 1})


@pytest.mark.parametrize("depth", [0, MOST_LAYERS + 1, "2", None, True])
def test_the_layers_of_a_tower_have_a_limit(depth: Any) -> None:
    with pytest.raises(
        ValueError, match="vision_config of config.json must be a number from 1 to 10,000, got"
    ):
        Vision("kind", {}, depth=depth, hidden=8, ffn=8, heads=1, out=8, image_id=1)


@pytest.mark.parametrize(
    "content", ["[]", "1", '{"model": 1}', '{"model": {"type": "x"}, "version": 1}', "{", ""]
)
def test_a_tokenizer_of_wrong_types_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    for settings in ("[]", '{"tokenizer_class": []}', '{"tokenizer_class": "PreTrainedTokenizerFast"}'):
        (tmp_path / "tokenizer_config.json").write_text(settings)
        with pytest.raises(
            ValueError, match="--hf-checkpoint must hold a tokenizer that transformers can load"
        ):
            load_tokenizer(str(tmp_path))
