"""The code verifier: honest programs get what they deserve, hostile ones get 0 and leave nothing behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers import code as code_module
from grpo_dist.verifiers import sandbox
from grpo_dist.verifiers.registry import build

SECRET = "wandb-secret-123"
ISOLATED = [level for level in sandbox.LEVELS if level != "limits" and sandbox.available(level) is not None]


@pytest.fixture(params=ISOLATED)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each level that isolates and works here, whichever is the strongest."""
    monkeypatch.setattr(code_module, "demand", lambda wanted: sandbox.available(request.param))
    return request.param


def judged(program: str, answer: Any, *, fenced: bool = True, **options: Any) -> Verdict:
    one = build([VerifierUse.model_validate({"name": "code", "isolation": "limits"} | options)])
    completion = f"Here:\n```python\n{program}\n```\nDone." if fenced else program
    return one.judge(VerifyItem("x", "?", completion, "stop", answer))


def score(program: str, answer: Any, **options: Any) -> float:
    verdict = judged(program, answer, **options)
    assert verdict.error is None
    assert verdict.reward is not None
    return verdict.reward


F = "assert f(1) == 2"

HONEST: list[tuple[str, Any, float]] = [
    ("def f(x): return x + 1", F, 1), ("def f(x): return x", F, 0), ("f = lambda x: x + 1", F, 1), ("def g(x): return 2", F, 0),
    ("def f(x) return x", F, 0), ("import math\ndef f(x): return math.floor(x + 1.5)", "assert f(1) == 2\nassert math.pi > 3", 1),
    ("def f(x): raise ValueError('no')", "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False", 1),
    ("def f(*a, **k): return (a, k)", "assert f(1, 'b', c={1, 2}) == ((1, 'b'), {'c': {1, 2}})", 1),
    ("def f(): return {1: [2.5, None, True, b'x', (3,), frozenset([4])], 'k': 10**30, 'n': float('inf'), 'z': 1j}",
     "assert f() == {1: [2.5, None, True, b'x', (3,), frozenset([4])], 'k': 10**30, 'n': float('inf'), 'z': 1j}", 1),
    ("def f(): return (1, 2)", "assert f() == [1, 2]", 0), ("def f(): return True", "assert f() is True", 1),
    ("class S:\n    def __init__(self, n): self.n = n\n    def add(self, k):\n        self.n += k\n        return self.n",
     "s = S(1)\nassert s.add(2) == 3\nassert s.add(2) == 5", 1),
    ("def f(g): return g(1)\ndef h(x): return x + 1", "assert f(h) == 2", 1),
    ("LIMIT = 5", "assert LIMIT == 5", 1), ("def f(x):\n    print('noise')\n    return x + 1", F, 1),
    ("def f(x): return x + 1", {"tests": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}, 1),
    ("def f(x): return x", {"tests": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}, 0),
    ("def f(x): return x + 1", {"tests": ["assert near(f(1), 2)"], "setup": "def near(a, b): return abs(a - b) < 0.1"}, 1),
    ("print(int(input()) + 1)", {"inputs": ["1\n", "5"], "outputs": ["2\n", "6"]}, 1),
    ("print(int(input()) + 1)", {"inputs": ["1\n", "5"], "outputs": ["2\n", "7"]}, 0),
    ("import sys\nfor line in sys.stdin: print(line.strip()[::-1] + '  ')", {"inputs": ["ab\ncd\n"], "outputs": ["ba\ndc"]}, 1),
    ("import sys\nprint(2)\nsys.exit(0)", {"inputs": [""], "outputs": ["2"]}, 1), ("print(2)\n1/0", {"inputs": [""], "outputs": ["2"]}, 0),
    ("print('x' * 500_000)", {"inputs": [""], "outputs": ["x" * 500_000]}, 1),
    ("import sys\nprint(len(sys.stdin.read()))", {"inputs": ["a" * 3_000_000], "outputs": ["3000000"]}, 1),
    ("if __name__ == '__main__':\n    print(2)", {"inputs": [""], "outputs": ["2"]}, 1),
    ("import ctypes, gc, glob, json, multiprocessing, os, random, re, signal, socket, statistics, sys, threading, time\ndef f(x): return x + 1", F, 1),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef f(x): return P(x + 1).x", F, 1),
]  # fmt: skip


