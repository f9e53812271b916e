"""docs/algorithms.md names everything the recipe offers, and its examples load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_dist.algorithms.advantages import ADVANTAGES
from grpo_dist.algorithms.kl import ESTIMATORS
from grpo_dist.algorithms.objective import DIVISORS, OBJECTIVES
from grpo_dist.config import CORRECTIONS, AlgorithmSection, CorrectionSection, KLSection

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", sorted({*ADVANTAGES, *OBJECTIVES, *DIVISORS, *ESTIMATORS, *CORRECTIONS}))
def test_every_choice_has_a_row_of_its_own(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "key", [*AlgorithmSection.model_fields, *KLSection.model_fields, *CorrectionSection.model_fields]
)
def test_every_key_is_mentioned(key: str) -> None:
    assert re.search(rf"\b{key}\b", PAGE)


def test_the_examples_load() -> None:
    examples = re.findall(r"^    (correction: .*)$", PAGE, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert AlgorithmSection.model_validate(yaml.safe_load(example)).correction.active
