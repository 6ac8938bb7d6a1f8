"""Stops: a row's text as it grows, watched for stop strings that may begin in one token and end in another.

Only the newest tokens are decoded. Characters whose bytes are not all there yet are looked at, and decoded
again with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

UNFINISHED = "\ufffd"


class Watch:
    """The text of one row's generated tokens, and where its first stop string begins.

    Parameters
    ----------
    decode : callable
        Ids to text.
    stop : sequence of str
    tokens : iterable of int
        Generated before now.

    Attributes
    ----------
    text : str
        Of all tokens so far.
    found : int or None
        Where in the text the first stop string begins.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], tokens: Iterable[int] = ()
    ):
        self._decode, self._stop = decode, stop
        self._longest = max(map(len, stop), default=0)
        self.text = ""
        self.found: int | None = None
        self._tokens: list[int] = []
        self._ends: list[int] = []  # of the text after each token
        # Text up to `settled` is final. It ends with the text of tokens[before:upto], which are decoded again
        # with whatever follows: some tokenizers give a token another text at the start.
        self._before = self._upto = self._settled = 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take in the next token."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._before : self._upto])
        fresh = self._decode(self._tokens[self._before :])[len(known) :]
        self.text = self.text[: self._settled] + fresh
        self._ends.append(len(self.text))
        if self.found is None:
            start = max(0, self._settled - self._longest)
            places = [at for s in self._stop if (at := self.text.find(s, start)) >= 0]
            self.found = min(places, default=None)
        if not fresh.endswith(UNFINISHED):
            self._before, self._upto, self._settled = self._upto, len(self._tokens), len(self.text)

    @property
    def kept(self) -> int:
        """How many tokens end at or before the stop string's beginning; all, where none was found."""
        if self.found is None:
            return len(self._tokens)
        count = len(self._ends)
        while count and self._ends[count - 1] > self.found:
            count -= 1
        return count
