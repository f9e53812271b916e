"""YAML by the rules of version 1.2, with the line of every key, and doubled keys noted instead of dropped.

    text ─compose─► nodes ─► plain data + {key path: line} + problems

``1e-6`` is a number and ``010`` is ten; ``no``, ``1:30`` and ``2024-01-01`` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolver_table() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, starts in _RESOLVERS:
        compiled = re.compile(f"^(?:{pattern})$")
        for first in starts:
            table.setdefault("" if first == "\0" else first, []).append((tag, compiled))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolver_table()

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Decimal or 0x…; version 1.1 would read 010 as octal and 1:30 as sixty-based."""
        text = str(node.value).replace("_", "")
        return int(text, 16 if text.lower().startswith("0x") else 10)


class _Dumper(yaml.SafeDumper):
    # Same rules as the loader: the text "1e-6" is written quoted, so that it comes back as text.
    yaml_implicit_resolvers = _resolver_table()


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


MAX_NODES = 100_000  # with every alias written out: a few lines of nested aliases can stand for billions
MAX_DEPTH = 64

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class YamlError(ValueError):
    """Not readable at all; ``line`` is 1-based, None when unknown."""

    def __init__(self, what: str, line: int | None) -> None:
        super().__init__(what)
        self.line = line


@dataclass
class Document:
    """Plain data, the line of each key or list entry, and doubled keys as (path, both lines)."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    doubled: list[tuple[KeyPath, int, int]] = field(default_factory=list)
    nodes: int = 0


def read_yaml(text: str) -> Document:
    """Parse one document.

    Raises:
        YamlError: not YAML, a key that is not a word, a value that cannot be plain data, an alias inside itself,
            too many values or too many levels.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise YamlError(f"not valid YAML: {what}", mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise YamlError(f"nested more than {MAX_DEPTH} levels deep", None) from error
    document = Document()
    if root is not None:
        document.data = _plain(root, (), document, ())
    return document


def write_yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _plain(node: yaml.Node, path: KeyPath, document: Document, above: tuple[int, ...]) -> Any:
    if id(node) in above:
        raise YamlError("an alias contains itself", _line(node))
    above = (*above, id(node))
    document.nodes += 1
    if document.nodes > MAX_NODES:
        raise YamlError(f"more than {MAX_NODES} values, aliases written out", _line(node))
    if len(above) > MAX_DEPTH:
        raise YamlError(f"nested more than {MAX_DEPTH} levels deep", _line(node))
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        raise YamlError(f"not a plain value: tag {node.tag}", _line(node))
    if isinstance(node, yaml.SequenceNode):
        for i, child in enumerate(node.value):
            document.lines.setdefault((*path, i), _line(child))
        return [_plain(child, (*path, i), document, above) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return dict(_pairs(node, path, document, above))
    return _scalar(node)


def _pairs(
    node: yaml.MappingNode, path: KeyPath, document: Document, above: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
    for merge in merges:  # first, so that the mapping's own keys win
        for source in reversed(merge.value if isinstance(merge, yaml.SequenceNode) else [merge]):
            merged = _plain(source, path, document, above)
            yield from merged.items() if isinstance(merged, dict) else ()
    first: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError("a key must be a word", _line(key))
        here = (*path, key.value)
        if key.value in first:
            document.doubled.append((here, first[key.value], _line(key)))
            continue
        first[key.value] = document.lines[here] = _line(key)
        yield key.value, _plain(value, here, document, above)


def _scalar(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(f"not a plain value: {getattr(error, 'problem', error)}", _line(node)) from error
    finally:
        loader.dispose()
