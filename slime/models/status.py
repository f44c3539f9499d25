"""The table of the machines on which each family was run. `vime models` prints it, and `python scripts/docs_models.py`
writes its rows into README.md, docs/models.md and docs/status.md.

Tests compared each family's trainer with transformers on tiny models, in float32, on one rank and on two
(`tests/slime/megatron_backend/model/test_families.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

PLANNED = "planned"
"""The flags are accepted, and the family was never run on a GPU."""


@dataclass(frozen=True)
class SupportStatus:
    """The runs of a family."""

    maker: str
    """Maker of the models, the row of README.md."""
    example: str
    """Folder of examples/ with configurations that a test plans."""
    engine: str = "float32"
    """Dtype of the vLLM engine whose log-probs were compared with the trainer's, on a CPU."""
    steps: bool = True
    """A model ran GRPO steps through `vime train` on a CPU."""
    larger: str = ""
    """Models beyond tiny models that ran on a CPU."""
    gpu: str = PLANNED
    """Name of the model that ran on a GPU, with the kind of run."""

    @property
    def cpu(self) -> str:
        """Returns a short text about the runs on CPUs."""
        found = f"tiny model and {self.larger}" if self.larger else "tiny model"
        return found if self.engine == "float32" else f"{found}, engine in {self.engine}"


_TINY = "a tiny model, log-probs compared with vLLM (H200)"
_STEPS = "GRPO steps of a tiny model (H200)"
_DELTA = "bfloat16"
"""vLLM's kernels of gated delta nets for CPUs have no other dtype."""

STATUS: dict[str, SupportStatus] = {
    "qwen2": SupportStatus(
        *("Qwen", "qwen2.5-7b"),
        larger="Qwen2.5-0.5B with random weights",
        gpu="Qwen2.5-Coder-0.5B and 1.5B, published weights (H100 and H200)",
    ),
    "qwen2_5_vl": SupportStatus("Qwen", "qwen2.5-vl-7b", steps=False),
    "qwen2_moe": SupportStatus("Qwen", "qwen1.5-moe-a2.7b", gpu=_STEPS),
    "qwen3": SupportStatus("Qwen", "qwen3-4b", gpu="Qwen3-4B, random weights (H200)"),
    "qwen3_moe": SupportStatus(
        "Qwen", "qwen3-30b-a3b", gpu="Qwen3-30B-A3B, whole, random weights (two H200 and four H100)"
    ),
    "qwen3_vl": SupportStatus("Qwen", "qwen3-vl-4b", gpu="Qwen3-VL-4B, random weights (H100)"),
    "qwen3_vl_moe": SupportStatus("Qwen", "qwen3-vl-30b-a3b", steps=False),
    "qwen3_next": SupportStatus(
        *("Qwen", "qwen3-next-80b-a3b", _DELTA),
        gpu="Qwen3-Next-80B-A3B, 4 of 48 layers, random weights (H200)",
    ),
    "qwen3_5": SupportStatus("Qwen", "qwen3.5-9b", _DELTA, steps=False, gpu=_TINY),
    "qwen3_5_text": SupportStatus("Qwen", "qwen3.5-9b", _DELTA),
    "qwen3_5_moe": SupportStatus("Qwen", "qwen3.5-35b-a3b", _DELTA, steps=False, gpu=_TINY),
    "qwen3_5_moe_text": SupportStatus("Qwen", "qwen3.5-35b-a3b", _DELTA, steps=False),
    "gemma2": SupportStatus("Gemma", "gemma-2-2b", gpu=_STEPS),
    "gemma3": SupportStatus("Gemma", "gemma-3-4b", steps=False),
    "gemma3_text": SupportStatus("Gemma", "gemma-3-1b", gpu=_STEPS),
    "gemma4": SupportStatus("Gemma", "gemma-4-26b-a4b", steps=False),
    "gemma4_text": SupportStatus("Gemma", "gemma-4-31b", steps=False),
    "glm4": SupportStatus("GLM", "glm-4-9b", gpu="GLM-4-9B, random weights (H200)"),
    "glm4_moe": SupportStatus("GLM", "glm-4.5-air", gpu="GLM-4.5-Air, 3 of 46 layers, random weights (H200)"),
    "glm4_moe_lite": SupportStatus("GLM", "glm-4.7-flash", steps=False, gpu=_TINY),
    "glm_moe_dsa": SupportStatus("GLM", "glm-5"),
    "deepseek_v3": SupportStatus("DeepSeek", "moonlight-16b-a3b", gpu=_TINY),
    "deepseek_v32": SupportStatus("DeepSeek", "deepseek-v3.2", steps=False),
    "kimi_k2": SupportStatus("Kimi", "kimi-k2", steps=False, gpu=_TINY),
    "kimi_k25": SupportStatus("Kimi", "kimi-k2.5", steps=False, gpu=_TINY),
    "gpt_oss": SupportStatus("gpt-oss", "gpt-oss-20b", gpu=_STEPS),
    "llama": SupportStatus(
        "Llama",
        "llama-3.1-8b",
        larger="the published SmolLM2-135M",
        gpu="Llama-3.1-8B, random weights (H200); SmolLM2-135M, published weights (H100)",
    ),
    "mistral": SupportStatus("Mistral", "mistral-7b", gpu=_STEPS),
    "minimax_m2": SupportStatus("MiniMax", "minimax-m2", gpu=_STEPS),
    "mimo": SupportStatus("MiMo", "mimo-7b", gpu=_STEPS),
    "nemotron_h": SupportStatus("NVIDIA", "nemotron-3-nano-30b-a3b", gpu=_STEPS),
    "olmo3": SupportStatus("OLMo", "olmo-3-7b", gpu=_STEPS),
}
"""Maps `model_type` to its status."""
