"""Masked sums and means: by hand, against plain Python, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.masking import masked_mean, masked_sum

X = torch.tensor([[1.0, torch.nan, 4.0], [torch.inf, -2.0, -torch.inf], [torch.nan, torch.nan, torch.nan]])
MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])


def test_golden():
    assert_near(masked_sum(X, MASK), 3.0)  # 1 + 4 - 2
    assert_near(masked_sum(X, MASK, dim=1), [5.0, -2.0, 0.0])
    assert_near(masked_sum(X, MASK, dim=0), [1.0, -2.0, 4.0])
    assert_near(masked_sum(X, MASK, dim=(0, 1)), 3.0)
    assert_near(masked_mean(X, MASK), 1.0)  # 3 / 3
    assert_near(masked_mean(X, MASK, dim=1), [2.5, -2.0, 0.0])
    assert_near(masked_mean(X, MASK, dim=0), [1.0, -2.0, 4.0])


def test_nothing_to_sum_is_0_with_a_zero_gradient():
    for reduce in (masked_sum, masked_mean):
        x = torch.full((2, 3), torch.nan, requires_grad=True)
        result = reduce(x, torch.zeros(2, 3))
        result.backward()
        assert result == 0 and (x.grad == 0).all()
        assert reduce(torch.zeros(0), torch.zeros(0)) == 0
        assert_near(reduce(torch.zeros(2, 0), torch.zeros(2, 0), dim=1), [0.0, 0.0])


def test_the_mask_broadcasts():
    x = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    assert_near(masked_sum(x, torch.tensor([1, 0])), 4.0)
    assert_near(masked_mean(x, torch.tensor([[True], [False]])), 1.5)
    assert_near(masked_mean(x, torch.tensor([1, 0])), 2.0)  # the count broadcasts too


def test_sums_are_taken_in_float32_or_better():
    # 4096 times 1 in bfloat16 stops growing at 256.
    x = torch.ones(4096, dtype=torch.bfloat16)
    assert masked_sum(x, torch.ones(4096)).dtype == torch.float32
    assert masked_sum(x, torch.ones(4096)) == 4096 and masked_mean(x, torch.ones(4096)) == 1
    assert masked_mean(torch.ones(3, dtype=torch.float64), torch.ones(3)).dtype == torch.float64


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.booleans()), max_size=20))
def test_equals_a_sum_over_the_kept_ones(cells):
    x = torch.tensor([value for value, _ in cells], dtype=torch.float64)
    mask = torch.tensor([keep for _, keep in cells], dtype=torch.bool)
    kept = [value for value, keep in cells if keep]
    assert_near(masked_sum(x, mask), math.fsum(kept), rtol=1e-12, atol=1e-9)
    assert_near(masked_mean(x, mask), math.fsum(kept) / len(kept) if kept else 0.0, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_gradcheck(reduce, dim):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert torch.autograd.gradcheck(lambda x: reduce(x, mask, dim=dim), (x,))


def test_the_gradient_is_1_and_1_over_the_count_where_kept():
    for reduce, expected in ((masked_sum, 1.0), (masked_mean, 1 / 3)):
        x = X.clone().requires_grad_()
        reduce(x, MASK).backward()
        assert_near(x.grad, MASK * expected)


@pytest.mark.parametrize("shape", [(2,), (4, 3), (2, 3, 3)])
def test_a_mask_that_does_not_broadcast_is_refused(shape):
    for reduce in (masked_sum, masked_mean):
        with pytest.raises(ValueError, match="mask of shape .* does not broadcast"):
            reduce(torch.zeros(3, 3), torch.ones(shape))
