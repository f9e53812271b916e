"""Keys that are set and change nothing, because another key of the recipe leaves them unread.

    recipe ─► per switch: its keys, and is it on? ─► keys that differ from their defaults while it is off ─► warnings

``config.py`` refuses what contradicts itself, and a key that is null unless one choice reads it (kl.ema, clip_dual).
The keys here have a default, are filled in by the recipe itself, or belong to a switch that is off: a template may
hold them. Defaults are never named, since a run's own recipe.yaml spells out every key.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config import CORRECTIONS, Recipe, Section


def idle_keys(recipe: Recipe) -> list[str]:
    """One warning a key."""
    return [*_algorithm(recipe), *_kl_and_correction(recipe), *_learner(recipe)]


def _algorithm(recipe: Recipe) -> Iterator[str]:
    a, filters = recipe.algorithm, recipe.algorithm.filters
    if a.advantage != "pass_at_k":
        yield from _changed("algorithm", a, ("pass_k",), f"algorithm.advantage {a.advantage}")
    if a.divisor != "constant" and a.divisor_tokens not in (None, recipe.rollout.sampling.max_tokens):
        yield _idle("algorithm.divisor_tokens", a.divisor_tokens, f"algorithm.divisor {a.divisor}")
    objective = f"algorithm.objective {a.objective}"
    if a.objective != "sapo":
        yield from _changed("algorithm", a, ("sapo_tau_positive", "sapo_tau_negative"), objective)
    if a.objective in ("sapo", "reinforce"):
        yield from _changed("algorithm", a, ("clip_low", "clip_high"), objective)
    if filters.truncated != "penalise":
        why = f"algorithm.filters.truncated {filters.truncated}"
        yield from _changed("algorithm.filters", filters, ("overlong_factor",), why)
    if not filters.difficulty.patience:
        why = "algorithm.filters.difficulty.patience 0"
        yield from _changed("algorithm.filters.difficulty", filters.difficulty, ("rest", "longest"), why)


def _kl_and_correction(recipe: Recipe) -> Iterator[str]:
    kl, correction = recipe.algorithm.kl, recipe.algorithm.correction
    if kl.beta == 0:
        keys = ("estimator", "place", "reference", "refresh_every", "ema")
        yield from _changed("algorithm.kl", kl, keys, "algorithm.kl.beta 0")
    elif kl.place == "reward" and kl.estimator != "k1":
        why = "algorithm.kl.place reward, whose penalty is k1: only train/kl follows it"
        yield from _changed("algorithm.kl", kl, ("estimator",), why)
    preset = CORRECTIONS[correction.preset]  # its keys are nobody's own words
    bounds: dict[str, tuple[str, ...]] = {"weight": ("cap",), "mask": ("low", "high")}
    for switch, named in bounds.items():
        if getattr(correction, switch) == "none":
            own = tuple(key for key in named if getattr(correction, key) != preset.get(key))
            yield from _changed("algorithm.correction", correction, own, f"algorithm.correction.{switch} none")


def _learner(recipe: Recipe) -> Iterator[str]:
    schedule, lora = recipe.learner.schedule, recipe.learner.lora
    if lora.rank == 0:
        yield from _changed("learner.lora", lora, ("alpha", "targets"), "learner.lora.rank 0")
    if schedule.name == "constant":
        yield from _changed("learner.schedule", schedule, ("final_fraction",), "learner.schedule.name constant")
    if schedule.warmup_steps >= recipe.run.steps:
        yield (
            f"learner.schedule.warmup_steps {schedule.warmup_steps} is not below run.steps {recipe.run.steps}: the "
            "whole run is warm-up"
        )


def _changed(path: str, section: Section, keys: tuple[str, ...], why: str) -> Iterator[str]:
    for key in keys:
        if (value := getattr(section, key)) != type(section).model_fields[key].default:
            yield _idle(f"{path}.{key}", value, why)


def _idle(key: str, value: object, why: str) -> str:
    shown = list(value) if isinstance(value, tuple) else value
    return f"{key} {shown} has no effect with {why}"
