"""Compares the linear layers of rl_kernel.fp8 with bfloat16: times and errors of the product and both gradients.

    python benchmarks/fp8_products.py OUT.json                   the four products of a Qwen3-4B layer, 16,384 rows
    python benchmarks/fp8_products.py OUT.json --experts         also the grouped products of a Qwen3-30B-A3B layer
    python benchmarks/fp8_products.py OUT.json --deepgemm        also with DeepGEMM, from the package sgl-deep-gemm
    python benchmarks/fp8_products.py OUT.json --device cpu --rows 64       the reference, to try the script

A row has the time of the product alone, with the rounding of its operands, and of bfloat16 (cuBLAS, or torch's grouped
product). `weight_gradient_added` is the weight's gradient and its sum with a float32 buffer. With DeepGEMM, one kernel
computes both (Triton's for experts). Weights are rounded once per optimizer step, so their rounding has its own row in
the JSON. Each time is the median of `--repeats` calls between two events of the device. `host_us` are the host's times
for a layer's forward and backward, with few rows. The errors are relative to the float64 product of the unrounded
operands, and the last column compares the kernels with the reference of rl_kernel.fp8 on the first rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from rl_kernel import fp8
from rl_kernel.fp8 import reference

LAYERS = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
"""Product of a Qwen3-4B layer -> outputs and inputs."""
EXPERTS = {"experts_gate_up": (1536, 2048), "experts_down": (2048, 768)}
"""Product of the 128 experts of a Qwen3-30B-A3B layer -> outputs and inputs per expert."""
COUNT = 128
HOST_CALLS = 200
CHECKED = 256
"""Number of rows, and of rows and columns of a weight's gradient, whose errors are computed in float64."""

PAUSE = 2_000_000
"""Cycles that the device waits before a call, so that the launches of the host do not count: about 1 ms."""

Call = Callable[[], Tensor]


