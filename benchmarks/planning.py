"""How long planning takes, and what each strategy computes for one real token.

    python benchmarks/planning.py [FILE]

FILE is a trace or a list of prompt lengths, in any form that `cohorts.read` reads; without one, lengths
are drawn from a log-normal distribution as wide as that of public conversation traces.
"""

import argparse
import random
import time

from toolkit.cohorts.plan import STRATEGIES, compare, plan_cohorts
from toolkit.cohorts.read import read_rows
from toolkit.cohorts.types import Row

ROWS = 100_000
TARGET = 0.1  # seconds


def drawn(count: int) -> list[Row]:
    draw = random.Random(0)
    return [Row(f"r{k}", 1 + min(14_000, int(draw.lognormvariate(6.7, 1.1)))) for k in range(count)]


def many(rows: list[Row], adopted: float) -> list[Row]:
    """`ROWS` rows of those lengths, over and over, some of them with half their prompt cached."""
    draw = random.Random(1)
    lengths = [rows[k % len(rows)].length for k in range(ROWS)]
    return [Row(f"r{k}", n, n // 2 if draw.random() < adopted else 0) for k, n in enumerate(lengths)]


def timed(rows: list[Row], strategy: str, how: dict[str, int], repeats: int) -> tuple[float, float]:
    """Least wall time and least processor time: on a shared machine the second is the fairer."""
    walls, works = [], []
    for _ in range(repeats):
        wall, work = time.perf_counter(), time.process_time()
        plan_cohorts(rows, strategy, **how)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    return min(walls), min(works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="prompt lengths; - is standard input")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    rows = read_rows(given.file) if given.file else drawn(8_000)

    print(f"{len(rows):,} rows, {sum(row.length for row in rows):,} tokens")
    for how in ({"max_rows": 8}, {"max_rows": 32, "token_budget": 4_096}):
        print(f"\n{', '.join(f'{name}={value:,}' for name, value in how.items())}")
        print(compare(rows, **how))
    fifo = compare(rows, ["runs"], max_rows=8).plans[0].ratio
    print(f"\nFirst come first served in padded cohorts of 8: {fifo:.2f} tokens computed for each real one.")

    print(f"\nPlanning {ROWS:,} rows, ms: wall (processor)")
    print(f"{'':10}{'limits':36}{'all cold':>14}{'a fifth adopted':>18}")
    sets = [many(rows, 0.0), many(rows, 0.2)]
    late = []
    for strategy in STRATEGIES:
        for how in ({}, {"max_rows": 8}, {"max_rows": 32, "token_budget": 8_192}):
            times = [timed(each, strategy, how, given.repeats) for each in sets]
            cells = [f"{1e3 * wall:.0f} ({1e3 * work:.0f})" for wall, work in times]
            limits = ", ".join(f"{name}={value}" for name, value in how.items()) or "none"
            print(f"{strategy:10}{limits:36}{cells[0]:>14}{cells[1]:>18}")
            late += [f"{strategy}, limits {limits}"] * any(work > TARGET for _, work in times)
    print(f"over {1e3 * TARGET:.0f} ms of processor time: {'; '.join(late) or 'none'}")


if __name__ == "__main__":
    main()
