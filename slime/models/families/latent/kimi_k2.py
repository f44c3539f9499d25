"""Kimi K2: the architecture of DeepSeek-V3 with other sizes."""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.latent.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", title="Kimi K2, experts", models="K2 1T-A32B")
