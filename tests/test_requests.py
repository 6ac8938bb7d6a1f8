"""Requests: what is accepted, what is refused and in which words, and that JSON takes them there and back."""

import copy
import dataclasses
import io
import json
import math
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engine.admission import check
from toolkit.fields import show
from toolkit.requests import Request, named, read_jsonl

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
TEXT = st.text(max_size=20)  # hypothesis leaves surrogates out
FIELDS = {
    "id": TEXT,
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 65_536),
    "temperature": st.just(0) | st.floats(1e-6, 100),
    "top_k": st.integers(0, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0, 1, exclude_min=True),
    "top_n_sigma": st.floats(0, 1000),
    "xtc_probability": st.floats(0, 1),
    "xtc_threshold": st.floats(0, 0.5),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-100, 100),
    "frequency_penalty": st.floats(-100, 100),
    "penalty_window": st.integers(0, 100),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1e4, 1e4), max_size=4),
    "allowed_tokens": st.none() | IDS,
    "max_tokens": st.integers(5, 2**31 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "logprobs": st.integers(0, 100),
    "generated": IDS,
    "cached": st.integers(0, 100),
    "arrival": st.integers(0, 100),
    "priority": st.sampled_from(["high", "normal", "low"]),
}
SOURCES = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"tokens": IDS}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1, max_size=3)}
    ),
)
REQUESTS = st.builds(
    lambda source, fields: Request(**source, **fields), SOURCES, st.fixed_dictionaries({}, optional=FIELDS)
)


def refused(**fields: object) -> str:
    """The one line with which a request is refused."""
    fields = {"prompt": "x", "id": "a", **fields}
    with pytest.raises(ValueError) as caught:
        Request(**fields)
    line = str(caught.value)
    assert "\n" not in line and line.isprintable()
    return line


# What is refused


def test_an_error_names_argument_value_request_rule_and_way_out() -> None:
    assert refused(top_p=1.5) == 'top_p=1.5 for request "a": must be in (0, 1]; 1 turns the filter off'
    assert refused(top_p=1.5, id="") == "top_p=1.5: must be in (0, 1]; 1 turns the filter off"


def test_top_p_of_nothing_is_refused() -> None:
    assert refused(top_p=0).startswith('top_p=0 for request "a": must be in (0, 1]')


@pytest.mark.parametrize("seed", [42, 1715852364, 2**32 + 42, -1, 2**63 - 1, -(2**63), 0])
def test_any_64_bit_seed_is_kept_whole(seed: int) -> None:
    request = Request("x", seed=seed)
    assert request.seed == seed and request.seeded
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    "seed", [2**63, -(2**63) - 1, 2**100, 1.5, 7.0, "7", True, np.bool_(True), b"7", [7]]
)
def test_what_is_no_64_bit_seed_is_refused(seed: object) -> None:
    line = refused(seed=seed)
    assert line.startswith("seed=") and "[-2^63, 2^63)" in line


def test_a_negative_seed_and_several_choices_go_together() -> None:
    request = Request("x", n=3, seed=-2)
    assert (request.n, request.seed) == (3, -2) and request.seeded


def test_an_integer_too_long_to_write_out_is_refused_all_the_same() -> None:
    assert refused(seed=10**5000).startswith("seed=an integer of 16610 bits")
    assert refused(temperature=10**5000).startswith("temperature=an integer of")
    assert refused(stop=[10**5000]).startswith("stop[0]=")


def test_a_missing_seed_is_not_zero() -> None:
    assert Request("x").seed is None and not Request("x").seeded
    assert Request("x", seed=0).seeded
    assert Request("x") != Request("x", seed=0)


