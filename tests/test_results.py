"""Results: floats that read back to the same bits, tables, and short reprs."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.results import Completion, Results, shortest_float32

LINE = {
    *("id", "choice", "tokens", "text", "finish_reason", "seed", "prompt_tokens", "cached"),
    *("cohort", "cohort_kind", "cohort_index", "logprobs", "margins", "max_drift"),
    *("policy", "forward", "invariant", "stream"),
}


def completion(**fields: object) -> Completion:
    given = {
        "id": "a",
        "tokens": [5, 6],
        "text": "<b> c",
        "pieces": ["<b>", " c"],
        "prompt_tokens": 3,
        "seed": 7,
        "logprobs": [-0.5, -1.5],
        "margins": [0.25, math.nan],
        "max_drift": [0.125, None],
        "policy": "keyed",
        "forward": "packed",
        "invariant": True,
    }
    return Completion(**{**given, **fields})


def digits(text: str) -> int:
    """How many significant ones a number is written with."""
    return len(text.partition("e")[0].replace(".", "").strip("-0"))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(99999997952.0)  # 1e11 is shorter, though written out it has a digit more
def test_a_float32_reads_back_to_the_same_bits(value: float) -> None:
    text = json.dumps(shortest_float32(value))
    assert np.float32(json.loads(text)).tobytes() == np.float32(value).tobytes()
    assert digits(text) <= digits(json.dumps(value))


def test_shortest_form_is_shorter_than_the_doubles() -> None:
    assert json.dumps(shortest_float32(np.float32(0.1))) == "0.1"
    assert json.dumps(float(np.float32(0.1))) == "0.10000000149011612"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_undefined_is_null(value: float | None) -> None:
    assert shortest_float32(value) is None


def test_a_line_has_the_documented_fields_sorted() -> None:
    line = completion().to_json()
    assert set(line) >= LINE and list(line) == sorted(line)
    assert set(line) - LINE == {"error", "resumed"}
    assert line["margins"] == [0.25, None] and line["max_drift"] == [0.125, None]
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_alternatives_are_in_the_line_if_asked_for() -> None:
    line = completion(top_logprobs=[[(5, np.float32(-0.1)), (9, -math.inf)], []]).to_json()
    assert line["top_logprobs"] == [[[5, -0.1], [9, None]], []]
    assert "top_logprobs" not in completion().to_json()


def test_nan_becomes_none_so_that_equal_completions_are_equal() -> None:
    assert completion() == completion() and hash(completion()) == hash(completion())
    assert completion().margins == (0.25, None)


def test_a_finish_reason_is_one_of_five() -> None:
    with pytest.raises(ValueError, match="finish_reason='done': must be one of length, stop, eos"):
        completion(finish_reason="done")


def test_results_are_found_by_place_id_and_choice() -> None:
    results = Results([completion(), completion(choice=1, seed=None), completion(id="b")])
    assert len(results) == 3 and results[-1].id == "b"
    assert results["a"].choice == 0 and results["a", 1].choice == 1
    assert results[:2] == Results(list(results)[:2]) and [c.id for c in results] == ["a", "a", "b"]
    with pytest.raises(KeyError, match="no choice 0 of request"):
        results["c"]


def test_a_frame_has_one_row_for_each_generated_token() -> None:
    frame = Results(
        [completion(), completion(id="b", seed=None, resumed=4), completion(id="c", tokens=[])]
    ).to_frame()
    assert list(frame.columns[:6]) == ["id", "choice", "index", "position", "token", "text"]
    assert frame["id"].tolist() == ["a", "a", "b", "b"]
    assert frame["index"].tolist() == [0, 1, 4, 5] and frame["position"].tolist() == [3, 4, 7, 8]
    assert frame["token"].tolist() == [5, 6, 5, 6] and frame["text"].tolist() == ["<b>", " c"] * 2
    assert frame["margin"].isna().tolist() == [False, True] * 2
    assert Results().to_frame().columns.tolist() == frame.columns.tolist()


def test_a_frame_keeps_all_bits_of_a_seed_beside_a_missing_one() -> None:
    frame = Results([completion(seed=2**63 - 1), completion(id="b", seed=None)]).to_frame()
    assert frame["seed"][0] == 2**63 - 1 and frame["seed"].isna().sum() == 2


def test_reprs_are_short_and_say_how_it_ended() -> None:
    assert repr(completion(text="x" * 500))[:44] == 'Completion("a", choice=0, length: "xxxxxxxxx'
    assert len(repr(completion(text="x" * 500))) < 120
    failed = completion(id="b", finish_reason="error", error='request "b": NaN at position 3')
    assert repr(Results([completion(), failed])) == "Results(2 completions: 1 length, 1 error)"
    assert "NaN at position 3" in repr(failed)


def test_html_escapes_text_and_sets_no_colour() -> None:
    page = Results(
        [completion(), completion(id="<i>", finish_reason="error", error="<script>")]
    )._repr_html_()
    assert "&lt;b&gt; c" in page and "&lt;script&gt;" in page and "&lt;i&gt;" in page and "<b>" not in page
    assert "color" not in page and "background" not in page
    assert "10 more" in Results([completion()] * 60)._repr_html_()
