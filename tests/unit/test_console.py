"""The display: one line per step without a terminal, a live panel with one; and the warnings of field fault h5."""

from __future__ import annotations

import io
import json
import pickle
from collections import deque
from pathlib import Path

from rich.console import Console as RichConsole

from grpo_dist.monitor.advice import PATIENCE, Advisor
from grpo_dist.monitor.console import Console, display_rows, phase_times, spark, step_line

VALUES = {
    "rollout/reward_mean": 0.512,
    "rollout/correct_mean": 0.5,
    "rollout/tokens_per_second": 8123.4,
    "rollout/staleness_mean": 0.5,
    "rollout/staleness_max": 1.0,
    "rollout/zero_variance_fraction": 0.25,
    "train/loss": -0.0012,
    "train/tokens_per_second": 20000.0,
    "time/step": 1.5,
    "time/rollout_wait": 0.7,
    "time/learn": 0.6,
    "time/publish": 0.2,
}


def test_plain_lines() -> None:
    out = io.StringIO()
    with Console("run", 20, stream=out) as console:
        console.waiting("rollouts", lambda: "3 of 32 groups")
        console.step(3, VALUES)
        console.evaluated(3, {"eval/pass@1": 0.75, "eval/pass@4": 0.9, "other": 1.0})
        console.say("warning: something")
        console.evaluated(4, {"eval/pass@1": 0.75, "eval/pass@k": 0.75, "eval/k": 1})
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "step 3/20  reward 0.512  correct 50.0%  8,123 tokens/s  staleness 1  no spread 25%  loss -0.0012  "
        "1.50 s (rollout 0.70 s, learn 0.60 s, publish 0.20 s)  left 26 s"
    )
    assert lines[1] == "evaluation after step 3: pass@1 0.750, pass@4 0.900"
    assert lines[2:] == ["warning: something", "evaluation after step 4: pass@1 0.750"]
    assert "\x1b" not in out.getvalue()


def test_a_step_without_values_and_the_last_step() -> None:
    assert step_line(20, 20, {}, deque([1.0])) == "step 20/20"
    assert phase_times({}) == ""


def test_text_with_brackets_is_shown_as_it_is() -> None:
    out = io.StringIO()
    Console("run", 1, stream=out).say("data[0]: wanted [bold]text[/bold], found [/]")
    assert out.getvalue() == "data[0]: wanted [bold]text[/bold], found [/]\n"


def test_the_live_panel_shows_what_is_waited_for() -> None:
    console = Console("run", 20, live=True, stream=io.StringIO())
    console.step(1, VALUES)
    console.step(2, {**VALUES, "rollout/reward_mean": 0.9})
    console.evaluated(2, {"eval/pass@1": 0.75})
    console.waiting("rollouts", lambda: "3 of 32 groups")
    screen = RichConsole(file=io.StringIO(), width=100, force_terminal=False)
    screen.print(console._render())
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for wanted in (
        "2/20",
        "50.0%",
        "8,123 rolled out, 20,000 trained",
        "0.50 mean, 1 max",
        "25% of groups",
        "▁█  0.900",
        "after step 2: pass@1 0.750",
        "waiting for rollouts, 3 of 32 groups",
    ):
        assert wanted in text


def test_live_starts_and_stops_twice() -> None:
    out = io.StringIO()
    with Console("run", 2, live=True, stream=out) as console:
        console.waiting("rollouts")
        console.step(1, VALUES)
        console.close()


def test_pieces() -> None:
    assert spark([0.0, 0.5, 1.0]) == "▁▄█"
    assert spark([0.3, 0.3]) == "▁▁"
    assert display_rows({}) == []


ALL_TRUNCATED = {"rollout/truncated_fraction": 1.0, "rollout/groups": 4.0, "rollout/zero_variance_fraction": 0.5}
NO_SPREAD = {"rollout/zero_variance_fraction": 1.0, "rollout/groups": 4.0, "rollout/reward_mean": 0.0}


class TestAdvice:
    def test_all_truncated_is_said_once_after_three_steps(self) -> None:
        advisor = Advisor()
        said = [advisor.look(ALL_TRUNCATED) for _ in range(6)]
        assert [len(s) for s in said] == [0] * (PATIENCE - 1) + [1, 0, 0, 0]
        assert "100% of the completions were truncated at rollout.sampling.max_tokens" in said[PATIENCE - 1][0]

    def test_no_spread(self) -> None:
        advisor = Advisor()
        said = [text for _ in range(3) for text in advisor.look(NO_SPREAD)]
        assert len(said) == 1
        assert "0 of 4 groups with spread (all rewards of a group are equal; mean reward 0)" in said[0]

    def test_again_after_it_went_away(self) -> None:
        advisor = Advisor()
        said = []
        for values in [NO_SPREAD] * 3 + [{}] + [NO_SPREAD] * 3:
            said += advisor.look(values)
        assert len(said) == 2

    def test_a_healthy_run_hears_nothing(self) -> None:
        advisor = Advisor()
        healthy = {"rollout/truncated_fraction": 0.9, "rollout/zero_variance_fraction": 0.9, "rollout/groups": 9.0}
        assert [advisor.look(healthy) for _ in range(10)] == [[]] * 10


def test_errors_of_the_package_survive_a_process() -> None:
    from grpo_dist.errors import Interrupted, RecipeError, WorkerLost

    for error in (RecipeError("a\nb"), WorkerLost("rollout", "r-0", "gone"), Interrupted("stopped", 85)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.exit_code) == (type(error), str(error), error.exit_code)


def test_what_is_waited_for_is_on_disk_for_those_who_ask_from_elsewhere(tmp_path: Path) -> None:
    note = tmp_path / "now.json"
    console = Console("run", 2, stream=io.StringIO(), note=note)
    console.waiting("rollouts")
    first = json.loads(note.read_text())
    assert first["waiting_for"] == "rollouts"
    console.waiting("rollouts", lambda: "1 of 2")
    assert json.loads(note.read_text()) == first  # since when it waits for that
    lost = Console("run", 2, stream=io.StringIO(), note=tmp_path / "gone" / "now.json")
    lost.waiting("the learner")  # nowhere to write to: no error of the run
