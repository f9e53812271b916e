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
from grpo_dist.errors import RecipeError, WorkerLost
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
        verdicts = await pool.score([item(r"\boxed{4}" if i % 3 == 0 else "5") for i in range(100)])
        assert [verdict.reward for verdict in verdicts] == [1.0 if i % 3 == 0 else 0.0 for i in range(100)]
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
        calls = [pool.score([item("4")] * 3) for _ in range(2)]
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [RecipeError] * 2

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


TOWER = r"\boxed{7^{7^{7^{7}}}}"


def test_one_endless_answer_among_a_thousand_holds_up_nobody() -> None:
    """The others are all back before it is given up, none is charged for it, and memory stays where it was."""

    async def body(pool: VerifierPool) -> None:
        done: list[str] = []

        async def one(completion: str, name: str) -> Any:
            (verdict,) = await pool.score([item(completion, name=name)])
            done.append(name)
            return verdict

        calls = [one(r"\boxed{4}", f"easy {i}") for i in range(999)]
        verdicts = await asyncio.gather(one(TOWER, "tower"), *calls)
        assert done[-1] == "tower"
        assert len(done) == 1000
        assert verdicts[0].reward is None
        assert verdicts[0].timed_out
        assert "no verdict within 6 s" in (verdicts[0].error or "")
        assert [verdict.reward for verdict in verdicts[1:]] == [1.0] * 999
        assert pool.counts.timeouts == 1
        assert pool.counts.started <= 3  # the tower's child, one beside it, and one more after it

    run(body, [{"name": "math"}], timeout=6.0)


HANGS: dict[str, dict[str, Any]] = {
    "regex": {"name": "regex", "pattern": "(a+)+$"},
    "exact": {"name": "exact", "pattern": "((?:a+)+)$"},
    "json_schema": {"name": "json_schema", "schema": {"type": "string", "pattern": "^(a+)+$"}},
    "command": {"name": "command:/bin/sh -c 'grep -q aaaa && sleep 1000; echo true'"},
}


@pytest.mark.parametrize("name", HANGS)
def test_a_verifier_that_hangs(name: str) -> None:
    """Beside `math` above, `python:` below, and `code` and `judge`, which end before the pool's own limit."""
    hang = '"' + "a" * 40 + '!"' if name == "json_schema" else "a" * 40 + "!"

    async def body(pool: VerifierPool) -> None:
        verdicts = await pool.score([item(hang), item('"aaa"' if name == "json_schema" else "aaa", "aaa")])
        assert (verdicts[0].reward, verdicts[0].timed_out) == (None, True)
        assert verdicts[1].reward == 1.0
        assert len(pool.pids) <= 1

    run(body, [HANGS[name]], timeout=1.0)


def test_quick_items_behind_a_stuck_one_are_taken_back() -> None:
    """A child is given several quick items ahead; the ones behind a stuck one are neither charged nor lost."""

    async def body(pool: VerifierPool) -> None:
        await pool.score([item("1")] * 50)  # the pool learns that verdicts are quick
        code = ["1"] * 20 + ["time.sleep(1000)"] + ["1"] * 40
        (child,) = pool.pids
        verdicts = await pool.score([item(text, name=str(i)) for i, text in enumerate(code)])
        assert [verdict.timed_out for verdict in verdicts] == [i == 20 for i in range(61)]
        assert [verdict.reward for verdict in verdicts] == [None if i == 20 else 1.0 for i in range(61)]
        assert pool.counts.verdicts == 111
        assert child not in pool.pids

    run(body, [{"name": "python:pool_rewards:do"}], timeout=2.0)


def test_stuck_children_are_replaced_and_the_pool_is_its_size_again() -> None:
    async def body(pool: VerifierPool) -> None:
        verdicts = await pool.score([*[item(TOWER)] * 4, *[item(r"\boxed{4}")] * 20])
        assert [verdict.timed_out for verdict in verdicts] == [True] * 4 + [False] * 20
        assert [verdict.reward for verdict in verdicts[4:]] == [1.0] * 20
        assert pool.counts.timeouts == 4
        assert pool.counts.verdicts == 24
        assert len(pool.pids) <= 2
        assert pool._nursery is not None
        children = Path(f"/proc/{pool._nursery.process.pid}/task/{pool._nursery.process.pid}/children")
        for _ in range(100):
            if len(children.read_text().split()) <= 2:
                break
            await asyncio.sleep(0.05)
        assert len(children.read_text().split()) <= 2

    run(body, [{"name": "math"}], timeout=2.0, children=2)


