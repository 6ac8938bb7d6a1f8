"""Prefix cache: keys and values of prompts seen before, found by the tokens they begin with.

A trie on token ids; the least recently used entries go first when the bytes run out. What is kept is a copy:
a row that adopts a prefix can't change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

Pairs = list[tuple[mx.array, mx.array]]


@dataclass(eq=False, slots=True)
class _Node:
    children: dict[int, _Node] = field(default_factory=dict)
    entry: tuple[int, ...] | None = None


class PrefixCache:
    """Prefixes by token ids.

    Parameters
    ----------
    limit : int
        Bytes of keys and values to keep; 0 keeps nothing.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self._root = _Node()
        self._entries: OrderedDict[tuple[int, ...], Pairs] = OrderedDict()
        self._changing = False

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], most: int) -> tuple[int, Pairs]:
        """The longest kept prefix of `tokens`, at most `most` of them.

        Returns
        -------
        length : int
            0 if nothing is kept that begins so.
        pairs : list of (keys, values)
            `[heads, at least length, dim]` each, one per layer.
        """
        node, length = self._root, 0
        while length < min(most, len(tokens)) and tokens[length] in node.children:
            node = node.children[tokens[length]]
            length += 1
        if not length:
            return 0, []
        while node.entry is None:  # any entry below shares the prefix walked so far
            node = next(iter(node.children.values()))
        self._entries.move_to_end(node.entry)
        return length, self._entries[node.entry]

    def add(self, tokens: Sequence[int], pairs: Pairs) -> None:
        """Keep a prefix, unless a kept one covers it; the oldest go until it fits."""
        key = tuple(tokens)
        length, _ = self.find(key, len(key))
        size = sum(k.nbytes + v.nbytes for k, v in pairs)
        if length == len(key) or size > self.limit:
            return
        copies: Any = [(mx.contiguous(k), mx.contiguous(v)) for k, v in pairs]
        mx.eval(copies)
        self._changing = True
        # A prefix of the new one has nothing left to give.
        node = self._root
        for token in key:
            if node.entry is not None:
                self._drop(node.entry)
                break
            if token not in node.children:
                break
            node = node.children[token]
        while self.nbytes + size > self.limit:
            self._drop(next(iter(self._entries)))
        node = self._root
        for token in key:
            node = node.children.setdefault(token, _Node())
        node.entry = key
        self._entries[key] = copies
        self.nbytes += size
        self._changing = False

    def mend(self) -> None:
        """Empty the cache where an exception ended a change half done; entries are copies, no row's loss."""
        if self._changing:
            self._entries.clear()
            self._root, self.nbytes = _Node(), 0
            self._changing = False

    def _drop(self, key: tuple[int, ...]) -> None:
        self.nbytes -= sum(k.nbytes + v.nbytes for k, v in self._entries.pop(key))
        path = [self._root]
        for token in key:
            path.append(path[-1].children[token])
        path[-1].entry = None
        for token, node, parent in zip(reversed(key), reversed(path[1:]), reversed(path[:-1]), strict=True):
            if node.children or node.entry is not None:
                break
            del parent.children[token]
