"""The embedded default: its task, tokenizer and cache, and that the warm-started model has something left to learn."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from trimtab.cli import embedded
from trimtab.cli.embedded import cache, task
from trimtab.errors import TrimtabError

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trimtab.cli.embedded import model as model_module  # noqa: E402
from trimtab.cli.embedded.model import build_model  # noqa: E402
from trimtab.cli.embedded.tokenizer import build_tokenizer  # noqa: E402

REFERENCE = "embedded:arithmetic"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_python(code: str) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment).returncode


# --- task


def test_split_is_disjoint_complete_and_fixed() -> None:
    train, held_out = task.split_pairs()
    assert len(held_out) == 512
    assert sorted(train + held_out) == [(a, b) for a in range(100) for b in range(100)]
    assert task.split_pairs() == (train, held_out)
    assert train[0] == (49, 60) and held_out[0] == (87, 9)  # not to change between versions


@pytest.mark.parametrize(
    ("a", "b", "prompt", "answer", "faulty"),
    [
        (7, 58, "07+58=", "560", "550"),
        (12, 34, "12+34=", "640", "640"),
        (99, 99, "99+99=", "891", "881"),
        (50, 50, "50+50=", "001", "001"),
        (95, 5, "95+05=", "001", "090"),
        (0, 0, "00+00=", "000", "000"),
    ],
)
def test_texts(a: int, b: int, prompt: str, answer: str, faulty: str) -> None:
    assert (task.prompt(a, b), task.answer(a, b), task.faulty_answer(a, b)) == (prompt, answer, faulty)


def test_only_a_carry_out_of_the_units_makes_a_label_faulty() -> None:
    for a, b in task.split_pairs()[0]:
        assert int(task.answer(a, b)[::-1]) == a + b
        assert int(task.faulty_answer(a, b)[::-1]) == a + b - 10 * (a % 10 + b % 10 >= 10)


def test_rows(tmp_path: Path) -> None:
    task.write_rows([(7, 58), (1, 2)], tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "07+58=", "answer": "560"}, {"prompt": "01+02=", "answer": "300"}]


# --- tokenizer


def test_tokenizer(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.decode(tokenizer("07+58=560")["input_ids"]) == "07+58=560"
        assert len(tokenizer("0 a\n9")["input_ids"]) == 5
        assert tokenizer("5<eos>")["input_ids"][-1] == tokenizer.eos_token_id
        assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
        assert max(tokenizer.get_vocab().values()) + 1 == len(tokenizer) == 15
        assert tokenizer.chat_template is None
        padded = tokenizer(["1", "123"], padding=True)
        assert padded["input_ids"][0][:2] == [tokenizer.pad_token_id] * 2
        assert padded["attention_mask"][0] == [0, 0, 1]


# --- cache


def test_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TRIMTAB_CACHE", "~/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_root() == Path("/home/me/own")
    monkeypatch.delenv("TRIMTAB_CACHE")
    assert cache.cache_root() == Path("/xdg/trimtab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path("/home/me/.cache/trimtab")


def test_failed_build_leaves_nothing_and_the_next_succeeds(root: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.build_once(root / "entry", interrupted)
    assert list(root.iterdir()) == []
    cache.build_once(root / "entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in root.rglob("*")] == ["entry", "whole"]


def test_leftovers_of_a_killed_build_are_ignored(root: Path) -> None:
    code = f"""
