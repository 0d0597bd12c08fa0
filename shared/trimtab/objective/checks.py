"""What an objective refuses: a ratio counted twice, a batch that lacks a word."""

from collections.abc import Iterable, Mapping

from torch import Tensor

RATIO_NAMES = {"engine": "old/rollout", "update": "current/old"}


def check_counts(counted: Iterable[tuple[str, frozenset[str]]], *, bypass: bool) -> None:
    """Refuse an objective in which two methods correct for the same ratio.

    Args:
        counted: for each method its place and name, and the ratios that it counts.
        bypass: whether the rollout policy stands in for the old one, so that current/old is current/rollout.

    Raises:
        ValueError: names both methods and the ratio.
    """
    owner: dict[str, str] = {}
    for method, counts in counted:
        if bypass and "update" in counts:
            counts, method = counts | {"engine"}, f"{method} (its anchor is the rollout policy: old_log_prob is bypass)"
        for ratio in sorted(counts):
            if ratio in owner:
                raise ValueError(f"{method} counts {RATIO_NAMES[ratio]}, which {owner[ratio]} counts already")
            owner[ratio] = method


def check_batch(batch: Mapping[str, Tensor], needed: Mapping[str, str]) -> None:
    """Refuse a batch that lacks a word.

    Args:
        batch: tensors by word.
        needed: for each word the method that reads it.

    Raises:
        ValueError: names the word and the method.
    """
    for word, method in needed.items():
        if batch.get(word) is None:
            hint = ": the sampler returned no log-probs to correct with" if word == "rollout_log_prob" else ""
            raise ValueError(f"the batch has no {word}, which {method} reads{hint}")


def check_whole_rows(surrogate: str, drops: Iterable[tuple[str, Mapping[str, object]]]) -> None:
    """Refuse tokens dropped under the kept denominator of a loss that a row repeats: the others make up for them.

    Args:
        surrogate: its place and name.
        drops: for each mask its place and name, and its values.

    Raises:
        ValueError: names both.
    """
    for method, values in drops:
        if not str(values.get("statistic")).startswith("sequence"):
            raise ValueError(
                f"{method} drops single tokens, but the loss of {surrogate} is the whole answer's, and under "
                "denominator kept the other tokens make up for them; use a sequence level, or gspo_token"
            )


def check_bypass(compared: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Refuse, under bypass, a method that compares the old policy with the rollout policy: they are the same one.

    Args:
        compared: for each mask its place and name, and the words that it reads; weights count a ratio twice there.

    Raises:
        ValueError: names the method.
    """
    for method, words in compared:
        if {"old_log_prob", "rollout_log_prob"} <= set(words):
            raise ValueError(
                f"{method} compares old_log_prob with rollout_log_prob, which old_log_prob: bypass makes the same"
            )