@pytest.mark.parametrize("children", [1, 2, 8])
def test_waiting_is_not_charged(children: int) -> None:
    """64 answers that take 0.05 s each, under a limit of 2 s: one by one, the last waits for longer than that."""

    async def body(pool: VerifierPool) -> None:
        verdicts = await pool.score([item("x") for _ in range(64)])
        assert [verdict.reward for verdict in verdicts] == [1.0] * 64
        assert pool.counts.timeouts == 0

    run(body, [{"name": "python:pool_rewards:slow"}], timeout=2.0, children=children)


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "pool_rewards.py").write_text(
        "import ctypes, os, signal, subprocess, sys, time\n"
        "def slow(item):\n"
        "    time.sleep(0.05)\n"
        "    return True\n"
        "def do(item):\n"
        "    exec(item.completion, globals())\n"
        "    return True\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


MISBEHAVIOUR = {
    "while True: pass": "no verdict within",
    "time.sleep(1000)": "no verdict within",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)": "no verdict within",
    "os.kill(os.getpid(), signal.SIGSTOP)": "no verdict within",
    "sum(9**9**9 for _ in range(9))": "no verdict within",  # inside one C call
    "os._exit(0)": "died, twice",
    "os.kill(os.getpid(), signal.SIGKILL)": "died, twice",
    "ctypes.string_at(0)": "died, twice",
    "bytearray(8 << 30)": "MemoryError",
    "[0] * (1 << 30)": "MemoryError",
    "def f(): f()\nf()": "RecursionError",
    "raise KeyError('x')": "KeyError",
    "sys.exit(3)": "died, twice",
    "raise KeyboardInterrupt": "died, twice",
    "str(10**6000)": "ValueError",
    "raise ValueError('\\ud800' * 1000)": "ValueError",
}


def test_every_misbehaviour_costs_only_its_own_sample() -> None:
    async def body(pool: VerifierPool) -> None:
        bad = [item(code, name=code) for code in MISBEHAVIOUR]
        verdicts = await pool.score([one for pair in zip(bad, [item("1")] * len(bad), strict=True) for one in pair])
        for code, verdict in zip(MISBEHAVIOUR, verdicts[::2], strict=True):
            assert verdict.reward is None, code
            assert MISBEHAVIOUR[code] in (verdict.error or ""), (code, verdict.error)
        assert [verdict.reward for verdict in verdicts[1::2]] == [1.0] * len(bad)
        assert len(pool.pids) <= 2
        assert len(pool.counts.slowest) == 10

    run(body, [{"name": "python:pool_rewards:do"}], timeout=1.5, children=2, memory_bytes=1 << 30)


def test_what_a_verifier_starts_goes_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    start = (
        f"p = subprocess.Popen(['sleep', '1000'], start_new_session=True); print(p.pid, file=open({str(note)!r}, 'a'))"
    )

    async def body(pool: VerifierPool) -> None:
        write = f"print(os.getpid(), file=open({str(note)!r}, 'a'))"
        daemon = f"os.fork() or (os.setsid(), os.fork() and os._exit(0), {write}, time.sleep(1000))"
        verdicts = await pool.score([item(start + "\nwhile True: pass"), item(daemon), item(start + "\nos._exit(1)")])
        assert verdicts[1].reward == 1.0
        pids = [int(line) for line in note.read_text().split()]
        assert len(pids) >= 3
        assert await gone(pids)

    run(body, [{"name": "python:pool_rewards:do"}], timeout=1.0)


def test_printing_does_not_mix_with_verdicts() -> None:
    async def body(pool: VerifierPool) -> None:
        code = "print('{\"reward\": 9}'); sys.stdout.flush(); os.write(1, b'{}\\n')"
        assert [verdict.reward for verdict in await pool.score([item(code)] * 3)] == [1.0] * 3

    run(body, [{"name": "python:pool_rewards:do"}])


def test_killed_in_the_middle_every_sample_is_scored_once() -> None:
    async def body(pool: VerifierPool) -> None:
        await pool.start()
        scoring = asyncio.ensure_future(pool.score([item("x", name=str(i)) for i in range(100)]))
        for _ in range(6):
            await asyncio.sleep(0.25)
            for pid in pool.pids[:1]:
                os.kill(pid, signal.SIGKILL)
        verdicts = await scoring
        assert [verdict.reward for verdict in verdicts] == [1.0] * 100
        assert pool.counts.verdicts == 100
        assert pool.counts.deaths >= 3

    run(body, [{"name": "python:pool_rewards:slow"}], children=2)


@pytest.mark.parametrize("waiting", [0, 3])
def test_closing_tells_whoever_waits(waiting: int) -> None:
    """Also a call of which nothing is queued any more: all of it is with children."""

    async def body(pool: VerifierPool) -> None:
        scoring = asyncio.ensure_future(pool.score([item("time.sleep(1000)"), *[item("1")] * waiting]))
        async with asyncio.timeout(60):
            while not pool._busy:
                await asyncio.sleep(0.05)
        assert bool(pool._queue) == bool(waiting)
        await pool.close()
        with pytest.raises(WorkerLost, match="closed while it was scoring"):
            await scoring

    run(body, [{"name": "python:pool_rewards:do"}])


def test_a_cancelled_call_leaves_its_places_free() -> None:
    async def body(pool: VerifierPool) -> None:
        scoring = asyncio.ensure_future(pool.score([item("while True: pass")] * 6))
        await asyncio.sleep(0.5)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert [verdict.reward for verdict in await pool.score([item("1")] * 4)] == [1.0] * 4
        async with asyncio.timeout(60):  # a child may still be on its way that was asked for before
            while pool._hiring:
                await asyncio.sleep(0.01)
        assert len(pool.pids) <= 2
        assert not pool._busy
        assert pool._room() == 2

    run(body, [{"name": "python:pool_rewards:do"}], children=2, timeout=5.0)
