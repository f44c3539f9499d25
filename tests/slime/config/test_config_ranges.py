"""Every number has a range: NaN, infinities and absurd sizes are errors that name the flag and the value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config.fields import flag, get_specs, spelled
from slime.config.ranges import COUNT, COUNT_OR_ZERO, DECAY, TOP_K
from slime.rules import parse_args
from slime.rules.flags import own_flags


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return good_argv(tmp_path_factory.mktemp("counts"))


REFUSED = [
    ("--lr nan", "--lr must be a finite number, got nan"),
    ("--lr 1e30", "--lr must be at most 1000, got 1e+30"),
    ("--weight-decay inf", "--weight-decay must be a finite number, got inf"),
    ("--clip-grad nan", "--clip-grad must be a finite number, got nan"),
    ("--eps-clip nan", "--eps-clip must be a finite number, got nan"),
    ("--entropy-coef -inf", "--entropy-coef must be a finite number, got -inf"),
    ("--gamma 1.5", "--gamma must lie in [0, 1], got 1.5"),
    ("--rollout-temperature inf", "--rollout-temperature must be a finite number, got inf"),
    ("--rollout-deadline-s nan", "--rollout-deadline-s must be a finite number, got nan"),
    (f"--seed {10**30}", f"--seed must be at most 4294967295, got {10**30}"),
    (f"--rollout-batch-size {10**400}", "--rollout-batch-size must be at most 2147483647, got 1000"),
    ("--rollout-stop-token-ids 3 -1", "--rollout-stop-token-ids must be 0 or more, got -1"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[flags[:40] for flags, _ in REFUSED])
def test_values_out_of_range_are_refused(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), *flags.split()])
    assert message in str(error.value)


COUNTS = {
    **{
        spelled(name): spec.range
        for name, spec in own_flags().items()
        if spec.range in (COUNT, COUNT_OR_ZERO)
    },
    # These flags are Megatron's own.
    "--recompute-num-layers": COUNT,
    "--ddp-bucket-size": COUNT,
    "--num-distributed-optimizer-instances": COUNT_OR_ZERO,
}


@pytest.mark.parametrize("flag_", COUNTS)
def test_a_count_below_its_range_is_one_line(argv: list[str], flag_: str) -> None:
    """The error has the flag, the rule and the value, and no second problem that follows from the first."""
    for value in ("0", "-1", "-7") if COUNTS[flag_] is COUNT else ("-1", "-7"):
        rule = "above 0" if COUNTS[flag_] is COUNT else "0 or more"
        with pytest.raises(ValueError) as error:
            parse_args([*argv, flag_, value])
        assert str(error.value) == f"{flag_} must be {rule}, got {value}"


def test_the_table_of_counts_has_the_sizes_of_a_run() -> None:
    parallel = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
    wanted = {f"--{name}-parallel-size" for name in parallel}
    wanted |= {f"--{name}-size" for name in ("rollout-batch", "global-batch", "micro-batch")}
    wanted |= {
        "--rollout-num-gpus",
        "--rollout-num-gpus-per-engine",
        "--actor-num-gpus-per-node",
        "--num-gpus-per-node",
    }
    assert wanted <= COUNTS.keys()


def test_ends_of_ranges() -> None:
    assert COUNT.problem(1) is None and COUNT.problem(0) == "be above 0"
    assert COUNT.problem(2**31) == "be at most 2147483647"
    assert TOP_K.problem(-1) is None and TOP_K.problem(0) == "be -1 (off) or above 0"
    assert DECAY.problem(0.0) is None and DECAY.problem(1.0) == "lie in [0, 1)"


def test_a_number_needs_a_range() -> None:
    @dataclass(frozen=True)
    class Section:
        count: int = flag(1, "a number")

    with pytest.raises(TypeError, match=r"count is a number without a range"):
        get_specs(Section)
