"""Each kind of source gives the same rows, and says where a bad one is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import DataSource
from grpo_dist.data import sources
from grpo_dist.data.sources import Problems, json_value, read_rows
from grpo_dist.errors import DataError

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "two\nlines, é", "answer": "x"}]


def read(source: Path, split: str = "train") -> list[tuple[int, dict[str, Any]]]:
    problems = Problems()
    rows = [(row.line, row.values) for row in read_rows(DataSource(source=str(source), split=split), problems)]
    problems.raise_if_any()
    return rows


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]))
    assert read(path) == [(1, ROWS[0]), (3, ROWS[1])]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    assert read(path) == [(1, ROWS[0]), (2, ROWS[1])]


@pytest.mark.parametrize("content", ['{"prompt": 1}', "[1", ""])
def test_json_that_is_no_list(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a\.json"):
        read(path)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n1+1=,2\n"two\nlines, é",x\n')
    assert read(path) == [(2, ROWS[0]), (4, ROWS[1])]


def test_csv_row_of_other_width(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\n1,2\n1,2,3\n1\n")
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).splitlines() == ["a.csv:3: wanted 2 fields, found 3", "a.csv:4: wanted 2 fields, found 1"]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read(path) == [(1, ROWS[0]), (2, ROWS[1])]


def test_parquet_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="Parquet"):
        read(path)


def test_saved_data_set_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "set")
    assert read(tmp_path / "set") == [(1, ROWS[0]), (2, ROWS[1])]
    with pytest.raises(DataError, match=r"no split 'dev' .it has: train"):
        read(tmp_path / "set", "dev")


def test_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read(tmp_path / "set") == [(1, ROWS[0]), (2, ROWS[1])]


@pytest.mark.parametrize("content", ["pr\xe9mpt,answer\n1,2\n", "prompt,answer\n1,2\n\xe9,3\n"])
def test_csv_that_is_not_utf8(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv, line \d or after: not CSV in UTF-8"):
        read(path)


def test_a_folder_that_is_no_data_set_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(DataError, match="is no data set"):
        read(tmp_path)


def test_a_folder_with_too_much_below_it_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MOST_ENTRIES", 3)
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(DataError, match="more than 3 files and folders below it"):
        read(tmp_path)


def test_neither_file_nor_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file"):
        read(tmp_path / "nothing")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: wanted one JSON object per line in UTF-8"):
        read(path)


def test_many_problems_are_counted_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 500)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).splitlines()[-1] == "… and 450 more rows"


def test_json_value() -> None:
    import datetime

    import numpy as np

    assert json_value({"a": np.int64(3), "b": (1, float("nan")), "c": datetime.date(2026, 1, 2)}) == {
        "a": 3, "b": [1, None], "c": "2026-01-02",
    }  # fmt: skip
