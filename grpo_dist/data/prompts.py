"""Rows -> checked prompts -> a stream in which group id n always means the same prompt and the same seed.

    read_rows -> check (prompt, answer, verifier, id) -> drop over-long -> hold out -> PromptStream

The stream has no state: the cursor of a run is the next group id. Each source has its epochs, each epoch its own order,
fixed by the seed; mixing.py says which source a group comes from. Rows are kept as they were read and become text and
tokens when they are asked for; at load only those are tokenised whose length is in doubt, so that 200,000 rows are
quick to check and cheap to hold. Leaves out: how files are read (sources.py), what a good gold is (the verifiers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from grpo_dist.config import DataColumns, DataSection, DataSource
from grpo_dist.data.mixing import Mixture
from grpo_dist.data.sources import GENERATED, GYM, Problems, Row, generated_rows, json_value, read_rows
from grpo_dist.data.split import content_key, hold_out
from grpo_dist.data.template import PromptTemplate, lone_surrogate
from grpo_dist.errors import DataError
from grpo_dist.rollout.seeds import group_seed
from grpo_dist.types import GroupRequest, IntArray, Prompt
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Judge

_CANONICAL = json.JSONEncoder(sort_keys=True)
_CHUNK = 2048  # rows measured at a time


@dataclass(slots=True)
class PromptTable:
    """Checked rows, held as they were read; ``prompt(row)`` makes a Prompt of one."""

    template: PromptTemplate
    max_tokens: int
    ids: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # the prompt column: a text or messages
    answers: list[Any] = field(default_factory=list)
    verifiers: list[str | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    too_long: int = 0
    longest: int = 0  # tokens of the longest prompt that was measured, over-long ones included

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, row: CheckedRow) -> None:
        self.ids.append(row.id)
        self.values.append(row.value)
        self.answers.append(row.answer)
        self.verifiers.append(row.verifier)
        self.sources.append(row.place.file)
        self.extras.append(row.extra)

    def key(self, row: int) -> bytes:
        """Of the prompt's content: equal for rows that ask the same."""
        value = self.values[row]
        return content_key(value if isinstance(value, str) else json.dumps(value, sort_keys=True))

    def prompt(self, row: int) -> Prompt:
        text = self.template.render(self.values[row])
        (ids,) = self.template.encode([text])
        if len(ids) > self.max_tokens:  # the bound at load was none for this tokenizer
            raise DataError(f"prompt {self.ids[row]} has {len(ids)} tokens, more than {self.max_tokens}")
        return Prompt(
            id=self.ids[row],
            token_ids=tuple(ids),
            text=text,
            answer=self.answers[row],
            verifier=self.verifiers[row],
            source=self.sources[row],
            extra=self.extras[row],
        )


class PromptStream:
    """The training prompts in the order of group ids, and the evaluation prompts.

    ``dropped`` counts rows that take no part: ``too_long`` and ``in_evaluation`` (they repeat an evaluation prompt).
    ``fingerprint`` changes when the training prompts do: a cursor is only good for the same ones.
    """

    def __init__(
        self,
        table: PromptTable,
        rows: Sequence[Sequence[int]],
        mixture: Mixture,
        evaluation: tuple[Prompt, ...],
        *,
        seed: int,
        group_size: int,
        shuffle: bool,
        dropped: dict[str, int],
    ) -> None:
        """Args: rows of the table by source, in file order."""
        self._table, self._rows, self._mixture = table, rows, mixture
        self._seed, self._group_size, self._shuffle = seed, group_size, shuffle
        self.evaluation = evaluation
        self.dropped = dropped
        self._orders: dict[tuple[int, int], IntArray] = {}
        digest = hashlib.sha256(repr(mixture.shares if len(rows) > 1 else ()).encode())
        for row in chain.from_iterable(rows):
            digest.update(table.ids[row].encode() + b"\0")
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        """Training prompts of all sources."""
        return sum(map(len, self._rows))

    def request(self, group_id: int) -> GroupRequest:
        """The group with this place in submission order; the same one on every call and after every resume."""
        row, epoch = self._place(group_id)
        prompt = self._table.prompt(row)
        return GroupRequest(group_id, epoch, prompt, group_seed(self._seed, epoch, prompt.id, self._group_size))

    def place(self, group_id: int) -> tuple[str, int]:
        """(prompt id, epoch) of a group, without making its text and tokens."""
        row, epoch = self._place(group_id)
        return self._table.ids[row], epoch

    def _place(self, group_id: int) -> tuple[int, int]:
        source, draw = self._mixture.draw(group_id)
        epoch, place = divmod(draw, len(self._rows[source]))
        return self._rows[source][self._order(source, epoch)[place]], epoch

    def prompts(self) -> Iterator[Prompt]:
        """Each training prompt once, in file order."""
        return (self._table.prompt(row) for row in chain.from_iterable(self._rows))

    def examples(self) -> dict[str | None, Prompt]:
        """One training prompt for each choice of verifier that the rows make."""
        first: dict[str | None, int] = {}
        for row in chain.from_iterable(self._rows):
            first.setdefault(self._table.verifiers[row], row)
        return {chosen: self._table.prompt(row) for chosen, row in first.items()}

    def _order(self, source: int, epoch: int) -> IntArray:
        if not self._shuffle:
            epoch = 0  # one order for all
        if (source, epoch) not in self._orders:
            for old in [key for key in self._orders if key[0] == source and key[1] < epoch - 1]:
                del self._orders[old]
            count = len(self._rows[source])
            seeds = [self._seed, epoch] if len(self._rows) == 1 else [self._seed, epoch, source]
            order = np.random.default_rng(seeds).permutation(count) if self._shuffle else np.arange(count)
            self._orders[source, epoch] = order.astype(np.int64)
        return self._orders[source, epoch]


