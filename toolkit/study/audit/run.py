"""Audit: does an engine or a server give a seeded request the same output, every token, whatever its company?

Asks, compares, judges and names the likely cause.

What is asked is in `trial`, of whom in `targets` and `servers`; verdicts are in `checks`, causes in
`diagnosis`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ...chart_lookup import chart_function
from ...engine.admission import check
from ...fields import Rules, show
from ...requests import Request
from .answers import Target, Unanswered
from .checks import BROKEN, KEPT, Check, judge
from .diagnosis import Cause, diagnose
from .targets import EngineTarget, target_of
from .trial import Seen, Trial, seeded

if TYPE_CHECKING:
    import pandas as pd

# Uncertain ones: after a prompt whose next word is clear, all seeds draw the same.
PROMPTS = (
    "The children were playing with a",
    "Yesterday I went to the",
    "My favourite thing is",
    "In the middle of the night the old man",
)
_PATIENCE = 3  # steps in a row that end by a timeout
_COLUMNS = ("check", "trial", "row", "compared", "first", "text", "other_text")


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What an audit found.

    Attributes
    ----------
    target, kind : str
        What was audited; "engine", "callable" or "server".
    unit : str
        What is compared: "token", or "character" of a server that reports only text.
    trials, tokens : int
    checks : tuple of Check
        Those with `promise` are about seeded requests; the others lie beside.
    diagnosis : tuple of Cause
        Likely causes of what is broken, in the promise or beside it. Empty where nothing is, and where
        nothing points to a cause: `answered`, `choices` and `own_seed` alone don't.
    notes : tuple of str
        What to know of how it was asked.
    complete : bool
        False where it was interrupted.
    """

    target: str
    kind: str
    unit: str
    trials: int
    tokens: int
    checks: tuple[Check, ...]
    diagnosis: tuple[Cause, ...]
    notes: tuple[str, ...]
    complete: bool
    _seen: tuple[Seen, ...]

    @property
    def ok(self) -> bool:
        """Whether the promise to seeded requests was kept: tested, to the end, and nowhere broken."""
        promised = {c.name: c.verdict for c in self.checks if c.promise}
        tested = all(promised[name] == KEPT for name in ("answered", "repeat", "other_seed", "every_token"))
        return self.complete and tested and BROKEN not in promised.values()

    @property
    def reading(self) -> str:
        """One sentence: the verdict, and the likely cause."""
        broken = any(c.promise and c.verdict == BROKEN for c in self.checks)
        told = "kept" if self.ok else "broken" if broken else "not tested"
        inside, beside = ("; ".join(c.name for c in self.diagnosis if c.promise is p) for p in (True, False))
        said = f"the promise to seeded requests is {told}" + " (interrupted)" * (not self.complete)
        return said + f": {inside}" * bool(inside) + f"; beside it, {beside}" * bool(beside)

    def check(self, name: str) -> Check:
        """The check of that name."""
        found = {c.name: c for c in self.checks}
        if name not in found:
            raise ValueError(f"name={name!r}: must be one of {', '.join(found)}")
        return found[name]

    def to_frame(self) -> pd.DataFrame:
        """One row for each pair of answers that was compared.

        Returns
        -------
        pandas.DataFrame
            Columns: check; trial; row, the request that was looked at; compared, the tokens of the longer
            answer; first, the first token that differs (missing where none does; 0 is the first); text and
            other_text, the two answers. Beside the checks' names there is "whose_seed": an answer in company
            that differs from its first token on, beside those alone with each sibling's seed.
        """
        import pandas as pd

        rows = [(s.check, s.trial, s.row, s.compared, s.first, s.one.text, s.other.text) for s in self._seen]
        return pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"first": "Int64"})

    def summary(self) -> pd.DataFrame:
        """One row for each check: the fields of `Check`."""
        import pandas as pd

        return pd.DataFrame([asdict(c) for c in self.checks]).astype({"first": "Int64"})

    def to_json(self) -> dict[str, Any]:
        """Plain values: the attributes, `ok` and `reading`, each check's fields and each cause's."""
        return {
            "checks": [asdict(c) for c in self.checks],
            "complete": self.complete,
            "diagnosis": [cause._asdict() for cause in self.diagnosis],
            "kind": self.kind,
            "notes": list(self.notes),
            "ok": self.ok,
            "reading": self.reading,
            "target": self.target,
            "tokens": self.tokens,
            "trials": self.trials,
            "unit": self.unit,
        }

    def chart(self, **options: Any) -> Any:
        """Each check's answers, token by token: how many are still the same."""
        return chart_function("audit")(self.to_frame(), self.summary(), **options)

    def __repr__(self) -> str:
        return f"Audit({self.target}: {self.reading})"

    def _repr_html_(self) -> str:
        lines = [f"<p><b>{html.escape(self.target)}</b>: {html.escape(self.reading)}</p><table>"]
        lines.append("<tr><th>check</th><th>compared</th><th>differing</th><th>verdict</th><th></th></tr>")
        for c in self.checks:
            cells = (c.name, c.compared, c.differing, c.verdict, c.sentence)
            lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
        ends = (*map(str, self.diagnosis), *self.notes)
        return "".join([*lines, "</table>", *(f"<p>{html.escape(end)}</p>" for end in ends)])


