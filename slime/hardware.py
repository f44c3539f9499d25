"""One table of GPUs, also for machines without them. Plans, configuration and benchmarks read it.

Speeds are the vendor's published peaks, so a time that is computed from them is a lower bound. Imports no other
module of this project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in the system in which it is usually sold. Bandwidths are per GPU, in bytes per second."""

    name: str
    devices: tuple[str, ...]
    """Names of this GPU in its driver. Other variants (PCIe cards, other memory sizes) are not listed."""
    memory_gib: float
    """Memory that CUDA reports (`total_memory`), less than `nvidia-smi` prints and less than advertised."""
    bf16_flops: float
    """Dense bfloat16 FLOPs per second. Datasheets often give twice this number, for sparse matrices."""
    memory_bytes_s: float
    nvlink_bytes_s: float
    """In one direction. Datasheets give the sum of both directions. 0: the GPU has no NVLink."""
    network_bytes_s: float
    """In one direction, through the network card of one GPU, in the vendor's own systems."""
    gpus_per_node: int
    nvlink_domain: int
    """Number of GPUs that NVLink connects, in a node or in a rack."""
    cpu: str = "x86_64"
    """Architecture of the host's CPU."""
    shared_kib: int = 227
    """Shared memory that one program of a kernel may have (CUDA C++ Programming Guide: compute capability 9.0, 10.0 and
    10.3)."""
    has_fp8: bool = True
    """The GPU multiplies fp8 numbers: compute capability 8.9 or newer."""
    has_microscaling: bool = False
    """The GPU multiplies MXFP8 and NVFP4: compute capability 10.0 or newer."""


def _card(
    name: str, device: str, memory_gib: float, bf16_flops: float, memory_bytes_s: float, *, has_fp8: bool
) -> Hardware:
    """Returns a PCIe card of compute capability 8.6 or 8.9, with one card per host and a network of 10 Gbit/s."""
    sizes = (memory_gib, bf16_flops, memory_bytes_s, 0, 1.25e9, 1, 1)
    return Hardware(name, (device,), *sizes, shared_kib=99, has_fp8=has_fp8)


