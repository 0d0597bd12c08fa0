"""One table: what holds for every core that gives a value per token. A new core is one row in `contract_rows`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.shared.batches import assert_near, ragged_batch
from tests.shared.contract_rows import CORES, REPORTING, Batch, Core
from trimtab.aggregation import aggregate
from trimtab.correction import STATISTICS
from trimtab.objective import MASKS, PENALTIES, SURROGATES, WEIGHTS


def every(cores: list[Core]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("core", cores, ids=lambda core: core.name)


def full_batch(**more: Any) -> Batch:
    """The ragged batch with (B, T) advantages, so that every word has a cell for each token."""
    batch = ragged_batch(**more)
    return batch | {"advantages": batch["advantages"].unsqueeze(1).expand_as(batch["log_prob"]).clone()}


def run(core: Core, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Value, metrics, and the gradient of the value's weighted sum for every word that may have one."""
    batch = batch | {word: batch[word].detach().clone().requires_grad_() for word in core.gradient}
    value, metrics = core(batch)
    assert value.requires_grad == bool(core.gradient)
    gradients = {}
    if core.gradient:
        scale = 1 + torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape) % 3
        gradients = dict(
            zip(
                core.gradient,
                torch.autograd.grad((value * scale).sum(), [batch[word] for word in core.gradient]),
                strict=True,
            )
        )
    return value.detach(), metrics, gradients