class Timer:
    """Measures calls on a device."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def median_ms(self, call: Callable[[], object]) -> float:
        """Returns the median time of a call, after two calls that compile and fill caches."""
        for _ in range(2):
            call()
        return statistics.median(self._ms(call) for _ in range(self.repeats))

    def _ms(self, call: Callable[[], object]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


@contextmanager
def products(name: str) -> Iterator[None]:
    """Multiplies with a library inside the block, and with torch afterwards."""
    device = torch.device("cuda")
    fp8.choose_products(name, device)
    try:
        yield
    finally:
        fp8.choose_products("torch", device)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def parts_on_gpu(
    x: Tensor, weights: Tensor, upstream: Tensor, ends: Tensor | None, deepgemm: bool
) -> dict[str, Call]:
    """Returns name -> product of operands that are rounded already."""
    from rl_kernel.fp8 import fast, library
    from rl_kernel.fp8.kernels import RowGroups, multiply_columns, multiply_rows, quantize, quantize_blocks

    spans = None if ends is None else RowGroups.from_ends(ends, len(x))
    rows, columns = quantize(x, spans, rows=True, columns=True, power_of_two=False)
    grad_rows, grad_columns = fast.round_upstream(upstream, ends, False)
    blocks, turned = quantize_blocks(weights, power_of_two=False)
    count, dtype = len(weights), x.dtype
    assert rows is not None and columns is not None and blocks is not None and turned is not None
    found = {
        "forward_triton": lambda: multiply_rows(rows, blocks, spans, count, dtype),
        "input_gradient_triton": lambda: multiply_rows(grad_rows, turned, spans, count, dtype),
        "weight_gradient_triton": lambda: multiply_columns(grad_columns, columns, spans, count, dtype),
    }
    if ends is None and library.library_refusal(x.device) is None:
        found |= {
            "forward_torch": lambda: library.multiply_rows(rows, blocks, dtype),
            "input_gradient_torch": lambda: library.multiply_rows(grad_rows, turned, dtype),
            "weight_gradient_torch": lambda: library.multiply_columns(grad_columns, columns, dtype),
        }
    if deepgemm:
        found |= parts_with_deepgemm(x, weights, upstream, spans)
    rounding: dict[str, Callable[[], object]] = {
        "round_rows": lambda: quantize(x, None, rows=True, columns=False, power_of_two=False),
        "round_columns": lambda: quantize(x, spans, rows=False, columns=True, power_of_two=False),
        "round_upstream": lambda: fast.round_upstream(upstream, ends, False),
        "round_weights": lambda: quantize_blocks(weights, power_of_two=False),
    }
    return {**found, **rounding}  # type: ignore[dict-item]  # a rounding returns operands


def parts_with_deepgemm(x: Tensor, weights: Tensor, upstream: Tensor, spans: Any) -> dict[str, Call]:
    from rl_kernel.fp8 import deepgemm
    from rl_kernel.fp8.kernels import quantize, quantize_blocks

    spaced = {"rows": True, "columns": False, "power_of_two": False, "spaced": spans is not None}
    rows: Any = quantize(x, spans, **spaced)[0]
    grads: Any = quantize(upstream, spans, **spaced)[0]
    blocks, turned = quantize_blocks(weights, power_of_two=False, exact=True)
    pairs: dict[str, tuple[Any, Any]] = {"forward": (rows, blocks), "input_gradient": (grads, turned)}

    def multiply(left: Any, right: Any) -> Call:
        if spans is None:
            return lambda: deepgemm.multiply_rows(left, right)
        return lambda: deepgemm.multiply_expert_rows(left, right, spans, len(weights))

    return {f"{name}_deepgemm": multiply(*pair) for name, pair in pairs.items()}


def plain(x: Tensor, weights: Tensor, upstream: Tensor, ends: Tensor | None) -> dict[str, Call]:
    """Returns name -> the product in bfloat16."""
    totals = [torch.zeros(weight.shape, device=x.device) for weight in weights]
    if ends is None:
        return {
            "forward": lambda: x @ weights[0].T,
            "input_gradient": lambda: upstream @ weights[0],
            "weight_gradient": lambda: upstream.T @ x,
            "weight_gradient_added": lambda: totals[0].add_(upstream.T @ x),
        }
    return {
        "forward": lambda: grouped_mm(x, weights.transpose(1, 2), offs=ends),
        "input_gradient": lambda: grouped_mm(upstream, weights, offs=ends),
        "weight_gradient": lambda: grouped_mm(upstream.T, x, offs=ends),
        "weight_gradient_added": lambda: add_all(totals, grouped_mm(upstream.T, x, offs=ends)),
    }


def add_all(totals: list[Tensor], gradients: Tensor) -> Tensor:
    """Adds the gradients of experts as the trainer does, and returns the first sum."""
    torch._foreach_add_(totals, list(gradients.unbind()))
    return totals[0]


def whole(module: Any, x: Tensor, weights: Tensor, upstream: Tensor, ends: Tensor | None) -> dict[str, Call]:
    """Returns name -> the product with the rounding of its operands, except the weight's. The rounding of the input for
    both products counts in the forward, that of the output's gradient in the gradient of the input."""
    rounded = module.round_upstream(upstream, ends, False)
    _, columns = module.outputs_and_columns(x, module.round_weights(weights, False), ends, False)
    kept = module.round_weights(weights, False)  # once per optimizer step
    totals = [torch.zeros(weight.shape, device=x.device) for weight in weights]
    return {
        "forward": lambda: module.outputs_and_columns(x, kept, ends, False)[0],
        "input_gradient": lambda: module.input_gradients(
            module.round_upstream(upstream, ends, False), kept, ends, False
        ),
        "weight_gradient": lambda: module.weight_gradients(rounded, columns, ends, False, x.dtype),
        "weight_gradient_added": lambda: add_gradient(module, rounded, columns, ends, x.dtype, totals),
    }


