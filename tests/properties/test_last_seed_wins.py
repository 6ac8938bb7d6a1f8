"""The bug and its end, on the real model: whose seed decides a row's first token, under each policy.

The composition is held fixed, so logits are equal and seeds alone vary: each composition's forward runs once,
and the engine then draws from those logits (`canned`). The measured row stands at every index in turn.
"""

import mlx.core as mx
import pytest
from helpers.canned import generate

import toolkit as tk
from toolkit.engine.policies import POLICIES, generator_state
from toolkit.study.seeds.prefilled import Prefilled, prefill

HONOUR = ("reseed", "isolate", "keyed")
SIBLING_SEEDS = (1, 2, 3)
OWN_SEEDS = (10, 20, 30, 40, 50, 60)
MINE = "The children were playing with a"
SIBLINGS = ("Yesterday I went to the", "My favourite thing is", "In the middle of the night the old man")
PLACES = [(rows, index) for rows in (2, 4) for index in range(rows)]

places = pytest.mark.parametrize("place", PLACES, ids="{0[0]} rows, mine at {0[1]}".format)
policies = pytest.mark.parametrize("policy", POLICIES)
honouring = pytest.mark.parametrize("policy", HONOUR)


@pytest.fixture(scope="module")
def batches(smollm2) -> dict[tuple[int, int], Prefilled]:
    """The batch of so many rows with mine at that index, after its forward."""
    made = {}
    for rows, index in PLACES:
        prompts = [*SIBLINGS[: rows - 1]]
        prompts.insert(index, MINE)
        requests = [tk.Request(p, id="mine" if p == MINE else f"s{i}", seed=0) for i, p in enumerate(prompts)]
        made[rows, index] = prefill(smollm2, requests, forward="padded")
    return made


def run(batch, policy, seeds, changes=None, max_tokens=1):
    """The batch's completions with these seeds and sampling parameters, by row."""
    requests = [
        request.replace(seed=seeds[id], max_tokens=max_tokens, **(changes or {}).get(id, {}))
        for id, request in batch.requests.items()
    ]
    return generate(batch.model, policy, lambda id, choice, position: batch.logits[id], requests)


def first(batch, policy, mine, sibling, changes=None):
    """My first token, all siblings having one seed."""
    seeds = {id: sibling for id in batch.requests} | {"mine": mine}
    return run(batch, policy, seeds, changes)["mine"].tokens[0]


@places
def test_the_prompts_leave_the_model_unsure(batches, place):
    for logits in batches[place].logits.values():
        assert mx.softmax(logits).max().item() <= 0.1


@places
@honouring
def test_a_sibling_seed_does_not_change_my_first_token_but_my_own_does(batches, policy, place):
    own = {seed: first(batches[place], policy, seed, 1) for seed in OWN_SEEDS}
    assert len(set(own.values())) >= 2
    for seed in OWN_SEEDS[:2]:
        assert {first(batches[place], policy, seed, sibling) for sibling in SIBLING_SEEDS} == {own[seed]}


@places
@pytest.mark.parametrize("end", ["seeded", "unseeded", "greedy"])
def test_under_global_the_last_seeded_rows_seed_decides_every_row_before_it(batches, place, end):
    """The last row has a seed; has none, so that the one before it is last; has one, and is greedy."""
    batch, ids = batches[place], list(batches[place].requests)
    winner = ids[-2] if end == "unseeded" else ids[-1]
    seeds = {id: 7 for id in ids} | ({ids[-1]: None} if end == "unseeded" else {})
    greedy = {winner: {"temperature": 0}} if end == "greedy" else {}

    by_winner = [run(batch, "global", seeds | {winner: seed}, greedy) for seed in SIBLING_SEEDS]
    for row in ids[: ids.index(winner)]:
        assert len({done[row].tokens for done in by_winner}) > 1
        by_own = [run(batch, "global", seeds | {row: seed}, greedy) for seed in OWN_SEEDS]
        assert len({done[row].tokens for done in by_own}) == 1


