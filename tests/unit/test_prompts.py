"""From rows to prompts: what is refused, what is dropped, and that group ids mean the same thing for ever."""

from __future__ import annotations

import csv
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_dist.config import DataSection, VerifierUse
from grpo_dist.data.mixing import Mixture
from grpo_dist.data.prompts import PromptStream, load_prompts
from grpo_dist.errors import DataError
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.registry import build

Write = Any


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any, verifier: str | None = "numeric", **keys: Any) -> PromptStream:
    data = DataSection.model_validate({"source": str(path), "template": "raw"} | keys)
    judge = build([VerifierUse(name=verifier)]) if verifier else None
    return load_prompts(data, tokenizer, seed=0, group_size=4, judge=judge)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(count)]


def test_one_row(tmp_path: Path, tokenizer: Any) -> None:
    stream = load(write(tmp_path, [{"prompt": "1+1=", "answer": 2, "level": "easy"}]), tokenizer)
    assert len(stream) == 1
    request = stream.request(3)
    assert (request.group_id, request.epoch) == (3, 3)
    assert request.prompt.text == "1+1="
    assert request.prompt.answer == 2
    assert request.prompt.extra == {"level": "easy"}
    assert tokenizer.decode(request.prompt.token_ids) == "1+1="


def test_epochs_differ_and_cover_every_prompt(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, rows(8))
    stream, again = load(path, tokenizer), load(path, tokenizer)
    epochs = [[stream.request(8 * epoch + place).prompt.text for place in range(8)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # A cursor is a group id: any order of asking, also in a fresh process, gives the same prompt and seed.
    assert [again.request(i) for i in reversed(range(24))] == [stream.request(i) for i in reversed(range(24))]
    assert len({stream.request(i).seed // 4 for i in range(24)}) == 24
    assert stream.fingerprint == again.fingerprint
    assert stream.fingerprint != load(write(tmp_path, rows(9)), tokenizer).fingerprint


def test_file_order_without_shuffle(tmp_path: Path, tokenizer: Any) -> None:
    stream = load(write(tmp_path, rows(3)), tokenizer, shuffle=False)
    assert [stream.request(i).prompt.text for i in range(6)] == ["0+1=", "1+1=", "2+1="] * 2
    assert stream.request(0).seed != stream.request(3).seed


def test_too_long_is_dropped_never_cut(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"prompt": "1" * length, "answer": 1} for length in (31, 32, 33)])
    stream = load(path, tokenizer, max_prompt_tokens=32)
    assert sorted(len(prompt.token_ids) for prompt in stream.prompts()) == [31, 32]
    assert stream.dropped["too_long"] == 1


def test_all_too_long_says_so(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"all 2 prompts .* longest has 12 tokens"):
        load(write(tmp_path, [{"prompt": "1" * 12, "answer": 1}] * 2), tokenizer, max_prompt_tokens=8)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_data_set(tmp_path: Path, tokenizer: Any, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="has no rows"):
        load(path, tokenizer)


def test_missing_file(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load(tmp_path / "absent.jsonl", tokenizer)


def test_bad_rows_are_listed_all_at_once(tmp_path: Path, tokenizer: Any) -> None:
    path = write(
        tmp_path,
        [
            {"prompt": "1+1=", "answer": 2},
            "{not json",
            [1, 2],
            {"answer": 2},
            {"prompt": "", "answer": 2},
            {"prompt": 7, "answer": 2},
            {"prompt": "2+2="},
            {"prompt": "2+2=", "answer": None},
            {"prompt": "2+2=", "answer": ["4"]},
            {"prompt": "2+2=", "answer": "Tuesday"},
            {"prompt": "2+2=", "answer": True},
            '{"prompt": "half \\ud83d pair", "answer": 2}',
        ],
    )
    with pytest.raises(DataError) as error:
        load(path, tokenizer)
    lines = str(error.value).splitlines()
    assert len(lines) == 11
    for number, line in enumerate(lines, 2):
        assert line.startswith(f"rows.jsonl:{number}"), line
        assert "wanted" in line
        assert "found" in line
    assert "column 'answer': wanted a number, not 'Tuesday' (str)" in lines[8]


def test_wrong_column_name_is_one_message(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"prompt_text": f"{i}", "answer": i} for i in range(1000)])
    with pytest.raises(DataError) as error:
        load(path, tokenizer)
    assert str(error.value) == (
        "rows.jsonl: wanted a column 'prompt', found only prompt_text, answer in all 1000 rows; "
        "set data.columns to the right one, e.g. 'prompt_text'"
    )


def test_columns_can_be_mapped(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"question": "1+1=", "gold": 2, "key": "a"}])
    stream = load(path, tokenizer, columns={"prompt": "question", "answer": "gold", "id": "key"})
    assert stream.request(0).prompt.id == "a"


