"""Cohorts: the windows, the reference rule by example, and what must hold of every plan."""

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.cohorts.padding import least_padding
from toolkit.cohorts.plan import STRATEGIES, compare, drain_window, plan, plan_cohorts
from toolkit.cohorts.types import Row

LENGTHS = st.integers(1, 30)


@st.composite
def rows(draw, max_size: int = 25, exclusive: bool = True) -> list[Row]:
    made = []
    for k in range(draw(st.integers(0, max_size))):
        length = draw(LENGTHS)
        cached = draw(st.just(0) | st.integers(0, length - 1))
        made.append(Row(f"r{k}", length, cached, decode=draw(st.booleans()) and draw(st.booleans()),
                        exclusive=exclusive and draw(st.integers(0, 7)) == 0))  # fmt: skip
    return made


HOW = st.fixed_dictionaries(
    {"can_batch": st.sampled_from([True, True, True, False]), "can_pad": st.booleans()},
    optional={
        "max_rows": st.integers(0, 6),
        "token_budget": st.integers(0, 80),
        "window": st.integers(1, 12),
        "overhead": st.sampled_from([0, 1, 5, 64]),
    },
)


def read(text: str) -> list[Row]:
    """Rows from words: a5 is cold and 5 long; a5+3 has 3 of them cached; a5. decodes; a5! is exclusive."""
    made = []
    for word in text.split():
        length, _, cached = word[1:].rstrip(".!").partition("+")
        made.append(Row(word[0], int(length), int(cached or 0), decode="." in word, exclusive="!" in word))
    return made


def shape(text: str, **how: object) -> str:
    """A plan in words: {ab} is batched, (c) sequential, [de] packed."""
    marks = {"batched": "{}", "sequential": "()", "packed": "[]"}
    return " ".join(
        marks[c.kind][0] + "".join(row.id for row in c.rows) + marks[c.kind][1]
        for c in plan_cohorts(read(text), **how)
    )


# The reference rule, by example


@pytest.mark.parametrize(
    ("text", "cohorts"),
    [
        ("", ""),
        ("a5", "(a)"),
        ("a5 b5", "{ab}"),
        ("a5 b9", "{ab}"),
        ("a5 b9 c5+2", "{ab} (c)"),  # the split of a mixed window
        ("c5+2 a5 b9", "(c) {ab}"),
        ("a5 c5+2 b9", "(acb)"),  # two lone cold rows do not make a run
        ("a5 b9 c5+2 d4 e4", "{ab} (c) {de}"),
        ("a5 b9 c5+2 d4", "{ab} (cd)"),
        ("d4 c5+2 a5 b9", "(dc) {ab}"),
        ("a5+1 b5+1 c5+1", "(abc)"),
        ("a5 b6 c7 d8", "{abcd}"),
        ("a5 b6 c7. d8 e9", "{ab} (c) {de}"),  # a row past its prompt is not cold
        ("a5 b6. c7", "(abc)"),
        ("a5 b6 c7+1 d8. e9+2 f3 g3", "{ab} (cde) {fg}"),
    ],
)
def test_contiguous_cold_rows_batch_and_the_others_gather(text: str, cohorts: str) -> None:
    assert shape(text, strategy="runs") == cohorts


@pytest.mark.parametrize(
    ("text", "cohorts"),
    [
        ("a5 b5", "{ab}"),
        ("a5 b9", "(ab)"),
        ("a5 b5 c9", "(abc)"),  # the whole run fails, not the odd one out
        ("a5 b5 c5+1 d9 e9", "{ab} (c) {de}"),
        ("a5 b5 c5+1 d9 e8", "{ab} (cde)"),
        ("a5 b9 c5+1 d8 e8", "(abc) {de}"),
    ],
)
def test_without_padding_only_runs_of_one_length_batch(text: str, cohorts: str) -> None:
    assert shape(text, strategy="runs", can_pad=False) == cohorts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_cannot_batch_gets_one_sequential_cohort(strategy: str) -> None:
    assert shape("a5 b9 c5+2 d4 e4", strategy=strategy, can_batch=False) == "(abcde)"
    assert shape("", strategy=strategy, can_batch=False) == ""
    assert shape("a5 b9 c5+2 d4 e4", strategy=strategy) != "(abcde)"


