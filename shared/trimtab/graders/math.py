"""Grading of mathematical answers with math-verify, made safe for what a policy under training can write."""

import importlib.util
import re
from collections.abc import Sequence
from fractions import Fraction

from trimtab.graders.exact import text_pairs
from trimtab.graders.worker import same_value

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("grading mathematics needs math-verify: pip install 'trimtab[math]'")

LONGEST_ANSWER = 500  # characters; a longer one is never parsed
TAIL = 2000  # characters at the end of a completion that are searched where it marks no answer
TOLERANCE = Fraction(1, 10**6)  # math-verify's six decimals

_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_WRAPPING = re.compile(r"^(?:\\[($\[]|[\s$*])+|(?:\\[)$\]]|[\s$*.])+$")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_NUMBER = re.compile(
    r"([+-]?)\s*\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)((?:[eE][+-]?\d{1,3})?)\s*(\\?%)?", re.ASCII
)
_WORDS = re.compile(r"[a-z' -]*[a-z]{3}[a-z' -]*", re.IGNORECASE)
# A tower of powers, or an exponent or factorial of six digits or more: hours of work in a few characters.
_GIANT = re.compile(r"(?:\^|\*\*)[\s{(+-]*(?:\d{6}|\d+\s*(?:\^|\*\*|!))|\d{6,}[\s})]*!")


def math_reward(completions: Sequence[object], answers: Sequence[object]) -> list[float]:
    r"""Reward 1.0 where a completion's final answer has the value of the reference answer, else 0.0.

    The final answer is the last complete `\boxed{...}`, else the rest of the line after the last `####`, else what
    math-verify finds in the whole completion as given: what follows the last mention of "answer", else the last
    expression. A base model that goes on after its answer must therefore be cut at its stop string beforehand.
    Two plain numbers are compared directly, to six decimals (six digits for values below 1); words by their letters,
    in either case; all else by math-verify. `18%` equals both 18 and 0.18.

    Safe in any thread and for any text: parsing runs in a process of its own, and a pair that takes more than a
    second there earns 0.0, as do towers of powers and factorials of huge numbers.

    Args:
        completions: one a row: text, a number, or a list of chat messages; anything else earns 0.0.
        answers: one a row: text (plain, LaTeX, `$...$`, `\boxed{...}`, or a GSM8K solution ending in `#### 72`) or a
            number; an empty, missing or unreadable one earns 0.0.

    Returns:
        One reward a row. Data never makes it raise.

    Raises:
        ValueError: the lengths differ.
        RuntimeError: the grading process cannot be started.

    Example:
        >>> math_reward(["Half of it, so \\boxed{\\frac{1}{2}}.", "#### 1,234", "It is 7."], ["0.5", 1234, "8"])
        [1.0, 1.0, 0.0]
    """
    return [float(_is_right(completion, answer)) for completion, answer in text_pairs(completions, answers)]


def _is_right(completion: str, answer: str) -> bool:
    marked_gold, marked = _marked_answer(answer), _marked_answer(completion)
    gold, found = _bare(answer if marked_gold is None else marked_gold), _bare(completion if marked is None else marked)
    if not gold or not found or len(gold) > LONGEST_ANSWER:
        return False
    if gold == found:
        return True
    if _WORDS.fullmatch(gold):  # to math-verify a word is a product of letters, and so equal to its anagrams
        return gold.casefold() == found.casefold()
    gold_number, number = _number(gold), _number(found)
    if gold_number and number:
        return _same_number(gold_number, number)
    if marked is None and number is None:
        found = found[-TAIL:]
        return not _GIANT.search(gold + "\n" + found.rpartition("\n")[2]) and same_value(gold, found, free=True)
    return len(found) <= LONGEST_ANSWER and not _GIANT.search(gold + "\n" + found) and same_value(gold, found)


def _marked_answer(text: str) -> str | None:
    """Return the content of the last complete box, else the rest of the line after the last #### that has one."""
    box = _last_box(text) if "\\boxed" in text else None
    if box is not None:
        return box
    marked = (part.strip() for part in reversed(text.split("####")[1:]))
    return next((part.splitlines()[0] for part in marked if part), None)


def _last_box(text: str) -> str | None:
    open_braces: list[tuple[bool, int]] = []  # whether it opens a box, where its content starts
    boxes: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                boxes.append((start, brace.start()))
        elif brace[0] == "{" or brace[0].startswith("\\boxed"):
            open_braces.append((brace[0] != "{", brace.end()))
    start, end = max(boxes, default=(0, None))
    return None if end is None else text[start:end]


def _bare(text: str) -> str:
    """Return the text without what only wraps it: white space, dollars, asterisks, a full stop, a text command."""
    text = text.strip()
    if len(text) > LONGEST_ANSWER:
        return text
    text = _WRAPPING.sub("", text)
    command = _TEXT_COMMAND.fullmatch(text)
    return command[1].strip() if command else text


def _number(text: str) -> tuple[Fraction, bool] | None:
    """Return the value of a plain number and whether it is a percentage, or None."""
    if len(text) > LONGEST_ANSWER:
        return None
    match = _NUMBER.fullmatch(text.replace("\\,", ""))  # a thin space, which math-verify misreads
    return (Fraction((match[1] + match[2] + match[3]).replace(",", "")), bool(match[4])) if match else None


def _same_number(gold: tuple[Fraction, bool], found: tuple[Fraction, bool]) -> bool:
    (a, a_percent), (b, b_percent) = gold, found
    return _near(a, b) or _near(a / 100 if a_percent else a, b / 100 if b_percent else b)


def _near(gold: Fraction, found: Fraction) -> bool:
    return abs(gold - found) <= TOLERANCE * min(Fraction(1), abs(gold))
