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


def check_lengths(completions: Sequence[object], answers: Sequence[object]) -> None:
    """Refuse completions and answers that cannot be paired.

    Args:
        completions: one entry a row.
        answers: one entry a row.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> check_lengths(["1"], ["1"])
    """
    if len(completions) != len(answers):
        raise ValueError(f"{len(completions)} completions but {len(answers)} answers")


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
    check_lengths(completions, answers)
    texts = ((text_of(completion).strip(), text_of(answer).strip()) for completion, answer in zip(completions, answers))
    return [float(completion == answer != "") for completion, answer in texts]


def _is_assistant(message: object) -> bool:
    return isinstance(message, dict) and message.get("role", "assistant") == "assistant"


def _content(message: dict[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))
