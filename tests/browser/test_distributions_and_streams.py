"""The notebooks of first-token distributions and of streams, as their reader meets them."""

from functools import partial

import pytest
from browser.lab import Live, Notebook
from browser.steps import FRESH, changed, drag, finished, looked_at, timed, typed

pytestmark = pytest.mark.real
LONG = 15_000  # milliseconds, for the first 10,000 seeds without filters


def bars(picture: Live, word: str) -> list[str]:
    return [label for label in picture.figures() if f"label: {word}" in label]


def press(page: Notebook, picture: Live, *names: str) -> list[float]:
    return [picture.after(page.page.get_by_role("button", name=name, exact=True).click) for name in names]


def test_first_token_distributions(read):
    page = read("02_first_token_distributions")
    picture = page.picture()
    assert "6 of 49,152 tokens are left" in picture.words()
    assert bars(picture, "toy")
    spent = drag(page, picture, "Temperature", "ArrowLeft", "ArrowRight", "PageUp", "ArrowLeft")
    spent += drag(page, picture, "Min-p (0 off)", "ArrowLeft", "ArrowLeft", "Home")
    assert "8 of 49,152 tokens are left" in picture.words()
    spent += drag(page, picture, "Top-p (1 off)", "ArrowLeft", "ArrowRight", "End")
    spent += drag(page, picture, "Top-k (0 off)", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft")
    assert "10 of 49,152 tokens are left" in picture.words()
    seeds = page.control("Seeds")
    many = [changed(picture, lambda: seeds.select_option("10,000"))]
    assert "10,000 seeds drew 10 different ones" in picture.words()
    spent += drag(page, picture, "Temperature", "ArrowLeft", "ArrowLeft", "ArrowRight")
    spent += [changed(picture, lambda: seeds.select_option("1"))]
    assert "Seed 0 draws" in picture.words()
    spent += drag(page, picture, "First seed", "ArrowUp", "ArrowUp", "ArrowUp")
    spent += [changed(picture, lambda: seeds.select_option("100"))]
    fresh = [changed(picture, lambda: page.control("Go on with").select_option("ball"))]
    assert "playing with a ball”" in picture.words()
    fresh.append(changed(picture, picture.place.locator(".mark-rect path").first.click))
    assert "playing with a ball" in picture.words() and "a ball”" not in picture.words()
    spent += [changed(picture, page.page.get_by_role("button", name="◀ Take one back").click) for _ in "12"]
    assert "playing with a”" in picture.words()
    prompts = "Yesterday I went to the", "My favourite thing is"
    fresh += typed(page, "Prompt", *prompts, watch=partial(changed, picture))
    timed("first 10,000 seeds", many, LONG)
    finished(page, "02_first_token_distributions", spent, fresh)


def test_streams_and_arrivals(read):
    page = read("06_streams_and_arrivals")
    picture = page.picture()
    assert "the same as alone" in picture.words()
    spent = press(page, picture, "Step ▶")
    policy, who = page.control("Policy"), page.control("Row")
    fresh = [changed(picture, lambda: policy.select_option("global"))]
    assert "not those it draws alone" in picture.words()
    fresh += [changed(picture, lambda: policy.select_option("keyed"))]
    assert "the same as alone" in picture.words()
    cells = len([label for label in picture.figures() if "lane: b" in label])
    spent += press(page, picture, "Pause", "Step ▶", "Resume", "Step ▶")
    assert len([label for label in picture.figures() if "lane: b" in label]) > cells
    who.select_option("c")
    page.idle()
    spent += press(page, picture, "Arrive", "Step ▶", "Preempt", "Step ▶", "Cancel", "Step ▶")
    page.page.get_by_role("button", name="Resume", exact=True).click()
    page.page.get_by_text("c can't resume now: it is cancelled").wait_for()
    assert "the same as alone" in picture.words()
    fresh += press(page, picture, "Start over")
    assert "Before step 3" in picture.words()
    timed("a command or a step", spent, FRESH)
    timed("another policy", fresh, FRESH)
    assert page.errors() == []
    looked_at(page, "06_streams_and_arrivals")
