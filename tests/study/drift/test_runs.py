"""`study.drift.runs` and the explorers over it, on the tiny model."""

import numpy as np
import pytest

import toolkit as tk
from toolkit.forward.shapes import PLAIN, Shapes
from toolkit.study.drift.compositions import Composition
from toolkit.study.drift.runs import Apart, Runs, rules
from toolkit.view import charts
from toolkit.view.explorers.drift import DriftExplorer, RulesExplorer, compositions

OTHERS = ("Yesterday I went", "My favourite thing is")


@pytest.fixture(scope="module")
def model():
    return tk.load("tiny")


@pytest.fixture(scope="module")
def runs(model):
    return Runs(model, tk.Request("abcdef", id="a", seed=7), seeds=40)


def test_some_of_the_rules_are_taken_and_the_others_left_plain():
    found = Shapes(8, 16, 4, 128, (256,))
    assert rules(found) == found
    assert rules(found, tile=False, block=False, bucket=False) == PLAIN
    assert rules(found, block=False) == Shapes(8, 16, 1, 128, (256,))
    assert rules(found, tile=False, bucket=False) == Shapes(block=4)


def test_with_the_rules_a_run_has_the_alone_runs_bits_and_no_token_could_change(runs):
    found = tk.doctor(runs.model).verdict
    if not found.holds:
        pytest.skip("the tiny model is not batch-invariant on this device: see toolkit doctor")
    for how in compositions(OTHERS, len(runs.mine)).values():
        assert runs.largest(found.shapes, how) == 0
        apart = runs.apart(found.shapes, how, amplify=1e6)
        assert not apart.could.any() and not apart.changed.any()


def test_a_token_that_changes_is_one_that_could(runs):
    how = Composition(OTHERS, chunk=3)
    runs._logits[PLAIN, how] = runs.logits(PLAIN, Composition()) + np.float32(1e-3) * np.sin(
        np.arange(runs.model.vocab_size, dtype=np.float32)
    )
    assert runs.apart(PLAIN, how).largest < 2e-3
    wide = runs.apart(PLAIN, how, amplify=2000)
    assert wide.changed.any()
    assert not (wide.changed & ~wide.could).any()


def test_runs_that_are_known_are_not_made_again(runs):
    runs.logits(PLAIN, Composition())
    again = Runs(runs.model, runs.request, 0, known=runs)
    assert again.logits(PLAIN, Composition()) is runs.logits(PLAIN, Composition())
    assert not again._forwards
    off, on = again.seconds((PLAIN, "sequential"), Composition(), repeats=1)
    assert off > 0 and on > 0


def test_what_is_drawn_says_which_seeds_are_safe_and_leaves_out_those_without_a_limit():
    moved, reach = np.array([0, 0.2], np.float32), np.array([0.1, 0.5, np.nan], np.float32)
    data = charts.reach_data(Apart(moved, reach, np.zeros(3, bool)))
    assert [(s["seed"], s["fate"]) for s in data["seeds"]] == [(1, "safe"), (0, "could change")]
    assert data["says"] == [{"says": "equal to the bit: 1 of 2"}]
    still = charts.reach_data(Apart(np.zeros(2, np.float32), reach, np.zeros(3, bool)))
    assert still["line"] == [] and still["moved"] == []
    assert {s["fate"] for s in still["seeds"]} == {"safe"}


def test_the_rules_explorer_tells_what_is_left_and_what_it_took(model):
    explorer = RulesExplorer(model, tk.Request("abcdef"), siblings=OTHERS)
    assert explorer.words.startswith("With no rules, ")
    for box in explorer.rules.values():
        box.value = True
    explorer.wait()
    assert "With tile and block and bucket, " in explorer.words
    explorer.chooser.others.value = 2
    explorer.chooser.last.value = True
    explorer.wait()
    assert "your own is run after 2 others" in explorer.words
    explorer.button.click()
    explorer.wait()


def test_the_drift_explorer_labels_what_is_amplified(model):
    explorer = DriftExplorer(model, tk.Request("abcdef"), siblings=OTHERS, seeds=20)
    assert "amplified" not in explorer.words
    for name in ("packed, rules on", "padded", "sequential"):
        explorer.forward.value = name
        explorer.wait()
        assert explorer.words.startswith("Run with 2 others: ")
    explorer.forward.value = "packed"
    explorer.amplify.value = "100,000 times"
    explorer.arithmetic.value = "16-bit results"
    explorer.wait()
    assert "drift amplified 100,000 times" in explorer.words or "every logit has the bits" in explorer.words
