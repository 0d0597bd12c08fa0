"""The run's folder: every line is JSON, a resume forgets what comes again, nothing is half written."""

import json
import math
from pathlib import Path

import pytest

from trimtab.cli.folder import MARK, RunFolder
from trimtab.errors import TrimtabError
from trimtab.recipe import load_recipe
from trimtab.recipe.load import dump

RECIPE = load_recipe("quickstart")


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run", RECIPE)


def reopened(folder, recipe=RECIPE, **options) -> RunFolder:
    """The folder as the next process finds it: the lock of this one is gone."""
    with folder:
        pass
    return RunFolder(folder.path, recipe, **options)


def lines(folder) -> list[str]:
    return folder.metrics_file.read_text().splitlines()


def test_the_step_comes_first_and_each_step_is_a_line(folder):
    folder.record(1, {"b": 0.5, "a": 2})
    folder.record(2, {})
    assert lines(folder) == ['{"step": 1, "b": 0.5, "a": 2}', '{"step": 2}']


def test_a_number_that_is_none_is_null(folder):
    folder.record(1, {"loss": math.nan, "kl/mean": math.inf, "x": -math.inf, "reward/mean": 1e-300})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (line,) = lines(folder)
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "kl/mean": None,
        "x": None,
        "reward/mean": 1e-300,
    }


def test_a_resume_keeps_the_whole_lines_up_to_its_step(folder):
    for step in range(1, 6):
        folder.record(step, {"loss": step / 2})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 2, "loss": 3')  # killed while it wrote
    folder.resume(3)
    assert [json.loads(line) for line in lines(folder)] == [{"step": step, "loss": step / 2} for step in (1, 2, 3)]
    folder.record(4, {"loss": 9.0})
    assert json.loads(lines(folder)[-1]) == {"step": 4, "loss": 9.0}


@pytest.mark.parametrize("cut", ["{", '{"step', '{"step": 1', "", "null", "3", "[1]", '{"loss": 1}', '{"step": "x"}'])
def test_a_line_that_is_none_is_dropped(folder, cut):
    folder.record(1, {"loss": 1.0})
    with folder.metrics_file.open("a") as file:
        file.write(cut)
    folder.resume(5)
    assert lines(folder) == ['{"step": 1, "loss": 1.0}']


def test_a_resume_from_the_start_empties_the_metrics(folder):
    folder.resume(0)
    assert folder.metrics_file.read_text() == ""
    folder.record(1, {})
    folder.resume(0)
    assert folder.metrics_file.read_text() == ""


def test_a_write_that_is_interrupted_leaves_the_old_file(folder, monkeypatch):
    folder.finish({"seconds": 1.0})

    def killed(self, text, **_):
        self.write_bytes(text.encode()[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.finish({"seconds": 2.0, "model": "model"})
    assert folder.summary() == {"seconds": 1.0}


def test_a_folder_whose_first_write_was_interrupted_is_used_again(tmp_path):
    (tmp_path / MARK).touch()
    (tmp_path / ".recipe.yaml.part").write_text("name: qui")
    folder = RunFolder(tmp_path, RECIPE)
    assert load_recipe(folder.recipe_file) == RECIPE
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", MARK}


def test_a_start_that_failed_leaves_the_folder_free(folder):
    folder.resume(0)
    assert load_recipe(reopened(folder, load_recipe("dapo")).recipe_file).name == "dapo"


def test_two_processes_do_not_run_in_one_folder(folder):
    with pytest.raises(TrimtabError, match="another process is running in"):
        RunFolder(folder.path, RECIPE)


@pytest.mark.parametrize("fresh", [False, True])
def test_what_no_run_wrote_is_never_touched(tmp_path, fresh):
    (tmp_path / "recipe.yaml").write_text(dump(RECIPE))
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(TrimtabError, match="is not empty and holds no run"):
        RunFolder(tmp_path, RECIPE, fresh=fresh)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_clearing_that_is_interrupted_can_be_done_again(folder, monkeypatch):
    folder.finish({})
    folder.record(1, {})
    (folder.path / "model").mkdir()
    unlink = Path.unlink

    def killed(self, **options):
        unlink(self, **options)
        if self.name == "summary.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        reopened(folder, load_recipe("dapo"), fresh=True)
    monkeypatch.undo()
    assert not reopened(folder, load_recipe("dapo"), fresh=True).finished


def test_the_same_recipe_opens_its_folder_again_and_keeps_what_is_there(folder):
    folder.record(1, {"loss": 1.0})
    again = reopened(folder, load_recipe(folder.recipe_file))
    assert lines(again) == ['{"step": 1, "loss": 1.0}'] and not again.finished
    again.finish({"seconds": 1.5})
    assert reopened(again).finished and folder.summary() == {"seconds": 1.5}


def test_a_recipe_that_someone_broke_is_named(folder):
    folder.record(1, {})
    folder.recipe_file.write_text("name: [")
    with pytest.raises(TrimtabError, match=r"recipe\.yaml: not readable as YAML"):
        reopened(folder)
    assert RunFolder(folder.path, RECIPE, fresh=True).recipe_file.read_text() == dump(RECIPE)