def add_gradient(
    module: Any, rounded: Any, columns: Any, ends: Tensor | None, dtype: torch.dtype, totals: list[Tensor]
) -> Tensor:
    """Adds the weights' gradients to buffers: in one kernel with DeepGEMM, and otherwise as Megatron does."""
    if not fp8.uses_deepgemm(dtype):
        return add_all(totals, module.weight_gradients(rounded, columns, ends, False, dtype))
    if ends is None:
        module.add_weight_gradient(rounded, columns, False, totals[0])
    else:
        module.add_expert_gradients(rounded, columns, ends, False, totals)
    return totals[0]


def errors(got: dict[str, Tensor], x: Tensor, weight: Tensor, upstream: Tensor, rows: int) -> dict[str, Any]:
    """Returns the errors of the first rows of one weight's products: against float64, and against the reference."""
    rounded = {
        "forward": reference.outputs(x[:rows], weight[None], None, False),
        "input_gradient": reference.input_gradients(upstream[:rows], weight[None], None, False),
    }
    truth = {
        "forward": x[:rows].double() @ weight.double().T,
        "input_gradient": upstream[:rows].double() @ weight.double(),
        "weight_gradient": upstream[:, :CHECKED].double().T @ x[:, :CHECKED].double(),
    }
    side = upstream[:, :CHECKED], x[:, :CHECKED]
    rounded["weight_gradient"] = reference.weight_gradients(*side, None, False, x.dtype)[0]
    found = {
        "forward": got["forward"][:rows],
        "input_gradient": got["input_gradient"][:rows],
        "weight_gradient": got["weight_gradient"].reshape(-1, *weight.shape)[0, :CHECKED, :CHECKED],
    }
    return {
        name: {"to_float64": relative(found[name], truth[name]), "to_reference": relative(found[name], want)}
        for name, want in rounded.items()
    }


def host_time(shape: tuple[int, int], deepgemm: bool) -> dict[str, float]:
    """Returns the host's time of a layer's forward and backward in fp8 and in bfloat16, and the launches, with
    128 rows. The weight is rounded once, as in a step of several micro-batches. With DeepGEMM, the weight's gradient is
    added to a buffer."""
    weight = nn.Parameter(torch.randn(*shape, device="cuda").bfloat16())
    x = torch.randn(128, shape[1], device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn(128, shape[0], device="cuda").bfloat16()
    total = torch.zeros(shape, device="cuda")
    found: dict[str, float] = {}
    wait = torch.cuda.synchronize
    layers: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]]
    layers = {"fp8": ("torch", fp8.linear), "bf16": ("torch", linear)}
    if deepgemm:
        layers["deepgemm"] = "deepgemm", lambda x, weight: fp8.linear(x, weight, weight_grad=total)
    for name, (library, layer) in layers.items():
        with products(library), fp8.keep_rounded(gradients=True):
            for calls in (5, HOST_CALLS):
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    layer(x, weight).backward(upstream)
                    weight.grad = x.grad = None
                found[f"{name}_us"] = (time.perf_counter() - start) / calls * 1e6
            wait()
            with torch.profiler.profile() as profile:
                layer(x, weight).backward(upstream)
                wait()
        launches = (event.count for event in profile.key_averages() if "LaunchKernel" in event.key)
        found[f"{name}_launches"] = sum(launches)
    return found


