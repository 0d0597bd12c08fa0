"""Dotted paths: what `leaves` reads, `assign` writes back."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.recipe.paths import assign, leaves

KEYS = st.text("abcxyz_", min_size=1, max_size=4)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)


def _lists(children):
    """Lists of values, and of sections with a name that may come twice."""
    named = st.fixed_dictionaries({"name": KEYS}, optional={"x": children, "y": children})
    return st.lists(VALUES | named, max_size=3) | st.lists(named, min_size=1, max_size=3)


NODES = st.recursive(VALUES, lambda children: _lists(children) | st.dictionaries(KEYS, children, max_size=3))
TREES = st.dictionaries(KEYS, NODES, max_size=4)


@given(tree=TREES)
def test_every_leaf_can_be_assigned_where_it_was_found(tree):
    erased = copy.deepcopy(tree)
    found = list(leaves(tree))
    # Names go last: they are what the paths go by.
    names = [(path, value) for path, value in found if path.endswith(".name")]
    others = [item for item in found if item not in names]
    for path, _ in others if tree else []:
        assign(erased, path, "erased")
    for path, value in (others + names) if tree else []:
        assign(erased, path, value)
    assert erased == tree


@given(tree=TREES)
def test_leaves_of_mappings_build_the_tree_from_nothing(tree):
    plain = {key: node for key, node in tree.items() if not isinstance(node, list)}
    found = [(path, value) for path, value in leaves(plain) if plain]
    if any(part.isdigit() for path, _ in found for part in path.split(".")) or _holds_list(plain):
        return  # a list cannot be told from a mapping by its paths
    built: dict = {}
    for path, value in found:
        assign(built, path, value)
    assert built == plain


def _holds_list(node):
    if isinstance(node, dict):
        return any(map(_holds_list, node.values()))
    return isinstance(node, list) and bool(node)


@given(tree=TREES)
def test_every_path_comes_once(tree):
    paths = [path for path, _ in leaves(tree)]
    assert len(paths) == len(set(paths))


@given(tree=TREES, value=VALUES)
def test_assign_changes_nothing_else(tree, value):
    before = dict(leaves(tree)) if tree else {}
    for path in list(before):
        if path.endswith(".name"):
            continue
        changed = copy.deepcopy(tree)
        assign(changed, path, value)
        assert dict(leaves(changed)) == before | {path: value}


def test_an_element_goes_by_its_name_where_that_is_its_own_and_by_its_number():
    tree = {"w": [{"name": "a", "x": 1}, {"name": "b", "x": 2}, {"name": "b", "x": 3}, 4]}
    assert dict(leaves(tree)) == {
        "w.a.name": "a",
        "w.a.x": 1,
        "w.1.name": "b",
        "w.1.x": 2,
        "w.2.name": "b",
        "w.2.x": 3,
        "w.3": 4,
    }
    assign(tree, "w.a.x", 10)
    assign(tree, "w.0.x", tree["w"][0]["x"] + 1)
    assign(tree, "w.2.x", 30)
    assign(tree, "w.3", 40)
    assert [tree["w"][0]["x"], tree["w"][1]["x"], tree["w"][2]["x"], tree["w"][3]] == [11, 2, 30, 40]


def test_a_name_wins_over_a_number():
    tree = {"w": [{"name": "1", "x": 0}, {"name": "a", "x": 0}]}
    assign(tree, "w.1.x", 5)
    assert [item["x"] for item in tree["w"]] == [5, 0]


@pytest.mark.parametrize("tree", [{}, {"a": None}, {"a": {}}, {"a": {"b": None}}])
def test_sections_that_are_missing_or_null_are_made(tree):
    assign(tree, "a.b.c", 1)
    assert tree == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a.b", r"^a\.b: a is a value, 1, and has no 'b'$"),
        ("a.b.c", r"^a\.b\.c: a is a value, 1, and has no 'b'$"),
        ("deep.a.b.c", r"^deep\.a\.b\.c: deep\.a is a value, 0, and has no 'b'$"),
        ("w.klx.y", r"^w\.klx\.y: the list has no element 'klx'; did you mean kl\? Allowed: kl, 1$"),
        ("w.2", r"the list has no element '2'; allowed: kl, 1$"),
        ("w.-1", r"the list has no element '-1'"),
        ("w.²", r"the list has no element '²'"),
        ("w." + "9" * 5000, r"the list has no element"),
        ("w.", r"the list has no element ''"),
        ("none.0", r"the list has no element '0'; it is empty$"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_and_changes_nothing(path, message):
    tree = {"a": 1, "deep": {"a": 0}, "w": [{"name": "kl"}, 3], "none": []}
    before = copy.deepcopy(tree)
    with pytest.raises(TrimtabError, match=message):
        assign(tree, path, 0)
    assert tree == before
