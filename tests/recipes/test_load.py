"""The loader: where recipes are found, overrides, and files that are none. What a key may say: test_refusals.py."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trimtab.recipe.load as load_module
from trimtab.errors import TrimtabError
from trimtab.recipe import list_recipes, load_recipe
from trimtab.recipe.inert import inert
from trimtab.recipe.load import find, recipe_folder
from trimtab.recipe.paths import leaves

ROOT = Path(__file__).parents[2]


def refusal(name, *overrides) -> str:
    with pytest.raises(TrimtabError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


# Overrides


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("objective.surrogate.clip_high=0.31", lambda r: r.objective.surrogate.clip_high, 0.31),
        ("optimizer.lr=3e-6", lambda r: r.optimizer.lr, 3e-6),  # YAML 1.1 reads this as text
        ("optimizer.lr=2E-6", lambda r: r.optimizer.lr, 2e-6),
        ("optimizer.lr=1.5e-7", lambda r: r.optimizer.lr, 1.5e-7),
        ("optimizer.lr=1", lambda r: r.optimizer.lr, 1.0),  # a whole number is a number
        ("reward.overlong.buffer=7", lambda r: r.reward[1].buffer, 7),
        ("reward.1.buffer=7", lambda r: r.reward[1].buffer, 7),
        ("reward.0.weight=-2", lambda r: r.reward[0].weight, -2.0),
        ("reward=[{name: exact, weight: 2}]", lambda r: [u.name for u in r.reward], ["exact"]),
        ("objective.penalties=[{name: kl, coefficient: 1e-3}]", lambda r: r.objective.penalties[0].coefficient, 1e-3),
        ("sampling.dynamic=null", lambda r: r.sampling.dynamic, None),
        ("sampling.dynamic=", lambda r: r.sampling.dynamic, None),
        ("training.shuffle_rewards=true", lambda r: r.training.shuffle_rewards, True),
        ("model=a=b", lambda r: r.model, "a=b"),
        (" model = x ", lambda r: r.model, "x"),
        ("model='1e-6'", lambda r: r.model, "1e-6"),
        ("model=C:/models/x", lambda r: r.model, "C:/models/x"),
        ("title='1: 2'", lambda r: r.title, "1: 2"),
        ("title=Größe", lambda r: r.title, "Größe"),
    ],
)
def test_an_override_replaces_one_value(override, read, value):
    assert read(load_recipe("dapo", [override])) == value


def test_an_override_leaves_the_other_values_alone():
    before = dict(leaves(load_recipe("dapo").model_dump(exclude={"sources"})))
    after = dict(leaves(load_recipe("dapo", ["reward.overlong.buffer=7"]).model_dump(exclude={"sources"})))
    assert after == before | {"reward.overlong.buffer": 7}


def test_a_section_that_is_null_or_missing_is_made():
    recipe = load_recipe("quickstart", ["sampling.dynamic.max_batches=3"])  # quickstart states no sampling
    assert recipe.sampling.dynamic.max_batches == 3
    recipe = load_recipe("dapo", ["sampling.dynamic=null", "sampling.dynamic.max_batches=4"])
    assert recipe.sampling.dynamic.max_batches == 4


def test_overrides_apply_in_order():
    assert load_recipe("dapo", ["training.seed=1", "training.seed=2"]).training.seed == 2
    recipe = load_recipe("dapo", ["reward.overlong.buffer=1", "reward=[{name: overlong, max_length: 9, buffer: 3}]"])
    assert recipe.reward[0].buffer == 3
    recipe = load_recipe("dapo", ["objective.weights=[{name: importance}]", "objective.weights.importance.high=3"])
    assert recipe.objective.weights[0].high == 3.0


@pytest.mark.parametrize("text", ["x", "", "=", "=x", " =x", "objective.surrogate.clip_high 0.3"])
def test_an_override_without_a_key_or_a_value_is_refused(text):
    assert refusal("dapo", text) == f"{text!r} is not an override; write a.b.c=value"


@pytest.mark.parametrize("text", ["model.x=3", "optimizer.lr.x.y=3", "data.train.0=3"])
def test_an_override_through_a_value_is_refused(text):
    assert "is a value, " in refusal("dapo", text)


def test_an_element_that_is_not_in_the_list_is_refused_with_the_nearest():
    message = refusal("dapo", "reward.overlog.buffer=3")
    assert message == (
        "reward.overlog.buffer: the list has no element 'overlog'; did you mean overlong? Allowed: math, overlong"
    )
    assert "the list has no element '2'" in refusal("dapo", "reward.2.buffer=3")
    assert "it is empty" in refusal("dapo", "objective.weights.importance.high=3")


@pytest.mark.parametrize(
    "value",
    ["[1", "{a: 1, a: 2}", "&a [*a]", "&a {x: *a}", "!!bool 3", "!!int x", "!!timestamp x", "2020-99-99", "9" * 5000]
    + ["!!python/object:os.system x", "[" * 3000, "{[1]: 2}", "\x00", "'", "0b_", "@", "a: b: c", "*x", "!!float ''"],
)
def test_a_value_that_is_no_yaml_is_refused(value):
    message = refusal("dapo", f"model={value}")
    assert message.startswith(f"model={value}: not readable as YAML: ")


PATHS = st.sampled_from([path for path, _ in leaves(load_recipe("dapo").model_dump(mode="json"))])
YAML = st.text(alphabet="[]{}:,-+.0123456789eExXnaN_'\"&*!|>%@`#?~<= \n\ttruefalsnullb²é\u2028", max_size=20)
TEXTS = (
    st.builds("{}={}".format, PATHS, YAML | st.text(max_size=8))
    | st.builds("{}.{}={}".format, PATHS, st.text(max_size=4), YAML)
    | st.builds("{}={}".format, st.text(max_size=10), YAML)
    | st.text(max_size=15)
)


@given(overrides=st.lists(TEXTS, max_size=3))
@example(['schedules={"\\ud800": 1}'])
@example(['sources={"\\ud800": paper}'])
@example(['optimizer={"\\ud800": 1}'])
@example(['model="\\ud800"'])
@example(["\ud800=1"])
@example(["model=" + "[" * 150 + "]" * 150])
@example(["objective.masks=" + "[" * 150 + "]" * 150])
@settings(max_examples=150, deadline=None)
def test_no_override_raises_anything_but_its_message(overrides):
    try:
        load_recipe("dapo", overrides)
    except TrimtabError as error:
        assert str(error)


# Files


def write(folder, text, name="mine.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def quickstart_text() -> str:
    return find("quickstart").read_text(encoding="utf-8")


def test_a_file_loads_by_its_path_as_text_or_path(tmp_path, monkeypatch):
    path = write(tmp_path, quickstart_text())
    assert load_recipe(path) == load_recipe(str(path)) == load_recipe("quickstart")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("mine.yaml") == load_recipe("./mine.yaml") == load_recipe("quickstart")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_recipe("~/mine.yaml") == load_recipe("quickstart")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a mapping of keys was expected, not NoneType"),
        ("# only a comment\n", "a mapping of keys was expected, not NoneType"),
        ("- name: mine\n", "a mapping of keys was expected, not list"),
        ("just text\n", "a mapping of keys was expected, not str"),
        ("name: mine\n\tmodel: x\n", "not readable as YAML: "),
        ("name: [mine\n", "not readable as YAML: "),
        ("name: mine\nname: yours\n", "key 'name' comes twice"),
        ("name: mine\ndata: {train: x, train: y}\n", "key 'train' comes twice"),
        ("a: 1\n---\nb: 2\n", "not readable as YAML: "),
        ("&a {name: *a}\n", "an alias (*name) is not allowed"),
        (b"name: \xff\xfe\n", "not readable as UTF-8 text: "),
        (b"\x80\x04\x95", "not readable as UTF-8 text: "),
        (b"name: \x07\n", "not readable as YAML: "),
    ],
)
def test_a_file_that_holds_no_recipe_is_refused_by_name(tmp_path, content, message):
    path = write(tmp_path, content)
    text = refusal(path)
    assert text.startswith(f"recipe {path}") and message in text


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, quickstart_text())

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert "Permission denied" in refusal(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert refusal(tmp_path / "none.yaml") == f"recipe {tmp_path / 'none.yaml'}: there is no such file"
    assert refusal("none.yml") == "recipe none.yml: there is no such file"
    assert "there is no such file" in refusal("a/b")
    assert "home" in refusal("~nobody-of-this-name/x.yaml")
    assert "too long" in refusal("x" * 5000)
    assert refusal(Path("a\x00b.yaml")).endswith("there is no such file")


def test_a_folder_is_not_a_file(tmp_path):
    assert refusal(tmp_path) == f"recipe {tmp_path}: it is a folder"
    (tmp_path / "x.yaml").mkdir()
    assert refusal(tmp_path / "x.yaml").endswith("it is a folder")


@pytest.mark.parametrize("name", ["dappo", "DAPO", "Dapo"])
def test_an_unknown_name_is_refused_with_the_nearest(name):
    assert refusal(name) == f"recipe {name!r} is unknown; did you mean dapo? Allowed: {', '.join(list_recipes())}"


@pytest.mark.parametrize("name", ["", "..", ".", "zzzzzz"])
def test_an_unknown_name_without_a_near_one_is_refused_with_all(name):
    assert refusal(name) == f"recipe {name!r} is unknown; allowed: {', '.join(list_recipes())}"


# Where the bundled recipes lie


def test_an_editable_install_reads_the_recipes_of_the_checkout():
    assert recipe_folder() == ROOT / "recipes"
    assert not (ROOT / "shared/trimtab/recipes").exists()  # a copy there would go stale


def test_an_installed_wheel_reads_the_recipes_in_the_package(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", quickstart_text().replace("name: quickstart", "name: bundled"), "bundled.yaml")
    write(tmp_path / "recipes", "no recipe", "notes.txt")
    monkeypatch.setattr(load_module, "files", lambda package: tmp_path if package == "trimtab" else None)
    assert recipe_folder() == tmp_path / "recipes"
    assert list_recipes() == ["bundled"]
    assert load_recipe("bundled").name == "bundled"
    assert "Allowed: bundled" in refusal("bundld")


def test_what_does_not_act_yet_is_said():
    (line,) = inert(load_recipe("dapo"))
    assert line.startswith("sampling.dynamic: ")
    assert inert(load_recipe("dapo", ["sampling.dynamic=null"])) == []


def test_what_other_values_leave_idle_is_said():
    short = inert(
        load_recipe("dapo", ["rollout.max_length=512", "rollout.engine=transformers", "precision.train=fp32"])
    )
    assert [line.split()[0] for line in short] == ["sampling.dynamic:", "reward.overlong:", "precision.rollout"]
    assert "begins beyond 16384 tokens, and answers end at 512" in short[1]
    assert "bf16: the training model itself samples, in fp32" in short[2]
