"""Every key of a recipe as a flat table, read from the typed sections: for the schema, the docs and "did you mean"."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_dist.config import Recipe


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One key: ``path`` is dotted, ``[]`` marks the entries of a list."""

    path: str
    type: str
    default: str  # "" when the key is required
    description: str
    required: bool
    is_section: bool

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


@cache
def recipe_keys() -> tuple[RecipeKey, ...]:
    """All keys in the order of the sections, a section before its keys."""
    return tuple(_keys(Recipe, "", None))


def _keys(model: type[BaseModel], prefix: str, defaults: BaseModel | None) -> Iterator[RecipeKey]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        section, entries = _section_in(info.annotation)
        value = getattr(defaults, name) if defaults is not None else info.default
        required = defaults is None and info.is_required()
        yield RecipeKey(
            path=path,
            type="section" if section and not entries else _type_name(info),
            default="" if required or value is PydanticUndefined or section else _shown(value),
            description=info.description or ("" if section is None else _first_line(section)),
            required=required,
            is_section=section is not None,
        )
        if section is not None:
            inner = value if isinstance(value, BaseModel) else None
            yield from _keys(section, f"{path}[]." if entries else f"{path}.", inner)


def _section_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section a key holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) in (tuple, list):
        inner = get_args(annotation)[0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner, True
    return None, False


def _first_line(section: type[BaseModel]) -> str:
    own = section.__dict__.get("__doc__") or ""
    return own.strip().split("\n")[0]


def _type_name(info: FieldInfo) -> str:
    limits = []
    for one in info.metadata:
        for mark, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if (bound := getattr(one, mark, None)) is not None:
                limits.append(f"{sign} {bound:g}")
    base = _annotation_name(info.annotation)
    return base + (f" ({', '.join(limits)})" if limits else "")


def _annotation_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin is typing.Annotated:
        return _annotation_name(arguments[0])
    if origin in (UnionType, typing.Union):
        return " or ".join(_annotation_name(a) for a in arguments)
    if origin in (tuple, list):
        section, _ = _section_in(annotation)
        return "list of entries" if section else f"list of {_annotation_name(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true | false",
        Path: "path",
        type(None): "null",
        Any: "any",
    }
    return names.get(annotation, str(annotation))


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(v) for v in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    if value == "":
        return '""'
    return str(value)


# ---- did you mean


LIKE = 0.6  # of 1: less alike than this is no suggestion


def nearest_keys(word: str, choices: Iterable[str], most: int = 3) -> list[str]:
    """The choices that look like word, nearest first."""
    return difflib.get_close_matches(word, list(choices), n=most, cutoff=LIKE)


def place_of_key(path: tuple[str | int, ...], *, wanted: bool = False) -> str:
    """What to say of an unknown key (its nearest valid neighbours), or of a missing one (what it is for)."""
    dotted = "".join("[]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    keys = {key.path: key for key in recipe_keys()}
    if wanted:
        key = keys.get(dotted)
        return f"wanted {key.type}: {key.description}" if key else "wanted a value"
    parent, _, name = dotted.rpartition(".")
    siblings = [key for key in recipe_keys() if key.parent == parent]
    here = max((_likeness(name, key.name) for key in siblings), default=0.0)
    anywhere = max(_likeness(name, key.name) for key in recipe_keys())
    if anywhere >= LIKE and anywhere > here + 0.1:  # the right word, or nearly, at the wrong level
        places = [key.path for key in recipe_keys() if _likeness(name, key.name) == anywhere]
        return f"unknown key here; it belongs to {' or '.join(places)}"
    if here >= LIKE:
        near = next(key.path for key in siblings if _likeness(name, key.name) == here)
        return f"unknown key; did you mean {near}?"
    return "unknown key" + (f"; the keys here are {', '.join(key.name for key in siblings)}" if siblings else "")


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


# ---- for the docs


def keys_as_markdown() -> str:
    """One table per section."""
    lines: list[str] = []
    for section in recipe_keys():
        if not section.is_section or section.parent:
            continue
        lines += [f"\n## {section.path}\n", f"{section.description}\n"]
        lines += ["| key | type | default | |", "| --- | --- | --- | --- |"]
        for key in recipe_keys():
            if key.path.startswith(f"{section.path}.") and not (key.is_section and key.type == "section"):
                default = "**required**" if key.required else f"`{key.default}`" if key.default else ""
                cells = (f"`{key.path}`", key.type, default, key.description)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