def load_prompts(
    data: DataSection, tokenizer: Any, *, seed: int, group_size: int, judge: Judge | None = None
) -> PromptStream:
    """Everything a run may ask of its data. Raises DataError that lists every bad row at once.

    Args:
        judge: the recipe's verifiers, which say whether a gold answer will do; without one it must only be there.
    """
    template = PromptTemplate(tokenizer, data.template, data.system_prompt)
    problems = Problems()
    table = PromptTable(template, data.max_prompt_tokens)
    own_evaluation = PromptTable(template, data.max_prompt_tokens)
    reader = _RowReader(template, judge, problems)
    ends = [0]
    for source in data.sources:
        if source.source in GENERATED:
            rows, held_out = generated_rows(source.source)
            _tabulate(held_out, own_evaluation, reader, DataColumns(), source.verifier)
            _tabulate(rows, table, reader, DataColumns(), source.verifier)
        else:
            columns = DataColumns() if source.source.startswith(GYM) else source.columns
            _tabulate(read_rows(source, problems), table, reader, columns, source.verifier)
        ends.append(len(table))
    if data.evaluation.source is not None and data.evaluation.size:
        rows_of = DataSource(source=data.evaluation.source, split=data.evaluation.split, subset=data.subset)
        columns = DataColumns() if rows_of.source.startswith(GYM) else data.columns
        _tabulate(read_rows(rows_of, problems), own_evaluation, _RowReader(template, judge, problems), columns, None)
    problems.raise_if_any()
    train, evaluation, repeated = _split(data, table, own_evaluation)
    by_source = [[row for row in train if start <= row < end] for start, end in pairwise(ends)]
    _refuse_empty(data, table, by_source, evaluation)
    return PromptStream(
        table, by_source, Mixture([source.weight for source in data.sources]), evaluation,
        seed=seed, group_size=group_size, shuffle=data.shuffle,
        dropped={"too_long": table.too_long, "in_evaluation": repeated},
    )  # fmt: skip


def _split(
    data: DataSection, table: PromptTable, own_evaluation: PromptTable
) -> tuple[list[int], tuple[Prompt, ...], int]:
    """(training rows, evaluation prompts, training rows left out because they repeat one of those)."""
    size = data.evaluation.size
    if size == 0:
        return list(range(len(table))), (), 0
    keys = [table.key(row) for row in range(len(table))]
    if not len(own_evaluation) and data.evaluation.source is None:
        split = hold_out(keys, size)
        return split.train, tuple(map(table.prompt, split.evaluation)), split.excluded
    rows = range(min(len(own_evaluation), size))
    taken = {own_evaluation.key(row) for row in rows}
    train = [row for row, key in enumerate(keys) if key not in taken]
    return train, tuple(map(own_evaluation.prompt, rows)), len(keys) - len(train)


def _refuse_empty(
    data: DataSection, table: PromptTable, by_source: Sequence[Sequence[int]], evaluation: tuple[Prompt, ...]
) -> None:
    if all(by_source) and (evaluation or not data.evaluation.size):
        return
    names = ", ".join(source.source for source in data.sources)
    if table.too_long and not len(table):
        raise DataError(
            f"data.source: all {table.too_long} prompts of {names} are longer than data.max_prompt_tokens "
            f"{data.max_prompt_tokens} after the template (the longest has {table.longest} tokens)"
        )
    if not len(table):
        raise DataError(f"data.source: {names} has no rows")
    if not any(by_source):
        raise DataError(
            f"data.evaluation.size: holding out {data.evaluation.size} of {len(table)} usable rows of {names} "
            "leaves none to train on"
        )
    for source, rows in zip(data.sources, by_source, strict=True):
        if not rows:
            raise DataError(f"data.mix: {source.source} has no rows to train on (all are over-long or held out)")
    raise DataError(f"data.evaluation.source: {data.evaluation.source} has no usable rows")


