"""Studies on the tiny model: their tables, what they claim, and that an engine would draw the same."""

import numpy as np
import pytest

import toolkit as tk
from toolkit.engine.policies import POLICIES
from toolkit.study.seeds.prefilled import prefill

A = tk.Request("The children were playing with a", id="a", seed=7)
B = tk.Request("Yesterday I went to the", id="b", seed=3, top_k=40)
C = tk.Request("My favourite thing is", id="c")
SEEDS = range(6)


def matrix(model, policy, **how):
    return tk.seed_matrix(
        model, [A, B], row="a", sibling="b", seeds=SEEDS, sibling_seeds=SEEDS, policy=policy, **how
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", ["packed", "padded", "sequential"])
def test_a_replay_draws_what_an_engine_draws(tiny, policy, forward):
    batch = prefill(tiny, [A, B, C], policy=policy, forward=forward)
    for own, theirs in ((7, 3), (8, 3), (7, 4)):
        requests = [
            A.replace(seed=own, max_tokens=1),
            B.replace(seed=theirs, max_tokens=1),
            C.replace(seed=1, max_tokens=1),
        ]
        done = tk.generate(tiny, requests, policy=policy, forward=forward)
        for row in "abc":
            drawn = batch.replay(policy, row, {"a": own, "b": theirs, "c": 1})
            assert (drawn.tokens.item(),) == done[row].tokens


def test_a_replay_counts_the_prompt_and_the_resumed_tokens_in_its_penalties(tiny):
    requests = [
        tk.Request("aabb", id="a", seed=3, repetition_penalty=2.0, generated=[98, 99], frequency_penalty=1.0),
        tk.Request("ccdd", id="b", seed=4),
    ]
    batch = prefill(tiny, requests)
    engine = tk.generate(tiny, [r.replace(max_tokens=len(r.generated) + 1) for r in requests])
    drawn = batch.replay("keyed", "a")
    assert drawn.tokens.item() == engine["a"].tokens[0]
    assert np.float32(drawn.logprobs.item()) == np.float32(engine["a"].logprobs[0])
    without = batch.replay("keyed", "a", changes={"a": {"repetition_penalty": 1.0, "frequency_penalty": 0.0}})
    assert without.logprobs.item() != drawn.logprobs.item()


def test_under_global_columns_are_constant_and_under_the_others_rows(tiny):
    for policy in POLICIES:
        made = matrix(tiny, policy)
        assert (made.constant_columns, made.constant_rows) == (policy == "global", policy != "global")
        word = "column" if policy == "global" else "row"
        assert made.reading.startswith(f"Every {word} is constant")
        assert repr(made) == f"SeedMatrix({policy}: {made.reading})"


def test_a_matrix_is_a_table_with_a_row_for_each_pair(tiny):
    frame = matrix(tiny, "keyed").to_frame()
    assert list(frame.columns) == ["policy", "row", "sibling", "seed", "sibling_seed", "token", "text"]
    assert len(frame) == 36
    assert set(zip(frame["seed"], frame["sibling_seed"], strict=True)) == {
        (a, b) for a in SEEDS for b in SEEDS
    }
    assert all(frame["text"] == [tiny.token_text(t) for t in frame["token"]])
    assert matrix(tiny, "keyed").table().shape == (6, 6)
    assert "<table" in matrix(tiny, "keyed")._repr_html_()


def test_a_greedy_row_heeds_no_seed_and_the_reading_says_so(tiny):
    greedy = [A.replace(temperature=0), B]
    made = tk.seed_matrix(
        tiny, greedy, row="a", sibling="b", seeds=SEEDS, sibling_seeds=SEEDS, policy="global"
    )
    assert made.constant_rows
    assert made.constant_columns
    assert made.reading == "Neither seed changes a's first token."


def test_the_distribution_is_exact_and_sorted_and_every_draw_lies_in_it(tiny):
    seen = tk.first_tokens(tiny, [A, B], row="b", seeds=range(60))
    table = seen.distribution
    assert list(table.columns) == ["token", "text", "logit", "p", "p_raw", "kept"]
    assert len(table) == tiny.vocab_size
    assert table["p"].is_monotonic_decreasing
    assert table["p"].sum() == pytest.approx(1, abs=1e-6)
    assert table["p_raw"].sum() == pytest.approx(1, abs=1e-6)
    best = table.loc[table["logit"].idxmax()]
    np.testing.assert_allclose(
        np.log(best["p_raw"] / table["p_raw"]), best["logit"] - table["logit"], atol=1e-5
    )
    assert table["kept"].sum() == 40 == (table["p"] > 0).sum()  # its top_k
    frame = seen.to_frame()
    assert list(frame.columns) == [
        "policy",
        "row",
        "seed",
        "token",
        "text",
        "p",
        "logprob",
        "margin",
        "max_drift",
    ]
    assert set(frame["token"]) <= set(table.loc[table["kept"], "token"])
    np.testing.assert_allclose(np.log(frame["p"]), frame["logprob"], atol=1e-4)
    counts = seen.counts()
    assert counts["count"].sum() == 60
    assert counts["count"].is_monotonic_decreasing
    assert repr(seen) == f'FirstTokens(row "b", keyed: {len(counts)} distinct tokens for 60 seeds)'


def test_under_global_my_seed_counts_only_if_i_am_last(tiny):
    distinct = {}
    for row in "ab":
        seen = tk.first_tokens(tiny, [A, B], row=row, seeds=range(20), policy="global")
        distinct[row] = seen.to_frame()["token"].nunique()
    assert distinct["a"] == 1 < distinct["b"]


def test_logits_kept_give_the_same_answer_as_a_new_forward(tiny):
    batch = prefill(tiny, [A, B])
    one = matrix(tiny, "keyed").to_frame()
    assert one.equals(matrix(tiny, "keyed", prefilled=batch).to_frame())
    cold = [A.replace(temperature=0.01), B]
    frames = [
        tk.first_tokens(tiny, cold, row="a", seeds=SEEDS, prefilled=kept).to_frame() for kept in (None, batch)
    ]
    assert frames[0]["token"].equals(frames[1]["token"])
    assert frames[0]["token"].nunique() == 1  # other sampling parameters are heeded
    how = {"row": "a", "sibling": "b", "seeds": SEEDS, "sibling_seeds": SEEDS}
    frames = [tk.seed_matrix(tiny, cold, prefilled=kept, **how).to_frame() for kept in (None, batch)]
    assert frames[0].equals(frames[1])
    assert frames[0]["token"].nunique() == 1 < one["token"].nunique()


def test_what_cannot_be_asked_is_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r'row="z": must be one of a, b'):
        tk.first_tokens(tiny, [A, B], row="z", seeds=SEEDS)
    with pytest.raises(ValueError, match='sibling="a": must be another row'):
        tk.seed_matrix(tiny, [A, B], row="a", sibling="a", seeds=SEEDS, sibling_seeds=SEEDS)
    with pytest.raises(ValueError, match='sibling="z": must be one of a, b'):
        tk.seed_matrix(None, [A, B], row="a", sibling="z", seeds=SEEDS, sibling_seeds=SEEDS)  # runs nothing
    with pytest.raises(ValueError, match="is of other rows"):
        tk.first_tokens(tiny, [A, C], row="a", seeds=SEEDS, prefilled=prefill(tiny, [A, B]))


