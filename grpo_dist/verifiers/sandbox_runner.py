"""What runs inside a sandbox. Standard library only: this file is handed to a bare interpreter, away from the package.

Three modes, each after giving up every privilege and taking on its limits:

    calls    runs a solution, then answers calls of its functions over a socket
    tests    runs test code in which the solution's functions are stand-ins that call over that socket
    program  runs a solution as a program, with its own standard input and output

The tests and what they expect are in a process that the solution cannot reach: it only ever sees the arguments of calls
and gives back plain data. So it has nothing to patch, no frame to read, no file to write and no exit that helps it.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import resource
import socket
import sys
import types
from typing import Any, NoReturn

_PR_SET_NO_NEW_PRIVS = 38
_MOST_BYTES = 8 << 20  # of one message


def main() -> None:
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as setup_file:
        setup = json.load(setup_file)
    give_up_privileges(setup["uid"], setup["limits"])
    {"calls": calls, "tests": tests, "program": program}[setup["mode"]](setup)


def give_up_privileges(uid: int, limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if os.getuid() == 0 and uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)  # from 0 to another: every capability goes
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# --- plain data as JSON, with the types that JSON lacks


class NotPlain(Exception):
    pass


def pack(value: Any, depth: int = 0) -> Any:
    """Raises NotPlain for anything but plain data. Subclasses become what they are a kind of."""
    if depth > 200:
        raise NotPlain
    if value is None or isinstance(value, (bool, str)):
        return bool(value) if isinstance(value, bool) else None if value is None else str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(int(value))} if abs(int(value)) >> 60 else int(value)
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__ if type(value) in (bytes, bytearray) else "bytes": bytes(value).hex()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(one, depth + 1) for one in kind.__iter__(value)]}  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {"dict": [[pack(key, depth + 1), pack(one, depth + 1)] for key, one in dict.items(value)]}
    if hasattr(value, "tolist"):  # numpy
        return pack(value.tolist(), depth + 1)
    raise NotPlain


def unpack(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(float(inner[0]), float(inner[1]))
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(inner)
    if kind == "dict":
        return {unpack(key): unpack(one) for key, one in inner}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpack, inner))


class Channel:
    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.lines = self.socket.makefile("rb")

    def send(self, message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        line = self.lines.readline(_MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


# --- calls


def calls(setup: dict[str, Any]) -> None:
    _silence()
    channel = Channel(setup["channel"])
    channel.send({"hello": 1})
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(setup["code"], "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        channel.send({"failed": type(error).__name__})
        return
    objects: list[Any] = []
    channel.send({"names": {name: _described(one, objects) for name, one in vars(module).items() if name[:2] != "__"}})
    while True:
        request = channel.receive()
        answer: dict[str, Any]
        try:
            function = objects[request["object"]]
            if request["attribute"] is not None:
                function = getattr(function, request["attribute"])
            arguments = [_argument(one, objects) for one in request["arguments"]]
            named = {name: _argument(one, objects) for name, one in request["named"].items()}
            answer = {"gave": _described(function(*arguments, **named), objects)}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "message": str(error)[:1000]}
        channel.send(answer)


def _described(value: Any, objects: list[Any]) -> dict[str, Any]:
    """Plain data as it is; of anything else a number to call it by."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if not callable(value):
        try:
            return {"data": pack(value)}
        except NotPlain:
            pass
    objects.append(value)
    return {"object": len(objects) - 1}


def _argument(value: dict[str, Any], objects: list[Any]) -> Any:
    return objects[value["object"]] if "object" in value else unpack(value["data"])


# --- tests


class Solution:
    """The tests' side of the socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def call(self, number: int, attribute: str | None, arguments: Any, named: dict[str, Any]) -> Any:
        request = {
            "object": number,
            "attribute": attribute,
            "arguments": [_sent(one) for one in arguments],
            "named": {name: _sent(one) for name, one in named.items()},
        }
        self.channel.send(request)
        answer = self.channel.receive()
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else RuntimeError)(str(answer["message"]))  # type: ignore[misc]
        return self.value(answer["gave"])

    def value(self, described: dict[str, Any]) -> Any:
        if "data" in described:
            return unpack(described["data"])
        return StandIn(self, described["object"], None)


class StandIn:
    """A function, class or object of the solution. Equal to nothing but itself: identity is decided here, not there."""

    def __init__(self, solution: Solution, number: int, attribute: str | None) -> None:
        self._solution, self._number, self._attribute = solution, number, attribute

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._solution.call(self._number, self._attribute, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(self._solution, self._number, name)


def _sent(value: Any) -> dict[str, Any]:
    return {"object": value._number} if isinstance(value, StandIn) else {"data": pack(value)}


def tests(setup: dict[str, Any]) -> None:
    """Writes one line per test to the result pipe: {"test": n, "passed": bool}; before that {"started": bool}."""
    _silence()
    result = os.fdopen(setup["result"], "w", buffering=1, encoding="utf-8")

    def say(message: Any) -> None:
        print(json.dumps(message), file=result, flush=True)

    channel = Channel(setup["channel"])
    say({"started": channel.receive().get("hello") == 1})
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        namespace |= _stand_ins(channel)
        exec(compile(setup["setup"], "setup.py", "exec"), namespace)
    except BaseException:
        return
    for number, code in enumerate(setup["tests"]):
        try:
            exec(compile(code, f"test{number}.py", "exec"), namespace)
            if setup["entry_point"] is not None:
                namespace["check"](namespace[setup["entry_point"]])
        except BaseException:
            say({"test": number, "passed": False})
        else:
            say({"test": number, "passed": True})
    say({"done": True})


def _stand_ins(channel: Channel) -> dict[str, Any]:
    """The solution's names, as far as they may be seen by tests.

    Nothing that tests rely on can come from the solution: built-in names stay what they are, and a module of the
    standard library is imported here, whatever the solution has under its name.
    """
    solution = Solution(channel)
    seen: dict[str, Any] = {}
    for name, described in channel.receive()["names"].items():
        if hasattr(builtins, name) or not isinstance(described, dict):
            continue
        module = str(described.get("module", name))
        if name in sys.stdlib_module_names or (
            "module" in described and module.split(".")[0] in sys.stdlib_module_names
        ):
            seen[name] = importlib.import_module(name if name in sys.stdlib_module_names else module)
        elif "module" not in described:
            seen[name] = solution.value(described)
    return seen


# --- program


def program(setup: dict[str, Any]) -> NoReturn:
    os.write(setup["result"], b'{"started": true}\n')
    os.close(setup["result"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    try:
        exec(compile(setup["code"], "solution.py", "exec"), module.__dict__)
        sys.stdout.flush()
    except SystemExit as leaving:
        sys.stdout.flush()
        os._exit(0 if leaving.code in (None, 0) else 1)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


if __name__ == "__main__":
    main()