@pytest.mark.parametrize(
    ("strategy", "cohorts"),
    [("runs", "{ab} (x) {cd} (y) (z) (e)"), ("packed", "[ab] (x) [cd] (y) (z) [e]"),
     ("by-length", "{ab} (x) {cd} (y) (z) (e)")],
)  # fmt: skip
def test_an_exclusive_row_is_by_itself_and_in_place(strategy: str, cohorts: str) -> None:
    assert shape("a5 b5 x5! c5 d5 y5! z5! e5", strategy=strategy) == cohorts


@pytest.mark.parametrize(
    ("how", "cohorts"),
    [
        ({"max_rows": 2}, "{ab} {cd} (e)"),
        ({"max_rows": 3}, "{abc} {de}"),
        ({"max_rows": 1}, "(a) (b) (c) (d) (e)"),
        ({"token_budget": 10}, "{ab} (c) (d) (e)"),  # 2 x 5 fits, c is 20 long
        ({"token_budget": 40}, "{ab} {cd} (e)"),  # 3 x 20 does not fit, 2 x 20 does
        ({"token_budget": 3}, "(a) (b) (c) (d) (e)"),  # one row always fits
    ],
)
def test_runs_are_cut_into_windows_that_fit(how: dict, cohorts: str) -> None:
    assert shape("a5 b5 c20 d2 e9", strategy="runs", **how) == cohorts


@pytest.mark.parametrize(
    ("how", "cohorts"),
    [
        ({}, "[abcde]"),
        ({"max_rows": 2}, "[ab] [cd] [e]"),
        ({"token_budget": 10}, "[abc] [d] [e]"),  # 5 + 3 remaining + 1 decode token
        ({"token_budget": 9}, "[abc] [d] [e]"),
        ({"token_budget": 8}, "[ab] [c] [d] [e]"),
        ({"token_budget": 1}, "[a] [b] [c] [d] [e]"),
        ({"token_budget": 10, "max_rows": 2}, "[ab] [c] [d] [e]"),
    ],
)
def test_packing_counts_span_tokens_of_any_sort(how: dict, cohorts: str) -> None:
    assert shape("a5 b5+2 c9. d20 e4", strategy="packed", **how) == cohorts


def test_by_length_groups_likes_and_whoever_came_first_goes_first() -> None:
    text = "a9 b2 c9 d2 e5+1 f2"
    assert shape(text, strategy="by-length", overhead=1) == "{ac} {bdf} (e)"
    assert shape(text, strategy="by-length", overhead=1_000) == "{abcdf} (e)"
    assert shape(text, strategy="by-length", overhead=1, max_rows=2) == "{ac} (b) {df} (e)"
    assert shape(text, strategy="by-length", overhead=1, window=2) == "(a) (b) (c) (d) (e) (f)"
    assert shape(text, strategy="by-length", overhead=1, token_budget=4) == "(a) (b) (c) {df} (e)"
    assert shape("a2 b3 c2", strategy="by-length", can_pad=False) == "{ac} (b)"


# What must hold of every plan


@given(rows(), st.sampled_from(STRATEGIES), HOW)
def test_every_row_is_in_one_cohort_and_none_is_empty(window: list[Row], strategy: str, how: dict) -> None:
    cohorts = plan_cohorts(window, strategy, **how)
    assert sorted(row.id for c in cohorts for row in c.rows) == sorted(row.id for row in window)
    assert all(c.rows for c in cohorts) and [c.index for c in cohorts] == list(range(len(cohorts)))


@given(rows(), st.sampled_from(["packed", "runs"]), HOW)
def test_cohorts_joined_keep_the_order(window: list[Row], strategy: str, how: dict) -> None:
    given = plan(window, strategy, **how)
    assert [row for c in given.cohorts for row in c.rows] == window
    assert given.wait == 0


@given(rows(), HOW)
def test_by_length_moves_nobody_out_of_the_window(window: list[Row], how: dict) -> None:
    given = plan(window, "by-length", **how)
    assert [window[i] for i in given.order] == [row for c in given.cohorts for row in c.rows]
    width = how.get("window", 64)
    assert all(abs(place - arrival) < width for place, arrival in enumerate(given.order))
    assert given.wait < width


@given(rows(), st.sampled_from(STRATEGIES), HOW)
def test_a_cohort_of_two_rows_or_more_keeps_to_cap_and_budget(
    window: list[Row], strategy: str, how: dict
) -> None:
    for cohort in plan_cohorts(window, strategy, **how):
        if len(cohort.rows) > 1:
            assert len(cohort.rows) <= (how.get("max_rows") or len(cohort.rows))
            assert cohort.padded_tokens <= (how.get("token_budget") or cohort.padded_tokens)


