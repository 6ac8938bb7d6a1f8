"""Policies by themselves: what each does to MLX's global generator, and that it is MLX's own."""

import threading

import mlx.core as mx
import pytest

from toolkit import Request
from toolkit.engine import policies
from toolkit.engine.policies import POLICIES, generator_seed, generator_state
from toolkit.sampling import Draw

LOGITS = mx.sin(mx.arange(4 * 500, dtype=mx.float32) * 1.7).reshape(4, 500)


def draw(seed, choice=0, position=5, **fields):
    return Draw(Request("x", seed=seed, **fields), seed, choice, position)


@pytest.mark.parametrize("name", POLICIES)
def test_only_keyed_leaves_the_global_generator_alone(name):
    policy = policies.get(name)
    mx.random.seed(1)
    states = [generator_state()]
    for step in (
        lambda: policy.begin_prefill(draw(42)),
        lambda: mx.eval(policy.finish_prefill(LOGITS[:1], draw(42))[0].tokens),
        lambda: mx.eval(policy.decode(LOGITS, [draw(seed) for seed in (1, 2, 3, 4)]).tokens),
    ):
        step()
        states.append(generator_state())
    assert (len(set(states)) == 1) == (name == "keyed")
    assert policy.shares == (name != "keyed")


def test_global_draws_as_mlx_draws_after_the_last_seed():
    policy = policies.get("global")
    for seed in (1, 2, 3):
        assert policy.begin_prefill(draw(seed))
    tokens = [policy.finish_prefill(LOGITS[i : i + 1], draw(i + 1))[0].tokens.item() for i in range(3)]
    decoded = policy.decode(LOGITS, [draw(i) for i in range(4)]).tokens.tolist()
    mx.random.seed(3)
    # First tokens over [1, vocab], row by row; later ones over [rows, vocab] at once.
    assert tokens == [mx.random.categorical(LOGITS[i : i + 1]).item() for i in range(3)]
    assert decoded == mx.random.categorical(LOGITS).tolist()


@pytest.mark.parametrize("name", ["global", "reseed", "isolate"])
def test_the_first_draw_is_mlxs_own_for_that_seed_and_temperature(name):
    policy = policies.get(name)
    for seed in (7, -1, 2**63 - 1):
        policy.begin_prefill(draw(seed, temperature=0.5))
        token = policy.finish_prefill(LOGITS[:1], draw(seed, temperature=0.5))[0].tokens.item()
        mx.random.seed(seed % 2**64)
        assert token == mx.random.categorical(LOGITS[:1] / 0.5).item()


def test_reseed_ignores_what_was_seeded_in_between_and_global_does_not():
    def token(name, sibling):
        policy = policies.get(name)
        policy.begin_prefill(draw(7))
        policy.begin_prefill(draw(sibling))
        return policy.finish_prefill(LOGITS[:1], draw(7))[0].tokens.item()

    siblings = range(1, 6)
    assert len({token("reseed", seed) for seed in siblings}) == 1
    assert len({token("global", seed) for seed in siblings}) > 1


def test_a_greedy_row_is_seeded_and_takes_the_best():
    policy = policies.get("global")
    mx.random.seed(0)
    before = generator_state()
    assert policy.begin_prefill(draw(5, temperature=0))
    assert generator_state() != before
    drawn, _ = policy.finish_prefill(LOGITS[:1], draw(5, temperature=0))
    assert drawn.tokens.item() == mx.argmax(LOGITS[0]).item()


def test_an_unseeded_row_seeds_nothing():
    for name in POLICIES:
        policy = policies.get(name)
        assert not policy.begin_prefill(draw(None))


def test_only_isolate_runs_seeded_sampling_rows_by_themselves():
    rows = [
        Request("x", seed=1),
        Request("x"),
        Request("x", seed=1, temperature=0),
        Request("x", seed=1, top_k=1),
    ]
    for name in POLICIES:
        alone = [policies.get(name).exclusive(row) for row in rows]
        assert alone == ([True, False, False, False] if name == "isolate" else [False] * 4)


def test_a_further_choice_is_never_another_seeds_stream():
    seeds = [*range(-50, 50), 2**63 - 1, -(2**63)]
    words = [generator_seed(seed, choice) for seed in seeds for choice in range(4)]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 2**64 for word in words)
    assert [generator_seed(seed, 0) for seed in (3, -1)] == [3, 2**64 - 1]


def test_keyed_draws_the_same_whatever_the_batch_and_the_thread():
    policy = policies.get("keyed")
    rows = [draw(seed) for seed in (1, 2, 3, 4)]
    together = policy.decode(LOGITS, rows).tokens.tolist()
    alone = [
        policies.get("keyed").finish_prefill(LOGITS[i : i + 1], rows[i])[0].tokens.item() for i in range(4)
    ]
    assert together == alone
    flipped = policy.decode(LOGITS[::-1], rows[::-1]).tokens.tolist()
    assert flipped == together[::-1]
    made = []

    def work():
        policy = policies.get("keyed")
        made.append(policy.decode(LOGITS, [draw(seed) for seed in (1, 2, 3, 4)]).tokens.tolist())

    mx.eval(LOGITS)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made == [together]
    assert (
        policy.decode(LOGITS, [draw(seed, position=6) for seed in (1, 2, 3, 4)]).tokens.tolist() != together
    )


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"policy='fair': must be one of global, reseed, isolate, keyed"):
        policies.get("fair")
