"""Ranks that the tests of this folder share: importing torch and DeepSpeed in six processes takes longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.learner_probe import Group


@pytest.fixture(scope="package")
def groups(ray_cluster: None, tiny_model: Path) -> Iterator[dict[int, Group]]:
    """One, two and three ranks that never train: their weights stay those of the folder."""
    made = {world: Group(tiny_model, world) for world in (1, 2, 3)}
    yield made
    for group in made.values():
        group.end()
