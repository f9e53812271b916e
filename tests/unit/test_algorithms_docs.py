"""docs/algorithms.md names everything the recipe offers, and its examples load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_dist.algorithms.advantages import ADVANTAGES
from grpo_dist.algorithms.kl import ESTIMATORS
from grpo_dist.algorithms.objective import DIVISORS, OBJECTIVES
from grpo_dist.config import (
    CORRECTIONS,
    AlgorithmSection,
    CorrectionSection,
    DifficultySection,
    FiltersSection,
    KLSection,
)

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", sorted({*ADVANTAGES, *OBJECTIVES, *DIVISORS, *ESTIMATORS, *CORRECTIONS}))
def test_every_choice_has_a_row_of_its_own(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "key", [*AlgorithmSection.model_fields, *KLSection.model_fields, *CorrectionSection.model_fields]
)
def test_every_key_is_mentioned(key: str) -> None:
    assert re.search(rf"\b{key}\b", PAGE)


@pytest.mark.parametrize("key", [*FiltersSection.model_fields, *DifficultySection.model_fields])
def test_every_key_of_the_filters_is_in_their_one_section(key: str) -> None:
    (section,) = re.findall(r"^## [^\n]*[Ff]ilters.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert re.search(rf"`[^`\n]*\b{key}\b[^`\n]*`", section)


def test_the_examples_load() -> None:
    examples = re.findall(r"^    (correction: .*)$", PAGE, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert AlgorithmSection.model_validate(yaml.safe_load(example)).correction.active