@given(rows(), st.sampled_from(STRATEGIES), HOW)
def test_only_cold_rows_are_padded_and_only_where_allowed(
    window: list[Row], strategy: str, how: dict
) -> None:
    for cohort in plan_cohorts(window, strategy, **how):
        if cohort.kind == "batched":
            assert how["can_batch"] and len(cohort.rows) > 1 and all(row.cold for row in cohort.rows)
            assert how["can_pad"] or len({row.length for row in cohort.rows}) == 1
        if cohort.kind == "packed":
            assert how["can_batch"] and strategy == "packed"


@given(rows(), st.sampled_from(STRATEGIES), HOW)
def test_an_exclusive_row_has_no_sibling(window: list[Row], strategy: str, how: dict) -> None:
    for cohort in plan_cohorts(window, strategy, **how):
        if any(row.exclusive for row in cohort.rows):
            assert len(cohort.rows) == 1 and cohort.kind == "sequential"


@given(rows(exclusive=False), st.booleans())
def test_batched_runs_are_maximal_and_gatherings_too(window: list[Row], can_pad: bool) -> None:
    cohorts = plan_cohorts(window, "runs", can_pad=can_pad)
    flat = [(cohort, row) for cohort in cohorts for row in cohort.rows]
    for (one, row), (other, next_row) in itertools.pairwise(flat):
        if one is not other:
            assert not (row.cold and next_row.cold)  # no run was cut
            assert {one.kind, other.kind} != {"sequential"}  # nothing was gathered twice
    # A run of two or more that is in no batched cohort had to fail.
    for cold, run in itertools.groupby(window, key=lambda row: row.cold):
        run = list(run)
        kinds = {c.kind for c in cohorts if set(c.rows) & set(run)}
        may = cold and len(run) > 1 and (can_pad or len({row.length for row in run}) == 1)
        assert kinds == {"batched" if may else "sequential"}


def greedy_windows(costs: list[int], max_rows: int, budget: int, cost) -> list[int]:
    """Sizes of the windows that the rule gives, straight from its words."""
    sizes: list[int] = []
    window: list[int] = []
    for c in costs:
        fits = not budget or cost([*window, c]) <= budget
        if window and (not fits or len(window) == max_rows):
            sizes.append(len(window))
            window = []
        window.append(c)
    return [*sizes, len(window)] if window else sizes


@given(rows(exclusive=False), st.integers(0, 6), st.integers(0, 80))
def test_packed_cohorts_are_as_long_as_they_can_be(window: list[Row], max_rows: int, budget: int) -> None:
    cohorts = plan_cohorts(window, "packed", max_rows=max_rows, token_budget=budget)
    sizes = greedy_windows([row.remainder for row in window], max_rows, budget, sum)
    assert [len(c.rows) for c in cohorts] == sizes


@given(rows(exclusive=False), st.integers(0, 6), st.integers(0, 80))
def test_runs_are_those_of_each_window_by_itself(window: list[Row], max_rows: int, budget: int) -> None:
    costs = [row.remainder for row in window]
    sizes = greedy_windows(costs, max_rows, budget, lambda w: len(w) * max(w))
    parts, start = [], 0
    for size in sizes:
        parts += [(c.kind, c.rows) for c in plan_cohorts(window[start : start + size], "runs")]
        start += size
    whole = plan_cohorts(window, "runs", max_rows=max_rows, token_budget=budget)
    assert [(c.kind, c.rows) for c in whole] == parts


# Least padding


def area(groups: list[list[int]]) -> int:
    return sum(len(group) * max(group) for group in groups)