def test_same_id_twice(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"prompt": "1", "answer": 1, "id": "a"}, {"prompt": "2", "answer": 2, "id": "a"}])
    with pytest.raises(DataError, match="'a', which line 1 has"):
        load(path, tokenizer, columns={"id": "id"})


def test_duplicates_and_equal_prompts_with_other_golds(tmp_path: Path, tokenizer: Any) -> None:
    same = {"prompt": "1+1=", "answer": 2}
    stream = load(write(tmp_path, [same, same, {"prompt": "1+1=", "answer": 3}]), tokenizer, shuffle=False)
    ids = [stream.request(i).prompt.id for i in range(3)]
    assert len(set(ids)) == 3
    assert ids[1] == f"{ids[0]}-2"
    assert [stream.request(i).prompt.answer for i in range(3)] == [2, 2, 3]


@pytest.mark.parametrize("gold", [0, "0", 0.0, 3, "3", 3.0])
def test_golds_in_any_form(tmp_path: Path, tokenizer: Any, gold: Any) -> None:
    stream = load(write(tmp_path, [{"prompt": "1", "answer": gold}]), tokenizer)
    assert stream.request(0).prompt.answer == gold


def test_answers_may_be_absent_when_nobody_compares(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"prompt": "1"}])
    with pytest.raises(DataError, match="wanted a column 'answer'"):
        load(path, tokenizer, verifier=None)


def test_evaluation_is_held_out_by_content(tmp_path: Path, tokenizer: Any) -> None:
    twice = rows(50) + rows(50)
    stream = load(write(tmp_path, twice), tokenizer, evaluation={"size": 10})
    held_out = {prompt.text for prompt in stream.evaluation}
    trained = {prompt.text for prompt in stream.prompts()}
    assert len(stream.evaluation) == 10
    assert not held_out & trained
    assert len(stream) + len(stream.evaluation) + stream.dropped["in_evaluation"] == 100
    shuffled = load(write(tmp_path, twice[::-1]), tokenizer, evaluation={"size": 10})
    assert {prompt.text for prompt in shuffled.evaluation} == held_out


def test_evaluation_may_not_take_everything(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="leaves none to train on"):
        load(write(tmp_path, rows(5)), tokenizer, evaluation={"size": 5})


def test_own_evaluation_source_wins_over_training_rows(tmp_path: Path, tokenizer: Any) -> None:
    held_out = write(tmp_path, rows(3), "eval.jsonl")
    stream = load(write(tmp_path, rows(10)), tokenizer, evaluation={"source": str(held_out), "size": 3})
    assert len(stream) == 7
    assert stream.dropped["in_evaluation"] == 3


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_chat_template_with_one_bos(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    rows = [
        {"prompt": "hi", "answer": 1},
        {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], "answer": 1},
    ]
    stream = load(write(tmp_path, rows), tokenizer, template="chat", system_prompt="add", shuffle=False)
    assert stream.request(0).prompt.text == "<bos>[system:add][user:hi]>"
    assert stream.request(1).prompt.text == "<bos>[system:be][user:hi]>"
    for i in range(2):
        assert stream.request(i).prompt.token_ids.count(tokenizer.bos_token_id) == 1
        assert stream.request(i).prompt.token_ids[0] == tokenizer.bos_token_id


