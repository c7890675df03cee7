"""Messages with holes: those of hundreds of entries are joined from pieces, and no object stands for a field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

from kvfuse.remote.index.api import KEY_SIZE
from kvfuse.remote.index.engine import Row, RowChange, above, below
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.messages import GREATER, LESS


class Template:
    """A message whose holes `fill` fills for many rows. All values of a hole have one size."""

    def __init__(self, message: bytes, holes: Iterable[bytes]) -> None:
        """``holes``: what stands in their places in ``message``, in order; the last one is at the end."""
        self._pieces: list[bytes] = []
        for hole in holes:
            before, found, message = message.partition(hole)
            assert found
            self._pieces.append(before)
        assert not message

    def fill(self, *columns: Iterable[bytes]) -> bytes:
        """The messages of all rows, one behind the other. A column has the values of a hole."""
        parts = [part for pair in zip(map(repeat, self._pieces), columns, strict=True) for part in pair]
        return b"".join(chain.from_iterable(zip(*parts, strict=False)))


class IndexMessages:
    """Transactions for many entries under a prefix."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._key = key = prefix + _hole(KEY_SIZE)
        self._lower, self._upper = _hole(len(below(0))), _hole(len(above(0)))
        key_hole = _hole(KEY_SIZE)
        self._find = Template(messages.transaction([], [self._show]), [key_hole])
        self._absent = Template(messages.transaction([messages.was_changed_at(key, 0)], []), [key_hole])
        has_sequence = [
            messages.compare_value(key, self._lower, GREATER), messages.compare_value(key, self._upper, LESS)
        ]  # fmt: skip
        drop = messages.transaction(has_sequence, [messages.delete_operation(key)])
        holes = [key_hole, self._lower, key_hole, self._upper, key_hole]
        self._drop = Template(_inner(drop), holes)
        self._has_sequence = has_sequence
        self._puts: dict[int, tuple[Template, Template, Template]] = {}
        """size of a stored entry -> (put, put unless it is lower, put in the place of a sequence)"""

    def find(self, keys: Sequence[bytes]) -> bytes:
        """One operation a key; it shows the entry."""
        return self._find.fill(keys)

    def put_if_absent(self, rows: Sequence[Row]) -> bytes:
        """All of them, if all are absent."""
        parts = [self._absent.fill([row.key for row in rows])]
        for size, some in _by_size(rows).items():
            template, _, _ = self._put_templates(size)
            parts.append(template.fill([row.key for row in some], [row.stored for row in some]))
        return b"".join(parts)

    def put_unless_lower(self, row: Row) -> bytes:
        """An operation, which shows what was there. (An absent key is not greater than anything.)"""
        _, template, _ = self._put_templates(len(row.stored))
        return template.fill([row.key], [above(row.sequence)], [row.key], [row.key], [row.stored])

    def replace(self, change: RowChange) -> bytes:
        """An operation, which shows what was there."""
        row, expected = change.row, change.expected
        _, _, template = self._put_templates(len(row.stored))
        return template.fill(
            [row.key], [below(expected)], [row.key], [above(expected)], [row.key], [row.stored], [row.key]
        )

    def drop(self, entries: Sequence[tuple[bytes, int]]) -> bytes:
        """One operation an entry."""
        keys = [key for key, _ in entries]
        lower = [below(sequence) for _, sequence in entries]
        upper = [above(sequence) for _, sequence in entries]
        return self._drop.fill(keys, lower, keys, upper, keys)

    @property
    def _show(self) -> bytes:
        return messages.get_operation(messages.get(self._key))

    def _put_templates(self, size: int) -> tuple[Template, Template, Template]:
        templates = self._puts.get(size)
        if templates is None:
            key, value = _hole(KEY_SIZE), _hole(size)
            put = messages.transaction([], [messages.put_operation(messages.put(self._key, value))])
            is_higher = messages.compare_value(self._key, self._upper, GREATER)
            replace = messages.put_operation(messages.put(self._key, value, shows_former=True))
            unless_lower = messages.transaction([is_higher], [self._show], [replace])
            in_place = messages.transaction(self._has_sequence, [replace], [self._show])
            templates = self._puts[size] = (
                Template(put, [key, value]),
                Template(_inner(unless_lower), [key, self._upper, key, key, value]),
                Template(_inner(in_place), [key, self._lower, key, self._upper, key, value, key]),
            )
        return templates


def _hole(size: int) -> bytes:
    """No part of a message: no key has such bytes, and no head so many of them."""
    return b"\xfe" * size


def _inner(transaction: bytes) -> bytes:
    """As an operation of another one."""
    return messages.transaction([], [messages.transaction_operation(transaction)])


def _by_size(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(len(row.stored), []).append(row)
    return found
