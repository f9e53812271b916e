"""Weights for engine/learner mismatch: by hand, presets, and what the recipe accepts."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from grpo_dist.algorithms.corrections import correct
from grpo_dist.algorithms.surrogates import TokenTerms
from grpo_dist.config import CORRECTIONS, AlgorithmSection, CorrectionSection, Recipe
from tests.conftest import tiny_recipe


def weights(
    ratios: list[list[float]], correction: Any, *, advantages: list[float] | None = None, now: Tensor | None = None
) -> tuple[list[float], list[bool], list[bool]]:
    """(weight, dropped, truncated) per token, for learner/engine ratios of some sequences; each has a prompt token."""
    flat = torch.tensor([r for s in ratios for r in [1.0, *s]], dtype=torch.float64)
    ids = torch.tensor([i for i, s in enumerate(ratios) for _ in range(len(s) + 1)])
    mask = torch.tensor([t > 0 for s in ratios for t in range(len(s) + 1)])
    before = torch.full_like(flat, -3.0)
    behavior = before - flat.log()
    signs = torch.tensor(advantages or [1.0] * len(ratios), dtype=torch.float64)[ids]
    zero = torch.zeros_like(flat)
    lengths = torch.tensor([len(s) for s in ratios])
    terms = TokenTerms(before if now is None else now, zero, signs * mask, mask, ids, lengths)
    found = correct(terms, before * mask, behavior * mask, AlgorithmSection(correction=correction).correction)
    return found.weight[mask].tolist(), found.dropped[mask].tolist(), found.truncated[mask].tolist()


def test_without_a_correction_every_weight_is_one() -> None:
    assert weights([[0.1, 7.0], [1.0]], "none") == ([1.0] * 3, [False] * 3, [False] * 3)


def test_truncated_importance_sampling_caps_above_and_keeps_below() -> None:
    found, dropped, truncated = weights([[0.1, 1.5, 7.0]], "tis")
    assert found == pytest.approx([0.1, 1.5, 2.0])
    assert not any(dropped)
    assert truncated == [False, False, True]


def test_two_sided_masking_drops_tokens_on_both_sides() -> None:
    found, dropped, _ = weights([[0.4, 0.6, 4.9, 5.1]], "icepop")
    assert found == pytest.approx([0, 0.6, 4.9, 0])
    assert dropped == [True, False, False, True]


def test_sequence_truncation_takes_the_product_for_every_token() -> None:
    found, _, truncated = weights([[0.5, 3.0], [2.0, 2.0]], "seq_tis")
    assert found == pytest.approx([1.5, 1.5, 2.0, 2.0])
    assert truncated == [False, False, True, True]


def test_sequence_mask_drops_whole_completions_by_their_product() -> None:
    found, dropped, _ = weights([[0.5, 3.0], [2.0, 2.0], [0.01, 1.0]], "seq_mis")
    assert found == pytest.approx([1.5, 1.5, 0, 0, 0.01, 0.01])
    assert dropped == [False, False, True, True, False, False]


def test_geometric_mask_does_not_punish_length() -> None:
    # 1000 tokens of ratio 1.0005: their product is 1.65, their geometric mean 1.0005.
    assert not any(weights([[1.0005] * 1000], "geo_mask")[1])
    assert all(weights([[1.0005] * 1000], {"mask": "sequence", "low": 0.7, "high": 1.4})[1])
    found, dropped, _ = weights([[1.1, 1.0], [1.1, 1 / 1.1]], "geo_mask")
    assert found == [0.0, 0.0, 1.0, 1.0]
    assert dropped == [True, True, False, False]


def test_bounds_themselves_are_kept() -> None:
    assert weights([[1.0]], {"mask": "token", "low": 1.0, "high": 2.0})[1] == [False]
    assert weights([[1.0]], {"mask": "token", "low": 0.5, "high": 1.0})[1] == [False]


def test_only_negative_completions_that_have_drifted_are_dropped() -> None:
    # Now the learner gives each token of the first two completions e^-0.5 of the engine's probability, 1 to the third.
    now = torch.tensor([0.0, -3.5, -3.5, 0.0, -3.5, 0.0, -3.0], dtype=torch.float64)
    found, dropped, _ = weights(
        [[1.0, 1.0], [1.0], [1.0]], {"negative_limit": 0.4}, advantages=[-1.0, 1.0, -1.0], now=now
    )
    assert found == [0.0, 0.0, 1.0, 1.0]
    assert dropped == [True, True, False, False]
    assert weights([[1.0, 1.0]], {"negative_limit": 0.6}, advantages=[-1.0], now=now[:3])[1] == [False, False]


def test_a_weight_and_a_mask_combine() -> None:
    keys = {"weight": "token", "cap": 1.2, "mask": "sequence", "low": 0.5, "high": 2.0}
    assert weights([[1.5, 1.0], [3.0, 1.0]], keys)[0] == pytest.approx([1.2, 1.0, 0, 0])


# --- the recipe -----------------------------------------------------------------------------------------------------


def test_a_name_is_short_for_the_preset_of_that_name() -> None:
    assert AlgorithmSection(correction="tis").correction == CorrectionSection(preset="tis")
    assert CorrectionSection(preset="tis").model_dump() == {
        "preset": "tis", "weight": "token", "cap": 2.0, "mask": "none", "low": 0.5, "high": 2.0, "negative_limit": None,
    }  # fmt: skip
    assert not AlgorithmSection(correction=None).correction.active
    assert not AlgorithmSection().correction.active


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_every_preset_loads_and_survives_being_written_out(name: str) -> None:
    section = CorrectionSection(preset=name)
    assert section.active == (name != "none")
    assert CorrectionSection.model_validate(section.model_dump()) == section


def test_the_recipe_lists_exactly_the_presets() -> None:
    assert set(get_args(CorrectionSection.model_fields["preset"].annotation)) == set(CORRECTIONS)


def test_keys_beside_a_preset_win() -> None:
    section = CorrectionSection(preset="icepop", high=4.0)
    assert (section.low, section.high, section.weight) == (0.5, 4.0, "token")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"correction": "tiss"}, "preset"),
        ({"correction": {"mask": "token", "low": 2.0, "high": 0.5}}, "low must be below"),
        ({"correction": "tis", "old_logprobs": "engine"}, "already divides by the engine's probabilities"),
        ({"clip_dual": 1.0}, "greater than 1"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"pass_k": 1}, "greater than or equal to 2"),
        ({"objective": "grpo"}, "'clip', 'gspo'"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSection(**keys)


def test_the_constant_divisor_defaults_to_the_longest_completion() -> None:
    recipe = Recipe.model_validate(tiny_recipe(algorithm={"divisor": "constant"}))
    assert recipe.algorithm.divisor_tokens == recipe.rollout.sampling.max_tokens == 16
    recipe = Recipe.model_validate(tiny_recipe(algorithm={"divisor": "constant", "divisor_tokens": 99}))
    assert recipe.algorithm.divisor_tokens == 99
    assert Recipe.model_validate(tiny_recipe()).algorithm.divisor_tokens is None
    bare = tiny_recipe(algorithm={"divisor": "constant"})
    del bare["rollout"]
    assert Recipe.model_validate(bare).algorithm.divisor_tokens == 1024


def test_geometric_mean_is_the_exponential_of_the_mean_log() -> None:
    for edge, dropped in ((1e-9, False), (-1e-9, True)):
        keys = {"mask": "geometric", "low": 1.0, "high": math.sqrt(6) + edge}
        assert weights([[2.0, 3.0]], keys)[1] == [dropped, dropped]
