"""Docs and code say the same: keys, metrics, events, files, commands and links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist import cli
from grpo_dist.config import Recipe
from grpo_dist.recipe_keys import keys_as_markdown, recipe_keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "rollout|verify|train|batch|mismatch|weights|fleet|time|eval"


def sources() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "grpo_dist").rglob("*.py")))


def commands(text: str) -> list[str]:
    return re.findall(r"^(?:\$ )?(grpo-dist .*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)


def test_the_table_of_keys_is_of_today() -> None:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.FILE.read_text(encoding="utf-8")
    assert module.with_keys(text) == text, "docs/recipe.md is old: run `make docs`"


def test_the_table_names_every_key() -> None:
    table = keys_as_markdown()
    missing = [k.path for k in recipe_keys() if not k.is_section and k.parent and f"| `{k.path}` |" not in table]
    assert missing == []


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    names = set(re.findall(rf'"((?:{ROOMS})/[a-z0-9_@]+[a-z0-9])"', sources()))
    assert len(names) > 50
    assert sorted(name for name in names if f"`{name}`" not in page) == [], "add a row to docs/run_folder.md"


def test_every_documented_metric_exists() -> None:
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    code = sources()
    named = set(re.findall(rf"`((?:{ROOMS})/[a-z0-9_@]+)`", page))
    assert sorted(name for name in named if f'"{name}"' not in code) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    used = {line.split()[1] for line in commands(page.read_text(encoding="utf-8"))}
    assert used <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_in_commands_exist(page: Path) -> None:
    paths = {key.path for key in recipe_keys()}
    words = [
        w for line in commands(page.read_text(encoding="utf-8")) for w in line.split() if re.match(r"[a-z_.0-9]+=", w)
    ]
    keys = [re.sub(r"\.\d+\.", "[].", word.split("=")[0]) for word in words]
    assert [key for key in keys if key not in paths] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_in_the_text_exist(page: Path) -> None:
    """`section.key` in backticks."""
    paths = {key.path.replace("[]", "") for key in recipe_keys()}
    sections = {key.path for key in recipe_keys() if key.is_section and not key.parent}
    text = page.read_text(encoding="utf-8")
    named = [w for w in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*|=[^`]*)?`", text) if w.split(".")[0] in sections]
    files = (".py", ".yaml", ".md", ".jsonl", ".sh")
    assert [w for w in named if w not in paths and not w.endswith(files)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_named_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [target.split("#")[0] for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)]
    assert [target for target in linked if not (page.parent / target).exists()] == []
    named = re.findall(r"`((?:grpo_dist|tests|docs|tools|benchmarks)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_smallest_recipe_of_the_docs_is_valid() -> None:
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    Recipe.model_validate(yaml.safe_load(found[1]))


def test_rooms_named_in_contributing_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| floor |") : text.index("Someone who has read")]
    named = set(re.findall(r"`([a-z_/]+(?:\.py|/))`", table))
    assert sorted(name for name in named if not (ROOT / "grpo_dist" / name).exists()) == []


def test_rollout_row_keys_are_documented() -> None:
    from grpo_dist.monitor.records import rollout_rows
    from tests.unit.test_records import scored_group

    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    row = next(iter(rollout_rows(1, scored_group(1, [1.0]), {})))
    assert [key for key in row if f"`{key}`" not in page] == []


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {
        t for page in PAGES for t in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named <= targets


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