@pytest.mark.parametrize(("program", "answer", "expected"), HONEST, ids=lambda value: ascii(value)[:40])
def test_honest(program: str, answer: Any, expected: float, level: str) -> None:
    assert score(program, answer) == expected


def test_partial() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 5", "assert f(4) == 5"]
    verdict = judged("def f(x): return x + 1", tests, partial=True)
    assert (verdict.reward, verdict.correct) == (0.75, False)
    outputs = {"inputs": ["1", "2"], "outputs": ["2", "2"]}
    assert score("print(int(input()) + 1)", outputs, partial=True) == 0.5
    assert score("def f(x): return x + 1", tests) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("```python\ndef f(x): return 0\n```\nBetter:\n```python\ndef f(x): return x + 1\n```", 1),
        ("```python\ndef f(x): return x + 1\n```\nor\n```python\ndef f(x): return 0\n```", 0),
        ("```python\ndef f(x): return x + 1\n```\nand\n```python\ndef f(x): retu", 1), ("def f(x): return x + 1", 1),
        ("```\ndef f(x): return x + 1\n```", 1), ("```py\ndef f(x): return x + 1\n```", 1), ("```bash\nls\n```", 0),
        ("```python\ndef f(x): return x + 1\n```\n```json\n{}\n```", 1), ("", 0), ("I cannot.", 0), ("\x00", 0), ("\ud800", 0),
        ("```python\n" + "(" * 10_000 + "\n```", 0), ("# " + "x" * 1_000_000, 0), ("```python\n\x00\n```", 0),
    ],
)  # fmt: skip
def test_where_the_program_is(completion: str, expected: float) -> None:
    assert score(completion, F, fenced=False) == expected


@pytest.mark.parametrize(
    "answer",
    [None, 3, "", " ", [], [3], "assert f(1", {"tests": ""}, {"tests": F, "entry": "f"}, {"inputs": ["1"], "outputs": []},
     {"inputs": [1], "outputs": ["1"]}, {"inputs": [], "outputs": []}, {"tests": F, "entry_point": 3}],
)  # fmt: skip
def test_golds_that_are_none(answer: Any) -> None:
    one = build([VerifierUse.model_validate({"name": "code", "isolation": "limits"})])
    assert one.gold_problem(answer) is not None
    assert one.judge(VerifyItem("x", "?", "x = 1", "stop", answer)).reward is None


