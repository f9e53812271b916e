"""Where rows come from: files, data set folders and hub names -> rows that know their place, and the list of bad ones.

JSONL, JSON and CSV are read here, line by line, because a message must name the line and because one column may hold
3, "3" and 3.0. Parquet goes through pyarrow in batches; folders and hub names through ``datasets``; the rows of
``reasoning_gym:TASK`` are generated. Nothing is judged here but that a row is an object; columns and golds are checked
in prompts.py, and all problems end in one Problems.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.config import DataSource
from grpo_dist.errors import DataError
from grpo_dist.verifiers.gym import KEY, task

_SHOWN = 50
_MOST_ENTRIES = 10_000

# Sources that are code. Named, not imported: they live on a higher floor and are only needed when asked for.
GYM = "reasoning_gym:"
GENERATED = {"quickstart": ("grpo_dist.quickstart.task", "quickstart_rows")}


@dataclass(frozen=True, slots=True)
class Row:
    file: str
    line: int  # line of a text file; otherwise the row's number from 1
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    file: str
    line: int
    column: str
    wanted: str
    found: str

    def __str__(self) -> str:
        column = f", column {self.column!r}" if self.column else ""
        return f"{self.file}:{self.line}{column}: wanted {self.wanted}, found {self.found}"


@dataclass(slots=True)
class Problems:
    """Every bad row of a load, reported at once; kept short when all rows have the same fault."""

    listed: list[Problem] = field(default_factory=list)
    missing: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # (file, column) -> rows
    rows: dict[str, int] = field(default_factory=dict)  # rows seen per file

    def add(self, row: Row, column: str, wanted: str, found: str) -> None:
        self.listed.append(Problem(row.file, row.line, column, wanted, found))

    def add_missing(self, row: Row, column: str) -> None:
        count, _ = self.missing.get((row.file, column), (0, ()))
        self.missing[row.file, column] = (count + 1, tuple(row.values))
        self.add(row, column, "a value", f"no such column ({', '.join(row.values) or 'the row is empty'})")

    def raise_if_any(self) -> None:
        if not self.listed:
            return
        lines: list[str] = []
        everywhere = {key for key, (count, _) in self.missing.items() if count == self.rows.get(key[0])}
        for file, column in sorted(everywhere):
            count, columns = self.missing[file, column]
            near = difflib.get_close_matches(column, columns, 1, cutoff=0.4)
            hint = (
                f"; set data.columns to the right one, e.g. {near[0]!r}"
                if near
                else "; set data.columns to the right one"
            )
            lines.append(
                f"{file}: wanted a column {column!r}, found only {', '.join(columns)} in all {count} rows{hint}"
            )
        single = [
            problem
            for problem in self.listed
            if (problem.file, problem.column) not in everywhere or not problem.found.startswith("no such column")
        ]
        lines += [str(problem) for problem in single[:_SHOWN]]
        if len(single) > _SHOWN:
            lines.append(f"… and {len(single) - _SHOWN} more rows")
        raise DataError("\n".join(lines))


def read_rows(source: DataSource, problems: Problems) -> Iterator[Row]:
    """The rows of a source in file order. Raises DataError when the source itself cannot be read."""
    path = Path(source.source)
    reader = _READERS.get("".join(path.suffixes[-1:]).lower())
    if source.source.startswith(GYM):
        rows = gym_rows(source)
    elif source.parameters:
        raise DataError(f"data.parameters: only {GYM}TASK has parameters, not {source.source}")
    elif reader is not None:
        if not path.is_file():
            raise DataError(f"data.source: there is no file {path.absolute()}")
        rows = reader(path, problems)
    else:
        rows = _read_datasets(source)
    for row in islice(rows, source.limit):
        problems.rows[row.file] = problems.rows.get(row.file, 0) + 1
        yield row


def generated_rows(source: str) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows of a source that is code."""
    module, function = GENERATED[source]
    train, held_out = getattr(importlib.import_module(module), function)()
    return (
        [Row(source, number, values) for number, values in enumerate(train, 1)],
        [Row(f"{source} (held out)", number, values) for number, values in enumerate(held_out, 1)],
    )


def _read_jsonl(path: Path, problems: Problems) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # both bad UTF-8 and bad JSON are ValueErrors
                problems.rows[path.name] = problems.rows.get(path.name, 0) + 1
                problems.add(
                    Row(path.name, number, {}), "", "one JSON object per line in UTF-8", f"{_brief(line)} ({error})"
                )
                continue
            yield from _object(path.name, number, values, problems)


def _read_json(path: Path, problems: Problems) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: wanted a list of objects, found {type(rows).__name__}")
    for number, values in enumerate(rows, 1):
        yield from _object(path.name, number, values, problems)