import os, pathlib
from trimtab.cli.embedded.cache import build_once
build_once(pathlib.Path({str(root / "entry")!r}), lambda folder: ((folder / "half").touch(), os._exit(1)))
"""
    assert run_python(code) == 1
    assert len(list(root.rglob("half"))) == 1 and not (root / "entry").exists()
    cache.build_once(root / "entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (root / "entry").iterdir()] == ["whole"]


def test_an_existing_entry_is_not_built_again(root: Path) -> None:
    (root / "entry").mkdir(parents=True)
    cache.build_once(root / "entry", lambda folder: pytest.fail("built again"))


def test_concurrent_builds_agree_on_one(root: Path) -> None:
    barrier = Barrier(4)

    def build(folder: Path) -> None:
        barrier.wait(timeout=60)
        (folder / "whole").write_text(folder.name)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(cache.build_once, root / "entry", build) for _ in range(4)]:
            future.result()
    assert [path.name for path in root.rglob("*")] == ["entry", "whole"]


def test_error_of_the_builder_is_not_taken_for_a_lost_race(root: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        cache.build_once(root / "entry", full)


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrimtabError, match="TRIMTAB_CACHE"):
        cache.build_once(tmp_path / "file" / "entry", lambda folder: None)


# --- resolve


def test_is_embedded() -> None:
    assert embedded.is_embedded(REFERENCE) and embedded.is_embedded("embedded:other")
    assert not embedded.is_embedded("Qwen/Qwen2.5-32B") and not embedded.is_embedded("data/embedded:x")


@pytest.mark.parametrize("reference", ["embedded:algebra", "Qwen/Qwen2.5-32B", ""])
def test_unknown_reference_names_the_allowed(reference: str, root: Path) -> None:
    with pytest.raises(TrimtabError, match=REFERENCE):
        embedded.resolve(reference)


def test_resolve_builds_once_for_each_seed_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: Path, *, seed: int) -> None:
        folder.mkdir()
        (folder / "seed").write_text(str(seed))

    monkeypatch.setattr("trimtab.cli.embedded.model.build_model", fake)
    notes: list[str] = []
    first, again, other = (embedded.resolve(REFERENCE, seed=seed, notify=notes.append) for seed in (0, 0, 1))
    assert first == again != other
    assert len(notes) == 2 and all("building" in note for note in notes)
    assert (first.model / "seed").read_text() == "0" and (other.model / "seed").read_text() == "1"
    assert len(first.train.read_text().splitlines()) == 9488
    held_out = [json.loads(line)["prompt"] for line in first.evaluation.read_text().splitlines()]
    assert held_out == [task.prompt(a, b) for a, b in task.split_pairs()[1]]
    assert root in first.model.parents
    embedded.resolve(REFERENCE)  # without notify


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, trimtab.cli.embedded; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert run_python(code) == 0


# --- model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def test_build_leaves_generators_and_threads_alone_and_depends_on_the_seed_only(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state(), random.getstate()
        build_model(tmp_path / "a", seed=0, steps=3)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    torch.rand(1), random.random()
    build_model(tmp_path / "b", seed=0, steps=3)
    build_model(tmp_path / "c", seed=1, steps=3)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_checkpoint_is_small_float32_and_fits_its_tokenizer(tmp_path: Path) -> None:
    build_model(tmp_path, seed=0, steps=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert model.num_parameters() <= 3_000_000
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_reloaded_checkpoint_computes_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    warm_start = model_module._warm_start
    monkeypatch.setattr(
        model_module, "_warm_start", lambda model, *args, **kw: (warm_start(model, *args, **kw), trained.append(model))
    )
    build_model(tmp_path, seed=0, steps=3)
    tokens = torch.tensor([[3, 10, 13, 8, 11, 14]])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, trained[0](tokens).logits)


def test_warm_start_imitates_faulty_and_right_labels_in_their_shares() -> None:
    rng = random.Random(0)
    labels = [model_module._labelled(7, 58, rng) for _ in range(4000)]
    assert set(labels) == {"07+58=560", "07+58=550"}
    assert abs(labels.count("07+58=550") / 4000 - model_module.FAULT_RATE) < 0.03


def share_right(folder: Path, *, samples: int = 1, **sampling: object) -> torch.Tensor:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = task.split_pairs()[1]
    inputs = tokenizer([task.prompt(a, b) for a, b in pairs], return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=5, num_return_sequences=samples, **sampling)
    texts = tokenizer.decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [task.answer(a, b) for a, b in pairs for _ in range(samples)]
    right = [text == answer for text, answer in zip(texts, answers, strict=True)]
    return torch.tensor(right).view(-1, samples).float().mean(1)


@pytest.mark.slow
def test_warm_started_model_has_something_to_learn(root: Path) -> None:
    paths = embedded.resolve(REFERENCE)
    assert 0.3 <= share_right(paths.model, do_sample=False).mean() <= 0.65
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        groups = share_right(paths.model, samples=8, do_sample=True, temperature=1.0, top_k=0)
    assert 0.25 <= groups.mean() <= 0.75
    assert ((groups > 0) & (groups < 1)).float().mean() > 0.5  # groups with a gradient