# Each would score 1 if what it tries worked (or if being harmful were overlooked), and must score 0.
HOSTILE: dict[str, tuple[str, Any]] = {
    "endless loop": ("def f(x):\n    while True: pass", F),
    "endless loop at import": ("while True: pass", F),
    "sleep": ("import time\ntime.sleep(1000)\ndef f(x): return 2", F),
    "endless C call": ("def f(x): return 9**9**9 and 2", F),
    "ignores signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\nwhile True: pass", F),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\ndef f(x): return 0", F),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", F),
    "thread bomb": (
        "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ndef f(x): return 2", F),
    "10 GB list": ("x = [0] * (10 << 27)\ndef f(x): return 2", F),
    "memory by many processes": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(400 << 20)\n        for i in range(0, len(x), 4096): x[i] = 1\n"
        "        time.sleep(1000)\ntime.sleep(1.4)\ndef f(x): return 2", F),
    "fills the disk": (
        "n = 0\ntry:\n    for i in range(64):\n        with open(f'/tmp/{i}', 'wb') as o:\n            for _ in range(64): n += o.write(bytes(1 << 20))\n"
        "except OSError: pass\ndef f(x): return 2 if n > (200 << 20) else 0", F),
    "writes outside its folder": (
        "ok = 0\nfor p in ('/x', '/usr/x', '/dev/x', '/dev/shm/x', '/root/x', '/work/x', '/var/tmp/x', '/etc/x', '/sandbox/x', '/proc/x'):\n"
        "    try: open(p, 'w').write('x'); ok = 1\n    except OSError: pass\ndef f(x): return 2 if ok else 0", F),
    "changes the interpreter": (
        "import json\nok = 0\ntry: open(json.__file__, 'a').write('#'); ok = 1\nexcept OSError: pass\ndef f(x): return 2 if ok else 0", F),
    "output flood": ("while True: print('x' * 100_000)", F),
    "output flood of a program": ("while True: print('x' * 100_000)", {"inputs": [""], "outputs": ["x"]}),
    "closes its output and goes on": ("import os\nprint(2, flush=True)\nos.close(1)\nwhile True: pass", {"inputs": [""], "outputs": ["2"]}),
    "connects to this machine": (
        "import socket\nok = 0\ntry: socket.create_connection(('127.0.0.1', PORT), 1); ok = 1\nexcept OSError: pass\ndef f(x): return 2 if ok else 0", F),
    "sees a network": (
        "import socket\ndef f(x): return 2 if any(name != 'lo' for _, name in socket.if_nameindex()) else 0", F),
    "abstract sockets": (
        "import socket\nok = 0\ntry:\n    s = socket.socket(socket.AF_UNIX); s.connect('\\0grpo-test'); ok = 1\nexcept OSError: pass\n"
        "def f(x): return 2 if ok else 0", F),
    "reads secrets in its environment": ("import os\ndef f(x): return 2 if 'SECRET' in str(os.environ) else 0", F),
    "reads other processes": (
        "import glob\nseen = ''\nfor p in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: seen += open(p).read()\n    except OSError: pass\ndef f(x): return 2 if 'SECRET' in seen or 'pytest' in seen else 0", F),
    "reads files of this machine": (
        "ok = 0\nfor p in ('/etc/passwd', '/etc/shadow', '/root/.bashrc', 'HERE', '/proc/1/root/etc/passwd', '/proc/1/cwd/HERE'):\n"
        "    try: open(p).read(); ok = 1\n    except OSError: pass\ndef f(x): return 2 if ok else 0", F),
    "symlinks": (
        "import os\nok = 0\nfor n, p in enumerate(('/etc/shadow', 'HERE', '/proc/1/root')):\n    os.symlink(p, f'/tmp/l{n}')\n"
        "    try: os.listdir(f'/tmp/l{n}') if n == 2 else open(f'/tmp/l{n}').read(); ok |= n < 2 or os.path.exists('/tmp/l2/etc/passwd')\n"
        "    except OSError: pass\ndef f(x): return 2 if ok else 0", F),
    "signals the parent": (
        "import os, signal\nfor pid in (os.getppid(), -1, 1, OUTSIDE):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\ndef f(x): return 0", F),
    "becomes root": (
        "import ctypes, os\nok = 0\nfor attempt in (lambda: os.setuid(0), lambda: os.chroot('/tmp'), lambda: os.mknod('/tmp/m', 0o20666, os.makedev(1, 1))):\n"
        "    try: attempt(); ok = os.getuid() != 0 or ok\n    except OSError: pass\n"
        "ok = ok and os.path.exists('/tmp/m')\ndef f(x): return 2 if ok else 0", F),
    "mounts": (
        "import ctypes\nc = ctypes.CDLL(None)\ndef f(x): return 2 if c.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None) == 0 or c.umount2(b'/tmp', 2) == 0 else 0", F),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\ndef f(x): return 0", F),
    "exit 0": ("import sys\ndef f(x): sys.exit(0)", F),
    "exit 0 at import": ("import sys\nsys.exit(0)", F),
    "os._exit(0)": ("import os\ndef f(x): os._exit(0)", F),
    "os._exit(0) at import": ("import os\nos._exit(0)", F),
    "exit of a program": ("import os\nos._exit(0)", {"inputs": [""], "outputs": ["2"]}),
    "crash": ("import ctypes\ndef f(x): return ctypes.string_at(0)", F),
    "prints a pass mark": ("print('{\"test\": 0, \"passed\": true}\\nOK\\n1 passed')\ndef f(x): return 0", F),
    "prints at exit": ("import atexit\natexit.register(lambda: print('{\"test\": 0, \"passed\": true}'))\ndef f(x): return 0", F),
    "writes a verdict to every descriptor": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'{\"test\": 0, \"passed\": true}\\n{\"done\": true}\\n')\n    except OSError: pass\ndef f(x): return 0", F),
    "forges answers": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'{\"names\": {\"f\": {\"object\": 0}}}\\n' + b'{\"gave\": {\"data\": true}}\\n' * 100)\n    except OSError: pass", F),
    "answers with a bomb": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'{\"names\": ' + b'[' * 200_000)\n    except OSError: pass\nimport time; time.sleep(9)", F),
    "answers for ever": ("import os\nwhile True:\n    for n in range(3, 64):\n        try: os.write(n, b'x' * 65536)\n        except OSError: pass", F),
    "writes a reward file": (
        "import os\nfor p in ('/tmp/reward', '/tmp/reward.txt', 'reward.json', '/logs/verifier/reward.txt', '/tmp/result'):\n"
        "    try: os.makedirs(os.path.dirname(p) or '.', exist_ok=True); open(p, 'w').write('1')\n    except OSError: pass\ndef f(x): return 0", F),
    "equal to everything": ("class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\ndef f(x): return E()", F),
    "an int that equals everything": ("class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(0)", F),
    "a list that equals everything": ("class E(list):\n    def __eq__(self, o): return True\ndef f(x): return E()", "assert f(1) == [2]"),
    "patches builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = BaseException\nbuiltins.isinstance = lambda *a: True\ndef f(x): return 0",
        "assert abs(f(1) - 2) < 1e-6"),
    "shadows names of the tests": ("def abs(x): return 0\ndef len(x): return 2\ndef f(x): return [0]", "assert abs(f(1)[0] - 2) < 1e-6 and len(f(1)) == 1"),
    "shadows a module": (
        "class math:\n    @staticmethod\n    def isclose(*a, **k): return True\ndef f(x): return 0", "assert math.isclose(f(1), 2)"),
    "poisons modules": (
        "import sys, types\nm = types.ModuleType('math'); m.isclose = lambda *a, **k: True\nsys.modules['math'] = m\nimport math\ndef f(x): return 0",
        "import math\nassert math.isclose(f(1), 2)"),
    "import hooks": (
        "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, H())\nopen('/tmp/sitecustomize.py', 'w').write('raise SystemExit(0)')\n"
        "open('/tmp/json.py', 'w').write('raise SystemExit(0)')\ndef f(x): return 0", "import json, random\nassert f(1) == 2"),
    "replaces check": ("def check(candidate): pass\ndef f(x): return 0", {"tests": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}),
    "reads the tests from frames": (
        "import sys, gc\ndef f(x):\n    g = sys._getframe(); seen = []\n    while g: seen.append(str(g.f_globals.keys()) + str(g.f_locals)[:5000]); g = g.f_back\n"
        "    seen += [o for o in gc.get_objects() if isinstance(o, str)]\n    return 77_123 if any('77123' in s.replace('_', '') for s in seen[:-1]) and False else 0", "assert f(1) == 77_123"),
    "raises what tests expect to pass": ("def f(x): raise StopIteration", "assert f(1) == 2"),
    "raises to leave": ("def f(x): raise SystemExit(0)", F),
    "huge answer": ("def f(x): return 'x' * (100 << 20)", F),
    "deep answer": ("def f(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a", F),
    "endless recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)", F),
    "opens files for ever": ("k = []\nwhile True: k.append(open('/dev/null'))", F),
    "a handle that is true": ("def f(x): return object()", "assert f(1) is True or f(1) == 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, str]]:
    """What hostile programs go for: a listening port, an abstract socket, a secret in the environment, this process."""
    reached: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        patch.setenv("WANDB_API_KEY", SECRET)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(f"\0grpo-test{os.getpid()}")
        unix.listen()
        threading.Thread(target=lambda: reached.append(tcp.accept()), daemon=True).start()
        yield {
            "PORT": str(tcp.getsockname()[1]), "SECRET": SECRET, "HERE": __file__, "OUTSIDE": str(os.getpid()),
            "grpo-test": f"grpo-test{os.getpid()}",
        }  # fmt: skip
        assert reached == []


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, level: str, outside: dict[str, str]) -> None:
    program, answer = HOSTILE[name]
    for word, value in outside.items():
        program = program.replace(word, value)
    before = set(sandbox.descendants(os.getpid()))
    assert score(program, answer, seconds=1.5, memory_mb=1024, disk_mb=32) == 0.0
    deadline = time.monotonic() + 10
    while set(sandbox.descendants(os.getpid())) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(sandbox.descendants(os.getpid())) <= before
    for path in ("/tmp/reward", "/tmp/sitecustomize.py", "/tmp/json.py", "/tmp/l0", "/tmp/0", "/dev/shm/x", "/x"):
        assert not Path(path).exists()