def partitions(places: list[int]):
    if not places:
        yield []
        return
    first, rest = places[0], places[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for k, group in enumerate(smaller):
            yield [*smaller[:k], [first, *group], *smaller[k + 1 :]]


def grouped(lengths: list[int], **how: int) -> list[list[int]]:
    leaders = least_padding(np.array(lengths, np.int64), np.array([len(lengths)], np.int64), **how)
    return [[lengths[i] for i in np.flatnonzero(leaders == leader)] for leader in np.unique(leaders)]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.integers(0, 4),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from([0, 1, 3, 10, 100]),
)
def test_no_grouping_at_all_is_cheaper(
    lengths: list[int], max_rows: int, budget: int, can_pad: bool, overhead: int
) -> None:
    def allowed(group: list[int]) -> bool:
        return len(group) == 1 or (
            len(group) <= (max_rows or len(group))
            and len(group) * max(group) <= (budget or 10**9)
            and (can_pad or len(set(group)) == 1)
        )

    found = grouped(lengths, max_rows=max_rows, token_budget=budget, can_pad=can_pad, overhead=overhead)
    assert sorted(itertools.chain(*found)) == sorted(lengths) and all(map(allowed, found))
    every = [p for p in partitions(lengths) if all(map(allowed, p))]
    # Ties go to fewer groups, so the pair is least.
    cost = min((area(p) + overhead * len(p), len(p)) for p in every)
    assert (area(found) + overhead * len(found), len(found)) == cost
    assert area(found) == min(area(p) for p in every if len(p) <= len(found))


def test_many_windows_at_once_are_each_as_alone() -> None:
    draw = random.Random(0)
    windows = [[draw.randint(1, 500) for _ in range(draw.randint(0, 40))] for _ in range(60)]
    for how in ({}, {"max_rows": 5}, {"token_budget": 900, "overhead": 64}, {"can_pad": False}):
        sizes = np.array([len(w) for w in windows], np.int64)
        together = least_padding(np.array(list(itertools.chain(*windows)), np.int64), sizes, **how)
        start = 0
        for window in windows:
            alone = least_padding(np.array(window, np.int64), np.array([len(window)], np.int64), **how)
            assert (together[start : start + len(window)] - start == alone).all()
            start += len(window)


def test_sorting_by_length_beats_arrival_order_and_a_free_group_beats_nothing() -> None:
    lengths = [1, 100] * 16
    sorted_ = compare([Row(str(k), n) for k, n in enumerate(lengths)], max_rows=8).to_json()
    ratio = {line["strategy"]: line["ratio"] for line in sorted_}
    assert ratio["packed"] == ratio["by-length"] == 1.0 and ratio["runs"] > 1.9
    assert len(grouped([3, 3, 3, 7], overhead=0)) == 2  # equal lengths share a group even so


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planning_grows_no_faster_than_the_rows(strategy: str) -> None:
    draw = random.Random(0)
    many = [Row(str(k), draw.randint(1, 2_000), exclusive=k % 10 == 0) for k in range(100_000)]
    start = time.process_time()
    plan_cohorts(many, strategy, max_rows=32, token_budget=8_192)
    # Meant to take a tenth of a second: benchmarks/planning.py. This is to catch what is quadratic.
    assert time.process_time() - start < 2


# Windows


def test_priority_lanes_are_drained_high_to_low_and_in_order_within() -> None:
    queue = [Row(k, 1, priority=p) for k, p in zip("abcdef", ["low", "normal", "high"] * 2, strict=True)]
    taken, rest = drain_window(queue, max_rows=3)
    assert [row.id for row in taken] == ["c", "f", "b"] and [row.id for row in rest] == ["a", "d", "e"]


@pytest.mark.parametrize(
    ("text", "max_rows", "budget", "taken"),
    [
        ("a5 b5 c5", 0, 0, "abc"),
        ("a5 b5 c5", 2, 0, "ab"),
        ("a5 b5 c5", 0, 10, "ab"),
        ("a5 b5 c5", 0, 9, "a"),
        ("a50 b5 c5", 0, 10, "a"),  # the first always fits
        ("a5 b9 c1 d1", 0, 10, "a"),  # b does not fit; c and d would, and are not let past
        ("a5 b5 c6 d1", 0, 15, "ab"),  # the longest so far counts for all
        ("a2 b2 c2 d8+6 e9.", 0, 10, "abcde"),  # of an adopted row the remainder, of a decoding one 1
        ("a5! b5", 0, 0, "ab"),
        ("", 3, 10, ""),
    ],
)
def test_a_window_ends_at_the_first_row_that_does_not_fit(
    text: str, max_rows: int, budget: int, taken: str
) -> None:
    queue = read(text)
    window, rest = drain_window(queue, max_rows, budget)
    assert "".join(row.id for row in window) == taken
    assert window + rest == queue


