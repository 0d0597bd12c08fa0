"""Two ranks under DistributedDataParallel give the gradient that one process gives for the whole batch."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.shared.batches import ragged_batch
from trimtab.aggregation import MODES
from trimtab.objective import Objective

pytestmark = pytest.mark.slow

RANKS = 2
ROWS, LENGTH, WIDTH, VOCABULARY = 6, 5, 3, 4
IMPORTANCE = {"name": "importance", "bound": "mask", "low": 0.8, "high": 1.2}
CASES = [
    {"lengths": lengths, "mode": mode, "denominator": denominator, "weights": weights}
    # Live tokens of each row; the first three rows are the first rank's.
    for lengths in ([5, 4, 5, 1, 0, 0], [5, 0, 2, 0, 0, 0], [0, 0, 0, 3, 0, 5])
    for mode in MODES
    for denominator, weights in (
        ("original", []),
        ("kept", [IMPORTANCE]),
        ("original", [{**IMPORTANCE, "normalize": True}]),
    )
]


def make(case: dict) -> tuple[Objective, nn.Module, dict[str, Tensor]]:
    mask = torch.arange(LENGTH)[None] < torch.tensor(case["lengths"])[:, None]
    batch = ragged_batch(dtype=torch.float64, seed=7, mask=mask)
    generator = torch.Generator().manual_seed(8)
    batch["hidden"] = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    batch["tokens"] = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    model = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    objective = Objective(
        surrogate={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        weights=case["weights"],
        penalties=[{"name": "kl", "coefficient": 0.05}],
        aggregation={"mode": case["mode"], "denominator": case["denominator"], "max_length": 8},
    )
    return objective, model, batch


def share(objective: Objective, model: nn.Module, batch: dict[str, Tensor], totals: dict | None = None) -> Tensor:
    log_prob = model(batch["hidden"]).log_softmax(-1).gather(-1, batch["tokens"][..., None])[..., 0]
    return objective(batch | {"log_prob": log_prob}, totals)[0]


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def train_rank(rank: int, folder: str) -> None:
    """What an adapter does: totals over micro-batches and ranks, then shares times the number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        results = []
        for case in CASES:
            objective, model, batch = make(case)
            ddp = nn.parallel.DistributedDataParallel(model)
            mine = [{word: tensor[rows] for word, tensor in batch.items()} for rows in rank_rows(rank)]
            parts = [objective.totals(micro) for micro in mine]
            totals = {name: sum(part[name] for part in parts) for name in parts[0]}
            for total in totals.values():
                dist.all_reduce(total)
            for i, micro in enumerate(mine):
                last = i == len(mine) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    (share(objective, ddp, micro, totals) * RANKS).backward()
            results.append(gradient(model))
        torch.save(torch.stack(results), f"{folder}/gradient_{rank}.pt")
    finally:
        dist.destroy_process_group()


def rank_rows(rank: int) -> list[slice]:
    """Three rows a rank, in micro-batches of two and one."""
    return [slice(3 * rank, 3 * rank + 2), slice(3 * rank + 2, 3 * rank + 3)]


def test_the_gradient_of_two_ranks_is_that_of_the_whole_batch(tmp_path: Path):
    torch.multiprocessing.spawn(train_rank, args=(str(tmp_path),), nprocs=RANKS)
    expected = []
    for case in CASES:
        objective, model, batch = make(case)
        share(objective, model, batch).backward()
        expected.append(gradient(model))
        assert expected[-1].abs().max() > 1e-3
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"gradient_{rank}.pt")
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
