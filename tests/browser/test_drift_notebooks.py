"""The notebooks on drift and batch invariance as their reader meets them: each control moved and read."""

import pytest
from browser.steps import changed, drag, finished

pytestmark = pytest.mark.real


def test_forward_drift(read):
    page = read("04_forward_drift")
    picture = page.picture()
    assert "of 100 seeds' tokens 0 could change, 0 did" in picture.words()
    seeds = [label for label in picture.figures() if "fate: safe" in label]
    assert len(seeds) > 90
    fresh = drag(page, picture, "Others", "ArrowLeft", "ArrowLeft")
    amplify, arithmetic, forward = (page.control(name) for name in ("Drift", "Arithmetic", "Forward"))
    cached = [
        changed(picture, lambda v=v: amplify.select_option(v)) for v in ("10,000 times", "100,000 times")
    ]
    assert "drift amplified 100,000 times" in picture.words()
    assert any("fate: did change" in label for label in picture.figures())
    cached += [changed(picture, lambda: amplify.select_option("as measured"))]
    cached += drag(page, picture, "Others", "ArrowRight", "ArrowLeft")
    fresh += [changed(picture, page.control("others come first").click)]
    cached += [changed(picture, page.control("others come first").click)]
    for label in ("Chunks of", "Cached", "Decoded"):
        fresh += drag(page, picture, label, "ArrowRight", "ArrowRight")
    for value in ("packed, rules on", "padded", "packed"):
        fresh += [changed(picture, lambda v=value: forward.select_option(v))]
        assert ("every logit has the bits" in picture.words()) == (value == "packed, rules on")
    for value in ("16-bit results", "float32", "16-bit results"):
        fresh += [changed(picture, lambda v=value: arithmetic.select_option(v))]
    assert any("fate: could change" in label for label in picture.figures())
    finished(page, "04_forward_drift", cached, fresh)


def test_batch_invariance(read):
    page = read("05_batch_invariance")
    picture = page.picture()
    assert picture.words().startswith("With no rules, 0 of 5 runs")
    boxes = [
        page.page.locator(".jp-OutputArea .widget-checkbox").filter(has_text=name).get_by_role("checkbox")
        for name in ("Tile:", "Block:", "Bucket:")
    ]
    fresh = [changed(picture, box.click) for box in boxes]
    assert picture.words().startswith("With tile and block and bucket, 5 of 5 runs")
    fresh += [changed(picture, box.click) for box in boxes]  # off, by sets of rules that are new
    cached = [changed(picture, box.click) for box in boxes]
    fresh += drag(page, picture, "Others", "ArrowRight", "ArrowRight")
    fresh += [changed(picture, page.control("others come first").click)]
    cached += [changed(picture, page.control("others come first").click)]
    for _ in range(2):
        took = changed(picture, page.page.get_by_role("button", name="Time these rules").click)
        assert " ms without" in picture.words()
        print(f"timed in {took:.0f} ms: {picture.words()}")
        cached += drag(page, picture, "Others", "ArrowLeft")
        assert " ms without" not in picture.words()
    for label in ("Chunks of", "Cached", "Decoded"):
        fresh += drag(page, picture, label, "ArrowRight", "ArrowRight")
        assert "5 of 5 runs have the alone run's bits" in picture.words()
    finished(page, "05_batch_invariance", cached, fresh)
