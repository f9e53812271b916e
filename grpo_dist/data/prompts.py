"""Rows -> checked, tokenised prompts -> a stream in which group id n always means the same prompt and the same seed.

    read_rows -> check (prompt, answer, verifier, id) -> template -> tokens -> drop over-long -> hold out -> stream

The stream has no state: the cursor of a run is the next group id. Epoch = id // len(stream), and each epoch has its own
order, fixed by the seed. Tokens of all prompts live in one flat array, so that 200,000 rows are cheap to hold.
Leaves out: how files are read (sources.py), what a good gold is (the verifiers).
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.config import DataColumns, DataSection
from grpo_dist.data.sources import GENERATED, Problems, Row, generated_rows, json_value, read_rows
from grpo_dist.data.split import content_key, hold_out
from grpo_dist.data.template import PromptTemplate, lone_surrogate
from grpo_dist.errors import DataError
from grpo_dist.rollout.seeds import group_seed
from grpo_dist.types import GroupRequest, IntArray, Prompt
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Judge

_CHUNK = 2048  # rows tokenised at a time


@dataclass(slots=True)
class PromptTable:
    """Prompts by row, held compactly; ``prompt(row)`` builds one."""

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    verifiers: list[str | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    tokens: array.array[int] = field(default_factory=lambda: array.array("i"))
    ends: array.array[int] = field(default_factory=lambda: array.array("q", [0]))  # [rows + 1]
    too_long: int = 0
    longest: int = 0  # tokens, over-long ones included

    def __len__(self) -> int:
        return len(self.ids)

    def prompt(self, row: int) -> Prompt:
        return Prompt(
            id=self.ids[row],
            token_ids=tuple(self.tokens[self.ends[row] : self.ends[row + 1]]),
            text=self.texts[row],
            answer=self.answers[row],
            verifier=self.verifiers[row],
            source=self.sources[row],
            extra=self.extras[row],
        )


class PromptStream:
    """The training prompts in the order of group ids, and the evaluation prompts.

    ``dropped`` counts rows that take no part: ``too_long`` and ``in_evaluation`` (they repeat an evaluation prompt).
    ``fingerprint`` changes when the set of training prompts does: a cursor is only good for the same one.
    """

    def __init__(
        self,
        table: PromptTable,
        rows: list[int],
        evaluation: tuple[Prompt, ...],
        *,
        seed: int,
        group_size: int,
        shuffle: bool,
        dropped: dict[str, int],
    ) -> None:
        self._table, self._rows, self._seed, self._group_size, self._shuffle = table, rows, seed, group_size, shuffle
        self.evaluation = evaluation
        self.dropped = dropped
        self._orders: dict[int, IntArray] = {}
        digest = hashlib.sha256()
        for row in rows:
            digest.update(table.ids[row].encode() + b"\0")
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._rows)

    def request(self, group_id: int) -> GroupRequest:
        """The group with this place in submission order; the same one on every call and after every resume."""
        epoch, place = divmod(group_id, len(self._rows))
        prompt = self._table.prompt(self._rows[self._order(epoch)[place]])
        return GroupRequest(group_id, epoch, prompt, group_seed(self._seed, epoch, prompt.id, self._group_size))

    def prompts(self) -> Iterator[Prompt]:
        """Each training prompt once, in file order."""
        return (self._table.prompt(row) for row in self._rows)

    def _order(self, epoch: int) -> IntArray:
        if not self._shuffle:
            epoch = 0  # one order for all
        if epoch not in self._orders:
            for old in [kept for kept in self._orders if kept < epoch - 1]:
                del self._orders[old]
            count = len(self._rows)
            order = np.random.default_rng([self._seed, epoch]).permutation(count) if self._shuffle else np.arange(count)
            self._orders[epoch] = order.astype(np.int64)
        return self._orders[epoch]


def load_prompts(
    data: DataSection, tokenizer: Any, *, seed: int, group_size: int, judge: Judge | None = None
) -> PromptStream:
    """Everything a run may ask of its data. Raises DataError that lists every bad row at once.

    Args:
        judge: the recipe's verifiers, which say whether a gold answer will do; without one it must only be there.
    """
    template = PromptTemplate(tokenizer, data.template, data.system_prompt)
    problems = Problems()
    evaluation_table: PromptTable | None = None
    if data.source in GENERATED:
        train_rows, held_out_rows = generated_rows(data.source)
        table = _tabulate(train_rows, DataColumns(), template, data.max_prompt_tokens, judge, problems)
        evaluation_table = _tabulate(held_out_rows, DataColumns(), template, data.max_prompt_tokens, judge, problems)
    else:
        rows = read_rows(data.source, data.split, problems)
        table = _tabulate(rows, data.columns, template, data.max_prompt_tokens, judge, problems)
        if data.evaluation.source is not None and data.evaluation.size:
            rows = read_rows(data.evaluation.source, data.evaluation.split, problems)
            evaluation_table = _tabulate(rows, data.columns, template, data.max_prompt_tokens, judge, problems)
    problems.raise_if_any()
    dropped = {"too_long": table.too_long, "in_evaluation": 0}
    keys = [content_key(text) for text in table.texts]
    if evaluation_table is None:
        split = hold_out(keys, data.evaluation.size)
        train, dropped["in_evaluation"] = split.train, split.excluded
        evaluation = tuple(table.prompt(row) for row in split.evaluation)
    else:
        evaluation = tuple(map(evaluation_table.prompt, range(min(len(evaluation_table), data.evaluation.size))))
        taken = {content_key(prompt.text) for prompt in evaluation}
        train = [row for row, key in enumerate(keys) if key not in taken]
        dropped["in_evaluation"] = len(keys) - len(train)
    _refuse_empty(data, table, train, evaluation)
    return PromptStream(
        table, train, evaluation, seed=seed, group_size=group_size, shuffle=data.shuffle, dropped=dropped
    )


def _refuse_empty(data: DataSection, table: PromptTable, train: list[int], evaluation: tuple[Prompt, ...]) -> None:
    if train and (evaluation or not data.evaluation.size):
        return
    if table.too_long and not len(table):
        raise DataError(
            f"data.source: all {table.too_long} prompts of {data.source} are longer than data.max_prompt_tokens "
            f"{data.max_prompt_tokens} after the template (the longest has {table.longest} tokens)"
        )
    if not len(table):
        raise DataError(f"data.source: {data.source} has no rows")
    if not train:
        raise DataError(
            f"data.evaluation.size: holding out {data.evaluation.size} of {len(table)} usable rows of {data.source} "
            "leaves none to train on"
        )
    raise DataError(f"data.evaluation.source: {data.evaluation.source} has no usable rows")


def _tabulate(
    rows: Iterable[Row],
    columns: DataColumns,
    template: PromptTemplate,
    max_tokens: int,
    judge: Judge | None,
    problems: Problems,
) -> PromptTable:
    """Check every row, tokenise the good ones and keep those that are short enough."""
    table = PromptTable()
    reader = _RowReader(columns, template, judge, problems)
    waiting: list[tuple[Row, Prompt]] = []

    def flush() -> None:
        for (row, prompt), ids in zip(waiting, template.encode([p.text for _, p in waiting]), strict=True):
            if not ids:
                problems.add(row, columns.prompt, "a prompt of at least one token", found(prompt.text))
                continue
            table.longest = max(table.longest, len(ids))
            if len(ids) > max_tokens:
                table.too_long += 1
                continue
            table.ids.append(prompt.id)
            table.texts.append(prompt.text)
            table.answers.append(prompt.answer)
            table.verifiers.append(prompt.verifier)
            table.sources.append(prompt.source)
            table.extras.append(prompt.extra)
            table.tokens.extend(ids)
            table.ends.append(len(table.tokens))
        waiting.clear()

    for row in rows:
        if (prompt := reader.read(row)) is not None:
            waiting.append((row, prompt))
        if len(waiting) == _CHUNK:
            flush()
    flush()
    return table


class _RowReader:
    """One row -> a prompt without its tokens, or problems."""

    def __init__(self, columns: DataColumns, template: PromptTemplate, judge: Judge | None, problems: Problems) -> None:
        self.columns, self.template, self.judge, self.problems = columns, template, judge, problems
        self.seen: dict[str, int] = {}

    def read(self, row: Row) -> Prompt | None:
        before = len(self.problems.listed)
        columns = self.columns
        text = self._text(row)
        chosen = self._verifier(row)
        answer = self._answer(row, chosen)
        if len(self.problems.listed) > before or text is None:
            return None
        named = {columns.prompt, columns.answer, columns.id, columns.verifier}
        extra = {key: json_value(value) for key, value in row.values.items() if key not in named}
        prompt_id = self._id(row, text, answer)
        return None if prompt_id is None else Prompt(prompt_id, (), text, answer, chosen, row.file, extra)

    def _text(self, row: Row) -> str | None:
        column = self.columns.prompt
        if column not in row.values:
            self.problems.add_missing(row, column)
            return None
        try:
            return self.template.render(row.values[column])
        except ValueError as error:
            self.problems.add(row, column, str(error), found(row.values[column]))
            return None

    def _verifier(self, row: Row) -> str | None:
        column = self.columns.verifier
        if column is None or row.values.get(column) in (None, ""):
            return None
        chosen = row.values[column]
        if not isinstance(chosen, str):
            self.problems.add(row, column, "the name of a verifier", found(chosen))
            return None
        return chosen

    def _answer(self, row: Row, chosen: str | None) -> Any:
        column = self.columns.answer
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

    def _id(self, row: Row, text: str, answer: Any) -> str | None:
        column = self.columns.id
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
        content = json.dumps([text, answer], sort_keys=True).encode()
        own = hashlib.sha256(content).hexdigest()[:16]
        times = self.seen[own] = self.seen.get(own, 0) + 1
        return own if times == 1 else f"{own}-{times}"  # the same row again: another sample of the same question
