"""Names: tokens as words that fit an axis of a chart or a column of a table. Pure."""

from collections.abc import Iterable


def labels(tokens: Iterable[int], texts: Iterable[str], limit: int = 14) -> list[str]:
    """Short, readable and distinct names of tokens, for an axis or a table.

    One leading space is left out, since nearly every word has it. Two tokens that would read alike get
    their ids added.
    """
    pairs = list(zip((int(t) for t in tokens), texts, strict=True))
    short = {token: _short(text, limit) for token, text in pairs}
    count: dict[str, int] = {}
    for name in short.values():
        count[name] = count.get(name, 0) + 1
    return [short[t] if count[short[t]] == 1 else f"{short[t]} #{t}" for t, _ in pairs]


def _short(text: str, limit: int) -> str:
    if text and not text.strip(" "):
        return f"{len(text)} spaces" if len(text) > 1 else "space"
    text = text.removeprefix(" ").replace("\n", "\\n").replace("\t", "\\t")
    text = "".join(c if c.isprintable() else "?" for c in text) or "(empty)"
    return text if len(text) <= limit else text[: limit - 1] + "…"
