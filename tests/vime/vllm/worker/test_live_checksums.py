"""Tests checksums of live tensors, by which an engine compares quantised weights with an update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vime.vllm.worker import live_checksums
from vime.vllm.worker.live_checksums import checksum, checksums, has_scales


def test_every_byte_and_its_position_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is the same for pieces of any size."""
    values = torch.randint(-8, 8, (40, 16), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    whole = checksum(values)
    monkeypatch.setattr(live_checksums, "_PIECE", 100)
    assert checksum(values) == whole == checksum(values.view(16, 40)) == checksum(values.clone())
    found = {whole}
    for row in range(40):
        changed = values.clone()
        changed[row, row % 16] ^= 1
        found.add(checksum(changed))
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    found |= {checksum(swapped), checksum(values[:-1]), checksum(torch.zeros(3)), checksum(torch.zeros(4))}
    assert len(found) == 45


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float32])
def test_all_dtypes_have_checksums(dtype: torch.dtype) -> None:
    values = torch.arange(12).to(dtype)
    assert checksum(values) != checksum(torch.arange(11, -1, -1).to(dtype))
    assert checksum(values.view(3, 4).T) == checksum(values.view(3, 4).T.contiguous())


def test_tensors_beside_parameters_count() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("scales", torch.ones(2))
    module.packed = torch.ones(3)  # type: ignore[assignment]
    module.kv_cache = torch.ones(5)  # type: ignore[assignment]
    found = checksums([nn.Sequential(module)])
    assert sorted(found) == ["0.bias", "0.packed", "0.scales", "0.weight"]


def test_an_update_in_a_scheme_is_known_by_its_scales() -> None:
    assert has_scales(["a.weight", "a.weight_scale_inv"]) and has_scales(
        ["a.weight_packed", "a.weight_scale"]
    )
    assert not has_scales(["a.weight", "scale.weight", "attn.k_scale"])
