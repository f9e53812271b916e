"""``code``: runs tests against the Python in a completion, in a sandbox, out of the program's reach.

The program is the last complete fenced block (```python … ```), else the whole completion if it is Python. The row's
answer says how it is tested:

    "assert f(1) == 2"  or a list of such texts     each text is one test
    {"tests": text or list, "setup": text, "entry_point": name}   HumanEval's check(candidate) with entry_point
    {"inputs": [text, …], "outputs": [text, …]}     a program that reads its input and prints

Tests run in a second sandbox: what they expect is never where the program could see or change it. Anything that the
program does wrong, also running out of time or memory, is a wrong answer; a sandbox that does not start is an error.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeGuard

from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Options, Part, register
from grpo_dist.verifiers.sandbox import Level, Limits, Watch, Way, demand, started

_START_SECONDS = 30.0
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class CodeOptions(Options):
    isolation: Level = Field("namespaces", description="The least isolation that code may run with; less is refused.")
    seconds: float = Field(5.0, gt=0, description="Wall time for all tests of one completion together.")
    memory_mb: int = Field(1024, ge=64, description="Of the program and all that it starts.")
    processes: int = Field(16, ge=1, description="That the program may have at a time, threads included.")
    disk_mb: int = Field(64, ge=1, description="Of its scratch folder.")
    packages: bool = Field(False, description="Installed packages may be imported, not only the standard library.")
    partial: bool = Field(False, description="The part is the share of tests passed; false: all or nothing.")

    def limits(self) -> Limits:
        return Limits(self.seconds, self.memory_mb << 20, self.processes, self.disk_mb << 20)


def code_options(options: CodeOptions) -> CodeOptions:
    demand(options.isolation)  # raises ValueError
    return options


def last_program(completion: str) -> str | None:
    blocks = [
        code for language, code in _FENCE.findall(completion) if language.lower() in ("", "python", "py", "python3")
    ]
    if blocks:
        return str(blocks[-1])
    return completion if "```" not in completion and completion.strip() and _compiles(completion) else None


def _compiles(code: str) -> bool:
    try:
        compile(code, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def code_gold(answer: Any, options: CodeOptions) -> str | None:
    shape = "tests: a text, a list of texts, {tests, setup, entry_point} or {inputs, outputs}"
    if isinstance(answer, dict) and "inputs" in answer:
        inputs, outputs = answer.get("inputs"), answer.get("outputs")
        good = (
            _texts(inputs) and _texts(outputs) and len(inputs) == len(outputs) and set(answer) == {"inputs", "outputs"}
        )
        return None if good else f"as many outputs as inputs, all of them texts, not {found(answer)}"
    plan = _plan(answer)
    if plan is None:
        return f"{shape}, not {found(answer)}"
    for code in (plan["setup"], *plan["tests"]):
        if not _compiles(code):
            return f"tests in Python, not {found(code)}"
    return None


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _plan(answer: Any) -> dict[str, Any] | None:
    plan = answer if isinstance(answer, dict) else {"tests": answer}
    tests = plan.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    setup, entry = plan.get("setup", ""), plan.get("entry_point")
    known = set(plan) <= {"tests", "setup", "entry_point"}
    if not known or not _texts(tests) or not all(test.strip() for test in tests) or not isinstance(setup, str):
        return None
    return {"tests": tests, "setup": setup, "entry_point": entry} if entry is None or isinstance(entry, str) else None


@register("code", CodeOptions, gold=code_gold, prepare=code_options)
def code(item: VerifyItem, options: CodeOptions) -> Part:
    if problem := code_gold(item.answer, options):
        raise ValueError(f"the gold had to be {problem}")
    program = last_program(item.completion)
    if program is None:
        return Part(0.0, False)
    way = demand(options.isolation)
    if isinstance(item.answer, dict) and "inputs" in item.answer:
        pairs = list(zip(item.answer["inputs"], item.answer["outputs"], strict=True))
        passed, total = _run_programs(way, options, program, pairs), len(pairs)
    else:
        plan = _plan(item.answer)
        assert plan is not None
        passed, total = _run_tests(way, options, program, plan), len(plan["tests"])
    return Part(passed / total if options.partial else float(passed == total), passed == total)


def _run_tests(way: Way, options: CodeOptions, program: str, plan: dict[str, Any]) -> int:
    """Tests passed. Raises RuntimeError when a sandbox does not start."""
    limits = options.limits()
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        read, write = os.pipe()
        stack.callback(os.close, read)
        start: Callable[..., subprocess.Popen[bytes]] = lambda setup, fds: stack.enter_context(  # noqa: E731
            started(way, limits, setup, fds, packages=options.packages)
        )
        try:
            solution = start({"mode": "calls", "code": program, "channel": theirs.fileno()}, [theirs.fileno()])
            tester = start({"mode": "tests", "channel": ours.fileno(), "result": write, **plan}, [ours.fileno(), write])
        finally:
            os.close(write)
        ours.close()
        theirs.close()
        passed = 0
        for said in _results(read, limits, [solution, tester]):
            passed += said.get("passed", False)
        return passed


def _results(read: int, limits: Limits, processes: list[subprocess.Popen[bytes]]) -> Any:
    """The lines of a result pipe until it ends or the time is up; the clock starts with the line "started"."""
    buffer = b""
    watch = Watch(Limits(seconds=_START_SECONDS, memory_bytes=1 << 62, processes=1 << 20), [])
    has_started = False
    while (left := watch.left()) > 0:
        if not select.select([read], [], [], min(left, 0.02))[0]:
            continue
        data = os.read(read, 65536)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said.get("started"):
                has_started = True
                watch = Watch(limits, processes)
            yield said
    if not has_started:
        raise RuntimeError("the sandbox did not start")


def _run_programs(way: Way, options: CodeOptions, program: str, pairs: list[tuple[str, str]]) -> int:
    """Outputs that are right; without ``partial`` the first wrong one ends it. One clock for all of them."""
    passed, seconds = 0, options.seconds
    for text, wanted in pairs:
        limits = options.limits()
        right, used = _run_program(way, Limits(seconds, *_rest(limits)), options.packages, program, text, wanted)
        seconds -= used
        passed += right
        if seconds <= 0 or (not right and not options.partial):
            break
    return passed


def _rest(limits: Limits) -> tuple[int, int, int, int]:
    return limits.memory_bytes, limits.processes, limits.disk_bytes, limits.output_bytes


def _run_program(way: Way, limits: Limits, packages: bool, program: str, text: str, wanted: str) -> tuple[bool, float]:
    read, write = os.pipe()
    try:
        try:
            setup = {"mode": "program", "code": program, "result": write}
            context = started(way, limits, setup, [write], packages=packages)
            process = context.__enter__()
        finally:
            os.close(write)
        try:
            for said in _results(read, limits, [process]):
                if said.get("started"):
                    break
            watch = Watch(limits, [process])
            output = _communicate(process, text.encode(errors="replace"), limits, watch)
            right = output is not None and _ended_well(process, watch) and _same_text(output, wanted)
            return right, limits.seconds - watch.left()
        finally:
            context.__exit__(None, None, None)
    finally:
        os.close(read)


def _communicate(process: subprocess.Popen[bytes], text: bytes, limits: Limits, watch: Watch) -> bytes | None:
    """Everything the program prints; None when it is too much or does not end in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    to, out = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(to, False)
    printed = b""
    while (left := watch.left()) > 0:
        writing = [to] if text else []
        readable, writable, _ = select.select([out], writing, [], min(left, 0.02))
        if writable:
            try:
                text = text[os.write(to, text[:65536]) :]
            except BrokenPipeError:  # it does not read its input
                text = b""
        if not text and not process.stdin.closed:
            process.stdin.close()
        if readable:
            data = os.read(out, 65536)
            printed += data
            if not data:
                return printed
            if len(printed) > limits.output_bytes:
                return None
    return None


def _ended_well(process: subprocess.Popen[bytes], watch: Watch) -> bool:
    try:
        return process.wait(timeout=max(watch.left(), 0.001)) == 0
    except subprocess.TimeoutExpired:  # its output is closed, but it goes on
        return False


def _same_text(printed: bytes, wanted: str) -> bool:
    """Line by line, without the white space at the ends of lines and after the last."""
    lines = [line.rstrip() for line in printed.decode(errors="replace").rstrip().splitlines()]
    return lines == [line.rstrip() for line in wanted.rstrip().splitlines()]
