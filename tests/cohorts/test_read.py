"""Lengths: rows out of traces, lists of lengths, and requests."""

import io

import pytest

from toolkit.cohorts.read import read_rows, rows_of
from toolkit.cohorts.types import Row
from toolkit.requests import Request


def rows(text: str, tokens_of=None) -> list[Row]:
    return read_rows(io.StringIO(text), tokens_of)


def refused(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        rows(text)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_trace_is_read_by_its_column_of_lengths() -> None:
    trace = "# a comment\nTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,396,109\n"
    assert rows(trace) == [Row("r0", 374), Row("r1", 396)]
    assert rows("id, length ,cached\nx,5,2\ny,6,0\n") == [Row("x", 5, 2), Row("y", 6)]


def test_a_list_of_lengths_needs_no_header() -> None:
    assert (
        rows("374\n396\n\n12")
        == rows("length\n374\n396\n12")
        == [Row("r0", 374), Row("r1", 396), Row("r2", 12)]
    )
    assert rows("") == []


def test_json_lines_are_rows_or_requests(tiny) -> None:
    text = '{"length": 9, "cached": 4}\n{"tokens": [1, 2], "id": "b", "priority": "high"}\n{"prompt": "hi"}\n'
    counted = []

    def tokens_of(request):
        counted.append(request.prompt)
        return tiny.encode(request.prompt)

    hi = len(tiny.encode("hi"))
    assert rows(text + text.replace('"b"', '"c"'), tokens_of)[:3] == [
        Row("r0", 9, 4), Row("b", 2, priority="high"), Row("r2", hi),
    ]  # fmt: skip
    assert counted == ["hi", "hi"]  # not the row whose tokens are given
    assert rows_of([Request("hi"), Request("a", id="x")], tokens_of) == [Row("r0", hi), Row("x", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("length\n5\nfive\n", "<stream>:3: length='five' for row \"r1\": must be an integer"),
        ("length\n0\n", "<stream>:2: length=0"),
        ("length\n-3\n", "<stream>:2: length='-3'"),
        ("length,cached\n5,5\n", "<stream>:2: cached=5"),
        ("length,cached\n5\n", "<stream>:2: cells=1: must be 2"),
        ("a,b\n1,2\n", "must name one column of lengths: length, prompt_tokens"),
        ("length,ContextTokens\n1,2\n", "must name one column"),
        ("id,length\nx,1\nx,2\n", '<stream>:3: id="x": already the id of <stream>:2'),
        ('{"length": 1.5}', "<stream>:1: length=1.5"),
        ('{"length": 5, "cache": 1}', "<stream>:1: cache=1: no such field"),
        ('{"length": 5, "decode": 1}', "<stream>:1: decode=1: must be true or false"),
        ('{"length": 5, "id": 7}', "<stream>:1: id=7: must be text"),
        ('{"prompt": "hi"}', "needs a model to count its tokens; give tokens or length"),
        ('{"tokens": []}', '<stream>:1: length=0 for row "r0": must be'),
        ("[5]", "<stream>:1: [5]: must be an object"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(text: str, said: str) -> None:
    assert said in refused(text)
