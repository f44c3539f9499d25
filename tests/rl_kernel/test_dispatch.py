"""Tests the mode and the choice of the implementation: every branch, with its reason."""

import subprocess
import sys

import pytest
import torch

import rl_kernel
from rl_kernel import dispatch, mode
from rl_kernel.contract import CONTRACTS
from rl_kernel.dispatch import Choice, Refused, capabilities, choose, float64_refusal, machine_refusal
from rl_kernel.mode import configure, reads_values, settings, using

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")
ON_HOST = "the tensors are on cpu and the kernels need a CUDA device"


@pytest.fixture
def hopper(monkeypatch):
    """Simulates a machine with a GPU of compute capability 9.0 and compiled kernels."""
    monkeypatch.setattr(dispatch, "machine_refusal", lambda kind: None if kind == "cuda" else ON_HOST)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)


def test_the_mode_is_auto_for_all_operators():
    assert settings().mode == "auto"
    assert settings().operators == set(CONTRACTS)


def test_configure_and_using():
    with using("strict", ["logp"]):
        assert settings() == mode.Settings("strict", frozenset({"logp"}))
        with using("off"):
            assert settings().mode == "off"
        assert settings().mode == "strict"
        configure("auto")
        assert settings() == mode.Settings()
    assert settings() == mode.Settings()


def test_using_restores_after_an_error():
    with pytest.raises(KeyError), using("off"):
        raise KeyError
    assert settings().mode == "auto"
    with pytest.raises(ValueError), using("fast"):
        pass
    assert settings().mode == "auto"


def test_wrong_settings_are_named_and_change_nothing():
    with pytest.raises(ValueError, match="mode must be one of off, auto, strict, got 'fast'; pick one"):
        configure("fast")
    with pytest.raises(
        ValueError, match="operator must be one of linear_logp, .* got 'lgop'; check the spelling"
    ):
        configure("off", ["logp", "lgop"])
    assert settings() == mode.Settings()


def test_an_unknown_operator_or_implementation_is_an_error():
    with pytest.raises(ValueError, match="operator must be one of .* got 'softmax'"):
        choose("softmax", HOST)
    with pytest.raises(ValueError, match="impl must be one of reference, triton, got 'cuda'; leave it out"):
        choose("logp", HOST, "cuda")


def test_auto_runs_fast_where_it_can(hopper):
    assert choose("logp", DEVICE) == Choice("logp", "triton")
    assert choose("logp", DEVICE, refusal="x is odd") == Choice(
        "logp", "reference", "x is odd", fallback=True
    )
    assert choose("logp", HOST) == Choice("logp", "reference", ON_HOST, fallback=True)
    # The machine's reason comes first.
    assert choose("logp", HOST, refusal="x is odd").reason == ON_HOST


def test_off_is_no_fallback(hopper):
    with using("off"):
        assert choose("logp", DEVICE) == Choice("logp", "reference", "the mode is off")


def test_operators_that_are_not_listed_run_as_if_off(hopper):
    with using("strict", ["logp"]):
        assert choose("logp", DEVICE).implementation == "triton"
        listed = "the operator is not in the configured list"
        assert choose("ratio_kl", DEVICE) == Choice("ratio_kl", "reference", listed)


def test_strict_raises_with_the_reason(hopper):
    with using("strict"):
        assert choose("logp", DEVICE) == Choice("logp", "triton")
        with pytest.raises(Refused) as error:
            choose("logp", DEVICE, refusal="x is odd")
        assert str(error.value) == (
            "logp must run its Triton implementation, but x is odd; pass inputs it takes or use mode 'auto'"
        )
        with pytest.raises(Refused, match=ON_HOST):
            choose("logp", HOST)


@pytest.mark.parametrize("operator", sorted(dispatch.HOST_OPERATORS))
def test_operators_of_the_host_do_not_fall_back_there(hopper, operator):
    for setting in ("auto", "strict"):
        with using(setting):
            assert choose(operator, HOST) == Choice(operator, "reference", "host tensors")
            assert choose(operator, DEVICE) == Choice(operator, "triton")


def test_a_demand_goes_before_the_mode(hopper):
    for setting in mode.MODES:
        with using(setting, ["ratio_kl"]):
            assert choose("logp", DEVICE, "triton") == Choice("logp", "triton")
            asked = choose("logp", DEVICE, "reference", "x is odd")
            assert asked == Choice("logp", "reference", "impl='reference' was asked for")
            with pytest.raises(Refused, match="x is odd"):
                choose("logp", DEVICE, "triton", "x is odd")
            with pytest.raises(Refused, match=ON_HOST):
                choose("masked_sum", HOST, "triton")