@places
@policies
def test_a_greedy_row_never_changes(batches, policy, place):
    batch, greedy = batches[place], {"mine": {"temperature": 0}}
    best = {int(mx.argmax(batch.logits["mine"]).item())}
    assert {first(batch, policy, 10, sibling, greedy) for sibling in SIBLING_SEEDS} == best
    assert {first(batch, policy, seed, 1, greedy) for seed in OWN_SEEDS[:2]} == best
    # Greed is why: all seeds moved at once, the same row changes when it samples.
    assert len({first(batch, policy, seed, seed) for seed in OWN_SEEDS}) > 1


@places
@honouring
def test_an_unseeded_a_filtered_and_an_equally_seeded_sibling_have_no_effect(batches, policy, place):
    batch = batches[place]
    filtered = {id: {"top_k": 2} for id in batch.requests if id != "mine"}
    for seed in OWN_SEEDS[:2]:
        mine = first(batch, policy, seed, 1)
        assert first(batch, policy, seed, None) == mine
        assert first(batch, policy, seed, 1, filtered) == mine
        assert first(batch, policy, seed, seed) == mine


@places
def test_reseed_keeps_its_promise_for_the_first_token_only(batches, place):
    """The second one is drawn for the whole batch at once, from a generator that the last row seeded."""
    seconds = {}
    for policy in HONOUR:
        seeds = [{id: sibling for id in batches[place].requests} | {"mine": 10} for sibling in SIBLING_SEEDS]
        seconds[policy] = {run(batches[place], policy, s, max_tokens=2)["mine"].tokens[1] for s in seeds}
    assert len(seconds["keyed"]) == len(seconds["isolate"]) == 1
    rows, index = place
    assert (len(seconds["reseed"]) > 1) == (index < rows - 1)


@policies
def test_a_cohort_split_does_not_touch_the_row_that_stays(smollm2, policy):
    """In [cold A, cold B, adopted C] `runs` batches A with B and leaves C by itself."""
    prompts = zip("ABC", (MINE, *SIBLINGS[:2]), (10, 1, 2), strict=True)
    a, b, c = (tk.Request(prompt, id=id, seed=seed, max_tokens=1) for id, prompt, seed in prompts)
    how = {"policy": policy, "forward": "padded", "planner": "runs"}
    cold = tk.generate(smollm2, [a, b], **how)
    mixed = [tk.generate(smollm2, [a, b, c.replace(cached=3, seed=s)], **how) for s in SIBLING_SEEDS[:2]]
    for done in mixed:
        assert done["A"].tokens == cold["A"].tokens
        assert done["A"].logprobs == cold["A"].logprobs
        if policy != "isolate":
            assert [c.cohort_kind for c in done] == ["batched", "batched", "sequential"]
            assert [c.cohort for c in done] == [0, 0, 1]
    assert mixed[0]["C"].tokens != mixed[1]["C"].tokens  # C's seed does decide something


@policies
def test_given_logits_draw_what_the_whole_engine_draws(batches, policy):
    batch = batches[2, 0]
    for seeds in ({"mine": 10, "s1": 1}, {"mine": 20, "s1": 2}):
        requests = [r.replace(seed=seeds[id], max_tokens=1) for id, r in batch.requests.items()]
        whole = tk.generate(batch.model, requests, policy=policy, forward="padded")
        assert [c.tokens for c in whole] == [c.tokens for c in run(batch, policy, seeds)]


def test_the_global_generator_moves_under_global_and_not_under_keyed(batches):
    moved = {}
    for policy in POLICIES:
        mx.random.seed(99)
        before = generator_state()
        first(batches[2, 0], policy, 10, 1)
        moved[policy] = generator_state() != before
    assert moved == {"global": True, "reseed": True, "isolate": True, "keyed": False}
