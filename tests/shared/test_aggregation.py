"""From tokens to one number: every mode by hand, how shares add up, gradients, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.aggregation import MODES, aggregate

LOSS = torch.tensor([[1.0, 3.0, torch.nan], [5.0, 0.5, 0.5], [torch.inf, -torch.inf, torch.nan]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
# Row sums 4, 6, -; row means 2, 2, -; 5 live tokens in 2 rows.
GOLDEN = {
    "token-mean": 10 / 5,
    "token-sum": 10.0,
    "seq-mean-token-mean": (2 + 2) / 2,
    "seq-mean-token-sum": (4 + 6) / 2,
    "seq-mean-token-sum-norm": (4 + 6) / 2 / 8,
}


def test_the_table_covers_every_mode():
    assert set(GOLDEN) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_golden(mode):
    assert_near(aggregate(LOSS, MASK, mode=mode, max_length=8), GOLDEN[mode])


def test_golden_with_row_means_that_differ():
    loss, mask = torch.tensor([[1.0, 3.0], [7.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    assert_near(aggregate(loss, mask, mode="token-mean"), 11 / 3)
    assert_near(aggregate(loss, mask, mode="seq-mean-token-mean"), (2 + 7) / 2)


def test_golden_with_the_denominators_of_the_step():
    given = {"num_tokens": 20, "num_sequences": 4, "max_length": 8}
    expected = {
        "token-mean": 10 / 20,
        "token-sum": 10.0,
        "seq-mean-token-mean": 4 / 4,
        "seq-mean-token-sum": 10 / 4,
        "seq-mean-token-sum-norm": 10 / 4 / 8,
    }
    for mode, value in expected.items():
        assert_near(aggregate(LOSS, MASK, mode=mode, **given), value)
        tensors = {name: torch.tensor(count, dtype=torch.float64) for name, count in given.items()}
        result = aggregate(LOSS, MASK, mode=mode, **tensors)
        assert result.dtype == torch.float32 and result.dim() == 0
        assert_near(result, value)


def test_nan_at_a_masked_position_stays_out_of_every_mode():
    # https://github.com/verl-project/verl/pull/6349
    loss, mask = torch.tensor([[1.0, torch.nan], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]])
    expected = {"token-mean": 2.0, "token-sum": 6.0, "seq-mean-token-mean": (1 + 2.5) / 2, "seq-mean-token-sum": 3.0}
    for mode, value in (expected | {"seq-mean-token-sum-norm": 1.5}).items():
        x = loss.clone().requires_grad_()
        result = aggregate(x, mask, mode=mode, max_length=2)
        result.backward()
        assert_near(result.detach(), value)
        assert x.grad.isfinite().all() and x.grad[0, 1] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [{}, {"num_tokens": 0, "num_sequences": torch.tensor(0)}])
def test_nothing_to_train_on_is_0_with_a_zero_gradient(mode, counts):
    for shape in ((2, 3), (0, 3), (2, 0)):
        loss = torch.full(shape, torch.nan, requires_grad=True)
        result = aggregate(loss, torch.zeros(shape), mode=mode, max_length=4, **counts)
        result.backward()
        assert result == 0 and (loss.grad == 0).all()


def test_a_denominator_of_0_gives_0_even_with_live_tokens():
    for mode in MODES:
        loss = torch.ones(1, 2, requires_grad=True)
        result = aggregate(loss, torch.ones(1, 2), mode=mode, num_tokens=0, num_sequences=0, max_length=0)
        result.backward()
        assert result == (2 if mode == "token-sum" else 0)
        assert (loss.grad == (1 if mode == "token-sum" else 0)).all()


def test_the_padded_width_is_no_part_of_the_norm():
    narrow = aggregate(LOSS, MASK, mode="seq-mean-token-sum-norm", max_length=8)
    pad = torch.nn.functional.pad
    wide = aggregate(pad(LOSS, (0, 500), value=torch.nan), pad(MASK, (0, 500)), mode=MODES[4], max_length=8)
    assert_near(wide, narrow)


def test_micro_batches_of_10_and_1000_tokens_do_not_count_alike():
    # Tokens of 1 in a short answer, of 0 in a long one: 10 / 1010, and not the mean of the means, 0.5.
    short, long = torch.ones(1, 10), torch.zeros(1, 1000)
    parts = [aggregate(x, torch.ones_like(x), mode="token-mean", num_tokens=1010) for x in (short, long)]
    assert_near(sum(parts), 10 / 1010)


@st.composite
def _split_batch(draw):
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cell = st.floats(-10, 10, width=32)
    loss = draw(st.lists(st.lists(cell, min_size=length, max_size=length), min_size=rows, max_size=rows))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(mask), [0, *cuts, rows]


@settings(deadline=None, derandomize=True)
@given(_split_batch(), st.sampled_from(MODES))
def test_the_shares_of_any_split_add_up_in_value_and_gradient(batch, mode):
    loss, mask, cuts = batch
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(dim=1).sum(), "max_length": 7}
    whole, parts = (loss.clone().requires_grad_() for _ in range(2))
    total = aggregate(whole, mask, mode=mode, max_length=7)
    pieces = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    shares = [aggregate(parts[piece], mask[piece], mode=mode, **counts) for piece in pieces]
    total.backward()
    sum(shares).backward()
    assert_near(sum(shares).detach(), total.detach(), rtol=1e-12, atol=1e-12)
    assert_near(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


@settings(deadline=None, derandomize=True)
@given(_split_batch(), st.sampled_from(MODES))
def test_equals_a_loop(batch, mode):
    loss, mask, _ = batch
    rows = [
        [x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [x for row in rows for x in row]
    expected = 0.0
    if rows:
        expected = {
            "token-mean": sum(tokens) / len(tokens),
            "token-sum": sum(tokens),
            "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
            "seq-mean-token-sum": sum(tokens) / len(rows),
            "seq-mean-token-sum-norm": sum(tokens) / len(rows) / 7,
        }[mode]
    assert_near(aggregate(loss, mask, mode=mode, max_length=7), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    loss = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: aggregate(x, MASK, mode=mode, max_length=8), (loss,))


def test_half_precision_is_summed_in_float32():
    loss = torch.ones(1, 4096, dtype=torch.bfloat16)
    result = aggregate(loss, torch.ones(1, 4096), mode="token-sum")
    assert result.dtype == torch.float32 and result == 4096
    assert aggregate(loss.double(), torch.ones(1, 4096), mode="token-mean").dtype == torch.float64


def test_errors_name_what_is_wrong():
    for mode in ("token_mean", "mean", None):
        with pytest.raises(ValueError, match=r"mode: .* is unknown; one of token-mean"):
            aggregate(LOSS, MASK, mode=mode)
    with pytest.raises(ValueError, match="needs max_length"):
        aggregate(LOSS, MASK, mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="^per_token_loss has shape"):
        aggregate(LOSS[:, :2], MASK, mode="token-mean")
    with pytest.raises(ValueError, match="^per_token_loss has shape"):
        aggregate(LOSS[:, :1], MASK, mode="token-mean")  # a row's loss is not broadcast over its tokens