BAD = [
    ("n", [0, -1, 2.0, True, None, 10**30, "3"]),
    ("top_k", [-1, 1.5, True, None, "1", 2**31]),
    ("penalty_window", [-1, 0.5, None]),
    ("max_tokens", [0, -1, 1.0, None, 2**31]),
    ("logprobs", [-1, True, 1.0, None]),
    ("cached", [-1, 0.0, True]),
    ("arrival", [-1, 0.5, None]),
    ("temperature", [-0.1, 101, "1", True, None, 1e-9, 1j, 10**400]),
    ("top_p", [0, 0.0, -0.5, 1.0001, "0.9", True, None]),
    ("min_p", [-0.1, 1.1, None, True]),
    ("typical_p", [0, 1.1, None]),
    ("top_n_sigma", [-1, 1e9, None]),
    ("xtc_probability", [-0.1, 1.1, None, True]),
    ("xtc_threshold", [-0.1, 0.6, None]),
    ("repetition_penalty", [0, -1, 1e9, None]),
    ("presence_penalty", [-101, 101, None, "0"]),
    ("frequency_penalty", [-101, 101, None]),
    (
        "logit_bias",
        [None, 3, "3", [3], {"3": 1.0}, {-1: 1.0}, {True: 1.0}, {3: "1"}, {3: 1e9}, [(3, 1), (3, 2)]],
    ),
    ("allowed_tokens", [3, "3", [-1], [1.0], [True], ["1"], {1: 2}, [2**31]]),
    ("generated", [None, 3, "3", [-1], [1.5]]),
    ("stop", [None, 3, [""], "", [3], ["\ud800"], {"a": 1}]),
    ("priority", ["urgent", None, 1, [], "High"]),
    ("processors", [None, 3, ["f"], print]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_what_a_field_cannot_hold_is_refused_by_name(name: str, value: object) -> None:
    assert refused(**{name: value}).startswith(name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Request) if f.type == "float"])
def test_no_number_may_be_nan_or_infinite(name: str, value: float) -> None:
    assert refused(**{name: value}).startswith(f"{name}={value}")
    if value != -math.inf:  # which bans a token
        assert refused(logit_bias={3: value}).startswith(f"logit_bias[3]={value}")


def test_every_field_has_a_test_that_it_refuses() -> None:
    tested = {name for name, _ in BAD} | {"seed", "id", "prompt", "messages", "tokens"}
    assert tested == {f.name for f in dataclasses.fields(Request)}


@pytest.mark.parametrize(
    "sources",
    [
        {"prompt": None},
        {"prompt": "x", "tokens": [1]},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"prompt": "", "tokens": []},
    ],
)
def test_a_request_has_exactly_one_prompt(sources: dict) -> None:
    assert "give exactly one of prompt, messages, tokens" in refused(**sources)


@pytest.mark.parametrize("prompt", [3, b"x", ["x"]])
def test_a_prompt_is_text(prompt: object) -> None:
    assert refused(prompt=prompt).startswith("prompt=")


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ([], "messages=[]"),
        ("hello", "messages="),
        ({"role": "user", "content": "x"}, "messages="),
        (["hello"], "messages[0]="),
        ([{"role": "user"}], "messages[0].content=None"),
        ([{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], "messages[1].role=1"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content="),
    ],
)
def test_a_chat_is_a_list_of_role_and_content(messages: object, name: str) -> None:
    assert refused(prompt=None, messages=messages).startswith(name)


def test_half_a_surrogate_pair_is_not_text() -> None:
    assert "character 1 is not text" in refused(prompt="a\ud800")
    assert refused(id="\ud800").startswith("id=")
    assert Request("🙂").prompt == "🙂"


def test_a_long_value_is_cut_and_stays_on_one_line() -> None:
    assert len(refused(priority="line\nline " * 10_000)) < 200
    assert len(refused(stop=[list(range(10_000))])) < 200
    assert show("a\nb") == '"a\\nb"'


def test_max_tokens_counts_those_generated_already() -> None:
    assert refused(max_tokens=1, generated=[5, 6]).startswith("max_tokens=1")
    assert Request("x", max_tokens=2, generated=[5, 6]).generated == (5, 6)


# What is accepted