def test_the_interpreter_runs_kernels_on_the_host_by_demand_only(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    assert choose("logp", HOST, "triton") == Choice("logp", "triton")
    with pytest.raises(Refused, match="x is odd"):
        choose("logp", HOST, "triton", "x is odd")
    assert choose("logp", HOST).implementation == "reference"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), (None, False)])
def test_interpreted_by_the_environment(monkeypatch, value, on):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert dispatch.interpreted() is on


@pytest.fixture
def machine(monkeypatch):
    """Simulates a machine with or without Triton, and with a compute capability."""
    machine_refusal.cache_clear()

    def describe(triton=True, capability=(9, 0)):
        find = "found" if triton else None
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: find)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        machine_refusal.cache_clear()

    yield describe
    machine_refusal.cache_clear()


def test_reasons_of_the_machine(machine):
    machine()
    assert machine_refusal("cuda") is None
    assert machine_refusal("cpu") == ON_HOST
    assert machine_refusal("mps") == "the tensors are on mps and the kernels need a CUDA device"
    machine(capability=(8, 0))
    assert machine_refusal("cuda") is None
    machine(capability=(7, 5))
    assert machine_refusal("cuda") == "the GPU has compute capability 7.5 and the kernels need 8.0"
    machine(triton=False)
    assert machine_refusal("cuda") == "Triton is not installed"


def test_float64_is_the_reference():
    wide, narrow = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    assert float64_refusal(narrow, None) is None
    assert float64_refusal(narrow, None, wide) == "float64 inputs are computed by the reference only"


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((torch.float64, torch.float64, None), "float64 inputs are computed by the reference only"),
        ((torch.bfloat16, torch.float32, None), "hidden, weight and bias have different dtypes"),
        ((torch.bfloat16, torch.bfloat16, torch.float32), "hidden, weight and bias have different dtypes"),
    ],
)
def test_layers_that_the_kernels_do_not_take(monkeypatch, dtypes, reason):
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    hidden, weight, bias = (
        None if dtype is None else torch.zeros(shape, dtype=dtype)
        for dtype, shape in zip(dtypes, ((2, 8), (3, 8), 3), strict=True)
    )
    targets = torch.tensor([0, 2])
    for op in (rl_kernel.linear_logp, token_sum):
        with pytest.raises(Refused, match=reason):
            op(hidden, weight, targets, bias=bias, impl="triton")
        with using("strict"), pytest.raises(Refused):
            op(hidden, weight, targets, bias=bias)
        op(hidden, weight, targets, bias=bias)


def token_sum(hidden, weight, targets, **kwargs):
    def loss(log_probs, entropy, rows):
        return log_probs.sum(), {}

    return rl_kernel.linear_token_loss(hidden, weight, targets, loss, **kwargs)


def test_values_are_read_on_the_host_and_in_strict_mode():
    class OnDevice:
        is_cuda = True

    assert reads_values(torch.zeros(1)) and not reads_values(OnDevice())
    with using("strict"):
        assert reads_values(OnDevice())
    with using("off"):
        assert not reads_values(OnDevice())


def test_capabilities_are_plain_data_of_the_contract(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    machine()
    table = capabilities()
    assert list(table) == list(CONTRACTS)
    entry = table["linear_logp"]
    assert entry["implementations"] == ["reference", "triton"]
    assert entry["dtypes"]["triton"] == ["float32", "bfloat16", "float16"]
    assert entry["dtypes"]["reference"] == [*entry["dtypes"]["triton"], "float64"]
    assert entry["hardware"]["triton"] == "CUDA, compute capability 8.0 or newer"
    assert entry["parallel"] == ["vocabulary"] and entry["deterministic"] is True
    assert entry["differentiable"] == ["hidden", "weight", "bias"]
    assert entry["outputs"]["bfloat16"] == {"absolute": 3.2e-2, "relative": 0.0}
    assert entry["gradients"]["bfloat16"] == {"absolute": 1e-7, "relative": 2**-5}
    assert entry["here"] == "triton"
    machine(triton=False)
    assert capabilities()["logp"]["here"] == "Triton is not installed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine()
    assert capabilities()["logp"]["here"] == ON_HOST


def test_the_package_imports_without_triton():
    """Kernels are loaded when a call has chosen them, not before."""
    code = "import sys; sys.modules['triton'] = None; import rl_kernel; rl_kernel.capabilities()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
