"""Tables of (completion, gold -> right or wrong) that a reader can check by eye; the decisions of docs/verifiers.md.

``Y`` is right, ``n`` is wrong. Nothing here may be an error: a verdict without a reward fails the test.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config import VerifierUse
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.registry import Judge, build

Y, n = True, False

# Where the answer stands. The last complete mark counts; the same rule for numeric and math.
PLACE: list[tuple[str, Any, bool]] = [
    (r"\boxed{7}", 7, Y),
    (r"I get \boxed{5}. No, that was wrong: \boxed{7}", 7, Y),
    (r"I get \boxed{5}. No, that was wrong: \boxed{7}", 5, n),
    (r"\boxed{7} because \boxed{8", 7, Y),
    (r"\boxed{7", 7, n),
    (r"The answer is 7. \boxed{7", 7, n),
    (r"\fbox{7}", 7, Y),
    (r"\boxed {7}", 7, Y),
    (r"\boxed 7", 7, Y),
    (r"\boxed{ 7 }", 7, Y),
    (r"\boxed{}", 7, n),
    (r"\boxed{7} \boxed{}", 7, Y),
    (r"\boxed{\boxed{7}}", 7, Y),
    (r"$\boxed{7}$", 7, Y),
    (r"$$\boxed{7}$$", 7, Y),
    (r"\(\boxed{7}\)", 7, Y),
    (r"\[\boxed{7}.\]", 7, Y),
    ("<answer>7</answer>", 7, Y),
    ("<answer> 7 </answer>", 7, Y),
    ("<Answer>7</Answer>", 7, Y),
    ("<answer>7", 7, n),
    ("<think>8</think><answer>7</answer>", 7, Y),
    ("<answer>8</answer> wait <answer>7</answer>", 7, Y),
    ("<answer>7</answer> wait <answer>8</answer>", 7, n),
    (r"<answer>\boxed{7}</answer>", 7, Y),
    (r"<answer>the result is $7$</answer>", 7, Y),
    (r"\boxed{8} <answer>7</answer>", 7, Y),
    (r"<answer>8</answer> \boxed{7}", 7, Y),
    ("so 3 + 4\n#### 7", 7, Y),
    ("#### 7\n" + "That was easy, and there is much more to say about it. " * 10, 7, Y),
    ("#### 8\n#### 7", 7, Y),
    ("#### Step 1\nadd\n\\boxed{7}", 7, Y),
    ("\\boxed{7}\n#### Check\nindeed", 7, Y),
    ("##### 7", 8, n),
    ("The answer is 7.", 7, Y),
    ("The answer is: 7", 7, Y),
    ("The final answer is $7$. I hope it is correct.", 7, Y),
    ("Answer: 7", 7, Y),
    ("First 3, then 4, so 7", 7, Y),
    ("First 3, then 4, so 7", 3, n),
    ("7", 7, Y),
    ("**7**", 7, Y),
    ("It is 7!", 7, Y),
    ("", 7, n),
    (" \n\t", 7, n),
    ("no number here", 7, n),
    ("\x00\x01\x02\x7f\x80", 7, n),
    ("\U0001f600 \\boxed{7}", 7, Y),
    ("答案是 \\boxed{7}。", 7, Y),
    ("答案是 7", 7, Y),
    ("La respuesta es 7", 7, Y),
    ("Ответ: 7", 7, Y),
    ("الجواب ٧", 7, Y),
    (" ".join(rf"\boxed{{{i}}}" for i in range(100)), 7, n),
    (r"\boxed{1, 2, 3, 4, 5, 6, 7}", 7, n),
    (r"\boxed{6 or 7}", 7, n),
    (r"\boxed{7 or 8}", 7, n),
    (r"\boxed{7}" + " " * 100_000, 7, Y),
    ("x" * 1_000_000 + r"\boxed{7}", 7, Y),
    (r"\boxed{" + "1" * 1_000_000 + "}", 7, n),
    ("{" * 1000 + r"\boxed{7}", 7, Y),
    ("}" * 1000 + r"\boxed{7}", 7, Y),
    (r"\{ \boxed{7} \}", 7, Y),
    (r"\boxed{7}", r"\boxed{7}", Y),
    (r"\boxed{7}", "the total is #### 7", Y),
    (r"\boxed{7}", "<answer>7</answer>", Y),
]

# How a number is written. For numeric and math alike.
NUMBERS: list[tuple[str, Any, bool]] = [
    ("4", 4, Y), ("4", "4", Y), ("4", 4.0, Y), ("4", "4.0", Y), ("4.0", 4, Y), ("4.", 4, Y), ("04", 4, Y),
    ("016", 16, Y),
    ("+4", 4, Y), ("-4", 4, n), ("-4", -4, Y), ("−4", -4, Y), ("–4", -4, Y), ("- 4", -4, Y), ("(4)", 4, Y),
    ("[4]", 4, Y),
    ("0", 0, Y), ("0", "0", Y), ("0.0", 0, Y), ("-0", 0, Y), ("", 0, n), ("1", 0, n),
    ("42", 42, Y), ("42", 43, n), ("142", 42, n), ("421", 42, n), ("4 2", 42, n),
    ("4.5", 4.5, Y), ("4.50", 4.5, Y), ("9/2", 4.5, Y), ("4.6", 4.5, n), (".5", 0.5, Y), ("0.5", ".5", Y),
    ("1250", "1,250", Y), ("1,250", 1250, Y), ("1,250.00", 1250, Y), (r"\$1,250.00", 1250, Y), ("$1,250", 1250, Y),
    (r"9{,}500", 9500, Y), (r"12\,000", 12000, Y), (r"12\ 000", 12000, Y), ("12 000", 12000, Y),
    ("12\u202f000", 12000, Y),
    ("12\u00a0000", 12000, Y), ("12'000", 12000, Y), ("1,000,000", 10**6, Y), ("1{,}000{,}000", 10**6, Y),
    ("8,000", 0, n),
    ("8,000", 8, n), ("9{,}500", 500, n), ("1,25", 125, n), ("10,00", 1000, n), ("$29.00", 29, Y),
    ("29 dollars", 29, Y),
    ("€29", 29, Y), ("£29", 29, Y), ("29.99", 30, n),
    (r"\frac{1}{2}", 0.5, Y), (r"\frac12", 0.5, Y), (r"\dfrac{1}{2}", 0.5, Y), (r"\tfrac12", "1/2", Y),
    ("1/2", "1/2", Y),
    ("1/2", r"\frac{1}{2}", Y), ("2/4", "1/2", Y), ("0.5", r"\frac{1}{2}", Y), (r"-\frac{1}{2}", -0.5, Y),
    ("-1/2", -0.5, Y),
    (r"\frac{-1}{2}", -0.5, Y), (r"\frac{1}{2}", 2, n), ("1/2", 2, n), ("1/2", 1, n), ("1/0", 1, n), ("½", 0.5, Y),
    ("2½", 2.5, Y),
    ("2 1/2", 2.5, Y), (r"2\frac{1}{2}", 2.5, Y), (r"2 \frac12", 2.5, Y), (r"-2\frac{1}{2}", -2.5, Y),
    ("2 1/2", 21 / 2, n),
    ("1e3", 1000, Y), ("1.5e3", 1500, Y), ("1E-3", 0.001, Y), (r"1.5 \times 10^3", 1500, Y),
    (r"1.5\times10^{3}", 1500, Y),
    (r"1.5 \cdot 10^{-3}", 0.0015, Y), ("1.5 x 10^3", 1500, Y), ("1.5×10³", 1500, Y), ("1e999999999", 1, n),
    ("35%", 35, Y), (r"35\%", 35, Y), ("35", r"35\%", Y), ("35 percent", 35, Y), ("35%", 36, n),
    ("x = 7", 7, Y), ("x=7", 7, Y), ("n = -7", -7, Y), ("7", "x=7", Y), ("3 + 4 = 7", 7, Y), ("x=7, y=8", 7, n),
    ("x=7", 8, n),
    ("5 cm", 5, Y), (r"5\text{ cm}", 5, Y), (r"5\,\mathrm{cm}", 5, Y), ("5 cm^2", 5, Y), ("5 m/s", 5, Y),
    ("60 km/h", 60, Y),
    ("5 apples", 5, Y), ("5 cm", "5 m", Y), ("5cm", 5, Y), (r"90^\circ", 90, Y), ("90°", 90, Y),
    (r"5 \text{ m}^2", 5, Y),
    ("**73**", 73, Y), ("`73`", 73, Y), (r"\text{73}", 73, Y), (r"\mathbf{73}", 73, Y), ("$73$", 73, Y),
    (r"\(73\)", 73, Y),
    ("٤٢", 42, Y), ("４２", 42, Y), ("४२", 42, Y), ("forty-two", 42, n), ("IV", 4, n), ("4 and 5", 4, n),
    ("4, 5", 5, n),
    ("4-5", 4, n), ("4 to 5", 4, n), ("about 4", 4, Y), ("≈ 4", 4, Y), ("4?", 4, Y), ("No. 4", 4, Y),
    ("four (4)", 4, Y),
    ("9" * 400, "9" * 400, Y), ("9" * 400, "9" * 399 + "8", n), ("3.14", "3.14", Y), ("3.14", "3.15", n),
    ("0.0000001", 0, n), ("0", "0.0000001", n), ("1000000000001", 10**12, n),
    ("123456789012345678901", 123456789012345678900, n),
    ("inf", 4, n), ("nan", 4, n), ("None", 4, n), ("true", 1, n),
]  # fmt: skip

# What only math decides: expressions, sets, intervals, equations, words.
MATH: list[tuple[str, Any, bool]] = [
    (r"\sqrt{12}", r"2\sqrt{3}", Y), (r"2\sqrt3", r"\sqrt{12}", Y), (r"\sqrt{12}", "3", n), (r"\sqrt{4}", 2, Y),
    (r"\pi", r"\pi", Y), ("π", r"\pi", Y), (r"2\pi", r"2\pi", Y), ("3.141593", r"\pi", Y), ("3.14", r"\pi", n),
    (r"\pi/2", r"\frac{\pi}{2}", Y),
    (r"2^{10}", 1024, Y), ("2^10", 1024, Y), ("10^2", 100, Y), (r"10^{-3}", 0.001, Y), ("5!", 120, Y),
    (r"\binom{5}{2}", 10, Y),
    (r"\log_2 8", 3, Y), (r"\ln e", 1, Y), (r"e^0", 1, Y), (r"\sin(0)", 0, Y), (r"\frac{3}{\sqrt{3}}", r"\sqrt{3}", Y),
    (r"\cos\frac{\pi}{3}", "1/2", Y), (r"3\cdot 4", 12, Y), (r"3 \times 4", 12, Y), (r"\sqrt[3]{8}", 2, Y),
    ("|-3|", 3, Y),
    ("0.333333", "1/3", Y), ("0.33", "1/3", n), ("0.3333333333", "1/3", Y), ("1/3", "0.333333", Y),
    ("0.667", "2/3", n),
    ("0.35", r"35\%", Y), (r"35\%", "0.35", Y), (r"3.5\%", "0.35", n), ("35", "0.35", n),
    ("(x+1)^2", "x^2+2x+1", Y), ("x^2+2x+1", "(x+1)^2", Y), ("x^2+2x", "(x+1)^2", n), ("2x", "x+x", Y), ("x", "y", n),
    ("xy", "yx", Y),
    (r"\frac{x}{2}", "x/2", Y), (r"\frac{x^2-1}{x-1}", "x+1", Y), ("a+b", "b+a", Y), ("a-b", "b-a", n),
    (r"e^{x}", "e^x", Y), ("2x+1", "2x-1", n),
    ("1,2", "1,2", Y), ("2,1", "1,2", Y), ("1,2,3", "1,2", n), ("1,2", "1,2,3", n), (r"\{1,2\}", r"\{2,1\}", Y),
    (r"\{1,2\}", "1,2", Y),
    (r"1 \text{ and } 2", "1,2", Y), (r"x=1 \text{ or } x=2", "1,2", Y), (r"\pm 3", "3,-3", Y),
    (r"x=\pm 3", r"\pm 3", Y), ("3,-3", r"\pm3", Y),
    (r"x=3 \text{ or } x=-3", r"\pm 3", Y), ("3", r"\pm 3", n), (r"\pm 3", 3, n), (r"\emptyset", r"\emptyset", Y),
    (r"\varnothing", r"\emptyset", Y),
    ("(1,2)", "(1,2)", Y), ("(2,1)", "(1,2)", n), ("(1, 2, 3)", "(1,2,3)", Y), (r"\left(1,2\right)", "(1,2)", Y),
    (r"(\frac12, 3)", "(0.5,3)", Y),
    ("[1,2]", "[1,2]", Y), ("[1,2]", "(1,2)", n), ("[0,1)", "[0,1)", Y), ("[0,1)", "[0,1]", n), ("[0,1)", "(0,1)", n),
    (r"(-\infty, 5)", r"(-\infty,5)", Y), (r"(-\infty,5]", r"(-\infty,5)", n), (r"(-\infty,5)", "x<5", Y),
    ("x<5", "x<5", Y), ("5>x", "x<5", Y), ("x>5", "x<5", n),
    (r"x \le 5", r"x\leq 5", Y), ("x ≤ 5", r"x\leq 5", Y), (r"1<x<2", "1<x<2", Y), ("(1,2)", "1<x<2", Y),
    (r"x\in(1,2)", "(1,2)", Y),
    (r"(1,2)\cup(3,4)", r"(1,2)\cup(3,4)", Y), (r"(3,4)\cup(1,2)", r"(1,2)\cup(3,4)", Y),
    (r"(1,2)\cup(3,5)", r"(1,2)\cup(3,4)", n), (r"\mathbb{R}", r"\mathbb{R}", Y),
    ("y=2x+1", "y=2x+1", Y), ("y=1+2x", "y=2x+1", Y), ("2x+1", "y=2x+1", Y), ("y=2x", "y=2x+1", n),
    ("y-2x=1", "y=2x+1", Y), ("x^2+y^2=1", "x^2+y^2=1", Y), ("y^2+x^2=1", "x^2+y^2=1", Y),
    ("x=7", "y=7", n), ("f(x)=2x", "2x", Y), ("x=7", "x=7", Y),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", Y),
    (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", Y),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", n),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", Y),
    ("1+2i", "2i+1", Y), ("i", "i", Y), ("1+2i", "1-2i", n), ("3:4", "3:4", Y), ("6:8", "3:4", Y), ("3:5", "3:4", n),
    ("12:30", "12:30", Y),
    (r"\text{E}", "E", Y), ("E", "E", Y), ("(E)", "E", Y), (r"\textbf{(E)}", "E", Y), ("E", "D", n), ("B", "B", Y),
    ("b", "B", Y),
    ("Tuesday", "Tuesday", Y), ("tuesday", "Tuesday", Y), (r"\text{Tuesday}", "Tuesday", Y), ("Monday", "Tuesday", n),
    ("adeTusy", "Tuesday", n), ("5", "Tuesday", n),
    ("yes", "yes", Y), (r"\text{Yes}", "yes", Y), ("no", "yes", n), ("eys", "yes", n),
    (r"\text{no solution}", "no solution", Y), ("No solution.", "no solution", Y),
    (r"\text{no solutions}", "no solution", n),
    ("odd", "odd", Y), ("even", "odd", n), (r"\text{John Smith}", "John Smith", Y), ("True", "true", Y),
    ("False", "true", n), (r"\text{five}", 5, n),
]  # fmt: skip

# Unmarked texts, for math's own search.
MATH_TEXT: list[tuple[str, Any, bool]] = [
    ("The answer is $\\frac{1}{2}$.", "1/2", Y), ("Thus $x = 3$, so the answer is $2x = 6$.", 6, Y),
    ("The answer is Tuesday.", "Tuesday", Y),
    ("The answer is Monday.", "Tuesday", n), ("It was Tuesday that it rained; the answer is Monday", "Tuesday", n),
    ("So we get $x^2+1$", "x^2+1", Y),
    ("So we get $x^2$", "x^2+1", n), ("The final answer is $(1,2)$.", "(1,2)", Y),
    ("So $2\\sqrt{3}$.", r"\sqrt{12}", Y), ("The total is 12\\,000", 12000, Y),
]  # fmt: skip

CHOICES: list[tuple[str, Any, bool]] = [
    ("B", "B", Y), ("b", "B", Y), ("(B)", "B", Y), ("[B]", "B", Y), ("B.", "B", Y), ("B)", "B", Y),
    ("B) Paris", "B", Y), ("B. Paris", "B", Y), ("B: Paris", "B", Y),
    ("**B**", "B", Y), (r"\boxed{B}", "B", Y), (r"\boxed{\text{B}}", "B", Y), (r"\boxed{(B)}", "B", Y),
    (r"\boxed{\textbf{(B) }}", "B", Y), (r"\boxed{B}", "(B)", Y), (r"\boxed{b}", "B", Y),
    ("<answer>B</answer>", "B", Y), ("<answer>Option B</answer>", "B", Y), ("<answer>(B) Paris</answer>", "B", Y),
    ("<answer>The answer is B</answer>", "B", Y), ("The answer is B.", "B", Y),
    ("The answer is (B).", "B", Y), ("The correct answer is: B", "B", Y), ("Answer: B", "B", Y),
    ("answer: **B**", "B", Y), ("So the correct option is (B) since it rains.", "B", Y), ("ANSWER: B", "B", Y),
    ("It is not A. The answer is B", "B", Y), ("The answer is A. No, the answer is B", "B", Y),
    ("The answer is B. No, the answer is A", "B", n), ("The answer is a matter of taste", "A", n),
    ("A", "B", n), ("", "B", n), ("AB", "B", n), ("A, B", "B", n), ("A or B", "B", n), ("B or A", "B", n),
    ("A and B", "A", n), (r"\boxed{A, B}", "B", n), (r"\boxed{A,B,C,D}", "A", n),
    ("Z", "B", n), ("Paris", "B", n), ("Because", "B", n), ("\x00B\x00", "B", n), (r"\boxed{A} \boxed{B}", "B", Y),
    (r"\boxed{B} \boxed{A}", "B", n), (r"\boxed{B", "B", n), ("B" * 1000, "B", n),
    ("I would choose D because option A is wrong. Answer: D", "D", Y), ("A. A cat", "A", Y), ("(A) I am", "A", Y),
    ("E", "E", Y), ("The answer is C) 12", "C", Y), ("B" + " " * 50, "B", Y),
    ("<think>A? B? C?</think> B", "B", n), ("<think>The answer is A?</think> The answer is B", "B", Y),
    ("选B", "B", n), ("答案: <answer>B</answer>", "B", Y),
]  # fmt: skip


def judge(name: str, **options: Any) -> Judge:
    return build([VerifierUse.model_validate({"name": name} | options)])


JUDGES = {name: judge(name) for name in ("numeric", "math", "choice")}


def check(name: str, completion: str, gold: Any, expected: bool) -> None:
    one = JUDGES[name]
    assert one.gold_problem(gold) is None
    verdict = one.judge(VerifyItem("x", "?", completion, "stop", gold))
    assert verdict.error is None
    assert verdict.reward == float(expected)
    assert verdict.correct is expected


def brief(value: Any) -> str:
    return ascii(value)[:40]


@pytest.mark.parametrize("name", ["numeric", "math"])
@pytest.mark.parametrize(("completion", "gold", "expected"), PLACE, ids=brief)
def test_where_the_answer_stands(name: str, completion: str, gold: Any, expected: bool) -> None:
    check(name, completion, gold, expected)


@pytest.mark.parametrize("name", ["numeric", "math"])
@pytest.mark.parametrize(("answer", "gold", "expected"), NUMBERS, ids=brief)
def test_how_a_number_is_written(name: str, answer: str, gold: Any, expected: bool) -> None:
    check(name, rf"so \boxed{{{answer}}}", gold, expected)


@pytest.mark.parametrize(("answer", "gold", "expected"), MATH, ids=brief)
def test_math(answer: str, gold: Any, expected: bool) -> None:
    check("math", rf"so \boxed{{{answer}}}", gold, expected)


@pytest.mark.parametrize(("completion", "gold", "expected"), MATH_TEXT, ids=brief)
def test_math_in_unmarked_text(completion: str, gold: Any, expected: bool) -> None:
    check("math", completion, gold, expected)


@pytest.mark.parametrize(("completion", "gold", "expected"), CHOICES, ids=brief)
def test_choice(completion: str, gold: Any, expected: bool) -> None:
    check("choice", completion, gold, expected)


def test_there_are_enough_pairs() -> None:
    assert len(PLACE) + len(NUMBERS) + len(MATH) + len(MATH_TEXT) + len(CHOICES) >= 300


def test_gold_and_answer_are_not_swapped() -> None:
    """math-verify's comparison is not symmetric: this is the order that docs and data rely on."""
    check("math", r"\boxed{(-\infty,5)}", "x<5", True)
    check("math", r"\boxed{x<5}", r"(-\infty,5)", False)