@given(rows(), st.integers(0, 5), st.integers(0, 60), st.randoms())
def test_draining_loses_nobody_and_never_skips(
    queue: list[Row], max_rows: int, budget: int, draw: random.Random
) -> None:
    queue = [
        Row(row.id, row.length, row.cached, row.decode, draw.choice(["high", "normal", "low"]))
        for row in queue
    ]
    lanes = sorted(queue, key=lambda row: ("high", "normal", "low").index(row.priority))
    taken, rest = drain_window(queue, max_rows, budget)
    assert taken == lanes[: len(taken)] and bool(taken) == bool(queue)
    assert rest == [row for row in queue if row not in taken]
    costs = [row.remainder for row in taken]
    if len(taken) > 1:
        assert not budget or len(costs) * max(costs) <= budget
        assert not max_rows or len(costs) <= max_rows
    if rest and (not max_rows or len(taken) < max_rows):
        more = [*costs, lanes[len(taken)].remainder]
        assert budget and len(more) * max(more) > budget  # it stopped for a reason
    drained = []
    while queue:
        taken, queue = drain_window(queue, max_rows, budget)
        drained += taken
    assert drained == lanes


# Values and tables


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": 0}, 'length=0 for row "a": must be an integer in [1, 2147483647]'),
        ({"length": 1.5}, "length=1.5"),
        ({"length": True}, "length=True"),
        ({"length": 5, "cached": 5}, 'cached=5 for row "a": must be an integer in [0, 4]'),
        ({"length": 5, "cached": -1}, "cached=-1"),
        ({"length": 5, "priority": "urgent"}, "priority='urgent'"),
    ],
)
def test_a_row_that_cannot_be_is_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Row("a", **fields)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "how",
    [{"max_rows": -1}, {"token_budget": -1}, {"token_budget": 1.5}, {"window": 0}, {"window": 10**6},
     {"overhead": -1}, {"strategy": "fifo"}],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_by_name(how: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(how))}="):
        plan_cohorts([], **how)
    if how.keys() & {"max_rows", "token_budget"}:
        with pytest.raises(ValueError, match=f"^{next(iter(how))}="):
            drain_window([], **how)


def test_what_a_row_is_follows_from_its_fields() -> None:
    cold, adopted, decoding = read("a5 b5+2 c5+2.")
    assert [row.cold for row in (cold, adopted, decoding)] == [True, False, False]
    assert [row.remainder for row in (cold, adopted, decoding)] == [5, 3, 1]


def test_a_cohort_knows_its_tokens() -> None:
    batched, sequential = plan_cohorts(read("a5 b9 c5+2"), "runs")
    assert (batched.tokens, batched.padded_tokens) == (14, 18)
    assert (sequential.tokens, sequential.padded_tokens) == (3, 3)
    assert repr(batched) == "Cohort(0, batched: a, b)"


def test_a_plan_has_totals_a_table_and_a_short_repr() -> None:
    given = plan(read("a5 b9 c5+2"), "runs")
    assert (given.tokens, given.padded_tokens, given.ratio) == (17, 21, 21 / 17)
    assert repr(given) == "Plan(runs: 3 rows in 2 cohorts, 1.24 tokens computed for each real one)"
    frame = given.to_frame()
    assert frame["id"].tolist() == ["a", "b", "c"] and frame["padding"].tolist() == [4, 0, 0]
    assert frame["tokens"].sum() == given.tokens
    assert frame["tokens"].sum() + frame["padding"].sum() == given.padded_tokens
    assert plan([], "runs").ratio == 1.0 and plan([]).to_frame().columns.tolist() == frame.columns.tolist()
    moved = plan(read("a9 b2 c9"), "by-length", overhead=1)
    assert moved.wait == 1 and moved.to_frame()["wait"].tolist() == [0, 0, 1]


def test_a_comparison_has_one_line_for_each_strategy() -> None:
    given = compare(read("a5 b9 c5+2"), max_rows=2, overhead=1)
    assert given.to_frame()["strategy"].tolist() == list(STRATEGIES)
    assert [line["padded_tokens"] for line in given.to_json()] == [17, 17, 21]
    assert all(list(line) == sorted(line) for line in given.to_json())
    assert str(given).splitlines()[0].split()[:5] == ["strategy", "cohorts", "tokens", "computed", "ratio"]
    assert repr(given) == (
        "Comparison(tokens computed for each real one: packed 1.00, by-length 1.00, runs 1.24)"
    )


def test_html_escapes_ids_and_sets_no_colour() -> None:
    page = plan([Row("<b>", 3)])._repr_html_() + compare([Row("<b>", 3)])._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page and "color" not in page and "background" not in page
