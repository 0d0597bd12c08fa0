"""The embedded task: two-digit addition, with the answer written least significant digit first."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = 512

Pair = tuple[int, int]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Split the 100 x 100 pairs of summands once and for all.

    Returns:
        9488 pairs to train on and `HELD_OUT` others to evaluate on, both in a fixed shuffled order.

    Example:
        >>> train, held_out = split_pairs()
        >>> len(train), len(held_out)
        (9488, 512)
    """
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(1).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def prompt(a: int, b: int) -> str:
    """Write the question.

    Args:
        a: first summand, 0 to 99.
        b: second summand, 0 to 99.

    Returns:
        Six characters.

    Example:
        >>> prompt(7, 58)
        '07+58='
    """
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    """Write the sum, least significant digit first, which lets a small model carry as it goes.

    Args:
        a: first summand, 0 to 99.
        b: second summand, 0 to 99.

    Returns:
        Three digits.

    Example:
        >>> answer(7, 58)
        '560'
    """
    return f"{a + b:03d}"[::-1]


def faulty_answer(a: int, b: int) -> str:
    """Write the sum that results when the carry out of the units digit is forgotten.

    Args:
        a: first summand, 0 to 99.
        b: second summand, 0 to 99.

    Returns:
        Three digits, least significant first; the right answer where there is no such carry.

    Example:
        >>> faulty_answer(7, 58)
        '550'
    """
    return f"{(a // 10 + b // 10) * 10 + (a + b) % 10:03d}"[::-1]


def write_rows(pairs: Iterable[Pair], path: Path) -> None:
    """Write the pairs as JSON lines of `prompt` and `answer`.

    Args:
        pairs: the summands, one row each.
        path: the file to write.

    Example:
        >>> write_rows([(7, 58)], Path("/dev/null"))
    """
    rows = (json.dumps({"prompt": prompt(a, b), "answer": answer(a, b)}) for a, b in pairs)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
