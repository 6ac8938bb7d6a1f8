"""Rows that come and go: under keyed noise nobody's tokens change, under a shared generator they do."""

import pytest

import toolkit as tk
from toolkit.study.live_batch import Company, alone

SCHEDULES = [
    "arrive a, step 3, arrive b, step 2, arrive c, step 8",
    "arrive b, step, arrive a, step 2, pause a, step 2, arrive c, resume a, step 8",
    "arrive a, arrive c, step 2, preempt a, step 2, cancel c, preempt a, arrive b, step 8",
]


@pytest.fixture(scope="module")
def model() -> tk.Model:
    return tk.load("tiny")


@pytest.fixture
def requests() -> list[tk.Request]:
    prompts = ("abcdef", "xy", "hello there")
    return [
        tk.Request(p, id=id, seed=s, max_tokens=8) for p, id, s in zip(prompts, "abc", (7, 3, 5), strict=True)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_draws_the_same_whoever_comes_and_goes(model, requests, schedule):
    kept = {p: Company(model, requests, p).play(schedule).tokens("a") for p in ("keyed", "global")}
    assert kept["keyed"] == alone(model, requests[0])
    assert kept["global"] != alone(model, requests[0], "global")  # the measure moves where it should


def test_the_table_says_what_each_step_computed_of_a_row(model, requests):
    company = Company(model, requests).play(SCHEDULES[1])
    frame = company.to_frame()
    a = frame[frame["row"] == "a"]
    assert a["index"].tolist() == list(range(8))
    assert a["span"].tolist() == [6, 1, 8, 1, 1, 1, 1, 1]  # the prompt; on; all of it again, after the pause
    assert tuple(a["token"]) == company.tokens("a")
    assert company.actions().values.tolist()[2] == [3, "pause", "a"]
    assert company.status["a"] == "finished" and "a finished" in repr(company)


def test_a_row_that_cannot_do_that_now_says_so(model, requests):
    company = Company(model, requests)
    with pytest.raises(ValueError, match="a can't pause now: it is away"):
        company.act("pause", "a")
    with pytest.raises(ValueError, match='action="fly" of row "a": must be one of arrive, pause'):
        company.act("fly", "a")
    company.play("arrive a, step, cancel a, step")
    with pytest.raises(ValueError, match="it is cancelled"):
        company.act("resume", "a")
    assert len(company.tokens("a")) == 1
