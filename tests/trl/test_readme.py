"""The README's example, with a tiny model and three rows in place of what it would download."""

import re
from pathlib import Path

import datasets
import torch

from tests.trl import tiny

README = Path(__file__).parents[2] / "README.md"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROWS = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i % 3)} for i in range(8)]


def test_the_example_trains(tmp_path, monkeypatch):
    path = tiny.save_model(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(ROWS))
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    for there, here in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(path)),
        ('"out",', f'{str(tmp_path / "out")!r}, use_cpu=True, report_to="none", save_strategy="no",'),
        ('"rollout.max_length=512"', '"rollout.max_length=6", "training.steps=2", "precision={train: fp32}"'),
    ):
        assert there in code
        code = code.replace(there, here)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 4
    moved = tiny.flat_weights(trainer.model) - torch.cat(
        [p.flatten() for p in type(trainer.model).from_pretrained(path).parameters()]
    )
    assert moved.abs().max() > 0
