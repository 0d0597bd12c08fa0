"""Exact matching, and the text of a completion in whichever form a framework hands it over."""

import math
import numbers
from collections.abc import Sequence


def text_of(value: object) -> str:
    """Return the text of a completion or an answer, "" where there is none.

    Args:
        value: a string, a finite number, or a chat: a list of messages whose `content` is a string or a list of
            `{"type": "text", "text": ...}` parts. Messages of another role than the assistant's are left out.

    Returns:
        The text, not stripped; "" for None, a non-finite number and every other object.

    Example:
        >>> text_of([{"role": "assistant", "content": [{"type": "text", "text": "72"}]}])
        '72'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        try:
            return str(value) if math.isfinite(value) else ""
        except (ValueError, OverflowError):  # an integer of thousands of digits
            return ""
    if isinstance(value, (list, tuple)):
        return "\n".join(_content(message) for message in value if _is_assistant(message))
    return ""


def text_pairs(completions: Sequence[object], answers: Sequence[object]) -> list[tuple[str, str]]:
    """Pair the text of each completion with that of its answer.

    Args:
        completions: one a row, in any form that `text_of` reads.
        answers: one a row, likewise.

    Returns:
        One (completion, answer) a row.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> text_pairs(["It is 7."], [7])
        [('It is 7.', '7')]
    """
    if len(completions) != len(answers):
        raise ValueError(f"{len(completions)} completions but {len(answers)} answers")
    return [(text_of(row), text_of(answer)) for row, answer in zip(completions, answers, strict=True)]


def exact_match_reward(completions: Sequence[object], answers: Sequence[object]) -> list[float]:
    """Reward 1.0 where the completion's text equals the answer's, apart from white space around them, else 0.0.

    Args:
        completions: one a row, in any form that `text_of` reads; anything else earns 0.0.
        answers: one a row, likewise; an empty or missing answer earns 0.0, even for an empty completion.

    Returns:
        One reward a row. Data never makes it raise.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> exact_match_reward([" 560\\n", "56"], ["560", "560"])
        [1.0, 0.0]
    """
    pairs = text_pairs(completions, answers)
    return [float(completion.strip() == answer.strip() != "") for completion, answer in pairs]


def _is_assistant(message: object) -> bool:
    return isinstance(message, dict) and message.get("role", "assistant") == "assistant"


def _content(message: dict[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))
