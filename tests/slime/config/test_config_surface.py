"""The flags of this project are its public surface: a change must be on purpose, and every flag must have an effect."""

import ast
from pathlib import Path

from slime.rules.flags import own_flags
from vime.backends import public_rows

ROOT = Path(__file__).parents[3]
SURFACE = Path(__file__).with_name("flags_surface.txt")
HOW = "python tests/slime/config/test_config_surface.py"


def surface() -> str:
    return "".join(f"{row['flag']}\t{row['default']!r}\t{row['owner']}\n" for row in public_rows())


def test_flags_and_defaults_are_those_on_record():
    assert surface() == SURFACE.read_text(), (
        f"flags changed; if that is meant, run: {HOW} and commit {SURFACE.name}"
    )


# The parser reads these flags, or they set another flag while the configuration is resolved.
RESOLVED_AWAY = {
    *("custom_config_path", "dump_details", "bf16", "fp16", "fp32", "update_weight_disk_dir"),
    *("num_gpus_per_node", "expert_tensor_parallel_size", "train_backend", "update_weight_transport"),
    *(
        "finetune",
        "no_load_optim",
        "no_load_rng",
        "rollout_backend",
        "device",
        "distributed_backend",
        "offload",
        "offload_rollout",
    ),
}


def names_in_code() -> set[str]:
    """Returns every attribute and string of slime and vime outside slime/config."""
    names: set[str] = set()
    for path in [*ROOT.glob("slime/**/*.py"), *ROOT.glob("vime/**/*.py")]:
        if path.parent.name != "config":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return names


def test_no_flag_is_accepted_and_then_ignored():
    unread = set(own_flags()) - names_in_code() - RESOLVED_AWAY
    assert not unread, (
        f"no code reads {sorted(unread)}; act on them or move them to slime/config/unsupported.py"
    )


if __name__ == "__main__":
    SURFACE.write_text(surface())