def same(actual: Any, expected: Any, **tolerance: float) -> None:
    """Value, metrics and gradients agree; exactly, unless a tolerance is given."""
    torch.testing.assert_close(actual, expected, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def test_every_registered_method_is_in_the_table():
    functions = {core.function for core in CORES}
    registered = {term.core for place in (SURROGATES, WEIGHTS, MASKS, PENALTIES) for term in place.values()}
    assert registered <= functions
    assert {f"rejection-{statistic}" for statistic in STATISTICS} <= {core.name for core in CORES}


@every([core for core in CORES if core.keeps])
def test_a_core_that_keeps_drops_some_and_keeps_some(core):
    # The other tests of the table would pass for one that keeps all.
    batch = ragged_batch()
    value, _ = core(batch)
    assert value.dtype == torch.bool and value.any() and (batch["response_mask"].bool() & ~value).any()


@every(CORES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_masked_cells_reach_neither_value_nor_gradient_nor_metric(core, garbage):
    batch = full_batch()
    live = batch["response_mask"].bool()
    dirty = {word: torch.where(live, batch[word], garbage) for word in core.words}
    value, metrics, gradients = run(core, batch | dirty)
    same((value, metrics, gradients), run(core, batch))
    for tensor in (value, *gradients.values()):
        assert (tensor[~live] == 0).all()
    assert value[live].ne(0).any()


@every(CORES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_live_token_is_removed_and_counted(core, garbage):
    batch = full_batch()
    without = batch | {"response_mask": batch["response_mask"].clone()}
    without["response_mask"][0, 2] = 0
    for word in core.words:
        dirty = batch | {word: batch[word].clone()}
        dirty[word][0, 2] = garbage
        value, metrics, gradients = run(core, dirty)
        expected, expected_metrics, expected_gradients = run(core, without)
        same((value, gradients), (expected, expected_gradients), rtol=1e-6, atol=1e-7)
        assert value[0, 2] == 0 and all(gradient[0, 2] == 0 for gradient in gradients.values())
        if metrics:
            assert (metrics.pop("tokens/count"), expected_metrics.pop("tokens/count")) == (18, 17)
            assert (metrics.pop("nonfinite/count"), expected_metrics.pop("nonfinite/count")) == (1, 0)
            if core.keeps:  # the share that is kept is of all trainable tokens
                assert (metrics.pop("kept/count"), expected_metrics.pop("kept/count")) == (18, 17)
                assert_near(metrics.pop("kept/mean") * 18, expected_metrics.pop("kept/mean") * 17, rtol=1e-6)
            same(metrics, expected_metrics, rtol=1e-6, atol=1e-7)
        # The denominator keeps it: 18 trainable tokens in the batch, removed or not.
        assert_near(aggregate(value, batch["response_mask"], mode="token-mean"), value.sum() / 18)


@every(CORES)
def test_the_rows_may_come_in_any_order(core):
    order = torch.tensor([3, 1, 4, 0, 2])
    batch = ragged_batch()
    value, metrics, gradients = run(core, {word: tensor[order] for word, tensor in batch.items()})
    expected, expected_metrics, _ = run(core, batch)
    same((value, metrics), (expected[order], expected_metrics), rtol=2e-6, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@every(CORES)
@pytest.mark.parametrize("width", [1, 500])
def test_right_padding_changes_nothing(core, width):
    results = []
    for pad in (0, width):
        batch = full_batch()
        length = batch["response_mask"].shape[1]
        padded = {word: torch.nn.functional.pad(batch[word], (0, pad), value=torch.nan) for word in core.words}
        padded = {word: tensor.requires_grad_(word in core.gradient) for word, tensor in padded.items()}
        padded["response_mask"] = torch.nn.functional.pad(batch["response_mask"], (0, pad))
        value, metrics = core(padded)
        if core.gradient:
            value.sum().backward()
        tensors = {"value": value.detach()} | {word: padded[word].grad for word in core.gradient}
        assert all((tensor[:, length:] == 0).all() for tensor in tensors.values())
        results.append(({name: tensor[:, :length] for name, tensor in tensors.items()}, metrics))
    same(results[1], results[0], rtol=2e-6, atol=1e-6)


@every(CORES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64])
def test_masks_of_every_dtype_agree(core, dtype):
    batch = ragged_batch()
    same(run(core, batch | {"response_mask": batch["response_mask"].to(dtype)}), run(core, batch))


@every(CORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_worked_on_in_float32(core, dtype):
    half = ragged_batch(dtype=dtype)
    single = half | {word: half[word].float() for word in core.words}
    value, metrics, gradients = run(core, half)
    expected, expected_metrics, expected_gradients = run(core, single)
    assert value.dtype == (torch.bool if core.keeps else torch.float32)
    same((value, metrics), (expected, expected_metrics))
    for word, gradient in gradients.items():
        assert gradient.dtype == dtype
        assert_near(gradient.float(), expected_gradients[word], rtol=1e-2, atol=1e-3)


@every([core for core in CORES if not core.keeps])
def test_one_float64_input_makes_the_output_float64(core):
    batch = ragged_batch()
    assert core(batch)[0].dtype == torch.float32
    assert core(batch | {"response_mask": batch["response_mask"].double()})[0].dtype == torch.float32
    for word in core.words:
        assert core(batch | {word: batch[word].double()})[0].dtype == torch.float64, word


@every([core for core in CORES if not core.keeps])
def test_float64_is_worked_on_in_float64(core):
    # A float32 step on the way would leave 1e-8 in it: the values of two batches that differ by 1e-12 nats would agree.
    batch = ragged_batch(dtype=torch.float64)
    word = core.reads[0]
    nearby = batch | {word: batch[word] + 1e-12}
    value, moved = core(batch)[0], core(nearby)[0]
    changed = (moved - value)[batch["response_mask"].bool()].abs()
    assert changed.max() > 1e-13 and changed.max() < 1e-10


@every(CORES)
def test_no_argument_is_changed(core):
    batch = full_batch()
    batch["log_prob"][0, 1] = torch.nan
    batch["advantages"][2, 0] = torch.inf
    copies = {word: tensor.clone() for word, tensor in batch.items()}
    versions = {word: tensor._version for word, tensor in batch.items()}
    core(batch)
    for word, tensor in batch.items():
        torch.testing.assert_close(tensor, copies[word], rtol=0, atol=0, equal_nan=True)
        assert tensor._version == versions[word], word


@every([core for core in CORES if "advantages" in core.words])
def test_advantages_of_a_row_equal_advantages_of_its_tokens(core):
    same(run(core, ragged_batch()), run(core, full_batch()))
    square = ragged_batch(mask=torch.ones(3, 3, dtype=torch.int64))  # B = T: they go along the rows, not the columns
    same(run(core, square), run(core, square | {"advantages": square["advantages"][:, None].expand(3, 3)}))


@every(CORES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)], ids=["no rows", "no tokens", "all masked"])
def test_nothing_to_train_on_gives_zero_and_a_zero_gradient(core, shape):
    batch = ragged_batch(mask=torch.zeros(shape, dtype=torch.int64))
    value, metrics, gradients = run(core, batch)
    assert value.shape == shape and value.sum() == 0
    for gradient in gradients.values():
        assert (gradient == 0).all()
    assert all(metric == 0 for metric in metrics.values())
    assert bool(metrics) == (core in REPORTING)


@every(CORES)
@pytest.mark.parametrize("drift", [100.0, -100.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_drift_of_a_hundred_nats_stays_finite(core, drift, sign):
    batch = ragged_batch()
    batch = batch | {core.reads[0]: batch[core.reads[0]] + drift, "advantages": torch.full((5,), sign)}
    value, metrics, gradients = run(core, batch)
    assert value.isfinite().all() and all(metric.isfinite() for metric in metrics.values())
    for gradient in gradients.values():
        assert gradient.isfinite().all()


@every([core for core in CORES if core.pull])
@pytest.mark.parametrize("drift", [100.0, -100.0, 21.0, -21.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_drifted_token_is_pulled_the_right_way(core, drift, sign):
    for dtype in (torch.float32, torch.float64):
        batch = ragged_batch(dtype=dtype)
        live = batch["response_mask"].bool()
        drifted = {"log_prob": batch["log_prob"] + drift, "advantages": torch.full((5,), sign, dtype=dtype)}
        gradient = run(core, batch | drifted)[2]["log_prob"][live]
        expected = torch.tensor(core.pull(drift, sign), dtype=dtype).sign()
        assert (gradient * expected >= 0).all()
        if dtype == torch.float64:  # exp(-100) is 0 in float32
            assert (gradient.sign() == expected).all()


@every(CORES)
def test_a_wrong_shape_is_refused_by_name(core):
    batch = ragged_batch()
    rows, length = batch["response_mask"].shape
    for word in core.words:
        for shape in ((rows, length + 1), (rows + 1, length), (rows, 1), (1, length), (rows, length, 1)):
            with pytest.raises(ValueError, match=rf"^{core.argument(word)} has shape"):
                core(batch | {word: torch.zeros(shape)})
    for shape in ((rows,), (rows, length, 1)):
        with pytest.raises(ValueError, match="response_mask"):
            core(batch | {"response_mask": torch.ones(shape)})
    with pytest.raises(ValueError, match="response_mask"):
        core(batch | {"response_mask": torch.ones(rows, length - 1)})


@every([core for core in CORES if "advantages" in core.words])
@pytest.mark.parametrize("shape", [(4,), (6,), (7,), ()])
def test_advantages_of_other_rows_are_refused(core, shape):
    with pytest.raises(ValueError, match="^advantages has shape"):
        core(ragged_batch() | {"advantages": torch.zeros(shape)})


@every(REPORTING)
def test_metrics_are_detached_numbers_that_reduce_exactly(core):
    batch = ragged_batch()
    batch = batch | {word: batch[word].requires_grad_() for word in core.words}
    _, metrics = core(batch)
    assert {"tokens/count", "nonfinite/count"} <= set(metrics)
    for key, metric in metrics.items():
        name, _, kind = key.rpartition("/")
        assert name and kind in ("mean", "sum", "max", "min", "count")
        assert kind in ("count", "sum") or f"{name}/count" in metrics
        assert metric.dim() == 0 and not metric.requires_grad and metric.dtype.is_floating_point


@every(CORES)
def test_no_gradient_reaches_what_is_constant(core):
    batch = ragged_batch()
    batch = batch | {word: batch[word].requires_grad_() for word in core.words}
    value, _ = core(batch)
    if not core.gradient:
        assert not value.requires_grad
        return
    value.sum().backward()
    for word in core.words:
        reached = batch[word].grad is not None and bool((batch[word].grad != 0).any())
        assert reached == (word in core.gradient), word


@every([core for core in CORES if core.surrogate])
def test_the_on_policy_gradient_is_that_of_reinforce(core):
    batch = ragged_batch(dtype=torch.float64)
    live = batch["response_mask"].double()
    log_prob = batch["old_log_prob"].clone().requires_grad_()
    value, metrics = core(batch | {"log_prob": log_prob})
    value.sum().backward()
    assert_near(log_prob.grad, -batch["advantages"][:, None] * live, rtol=1e-12, atol=1e-12)
    assert metrics.get("clip/mean", 0) == 0