@dataclass(frozen=True, slots=True)
class CheckedRow:
    place: Row
    id: str
    value: Any
    answer: Any
    verifier: str | None
    extra: dict[str, Any]


def _tabulate(
    rows: Iterable[Row], table: PromptTable, reader: _RowReader, columns: DataColumns, verifier: str | None
) -> None:
    """Check every row and keep the good ones that are short enough, in order."""
    waiting: list[CheckedRow] = []
    for row in rows:
        if (checked := reader.read(row, columns, verifier)) is not None:
            waiting.append(checked)
        if len(waiting) == _CHUNK:
            _measure(waiting, table, reader.problems, columns)
            waiting.clear()
    _measure(waiting, table, reader.problems, columns)


def _measure(rows: list[CheckedRow], table: PromptTable, problems: Problems, columns: DataColumns) -> None:
    template = table.template
    bounds = [template.most_tokens(row.value) for row in rows]
    doubtful = [place for place, bound in enumerate(bounds) if bound is None or bound > table.max_tokens]
    encoded = template.encode([template.render(rows[place].value) for place in doubtful])
    tokens = dict(zip(doubtful, map(len, encoded), strict=True))
    for place, row in enumerate(rows):
        count = tokens.get(place)
        if count == 0:
            problems.add(row.place, columns.prompt, "a prompt of at least one token", found(row.value))
        elif count is not None and count > table.max_tokens:
            table.too_long += 1
        else:
            table.add(row)
        table.longest = max(table.longest, count or 0)


class _RowReader:
    """One row -> a checked row, or problems."""

    def __init__(self, template: PromptTemplate, judge: Judge | None, problems: Problems) -> None:
        self.template, self.judge, self.problems = template, judge, problems
        self.seen: dict[str, int] = {}

    def read(self, row: Row, columns: DataColumns, verifier: str | None) -> CheckedRow | None:
        before = len(self.problems.listed)
        value = self._value(row, columns.prompt)
        chosen = self._verifier(row, columns.verifier) or verifier
        answer = self._answer(row, columns.answer, chosen)
        if len(self.problems.listed) > before:
            return None
        named = {columns.prompt, columns.answer, columns.id, columns.verifier}
        extra = {key: json_value(inner) for key, inner in row.values.items() if key not in named}
        prompt_id = self._id(row, columns.id, value, answer)
        return None if prompt_id is None else CheckedRow(row, prompt_id, value, answer, chosen, extra)

    def _value(self, row: Row, column: str) -> Any:
        if column not in row.values:
            self.problems.add_missing(row, column)
            return None
        value = row.values[column]
        try:
            if self.template.most_tokens(value) is None:  # else it is a plain text, which renders
                self.template.render(value)
        except ValueError as error:
            self.problems.add(row, column, str(error), found(value))
        return value

    def _verifier(self, row: Row, column: str | None) -> str | None:
        if column is None or row.values.get(column) in (None, ""):
            return None
        chosen = row.values[column]
        if not isinstance(chosen, str):
            self.problems.add(row, column, "the name of a verifier", found(chosen))
            return None
        return chosen

    def _answer(self, row: Row, column: str, chosen: str | None) -> Any:
        answer = json_value(row.values.get(column))
        if column not in row.values:
            if self.judge is None or self.judge.gold_problem(None, chosen) is not None:
                self.problems.add_missing(row, column)
            return None
        if isinstance(answer, str) and lone_surrogate(answer) is not None:
            self.problems.add(row, column, "valid Unicode, without half a surrogate pair", found(answer))
        elif self.judge is not None and (wanted := self.judge.gold_problem(answer, chosen)) is not None:
            self.problems.add(row, column, wanted, found(row.values[column]))
        elif self.judge is None and answer is None:
            self.problems.add(row, column, "an answer", found(row.values[column]))
        return answer

    def _id(self, row: Row, column: str | None, value: Any, answer: Any) -> str | None:
        if column is not None:
            if column not in row.values:
                self.problems.add_missing(row, column)
                return None
            own = str(row.values[column])
            if own in self.seen:
                self.problems.add(row, column, "an id of its own", f"{own!r}, which line {self.seen[own]} has")
                return None
            self.seen[own] = row.line
            return own
        content = _CANONICAL.encode([value, answer]).encode()
        own = hashlib.sha256(content).hexdigest()[:16]
        times = self.seen[own] = self.seen.get(own, 0) + 1
        return own if times == 1 else f"{own}-{times}"  # the same row again: another sample of the same question
