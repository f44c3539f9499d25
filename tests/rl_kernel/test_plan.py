"""Tests the memory plan of the linear operators, with hand-computed numbers."""

import pytest

from rl_kernel.ops.linear_logp import plan as module
from rl_kernel.ops.linear_logp.plan import Budget, Costs, block_rows, forward_rows, plan

MIB = 2**20
EXP = Costs(row=10_000, element=2, scratch=False)
PLAIN = Costs(row=10_000, element=2, scratch=True)
BOTH = pytest.mark.parametrize("costs", [EXP, PLAIN], ids=["no scratch", "scratch"])


def workspace(tokens, columns, costs):
    """Returns the bytes in which exactly these columns of all tokens fit."""
    return tokens * (costs.row + columns * costs.element)


@BOTH
def test_all_columns_are_kept_where_they_fit(costs):
    # 100 tokens: 1 MB for the rows, 20 MB for 100,000 columns of two bytes.
    assert plan(100, 100_000, costs, 21_000_000) == Budget(100_000, 100_000)
    assert plan(100, 100_000, costs, 2**62) == Budget(100_000, 100_000)
    assert plan(100, 100_000, costs, 20_999_999).kept < 100_000


def test_a_tile_without_scratch_is_kept_and_serves_the_others():
    # 5.2 MB - 1 MB leave 42,000 bytes per token: 21,000 columns, 82 blocks of 256.
    assert plan(100, 100_000, EXP, 5_200_000) == Budget(20_992, 20_992)


def test_a_quarter_of_the_workspace_is_scratch():
    # 21,000 columns fit: 5,250 pass through in tiles of 20 blocks, 15,750 are kept, 61 blocks.
    assert plan(100, 100_000, PLAIN, 5_200_000) == Budget(15_616, 5_120)
    # 2,500 columns fit: a tile is never narrower than 1,024.
    assert plan(100, 100_000, PLAIN, 1_500_000) == Budget(1_280, 1_024)


@BOTH
@pytest.mark.parametrize("columns", [1500, 3000, 5000, 152_064])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_a_plan_stays_within_the_workspace(tokens, columns, costs):
    for fits in (2048, 2049, 2500, 4096, 4999, 90_000):
        budget = plan(tokens, columns, costs, workspace(tokens, fits, costs))
        if fits >= columns:
            assert budget == Budget(columns, columns)
            continue
        live = budget.kept + budget.tile if costs.scratch else budget.kept
        assert live <= fits
        assert budget.kept % 256 == budget.tile % 256 == 0
        assert budget.kept >= 1024 and budget.tile >= 1024


@BOTH
def test_no_tokens_need_no_workspace(costs):
    assert plan(0, 500, costs, 1) == Budget(500, 500)
    assert block_rows(0, 500, costs, 1) == 1


def test_too_little_workspace_names_what_is_needed():
    # 1,000 tokens x (10,000 + 1,024 columns x 2) = 12,048,000 bytes = 11.49 MiB; scratch needs 1,024 columns more.
    with pytest.raises(ValueError) as error:
        plan(1000, 100_000, EXP, 12_047_999)
    assert str(error.value) == (
        "workspace_bytes must be >= 12048000, got 12047999; "
        "give 1000 tokens at least 12 MiB, or pass fewer tokens at a time"
    )
    assert plan(1000, 100_000, EXP, 12_048_000) == Budget(1024, 1024)
    with pytest.raises(ValueError, match="must be >= 14096000, .* at least 14 MiB"):
        plan(1000, 100_000, PLAIN, 14_095_999)
    assert plan(1000, 100_000, PLAIN, 14_096_000) == Budget(1024, 1024)


def test_a_small_vocabulary_needs_all_its_columns():
    # The vocabulary has fewer than 1,024 columns: 10 x (10,000 + 300 x 2).
    assert plan(10, 300, EXP, 106_000) == Budget(300, 300)
    with pytest.raises(ValueError, match="must be >= 106000"):
        plan(10, 300, EXP, 105_999)


