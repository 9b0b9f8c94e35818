"""Numbers of workers: what rows of arrays and bits of masks stand for."""

from __future__ import annotations


class Slots:
    """Each name has a number while it is here; the lowest free one is given next."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str | None] = []

    def __len__(self) -> int:
        """One more than the highest number that was given."""
        return len(self._names)

    def give(self, name: str) -> int:
        """The name's number, a new one if it has none."""
        number = self._numbers.get(name)
        if number is None:
            if None in self._names:
                number = self._names.index(None)
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
            self._numbers[name] = number
        return number

    def get(self, name: str) -> int | None:
        return self._numbers.get(name)

    def name(self, number: int) -> str:
        name = self._names[number]
        assert name is not None
        return name

    def free(self, name: str) -> None:
        number = self._numbers.pop(name, None)
        if number is not None:
            self._names[number] = None
