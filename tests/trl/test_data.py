"""Prompts from files: what is read, and what is said where they cannot be."""

import json
from types import SimpleNamespace

import pytest

from tests.trl import tiny
from trimtab.errors import TrimtabError
from trl_ext.data import drop_long_prompts, load_prompts

ROWS = [{"question": "2+3=", "answer": "5", "level": 1}, {"question": "4+4=", "answer": "8", "level": 2}]
CHAT = [{"prompt": [{"role": "user", "content": "2+3="}], "reward_model": {"ground_truth": "5", "style": "rule"}}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def columns(prompt="prompt", answer="answer"):
    return SimpleNamespace(prompt=prompt, answer=answer, max_prompt_length=8)


def test_columns_get_the_names_that_trl_reads_and_others_stay(tmp_path):
    rows = load_prompts(write(tmp_path / "a.jsonl", ROWS), columns(prompt="question"))
    assert list(rows["prompt"]) == ["2+3=", "4+4="] and list(rows["answer"]) == ["5", "8"]
    assert list(rows["level"]) == [1, 2]


def test_columns_may_swap(tmp_path):
    rows = load_prompts(write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "a"}]), columns("answer", "prompt"))
    assert list(rows["prompt"]) == ["a"] and list(rows["answer"]) == ["p"]


def test_a_field_of_a_column(tmp_path):
    rows = load_prompts(write(tmp_path / "a.jsonl", CHAT), columns(answer="reward_model.ground_truth"))
    assert list(rows["answer"]) == ["5"]
    assert [dict(message) for message in rows[0]["prompt"]] == CHAT[0]["prompt"]


def test_csv_and_parquet_read_the_same(tmp_path):
    source = load_prompts(write(tmp_path / "a.jsonl", ROWS), columns("question"))
    source.to_csv(tmp_path / "a.csv")
    source.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        assert list(load_prompts(str(tmp_path / name), columns())["prompt"]) == ["2+3=", "4+4="]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"prompt": "a", "answer": "1"}\n{broken', "not readable as json"),
        ('{"prompt": "a", "anser": "1"}', "has no column 'answer'; did you mean anser?"),
        ('{"prompt": null, "answer": "1"}\n{"prompt": "a", "answer": "1"}', "row 1"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "", "answer": "1"}', "row 2"),
        ('{"prompt": 3, "answer": "1"}', "row 1"),
        ('{"prompt": [{"rol": "user", "text": "a"}], "answer": "1"}', "a list of messages with role and content"),
    ],
    ids=["empty", "blank", "broken", "column", "null", "empty-text", "number", "message-keys"],
)
def test_bad_files_are_one_clear_message(tmp_path, text, said):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(TrimtabError, match="^data") as error:
        load_prompts(str(path), columns())
    assert said in str(error.value) and str(path) in str(error.value)


def test_texts_and_messages_in_one_file(tmp_path):
    mixed = [{"prompt": "a", "answer": "1"}, *({"prompt": row["prompt"], "answer": "5"} for row in CHAT)]
    with pytest.raises(TrimtabError, match="^data"):
        load_prompts(write(tmp_path / "a.jsonl", mixed), columns())


@pytest.mark.parametrize("source", ["/nowhere/a.jsonl", "nowhere.jsonl", "a/b/c/d"])
def test_a_file_that_is_not_there(source):
    with pytest.raises(TrimtabError, match="there is no file"):
        load_prompts(source, columns())


def test_another_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(TrimtabError, match=r"not one of \.jsonl"):
        load_prompts(str(tmp_path / "a.txt"), columns())


def test_long_prompts_go_and_are_counted(capsys):
    rows = tiny.prompts(3).map(lambda row, i: {"prompt": row["prompt"] * (i + 1)}, with_indices=True)
    kept = drop_long_prompts(rows, tiny.tokenizer(), 8)
    assert len(kept) == 2
    assert "1 of 3 prompts are longer than 8 tokens" in capsys.readouterr().out
    with pytest.raises(TrimtabError, match="none of the 3 prompts has at most 3 tokens"):
        drop_long_prompts(rows, tiny.tokenizer(), 3)


def test_messages_need_a_chat_template(tmp_path):
    rows = load_prompts(write(tmp_path / "a.jsonl", CHAT), columns(answer="reward_model.ground_truth"))
    with pytest.raises(TrimtabError, match="no chat template"):
        drop_long_prompts(rows, tiny.tokenizer(), 8)
