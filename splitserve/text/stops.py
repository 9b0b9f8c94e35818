"""Stop strings in a stream of text.

An Aho–Corasick automaton (Aho and Corasick 1975) over the stop strings. Its state is the longest
suffix of the text that begins a stop string, which is what must be held back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopScanner:
    """Scans one stream; not thread-safe, one per choice.

    The match that is *complete* first wins, so that how the text was cut into pieces has no
    influence; of two that end together, the longer. The stop string is not part of the output.
    Cost: one dict lookup per character that may belong to a stop string; text without any such
    character is skipped by one regular-expression search.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not s for s in stop_strings):
            raise ValueError("a stop string is empty")
        self._automaton = _Automaton(stop_strings) if stop_strings else None
        self._node = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was found).

        After a match every further push returns ("", True).
        """
        automaton = self._automaton
        if automaton is None:
            return text, False
        if self.stopped:
            return "", True
        if self._node == 0 and automaton.first.search(text) is None:
            return text, False
        text = self._held + text
        node = self._node
        for position in range(len(self._held), len(text)):
            node = automaton.step(node, text[position])
            if match_chars := automaton.match_chars[node]:
                self.stopped = True
                self._held = ""
                return text[: position + 1 - match_chars], True
        self._node = node
        cut = len(text) - automaton.depth[node]
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text comes; empty after a match."""
        held, self._held, self._node = self._held, "", 0
        return held


class _Automaton:
    """Nodes are numbers; 0 is the root.

    depth[n]: length of the prefix that n stands for. match_chars[n]: length of the longest stop
    string that ends at n, or 0.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.match_chars = [0]
        self.first = re.compile("[" + "".join(re.escape(p[0]) for p in patterns) + "]")
        for pattern in patterns:
            node = 0
            for char in pattern:
                node = self.next[node].get(char) or self._add(node, char)
            self.match_chars[node] = len(pattern)
        self._link()

    def step(self, node: int, char: str) -> int:
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)

    def _add(self, parent: int, char: str) -> int:
        node = len(self.next)
        self.next[parent][char] = node
        self.next.append({})
        self.fail.append(0)
        self.depth.append(self.depth[parent] + 1)
        self.match_chars.append(0)
        return node

    def _link(self) -> None:
        """Breadth first: a node's fail link is the longest proper suffix that is also a node."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                queue.append(child)
            self.match_chars[node] = self.match_chars[node] or self.match_chars[self.fail[node]]
