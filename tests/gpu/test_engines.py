"""What needs an accelerator: sampling by vLLM, and bf16 training. Never run yet; see the README."""

import json

import pytest
import torch
from rich.console import Console

from trimtab.cli.run import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("changes", [["rollout.engine=vllm"], ["precision.train=bf16"]], ids=["vllm", "bf16"])
def test_a_corrected_run(tmp_path, changes):
    """The corrections see vLLM's log-probs, and the policies differ by rounding only."""
    if "rollout.engine=vllm" in changes:
        pytest.importorskip("vllm")
    changes = ["training.steps=2", "optimizer.warmup_steps=0", *changes]
    run("tis", changes, backend="trl", tiny=True, output=tmp_path / "run", fresh=False, console=Console(quiet=True))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["weights/importance/ratio/count"] == step["tokens/count"] > 0
        assert 0 <= step["mismatch/k3/mean"] < 0.05
