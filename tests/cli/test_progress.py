"""Progress: a bar on a terminal, a few lines elsewhere."""

import io

import pytest
from rich.console import Console

from trimtab.cli.progress import LINES, StepProgress

METRICS = {"reward/mean": 0.51234, "kl/mean": 1e-4, "surrogate/clip/mean": 0.25, "loss": 3.0}


def printed(total, *, first=0, last=None, terminal=False, metrics=METRICS, width=80) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, markup=False)
    with StepProgress(total, console) as progress:
        progress.resume(first)
        for step in range(first + 1, (total if last is None else last) + 1):
            progress.update(step, metrics)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("total", [1, 2, 9, 10, 11, 15, 19, 20, 21, 29, 99, 101, 500, 1999])
def test_a_pipe_gets_a_few_lines_and_the_last_step(total):
    lines = printed(total)
    assert min(total, LINES // 2) <= len(lines) <= LINES + 1
    assert lines[-1].startswith(f"step {total}/{total}  ") and lines[-1].endswith("  0 s left")
    assert len({line.split()[1] for line in lines}) == len(lines)


def test_a_line_holds_reward_kl_and_clip_share():
    assert printed(1) == ["step 1/1  reward 0.512  KL 0.0001  clipped 0.25  0 s left"]
    assert printed(1, metrics={"kl/mean": float("nan")}) == ["step 1/1  KL nan  0 s left"]
    assert len(printed(1, width=10)) == 1  # never folded


def test_a_resumed_run_goes_on_counting():
    lines = printed(100, first=55)
    assert [line.split()[1] for line in lines] == ["60/100", "70/100", "80/100", "90/100", "100/100"]


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_a_terminal_gets_a_bar(width):
    lines = printed(7, first=2, terminal=True, width=width)
    assert lines and not any(line.startswith("step 3/7") for line in lines)


def test_the_bar_shows_the_numbers():
    assert "reward 0.512  KL 0.0001  clipped 0.25" in " ".join(printed(7, terminal=True, width=200))


def test_an_error_leaves_through_the_bar():
    with pytest.raises(ZeroDivisionError), StepProgress(3, Console(file=io.StringIO(), force_terminal=True)):
        raise ZeroDivisionError
