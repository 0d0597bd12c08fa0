"""Metrics that reduce exactly: by hand, any split against the whole, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.metrics import combine, mean_metric, spread_metrics, token_counts


def part(**values):
    return {key.replace("__", "/"): torch.tensor(value) for key, value in values.items()}


def test_golden_combine():
    a = part(kl__mean=1.0, kl__count=1.0, kl__max=1.0, kl__min=-1.0, reward__sum=2.0)
    b = part(kl__mean=4.0, kl__count=2.0, kl__max=7.0, kl__min=3.0, reward__sum=5.0)
    result = combine([a, b])
    # (1 * 1 + 4 * 2) / 3
    expected = {"kl/mean": 3.0, "kl/count": 3.0, "kl/max": 7.0, "kl/min": -1.0, "reward/sum": 7.0}
    assert set(result) == set(expected)
    for key, value in expected.items():
        assert_near(result[key], value)


def test_a_part_that_saw_nothing_says_nothing():
    # The 0 of an empty part would be the smallest, or the largest, of them.
    a = part(x__mean=0.0, x__count=0.0, x__max=0.0, x__min=0.0)
    for sign in (1.0, -1.0):
        b = part(x__mean=5.0 * sign, x__count=2.0, x__max=5.0 * sign, x__min=5.0 * sign)
        for parts in ([a, b], [b, a]):
            for key in ("x/mean", "x/max", "x/min"):
                assert_near(combine(parts)[key], 5.0 * sign)
    assert all(value == 0 for value in combine([a, a]).values())


def test_keys_of_some_parts_only_are_kept():
    result = combine([part(a__mean=1.0, a__count=2.0), part(b__sum=3.0), part(a__mean=4.0, a__count=1.0)])
    assert_near(result["a/mean"], 2.0)
    assert_near(result["b/sum"], 3.0)
    assert combine([]) == {}


def test_combine_keeps_dtype_and_digits_and_detaches():
    x = torch.tensor(1.0, requires_grad=True)
    result = combine([{"x/mean": x, "x/count": torch.tensor(2.0**24)}, part(x__mean=1.0, x__count=1.0)])
    assert result["x/mean"].dtype == torch.float32 and not result["x/mean"].requires_grad
    assert combine([{"x/sum": torch.tensor(1.0, dtype=torch.float64)}])["x/sum"].dtype == torch.float64
    # In float32 the 1 is lost against 1e8, whichever of the two big ones it meets first.
    for order in ((1e8, 1.0, -1e8), (1.0, 1e8, -1e8), (1e8, -1e8, 1.0)):
        assert combine(part(x__sum=value) for value in order)["x/sum"] == 1


def test_golden_mean_and_spread():
    x, keep = torch.tensor([[1.0, torch.nan], [-4.0, 9.0]]), torch.tensor([[True, False], [True, True]])
    result = spread_metrics("x", x, keep)
    expected = {"x/mean": 2.0, "x/count": 3.0, "x/max": 9.0, "x/min": -4.0}
    assert set(result) == set(expected)
    for key, value in expected.items():
        assert_near(result[key], value)
    assert set(mean_metric("x", x, keep)) == {"x/mean", "x/count"}
    assert_near(mean_metric("x", torch.tensor([True, True, False]), torch.ones(3))["x/mean"], 2 / 3)


def test_the_extremes_of_negative_values_are_not_0():
    result = spread_metrics("x", torch.tensor([-3.0, -2.0, 5.0]), torch.tensor([1, 1, 0]))
    assert_near(result["x/max"], -2.0)
    result = spread_metrics("x", torch.tensor([3.0, 2.0, -5.0]), torch.tensor([1, 1, 0]))
    assert_near(result["x/min"], 2.0)


def test_nothing_kept_is_0():
    for x in (torch.full((2, 2), torch.nan), torch.zeros(0, 3), torch.zeros(3, 0)):
        assert all(value == 0 for value in spread_metrics("x", x, torch.zeros(x.shape)).values())


def test_token_counts():
    mask, live = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[True, False, False], [True, False, False]])
    result = token_counts(mask, live)
    assert (result["tokens/count"], result["nonfinite/count"]) == (3, 1)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), max_size=4), min_size=1, max_size=5))
def test_the_metrics_of_any_split_are_those_of_the_whole(pieces):
    def metrics(cells):
        x = torch.tensor([value for value, _ in cells], dtype=torch.float64)
        return spread_metrics("x", x, torch.tensor([keep for _, keep in cells], dtype=torch.bool))

    whole = metrics(sum(pieces, []))
    combined = combine(metrics(piece) for piece in pieces)
    nested = combine([combine(metrics(piece) for piece in pieces[:2]), *(metrics(piece) for piece in pieces[2:])])
    torch.testing.assert_close(combined, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nested, whole, rtol=1e-12, atol=1e-12)


def test_errors_name_the_key():
    for key in ("kl", "kl/median", "kl/std"):
        with pytest.raises(ValueError, match=f"metric '{key}' must end in"):
            combine([{key: torch.tensor(1.0)}])
    for kind in ("mean", "max", "min"):
        with pytest.raises(ValueError, match=f"metric 'kl/{kind}' comes without kl/count"):
            combine([part(kl__mean=1.0, kl__count=1.0), {f"kl/{kind}": torch.tensor(1.0)}])
