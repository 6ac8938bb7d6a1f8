"""Drift: how far a request's logits move with its company, and what that does to its tokens.

No generator and no policy is involved: the same tokens go through the same weights, once alone and once in
each composition, and whatever differs is rounding. The draws are keyed, so a token that changes was changed
by the logits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

from ...chart_lookup import chart_function
from ...engine.admission import check
from ...forward.packed import PackedForward
from ...forward.spans import Forward, Span
from ...invariance.build import FORWARDS, build
from ...models.load import Model
from ...requests import Request
from .compositions import Composition, named
from .flips import Flips

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "composition", "forward", "invariant", "max_abs", "mean_abs", "max_ulps", "margin", "argmax_same",
    "flips", "draws", "flip_bound", "mean_ulps", "amplify",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Drift:
    """A request's logits in company against its logits alone.

    Attributes
    ----------
    row : str
        The request's id.
    amplify : float
        What every difference was multiplied by before it was looked at; 1 is as measured.
    complete : bool
        False if it was interrupted.
    """

    row: str
    amplify: float
    complete: bool
    _frame: pd.DataFrame
    _apart: list[np.ndarray]

    def to_frame(self) -> pd.DataFrame:
        """One row a run, compared with the request alone under the same forward.

        `composition, forward, invariant`; `max_abs, mean_abs`, differences in logits, and `max_ulps`, in
        units in the last place of the largest logit, in the narrowest type that holds the logits; `margin`,
        between the two best logits of the alone run, and `argmax_same`; `flips`, tokens that changed, out of
        `draws` seeds, and `flip_bound`, seeds whose `max_drift` the difference reaches, the scores' rounding
        included: no more can flip; `mean_ulps`; `amplify`, by which every difference was multiplied.
        """
        return self._frame.copy()

    def differences(self, bins: int = 40) -> pd.DataFrame:
        """Counts for a histogram, by run: `composition, forward, invariant, low, high, count, amplify`.

        The bins are even on a log scale and the same for all runs. Logits with equal bits are in a bin of
        their own, from 0 to 0.
        """
        import pandas as pd

        moved = np.concatenate([d[d > 0] for d in self._apart] or [np.zeros(0)])
        edges = (
            np.geomspace(moved.min() * 0.999, moved.max() * 1.001, bins + 1) if len(moved) else np.zeros(0)
        )
        lines = []
        for (_, run), apart in zip(self._frame.iterrows(), self._apart, strict=True):
            which = (run["composition"], run["forward"], run["invariant"])
            lines.append((*which, 0.0, 0.0, int((apart == 0).sum()), self.amplify))
            counts: Any = np.histogram(apart[apart > 0], edges)[0] if len(edges) else []
            for low, high, count in zip(edges, edges[1:], counts, strict=False):
                lines.append((*which, low, high, int(count), self.amplify))
        columns = ["composition", "forward", "invariant", "low", "high", "count", "amplify"]
        return pd.DataFrame(lines, columns=columns)

    @property
    def reading(self) -> str:
        """What the table shows, in a sentence."""
        f = self._frame
        if f.empty:
            return "nothing was measured."
        largest, equal = f["max_abs"].max(), int((f["max_abs"] == 0).sum())
        said = f"{equal} of {len(f)} runs have the alone run's bits; the largest difference is {largest:.2g}"
        flips, bound, draws = (int(f[name].sum()) for name in ("flips", "flip_bound", "draws"))
        return f"{said} logits; {flips:,} of {draws:,} tokens changed, at most {bound:,} could{self._label}."

    @property
    def _label(self) -> str:
        return f" (drift amplified {self.amplify:,g} times)" if self.amplify != 1 else ""

    def chart(self, **options: Any) -> Any:
        """Largest and typical difference of each run."""
        if self.amplify != 1:
            options.setdefault("title", f"Drift, amplified {self.amplify:,g} times")
        return chart_function("drift")(self._frame, **options)

    def __repr__(self) -> str:
        interrupted = "" if self.complete else "; interrupted"
        return f'Drift(row "{self.row}": {self.reading.rstrip(".")}{interrupted})'

    def _repr_html_(self) -> str:
        note = "" if self.complete else " Interrupted: other runs are missing."
        said = self.reading[:1].upper() + self.reading[1:]
        return f"<p>{said}{note}</p>" + str(self._frame._repr_html_())


def drift(
    model: Model,
    request: Request,
    compositions: Any = None,
    *,
    forwards: Sequence[str] = FORWARDS,
    invariant: Sequence[bool] = (False, True),
    seeds: Iterable[int] = range(200),
    amplify: float = 1.0,
    progress: bool = True,
) -> Drift:
    """A request's logits under many compositions and forwards, each against its own alone run.

    In float32 hardly any token flips. To see some, take a 16-bit model on a GPU, `rounded_model.rounded` on a
    CPU (where 16-bit loops are slow and don't drift), or amplify.

    Parameters
    ----------
    model : Model
    request : Request
        Its sampling parameters are used for the draws.
    compositions : dict of str to Composition, or to a list of siblings; or a list of either
        Siblings are requests or texts. Default: `standard` with three of the toolkit's prompts.
    forwards : sequence of {"packed", "padded", "sequential"}
    invariant : sequence of bool
        Which packed runs: with plain shapes (False), with the shapes that the probe found (True).
    seeds : iterable of int
        A token is drawn for each.
    amplify : float
        Every difference is multiplied by this before it is compared or reported; the result states it.
    progress : bool
        Show a bar once it takes more than a second.

    Returns
    -------
    Drift
        Interrupted, with the runs that were finished.
    """
    import pandas as pd

    if not (math.isfinite(amplify) and amplify > 0):
        raise ValueError(f"amplify={amplify!r}: must be a positive number; 1 leaves differences as measured")
    prompt = check(request, model)
    mine = [*prompt, *request.generated]
    arranged = named(compositions, len(mine))
    batches = {name: [_tokens(s, model) for s in how.siblings] for name, how in arranged.items()}
    for name, how in arranged.items():
        if how.cached >= len(mine):
            raise ValueError(
                f'cached={how.cached} of composition "{name}": must leave one of {len(mine)} tokens'
            )
    ways = [(f, i) for f in forwards for i in (invariant if f == "packed" else (False,))]
    flips = Flips(request, prompt, list(seeds))
    lines: list[tuple[Any, ...]] = []
    differences: list[np.ndarray] = []
    total = len(ways) * (1 + len(arranged))
    title = f'drift of "{request.id}"' if request.id else "drift"
    complete = True
    with tqdm(total=total, desc=title, unit="run", delay=1, disable=not progress, leave=False) as bar:
        try:
            for way in ways:
                forward = _built(model, *way, skip=len(ways) > 1)
                if forward is None:
                    bar.update(1 + len(arranged))
                    continue
                alone = _run(forward, mine, [], Composition())
                known = flips.of(alone)
                bar.update()
                for name, how in arranged.items():
                    found = _run(forward, mine, batches[name], how)
                    with np.errstate(invalid="ignore"):  # some models blot ids out with infinities
                        moved = np.where(found == alone, 0, amplify * (found - alone)).astype(np.float32)
                    after = alone + moved if amplify != 1 else found
                    *line, typical = _compared(alone, after, np.abs(moved))
                    lines.append(
                        (name, *way, *line, *flips.between(known, after, line[0]), typical, float(amplify))
                    )
                    differences.append(np.abs(moved))
                    bar.update()
        except KeyboardInterrupt:
            warnings.warn(
                f"interrupted: {len(lines)} of {len(ways) * len(arranged)} runs are there", stacklevel=2
            )
            complete = False
    return Drift(request.id, amplify, complete, pd.DataFrame(lines, columns=list(COLUMNS)), differences)


def _compared(alone: np.ndarray, after: np.ndarray, apart: np.ndarray
             ) -> tuple[float, float, float, float, bool, float]:  # fmt: skip
    """max_abs, mean_abs, max_ulps, margin, argmax_same; and mean_ulps."""
    largest, typical = float(apart.max()), float(apart.mean())
    size = float(np.abs(alone[np.isfinite(alone)]).max())
    ulp = 2.0 ** (math.floor(math.log2(size)) - _mantissa(alone)) if size else 2.0**-149
    second, best = np.partition(alone, -2)[-2:]
    same = bool(alone.argmax() == after.argmax())
    return largest, typical, largest / ulp, float(best - second), same, typical / ulp


def _mantissa(logits: np.ndarray) -> int:
    """Bits of the narrowest type that holds these float32 numbers: bfloat16, float16 or float32."""
    if not (logits.view(np.uint32) & 0xFFFF).any():
        return 7
    with np.errstate(over="ignore"):
        return 10 if (logits.astype(np.float16) == logits).all() else 23


def _tokens(sibling: Request | str, model: Model) -> list[int]:
    return check(Request(sibling) if isinstance(sibling, str) else sibling, model)


def _built(model: Model, name: str, invariant: bool, skip: bool) -> Forward | None:
    """A forward; None, with a warning, where this model or device has none such and others are asked for."""
    try:
        forward, _ = build(model, name, invariant)
    except ValueError as error:
        if not skip or name not in FORWARDS:
            raise
        warnings.warn(f"left out: {error}", stacklevel=3)
        return None
    return forward if forward.name == name else None  # what can't run packed runs one by one: it warned


def _run(forward: Forward, mine: list[int], siblings: list[list[int]], how: Composition) -> np.ndarray:
    """The logits after the request's last prompt token, float32 `[vocab]`."""
    prompts = [*siblings, mine] if how.last else [mine, *siblings]
    place = len(siblings) if how.last else 0
    rows = [(id(prompts), i) for i in range(len(prompts))]
    done = [0] * len(prompts)
    todo = [how.cuts(len(prompt)) for prompt in prompts]
    try:
        if how.cached:
            _adopt(forward, rows[place], mine[: how.cached])
            done[place] = how.cached
            todo[place] = [end for end in todo[place] if end > how.cached]
        while todo[place]:
            now = [i for i, ends in enumerate(todo) if ends]
            spans = []
            for i in now:
                end = todo[i].pop(0)
                spans.append(Span(rows[i], done[i], prompts[i][done[i] : end]))
                done[i] = end
            logits = forward.run(spans)
            mx.eval(logits, forward.state())
        return np.array(logits[now.index(place)].astype(mx.float32))
    finally:
        for row in rows:
            forward.release(row)


def _adopt(forward: Forward, row: Any, tokens: list[int]) -> None:
    """A row that begins with keys and values which another one computed."""
    if not isinstance(forward, PackedForward):
        forward.run([Span(row, 0, tokens, sample=False)])
        return
    other = (row, "prefix")
    forward.run([Span(other, 0, tokens)])
    mx.eval(forward.state())
    pairs = [(mx.contiguous(k), mx.contiguous(v)) for k, v in forward.read(other, len(tokens))]
    mx.eval(pairs)
    forward.release(other)
    forward.write(row, pairs, len(tokens))
