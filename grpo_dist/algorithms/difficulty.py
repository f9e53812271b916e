"""Memory of how hard each prompt is: prompts that teach nothing rest for a while, then are tried again.

    after a step:  observe(memory, [Visit(prompt, epoch, solved, judged)])  ->  memory
    before one:    rests(memory, prompt, epoch)  ->  skip it this time

A prompt that was solved by every sample, or by none, on ``patience`` visits in a row rests for ``rest`` epochs; if the
next visit says the same it rests again, twice as long (at most ``longest``). Any other visit starts the count anew.
Pure values that become JSON, because they are part of the state of a run. Our own rule: elsewhere prompts are weighed
by their success rate (Kimi k1.5, arXiv:2501.12599) or solved ones removed for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Visit:
    prompt_id: str
    epoch: int
    solved: int  # samples with a right answer
    judged: int  # samples with a verdict

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.judged:
            raise ValueError(f"{self.solved} of {self.judged} samples cannot be right (prompt {self.prompt_id})")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    visits: int = 0
    solved: int = 0  # over all visits, as judged
    judged: int = 0
    streak: int = 0  # visits in a row that were all right (positive) or all wrong (negative)
    rests: int = 0  # rests in a row
    until: int = 0  # first epoch in which it is tried again


@dataclass(frozen=True, slots=True)
class DifficultyMemory:
    patience: int
    rest: int
    longest: int = 64
    records: Mapping[str, PromptRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.patience, self.rest, self.longest) < 1:
            raise ValueError(
                f"patience, rest and longest must be at least 1: {self.patience}, {self.rest}, {self.longest}"
            )

    def to_json(self) -> dict[str, Any]:
        return {"records": {prompt: asdict(record) for prompt, record in self.records.items()}}

    def restored(self, state: Mapping[str, Any]) -> DifficultyMemory:
        """The memory of a saved run under this one's settings."""
        return replace(self, records={prompt: PromptRecord(**record) for prompt, record in state["records"].items()})


def observe(memory: DifficultyMemory, visits: Iterable[Visit]) -> DifficultyMemory:
    """The memory after one step's visits. A visit without a verdict says nothing and changes nothing."""
    records = dict(memory.records)
    for visit in visits:
        if visit.judged:
            records[visit.prompt_id] = _after(records.get(visit.prompt_id, PromptRecord()), visit, memory)
    return replace(memory, records=records)


def rests(memory: DifficultyMemory, prompt_id: str, epoch: int) -> bool:
    record = memory.records.get(prompt_id)
    return record is not None and epoch < record.until


def _after(record: PromptRecord, visit: Visit, memory: DifficultyMemory) -> PromptRecord:
    verdict = 1 if visit.solved == visit.judged else -1 if visit.solved == 0 else 0
    same = verdict != 0 and record.streak * verdict >= 0
    streak = record.streak + verdict if same else verdict
    tired = abs(streak) >= memory.patience
    rests_so_far = record.rests if same else 0
    length = min(memory.rest << min(rests_so_far, 30), memory.longest)
    return PromptRecord(
        visits=record.visits + 1,
        solved=record.solved + visit.solved,
        judged=record.judged + visit.judged,
        streak=streak,
        rests=rests_so_far + 1 if tired else rests_so_far,
        until=visit.epoch + 1 + length if tired else visit.epoch + 1,
    )
