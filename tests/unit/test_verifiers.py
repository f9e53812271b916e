"""exact and numeric: tables of (completion, gold -> verdict); and how several verifiers make one verdict."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config import VerifiersSection, VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer
from grpo_dist.verifiers.registry import VERIFIERS, Judge, Options, Part, build, register


def judge(*uses: dict[str, Any]) -> Judge:
    return build([VerifierUse.model_validate(use) for use in uses])


def item(completion: str, answer: Any, **keys: Any) -> VerifyItem:
    return VerifyItem(
        **{"id": "x", "prompt": "?", "completion": completion, "finish_reason": "stop", "answer": answer} | keys
    )


def right(name: str, completion: str, gold: Any, **options: Any) -> bool | None:
    verdict = judge({"name": name} | options).judge(item(completion, gold))
    assert verdict.error is None, verdict.error
    assert verdict.reward == float(bool(verdict.correct))
    return verdict.correct


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("7", "7", True), (" 7\n", "7", True), ("7", 7, True), ("7", 7.0, True), ("7.0", 7.0, True), ("8", "7", False),
        ("", "7", False), ("0", 0, True), ("0", "0", True), ("false", False, True), ("False", False, True),
        ("Paris", "Paris", True), ("paris", "Paris", False), ("7 7", "7", False), ("\x00", "7", False),
    ],
)  # fmt: skip
def test_exact(completion: str, gold: Any, expected: bool) -> None:
    assert right("exact", completion, gold) is expected


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [("12,20,26#26", "26", True), ("#26", "26", True), ("26", "26", False), ("#25#26", "26", True),
     ("#26#25", "26", False), ("#", "26", False), ("#26 ", "26", True), ("#26#", "26", False)],
)  # fmt: skip
def test_exact_after_a_marker(completion: str, gold: str, expected: bool) -> None:
    assert right("exact", completion, gold, after="#") is expected


@pytest.mark.parametrize("name", ["exact", "numeric"])
def test_a_cut_completion_is_wrong_when_a_stop_is_required(name: str) -> None:
    strict = judge({"name": name, "after": "#", "require_stop": True})
    assert strict.judge(item("#26", "26")).reward == 1.0
    assert strict.judge(item("#26", "26", finish_reason="length")).reward == 0.0
    assert judge({"name": name, "after": "#"}).judge(item("#26", "26", finish_reason="length")).reward == 1.0


def test_verdict_is_an_error_when_the_gold_is_not_one() -> None:
    for gold in (None, "", [], {}, "Tuesday", True):
        verdict = judge({"name": "numeric"}).judge(item("4", gold))
        assert verdict.reward is None
        assert verdict.error is not None
        assert "gold" in verdict.error


def test_gold_problems() -> None:
    numeric = judge({"name": "numeric"})
    for good in (42, 4.5, "0", 0, "1,250", r"\boxed{5}", "so it is #### 5", "1/3"):
        assert numeric.gold_problem(good) is None
    for bad in (None, True, ["4"], "", "Tuesday", "yes", "B", float("nan"), float("inf"), {"a": 1}):
        assert numeric.gold_problem(bad) is not None


def test_own_limit_must_end_before_the_pools() -> None:
    with pytest.raises(ValueError, match="must end at least 1 s before timeout"):
        VerifiersSection.model_validate({"timeout": 5, "use": [{"name": "code", "seconds": 5}]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"), (r"\boxed{5} no, \boxed{7}", "7"), (r"\boxed{7} then \boxed{8", "7"), (r"\boxed{8", None),
        (r"\fbox{42}", "42"), (r"\boxed {42}", "42"), (r"\boxed 7", "7"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{E}}", r"\text{E}"), (r"<answer>\boxed{5}</answer>", "5"), ("<answer>5</answer>", "5"),
        ("<answer>5", None), ("<ANSWER> 5 </ANSWER>", "5"), (r"\boxed{5} <answer>6</answer>", "6"),
        ("#### 42\nbye", "42"),
        ("#### 42 ", "42"), ("x #### 42", None), (r"#### 1" "\n" r"\boxed{2}", "2"), (r"\boxed{2}" "\n#### Notes", "2"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{}", None), (r"\boxed{3} \boxed{}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        ("nothing", None), ("", None),
    ],
)  # fmt: skip
def test_marked_answer(text: str, expected: str | None) -> None:
    assert marked_answer(text).text == expected


def test_opened_but_not_completed() -> None:
    assert marked_answer(r"\boxed{4").opened
    assert marked_answer("<answer>4").opened
    assert not marked_answer("4").opened
    assert right("numeric", r"I think 4. \boxed{4", 4) is False


class HalfOptions(Options):
    value: float = 0.5
    raises: str | None = None


@pytest.fixture
def half() -> Any:
    @register("half", HalfOptions)
    def half(item: VerifyItem, options: HalfOptions) -> Part | None:
        if options.raises is not None:
            raise KeyError(options.raises)
        return None if item.completion == "skip" else Part(options.value)

    yield
    del VERIFIERS["half"]


@pytest.mark.usefixtures("half")
class TestJudge:
    def test_weights_and_parts(self) -> None:
        both = judge({"name": "numeric", "weight": 2.0}, {"name": "half", "weight": 0.1})
        verdict = both.judge(item("4", 4))
        assert verdict.reward == pytest.approx(2.05)
        assert verdict.parts == {"numeric": 1.0, "half": 0.5}
        assert verdict.correct is True

    def test_a_gate_pays_nothing_for_a_wrong_answer(self) -> None:
        for gate in ("numeric", "correct"):
            gated = judge({"name": "numeric"}, {"name": "half", "requires": gate})
            assert gated.judge(item("4", 4)).reward == 1.5
            assert gated.judge(item("5", 4)).reward == 0.0
            assert gated.judge(item("5", 4)).parts == {"numeric": 0.0, "half": 0.0}

    def test_not_applicable_is_left_out(self) -> None:
        assert judge({"name": "numeric"}, {"name": "half"}).judge(item("skip 4", 4)).parts == {
            "numeric": 1.0,
            "half": 0.5,
        }
        verdict = judge({"name": "half"}).judge(item("skip", 4))
        assert verdict.reward is None
        assert verdict.error == "no verifier applies to this row"

    @pytest.mark.parametrize("value", [1.5, -0.1])
    def test_out_of_range_is_refused(self, value: float) -> None:
        verdict = judge({"name": "half", "value": value}).judge(item("4", 4))
        assert verdict.reward is None
        assert "outside its declared range" in (verdict.error or "")

    def test_what_is_raised_is_an_error_and_no_zero(self) -> None:
        verdict = judge({"name": "numeric"}, {"name": "half", "raises": "boom"}).judge(item("4", 4))
        assert verdict.reward is None
        assert verdict.error == "KeyError: 'boom'"

    def test_a_row_chooses_who_judges_its_answer(self) -> None:
        mixed = judge({"name": "numeric"}, {"name": "exact", "after": "#"}, {"name": "half"})
        assert mixed.judge(item("#4", 4, verifier="numeric")).parts == {"numeric": 1.0, "half": 0.5}
        assert mixed.judge(item("#a", "a", verifier="exact")).parts == {"exact": 1.0, "half": 0.5}
        assert judge({"name": "half"}).judge(item("4", 4, verifier="exact")).parts == {"exact": 1.0, "half": 0.5}
        assert mixed.judge(item("4", 4, verifier="nobody")).error is not None
        assert "nobody" in (mixed.gold_problem(4, "nobody") or "")
        assert mixed.gold_problem("a", "exact") is None
        assert mixed.gold_problem("a", "numeric") is not None

    def test_recipe_problems_come_all_at_once(self) -> None:
        with pytest.raises(RecipeError) as error:
            judge(
                {"name": "numerik"}, {"name": "numeric", "tolerence": 1}, {"name": "numeric", "tolerance": -1},
                {"name": "half", "requires": "math"},
            )  # fmt: skip
        lines = str(error.value).splitlines()
        assert "did you mean 'numeric'" in lines[0]
        assert "did you mean 'tolerance'" in lines[1]
        assert "greater than or equal to 0, got -1" in lines[2]
        assert "'numeric' is there 2 times" in lines[3]
        assert "'math' is not the label of a verifier before it" in lines[4]
