"""Each notebook as its reader meets it: run all, move every control twice, read the figures, both themes."""

from functools import partial

import pytest
from browser.steps import changed, drag, finished, typed

pytestmark = pytest.mark.real
PROMPTS = "My favourite thing is", "In the middle of the night the old man"


def test_quickstart(read):
    page = read("00_quickstart")
    picture = page.picture()
    assert [label for label in picture.figures() if "count: 60" in label] == [
        "share of seeds (tick: exact): 1; label: doll; count: 60; p: 0.019"
    ]
    cached = drag(page, picture, "Temperature", "ArrowLeft", "ArrowLeft", "ArrowRight", "PageDown", "PageUp")
    policy = page.control("Policy")
    cached += [changed(picture, lambda p=p: policy.select_option(p)) for p in ("keyed", "reseed", "keyed")]
    cached += [changed(picture, lambda: policy.select_option("global"))]
    cached += drag(page, picture, "b's seed", "ArrowUp", "ArrowUp")
    cached += [changed(picture, lambda: policy.select_option("keyed"))]
    for label in ("Seeds tried", "Top-p (1 off)", "Min-p (0 off)", "Top-k (0 off)"):
        towards = "ArrowLeft" if label == "Top-p (1 off)" else "ArrowRight"
        cached += drag(page, picture, label, towards, towards)
    before, fresh = picture.figures(), []
    for _ in range(2):  # under keyed, who else is there changes nothing
        fresh.append(picture.after(page.control("b is in the batch").click))
        assert picture.figures() == before
    theirs = "Last week we all went to the", "On Sunday she drove to the"
    fresh += typed(page, "b's prompt", *theirs, watch=picture.after)
    fresh += typed(page, "a's prompt", *PROMPTS, watch=partial(changed, picture))
    finished(page, "00_quickstart", cached, fresh)


def test_last_seed_wins(read):
    page = read("01_last_seed_wins")
    steps, matrix = page.picture(0), page.picture(1)
    spent = drag(page, steps, "Event", "ArrowRight", "ArrowRight", "End", "Home")
    button = page.page.get_by_role("button", name="Step ▶")
    spent += [changed(steps, button.click) for _ in range(2)]
    assert "a seeds the generator with 7" in steps.words()
    spent += [changed(steps, page.page.get_by_role("button", name="◀ Back").click) for _ in range(2)]
    policy = page.control("Policy")
    fresh = [changed(steps, lambda p=p: policy.select_option(p)) for p in ("keyed", "reseed")]
    policy = page.control("Policy", 1)
    assert "30 changed a's token; of 30 changes of its own, 0" in matrix.words()
    spent += [changed(matrix, lambda p=p: policy.select_option(p)) for p in ("keyed", "global", "keyed")]
    assert "alone, 0 changed a's token" in matrix.words()
    spent += drag(page, matrix, "Temperature", "PageUp", "PageUp")
    for label in ("Seeds each", "First seed"):
        towards = "ArrowLeft" if label == "Seeds each" else "ArrowRight"
        spent += drag(page, matrix, label, towards, towards)
    fresh += typed(page, "a's prompt", *PROMPTS, watch=partial(changed, matrix))
    finished(page, "01_last_seed_wins", spent, fresh)


def test_cohort_planning(read):
    page = read("03_cohort_planning")
    picture = page.picture()
    spent = drag(page, picture, "Token budget", "PageUp", "ArrowRight", "ArrowRight")
    spent += drag(page, picture, "Most rows", "ArrowRight", "ArrowRight")
    spent += [changed(picture, page.control("The model can pad").click) for _ in range(2)]
    window, fresh = page.control("Window"), []
    for rows in ("a 50\nb 12\nd 33\nc 40 cached 33", "a 50\nb 12"):
        window.fill(rows)
        fresh.append(changed(picture, window.blur))
    assert "For 62 tokens" in picture.words()
    window.fill("a fifty")
    window.blur()
    page.page.get_by_text("must be a length").wait_for()
    finished(page, "03_cohort_planning", spent, fresh)
