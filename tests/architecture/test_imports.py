"""Who imports whom: read from the source with an allow-list, and seen again in fresh interpreters."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = ROOT / "shared" / "trimtab"
ADAPTERS = {"trl_ext": "verl_ext", "verl_ext": "trl_ext"}
EXEMPT = {"cli", "graders", "recipe", "report"}  # sub-packages that may import more than torch


def _is_exempt(module: str) -> bool:
    package, _, rest = module.partition(".")
    return package == "trimtab" and rest.partition(".")[0] in EXEMPT


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


ALGORITHM_FILES = {
    module: path for path in sorted(CORES.rglob("*.py")) if not _is_exempt(module := _module(path, CORES.parent))
}
PRODUCT_FILES = [path for folder in ("shared", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import that runs, with `from a import b` as `a.b`: b may be a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            source = "." * child.level + (child.module or "")
            yield from ((child.lineno, f"{source}.{alias.name}") for alias in child.names)
        elif _is_type_checking(child):
            for branch in child.orelse:
                yield from _imports(ast.Module([branch], []))
        else:
            yield from _imports(child)


def _offences(paths, is_allowed) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in _imports(ast.parse(path.read_text()))
        if not is_allowed(name)
    ]


def test_algorithm_modules_import_torch_the_standard_library_and_each_other():
    def is_allowed(name: str) -> bool:
        top = name.partition(".")[0]
        return top in sys.stdlib_module_names | {"torch"} or (top == "trimtab" and not _is_exempt(name))

    assert "trimtab.masking" in ALGORITHM_FILES
    assert not _offences(ALGORITHM_FILES.values(), is_allowed)


def test_no_part_of_trimtab_imports_an_adapter_or_a_framework():
    outside = {*ADAPTERS, "trl", "verl", "ray", "vllm"}
    assert not _offences(sorted(CORES.rglob("*.py")), lambda name: name.partition(".")[0] not in outside)


@pytest.mark.parametrize(("adapter", "other"), ADAPTERS.items())
def test_the_adapters_do_not_import_each_other(adapter, other):
    files = sorted((ROOT / "plugins" / adapter).rglob("*.py"))
    assert not _offences(files, lambda name: name.partition(".")[0] != other)


def test_no_relative_imports():
    assert not _offences(PRODUCT_FILES, lambda name: not name.startswith("."))


def _assert_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_trimtab_loads_the_standard_library_only():
    _assert_runs(
        "import sys; before = set(sys.modules); import trimtab\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert loaded <= sys.stdlib_module_names | {'trimtab'}, loaded"
    )


def test_the_help_of_the_command_does_not_load_torch():
    _assert_runs(
        "import sys; from trimtab.cli.app import main; sys.argv = ['trimtab', '--help']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules"
    )


def test_algorithm_modules_load_no_framework_and_no_schema_library():
    _assert_runs(
        "import importlib, sys\n"
        "heavy = {'trl', 'verl', 'ray', 'vllm', 'transformers', 'datasets', 'accelerate', 'pydantic', 'yaml', 'typer',"
        " 'rich', 'math_verify', 'matplotlib', 'trl_ext', 'verl_ext'}\n"
        f"for module in {list(ALGORITHM_FILES)}:\n"
        "    importlib.import_module(module)\n"
        "    assert not heavy & set(sys.modules), (module, heavy & set(sys.modules))"
    )
