"""`trimtab run`: its folder, what it says, and the same command again. The back end is a fake, nothing trains."""

import json

import pytest

from trimtab.errors import TrimtabError
from trimtab.recipe import load_recipe

STEPS = "training.steps=4"


def refused(done) -> str:
    assert done.code == 2 and "Traceback" not in done.err
    return done.err


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_folder_and_says_where_it_is(trimtab, backend, tmp_path):
    done = trimtab("run", "quickstart", STEPS)
    folder = tmp_path / "runs/quickstart"
    assert done.code == 0 and done.err == ""
    assert backend.asked == ["trl"]
    assert load_recipe(folder / "recipe.yaml") == load_recipe("quickstart", [STEPS]) == backend.requests[0].recipe
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_before"] == 0.25 and summary["accuracy_after"] == 0.75 and summary["model"] == "model"
    *_, outcome, where, hint = done.out.splitlines()
    assert outcome.startswith("Finished 4 steps of quickstart. ")
    assert outcome.endswith("Held-out accuracy 0.250 before, 0.750 after.")
    assert where == "Run folder: runs/quickstart  (metrics.jsonl, recipe.yaml, model)"
    assert hint.startswith("Next: trimtab ")


def test_a_run_hands_the_back_end_paths(trimtab, backend):
    trimtab("run", "quickstart", STEPS)
    (request,) = backend.requests
    assert (request.model, request.train, request.evaluation) == (
        "built/model",
        "built/train.jsonl",
        "built/evaluation.jsonl",
    )
    trimtab("run", "dapo", STEPS)
    request = backend.requests[1]
    assert request.model == "Qwen/Qwen2.5-32B" and request.evaluation is None


def test_tiny_has_a_folder_of_its_own_and_takes_overrides(trimtab, backend, tmp_path):
    done = trimtab("run", "dapo", "--tiny", "training.steps=2")
    recipe = load_recipe(tmp_path / "runs/dapo-tiny/recipe.yaml")
    assert recipe.model == "embedded:arithmetic" and recipe.training.steps == 2
    assert recipe.objective == load_recipe("dapo").objective
    assert "DID NOT ACT: sampling.dynamic" in done.out
    assert "Next: trimtab run dapo model=YOUR_MODEL" in done.out


def test_a_folder_with_brackets_in_its_name_is_printed_as_it_is(trimtab, backend, tmp_path):
    done = trimtab("run", "dapo", STEPS, "--output", "[bold]x[/a]")
    assert done.code == 0 and "Run folder: [bold]x[/a]  (" in done.out
    assert (tmp_path / "[bold]x[/a]" / "summary.json").is_file()


def test_a_finished_run_says_so_and_does_not_train_again(trimtab, backend):
    trimtab("run", "quickstart", STEPS)
    done = trimtab("run", "quickstart", STEPS)
    assert done.code == 0 and len(backend.requests) == 1
    assert done.out.startswith("runs/quickstart holds this run, finished. ")
    assert "Held-out accuracy 0.250 before, 0.750 after." in done.out and "--fresh" in done.out


def test_an_interrupted_run_says_how_to_go_on_and_does(trimtab, backend, tmp_path):
    backend.last, backend.stop = 3, KeyboardInterrupt()
    done = trimtab("run", "quickstart", STEPS)
    assert done.code == 130
    assert done.err.startswith("trimtab: interrupted; the same command continues") and len(done.err.splitlines()) == 1
    assert not (tmp_path / "runs/quickstart/summary.json").exists()

    backend.first, backend.last, backend.stop = 2, None, None
    done = trimtab("run", "quickstart", STEPS)
    assert done.code == 0 and "continuing after step 2" in done.out
    assert [line["step"] for line in metrics(tmp_path / "runs/quickstart")] == [1, 2, 3, 4]


def test_bad_input_that_the_back_end_finds_is_one_message(trimtab, backend):
    backend.stop = TrimtabError("data.answer: train.jsonl has no column 'answr'")
    assert refused(trimtab("run", "quickstart", STEPS)) == ("trimtab: data.answer: train.jsonl has no column 'answr'\n")


def test_a_defect_is_not_hidden(trimtab, backend):
    backend.stop = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        trimtab("run", "quickstart", STEPS)


def test_another_run_in_the_folder_is_refused_and_what_differs_is_named(trimtab, backend, tmp_path):
    trimtab("run", "quickstart", STEPS)
    before = (tmp_path / "runs/quickstart/recipe.yaml").read_text()
    message = refused(trimtab("run", "quickstart", STEPS, "optimizer.lr=1e-5", "rollout.top_p=0.5"))
    assert message == (
        "trimtab: --output: runs/quickstart holds another run:\n"
        "  optimizer.lr: 0.0003 there, 1e-05 now\n"
        "  rollout.top_p: 1.0 there, 0.5 now\n"
        "Name another folder, or add --fresh to replace it\n"
    )
    message = refused(trimtab("run", "dapo", "--output", "runs/quickstart"))
    assert "  name: 'quickstart' there, 'dapo' now\n" in message and "  reward.exact.name: 'exact' there" in message
    assert (tmp_path / "runs/quickstart/recipe.yaml").read_text() == before and len(backend.requests) == 1


def test_another_title_is_no_other_run(trimtab, backend):
    trimtab("run", "quickstart", STEPS)
    assert "holds this run, finished" in trimtab("run", "quickstart", STEPS, "title=Mine").out


def test_fresh_replaces_what_a_run_wrote_and_nothing_else(trimtab, backend, tmp_path):
    trimtab("run", "quickstart", STEPS)
    folder = tmp_path / "runs/quickstart"
    foreign = ["notes.txt", "checkpoint-notes.txt", "mine/model"]
    (folder / "mine").mkdir()
    for name in foreign:
        (folder / name).write_text("mine")
    (folder / "model/weights").write_text("old")
    (folder / "checkpoint-3/weights").write_text("old")
    (folder / "evaluation.json").write_text("{}")

    backend.last = 1
    done = trimtab("run", "quickstart", "training.steps=1", "--fresh")
    assert done.code == 0 and len(backend.requests) == 2
    assert [line["step"] for line in metrics(folder)] == [1]
    assert load_recipe(folder / "recipe.yaml").training.steps == 1
    assert not (folder / "model/weights").exists() and not (folder / "checkpoint-3/weights").exists()
    assert not (folder / "evaluation.json").exists()
    assert all((folder / name).read_text() == "mine" for name in foreign)


@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_a_folder_that_holds_something_else_is_refused_and_kept(trimtab, backend, tmp_path, options):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/model").write_text("mine")
    message = refused(trimtab("run", "quickstart", STEPS, "--output", "thesis", *options))
    assert message == "trimtab: --output: thesis is not empty and holds no run; name another folder\n"
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["model"] and not backend.requests


def test_an_output_that_is_no_folder_is_refused(trimtab, backend, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert refused(trimtab("run", "quickstart", "--output", "file")) == "trimtab: --output: file is a file\n"
    assert refused(trimtab("run", "quickstart", "--output", "file/x")).startswith("trimtab: --output: file/x cannot")
    long = "x" * 300
    assert "cannot be used" in refused(trimtab("run", "quickstart", "--output", long))
    assert (tmp_path / "file").read_text() == "mine" and not backend.requests


def test_an_empty_folder_is_used(trimtab, backend, tmp_path):
    (tmp_path / "empty").mkdir()
    assert trimtab("run", "quickstart", STEPS, "--output", "empty").code == 0
    assert (tmp_path / "empty/summary.json").is_file()
