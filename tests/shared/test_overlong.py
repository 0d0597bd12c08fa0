"""The soft overlong punishment: the published boundaries, shape, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.rewards import overlong_penalty


def test_golden_of_the_paper():
    # L = 20480, c = 4096: free to 16384, half way 18432, -1 from 20480 on.
    lengths = torch.tensor([0, 16384, 16385, 18432, 20479, 20480, 20481, 100_000])
    expected = [0.0, 0.0, -1 / 4096, -0.5, -4095 / 4096, -1.0, -1.0, -1.0]
    assert_near(overlong_penalty(lengths, max_length=20480, buffer=4096), expected, rtol=0, atol=0)


def test_the_buffer_starts_before_the_limit_of_the_response():
    # https://github.com/NovaSky-AI/SkyRL/pull/755: L = 4096, c = 1024 starts at 3072.
    lengths = torch.tensor([3071, 3072, 3073, 3584, 4096])
    assert_near(
        overlong_penalty(lengths, max_length=4096, buffer=1024), [0.0, 0.0, -1 / 1024, -0.5, -1.0], rtol=0, atol=0
    )


def test_a_buffer_of_0_is_the_hard_limit_and_of_the_whole_length_a_ramp():
    lengths = torch.tensor([0, 9, 10, 11])
    assert_near(overlong_penalty(lengths, max_length=10, buffer=0), [0.0, 0.0, 0.0, -1.0], rtol=0, atol=0)
    assert_near(overlong_penalty(lengths, max_length=10, buffer=10), [0.0, -0.9, -1.0, -1.0])


def test_the_result_is_float32_and_holds_no_negative_zero():
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        result = overlong_penalty(torch.tensor([3, 50], dtype=dtype), max_length=100, buffer=10)
        assert result.dtype == torch.float32 and not torch.signbit(result).any()
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), max_length=100, buffer=10).shape == (0,)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 300), min_size=2, max_size=10), st.integers(1, 200), st.floats(0, 1))
def test_equals_the_formula_and_falls_with_the_length(lengths, limit, share):
    buffer = int(share * limit)
    result = overlong_penalty(torch.tensor(sorted(lengths)), max_length=limit, buffer=buffer)
    assert (result.diff() <= 0).all() and (result >= -1).all() and (result <= 0).all()
    for length, value in zip(sorted(lengths), result.tolist(), strict=True):
        if length <= limit - buffer:
            assert value == 0
        elif length > limit:
            assert value == -1
        else:
            assert abs(value - (limit - buffer - length) / buffer) < 1e-6


@pytest.mark.parametrize(
    ("max_length", "buffer", "message"),
    [(4096, 8192, "^buffer: 8192"), (4096, -1, "^buffer: -1"), (0, 0, "^max_length: 0"), (-5, 0, "^max_length: -5")],
)
def test_errors_name_what_is_wrong(max_length, buffer, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([1]), max_length=max_length, buffer=buffer)