def test_one_block_where_all_logits_fit():
    tokens, columns = 1000, 50_000
    assert block_rows(tokens, columns, EXP, workspace(tokens, columns, EXP)) == tokens
    assert block_rows(tokens, columns, EXP, 2**62, sum_bytes=2**40) == tokens
    assert block_rows(1, columns, EXP, 2**62) == 1


def test_blocks_where_recomputing_would_cost_more():
    """A third of the logits of 100,000 tokens fit. Recomputing two thirds (0.7 products) costs more than two more
    blocks (0.02)."""
    tokens, columns = 100_000, 50_000
    # 33,334 rows are rounded up to the next multiple of 512.
    third = 66 * 512
    assert block_rows(tokens, columns, EXP, workspace(third, columns, EXP)) == third
    # With 200 columns fewer, recomputing costs 0.0042 products, less than the 0.006 of a fourth block. With 600
    # fewer, it costs more.
    assert block_rows(tokens, columns, EXP, workspace(third, columns - 200, EXP)) == third
    assert block_rows(tokens, columns, EXP, workspace(third, columns - 600, EXP)) == 49 * 512


def test_recomputing_where_blocks_would_cost_more():
    """Nine tenths of the logits of 1,000 tokens fit. Recomputing costs 0.1 products, and a block costs one product."""
    tokens, columns = 1000, 50_000
    assert block_rows(tokens, columns, EXP, workspace(tokens, 45_000, EXP)) == tokens
    # A tenth fits: recomputing costs 0.9 x 1.05 products, still less than the next block.
    assert block_rows(tokens, columns, EXP, workspace(tokens, 5_000, EXP)) == tokens


def test_the_sum_of_the_weight_gradient_is_paid_by_more_than_one_block():
    tokens, columns = 100_000, 50_000
    third = workspace(66 * 512, columns, EXP)
    # The sum leaves no room for a block, so all tokens are in one block.
    assert block_rows(tokens, columns, EXP, third, sum_bytes=third) == tokens
    assert block_rows(tokens, columns, EXP, third + 2**32, sum_bytes=2**32) == 66 * 512


def test_blocks_are_nearly_equal_and_whole():
    # Only 640 tokens have room for the narrowest tile: 11 units become three blocks of 4, 4 and 3, not two of 6 and
    # 5.
    assert block_rows(1300, 50_000, EXP, workspace(640, 1024, EXP)) == 4 * 128


@BOTH
def test_no_choice_fits_names_what_is_needed(costs):
    least = 1024 * (2 if costs.scratch else 1)
    need = workspace(128, least, costs)
    with pytest.raises(
        ValueError, match=rf"workspace_bytes must be >= {need}, got {need - 1}; .* at least 2 MiB"
    ):
        block_rows(1000, 50_000, costs, need - 1)
    assert block_rows(1000, 50_000, costs, need) == 128
    # A call with fewer tokens than a block needs less.
    need = workspace(5, least, costs)
    with pytest.raises(ValueError, match=f"must be >= {need}, .* give 5 tokens at least 1 MiB"):
        block_rows(5, 50_000, costs, need - 1)
    assert block_rows(5, 50_000, costs, need) == 5


@BOTH
@pytest.mark.parametrize("columns", [1, 300, 1024, 1500, 2048, 50_000])
@pytest.mark.parametrize("tokens", [1, 100, 128, 1000])
def test_a_forward_has_a_block_of_rows_or_an_error(tokens, columns, costs):
    """Workspaces go from too small to more than enough. A block has at least a row, and `plan` accepts every block."""
    least = min(1024 * (2 if costs.scratch else 1), columns)
    need = workspace(min(tokens, 128), least, costs)
    for size in (need - 1, need, need + 1, workspace(min(tokens, 128), columns, costs), 2 * need, 2**40):
        if size < need:
            with pytest.raises(ValueError, match=f"workspace_bytes must be >= {need}, got {size}"):
                forward_rows(tokens, columns, costs, size)
            continue
        rows = forward_rows(tokens, columns, costs, size)
        assert 1 <= rows <= tokens
        plan(rows, columns, costs, size)


def test_the_default_workspace_is_the_documented_one():
    assert module.WORKSPACE_BYTES == 1.5 * 2**30