def test_everything_is_off_by_default() -> None:
    request = Request("x")
    assert request.to_json() == {"prompt": "x"}
    assert (request.temperature, request.max_tokens, request.n) == (1.0, 16, 1)
    assert not request.greedy


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0.0, "seed": 3}])
def test_temperature_0_and_top_k_1_are_greedy(fields: dict) -> None:
    assert Request("x", **fields).greedy
    assert not Request("x", temperature=1e-6, top_k=2).greedy


def test_numpy_numbers_and_arrays_become_plain_ones() -> None:
    request = Request(
        tokens=np.array([1, 2], np.int32),
        seed=np.int64(7),
        top_k=np.uint8(3),
        top_p=np.float32(0.5),
        temperature=1,
        logit_bias={np.int64(3): np.float32(1)},
        allowed_tokens=np.array([9, 3, 9]),
    )
    assert request.tokens == (1, 2) and request.allowed_tokens == (3, 9) and request.logit_bias == ((3, 1.0),)
    plain = (request.seed, request.top_k, request.tokens[0], request.top_p, request.temperature)
    assert [type(value) for value in plain] == [int, int, int, float, float]


def test_requests_are_values() -> None:
    one = Request("x", id="a", logit_bias={3: 1}, stop="end")
    other = Request("x", id="a", logit_bias=[(3, 1.0)], stop=["end"])
    assert one == other and hash(one) == hash(other) and one in {other}
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 3  # type: ignore[misc]


def test_a_chat_that_grows_later_does_not_change_the_request() -> None:
    chat = [{"role": "user", "content": "x"}]
    request = Request(messages=chat)
    chat[0]["content"] = "y"
    chat.append({"role": "user", "content": "z"})
    assert request.messages == ({"role": "user", "content": "x"},)
    request.to_json()["messages"][0]["content"] = "y"
    assert request == Request(messages=[{"role": "user", "content": "x"}])
    assert isinstance(hash(request), int)


def test_replace_validates_and_a_new_prompt_takes_the_old_ones_place() -> None:
    request = Request("x", id="a", seed=1)
    assert request.replace(seed=2) == Request("x", id="a", seed=2)
    assert request.replace(tokens=[1, 2]) == Request(tokens=[1, 2], id="a", seed=1)
    with pytest.raises(ValueError, match=r"seed=1\.5"):
        request.replace(seed=1.5)


def test_repr_shows_what_was_set() -> None:
    assert repr(Request("x", seed=7)) == 'Request(prompt="x", seed=7)'
    assert len(repr(Request(tokens=range(100_000)))) < 100
    assert " at 0x" not in repr(Request("x", processors=[lambda tokens, logits: logits]))


# JSON


@given(REQUESTS)
def test_json_takes_a_request_there_and_back(request: Request) -> None:
    line = json.dumps(request.to_json())
    assert Request.from_json(json.loads(line)) == request
    assert read_jsonl(io.StringIO(line)) == [request]
    assert list(request.to_json()) == sorted(request.to_json())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "prompt", "tokens", "messages", "x"]), VALUES))
def test_any_json_object_is_a_request_or_one_clear_line(line: dict) -> None:
    try:
        Request.from_json(line, "f.jsonl:3")
    except ValueError as error:
        assert str(error).startswith("f.jsonl:3: ") and "\n" not in str(error)


def test_functions_have_no_json_form() -> None:
    with pytest.raises(ValueError, match="processors"):
        Request("x", processors=[lambda tokens, logits: logits]).to_json()
    with pytest.raises(ValueError, match="no such field"):
        Request.from_json({"prompt": "x", "processors": []})


def lines(text: str | bytes) -> list[Request]:
    return read_jsonl(io.BytesIO(text if isinstance(text, bytes) else text.encode()))


def bad_line(text: str | bytes) -> str:
    with pytest.raises(ValueError) as caught:
        lines(text)
    line = str(caught.value)
    assert "\n" not in line and line.isprintable()
    return line


