"""A policy put together from an eviction and an admission."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvfuse.policy.admission import Admission, VictimAge
from kvfuse.policy.api import HOLD_SECONDS, Policy, Victim
from kvfuse.policy.books import NONE, Books
from kvfuse.policy.chains import Chains
from kvfuse.policy.eviction import Eviction


class CachePolicy(Policy):
    """Keeps the books, and asks one strategy for the order of victims and another for admission."""

    def __init__(
        self, books: Books, eviction: Eviction, admission: Admission, chains: Chains, victim_age: VictimAge
    ) -> None:
        """``books`` are those of ``eviction``; ``victim_age`` is what ``admission`` looks at."""
        self.victim_age = victim_age
        self._books = books
        self._eviction = eviction
        self._admission = admission
        self._chains = chains
        self._held: OrderedDict[int, float] = OrderedDict()
        """row of a block that was kept, in no order of the eviction -> when it may be offered again"""

    @property
    def size(self) -> int:
        return self._books.size

    def __len__(self) -> int:
        return len(self._books.rows)

    def __contains__(self, key: object) -> bool:
        return key in self._books.rows

    def admits(self, keys: Sequence[int], now: float, has_room: bool) -> list[bool]:
        notes = self._chains.notes(keys, now, self._books.rows)
        admits = self._admission.admits
        return [has_room or admits(note.is_root, note.was_seen, note.follows) for note in notes]

    def added(self, key: int, size: int, now: float, tag: int = 0, born: float | None = None) -> None:
        if size <= 0:
            raise ValueError(f"a block has bytes, not {size}")
        self.removed(key)
        note = self._chains.take(key)
        row = self._books.open(key, size, now, tag)
        if born is not None:
            self._books.born[row] = born
        parent = NONE if note.parent is None else self._books.rows.get(note.parent, NONE)
        self._eviction.insert(row, now, parent, note.follows)

    def used(self, keys: Sequence[int], now: float) -> None:
        known = self._books.rows
        follows = self._chains.ask(keys, now, known)
        rows = [row for row in map(known.get, keys) if row is not None]
        if self._held:
            rows = [row for row in rows if row not in self._held]
        self._eviction.touch(rows, now, follows)
        times = self._books.times
        for row in rows:
            times[row] = now

    def last_use(self, key: int) -> float | None:
        row = self._books.rows.get(key)
        return None if row is None else self._books.times[row]

    def removed(self, key: int) -> None:
        row = self._books.rows.get(key)
        if row is None:
            return
        if self._held.pop(row, None) is None:
            self._eviction.remove(row)
        self._books.close(row)

    def victims(self, size: int, now: float) -> list[Victim]:
        self._offer_again(now)
        books, found = self._books, []
        left = books.size - size
        while books.size > left and (row := self._eviction.pick(now)) != NONE:
            age = now - books.times[row]
            self.victim_age.add(age)
            block_size, tag, born = books.sizes[row], books.tags[row], books.born[row]
            found.append(Victim(books.close(row), block_size, tag, age, born))
        return found

    def expired(self, before: float, now: float) -> list[Victim]:
        return self._take(self._books.rows_born_before(before), now)

    def by_tag(self, mask: int) -> dict[int, tuple[int, float]]:
        return self._books.by_tag(mask)

    def tagged(self, mask: int, values: Collection[int], now: float) -> list[Victim]:
        return self._take(self._books.rows_tagged(mask, values), now)

    def _take(self, rows: Sequence[int], now: float) -> list[Victim]:
        books, found = self._books, []
        for row in rows:
            victim = Victim(books.keys[row], books.sizes[row], books.tags[row], now - books.times[row], books.born[row])
            self.removed(victim.key)
            found.append(victim)
        return found

    def keep(self, victim: Victim, now: float) -> None:
        self.removed(victim.key)
        row = self._books.open(victim.key, victim.size, now, victim.tag)
        self._books.born[row] = victim.born
        self._held[row] = now + HOLD_SECONDS

    def _offer_again(self, now: float) -> None:
        while self._held:
            row, until = next(iter(self._held.items()))
            if until > now:
                return
            del self._held[row]
            self._eviction.put_back(row, now)
