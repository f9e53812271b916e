"""From a cluster file to a ClusterFile, or to one message that lists every problem with its key and line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from grpo_dist.errors import RecipeError
from grpo_dist.recipe_keys import nearest_keys
from grpo_dist.submit.cluster import ClusterFile
from grpo_dist.submit.cluster_rules import backend_problems
from grpo_dist.yaml_lines import Document, KeyPath, YamlError, read_yaml


@dataclass(frozen=True, slots=True)
class LoadedCluster:
    """A valid cluster file, where it came from, and the hash of its text (rendered files carry it)."""

    cluster: ClusterFile
    path: Path
    hash: str


def load_cluster(path: str | Path) -> LoadedCluster:
    """Read and validate.

    Raises:
        RecipeError: every problem at once: key, line, what was wanted, what came, the nearest valid key.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        document = read_yaml(text)
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise RecipeError(f"{file}{f':{error.line}' if error.line else ''}: {error}") from error
    if not isinstance(document.data, dict):
        raise RecipeError(f"{file}: wanted a mapping that starts with backend: local | ray | slurm | kubernetes | ssh")
    problems = [
        f"{file}:{second}: {_dotted(key)}: given twice, first in line {first}"
        for key, first, second in document.doubled
    ]
    try:
        cluster = ClusterFile.model_validate(document.data)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            problems += _problem(file, document, tuple(one["loc"]), one)
        raise RecipeError("\n".join(problems)) from error
    for text_line in backend_problems(cluster):
        named, _, what = text_line.partition(": ")
        problems.append(_line(file, document, tuple(named.split(".")), what))
    if problems:
        raise RecipeError("\n".join(problems))
    return LoadedCluster(cluster, file, hashlib.sha256(text.encode()).hexdigest()[:16])


def _problem(file: Path, document: Document, path: KeyPath, one: Mapping[str, Any]) -> Iterator[str]:
    if one["type"] == "value_error":
        for line in str(one["ctx"]["error"]).split("\n"):
            # A check names the key it is about by its first word, relative to its section.
            named = line.split(maxsplit=1)[0].rstrip(":")
            full = (*path, *named.split(".")) if _known((*path, *named.split("."))) else path
            own = full != path or (path and named == path[-1])
            text = line[len(named) :].lstrip(": ") if own else line
            yield _line(file, document, full, text)
    elif one["type"] == "extra_forbidden":
        yield _line(file, document, path, _unknown(path))
    elif one["type"] == "missing":
        yield _line(file, document, path, f"missing; wanted {_keys().get(_plain(path), 'a value')}")
    else:
        wanted = str(one["msg"]).removeprefix("Input should be ")
        value = one["input"]
        shown = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
        hint = " (write it in quotes)" if isinstance(value, int | float) and "string" in wanted else ""
        yield _line(file, document, path, f"wanted {wanted}, found {shown}{hint}")


def _line(file: Path, document: Document, path: KeyPath, text: str) -> str:
    for end in range(len(path), 0, -1):
        if (number := document.lines.get(path[:end])) is not None:
            return f"{file}:{number}: {_dotted(path)}: {text}"
    return f"{file}: {_dotted(path)}{': ' if path else ''}{text}"


def _unknown(path: KeyPath) -> str:
    parent, name = _plain(path[:-1]), str(path[-1])
    siblings = [key.rpartition(".")[2] for key in _keys() if key.rpartition(".")[0] == parent]
    elsewhere = [key for key in _keys() if key.rpartition(".")[2] == name]
    if elsewhere and len(elsewhere) <= 4:
        return f"unknown key here; it belongs to {' or '.join(elsewhere)}"
    if near := nearest_keys(name, siblings):
        return f"unknown key; did you mean {f'{parent}.{near[0]}'.removeprefix('.')}?"
    if elsewhere:
        return f"unknown key here; keys of that name: {', '.join(elsewhere)}"
    return f"unknown key; the keys here are {', '.join(siblings)}" if siblings else "unknown key"


def cluster_keys() -> dict[str, str]:
    """Dotted key -> description, a section before its keys: for the docs and for "did you mean"."""
    return dict(_described(ClusterFile, ""))


_keys = cluster_keys


def _described(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info.description or ""
        for annotation in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from _described(annotation, f"{prefix}{name}.")


def _known(path: KeyPath) -> bool:
    return _plain(path) in _keys()


def _plain(path: KeyPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
