"""What the pages promise: each method has one, examples print what they say, YAML loads, links resolve."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import yaml

from trimtab.objective import MASKS, PENALTIES, SURROGATES, WEIGHTS
from trimtab.recipe.load import build_recipe, find, list_recipes, parse
from trimtab.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
METHODS = sorted(path for path in (ROOT / "docs/methods").glob("*.md") if path.name != "README.md")
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SECTIONS = ["Formula", "Paper", "Differs", "Same word elsewhere", "In a recipe", "From Python"]
SECTIONS += ["When to use, when not", "Metrics"]
COLUMNS = 120
MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|mnt|Users)/")


def blocks(language, paths):
    """The fenced blocks of a language, one test parameter each."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = [(path, match) for path in paths for match in fence.finditer(path.read_text())]
    return [
        pytest.param(match[1], id=f"{path.name}:{match.string[: match.start()].count(chr(10)) + 2}")
        for path, match in found
    ]


def prose(path):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(path):
    """The relative links of a page that lead to no file, or to no heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        goal = (path.parent / name).resolve() if name else path
        goal = goal / "README.md" if goal.is_dir() else goal
        if not goal.is_file() or (anchor and anchor not in anchors(goal)):
            yield f"{path.name}: {target}"


@pytest.mark.parametrize("name", [*SURROGATES, *WEIGHTS, *MASKS, *PENALTIES])
def test_every_method_of_the_objective_has_a_page_that_names_it_in_its_title_and_in_yaml(name):
    titled = [path for path in METHODS if f"`{name}`" in path.read_text().splitlines()[0]]
    assert len(titled) == 1, f"pages for {name}: {titled}"
    assert re.search(rf"\b{name.removesuffix('_token')}\b", "".join(p.values[0] for p in blocks("yaml", titled)))


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_page_is_in_the_index_and_has_its_sections_in_order(path):
    assert f"]({path.name})" in (ROOT / "docs/methods/README.md").read_text()
    titles = re.findall(r"^## (.*)$", prose(path), re.MULTILINE)
    assert [title for title in titles if title in SECTIONS] == SECTIONS


@pytest.mark.parametrize("code", blocks("python", METHODS))
def test_an_example_prints_what_its_comments_say(code):
    expected = re.findall(r"#> (.*)$", code, re.MULTILINE)
    assert expected, "the example shows no output"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("text", blocks("yaml", METHODS))
def test_yaml_of_a_page_loads_in_place_of_the_quickstarts(text):
    tree = parse(find("quickstart"))
    for section, node in yaml.safe_load(text).items():
        assert section in Recipe.model_fields
        tree[section] = {**tree.get(section, {}), **node} if isinstance(node, dict) else node
    build_recipe(tree, source="page")


def test_relative_links_lead_to_a_file_and_a_heading():
    assert not [link for path in DOCS for link in broken(path)]


def test_a_broken_link_or_anchor_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A `b`, c's\n[x](a.md#a-b-cs) [x](#a-b-cs) [x](https://x.y/z)\n")
    assert not list(broken(page))
    page.write_text("# A\n[x](b.md) [x](a.md#b)\n")
    assert list(broken(page)) == ["a.md: b.md", "a.md: a.md#b"]


def test_no_page_names_a_path_of_some_machine():
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in DOCS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE.search(line)
    ]


def test_the_paper_index_names_recipes_that_exist_and_every_paper_of_a_recipe():
    index = (ROOT / "docs/paper_index.md").read_text()
    for name in list_recipes():
        reference = parse(find(name))["reference"]
        assert (reference.get("arxiv") or reference["url"]) in index
    rows = [line.split("|") for line in index.splitlines() if line.startswith("| [")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row[4])} - {"ppo_clip"}
    assert named <= set(list_recipes())


def test_prose_fits_in_the_columns():
    assert not [
        f"{path.relative_to(ROOT)}:{number}"
        for path in DOCS
        if "methods" in path.parts or path.name == "paper_index.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS and not line.startswith("|")
    ]
