"""Tokens and logprobs of a row are the same bits whichever way it runs: alone, in any company, cut, moved,
resumed.

`scripts/invariance.py` runs the whole matrix; here is a part of it.
"""

import pytest
import ways
from ways import Engines, Setting

from toolkit import backend
from toolkit.forward.shapes import Shapes

needs_mkl = pytest.mark.skipif(
    backend.info().blas != "mkl", reason="without MKL every shape gives the same bits, and nothing is tested"
)

TINY = Setting("tiny")
FAMILIES = [
    *(Setting("tiny", family) for family in (
        "llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3", "olmo2", "cohere", "mixtral", "gpt2",
        "stablelm", "glm4", "deepseek_v3")),
    *(Setting("tiny", family, changes={"sliding_window": 16}) for family in ("gemma3_text", "gpt_oss")),
]  # fmt: skip
# On every family, and most on the real model; all of them on one tiny one.
FEW = ("permuted", "half of them adopted", "token budget 64", "preempted and resumed", "prefix cache on",
       "resumed with generated=")  # fmt: skip


def check(setting, engines, batch, expected, names):
    known = ways.ways(setting)
    for name in names:
        compared, tokens, logprobs = ways.differing(known[name](engines, batch, expected), expected)
        assert (name, tokens, logprobs) == (name, 0, 0)
        assert compared >= len(batch) // 2


MOST = (*FEW, "adopted rows split off", "arriving at random steps", "siblings cancelled midway",
        "moved to another process", "sent again with first tokens", "pipelined")  # fmt: skip
LONG = ("token budget 64", "preempted and resumed", "moved to another process")


@needs_mkl
@pytest.mark.parametrize("setting", FAMILIES, ids=lambda setting: setting.family)
def test_a_family_gives_the_same_bits_in_every_way(setting):
    engines = Engines(setting.model())
    batch = ways.requests(8, 10, 150, 256)
    expected = ways.alone(engines, batch, {})
    assert len({tokens for tokens, _ in expected.values()}) > 4
    check(setting, engines, batch, expected, ways.ways(setting) if setting == TINY else FEW)


@pytest.mark.real
@needs_mkl
def test_the_real_model_gives_the_same_bits_in_every_way(smollm2):
    setting, engines = Setting(), Engines(smollm2)
    batch = ways.requests(6, 8, 135, 0, smollm2)
    long = [request.replace(max_tokens=64) if i == 2 else request for i, request in enumerate(batch)]
    whole = ways.alone(engines, long, {})
    check(setting, engines, long, whole, LONG)
    expected = {row: (tokens[:8], logprobs[:8]) for row, (tokens, logprobs) in whole.items()}
    check(setting, engines, batch, expected, [name for name in MOST if name not in LONG])
    # The same measure sees what rounding does without rules for shapes, and what a shared generator does.
    plain = ways.together(Engines(smollm2, invariant=False), batch, expected)
    assert ways.differing(plain, expected)[2] > 0
    shared = ways.together(engines, batch, expected, policy="global")
    assert ways.differing(shared, expected)[1] > 0


@needs_mkl
@pytest.mark.parametrize("shapes", [Shapes(3, 8, 4, 128), Shapes(8, 3, 4, 128), Shapes(8, 8, 4, 5)], ids=str)
def test_the_measure_sees_a_tile_a_head_or_a_bucket_that_is_not_aligned(shapes):
    engines = Engines(TINY.model(), shapes)
    batch = ways.requests(12, 6, 300, 256)
    expected = ways.alone(engines, batch, {})
    assert ways.differing(ways.together(engines, batch, expected), expected)[2] > 0


@needs_mkl
def test_the_measure_sees_a_shared_generator():
    engines = Engines(TINY.model())
    batch = ways.requests(8, 6, 60, 256)
    expected = ways.alone(engines, batch, {})
    assert ways.differing(ways.together(engines, batch, expected, policy="global"), expected)[1] > 0