def audit(
    target: Any,
    *,
    model: str | None = None,
    requests: Sequence[Request] | None = None,
    trials: int = 3,
    tokens: int = 8,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    ca: str | None = None,
    progress: bool = False,
) -> Audit:
    """Ask a target seeded requests alone and in company, and say whether their answers stay the same.

    Interrupted, it returns what was found, with `complete` False.

    Parameters
    ----------
    target : Engine, callable or str
        An idle engine; a function from a list of Request to their completions, in the same order; or the
        base URL of a server with OpenAI's `/v1/completions`, or the whole URL of its `/v1/chat/completions`.
    model : str, optional
        The server's name for its model.
    requests : sequence of Request, optional
        Prompts and sampling parameters to ask with, each in turn beside the others; fewer than two get
        company of the audit's own. Ids, seeds and lengths are the audit's. None may be greedy.
    trials : int
        Rounds, with other seeds and the next request.
    tokens : int
        Length of each answer, at least 2.
    timeout : float
        Seconds that a server has to answer, from the start of a batch's last request to the last byte.
    headers : mapping of str to str, optional
        Sent to a server with every request. Their values are secrets: masked in whatever is reported.
    extra_body : mapping of str, optional
        Fields of the body that a server gets with every request; they override the audit's own.
    ca : str, optional
        File of the certificates that a server's must be signed by.
    progress : bool
        Show a bar.

    Returns
    -------
    Audit

    Raises
    ------
    ValueError
        One line: a bad argument, or a request that can't be asked.
    OSError
        One line: a target that doesn't answer the first request.
    """
    rules = Rules("")
    rules.integer("trials", trials, 1, 1000, "the default is 3")
    rules.integer("tokens", tokens, 2, 100_000, "the default is 8")
    rules.number("timeout", timeout, 0, 86_400, "(", "seconds to wait for an answer")
    asked = _prepared(requests, tokens)
    whom = target_of(target, model, timeout, headers=headers, extra_body=extra_body, ca=ca)
    try:
        if isinstance(whom, EngineTarget):
            for request in asked:
                check(request, whom.engine.model)
        seen, missing, complete = _ask(whom, asked, trials, progress)
    finally:
        whom.close()
    checks = judge(seen, whom, missing)
    return Audit(whom.name, whom.kind, whom.unit, trials, tokens, checks, diagnose(checks, seen),
                 tuple(whom.notes()), complete, tuple(seen))  # fmt: skip


def askable(request: Request, where: str) -> None:
    """Refuse a request that would prove nothing; the line begins with `where`."""
    if request.greedy:
        name = "temperature" if request.temperature == 0 else "top_k"
        value = f"{name}={getattr(request, name):g}"
        raise ValueError(f"{where}: {value}: is greedy, so no seed can show; must sample")
    for name in ("generated", "cached"):
        if getattr(request, name):
            raise ValueError(f"{where}: {name}: must be left out; an audit asks whole requests")


def _prepared(requests: Sequence[Request] | None, tokens: int) -> list[Request]:
    if isinstance(requests, Request | str) or not isinstance(requests, Iterable | None):
        raise ValueError(f"requests={show(requests)}: must be a list of Request")
    given = list(requests or ())
    for place, request in enumerate(given):
        if not isinstance(request, Request):
            raise ValueError(f"requests[{place}]: must be a Request; of a prompt alone, Request(prompt)")
        askable(request, f"requests[{place}]")
    if len(given) < 2:
        given += [Request(prompt) for prompt in PROMPTS if prompt != (given and given[0].prompt)][:3]
    how = {"n": 1, "arrival": 0, "max_tokens": tokens}
    return [request.replace(id=f"r{place}", **how) for place, request in enumerate(given)]


def _ask(
    target: Target, requests: Sequence[Request], trials: int, progress: bool
) -> tuple[list[Seen], dict[str, str], bool]:
    seen: list[Seen] = []
    missing: dict[str, str] = {}
    late = 0
    steps = [(number, *step) for number in range(trials) for step in Trial.STEPS]
    try:
        for number, names, step in tqdm(steps, desc="audit", unit="step", disable=not progress, leave=False):
            if step == Trial.STEPS[0][1]:
                trial = Trial(target, seeded(requests, number), number)
                if not number:
                    _ = trial.alone  # a target that can't even do this is reported at once, not judged
            if late == _PATIENCE:
                why = f"given up: {_PATIENCE} times in a row there was no answer in time"
                missing.update((name, why) for name in names if name not in missing)
                continue
            try:
                seen += trial.step(step)
                late = 0
            except Unanswered as error:
                late += error.late
                missing.update(dict.fromkeys(names, str(error)))
    except KeyboardInterrupt:
        return seen, missing, False
    return seen, missing, True
