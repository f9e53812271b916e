"""The verifier pool against a bare loop over the same answers, in turns, in one run.

    python -m benchmarks.verifiers [--rows 400] [--workers 2] [--rounds 3]

math        answers that need math-verify (no number or word decides them early). Four sides, each in fresh processes:
            one process that calls math-verify in a loop; as many such loops as workers, at once (what this machine can
            give); one process that calls our `math` in a loop; and the pool, its start not counted.
            Beside the rates, CPU time per answer (the pool's with its own process): what idle cores would give, also on
            a machine that is busy with other things.
cheap       `exact` in batches of 16 through the pool, and through the Ray actor: a verdict's time beyond its own.
endless     a thousand numbers with one answer among them that never ends: when the others were back, and the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from grpo_dist.config import VerifiersSection, VerifierUse
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.registry import build
from grpo_dist.verifiers.score import verdicts

BATCH = 16
TOWER = r"\boxed{7^{7^{7^{7}}}}"


def math_rows(count: int) -> list[tuple[str, str]]:
    """(completion, gold), no two alike; half of them wrong."""
    draw = random.Random(0)
    rows = []
    for i in range(count):
        a, b, c = (draw.randint(2, 99) + 100 * (i // 7) for _ in range(3))
        right, gold = (
            (rf"\frac{{{a}x}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}x"), (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}}\cdot {a}"),
            (rf"({a}, {a + b}]", rf"({a},{a + b}]"), (rf"\{{{a}, {b}, {c}\}}", rf"\{{{c},{b},{a}\}}"),
            (rf"x^2+{a}x+{b}", rf"{b}+x^2+{a}x"), (rf"({a},{b},{c})", rf"({a}, {b}, {c})"),
            (rf"{a}\pi+{b}", rf"{b}+{a}\pi"),
        )[i % 7]  # fmt: skip
        said = right if i % 2 else right.replace(str(a), str(a + 1))
        rows.append((rf"We add them up, step by step, and so \boxed{{{said}}}.", gold))
    return rows


def items(rows: Sequence[tuple[str, str]]) -> list[VerifyItem]:
    return [VerifyItem(str(i), "?", text, "stop", gold) for i, (text, gold) in enumerate(rows)]


def bare(side: str, rows: int) -> tuple[float, float]:
    """(answers per second, CPU seconds per answer) of a loop in this process; run by ``loops`` in fresh ones."""
    made = math_rows(rows)
    if side == "math-verify":
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
        parse("$1$", parsing_timeout=None)
        began, cpu = time.perf_counter(), time.process_time()
        for text, gold in made:
            verify(parse(f"${gold}$", parsing_timeout=None), parse(text, parsing_timeout=None), timeout_seconds=None)
    else:
        judge = build([VerifierUse(name="math")])
        began, cpu = time.perf_counter(), time.process_time()
        for item in items(made):
            judge.judge(item)
    return rows / (time.perf_counter() - began), (time.process_time() - cpu) / rows


def loops(side: str, rows: int, at_once: int) -> tuple[float, float]:
    """(answers per second of so many loops together, CPU seconds per answer)."""
    command = [sys.executable, "-m", "benchmarks.verifiers", "--bare", side, "--rows", str(rows)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(at_once)]
    said = [json.loads(one.communicate()[0]) for one in running]
    return sum(rate for rate, _ in said), statistics.mean(cpu for _, cpu in said)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of this process and others, with the children that each has reaped."""
    ticks = 0
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def pool_rate(rows: int, workers: int) -> tuple[float, float]:
    pool = VerifierPool([VerifierUse(name="math")], timeout=60, children=workers)
    try:
        await pool.start()
        assert pool._nursery is not None
        nursery = pool._nursery.process.pid
        began, cpu = time.perf_counter(), cpu_seconds([nursery])
        count = 0
        async for verdict in verdicts(pool, iter(items(math_rows(rows))), workers):
            assert verdict.error is None, verdict.error
            count += 1
        seconds = time.perf_counter() - began
        return count / seconds, (cpu_seconds([nursery, *pool.pids]) - cpu) / count
    finally:
        await pool.close()


def measure_math(rows: int, workers: int, rounds: int) -> dict[str, Any]:
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "math_verify_loop": lambda: loops("math-verify", rows, 1),
        "pool": lambda: asyncio.run(pool_rate(rows, workers)),
        "math_verify_loops": lambda: loops("math-verify", rows, workers),
        "our_loop": lambda: loops("ours", rows, 1),
    }
    turns = [{name: side() for name, side in sides.items()} for _ in range(rounds)]
    rates = {name: [turn[name][0] for turn in turns] for name in sides}
    median = {name: statistics.median(values) for name, values in rates.items()}
    cpu = {name: statistics.median(turn[name][1] for turn in turns) for name in sides}
    return {
        **{f"{name}_per_second": round(value, 1) for name, value in median.items()},
        **{f"{name}_cpu_ms": round(value * 1e3, 3) for name, value in cpu.items()},
        "cpu_ratio": round(cpu["math_verify_loop"] / cpu["pool"], 3),
        "cpu_ratio_to_our_loop": round(cpu["our_loop"] / cpu["pool"], 3),
        "ratio": round(median["pool"] / (workers * median["math_verify_loop"]), 3),
        "ratio_to_loops_at_once": round(median["pool"] / median["math_verify_loops"], 3),
        "ratio_to_our_loop": round(median["pool"] / (workers * median["our_loop"]), 3),
        "ratio_by_round": [
            round(p / (workers * m), 3) for p, m in zip(rates["pool"], rates["math_verify_loop"], strict=True)
        ],
    }


