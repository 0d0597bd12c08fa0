"""What a user gets: the wheel holds everything and works in an environment that holds nothing else."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would lend our modules
pytestmark = pytest.mark.slow


def _run(*command: object, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("trimtab-*.whl")
    return path


def test_the_wheel_holds_the_packages_and_every_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"trimtab/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert "trimtab/recipes/dapo.yaml" in recipes
    assert names >= {"trimtab/__init__.py", "trimtab/py.typed", "trl_ext/__init__.py", *recipes}
    assert {name.split("/")[0].split("-")[0] for name in names} <= {"trimtab", "trl_ext", "verl_ext"}


def test_the_wheel_lists_and_shows_its_recipes_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv" / "bin"
    _run(bin_ / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert "quickstart" in _run(bin_ / "trimtab", "recipes", cwd=tmp_path)
    assert "clip_high" in _run(bin_ / "trimtab", "show", "dapo", cwd=tmp_path)
