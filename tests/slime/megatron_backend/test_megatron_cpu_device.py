"""CUDA requests on a machine without a GPU, as megatron-core makes them."""

from __future__ import annotations

import threading

import pytest
import torch
from megatron.core import tensor_parallel
from torch import nn

from slime.megatron_backend.cpu_device import install_cpu_redirect

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the redirect does nothing where there is a GPU"
)


@pytest.fixture(autouse=True)
def redirect():
    install_cpu_redirect()
    install_cpu_redirect()  # a second call changes nothing


def test_device_arguments_reach_the_cpu():
    cpu = torch.device("cpu")
    assert torch.cuda.current_device() == cpu
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device="cuda:1"),
        torch.empty(3, device=torch.device("cuda", 0)),
        torch.ones(1).to("cuda"),
        torch.ones(1).to(device="cuda:0", dtype=torch.bfloat16),
        torch.ones(1).cuda(),
        torch.empty_like(torch.ones(2), device=torch.cuda.current_device()),
        nn.Linear(2, 2).cuda().weight,
    ]
    assert [x.device for x in made] == [cpu] * len(made)
    assert made[4].dtype == torch.bfloat16


def test_type_names_are_those_of_a_gpu():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(1).type(torch.int64).dtype == torch.int64


def test_other_devices_are_left_alone():
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_streams_memory_and_synchronisation_do_nothing():
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.current_stream().record_event()
    event.synchronize()
    torch.cuda.current_stream().wait_event(event)
    assert event.query()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0


def test_rng_tracker_forks_and_restores():
    tracker = tensor_parallel.random.CudaRNGStatesTracker()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tracker.add("other", 11)
    with tracker.fork("other"):
        first = torch.rand(2)
    with tracker.fork("other"):
        second = torch.rand(2)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)  # it is unchanged outside the forks
    torch.manual_seed(11)
    torch.testing.assert_close(torch.cat([first, second]), torch.rand(4), rtol=0, atol=0)


def test_each_thread_installs_for_itself():
    devices = []

    def work() -> None:
        install_cpu_redirect()
        devices.append(torch.zeros(1, device="cuda").device.type)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert devices == ["cpu"]
