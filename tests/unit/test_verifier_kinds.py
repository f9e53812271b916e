"""Verifiers of form, of the user and of reasoning_gym; and that every verifier stands any text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers.registry import build


def judged(
    name: str, completion: str, answer: Any = None, *, item: dict[str, Any] | None = None, **options: Any
) -> Verdict:
    keys: dict[str, Any] = {"finish_reason": "stop"} | (item or {})
    one = build([VerifierUse.model_validate({"name": name} | options)])
    return one.judge(VerifyItem(id="x", prompt="?", completion=completion, answer=answer, **keys))


def refused(name: str, **options: Any) -> str:
    with pytest.raises(RecipeError) as error:
        build([VerifierUse.model_validate({"name": name} | options)])
    return str(error.value)


THINKING = "<think>first this, then that</think>"


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        (THINKING + "<answer>4</answer>", {}, 1), (THINKING + "\n<answer>4</answer>\n", {}, 1), ("", {}, 0),
        ("4", {}, 0),
        ("<think></think>a", {}, 0), ("<think></think><answer>4</answer>", {}, 0),
        ("<think> \n </think><answer>4</answer>", {}, 0),
        (THINKING + "<answer></answer>", {}, 0), (THINKING + "<answer>4", {}, 0),
        (THINKING + "<answer>4</answer>bye", {}, 0),
        (THINKING + "<answer>4</answer>bye", {"outside": True}, 1), ("hi" + THINKING + "<answer>4</answer>", {}, 0),
        (THINKING * 2 + "<answer>4</answer>", {}, 0), ("<answer>4</answer>" + THINKING, {}, 0),
        (THINKING + "so <answer>4</answer>", {}, 0),
        ("first this, then that</think><answer>4</answer>", {"opened": True}, 1),
        (THINKING + "<answer>4</answer>", {"opened": True}, 0),
        ("<a>1</a>", {"tags": ["a"]}, 1), ("<a>1</a>", {"tags": ["a"], "min_chars": 9}, 1),
        ("<a>1</a><b>2</b>", {"tags": ["a", "b"], "min_chars": 1}, 1),
    ],
)  # fmt: skip
def test_format(completion: str, options: dict[str, Any], expected: float) -> None:
    verdict = judged("format", completion, **options)
    assert (verdict.reward, verdict.correct) == (expected, None)


def test_format_pays_nothing_for_a_wrong_answer_when_gated() -> None:
    gated = build([VerifierUse(name="numeric"), VerifierUse(name="format", weight=0.2, requires="numeric")])
    right, wrong = (THINKING + f"<answer>{x}</answer>" for x in (4, 5))
    assert gated.judge(VerifyItem("x", "?", right, "stop", 4)).reward == pytest.approx(1.2)
    assert gated.judge(VerifyItem("x", "?", wrong, "stop", 4)).reward == 0.0


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [("abc", {"pattern": "b"}, 1), ("abc", {"pattern": "b", "match": "full"}, 0), ("abc", {"pattern": "B"}, 0),
     ("abc", {"pattern": "B", "ignore_case": True}, 1), ("a\nc", {"pattern": "a.c"}, 1), ("", {"pattern": "^$"}, 1)],
)  # fmt: skip
def test_regex(completion: str, options: dict[str, Any], expected: float) -> None:
    assert judged("regex", completion, **options).reward == expected


def test_exact_with_a_pattern() -> None:
    assert judged("exact", "x=1; x=2", "2", pattern=r"x=(\d)").correct is True
    assert judged("exact", "x=2; x=1", "2", pattern=r"x=(\d)").correct is False
    assert judged("exact", "none", "2", pattern=r"x=(\d)").correct is False
    assert "needs a group" in refused("exact", pattern="x")
    assert "not a regular expression" in refused("exact", pattern="(")
    assert "not a regular expression" in refused("regex", pattern="(")


@pytest.mark.parametrize(
    ("tokens", "finish", "expected"),
    [(0, "stop", 0), (80, "stop", 0), (90, "stop", -0.5), (99, "stop", -0.95), (100, "stop", -1),
     (500, "stop", -1), (10, "length", -1)],
)  # fmt: skip
def test_length(tokens: int, finish: str, expected: float) -> None:
    verdict = judged("length", "", item={"tokens": tokens, "finish_reason": finish}, max_tokens=100, buffer_tokens=20)
    assert verdict.reward == pytest.approx(expected)


def test_length_buffer_must_fit() -> None:
    assert "buffer_tokens 200 is more than max_tokens 100" in refused("length", max_tokens=100, buffer_tokens=200)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [('{"a": 1}', 1), ('{"a": "1"}', 0), ("{}", 0), ("", 0), ("{", 0),
     ('```json\n{"a": 1}\n```', 1), ('<answer>{"a": 1}</answer>', 1),
     ('here: {"a": 1}', 0), ('{"a": NaN}', 0), ("[" * 100_000, 0), ('{"a": 1} {"a": 1}', 0)],
)  # fmt: skip
def test_json_schema(completion: str, expected: float, tmp_path: Path) -> None:
    assert judged("json_schema", completion, schema=SCHEMA).reward == expected
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert judged("json_schema", completion, path=str(path)).reward == expected


def test_json_schema_must_be_one(tmp_path: Path) -> None:
    assert "not a JSON schema" in refused("json_schema", schema={"type": "thing"})
    assert "either schema or path" in refused("json_schema")
    assert "cannot be read" in refused("json_schema", path=str(tmp_path / "absent.json"))
    verdict = judged("json_schema", "1", schema={"$ref": "http://127.0.0.1:9/schema"})
    assert verdict.reward is None  # a reference to elsewhere is never followed


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "user_rewards.py").write_text(
        "def length(item, most=10): return min(len(item.completion) / most, 1.0)\n"
        "def right(item): return item.completion == str(item.answer)\n"
        "def none(item): return None\n"
        "def both(item): return {'value': 0.5, 'correct': True}\n"
        "def big(item): return 3\n"
        "def text(item): return 'good'\n"
        "def nan(item): return float('nan')\n"
        "def fails(item): raise OSError('disk')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("user_rewards", None)


@pytest.mark.usefixtures("user_code")
def test_python() -> None:
    assert judged("python:user_rewards:length", "abcde").reward == 0.5
    assert judged("python:user_rewards:length", "abcde", most=5).reward == 1.0
    assert judged("python:user_rewards:right", "4", 4).correct is True
    assert judged("python:user_rewards:right", "5", 4).reward == 0.0
    assert judged("python:user_rewards:both", "").parts == {"python:user_rewards:both": 0.5}
    assert judged("python:user_rewards:big", "", high=5).reward == 3.0
    for name, why in {
        "none": "no verifier applies", "big": "outside its declared range", "text": "wanted null", "nan": "outside",
        "fails": "OSError: disk",
    }.items():  # fmt: skip
        verdict = judged(f"python:user_rewards:{name}", "")
        assert verdict.reward is None
        assert why in (verdict.error or "")
    assert "cannot be imported" in refused("python:absent_module:f")
    assert "cannot be imported" in refused("python:user_rewards:absent")
    assert "is not a function" in refused("python:user_rewards:number")
    assert "wanted python:MODULE:FUNCTION" in refused("python:user_rewards")
    assert "must be less than" in refused("python:user_rewards:right", low=1, high=0)


def test_command(tmp_path: Path) -> None:
    def program(body: str) -> str:
        path = tmp_path / f"p{len(list(tmp_path.iterdir()))}.py"
        path.write_text("import json, sys\nitem = json.load(sys.stdin)\n" + body)
        return f"command:{sys.executable} {path}"

    assert (
        judged(program("print(json.dumps(item['completion'] == item['answer']))"), "é\ud800", "é\ud800").correct is True
    )
    assert judged(program("print(0.25)"), "").reward == 0.25
    assert judged(program("print(json.dumps({'value': 1, 'correct': False}))"), "").correct is False
    for body, why in {
        "sys.exit('no luck')": "ended with 1: no luck", "print('good')": "no JSON value", "": "no JSON value",
        "print('1' * 2_000_000)": "more than", "print(7)": "outside",
    }.items():  # fmt: skip
        verdict = judged(program(body), "")
        assert verdict.reward is None
        assert why in (verdict.error or "")
    assert "there is no program" in refused("command:/no/such/program")
    assert "wanted command:PROGRAM" in refused("command:")


ROW = {
    "reasoning_gym": {
        "task": "chain_sum",
        "parameters": '{"min_terms": 2, "max_terms": 2}',
        "size": 10,
        "seed": 3,
        "index": 4,
    }
}


def test_reasoning_gym() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=10, seed=3, min_terms=2, max_terms=2)[4]
    for completion in (entry["answer"], f"<answer>{entry['answer']}</answer>", f"so\n{entry['answer']}"):
        assert judged("reasoning_gym", completion, entry["answer"], item={"extra": ROW}).correct is True
    wrong = judged("reasoning_gym", "<answer>xx</answer>", entry["answer"], item={"extra": ROW})
    assert wrong.correct is False
    assert wrong.reward is not None
    assert wrong.reward < 0.1
    assert (
        judged("reasoning_gym", f"I say {entry['answer']} it is", "", item={"extra": ROW}, last_number=True).correct
        is True
    )
    assert judged("reasoning_gym", "1", "").error == "no verifier applies to this row"


JUNK = [
    "",
    " ",
    "\x00\x01\xff",
    "\ud800",
    "a" * 1_000_000,
    "1" * 1_000_000,
    "\\boxed{" * 100_000,
    "<answer>" * 100_000,
    "\u202e\u0301" * 1000,
]
KINDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("exact", "4", {}), ("exact", "4", {"after": "#", "pattern": "(x)"}), ("numeric", 4, {}),
    ("math", r"\frac12", {}), ("choice", "B", {}),
    ("format", None, {}), ("regex", None, {"pattern": "^never$"}), ("json_schema", None, {"schema": SCHEMA}),
    ("reasoning_gym", "4", {}), ("length", None, {"max_tokens": 100, "buffer_tokens": 20}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gold", "options"), KINDS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("completion", JUNK, ids=lambda text: ascii(text)[:12])
def test_junk_is_wrong_and_no_error(name: str, gold: Any, options: dict[str, Any], completion: str) -> None:
    verdict = judged(name, completion, gold, item={"extra": ROW}, **options)
    assert verdict.error is None
    assert verdict.reward is not None
    assert verdict.reward < 0.1


@pytest.mark.parametrize("name", ["exact", "numeric", "math", "choice"])
@pytest.mark.parametrize("gold", [None, [], ["4"], {}, {"a": 1}, "", " ", float("nan"), float("inf")])
def test_a_gold_of_the_wrong_type_is_refused_at_load_and_an_error_later(name: str, gold: Any) -> None:
    one = build([VerifierUse(name=name)])
    assert one.gold_problem(gold) is not None
    verdict = one.judge(VerifyItem("x", "?", "4", "stop", gold))
    assert verdict.reward is None
    assert "gold" in (verdict.error or "")


@pytest.mark.parametrize("completion", JUNK, ids=lambda text: ascii(text)[:12])
def test_junk_reaches_users_code_as_it_is(completion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "junk_rewards.py").write_text("def size(item): return float(len(item.completion))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert judged("python:junk_rewards:size", completion, high=1e9).reward == len(completion)
    program = tmp_path / "size.py"
    program.write_text("import json, sys\nprint(len(json.load(sys.stdin)['completion']))\n")
    assert judged(f"command:{sys.executable} {program}", completion, high=1e9).reward == len(completion)


@pytest.mark.parametrize(
    ("name", "options", "part", "why"),
    [
        ("python:junk_rewards:raises", {}, None, "ZeroDivisionError"),
        ("python:junk_rewards:absurd", {}, None, "outside its declared range [0.0, 1.0]"),
        ("python:junk_rewards:absurd", {"low": 0, "high": 2}, 1.5, None),
        ("python:junk_rewards:nothing", {}, None, "no verifier applies to this row"),
    ],
)
def test_ranges_and_exceptions(
    name: str, options: dict[str, Any], part: float | None, why: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "junk_rewards.py").write_text(
        "def raises(item): return 1 / 0\ndef absurd(item): return 1.5\ndef nothing(item): return None\n"
    )
    sys.modules.pop("junk_rewards", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    verdict = judged(name, "x", **options)
    assert verdict.reward == part
    assert (why or "") in (verdict.error or "")
    sys.modules.pop("junk_rewards", None)


def test_three_ways_to_write_a_gold_are_one() -> None:
    """g5: 3, "3" and 3.0 score 1 for a boxed 3, with the default verifiers of numbers."""
    for name in ("numeric", "math"):
        for gold in (3, "3", 3.0, "3.0"):
            assert judged(name, r"\boxed{3}", gold).reward == 1.0
