"""Size limits: a file or function that outgrows them holds two ideas, and is split by idea."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES = 300
FUNCTION_LINES = 60


def _files() -> Iterator[Path]:
    for folder in ("shared", "plugins", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_files_stay_within_the_limit():
    sizes = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in _files()}
    too_long = [f"{path}: {lines} lines" for path, lines in sizes.items() if lines > FILE_LINES]
    assert not too_long, f"more than {FILE_LINES} lines:\n" + "\n".join(too_long)


def test_functions_stay_within_the_limit_without_their_docstring():
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {_body_lines(node)} lines"
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _body_lines(node) > FUNCTION_LINES
    ]
    assert not too_long, f"more than {FUNCTION_LINES} lines:\n" + "\n".join(too_long)