def test_an_id_with_markup_is_shown_as_it_is(tiny):
    batch = [A.replace(id="<i>a"), B]
    how = {"row": "<i>a", "seeds": range(2)}
    for made in (
        tk.first_tokens(tiny, batch, **how),
        tk.seed_matrix(tiny, batch, sibling="b", sibling_seeds=[1], **how),
    ):
        assert "&lt;i&gt;a" in made._repr_html_() and "<i>" not in made._repr_html_()


def test_a_stop_string_among_resumed_tokens_does_not_keep_a_row_from_its_forward(tiny):
    plain = A.replace(generated=[104, 105], stop=[])
    tokens = [
        tk.first_tokens(tiny, [one, B], row="a", seeds=SEEDS).to_frame()["token"].tolist()
        for one in (plain, plain.replace(stop=["hi"]))
    ]
    assert tokens[0] == tokens[1]


def test_results_draw_their_pictures(tiny):
    assert "Every" in repr(matrix(tiny, "keyed"))
    for made in (matrix(tiny, "keyed"), tk.first_tokens(tiny, [A, B], row="a", seeds=SEEDS)):
        assert made.chart().to_dict()["description"]


def test_the_distribution_of_a_large_vocabulary_sums_to_one_and_agrees_with_log_probabilities(smollm2):
    request = tk.Request("The sea was", id="a", seed=0)
    seen = tk.first_tokens(smollm2, [request], row="a", seeds=range(20))
    p = seen.distribution["p"].to_numpy(np.float64)
    assert abs(p.sum() - 1) < 1e-6
    frame = seen.to_frame()
    np.testing.assert_allclose(np.log(frame["p"].astype(np.float64)), frame["logprob"], atol=1e-6, rtol=1e-6)
