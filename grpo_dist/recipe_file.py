"""From a YAML file and ``key=value`` words to a Recipe, or to one message that lists every problem.

    text ─compose─► nodes with lines ─► plain dicts + {key path: place} ─overrides─► pydantic ─► Recipe
                     duplicates                                                         │ problems
                                                             repair, validate again ◄───┘ until none are new

Nothing here reads the environment, except to refuse a recipe that carries one of its secrets. Data, tokenizer and
cluster are not looked at: that is ``grpo-dist check``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_dist.config import Recipe
from grpo_dist.errors import RecipeError
from grpo_dist.recipe_keys import nearest_keys, place_of_key
from grpo_dist.yaml_lines import KeyPath, YamlError, read_yaml, write_yaml

SHIPPED = Path(__file__).parent / "recipes"

# ---- problems


@dataclass
class _Draft:
    """A recipe on its way: plain data, where each key was written, and what is wrong so far."""

    file: str
    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """Where the key, or the nearest thing around it, was written."""
        for end in range(len(path), 0, -1):
            if (found := self.places.get(path[:end])) is not None:
                return found
        return self.file

    def place_of_several(self, path: KeyPath, named: Sequence[KeyPath]) -> str:
        """As ``place``; but what an override brought about, through any of the keys named, is the override's."""
        place = self.place(path)
        words = [found for key in named if (found := self.places.get(key, "")).startswith("override ")]
        return " and ".join(dict.fromkeys(words)) if words and not place.startswith("override ") else place

    def problem(self, path: KeyPath, text: str, named: Sequence[KeyPath] = ()) -> None:
        line = f"{self.place_of_several(path, named)}: {_dotted(path)}{': ' if path else ''}{text}"
        if line not in self.problems:
            self.problems.append(line)


def _line_of(problem: str) -> int:
    """Problems are shown in the order of the file, then those of overrides."""
    found = re.match(r"(?!override ).*?:(\d+): ", problem)
    return int(found[1]) if found else 1 << 30


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


# ---- reading


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}


def find_recipe(path_or_name: str | Path) -> Path:
    """The file of a recipe given by path or by the name of a shipped one.

    Raises:
        RecipeError: neither exists; the message names the shipped ones.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    what = "is a folder, not a recipe file" if path.is_dir() else "no such file"
    near = nearest_keys(str(path_or_name), shipped)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"{path_or_name}: {what}, and no shipped recipe of that name ({', '.join(shipped)}){hint}")


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path_or_name: a YAML file, or the name of a shipped recipe.
        overrides: ``key=value`` words; the key is dotted (``verifiers.use.0.weight=2``), the value is YAML.

    Raises:
        RecipeError: every problem at once, each with its key, its line, what was wanted and what came.
    """
    file = find_recipe(path_or_name)
    draft = _read(file)
    for word in overrides:
        _override(draft, word)
    recipe = _validate(draft)
    if recipe is not None:
        _refuse_secrets(draft)
    if recipe is None or draft.problems:
        raise RecipeError("\n".join(sorted(draft.problems, key=_line_of)))
    return recipe


_NAMED_KEY = re.compile(r"([a-z_]+(?:\.\w+)+)(?= \(|: )")


