"""A back end that trains nothing, and the command called in this process."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trimtab.backends import RunRequest, RunResult
from trimtab.cli import app as app_module
from trimtab.cli import run as run_module


@dataclass
class FakeBackend:
    """Records a metric for each step from `first` on, then stops as it is told."""

    first: int = 0
    last: int | None = None
    stop: BaseException | None = None
    asked: list[str] = field(default_factory=list)
    requests: list[RunRequest] = field(default_factory=list)

    def find(self, name: str):
        self.asked.append(name)
        return self.run

    def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        request.resume(self.first)
        for step in range(self.first + 1, (self.last or request.recipe.training.steps) + 1):
            request.record(step, {"reward/mean": step / 10, "loss": float("nan"), "kl/mean": 0.5})
        (request.folder / "model").mkdir(exist_ok=True)
        (request.folder / "checkpoint-3").mkdir(exist_ok=True)
        if self.stop:
            raise self.stop
        return RunResult(request.folder / "model", 0.25, 0.75)


@pytest.fixture
def backend(monkeypatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr(run_module, "find_backend", fake.find)
    monkeypatch.setattr(run_module, "resolve", lambda *_, **__: _Embedded())
    return fake


class _Embedded:
    model, train, evaluation = Path("built/model"), Path("built/train.jsonl"), Path("built/evaluation.jsonl")


@dataclass
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def trimtab(capsys, monkeypatch, tmp_path):
    """Call `trimtab ...` in this process, in an empty folder, 80 columns wide; no exception may leave it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(app_module.console, "_width", None)  # else what COLUMNS was when the console was made

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        code = 0
        try:
            app_module.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


@pytest.fixture
def shell(tmp_path):
    """Run Python code or a module in a process of its own, in an empty folder."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    return call
