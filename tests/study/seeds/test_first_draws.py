"""`first_draws` draws what `Prefilled.replay` draws, which is what the engine draws."""

import pytest

import toolkit as tk
from toolkit import noise
from toolkit.engine.policies import POLICIES
from toolkit.study.seeds.first_draws import Tries
from toolkit.study.seeds.prefilled import prefill


@pytest.fixture(scope="module")
def batch(tiny):
    rows = [
        tk.Request("one two three", id="a", seed=1),
        tk.Request("four", id="b", seed=2),
        tk.Request("five six", id="g", seed=3, temperature=0),
        tk.Request("seven eight nine", id="c"),
    ]
    return prefill(tiny, rows)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("row", ["a", "b", "g"])
def test_tries_equal_replays_under_every_policy(batch, policy, row):
    seeds = (
        [{row: s, "b": t} for s in range(6) for t in (2, 9)] if row != "b" else [{"b": s} for s in range(9)]
    )
    changes = {row: {"top_k": 30, "temperature": 1.3}} if row != "g" else None
    tokens = Tries(batch).tokens(policy, row, seeds, changes)
    assert tokens == [int(batch.replay(policy, row, s, changes).tokens.item()) for s in seeds]
    assert row == "g" or policy == "global" or len(set(tokens)) > 1


def test_a_seeds_token_does_not_depend_on_which_seeds_were_tried_before(batch):
    def tokens(tries, seeds, row="a"):
        return tries.tokens("keyed", row, [{row: s} for s in seeds])

    tries = Tries(batch)
    for seeds in (range(5), range(9), range(3), range(4, 20), [7, 7, 2], [-1, 2**62], range(5)):
        for row in ("a", "b", "c"):  # at several positions, of which two are kept
            assert tokens(tries, seeds, row) == tokens(Tries(batch), seeds, row)
        assert len(tries._noise) <= 2
    assert len(set(tokens(tries, range(9)))) > 1


def test_noise_is_made_for_new_seeds_only(batch, monkeypatch):
    made, bits = [], noise.bits
    monkeypatch.setattr(noise, "bits", lambda keys, vocab: made.append(len(keys)) or bits(keys, vocab))
    tries = Tries(batch)
    for count in (5, 9, 3, 9):
        tries.tokens("keyed", "a", [{"a": s} for s in range(count)])
    assert made == [5, 4]
    tries.tokens("keyed", "a", [{"a": s} for s in range(1, 5)])
    assert made == [5, 4, 4]


@pytest.mark.parametrize("how", [{"typical_p": 0.05}, {"xtc_probability": 1.0, "xtc_threshold": 0.01}])
def test_a_greedy_row_takes_the_best_whatever_the_filters(batch, how):
    tries, plain = Tries(batch), Tries(batch).tokens("keyed", "g", [{}])
    assert tries.tokens("keyed", "g", [{}], {"g": how}) == plain
    assert batch.replay("keyed", "g", {}, {"g": how}).tokens.tolist() == plain
    assert tries.distribution("g", {"g": how}, top=1)["token"][0] == plain[0]
    likeliest = Tries(batch).tokens("keyed", "g", [{"g": 1}], {"g": {"temperature": 1, "typical_p": 0.05}})
    assert likeliest != plain  # the filter does drop the best id


def test_parameters_that_differ_only_far_on_are_told_apart(batch):
    tries, likely = Tries(batch), list(range(100, 130))
    for last in (200, 201):
        bias = dict.fromkeys(likely, 1.0) | {last: 50.0}
        assert tries.tokens("keyed", "a", [{"a": 1}], {"a": {"logit_bias": bias}}) == [last]


def test_the_distribution_is_that_of_the_study(batch):
    from toolkit.study.seeds.first_token import distribution_table

    tries, full = Tries(batch), distribution_table(batch, "a")
    some = tries.distribution("a", top=5)
    assert list(some["token"][:5]) == list(full["token"][:5])
    assert some["p"].sum() == pytest.approx(1) and some["p_raw"].sum() == pytest.approx(1)
    assert list(some["token"])[-1] == -1
    cut = tries.distribution("a", {"a": {"top_k": 2}}, top=5)
    assert list(cut["kept"]) == [True, True, False, False, False, True]
    assert cut["p"][:2].sum() == pytest.approx(1)


def test_what_differs_from_seed_to_seed_is_refused(batch):
    with pytest.raises(ValueError, match=r'xtc_probability=0.5 for request "a": must be 0 here'):
        Tries(batch).tokens("keyed", "a", [{"a": 1}], {"a": {"xtc_probability": 0.5}})
