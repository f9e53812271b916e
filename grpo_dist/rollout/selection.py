"""Which groups a step trains on: taken from the window, filtered, and refilled when too few can teach.

    take(groups_per_step) ─► truncated completions ─► groups without spread: kept │ dropped │ replaced ─► StepGroups
                                   ▲                                                   │
                                   └──────────────── take(missing) ◄───────────────────┘

    Difficulty: what prompts taught on earlier visits ─► which of them rest when their turn comes again

The rules themselves are pure functions in algorithms/filters.py and algorithms/difficulty.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_dist.algorithms.difficulty import DifficultyMemory, Visit, observe, rests
from grpo_dist.algorithms.filters import Refill, by_spread, shaped
from grpo_dist.config import DifficultySection, FiltersSection, RolloutSection
from grpo_dist.types import ScoredGroup


class Window(Protocol):
    """What is needed of the rollout pipeline."""

    async def take(self, n: int) -> list[ScoredGroup]: ...
    def replace(self, n: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of one step."""

    seen: tuple[ScoredGroup, ...]  # all that were taken, in submission order, as the verifiers judged them
    trained: tuple[ScoredGroup, ...]  # what the filters left; rewards of truncated completions may be shaped
    dropped: dict[int, str] = field(default_factory=dict)  # group id -> why it does not train
    slots: int = 0  # slots of the window that they still hold: released after the publication

    def metrics(self) -> dict[str, float]:
        return {"rollout/groups_dropped": float(len(self.dropped))}


async def select(
    window: Window, rollout: RolloutSection, filters: FiltersSection, look: Callable[[Sequence[ScoredGroup], int], None]
) -> StepGroups:
    """The groups of the next step.

    Args:
        look: told of all groups so far, and how many of them train, whenever some have arrived; it may raise.

    Raises:
        GrpoDistError: refilling has reached its cap and no group has a spread.
    """
    per_step = rollout.groups_per_step
    refill = Refill(wanted=per_step, most=filters.refill_most or 3 * per_step)
    seen: list[ScoredGroup] = []
    trained: list[ScoredGroup] = []
    dropped: dict[int, str] = {}
    wanted, replaced = per_step, 0
    while True:
        groups = await window.take(wanted)
        seen += groups
        kept, flat = _filtered(groups, rollout.sampling.max_tokens, filters)
        trained += kept
        dropped |= {group.group_id: "all rewards of the group are equal" for group in flat}
        look(seen, len(trained))
        if filters.zero_variance != "refill":
            break
        refill = refill.add(kept + flat)
        if (wanted := refill.missing()) == 0:
            break
        window.replace(wanted)
        replaced += wanted
    return StepGroups(tuple(seen), tuple(trained), dropped, slots=len(seen) - replaced)


def _filtered(
    groups: Sequence[ScoredGroup], max_tokens: int, filters: FiltersSection
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """(groups that train, groups that are dropped)."""
    judged = shaped(groups, filters, max_tokens)
    return (judged, []) if filters.zero_variance == "keep" else by_spread(judged)


class Difficulty:
    """Remembers how each prompt went and says which rest. Deterministic: it changes only when a step is committed."""

    def __init__(
        self, settings: DifficultySection, place: Callable[[int], tuple[str, int]], prompts: int, state: dict[str, Any]
    ) -> None:
        """Args:
        place: (prompt id, epoch) of a group id.
        prompts: how many there are.
        state: ``to_json`` of a former process, or nothing.
        """
        self.on = settings.patience > 0
        self._place, self._prompts = place, prompts
        self._memory = DifficultyMemory(max(1, settings.patience), settings.rest, settings.longest)
        if state:
            self._memory = self._memory.restored(state)
        self._in_a_row = 0

    def rests(self, group_id: int) -> bool:
        """Whether the prompt of this group is passed over this time. When all of them would be, the next is not:
        a run in which every prompt rests still has steps to make."""
        prompt, epoch = self._place(group_id)
        if self._in_a_row < self._prompts and rests(self._memory, prompt, epoch):
            self._in_a_row += 1
            return True
        self._in_a_row = 0
        return False

    def observe(self, groups: Iterable[ScoredGroup]) -> dict[str, float]:
        """Take in the groups of a step, dropped ones included; metrics of what is remembered."""
        if not self.on:
            return {}
        visits = []
        for group in groups:
            known = [v.correct for v in group.verdicts if v.reward is not None and v.correct is not None]
            request = group.rollout.request
            visits.append(Visit(request.prompt.id, request.epoch, solved=sum(known), judged=len(known)))
        self._memory = observe(self._memory, visits)
        epoch = max((visit.epoch for visit in visits), default=0)
        resting = sum(record.until > epoch + 1 for record in self._memory.records.values())
        return {"rollout/prompts_resting": float(resting), "rollout/prompts_visited": float(len(self._memory.records))}

    def to_json(self) -> dict[str, Any]:
        return self._memory.to_json() if self.on else {}