CHEAP = [VerifyItem(str(i), "?", rf"so \boxed{{{i % 9}}}", "stop", "4") for i in range(2048)]


def batches() -> list[list[VerifyItem]]:
    return [CHEAP[i : i + BATCH] for i in range(0, len(CHEAP), BATCH)]


def alone() -> float:
    """Seconds of a cheap verdict by itself."""
    judge = build([VerifierUse(name="exact")])
    began = time.perf_counter()
    for item in CHEAP:
        judge.judge(item)
    return (time.perf_counter() - began) / len(CHEAP)


async def pool_cheap(workers: int) -> float:
    pool = VerifierPool([VerifierUse(name="exact")], timeout=10, children=workers)
    try:
        await pool.score(CHEAP[:64])
        began = time.perf_counter()
        await asyncio.gather(*(pool.score(batch) for batch in batches()))
        return (time.perf_counter() - began) / len(CHEAP)
    finally:
        await pool.close()


def ray_cheap(workers: int) -> float:
    import ray

    from grpo_dist.verifiers.worker import VerifierWorker

    section = VerifiersSection(use=(VerifierUse(name="exact"),), children=workers)
    actor = ray.remote(VerifierWorker).options(max_concurrency=1000).remote(section)
    ray.get(actor.ready.remote())
    ray.get(actor.score.remote(CHEAP[:64]))
    began = time.perf_counter()
    ray.get([actor.score.remote(batch) for batch in batches()])
    seconds = (time.perf_counter() - began) / len(CHEAP)
    ray.kill(actor)
    return seconds


def measure_cheap(workers: int, rounds: int) -> dict[str, float]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        rows = [(alone(), asyncio.run(pool_cheap(workers)), ray_cheap(workers)) for _ in range(rounds)]
    finally:
        ray.shutdown()
    own, pool, actor = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "verdict_ms": round(own * 1e3, 4),
        "overhead_pool_ms": round((pool - own) * 1e3, 4),
        "overhead_ray_ms": round((actor - own) * 1e3, 4),
    }


def resident_bytes(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


async def endless(rows: int, workers: int, *, with_tower: bool) -> dict[str, float]:
    """Seconds until every other answer was back, and until all were; and the children's memory at its highest."""
    pool = VerifierPool([VerifierUse(name="math")], timeout=10, children=workers)
    made = items([(rf"so \boxed{{{i}}}", str(i)) for i in range(rows)])
    if with_tower:
        made[rows // 10] = VerifyItem("tower", "?", TOWER, "stop", "4")
    back: list[float] = []
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, resident_bytes(pool.pids))
            await asyncio.sleep(0.1)

    async def one(item: VerifyItem) -> None:
        (verdict,) = await pool.score([item])
        assert verdict.timed_out or item.id != "tower"
        back.append(time.perf_counter() - began)

    try:
        await pool.start()
        looking = asyncio.ensure_future(look())
        began = time.perf_counter()
        await asyncio.gather(*map(one, made))
        looking.cancel()
        return {"others": round(back[rows - 1 - with_tower], 2), "all": round(back[-1], 2), "memory": most}
    finally:
        await pool.close()


def measure(rows: int, workers: int, rounds: int) -> dict[str, Any]:
    plain, tower = (asyncio.run(endless(1000, workers, with_tower=tower)) for tower in (False, True))
    return {
        "benchmark": "verifiers",
        "rows": rows,
        "workers": workers,
        "rounds": rounds,
        "math": measure_math(rows, workers, rounds),
        "cheap": measure_cheap(1, rounds),
        "endless": {
            "seconds_of_1000": plain["all"],
            "seconds_of_the_other_999": tower["others"],
            "seconds_of_all": tower["all"],
            "children_mb": round(tower["memory"] / 1e6),
            "children_mb_without": round(plain["memory"] / 1e6),
        },
    }


def show(result: dict[str, Any]) -> None:
    math, workers = result["math"], result["workers"]
    table = Table(title=f"{result['rows']} math answers, {workers} workers")
    for column in ("", "answers/s", f"pool : {workers} of these"):
        table.add_column(column, justify="right")
    table.add_row("one loop over math-verify", f"{math['math_verify_loop_per_second']:,.0f}", f"{math['ratio']:.3f}")
    table.add_row(
        f"{workers} such loops at once", f"{math['math_verify_loops_per_second']:,.0f}",
        f"{math['ratio_to_loops_at_once']:.3f} (of all)",
    )  # fmt: skip
    table.add_row("one loop over our math", f"{math['our_loop_per_second']:,.0f}", f"{math['ratio_to_our_loop']:.3f}")
    table.add_row("the pool", f"{math['pool_per_second']:,.0f}", "1")
    console = Console(stderr=True)
    console.print(table)
    console.print(
        f"CPU per answer: math-verify {math['math_verify_loop_cpu_ms']} ms, our math {math['our_loop_cpu_ms']} ms, the "
        f"pool with all its processes {math['pool_cpu_ms']} ms: {math['cpu_ratio']} x math-verify"
    )
    for name in ("cheap", "endless"):
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result[name].items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", choices=("math-verify", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.bare:
        print(json.dumps(bare(options.bare, options.rows)))
        return
    result = measure(options.rows, options.workers, options.rounds)
    print(json.dumps(result))
    show(result)


if __name__ == "__main__":
    main()