def _object(file: str, number: int, values: Any, problems: Problems) -> Iterator[Row]:
    if isinstance(values, dict):
        yield Row(file, number, values)
    else:
        problems.rows[file] = problems.rows.get(file, 0) + 1
        problems.add(Row(file, number, {}), "", "an object", f"{_brief(values)} ({type(values).__name__})")


def _read_csv(path: Path, problems: Problems) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            columns = reader.fieldnames or []
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line 1 or after: not CSV in UTF-8: {error}") from error
        if len(set(columns)) != len(columns):
            raise DataError(f"{path}: a column name is there twice: {', '.join(columns)}")
        try:
            for values in reader:
                row = Row(
                    path.name, reader.line_num, {k: v for k, v in values.items() if k is not None and v is not None}
                )
                if None in values or None in values.values():
                    fields = sum(value is not None for key, value in values.items() if key) + len(
                        values.get(None) or ()
                    )
                    problems.rows[path.name] = problems.rows.get(path.name, 0) + 1
                    problems.add(row, "", f"{len(columns)} fields", f"{fields}")
                else:
                    yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {reader.line_num + 1} or after: not CSV in UTF-8: {error}") from error


def _read_parquet(path: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(path.name, number, values)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from error


def gym_rows(source: DataSource) -> Iterator[Row]:
    """Rows of a procedural task, each with what the verifier `reasoning_gym` needs to build it again."""
    name = source.source.removeprefix(GYM)
    parameters = dict(source.parameters)
    size, seed = parameters.pop("size", 1000), parameters.pop("seed", 0)
    if not isinstance(size, int) or not isinstance(seed, int) or size < 1:
        raise DataError(f"data.parameters: size and seed are whole numbers, not {size!r} and {seed!r}")
    packed = json.dumps(parameters, sort_keys=True)
    try:
        rows = task(name, packed, size, seed)
    except ImportError as error:
        raise DataError(
            f"data.source: {source.source} needs the package reasoning-gym (pip install reasoning-gym)"
        ) from error
    except ValueError as error:
        raise DataError(f"data.source: {error}") from error
    for index in range(size):
        entry = rows[index]
        origin = {"task": name, "parameters": packed, "size": size, "seed": seed, "index": index}
        yield Row(source.source, index + 1, {"prompt": entry["question"], "answer": entry["answer"], KEY: origin})


def _read_datasets(row_source: DataSource) -> Iterator[Row]:
    import datasets

    source, split = row_source.source, row_source.split
    _refuse_other_folders(row_source)
    try:
        if (Path(source) / "dataset_dict.json").exists() or (Path(source) / "state.json").exists():
            try:
                loaded = datasets.load_from_disk(source)
            except IndexError:  # of a data set without rows no file is written, and reading it back fails (5.2)
                return
        else:
            loaded = datasets.load_dataset(source, row_source.subset)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        kinds = ", ".join(sorted(_READERS))
        raise DataError(
            f"data.source: {source!r} is neither a file ({kinds}) nor a data set that `datasets` can load: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"data.split: {source} has no split {split!r} (it has: {', '.join(map(str, loaded))})")
        loaded = loaded[split]
    for number, values in enumerate(loaded, 1):
        yield Row(f"{source}[{split}]", number, dict(values))


def _refuse_other_folders(source: DataSource) -> None:
    """``datasets`` searches a folder with all that is below it, for minutes if the folder is /tmp or a home."""
    folder = Path(source.source)
    if not folder.is_dir():
        return
    try:
        places = [folder, *(folder / name for name in ("data", source.split, source.subset) if name)]
        names = [file.name for place in places if place.is_dir() for file in place.iterdir()]
        card = folder / "README.md"
        described = card.is_file() and card.read_bytes()[:3] == b"---"  # a data set card names the files
        below = (entry for _, folders, files in os.walk(folder) for entry in (*folders, *files))
        crowded = next(islice(below, _MOST_ENTRIES, None), None) is not None
    except OSError as error:
        raise DataError(f"data.source: {folder.absolute()} cannot be read: {error.strerror}") from error
    if "state.json" in names or "dataset_dict.json" in names:
        return  # written by save_to_disk: read as it says, not searched
    if crowded:
        raise DataError(
            f"data.source: the folder {folder.absolute()} has more than {_MOST_ENTRIES} files and folders below it, "
            "all of which would be searched; name the file, or a folder that holds only the data set"
        )
    if not described and not any(_is_data(name) for name in names):
        raise DataError(
            f"data.source: the folder {folder.absolute()} is no data set: it has no dataset_dict.json, "
            "dataset_info.json or state.json, and no Parquet, JSON, JSONL or CSV file directly in it or in data/"
        )


def _is_data(name: str) -> bool:
    return any(suffix.lower() in (*_READERS, ".arrow") for suffix in Path(name).suffixes[-2:])  # also rows.jsonl.gz


_READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def json_value(value: Any) -> Any:
    """The value as JSON can carry it to a verifier's process: dates and the like become text, NaN stays out."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return json_value(value.tolist())
    return str(value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
