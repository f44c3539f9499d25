"""Tests rows of experts in an answer: read, cut if the server has no start, and an error if they do not match the
tokens."""

from __future__ import annotations

import numpy as np
import pytest

from slime.config import FlagGroup
from vime.vllm.group_wire import Array, unpacked
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import VLLM
from vime.vllm.worker.columns import routed_experts
from vime.vllm.worker.columns.routed_experts import check_rows

ROWS = np.arange(7 * 2 * 3, dtype=np.uint8).reshape(7, 2, 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_of_all_tokens_and_of_the_last_ones(dtype):
    check_rows((ROWS.astype(dtype),), tokens=8, start=0)
    check_rows((ROWS[5:].astype(dtype),), tokens=8, start=5)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            None,
            "must give the experts of each token, got none for 8 tokens; check that it runs with --enable-",
        ),
        ((ROWS[:5],), r"one row of experts per token that it computed, got 5 for tokens \[0, 7\)"),
        ((ROWS[:, 0],), r"unsigned \[tokens, layers, k\], got uint8 \[7, 3\]"),
        ((ROWS.astype(np.float32),), r"unsigned \[tokens, layers, k\], got float32 \[7, 2, 3\]"),
    ],
)
def test_anything_else_is_an_error(column, said):
    with pytest.raises(ValueError, match=said):
        check_rows(column, tokens=8, start=0)


def test_what_is_not_plain_numbers_is_not_read():
    objects = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="OBJECT"):
        unpacked([Array(str(objects.dtype), [1], objects.tobytes())])
    with pytest.raises(ValueError, match="reshape"):
        unpacked([Array("int32", [3], b"1234")])


def test_a_server_has_the_flag_and_the_setting():
    settings = {"model_path": "m", "log_path": "l", "weight_dir": "/w", "run_key": "k", "port": 9}
    plain, telling = (VllmServer(VllmSpec(**settings, reports_experts=on)) for on in (False, True))
    settings = ["--additional-config", '{"vime": {"routed_experts": true}}']
    assert set(telling.command()) - set(plain.command()) == {routed_experts.FLAG, *settings}
    assert telling.environment() == plain.environment()
    assert telling.command().count(routed_experts.FLAG) == 1


def test_the_engines_own_flag_is_ours():
    group = FlagGroup("--vllm-enable-return-routed-experts", "vllm_enable_return_routed_experts", [])
    with pytest.raises(ValueError, match="must be left out; use --use-rollout-routing-replay"):
        VLLM.parse([group])
