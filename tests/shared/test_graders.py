"""Graders: what counts as the answer, what counts as equal, and that nothing a policy writes raises or hangs."""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.graders import exact_match_reward, worker

pytest.importorskip("math_verify")
from trimtab.graders import math_reward  # noqa: E402


def chat(content: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "content": content}]


def grade(completion: object, answer: object) -> float:
    (reward,) = math_reward([completion], [answer])
    return reward


# Completion, reference answer.
EQUAL = [
    ("72", "72"),
    (72, 72.0),
    ("72.0", 72),
    ("#### 72", "48/2 = 24\n48 + 24 = <<48+24=72>>72\n#### 72"),
    ("so\n#### 72\n\nQuestion: what are 3 apples?", "72"),
    (r"\boxed{72}", r"\boxed{72}"),
    (r"\boxed{1} or \boxed{\frac{3}{4}}, and \boxed{5", "0.75"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
    ("#### 71\nNo.\n#### 72", "72"),
    ("#### 72\nnext question: 4 + 4 = ####", "72"),
    (r"#### 1 is wrong: \boxed{2}", "2"),
    ("1,234", "1234"),
    (r"\boxed{1{,}234}", "1,234"),
    (r"\boxed{1\,234}", "1,234"),
    ("The total is 1,234 dollars.", "1234"),
    ("$18", "18"),
    (r"\boxed{\$18}", "$18$"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    ("18%", "18"),
    (r"0.18", r"18\%"),
    (r"$\frac{1}{2}$", "0.5"),
    ("0.5", r"\frac12"),
    ("1/2", r"\frac{1}{2}"),
    ("-5", "\u22125"),
    (r"\boxed{x=3}", "3"),
    ("3", "x=3"),
    ("3.141593", "3.14159265"),
    ("100000", "1e5"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{\text{Monday}}", "monday"),
    (r"\boxed{B}", "B"),
    ("**5**", "5"),
    ("First 3, then 4, so 12.", "12"),
    ("Answer: 5. No: I forgot the carry. The answer is 7, since 3 < 4.", "7"),
    ("72 is the answer.", "72"),
    ("10^{10^{10}} is too large.\nSo it is 7.", "7"),
    ("so 2^{2023} mod 7 is 2.", "2"),
    (r"\boxed{10^{10^{10}}}", "10^{10^{10}}"),
    (chat("The answer is 72."), "72"),
    (chat([{"type": "text", "text": r"\boxed"}, {"type": "image"}, {"type": "text", "text": "{72}"}]), "72"),
    ([{"role": "assistant", "content": "72"}, {"role": "tool", "content": "#### 5"}], "72"),
]
DIFFERENT = [
    ("71", "72"),
    ("72", "-72"),
    ("18%", "0.19"),
    ("18", "0.18"),
    ("5e-8", "4e-8"),
    ("0", "1e-9"),
    ("123456.7", "123456.8"),
    (r"\boxed{3} \boxed{4}", "3"),
    ("8\n4+2=6\n1+1=2", "8"),  # graded whole, as given
    (r"\boxed{listen}", "silent"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{A}", "B"),
    ("I do not know.", "72"),
    ("", "72"),
    ("  ", " "),
    ("", ""),
    ("72", ""),
    ("72", None),
    (None, "72"),
    (None, None),
    ("nan", float("nan")),
    (float("inf"), "inf"),
    (object(), "72"),
    (["72"], "72"),
    ([{"role": "user", "content": "72"}], "72"),
    (chat(None), "72"),
    (chat([{"type": "thinking", "text": "72"}]), "72"),
]


@pytest.mark.parametrize(("completion", "answer"), EQUAL)
def test_equal_answers_earn_one(completion: object, answer: object) -> None:
    assert grade(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_different_answers_earn_nothing(completion: object, answer: object) -> None:
    assert grade(completion, answer) == 0.0


def test_long_reasoning_and_huge_integers() -> None:
    assert grade("x = 1. " * 5000 + "The answer is 7.", "7") == 1.0
    assert grade(10**5000, "72") == grade("72", 10**5000) == 0.0
    assert grade(Fraction(10**5000 + 1, 10**5000), "1") == 0.0


PATHOLOGICAL = [
    "9**9**9",
    "10^(10^10)",
    r"\boxed{9^{9^{9}}}",
    r"\boxed{2^{99999999999}}",
    r"\boxed{99999999!}",
    r"\boxed{(9^{99999})^{99999}}",
    r"\boxed{x^{1000}+(x+y+z)^{900}}",
    "((((((9!)!)!)!)!)!)",
    r"\boxed{" * 30_000,
    "{" * 100_000,
    "$" * 100_000,
    "1+" * 50_000,
    " " * 200_000 + "x",
    "answer " * 50_000,
    "9" * 100_000,
]


@pytest.mark.slow
def test_pathological_answers_earn_nothing_and_return() -> None:
    # In a process of its own, so that a hang is a failure; the limit is no measurement.
    code = "import json, sys; from trimtab.graders import math_reward; rows = json.load(sys.stdin);"
    code += "print(math_reward(rows, ['7'] * len(rows)) + math_reward(['7'] * len(rows), rows))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(PATHOLOGICAL),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.stdout.strip() == str([0.0] * 2 * len(PATHOLOGICAL)), done.stderr


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.graders.math.same_value", lambda *args, **kwargs: pytest.fail("asked"))


@pytest.mark.parametrize("text", [*PATHOLOGICAL[:5], r"\boxed{" + "x+" * 250 + "x}"])
def test_giants_are_refused_without_asking_the_worker(text: str, no_worker: None) -> None:
    assert grade(text, "1") == grade("1", text) == grade("It is 1.", text) == 0.0


def test_plain_numbers_do_not_ask_the_worker(no_worker: None) -> None:
    assert math_reward([r"so \boxed{1,234}", "#### $7.50", "3"], ["#### 1234", 7.5, "4"]) == [1.0, 1.0, 0.0]


def test_a_pair_after_a_fatal_one_and_after_a_killed_worker_is_graded() -> None:
    assert grade(r"\boxed{(7^{99999})^{99999}}", "7") == 0.0
    assert worker._process is None
    assert grade(r"\boxed{\frac{2}{14}}", r"\frac{1}{7}") == 1.0
    assert worker._process
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert grade(r"\boxed{\frac{3}{21}}", r"\frac{1}{7}") == 1.0


def test_a_worker_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    worker._stop()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        grade(r"\boxed{\frac{4}{28}}", r"\frac{1}{7}")


def test_an_interrupt_leaves_no_reply_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    grade(r"\boxed{\frac{5}{35}}", r"\frac{1}{7}")
    with monkeypatch.context() as patch:
        assert worker._process
        patch.setattr(worker._process.stdout, "readline", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            grade(r"\boxed{\frac{6}{42}}", r"\frac{1}{7}")
    assert grade(r"\boxed{\frac{7}{42}}", r"\frac{1}{7}") == 0.0


def test_threads_grade_alike() -> None:
    completions = [rf"\boxed{{\frac{{{i}}}{{2}}}}" for i in range(40)]
    answers = [f"{i if i % 3 else i + 1}/2" for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(grade, completions, answers))
    assert rewards == [float(i % 3 != 0) for i in range(40)]


def _grade_in_child(completion: str) -> float:
    return grade(completion, r"\frac{1}{3}")


def test_a_forked_child_shares_neither_the_worker_nor_a_held_lock() -> None:
    assert grade(r"\boxed{\frac{2}{6}}", r"\frac{1}{3}") == 1.0
    parent = worker._process
    texts = [rf"\boxed{{\frac{{{i}}}{{{3 * i}}}}}" for i in range(3, 13)]
    with worker._lock:  # as if another thread were grading
        pool = multiprocessing.get_context("fork").Pool(2)
    with pool:
        assert pool.map_async(_grade_in_child, texts, chunksize=1).get(timeout=120) == [1.0] * 10
    assert worker._process is parent
    assert grade(r"\boxed{\frac{20}{60}}", r"\frac{1}{3}") == 1.0


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(object),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner),
)
mathematics = st.text(alphabet=r"0123456789+-*/^!(){}[]\$%.,=x #", max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(garbage | mathematics, garbage | mathematics), max_size=4))
def test_no_data_raises(rows: list[tuple[object, object]]) -> None:
    completions, answers = [row[0] for row in rows], [row[1] for row in rows]
    for reward in (math_reward, exact_match_reward):
        assert set(reward(completions, answers)) <= {0.0, 1.0}
        assert len(reward(completions, answers)) == len(rows)


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.integers())
def test_integers_equal_themselves_only(a: int, b: int) -> None:
    assert grade(f"First {b}, but \\boxed{{{a:,}}}", b) == float(a == b)
    assert grade(f"#### {a}", f"{a:,}") == 1.0


@pytest.mark.parametrize("reward", [math_reward, exact_match_reward])
def test_unequal_lengths_are_refused(reward: object) -> None:
    with pytest.raises(ValueError, match="2 completions but 1 answers"):
        reward(["1", "2"], ["1"])  # type: ignore[operator]
    assert reward([], []) == []  # type: ignore[operator]


def test_exact_match() -> None:
    completions = [" 560\n", "56", "560 ", chat("560"), None, "", 560, "#### 560"]
    answers = ["560", "560", " 560", "560", None, "", "560", "560"]
    assert exact_match_reward(completions, answers) == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_without_math_verify_only_exact_matching_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for name in ("trimtab.graders", "trimtab.graders.math"):
        monkeypatch.delitem(sys.modules, name)
    graders = importlib.import_module("trimtab.graders")
    assert graders.exact_match_reward(["1"], ["1"]) == [1.0]
    with pytest.raises(ImportError, match=r"pip install 'trimtab\[math\]'"):
        _ = graders.math_reward


def test_importing_the_graders_loads_neither_torch_nor_sympy() -> None:
    code = "import sys, trimtab.graders.math; sys.exit(bool({'torch', 'sympy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
