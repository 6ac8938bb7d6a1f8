"""The notebooks of audits and of sweeps, as their reader meets them."""

import pytest
from browser.steps import chosen, drag, finished

pytestmark = pytest.mark.real


def test_audit(read):
    page = read("07_audit")
    picture = page.picture()
    assert "reseed: the promise to seeded requests is broken: leak after the first token" in picture.words()
    engine = page.control("Engine")
    fresh = chosen(picture, engine, "keyed", "isolate", "global", "one seed for all", "seeds turned")
    assert "seeds go to the wrong rows" in picture.words()
    spent = chosen(picture, engine, "reseed", "keyed", "global", "isolate", "seeds turned", "keyed")
    assert "keyed: the promise to seeded requests is kept" in picture.words()
    fresh += drag(page, picture, "Tokens", "ArrowLeft")
    spent += drag(page, picture, "Tokens", "ArrowRight", "ArrowLeft")
    finished(page, "07_audit", spent, fresh)


def test_sweeps(read):
    page = read("08_sweeps")
    picture = page.picture()
    assert (
        "4 points, each over all values of temperature: from 1 at top_p 0.5, policy global" in picture.words()
    )
    value, how, along, lines = map(page.control, ("Value", "Of its rows", "Along", "Lines"))
    spent = chosen(picture, value, "logprob", "margin", "token")
    spent += chosen(picture, how, "max", "min", "nunique")
    spent += chosen(picture, along, "temperature", "policy")
    assert lines.input_value() == "(nothing)"  # what lies along is no line
    spent += chosen(picture, lines, "temperature", "(nothing)")
    assert (
        "2 points, each over all values of temperature and top_p: from 2 at policy global" in picture.words()
    )
    spent += chosen(picture, value, "text")
    assert how.locator("option").all_text_contents() == ["nunique"]
    spent += chosen(picture, value, "margin")
    assert how.locator("option").count() == 5
    finished(page, "08_sweeps", spent, [])