# Sources. "CUDA total" is the number in PyTorch's out-of-memory errors ("GPU 0 has a total capacity of ..."), from
# public logs of each GPU. It differs by about 0.1 GiB between drivers.
HARDWARE: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        # nvidia-smi 189471 MiB; CUDA total 184.31 GiB. NVIDIA, "GB200 NVL72" (specifications): 72 GPUs, BF16 360
        # PFLOP/s sparse = 2.5 dense per GPU, 576 TB/s of memory = 8 per GPU, NVLink 130 TB/s = 1.8 per GPU in both
        # directions. Four GPUs and two Grace CPUs (Arm) in a compute tray, one ConnectX-7 of 400 Gb/s for each GPU:
        # MLCommons, inference_results_v6.1, systems/GB200-NVL72_GB200-186GB_aarch64x16_Dynamo.json, and "DGX GB200
        # User Guide".
        Hardware(
            name="gb200",
            devices=("NVIDIA GB200",),
            memory_gib=184.31,
            bf16_flops=2.5e15,
            memory_bytes_s=8e12,
            nvlink_bytes_s=900e9,
            network_bytes_s=50e9,
            gpus_per_node=4,
            nvlink_domain=72,
            cpu="aarch64",
            has_microscaling=True,
        ),
        # nvidia-smi 284208 MiB; CUDA total 276.50 GiB. NVIDIA, "GB300 NVL72" (specifications): 72 GPUs, BF16 360
        # PFLOP/s sparse, 576 TB/s of memory, NVLink 130 TB/s, one ConnectX-8 of 800 Gb/s for each GPU.
        Hardware(
            name="gb300",
            devices=("NVIDIA GB300",),
            memory_gib=276.5,
            bf16_flops=2.5e15,
            memory_bytes_s=8e12,
            nvlink_bytes_s=900e9,
            network_bytes_s=100e9,
            gpus_per_node=4,
            nvlink_domain=72,
            cpu="aarch64",
            has_microscaling=True,
        ),
        # CUDA total 267.69 GiB, device name as PyTorch's logs show it. NVIDIA, "HGX platform" (HGX B300): BF16 36
        # PFLOP/s sparse for eight GPUs = 2.25 dense per GPU, NVLink 1.8 TB/s in both directions, ConnectX-8 of 800
        # Gb/s; "DGX B300": 8 TB/s of memory per GPU.
        Hardware(
            name="b300",
            devices=("NVIDIA B300 SXM6 AC",),
            memory_gib=267.69,
            bf16_flops=2.25e15,
            memory_bytes_s=8e12,
            nvlink_bytes_s=900e9,
            network_bytes_s=100e9,
            gpus_per_node=8,
            nvlink_domain=8,
            cpu="x86_64",
            has_microscaling=True,
        ),
        # nvidia-smi 183359 MiB; CUDA total 178.35 GiB. NVIDIA, "DGX B200" datasheet: eight GPUs, 64 TB/s of memory = 8
        # per GPU (pytorch/ao pull request 4002 derives 7.67 from bus width and clock), NVLink 14.4 TB/s = 1.8 per GPU,
        # ConnectX-7 of 400 Gb/s. "HGX platform" (HGX B200): BF16 36 PFLOP/s sparse = 2.25 dense per GPU.
        Hardware(
            name="b200",
            devices=("NVIDIA B200",),
            memory_gib=178.35,
            bf16_flops=2.25e15,
            memory_bytes_s=8e12,
            nvlink_bytes_s=900e9,
            network_bytes_s=50e9,
            gpus_per_node=8,
            nvlink_domain=8,
            cpu="x86_64",
            has_microscaling=True,
        ),
        # nvidia-smi 143771 MiB; CUDA total 139.80 GiB. NVIDIA, "H200" datasheet (SXM): BF16 1,979 TFLOP/s sparse = 989
        # dense, 4.8 TB/s, NVLink 900 GB/s in both directions. "DGX H200": eight GPUs, ConnectX-7 of 400 Gb/s.
        Hardware(
            name="h200",
            devices=("NVIDIA H200",),
            memory_gib=139.8,
            bf16_flops=989e12,
            memory_bytes_s=4.8e12,
            nvlink_bytes_s=450e9,
            network_bytes_s=50e9,
            gpus_per_node=8,
            nvlink_domain=8,
            cpu="x86_64",
        ),
        # nvidia-smi 81559 MiB; CUDA total 79.18 GiB (driver 580: 85017493504 bytes). NVIDIA, "H100" datasheet (SXM):
        # BF16 1,979 TFLOP/s sparse = 989 dense, 3.35 TB/s, NVLink 900 GB/s in both directions. "DGX H100": eight GPUs,
        # ConnectX-7 of 400 Gb/s.
        Hardware(
            name="h100",
            devices=("NVIDIA H100 80GB HBM3",),
            memory_gib=79.18,
            bf16_flops=989e12,
            memory_bytes_s=3.35e12,
            nvlink_bytes_s=450e9,
            network_bytes_s=50e9,
            gpus_per_node=8,
            nvlink_domain=8,
            cpu="x86_64",
        ),
        # nvidia-smi 81920 MiB; CUDA total 79.15 GiB. NVIDIA, "A100 80GB" datasheet (SXM): BF16 312 TFLOP/s dense,
        # 2,039 GB/s, NVLink 600 GB/s in both directions. "DGX A100 User Guide": eight GPUs, ConnectX-6 of 200 Gb/s.
        Hardware(
            name="a100",
            devices=("NVIDIA A100-SXM4-80GB",),
            memory_gib=79.15,
            bf16_flops=312e12,
            memory_bytes_s=2.039e12,
            nvlink_bytes_s=300e9,
            network_bytes_s=25e9,
            gpus_per_node=8,
            nvlink_domain=8,
            cpu="x86_64",
            shared_kib=163,  # compute capability 8.0
            has_fp8=False,
        ),
        # nvidia-smi 40960 MiB; CUDA total 39.39 to 39.56 GiB. NVIDIA, "A100" datasheet (40GB SXM): BF16 312 TFLOP/s
        # dense, 1,555 GB/s, NVLink 600 GB/s in both directions. "DGX A100" with 320 GB: eight GPUs, ConnectX-6 of
        # 200 Gb/s.
        Hardware(
            name="a100-40",
            devices=("NVIDIA A100-SXM4-40GB",),
            memory_gib=39.39,
            bf16_flops=312e12,
            memory_bytes_s=1.555e12,
            nvlink_bytes_s=300e9,
            network_bytes_s=25e9,
            gpus_per_node=8,
            nvlink_domain=8,
            shared_kib=163,
            has_fp8=False,
        ),
        # nvidia-smi 24564 MiB; CUDA total 23.61 to 23.65 GiB. NVIDIA, "Ada GPU Architecture" (whitepaper, RTX 4090):
        # BF16 with float32 sums 165.2 TFLOP/s dense, 1,008 GB/s. No NVLink.
        _card("rtx4090", "NVIDIA GeForce RTX 4090", 23.61, 165.2e12, 1.008e12, has_fp8=True),
        # nvidia-smi 23034 MiB; CUDA total 22.03 GiB. NVIDIA, "L4" datasheet: BF16 242 TFLOP/s sparse = 121 dense, 300
        # GB/s. No NVLink.
        _card("l4", "NVIDIA L4", 22.03, 121e12, 300e9, has_fp8=True),
        # nvidia-smi 23028 MiB; the CUDA total is that of the L4 less these 6 MiB. NVIDIA, "A10" datasheet: BF16 125
        # TFLOP/s dense, 600 GB/s. No NVLink. The A10G of a cloud is another GPU with fewer FLOPs.
        _card("a10", "NVIDIA A10", 22.02, 125e12, 600e9, has_fp8=False),
    )
}
"""The values of --gpu."""


def find_hardware(device: str) -> Hardware | None:
    """Returns the entry of the GPU with this driver name, or None if the table does not have it."""
    return next((gpu for gpu in HARDWARE.values() if device in gpu.devices), None)