def test_prompts_are_measured_after_the_chat_template(tmp_path: Path, tiny_model: Path) -> None:
    """g1: at the limit - 1, the limit and the limit + 1, template included: two kept whole, the third dropped."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    around = len(tokenizer(f"<bos>[user:{'1' * 20}]>", add_special_tokens=False)["input_ids"]) - 20
    made = [{"prompt": "1" * (32 - around + more), "answer": 1} for more in (-1, 0, 1)]
    stream = load(write(tmp_path, made), tokenizer, template="chat", max_prompt_tokens=32)
    kept = sorted((len(p.token_ids), p.text) for p in stream.prompts())
    assert kept == [(31 + i, f"<bos>[user:{made[i]['prompt']}]>") for i in range(2)]
    assert stream.dropped["too_long"] == 1


def test_raw_prompt_gets_the_bos_that_the_tokenizer_adds(tmp_path: Path, tiny_model: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    stream = load(
        write(tmp_path, [{"prompt": "12", "answer": 1}, {"prompt": "<bos>12", "answer": 1}]), tokenizer, shuffle=False
    )
    assert [stream.request(i).prompt.token_ids for i in range(2)] == [(1, 5, 6), (1, 5, 6)]


def test_chat_template_must_exist(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="use 'raw'"):
        load(write(tmp_path, rows(1)), tokenizer, template="chat")


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [{"role": "user"}],
        [{"role": "boss", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        ["x"],
        " ",
        3,
        None,
    ],
)
def test_bad_messages(tmp_path: Path, tiny_model: Path, prompt: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    with pytest.raises(DataError, match=r"rows.jsonl:1, column 'prompt'"):
        load(write(tmp_path, [{"prompt": prompt, "answer": 1}]), tokenizer, template="chat")


def test_sources_are_mixed_by_weight(tmp_path: Path, tokenizer: Any) -> None:
    easy = write(tmp_path, [{"prompt": f"a{i}", "answer": i} for i in range(6)], "easy.jsonl")
    hard = write(tmp_path, [{"question": f"b{i}", "gold": "x"} for i in range(3)], "hard.jsonl")
    data = DataSection.model_validate(
        {
            "template": "raw",
            "mix": [
                {"source": str(easy), "weight": 3},
                {
                    "source": str(hard), "weight": 1, "verifier": "exact",
                    "columns": {"prompt": "question", "answer": "gold"},
                },
            ],
        }
    )  # fmt: skip
    judge = build([VerifierUse(name="numeric"), VerifierUse(name="exact")])
    stream = load_prompts(data, tokenizer, seed=0, group_size=4, judge=judge)
    requests = [stream.request(i) for i in range(24)]
    kinds = "".join(request.prompt.text[0] for request in requests)
    assert all(kinds[start : start + 4].count("b") == 1 for start in range(0, 24, 4))
    # 18 draws of 6 easy ones: three epochs; 6 draws of 3 hard ones: two. Each prompt once per epoch of its source.
    for kind, size in (("a", 6), ("b", 3)):
        drawn = [request for request in requests if request.prompt.text[0] == kind]
        for epoch in range(len(drawn) // size):
            texts = [request.prompt.text for request in drawn if request.epoch == epoch]
            assert len(texts) == len(set(texts)) == size
    assert {request.prompt.verifier for request in requests} == {None, "exact"}
    assert len({request.seed for request in requests}) == 24
    assert stream.request(17) == requests[17]
    assert len(stream) == 9
    assert set(stream.examples()) == {None, "exact"}


def test_evaluation_of_a_mixture_is_held_out_of_every_source(tmp_path: Path, tokenizer: Any) -> None:
    one, two = write(tmp_path, rows(20), "one.jsonl"), write(tmp_path, rows(30), "two.jsonl")
    data = DataSection.model_validate(
        {"template": "raw", "mix": [{"source": str(one)}, {"source": str(two)}], "evaluation": {"size": 10}}
    )
    stream = load_prompts(data, tokenizer, seed=0, group_size=4)
    held_out = {prompt.text for prompt in stream.evaluation}
    assert len(stream.evaluation) == 10
    assert not held_out & {prompt.text for prompt in stream.prompts()}


def test_bad_rows_of_all_sources_are_listed_together(tmp_path: Path, tokenizer: Any) -> None:
    sources = [
        write(tmp_path, [{"prompt": "1", "answer": "x"}, {"prompt": "1", "answer": 1}], f"{n}.jsonl") for n in "ab"
    ]
    data = DataSection.model_validate({"template": "raw", "mix": [{"source": str(path)} for path in sources]})
    with pytest.raises(DataError) as error:
        load_prompts(data, tokenizer, seed=0, group_size=4, judge=build([VerifierUse(name="numeric")]))
    assert [line.split(",")[0] for line in str(error.value).splitlines()] == ["a.jsonl:1", "b.jsonl:1"]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "give data.source"), ({"source": "a", "mix": [{"source": "b"}]}, "give data.source"),
        ({"mix": [{"source": "b"}], "limit": 3}, "belong to each entry"),
        ({"mix": [{"source": "b", "weight": 0}]}, "weight"),
    ],
)  # fmt: skip
def test_source_or_mix(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DataSection.model_validate(keys)


def test_mixture_keeps_its_shares() -> None:
    for weights in ([1], [1, 1], [0.7, 0.3], [1, 2, 5], [0.1, 0.123456789], [1000, 1]):
        mixture = Mixture(weights)
        seen = [0] * len(weights)
        for number in range(3000):
            source, before = mixture.draw(number)
            assert before == seen[source]
            seen[source] += 1
            for place, weight in enumerate(weights):
                assert abs(seen[place] - (number + 1) * weight / sum(weights)) < len(weights) + 1


def test_limit(tmp_path: Path, tokenizer: Any) -> None:
    assert len(load(write(tmp_path, rows(10)), tokenizer, limit=4)) == 4


def gym(tokenizer: Any, **keys: Any) -> PromptStream:
    data = DataSection.model_validate({"source": "reasoning_gym:chain_sum", "template": "raw"} | keys)
    judge = build([VerifierUse(name="reasoning_gym")])
    return load_prompts(data, tokenizer, seed=0, group_size=4, judge=judge)


def test_reasoning_gym_rows_carry_their_scorer(tokenizer: Any) -> None:
    parameters = {"size": 20, "seed": 5, "min_terms": 2, "max_terms": 2}
    stream = gym(tokenizer, parameters=parameters, evaluation={"size": 4})
    assert len(stream) + len(stream.evaluation) + stream.dropped["in_evaluation"] == 20
    assert stream.fingerprint == gym(tokenizer, parameters=parameters, evaluation={"size": 4}).fingerprint
    judge = build([VerifierUse(name="reasoning_gym")])
    for prompt in (stream.request(7).prompt, stream.evaluation[0]):
        for said, expected in ((prompt.answer, True), ("xx", False)):
            item = VerifyItem("x", prompt.text, said, "stop", prompt.answer, extra=prompt.extra)
            assert judge.judge(item).correct is expected


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"source": "reasoning_gym:no_such_task"}, "no_such_task"), ({"parameters": {"terms": 3}}, "chain_sum"),
        ({"parameters": {"min_terms": 5, "max_terms": 2}}, "chain_sum"), ({"parameters": {"size": 0}}, "whole numbers"),
    ],
)  # fmt: skip
def test_reasoning_gym_that_cannot_be_had(tokenizer: Any, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        gym(tokenizer, **keys)


def test_only_procedural_sources_have_parameters(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"data\.parameters"):
        load(write(tmp_path, rows(1)), tokenizer, parameters={"size": 3})


def test_quickstart_rows(tokenizer: Any) -> None:
    data = DataSection.model_validate({"source": "quickstart", "template": "raw", "evaluation": {"size": 100}})
    judge = build([VerifierUse.model_validate({"name": "exact", "after": "#", "require_stop": True})])
    stream = load_prompts(data, tokenizer, seed=0, group_size=4, judge=judge)
    assert len(stream.evaluation) == 100
    assert len(stream) == 6561 - 256
    assert not {prompt.text for prompt in stream.evaluation} & {prompt.text for prompt in stream.prompts()}


def test_two_hundred_thousand_rows_are_held_as_they_were_read(tmp_path: Path, tokenizer: Any) -> None:
    """Memory is bounded by the rows themselves: no token lists are kept. (An int list alone would be over 400 MB.)"""
    path = tmp_path / "big.jsonl"
    with path.open("w") as lines:
        for i in range(200_000):
            lines.write(f'{{"prompt": "what is {i} plus {i}, and why is it so?", "answer": {2 * i}}}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = load(path, tokenizer, evaluation={"size": 100})
    assert len(stream) == 199_900
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 350
    assert stream.request(10**9).epoch == 10**9 // 199_900


def test_prompts_beyond_ascii_are_measured(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "é" * length, "answer": 1} for length in (8, 9)] + [{"prompt": "1" * 9, "answer": 1}]
    stream = load(write(tmp_path, rows), tokenizer, max_prompt_tokens=8)
    assert len(stream) == 1
    assert stream.dropped["too_long"] == 2


def test_a_template_that_refuses_is_a_bad_row(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}x"
    rows = [{"prompt": [{"role": "user", "content": "a"}] * 2, "answer": 1}, {"prompt": "a", "answer": 1}]
    with pytest.raises(DataError, match=r"rows.jsonl:1, column 'prompt': wanted messages .* \(one at a time\)"):
        load(write(tmp_path, rows), tokenizer, template="chat")


def as_file(folder: Path, kind: str, made: list[dict[str, Any]]) -> Path:
    """The same rows in each format."""
    path = folder / f"made.{kind}"
    columns = ("prompt", "answer")
    if kind in ("jsonl", "ndjson"):
        return write(folder, made, path.name)
    if kind == "json":
        path.write_text(json.dumps(made))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as out:
            table = csv.writer(out, delimiter="," if kind == "csv" else "\t")
            table.writerow(columns)
            table.writerows([row.get(column, "") for column in columns] for row in made)
    else:
        import pyarrow
        import pyarrow.parquet

        text = pyarrow.string()
        columns_of = {column: pyarrow.array([row.get(column) for row in made], text) for column in columns}
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns_of), path)
        else:
            import datasets

            datasets.Dataset(pyarrow.table(columns_of)).save_to_disk(str(path))
    return path


FORMATS = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "folder"]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    """No row, one row, unicode, a row twice, equal prompts with different golds, and rows without an answer."""
    with pytest.raises(DataError, match=r"has no rows|no row"):
        load(as_file(tmp_path, kind, []), tokenizer)
    made = [{"prompt": "1+1=", "answer": "2"}]
    (tmp_path / "one").mkdir()
    one = load(as_file(tmp_path / "one", kind, made), tokenizer)
    assert (len(one), one.request(5).prompt.text, one.request(5).epoch) == (1, "1+1=", 5)
    made += [
        {"prompt": "日本 é 1+1=", "answer": "2"},
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "1+1=", "answer": "3"},
    ]
    (tmp_path / "four").mkdir()
    four = load(as_file(tmp_path / "four", kind, made), tokenizer, shuffle=False)
    got = [four.request(i).prompt for i in range(4)]
    assert [(p.text, p.answer) for p in got[2:]] == [("1+1=", "2"), ("1+1=", "3")]
    assert len({p.id for p in got}) == 4
    (tmp_path / "bad").mkdir()
    bad = [{"prompt": "1"}, *made, {"prompt": "", "answer": "2"}, {"prompt": "2", "answer": "Tuesday"}]
    with pytest.raises(DataError) as error:
        load(as_file(tmp_path / "bad", kind, bad), tokenizer)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    first = 2 if kind in ("csv", "tsv") else 1  # below the header
    for line, number, column in zip(lines, (first, first + 5, first + 6), ("answer", "prompt", "answer"), strict=True):
        place = f"made.{kind}[train]" if kind == "folder" else f"made.{kind}"
        assert f"{place}:{number}, column '{column}': wanted" in line
        assert "found" in line or "not" in line
