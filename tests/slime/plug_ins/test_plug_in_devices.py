"""Tests the functions on devices that slime's plug-ins call, in a process without a GPU."""

from __future__ import annotations

import pytest
import torch

from slime.utils import accelerator


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_process_without_a_gpu_has_the_cpu():
    assert accelerator.device_type() == accelerator.device_name(3) == accelerator.current_device() == "cpu"
    assert accelerator.device() == torch.device("cpu") and accelerator.device_count() == 0
    assert accelerator.accelerator_module() is torch.cpu and accelerator.get_device_properties() is None
    assert accelerator.memory_allocated() == accelerator.memory_reserved() == 0
    for function in (accelerator.synchronize, accelerator.empty_cache, accelerator.ipc_collect):
        function()
    accelerator.set_device(0)
    with accelerator.stream(accelerator.current_stream()):
        pass
    assert accelerator.process_group_backend() == accelerator.process_group_backend("gloo") == "gloo"
    with pytest.raises(RuntimeError, match="mem_get_info must be called in a process with a CUDA device"):
        accelerator.mem_get_info()
    accelerator.manual_seed(3)
    first = torch.rand(1)
    accelerator.manual_seed(3)
    assert torch.rand(1) == first


@pytest.mark.parametrize(
    ("visible", "physical", "index"),
    [(None, "3", 3), ("4,6", 6, 1), ("4,6", 0.0, 0), ("GPU-a,GPU-b", "GPU-b", 1), ("4, 6", "4.0", 0)],
)
def test_the_index_of_a_device_of_the_host(monkeypatch, visible, physical, index):
    key = accelerator.visible_devices_env_key()
    monkeypatch.delenv(key, raising=False)
    if visible is not None:
        monkeypatch.setenv(key, visible)
    assert accelerator.resolve_visible_device_id(physical) == index


@pytest.mark.parametrize("physical", [2, "GPU-c", -1])
def test_a_device_that_the_process_does_not_see(monkeypatch, physical):
    monkeypatch.setenv(accelerator.visible_devices_env_key(), "4,6")
    with pytest.raises(RuntimeError, match="must be a device of CUDA_VISIBLE_DEVICES=4,6"):
        accelerator.resolve_visible_device_id(physical)
