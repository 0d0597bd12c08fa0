"""Prompts and answers of a recipe as a data set that TRL reads."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset

from trimtab.errors import TrimtabError
from trimtab.recipe.base import suggest

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(source: str, columns: Any) -> Dataset:
    """The data set of a recipe, with columns `prompt` and `answer`.

    Args:
        source: a file (.jsonl, .json, .csv, .parquet) or the name of a data set on the hub.
        columns: the recipe's `data` section, which names the columns; `column.field` is a field of one.

    Returns:
        Its rows; other columns are kept.

    Raises:
        TrimtabError: no such file or data set, or a column that is missing.
    """
    rows = _read(source)
    if not len(rows):
        raise TrimtabError(f"data: {source} has no rows")
    prompt, rows = _column(rows, "prompt", columns.prompt, source)
    answer, rows = _column(rows, "answer", columns.answer, source)
    kind = type(rows[0][prompt])
    for index, text in enumerate(rows[prompt]):
        if not _is_prompt(text) or type(text) is not kind:
            raise TrimtabError(
                f"data.prompt: row {index + 1} of {source} has {text!r}; every prompt must be a text, or every one "
                "a list of messages with role and content"
            )
    wanted = {"prompt": rows[prompt], "answer": rows[answer]}
    others = rows.remove_columns([name for name in {*wanted, prompt, answer} if name in rows.features])
    return (
        concatenate_datasets([Dataset.from_dict(wanted), others], axis=1)
        if others.column_names
        else Dataset.from_dict(wanted)
    )


def _column(rows: Dataset, key: str, names: str | Sequence[str], source: str) -> tuple[str, Dataset]:
    """The first of the names that is there, and the rows, flattened where it is a field of a column."""
    names = [names] if isinstance(names, str) else names
    for table in (rows, rows.flatten()):
        if found := next((name for name in names if name in table.column_names), None):
            return found, table
    raise TrimtabError(f"data.{key}: {source} has no column {names[0]!r}{suggest(names[0], rows.column_names)}")


def drop_long_prompts(rows: Dataset, tokenizer: Any, longest: int) -> Dataset:
    """The rows whose prompt has at most `longest` tokens, counted as the trainer will tokenize it; says how many go.

    Raises:
        TrimtabError: no row is left.
    """
    if tokenizer.chat_template is None and not isinstance(rows[0]["prompt"], str):
        raise TrimtabError("data.prompt: the prompts are messages, but the model's tokenizer has no chat template")
    keep = [index for index, prompt in enumerate(rows["prompt"]) if _length(prompt, tokenizer) <= longest]
    if not keep:
        raise TrimtabError(f"data.max_prompt_length: none of the {len(rows)} prompts has at most {longest} tokens")
    if len(keep) < len(rows):
        print(f"data: {len(rows) - len(keep)} of {len(rows)} prompts are longer than {longest} tokens and left out")
    return rows.select(keep)


def check_columns(rows: Any, needed: Sequence[str]) -> None:
    """The columns that the recipe's rewards read are there, or TrimtabError names the one that is not."""
    there = getattr(rows, "column_names", None)
    for name in needed:
        if there is not None and name not in there:
            raise TrimtabError(
                f"train_dataset: no column {name!r}, which the recipe's rewards read{suggest(name, there)}. Rename "
                "one, or pass reward_funcs"
            )


def check_enough(rows: Any, prompts: int) -> None:
    """There are prompts for one step, or TrimtabError: TRL would train nothing and not say so."""
    if hasattr(rows, "__len__") and len(rows) < prompts:
        raise TrimtabError(f"rollout.prompts_per_step: {prompts} prompts make a step, but the data has {len(rows)}")


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    messages = prompt if isinstance(prompt, list) else []
    return bool(messages) and all(isinstance(m, dict) and m.get("role") and "content" in m for m in messages)


def _length(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))


def _read(source: str) -> Dataset:
    path = Path(source).expanduser()
    kind = FORMATS.get(path.suffix)
    if kind is None and path.suffix and path.exists():
        raise TrimtabError(f"data: {source} is not one of {', '.join(FORMATS)}")
    if kind is None and not os.path.isabs(source) and source.count("/") <= 1:
        return _from_hub(source)
    if not path.is_file():
        raise TrimtabError(f"data: there is no file {source}")
    with path.open("rb") as file:
        if not file.read(4096).strip():
            raise TrimtabError(f"data: {source} has no rows")
    try:
        return load_dataset(kind, data_files=str(path), split="train")
    except Exception as error:
        raise TrimtabError(f"data: {source} is not readable as {kind}: {_reason(error)}") from None


def _from_hub(name: str) -> Dataset:
    try:
        return load_dataset(name, split="train")
    except Exception as error:
        raise TrimtabError(
            f"data: {name!r} is neither a file nor a data set that can be loaded: {_reason(error)}"
        ) from None


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: data set errors wrap what matters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
