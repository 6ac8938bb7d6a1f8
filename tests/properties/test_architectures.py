"""Every model type of mlx-lm, built tiny and run packed: right, and the same bits in any company."""

from collections import Counter
from importlib.metadata import version

import architectures
import mlx.core as mx
import pytest
import tiny_architectures
from architectures import BITS, NOT_BUILT, PAGE, ROUNDING, SEQUENTIAL, Verdict

from toolkit import backend
from toolkit.forward import layer_cache, reference_check
from toolkit.forward.packed import PackedForward, Unpackable
from toolkit.forward.padded import SequentialForward
from toolkit.forward.shapes import PLAIN
from toolkit.invariance.build import build

pytestmark = pytest.mark.skipif(
    backend.info().blas != "mkl",
    reason="the shapes and the page are those of a CPU with MKL: pip install mkl",
)


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return [architectures.examine(model_type) for model_type in tiny_architectures.model_types()]


def test_no_architecture_is_silently_wrong(verdicts: list[Verdict]) -> None:
    assert {v.verdict for v in verdicts} <= {BITS, ROUNDING, SEQUENTIAL, NOT_BUILT}


def test_most_architectures_are_built_and_equal_to_the_bit(verdicts: list[Verdict]) -> None:
    tally = Counter(v.verdict for v in verdicts)
    assert len(verdicts) - tally[NOT_BUILT] >= 90
    assert tally[BITS] >= 60


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3"])
def test_without_rules_for_shapes_the_bits_do_change(model_type: str) -> None:
    assert architectures.examine(model_type, PLAIN).verdict == ROUNDING
    assert architectures.examine(model_type).verdict == BITS


def test_whatever_does_not_run_packed_says_why(verdicts: list[Verdict]) -> None:
    assert all(v.note for v in verdicts if v.verdict in (SEQUENTIAL, NOT_BUILT))


def test_the_page_is_up_to_date(verdicts: list[Verdict]) -> None:
    if f"mlx-lm {version('mlx-lm')}." not in (text := PAGE.read_text()):
        pytest.skip("written with another mlx-lm: python tests/architectures.py writes it anew")
    assert text == architectures.page(verdicts), "python tests/architectures.py writes it anew"


def test_a_model_that_can_not_run_packed_runs_its_rows_one_at_a_time() -> None:
    model = architectures.as_model(tiny_architectures.build("mamba"), "mamba")
    with pytest.warns(UserWarning, match="keeps ArraysCache"):
        forward, invariant = build(model, "packed", False)
    assert isinstance(forward, SequentialForward)
    assert invariant is False
    with pytest.raises(ValueError, match="leave invariant out"):
        build(model, "packed", True)


def test_the_self_check_catches_a_window_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_architectures.build("gemma3_text")
    PackedForward(architectures.as_model(module, "right"), architectures.SHAPES)
    mask = layer_cache.attention.mask
    monkeypatch.setattr(
        layer_cache.attention, "mask", lambda positions, keys, window, *how: mask(positions, keys, None, *how)
    )
    with pytest.raises(Unpackable, match="off by"):
        PackedForward(architectures.as_model(module, "wrong"), architectures.SHAPES)


def test_the_self_check_catches_positions_that_are_off_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_architectures.build("ministral3")
    PackedForward(architectures.as_model(module, "right"), architectures.SHAPES)
    monkeypatch.setattr(layer_cache.LayerCache, "__init__", _near(layer_cache.LayerCache.__init__))
    with pytest.raises(Unpackable, match="off by"):
        PackedForward(architectures.as_model(module, "wrong"), architectures.SHAPES)


@pytest.mark.parametrize(("model_type", "reason"), [("afm7", "off by"), ("gemma2", "side by side")])
def test_a_model_that_can_not_run_padded_is_refused(model_type: str, reason: str) -> None:
    model = architectures.as_model(tiny_architectures.build(model_type), model_type)
    with pytest.raises(ValueError, match=reason):
        build(model, "padded", "auto")


def _near(init):
    def near(self, step, position, window):
        init(self, step, position, window)
        self.offset = step.positions % 50  # right wherever a short prompt looks

    return near


def test_experts_that_mlx_misreads_are_refused(monkeypatch):
    """As MLX 0.32 does on a GPU: lines with an axis added are read with a stride of one."""
    model = architectures.as_model(tiny_architectures.build("gpt_oss"), "gpt_oss")
    assert not reference_check.misread(model)
    real = mx.gather_mm

    def misreading(x, w, **options):
        added = x.shape[-2] == 1 and memoryview(x).strides[-2] != x.shape[-1] * x.itemsize
        return real(mx.roll(x, 1, 0) if added else x, w, **options)

    monkeypatch.setattr(mx, "gather_mm", misreading)
    assert reference_check.misread(model)
    with pytest.raises(Unpackable, match="misreads its experts"):
        PackedForward(model, PLAIN)
