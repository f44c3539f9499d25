"""Makes a valid checkpoint directory and command line, which the configuration tests change."""

import json
from pathlib import Path

HF_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


def write_model(directory: Path, **changes: object) -> Path:
    """Writes the files of a checkpoint that the configuration reads: config.json and tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    tokenizer = {"model": {"vocab": {chr(97 + i): i for i in range(26)}}, "added_tokens": [{"id": 63}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def good_argv(directory: Path) -> list[str]:
    """Returns flags that pass every rule: 4 prompts x 8 samples = 16 samples x 2 steps, on two colocated CPU ranks."""
    model = write_model(directory / "model")
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--num-rollout", "3"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--global-batch-size", "16"),
        *(
            "--rollout-max-response-len",
            "32",
            "--colocate",
            "--actor-num-gpus-per-node",
            "2",
            "--device",
            "cpu",
        ),
    ]