def test_there_are_enough_hostile_programs() -> None:
    assert len(HOSTILE) >= 25
    if not ISOLATED:
        pytest.skip("neither bubblewrap nor namespaces work on this machine: hostile programs were not run")


def test_less_isolation_than_demanded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda level: sandbox.Way(level, False) if level == "limits" else None)
    with pytest.raises(RecipeError, match="isolation 'limits' on this machine, less than the demanded 'namespaces'"):
        build([VerifierUse(name="code")])
    build([VerifierUse.model_validate({"name": "code", "isolation": "limits"})])


def test_limits_alone_still_keep_secrets_and_clean_up(monkeypatch: pytest.MonkeyPatch, outside: dict[str, str]) -> None:
    monkeypatch.setattr(code_module, "demand", lambda wanted: sandbox.Way("limits", os.getuid() == 0))
    before = set(Path("/tmp").glob("grpo-sandbox-*"))
    assert score("import os\nopen('x', 'w').write(os.getcwd())\ndef f(x): return x + 1", F) == 1.0
    for name in (
        "reads secrets in its environment",
        "fork bomb",
        "a daemon",
        "os._exit(0)",
        "10 GB list",
        "equal to everything",
    ):
        program, answer = HOSTILE[name]
        processes = set(sandbox.descendants(os.getpid()))
        assert score(program.replace("SECRET", SECRET), answer, seconds=1.0) == 0.0
        assert set(sandbox.descendants(os.getpid())) <= processes
    assert set(Path("/tmp").glob("grpo-sandbox-*")) == before


def test_a_sandbox_that_does_not_start_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_interpreter", lambda packages: ["/no/such/python"])
    monkeypatch.setattr(code_module, "demand", lambda wanted: sandbox.available(ISOLATED[0] if ISOLATED else "limits"))
    for answer in (F, {"inputs": [""], "outputs": [""]}):
        verdict = judged("x = 1", answer)
        assert verdict.reward is None


def test_packages(level: str) -> None:
    program = "import numpy\ndef f(x): return numpy.arange(x + 1).max() + 1 - 0 * numpy.ones(2).sum()"
    assert score(program, F, packages=True) == 1.0
    assert score(program, F) == 0.0
