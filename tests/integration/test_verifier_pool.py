"""The judging processes: limits, replacement, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.pool import VerifierPool


def item(completion: str, answer: Any = "4", name: str = "x") -> VerifyItem:
    return VerifyItem(name, "2+2=", completion, "stop", answer)


def run(
    body: Callable[[VerifierPool], Awaitable[None]], uses: list[dict[str, Any]] | None = None, **options: Any
) -> None:
    async def with_pool() -> None:
        pool = VerifierPool(
            [VerifierUse.model_validate(use) for use in uses or [{"name": "numeric"}]], **{"timeout": 10.0} | options
        )
        try:
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(with_pool())


def alive(pid: int) -> bool:
    """Not gone, and not a zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: list[int]) -> bool:
    for _ in range(200):
        if not any(map(alive, pids)):
            return True
        await asyncio.sleep(0.05)
    return False


def test_verdicts_come_back_in_order() -> None:
    async def body(pool: VerifierPool) -> None:
        verdicts = await pool.score([item(r"\boxed{4}" if i % 3 == 0 else "5") for i in range(60)])
        assert [verdict.reward for verdict in verdicts] == [1.0 if i % 3 == 0 else 0.0 for i in range(60)]
        assert pool.counts.started == 1

    run(body)


def test_texts_that_break_framing() -> None:
    async def body(pool: VerifierPool) -> None:
        texts = ["", "\n\n4", "\x00\x01\xff 4", "\ud800 4", "4" + " " * 1_000_000, "é" * 100_000 + " 4", '{"a": "}\n4']
        verdicts = await pool.score([item(text) for text in texts])
        assert [verdict.reward for verdict in verdicts] == [0.0] + [1.0] * 6

    run(body)


def test_unknown_verifier_is_the_users_error() -> None:
    async def body(pool: VerifierPool) -> None:
        with pytest.raises(RecipeError, match="numeric"):
            await pool.start()

    run(body, [{"name": "numerik"}])


def test_killed_child_costs_nothing() -> None:
    async def body(pool: VerifierPool) -> None:
        await pool.score([item("4")])
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        verdicts = await pool.score([item("4") for _ in range(5)])
        assert [verdict.reward for verdict in verdicts] == [1.0] * 5
        assert pool.counts.deaths == 1
        assert len(pool.pids) == 1

    run(body)


def test_killed_nursery_is_replaced() -> None:
    async def body(pool: VerifierPool) -> None:
        await pool.score([item("4")])
        assert pool._nursery is not None
        os.kill(pool._nursery.process.pid, signal.SIGKILL)
        verdicts = await pool.score([item("4") for _ in range(5)])
        assert [verdict.reward for verdict in verdicts] == [1.0] * 5

    run(body)


def test_close_leaves_no_child() -> None:
    seen: list[int] = []

    async def body(pool: VerifierPool) -> None:
        await pool.score([item("4") for _ in range(8)])
        assert pool._nursery is not None
        seen.extend([*pool.pids, pool._nursery.process.pid])

    run(body, children=3)
    assert asyncio.run(gone(seen))
