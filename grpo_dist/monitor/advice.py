"""Warnings for runs that go on without learning: what a person would see in the curves, said aloud.

Each is said once, after ``PATIENCE`` steps in a row show it, and again only when it had gone away in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

PATIENCE = 3

Values = Mapping[str, float]


def _all_truncated(values: Values) -> str | None:
    if values.get("rollout/truncated_fraction", 0.0) < 1.0:
        return None
    return (
        "100% of the completions were truncated at rollout.sampling.max_tokens: no answer was ever finished; "
        "raise max_tokens, or check that the prompt template and the stop tokens fit the model"
    )


def _no_spread(values: Values) -> str | None:
    if values.get("rollout/zero_variance_fraction", 0.0) < 1.0:
        return None
    groups, reward = values.get("rollout/groups", 0.0), values.get("rollout/reward_mean")
    known = f" (all rewards of a group are equal; mean reward {reward:.3g})" if reward is not None else ""
    return (
        f"0 of {groups:.0f} groups with spread{known}: every advantage is 0 and nothing is learned; the prompts are "
        "all too hard or all too easy for this policy, or the verifier gives every completion the same reward"
    )


def _many_errors(values: Values) -> str | None:
    errors, groups = values.get("verify/errors", 0.0), values.get("rollout/groups", 0.0)
    if errors <= 0 or groups <= 0 or errors < groups:  # fewer than one a group
        return None
    return f"{errors:.0f} verdicts of this step failed and were masked; the rollout file of the step says why (error)"


def _nothing_remembered(values: Values) -> str | None:
    if values.get("rollout/prompts_visited", 1.0) > 0:
        return None
    return (
        "algorithm.filters.difficulty has nothing to go by: no verifier says whether an answer is correct, "
        "so no prompt will ever rest; use one that does (docs/verifiers.md), or set difficulty.patience: 0"
    )


RULES: dict[str, Callable[[Values], str | None]] = {
    "truncated": _all_truncated,
    "no_spread": _no_spread,
    "errors": _many_errors,
    "difficulty": _nothing_remembered,
}


class Advisor:
    """Looks at the metrics of each step."""

    def __init__(self) -> None:
        self._in_a_row = dict.fromkeys(RULES, 0)

    def look(self, values: Values) -> list[str]:
        """Warnings that are due after this step."""
        due = []
        for name, rule in RULES.items():
            text = rule(values)
            self._in_a_row[name] = 0 if text is None else self._in_a_row[name] + 1
            if text is not None and self._in_a_row[name] == PATIENCE:
                due.append(f"{PATIENCE} steps in a row: {text}")
        return due