@contextmanager
def placed(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Iterator[Callable[[str], str]]:
    """For what can only be checked after loading (options of verifiers, data, models): every line of a message that
    begins with a key of this recipe gets the file and line of the key, or the override. Gives that function, and
    applies it to a RecipeError that is raised inside."""
    draft = _read(find_recipe(path_or_name))
    for word in overrides:
        _override(draft, word)

    def place(text: str) -> str:
        return "\n".join(map(place_line, text.split("\n")))

    def place_line(line: str) -> str:
        found = _NAMED_KEY.match(line)
        path = tuple(int(part) if part.isdecimal() else part for part in found[1].split(".")) if found else ()
        return f"{draft.place(path)}: {line}" if path and path[0] in draft.data else line

    try:
        yield place
    except RecipeError as error:
        raise RecipeError(place(str(error))) from error


def dump_recipe(recipe: Recipe) -> str:
    """YAML that load_recipe reads back to an equal recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def recipe_description(file: Path) -> str:
    """The description line of a recipe file, without validating the rest (fast: for lists)."""
    return str(_read(file).data.get("description", ""))


def _read(file: Path) -> _Draft:
    try:
        document = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: is not UTF-8 text: {error}") from error
    except YamlError as error:
        raise RecipeError(f"{file}{f':{error.line}' if error.line else ''}: {error}") from error
    if not isinstance(document.data, dict):
        found = "nothing" if document.data is None else "no mapping"
        raise RecipeError(f"{file}: wanted sections (run, model, data, …), found {found}")
    draft = _Draft(str(file), document.data, {path: f"{file}:{line}" for path, line in document.lines.items()})
    for path, first, second in document.doubled:
        draft.problems.append(f"{file}:{second}: {_dotted(path)}: given twice, first in line {first}")
    return draft


def _override(draft: _Draft, word: str) -> None:
    key, sign, text = word.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in key.strip().split("."))
    place = f"override {word!r}"
    if not sign or not key.strip() or "" in path:
        draft.problems.append(f"{place}: wanted key=value with a dotted key, such as learner.learning_rate=1e-6")
        return
    try:
        value = read_yaml(text).data
    except YamlError as error:
        draft.problems.append(f"{place}: the value is {error}")
        return
    target: Any = draft.data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(part, int) and not (isinstance(target, list) and part < len(target)):
            have = f"the list has {len(target)}" if isinstance(target, list) else "that is no list"
            draft.problems.append(f"{place}: no entry {_dotted(path[: depth + 1])}: {have}")
            return
        if isinstance(part, str) and not isinstance(target, dict):
            draft.problems.append(f"{place}: {_dotted(path[:depth])} has no keys")
            return
        if last:
            target[part] = value
        elif isinstance(part, str) and target.get(part) is None:
            target[part] = {}
        target = target[part]
    for known in [p for p in draft.places if p[: len(path)] == path]:
        del draft.places[known]
    draft.places[path] = place


# ---- validating

_PLACEHOLDERS: dict[KeyPath, Any] = {
    ("run",): {"name": "x", "steps": 1},
    ("run", "name"): "x",
    ("run", "steps"): 1,
    ("model",): {"path": "x"},
    ("model", "path"): "x",
    ("data",): {"source": "x"},
    ("data", "source"): "x",
    ("verifiers",): {"use": [{"name": "x"}]},
    ("verifiers", "use"): [{"name": "x"}],
}


def _validate(draft: _Draft) -> Recipe | None:
    """The recipe, or None with the draft's problems filled.

    pydantic stops at a wrong key of a section before it compares sections. So that all problems come at once, what is
    wrong is replaced by something valid and the rest is validated again, until nothing new turns up.
    """
    data: Any = draft.data
    repaired: set[str] = set()
    gone: set[KeyPath] = set()
    for _ in range(200):  # each round repairs at least one key of a finite recipe
        try:
            recipe = Recipe.model_validate(data)
        except ValidationError as error:
            found = error.errors(include_url=False)
        else:
            return None if draft.problems else recipe
        progress = False
        for one in found:
            path: KeyPath = tuple(one["loc"])
            if one["type"] == "too_short" and any(
                len(o["loc"]) > len(path) and o["loc"][: len(path)] == path for o in found
            ):
                continue  # pydantic counts only the good entries of a list; the bad ones are listed themselves
            named = _keys_named(path, one)
            if path == () and one["type"] == "value_error":
                # Made of several sections: only true while none of them was replaced.
                if not repaired & {"rollout", "learner", "data"} and not gone & set(named):
                    draft.problem((), _wording(one), named)
                continue
            key, text = _named_key(path, one)
            if not gone & set(named):  # otherwise it may only be missing because it was taken out as wrong
                draft.problem(key, text, named)
            repaired.add(str(path[0]) if path else "")
            gone.add(key)
            data, done = _without(data, key)
            progress = progress or done
        if not progress:
            return None
    return None


def _named_key(path: KeyPath, one: Any) -> tuple[KeyPath, str]:
    """The key that a problem is about, and what to say of it. A section's own check names the key by its first word,
    from itself or with its own name before; that word is then not said again."""
    text = _wording(one, path)
    if one["type"] != "value_error" or not isinstance(one["input"], dict) or " " not in text:
        return path, text
    first, rest = text.split(maxsplit=1)
    named = tuple(first.rstrip(":,").split("."))
    if path and named[0] == path[-1] and len(named) > 1:
        named = named[1:]
    inside: Any = one["input"]
    for part in named:
        if not isinstance(inside, dict) or part not in inside:
            return path, text
        inside = inside[part]
    return (*path, *named), rest


_KEY_IN_TEXT = re.compile(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*")


def _keys_named(path: KeyPath, one: Any) -> list[KeyPath]:
    """The keys that the text of a check may be naming: from the section, or with the section's own name before. Checks
    of several sections name theirs in full."""
    if one["type"] != "value_error":
        return []
    words = [tuple(word.split(".")) for word in _KEY_IN_TEXT.findall(str(one["ctx"]["error"]))]
    if path == ():
        return [word for word in words if len(word) > 1]
    return [(*path, *word) for word in words] + [(*path[:-1], *word) for word in words if len(word) > 1]


_WANTED = {
    "path_type": "a path",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list",
    "too_short": "at least one entry",
    "finite_number": "a finite number",
    "int_parsing_size": "an integer",
    "string_pattern_mismatch": "letters, digits and any of . _ - after a first letter or digit",  # run.name
}


def _wording(one: Any, path: KeyPath = ()) -> str:
    kind = one["type"]
    if kind == "extra_forbidden":
        return place_of_key(path)
    if kind == "missing":
        return f"missing; {place_of_key(path, wanted=True)}"
    if kind == "value_error":
        return str(one["ctx"]["error"])
    wanted = _WANTED.get(kind) or str(one["msg"]).removeprefix("Input should be ")
    value = one["input"]
    shown = (
        "a mapping"
        if isinstance(value, dict)
        else _list_shown(value)
        if isinstance(value, list | tuple)
        else repr(value)
    )
    hint = ""
    if isinstance(value, int | float) and "string" in wanted:
        hint = " (write it in quotes)"
    return f"wanted {wanted}, found {shown}{hint}"


def _list_shown(value: Sequence[Any]) -> str:
    return "a list" if value else "an empty list"


def _without(data: Any, path: KeyPath) -> tuple[Any, bool]:
    """A copy of data in which the key is gone, or replaced where the recipe needs it; and whether that changed it."""
    for end in range(1, len(path) + 1):
        if path[:end] in _PLACEHOLDERS and end == len(path):
            return _replaced(data, path, _PLACEHOLDERS[path]), True
    if path[:2] == ("verifiers", "use"):
        return _replaced(data, path[:2], _PLACEHOLDERS[path[:2]]), True
    inside: Any = data
    for part in path[:-1]:
        known = range(len(inside)) if isinstance(inside, list) else inside if isinstance(inside, dict) else ()
        if part not in known:
            return data, False
        inside = inside[part]
    if isinstance(inside, dict) and path and path[-1] in inside:
        return _replaced(data, path, None, delete=True), True
    return _without(data, path[:-1]) if len(path) > 1 else (data, False)


def _replaced(data: Any, path: KeyPath, value: Any, *, delete: bool = False) -> Any:
    copy: Any = list(data) if isinstance(data, list) else dict(data) if isinstance(data, dict) else {}
    if len(path) > 1:
        below = copy[path[0]] if not isinstance(copy, dict) or path[0] in copy else {}
        copy[path[0]] = _replaced(below, path[1:], value, delete=delete)
    elif delete:
        del copy[path[0]]
    else:
        copy[path[0]] = value
    return copy


# ---- secrets

_SECRET_KEY = re.compile(
    r"(^|_)(api|access|auth|hf|secret|private)_?(key|token)$|(^|_)password$|^(token|secret)$", re.I
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.I)


def _refuse_secrets(draft: _Draft) -> None:
    """A recipe is written to the run folder, to W&B and to job metadata: no place for a secret."""
    values = {v: k for k, v in os.environ.items() if len(v) >= 8 and _SECRET_VARIABLE.search(k)}

    def look(node: Any, path: KeyPath) -> None:
        if isinstance(node, dict):
            for key, below in node.items():
                if _SECRET_KEY.search(str(key)) and below not in (None, "", False, True):
                    draft.problem((*path, key), "looks like a secret; secrets come from the environment only")
                else:
                    look(below, (*path, key))
        elif isinstance(node, list):
            for i, below in enumerate(node):
                look(below, (*path, i))
        elif isinstance(node, str):
            for value, variable in values.items():
                if value in node:
                    draft.problem(path, f"contains the value of {variable}; secrets come from the environment only")

    look(draft.data, ())