def test_an_error_names_file_line_field_value_and_rule(tmp_path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('{"prompt": "x", "id": "a"}\n\n{"prompt": "y", "id": "b", "top_p": 1.5}\n')
    with pytest.raises(ValueError) as caught:
        read_jsonl(path)
    assert str(caught.value) == (
        f'{path}:3: top_p=1.5 for request "b": must be in (0, 1]; 1 turns the filter off'
    )


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    assert bad_line('{"prompt": "x", "id": "a", "temprature": 1}').endswith(
        'temprature=1 for request "a": no such field; did you mean temperature?'
    )
    assert "did you mean top_p?" in bad_line('{"prompt": "x", "top-p": 1}')
    assert "there are allowed_tokens, arrival" in bad_line('{"prompt": "x", "qqq": 1}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "must be an object"),
        ("null", "must be an object"),
        ('{"prompt": "x"', "not JSON at column"),
        ('{"prompt": "x"} {"prompt": "y"}', "not JSON at column 17 (Extra data)"),
        ("{'prompt': 'x'}", "not JSON"),
        ('{"prompt": "x", "temperature": NaN}', "temperature=nan"),
        ('{"prompt": "x", "temperature": 1e999}', "temperature=inf"),
        ('{"prompt": "x", "seed": NaN}', "seed=nan"),
        ('{"prompt": "x", "seed": 1e3}', "seed=1000.0"),
        ('{"prompt": "x", "seed": true}', "seed=True"),
        ('{"prompt": "x", "seed": 9223372036854775808}', "seed=9223372036854775808"),
        ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "limit (4300 digits)"),
        ('{"prompt": "x", "seed": 1, "seed": 2}', 'field "seed" is there twice'),
        ('{"prompt": "\\ud800"}', "prompt="),
        ("[" * 100_000, "nested too deep"),
        ('{"prompt": "x", "logit_bias": {"7.0": 1}}', 'logit_bias key="7.0"'),
        ('{"prompt": "x", "logit_bias": {" 7": 1}}', 'logit_bias key=" 7"'),
        ('{"prompt": "x", "logit_bias": {"7": 1, "07": 1}}', "is there twice"),
        ('{"prompt": "x", "logit_bias": {"7": null}}', "logit_bias[7]=None"),
        ("{}", "give exactly one of prompt"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(text: str, said: str) -> None:
    line = bad_line('{"prompt": "fine"}\n' + text + "\n")
    assert line.startswith("<stream>:2: ") and said in line


def test_text_that_is_not_utf_8_is_refused() -> None:
    assert bad_line('{"prompt": "é"}'.encode("latin-1")).startswith("<stream>:1: byte 13 is not UTF-8")
    assert "not UTF-8" in bad_line('{"prompt": "x"}'.encode("utf-16"))


def test_blank_lines_bom_crlf_and_odd_line_separators_do_no_harm() -> None:
    text = '\ufeff{"prompt": "x"}\r\n\r\n  \n{"prompt": "a\u2028b\u0085c\\rd"}'
    assert [request.prompt for request in lines(text)] == ["x", "a\u2028b\u0085c\rd"]
    assert lines("") == [] == lines("\n\n")


def test_null_is_a_field_left_out() -> None:
    assert lines('{"prompt": "x", "seed": null, "stop": null, "tokens": null}') == [Request("x")]


def test_ids_may_not_repeat_but_may_be_left_out() -> None:
    line = bad_line(
        '{"prompt": "x", "id": "a"}\n{"prompt": "y"}\n{"prompt": "z"}\n{"prompt": "w", "id": "a"}'
    )
    assert line == '<stream>:4: id="a": already the id of <stream>:1; ids must differ'


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n{"prompt": 1}')))
    with pytest.raises(ValueError, match=r"^<stdin>:2: prompt=1"):
        read_jsonl("-")


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_one_line(name: str, tmp_path) -> None:
    with pytest.raises(ValueError, match="give a file, or - for standard input"):
        read_jsonl(str(tmp_path / name))


# Against a model


@dataclasses.dataclass
class Stub:
    """What `check` asks of a model: bytes as tokens, 256 of them, a context of 20."""

    vocab_size: int = 256
    context: int | None = 20

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] != "user":
            raise ValueError("messages: no such\nrole")
        return self.encode(" ".join(message["content"] for message in messages))


def unfit(**fields: object) -> str:
    fields = {"id": "a", "max_tokens": 4, **fields}
    with pytest.raises(ValueError) as caught:
        check(Request(**fields), Stub())
    line = str(caught.value)
    assert "\n" not in line and '"a"' in line
    return line


def test_check_gives_the_prompts_tokens() -> None:
    assert check(Request("hi"), Stub()) == [104, 105]
    assert check(Request(messages=[{"role": "user", "content": "hi"}]), Stub()) == [104, 105]
    assert check(Request(tokens=[104, 105]), Stub()) == [104, 105]


def test_a_prompt_of_no_tokens_is_refused() -> None:
    assert unfit(prompt="").startswith('prompt="" for request "a": has no tokens')
    assert unfit(tokens=[]).startswith('tokens=() for request "a": has no tokens')
    assert "has no tokens" in unfit(messages=[{"role": "user", "content": ""}])


@pytest.mark.parametrize("name", ["tokens", "generated", "allowed_tokens", "logit_bias"])
def test_an_id_outside_the_vocabulary_is_refused(name: str) -> None:
    fields = {"tokens": [1], name: {255: 1.0, 256: 1.0} if name == "logit_bias" else [255, 256]}
    line = unfit(**fields)
    assert line.startswith(name) and "=256" in line and "ids run from 0 to 255" in line
    last = {255: 1.0} if name == "logit_bias" else [255]
    assert check(Request(**{**fields, name: last}), Stub())


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    assert "has 21 tokens with those generated; the model's context holds 20" in unfit(prompt="x" * 21)
    assert "has 22 tokens" in unfit(prompt="x" * 20, generated=[1, 2])
    assert check(Request("x" * 10_000, max_tokens=10_000), Stub(context=None))


def test_more_output_than_the_context_holds_is_refused() -> None:
    assert unfit(prompt="x" * 18).startswith('max_tokens=4 for request "a": must be at most 3')
    assert len(check(Request("x" * 18, max_tokens=3), Stub())) == 18
    assert len(check(Request("x" * 20, max_tokens=1), Stub())) == 20


def test_one_token_at_least_is_not_cached() -> None:
    assert unfit(prompt="hi", cached=2).startswith("cached=2")
    assert check(Request("hi", cached=1), Stub())


def test_nothing_allowed_is_refused_with_request_and_position() -> None:
    line = unfit(prompt="hi", allowed_tokens=[], generated=[7])
    assert line.startswith('allowed_tokens=[] for request "a": nothing may be drawn at position 3')


def test_more_alternatives_than_tokens_are_refused() -> None:
    assert unfit(prompt="hi", logprobs=257).startswith("logprobs=257")
    assert check(Request("hi", logprobs=256), Stub())


def test_a_template_that_refuses_names_the_request() -> None:
    line = unfit(messages=[{"role": "system", "content": "x"}])
    assert line == 'request "a": messages: no such role'


def test_check_against_the_tiny_model(tiny) -> None:
    ids = check(Request("hi"), tiny)
    assert tiny.decode(ids).endswith("hi")
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        check(Request(tokens=[tiny.vocab_size]), tiny)


def test_a_bias_of_minus_infinity_bans_and_survives_json() -> None:
    request = Request("x", logit_bias={3: -math.inf, 4: 1.0})
    assert request.logit_bias == ((3, -math.inf), (4, 1.0))
    assert json.loads(json.dumps(request.to_json(), allow_nan=False))["logit_bias"] == {"3": "-inf", "4": 1.0}
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request
    with pytest.raises(ValueError, match="-inf, which bans"):
        Request("x", logit_bias={3: math.inf})


def test_names_are_given_by_place_and_past_those_that_are_taken() -> None:
    ids = [r.id for r in named([Request("x"), Request("y", id="r2"), Request("z"), Request("w", id="r0")])]
    assert ids == ["r1", "r2", "r3", "r0"] and len(set(ids)) == 4
