"""The command as a user meets it: what it prints, and one message for what is wrong."""

import sys
from pathlib import Path

import pytest

from trimtab.recipe import list_recipes, load_recipe
from trimtab.recipe.frameworks import OTHERS
from trimtab.recipe.paths import leaves
from trimtab.recipe.sources import source_of

COMMAND = str(Path(sys.executable).parent / "trimtab")
MAIN = "from trimtab.cli.app import main; import sys; sys.argv = {}; main()"


def refused(done) -> str:
    """The one message of a command that was refused."""
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("trimtab: ") and "Traceback" not in done.err
    return done.err.removeprefix("trimtab: ").rstrip("\n")


# In a process of its own


def test_bad_input_is_one_message_on_stderr_and_exit_code_2(shell):
    done = shell(COMMAND, "show", "dapo", "objective.surrogate.clip_hihg=0.3")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr == (
        "trimtab: recipe dapo:\n  objective.surrogate: unknown key 'clip_hihg'; did you mean clip_high? "
        "Allowed: name, clip_low, clip_high, dual_clip\n"
    )


def test_control_c_in_a_run_says_how_to_continue_and_exits_with_130(shell):
    interrupted = (
        "import os, signal, trimtab.cli.run as run\n"
        "def train(request): os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "run.find_backend = lambda name: train\n" + MAIN.format(["trimtab", "run", "dapo"])
    )
    done = shell("-c", interrupted)
    assert done.returncode == 130
    assert done.stderr.startswith("trimtab: interrupted; the same command continues")
    assert len(done.stderr.splitlines()) == 1


# Help and the lists


def test_help_names_the_commands(trimtab):
    done = trimtab("--help")
    assert done.code == 0
    assert all(word in done.out for word in ("recipes", "show", "run"))


@pytest.mark.parametrize("command", ["recipes", "show", "run"])
def test_each_command_has_help(trimtab, command):
    done = trimtab(command, "--help")
    assert done.code == 0 and "Usage: " in done.out


def test_recipes_lists_each_with_what_it_mirrors(trimtab):
    done = trimtab("recipes")
    assert done.code == 0 and done.err == ""
    for name in list_recipes():
        (line,) = (line for line in done.out.splitlines() if line.startswith(f"{name} "))
        recipe = load_recipe(name)
        paper = recipe.reference.arxiv or "blog"
        assert recipe.title in line and paper in line


def lines_of_keys(out: str) -> dict[str, list[str]]:
    """Each key's line and the notes under it."""
    found: dict[str, list[str]] = {}
    for line in out.splitlines()[3:]:
        if line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
        elif line and not line.startswith("DOES NOT ACT"):
            found[line.split()[0]] = [line]
    return found


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.parametrize("width", ["80", "30", "200"])
def test_show_prints_every_key_whole_with_its_value_and_source(trimtab, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", width)
    done = trimtab("show", name)
    recipe = load_recipe(name)
    shown = lines_of_keys(done.out)
    values = dict(leaves(recipe.model_dump(mode="json", exclude={"name", "title", "reference", "sources"})))
    assert list(shown) == list(values)
    words = {None: "null", True: "true", False: "false"}
    for path, (line, *_) in shown.items():
        value = values[path]
        text = words[value] if value is None or isinstance(value, bool) else str(value)
        assert line.split() == [path, *text.split(), *([source_of(recipe, path)] if source_of(recipe, path) else [])]
    assert "…" not in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_show_puts_what_each_framework_does_under_its_key(trimtab, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = lines_of_keys(trimtab("show", "dapo").out)
    assert {key: notes for key, (_, *notes) in shown.items() if notes} == {
        key: [f"{framework}: {text}" for framework, text in others.items()] for key, others in OTHERS.items()
    }


def test_show_speaks_of_a_section_that_is_not_empty_too(trimtab):
    shown = lines_of_keys(trimtab("show", "dapo", "objective.penalties=[{name: kl, coefficient: 1}]").out)
    assert shown["objective.penalties.kl.name"][1:] == ["TRL: none (beta 0)", "veRL: none (use_kl_loss false)"]


def test_show_is_readable_at_80_columns(trimtab):
    lines = trimtab("show", "dapo").out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("DOES NOT ACT"))


def test_show_takes_overrides_and_says_what_does_not_act(trimtab):
    done = trimtab("show", "dapo", "objective.surrogate.clip_high=0.3", "model='[/a] :smile:'")
    assert lines_of_keys(done.out)["objective.surrogate.clip_high"][0].split()[1:] == ["0.3", "project"]
    assert "[/a] :smile:" in done.out  # not read as markup
    assert "DOES NOT ACT: sampling.dynamic" in done.out
    assert "DOES NOT ACT" not in trimtab("show", "dapo", "sampling.dynamic=null").out


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "dap"], "recipe 'dap' is unknown; did you mean dapo? Allowed: dapo, "),
        (["run", "quikstart"], "recipe 'quikstart' is unknown; did you mean quickstart? Allowed: dapo, "),
        (["run", "none.yaml"], "recipe none.yaml: there is no such file"),
        (["run", "dapo", "data.trian=x"], "data: unknown key 'trian'; did you mean train?"),
        (["run", "dapo", "rollout.engine=vlm"], "rollout.engine: 'vlm' is not allowed; did you mean vllm?"),
        (["run", "dapo", "rollout.group_size=1"], "rollout.group_size: 1 is not allowed; it must be at least 2"),
        (["run", "dapo", "--tiny", "rollout.group_size=1"], "rollout.group_size: 1 is not allowed"),
        (["run", "dapo", "objective.surrogate.clip_low=1.5"], "clip_low: 1.5 is a distance from 1; between 0 and 1"),
        (["run", "dapo", "clip_low"], "'clip_low' is not an override; write a.b.c=value"),
        (["run", "dapo", "--backend", "tlr"], "back end 'tlr' is unknown; installed: trl"),
    ],
)
def test_bad_input_is_one_message(trimtab, tmp_path, arguments, message):
    assert message in refused(trimtab(*arguments))
    assert list(tmp_path.iterdir()) == []  # and leaves nothing behind


@pytest.mark.parametrize(
    "text",
    ["rollout: 3", "rollout: {group_size: x}", "rollout: null", "training: {mini_batch_size: 0}", "reward: {}"],
)
def test_a_file_that_is_no_recipe_is_refused_with_tiny_too(trimtab, tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    assert refused(trimtab("run", "mine.yaml", "--tiny")).startswith("recipe mine.yaml:\n")


@pytest.mark.parametrize("arguments", [["run"], ["show"], ["nothing"], ["run", "dapo", "--nothing"]])
def test_wrong_usage_exits_with_2(trimtab, arguments):
    done = trimtab(*arguments)
    assert done.code == 2
    assert done.out == "" and "Usage: " in done.err and "Traceback" not in done.err
