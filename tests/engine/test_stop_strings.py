"""Stop strings are found wherever tokens cut them, as in the whole text."""

import random

import pytest

import toolkit as tk
from toolkit.engine.stop_strings import Watch


def watched(model, stop, ids, known=0):
    """A watch that has seen the tokens up to the first stop string."""
    watch = Watch(model.decode, stop, ids[:known])
    for token in ids[known:]:
        if watch.found is not None:
            break
        watch.add(token)
    return watch


def by_hand(model, stop, ids):
    """Where the first stop string begins, and how many tokens end before it, from whole texts only."""
    for count in range(1, len(ids) + 1):
        text = model.decode(ids[:count])
        places = [text.find(s) for s in stop if s in text]
        if places:
            return min(places), max(n for n in range(count) if len(model.decode(ids[:n])) <= min(places))
    return None, len(ids)


@pytest.mark.parametrize("text", ["hello world", "naïve café, 日本語の文章", "a🙂b🙂🙂c", "tab\there\n\nend"])
def test_every_substring_is_found_where_it_is_first(tiny, text):
    ids = tiny.encode(text)
    for start in range(len(text)):
        for stop in range(start + 1, min(len(text), start + 4) + 1):
            watch = watched(tiny, [text[start:stop]], ids)
            assert watch.found == text.find(text[start:stop])
            assert tiny.decode(ids[: watch.kept]) == text[: watch.found]
    assert watched(tiny, ["absent"], ids).found is None


def test_random_bytes_are_watched_as_their_whole_text_would_be(tiny):
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.choice([65, 66, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0xFF]) for _ in range(12)]
        stop = rng.sample(["A", "AB", "BA", "é", "€", "AA", "€B"], 2)
        watch = watched(tiny, stop, ids, known=rng.choice([0, 0, 3]) if "A" not in stop else 0)
        if watch.found is None:
            assert by_hand(tiny, stop, ids) == (None, 12)
            assert watch.text == tiny.decode(ids)
            assert watch.kept == 12
        else:
            assert (watch.found, watch.kept) == by_hand(tiny, stop, ids)


@pytest.mark.real
def test_a_real_tokenizers_text_is_the_whole_one(smollm2):
    text = "Naïve café: 日本語 🙂, and then\n\n  some code(x) == 1; the end"
    ids = smollm2.encode(text)
    assert watched(smollm2, ["absent"], ids).text == smollm2.decode(ids) == text
    for stop in ("fé:", "語 🙂", "\n\n  s", "== 1", "d"):
        watch = watched(smollm2, [stop], ids)
        assert watch.found == text.find(stop)
        assert text.startswith(smollm2.decode(ids[: watch.kept]))


def test_output_ends_before_a_stop_string_that_three_tokens_make(tiny):
    one = tk.Request(
        "x", id="a", seed=1, max_tokens=60, logit_bias={65: 9.0, 66: 8.0, 67: 8.0}, stop=["ABA", "CC"]
    )
    (done,) = tk.generate(tiny, [one])
    (free,) = tk.generate(tiny, [one.replace(stop=())])
    cut = min(at for s in one.stop if (at := free.text.find(s)) >= 0)
    assert done.finish_reason == "stop"
    assert done.text == free.text[:cut]
    assert done.tokens == free.tokens[: len(done.tokens)]
    assert len(done.logprobs) == len(done.tokens)
    # Resumed in the middle of it, the stop string is still seen, and nothing is left to generate.
    begun = free.tokens[: len(done.tokens) + 1]
    (rest,) = tk.generate(tiny, [one.replace(generated=begun)])
    assert (rest.finish_reason, rest.tokens, rest.text) == ("stop", (), "")
    (none,) = tk.generate(tiny, [one.replace(generated=free.tokens[: len(done.tokens) + 3])])
    assert (none.finish_reason, none.tokens) == ("stop", ())