def compare(shape: tuple[int, int], asked: argparse.Namespace, experts: int) -> dict[str, Any]:
    torch.manual_seed(0)
    outputs, inputs = shape
    make = lambda *size: torch.randn(*size, device=asked.device).bfloat16()  # noqa: E731
    rows = asked.rows * (4 if experts else 1)
    x, weights = make(rows, inputs), make(experts or 1, outputs, inputs) / inputs**0.5
    upstream, ends = make(rows, outputs), None
    if experts:
        shares = torch.rand(experts).softmax(0).mul(rows).int()
        shares[-1] += rows - shares.sum()
        ends = shares.cumsum(0, dtype=torch.int32).to(asked.device)
    module: Any = reference
    timer = Timer(asked.device, asked.repeats)
    found: dict[str, Any] = {}
    if asked.device == "cuda":
        from rl_kernel.fp8 import fast

        module = fast
        parts = parts_on_gpu(x, weights, upstream, ends, asked.deepgemm)
        found["parts_ms"] = {name: timer.median_ms(call) for name, call in parts.items()}
    calls = whole(module, x, weights, upstream, ends)
    found["fp8_ms"] = {name: timer.median_ms(call) for name, call in calls.items()}
    found["bf16_ms"] = {name: timer.median_ms(c) for name, c in plain(x, weights, upstream, ends).items()}
    results = {name: call() for name, call in calls.items()}
    if asked.deepgemm:
        with products("deepgemm"):
            calls = whole(module, x, weights, upstream, ends)
            found["deepgemm_ms"] = {name: timer.median_ms(call) for name, call in calls.items()}
            again = {name: call() for name, call in calls.items()}
        found["deepgemm_difference"] = max(
            relative(again[name], result) for name, result in results.items() if "added" not in name
        )
    if not experts:
        found["errors"] = errors(results, x, weights[0], upstream, min(rows, CHECKED))
        if asked.device == "cuda":
            found["host"] = host_time(shape, asked.deepgemm)
    flops = 2 * rows * outputs * inputs
    found["fp8_tflops"] = {name: flops / ms / 1e9 for name, ms in found["fp8_ms"].items()}
    found["bf16_tflops"] = {name: flops / ms / 1e9 for name, ms in found["bf16_ms"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare linear layers in fp8 with bfloat16.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--deepgemm", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    cuda = asked.device == "cuda"
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "rows": asked.rows,
        "layers": {},
    }
    shapes = {name: (shape, 0) for name, shape in LAYERS.items()}
    if asked.experts:
        shapes |= {name: (shape, COUNT) for name, shape in EXPERTS.items()}
    print(TITLE)
    for name, (shape, experts) in shapes.items():
        found = record["layers"][name] = compare(shape, asked, experts)
        print(f"{name} | {describe_layer(found)}", flush=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


TITLE = (
    "product | bf16 / fp8 with rounding: forward, input gradient, weight gradient, the same added to a buffer | "
    "with DeepGEMM | bf16 / fp8 products alone"
)


def ratios(found: dict[str, Any], kind: str) -> str:
    return ", ".join(f"{found['bf16_ms'][key] / ms:.2f}" for key, ms in found[kind].items())


def describe_layer(found: dict[str, Any]) -> str:
    """Returns the figures of a layer in one line."""
    line = ratios(found, "fp8_ms")
    if "deepgemm_ms" in found:
        difference = found["deepgemm_difference"]
        line += f" | deepgemm {ratios(found, 'deepgemm_ms')}, difference {difference:.1e}"
    if parts := found.get("parts_ms"):
        rounding = ", ".join(f"{v:.3f}" for k, v in parts.items() if k.startswith("round"))
        kinds = [kind for kind in ("torch", "triton", "deepgemm") if f"forward_{kind}" in parts]
        names = ("forward", "input_gradient", "weight_gradient")
        alone = (
            f"{kind} "
            + ", ".join(
                f"{found['bf16_ms'][key] / parts[f'{key}_{kind}']:.2f}"
                for key in names
                if f"{key}_{kind}" in parts
            )
            for kind in kinds
        )
        line += f" | rounding ms {rounding} | " + "; ".join(alone)
    if "errors" in found:
        worst = max(error["to_reference"] for error in found["errors"].values())
        line += f" | largest difference from the reference {worst:.1e}"
    if host := found.get("host"):
        kinds = [kind for kind in ("fp8", "bf16", "deepgemm") if f"{kind}_us" in host]
        line += " | host us, launches: "
        line += "; ".join(f"{kind} {host[f'{kind}_us']:.0f}, {host[f'{kind}_launches']}" for kind in kinds)
    return line


if __name__ == "__main__":
    main()
