"""The books of one namespace that is a cache: which blocks it has, which were asked for, which go next.

A block is a regular file, known here by the *key* of its name: a number of 64 bits, made of the directory and the hash
by which the record store orders names, so that the name is found again with one read. A file is on the books from when
its last writer closed it, or from its put; so a file that is being written does not go.

Uses come from all doors in batches. One request of an engine often asks for a block twice: whether it is there, and
then for its bytes. That is one use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress, islice, takewhile
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from kvfuse.policy import Victim, make_policy
from kvfuse.policy.estimate import HitEstimate
from kvfuse.volume.measures.measures import AGE_BOUNDS, Histogram
from kvfuse.volume.measures.uses import UsesElsewhere
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.store.schema import name_hash
from kvfuse.volume.views.news import NameEvent, News

_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SLAB_BITS = 24
_SLAB_MASK = (1 << _SLAB_BITS) - 1
_SAMPLED = 16
_ASKED_MAX = 1 << 16
"""keys whose reads, soon after a look, count as the same use"""
LOOK_SECONDS = 1.0
"""within which a file is made whose name the kernel looked up for that"""
LOOKED_MAX = 1 << 14
FRESH_SECONDS = 0.25
"""within which a file that was closed gets its name; it is evicted only where nothing else can be"""
REASONS = "room", "expired", "cleared"
"""why a block went"""
MISSES = ("room", "evicted"), ("expired", "expired"), ("cleared", "cleared"), ("slow", "slow")
"""why a block was not there that had been -> what a request for it is called"""
EVICTED_MAX = 1 << 17
"""keys of evicted blocks that are remembered, so that a miss is known to be one"""


NEAR_TIERS = "dram", "disk"
"""tiers of this host that are asked before the segments"""
SegmentsTier = Literal["disk", "remote"]
"""the tier of blocks that the segments alone have: ``disk`` where one host has the volume"""

TierOf = Callable[[int, bytes], str]
"""which of `NEAR_TIERS` has the block of this name in a directory; "": none"""


def _nowhere(directory: int, name: bytes) -> str:
    return ""


def block_key(directory: int, name: bytes) -> int:
    """The key of a name."""
    return name_hash(name) ^ (directory * _SPREAD & _MASK)


class Candidate(NamedTuple):
    """A block that goes next."""

    victim: Victim
    directory: int
    cookie: int
    """the hash of its name, see `schema.entry_key`"""


def is_back(cache: Cache, candidate: Candidate) -> bool:
    """Since it became a candidate its name was given to a newer file, which does not go in its place."""
    return candidate.victim.key in cache.policy or candidate.victim.key in cache._fresh


class AdvancedClock:
    """A clock that was moved ahead: for traffic that is replayed faster than it came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead = 0.0

    def __call__(self) -> float:
        return self._clock() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Before:
    """What was there before: blocks that the store has, and that are put on the books by and by (`Cache.found`)."""

    def __init__(self) -> None:
        self._gone: set[int] | None = set()
        """keys that went while the store is read; None: it is not"""

    @property
    def is_known(self) -> bool:
        """All blocks that the store has are on the books."""
        return self._gone is None

    def begin(self) -> None:
        """The store is read; perhaps again, as slabs came from other hosts."""
        self._gone = set() if self._gone is None else self._gone

    def end(self) -> None:
        self._gone = None

    def gone(self, key: int) -> None:
        if self._gone is not None:
            self._gone.add(key)

    def may_be_there(self, key: int) -> bool:
        return self._gone is not None and key not in self._gone


def forget_slabs(cache: Cache, slabs: Collection[int]) -> None:
    """These slabs are another host's from now on, with the blocks in them."""
    cache.policy.tagged(_SLAB_MASK, slabs, cache.clock())


def blocks_by_slab(caches: Iterable[Cache]) -> dict[int, tuple[int, float]]:
    """Slab -> (bytes of the caches' blocks that begin in it, about when they were used last)."""
    found: dict[int, tuple[int, float]] = {}
    for cache in caches:
        for slab, (size, time) in cache.policy.by_tag(_SLAB_MASK).items():
            more, latest = found.get(slab, (0, 0.0))
            found[slab] = size + more, max(time, latest)
    return found


def used_elsewhere(cache: Cache, keys: Sequence[int]) -> int:
    """Another host used blocks of one request. Returns how many of them are on these books."""
    own = [key for key in keys if key in cache.policy]
    if own:
        cache.policy.used(own, cache.clock())
    return len(own)


def stored_new(
    cache: Cache, directory: int, names: Sequence[bytes], sizes: Sequence[int], slabs: Sequence[int]
) -> None:
    """Files were made whole under names that meant nothing: `named` and `stored` of each."""
    now, policy = cache.clock(), cache.policy
    for name, size, slab in zip(names, sizes, slabs, strict=True):
        key = block_key(directory, name)
        for known in (cache._looked, cache._fresh, cache._evicted):
            if known:
                known.pop(key, None)
        cache.counters["stored"] += key not in policy
        policy.added(key, max(size, 1), now, directory << _SLAB_BITS | slab)
        cache.estimate.stored(key)
        cache._asked.discard(key)  # as in `stored`
        if cache.news.watches:
            cache.news.tell(directory, NameEvent.STORED, name)


class Cache:
    """The books of one cache. For the event loop alone. Times are seconds of ``clock``, which never runs backwards."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        news: News | None = None,
        number: int = ROOT,
        elsewhere: UsesElsewhere | None = None,
    ) -> None:
        """``number``: of its namespace. ``elsewhere``: takes uses of blocks that other hosts have on their books."""
        self.news = news if news is not None else News()
        self._elsewhere = elsewhere or UsesElsewhere(), number
        self._settings = settings
        self.policy = make_policy(settings.eviction, settings.admission)
        self.estimate = HitEstimate()
        self.counters: Counter[str] = Counter()
        """``asked``: blocks that were asked for, and of them ``present``, ``absent``, and ``missed_REASON`` for those
        that went before; of those present ``dram`` and ``disk``, which these tiers have; ``stored``, ``refused`` (not
        admitted), and what went, by reason: ``room``, ``expired``, ``cleared``"""
        self.residence = Histogram(AGE_BOUNDS)
        """seconds from when blocks were stored until they went"""
        self.reuse_gap = Histogram(AGE_BOUNDS)
        """seconds between two uses of a block, of one block in ``_SAMPLED``"""
        self.clock = AdvancedClock(clock)
        self._asked: set[int] = set()
        self._looked: dict[int, float] = {}
        """names that the kernel looked up and did not find -> when; before it makes a file it looks, too"""
        self._evicted: dict[int, str] = {}
        """key -> reason"""
        self._fresh: dict[int, tuple[float, int, bytes, int, int]] = {}
        """files that were closed just now -> when, and what `stored` wants to know"""
        self._leaving: set[int] = set()
        """candidates that are neither evicted nor kept yet"""
        self.before = Before()

    # -- what happens to blocks ------------------------------------------------------------------------

    def closed(self, directory: int, name: bytes, size: int, slab: int) -> None:
        """The last writer of a file closed it. Most get another name then (`stored`), so it may not go in between."""
        key = block_key(directory, name)
        if key in self.policy:
            return self.stored(directory, name, size, slab)
        self._fresh.pop(key, None)
        self._fresh[key] = self.clock(), directory, name, size, slab
        return None

    def settle_closed(self, *, all_of_them: bool = False) -> None:
        """Have files on the books that were closed a while ago, and got no other name."""
        before = self.clock() - FRESH_SECONDS
        settled = list(takewhile(lambda file: all_of_them or file[0] <= before, self._fresh.values()))
        for _, directory, name, size, slab in settled:
            self.stored(directory, name, size, slab)

    def stored(self, directory: int, name: bytes, size: int, slab: int) -> None:
        """A name means a file that nobody writes any more, with ``size`` bytes of slots from ``slab`` on."""
        key = block_key(directory, name)
        self._fresh.pop(key, None)
        self.counters["stored"] += key not in self.policy
        self.policy.added(key, max(size, 1), self.clock(), directory << _SLAB_BITS | slab)
        self._evicted.pop(key, None)
        self.estimate.stored(key)
        if self.news.watches:
            self.news.tell(directory, NameEvent.STORED, name)
        self._asked.discard(key)  # who asked before did not find it: a read is another use

    def gone(self, directory: int, name: bytes, *, is_told: bool = True) -> None:
        """A name means no file any more, or one that is not on the books yet.

        ``is_told``: to those who follow the directory; if not, only if the name was on the books.
        """
        key = block_key(directory, name)
        is_told = is_told or key in self.policy or key in self._fresh or key in self._leaving
        self._fresh.pop(key, None)
        self.policy.removed(key)
        self._leaving.discard(key)
        if is_told and self.news.watches:
            self.news.tell(directory, NameEvent.REMOVED, name)
        self.before.gone(key)

    def asked(
        self,
        directory: int,
        names: Sequence[bytes],
        tier_of: TierOf = _nowhere,
        found: Sequence[bool] | None = None,
    ) -> None:
        """Somebody asked which of a chain of blocks are there, its first block first.

        ``found``: which of them are, where other hosts have blocks on their books; None: as far as names are known.
        """
        keys = [block_key(directory, name) for name in names]
        used = self._note_elsewhere(directory, keys, names, found)
        self._count_tiers(directory, keys, names, tier_of, used)
        self._count(keys, used)
        if len(self._asked) > _ASKED_MAX:
            self._asked.clear()
        self._asked.update(keys)

    def read(self, directory: int, names: Sequence[bytes], tier_of: TierOf = _nowhere) -> None:
        """Somebody read blocks, or tried to. Those that `asked` had before were counted then."""
        all_keys = [block_key(directory, name) for name in names]
        keys = [key for key in all_keys if key not in self._asked]
        if keys:
            unasked = (
                names
                if len(keys) == len(names)
                else list(compress(names, [key not in self._asked for key in all_keys]))
            )
            used = self._note_elsewhere(directory, keys, unasked, None)
            self._count_tiers(directory, keys, unasked, tier_of, used)
            self._count(keys, used)
        self._asked.difference_update(all_keys)

    def _note_elsewhere(
        self, directory: int, keys: Sequence[int], names: Sequence[bytes], found: Sequence[bool] | None
    ) -> Collection[int]:
        """Keys of blocks that are there, and on the books of another host: it is told."""
        elsewhere, number = self._elsewhere
        is_there = elsewhere.is_there
        if is_there is None:
            return ()
        there = found if found is not None else [is_there(directory, name) for name in names]
        used = [key for key in compress(keys, there) if key not in self.policy and key not in self._fresh]
        elsewhere.note(number, used)
        return set(used)

    def _count_tiers(
        self, directory: int, keys: Sequence[int], names: Sequence[bytes], tier_of: TierOf, used: Collection[int]
    ) -> None:
        if tier_of is not _nowhere:
            for key, name in zip(keys, names, strict=True):
                if (key in self.policy or key in used) and (tier := tier_of(directory, name)):
                    self.counters[tier] += 1

    def looked(self, directory: int, name: bytes, tier_of: TierOf = _nowhere, *, is_there: bool) -> None:
        """The kernel looked up a name. An absent one it may be about to make: `settle_looks` counts it later."""
        if is_there:
            self.asked(directory, [name], tier_of)
        else:
            self._looked[block_key(directory, name)] = self.clock()

    def named(self, directory: int, name: bytes) -> None:
        """A file was made under a name, or got it: the kernel looked it up for that."""
        if self._looked:
            self._looked.pop(block_key(directory, name), None)

    def settle_looks(self) -> None:
        """Count names that the kernel did not find, and that nobody made since."""
        before = self.clock() - LOOK_SECONDS
        settled: list[int] = []
        for key, time in self._looked.items():
            if time > before and len(self._looked) - len(settled) < LOOKED_MAX:
                break
            settled.append(key)
        for key in settled:
            del self._looked[key]
            self._count([key])

    def _count(self, keys: list[int], used: Collection[int] = ()) -> None:
        """``used``: those of them that are on the books of other hosts."""
        counters, policy, fresh = self.counters, self.policy, self._fresh
        absent = [key for key in keys if key not in policy and key not in fresh and key not in used]
        counters["asked"] += len(keys)
        counters["present"] += len(keys) - len(absent)
        for key in absent:
            reason = self._evicted.get(key)
            counters["absent" if reason is None else f"missed_{reason}"] += 1
        self.estimate.ask(keys)
        now = self.clock()
        for key in keys:
            if key % _SAMPLED == 0 and (last := policy.last_use(key)) is not None:
                self.reuse_gap.add(now - last)
        policy.used(keys, now)

    # -- decisions ---------------------------------------------------------------------------------------

    def admits(self, directory: int, names: Sequence[bytes], has_room: bool) -> list[bool]:
        """Which blocks of a chain are worth storing. ``has_room``: without an eviction."""
        keys = [block_key(directory, name) for name in names]
        absent = [key for key in keys if key not in self.policy]
        answers = dict(zip(absent, self.policy.admits(absent, self.clock(), has_room), strict=True)) if absent else {}
        admitted = [answers.get(key, True) for key in keys]
        self.counters["refused"] += admitted.count(False)
        return admitted

    def candidates(self, size: int) -> list[Candidate]:
        """Blocks to evict, of at least ``size`` bytes where there are as many. `evicted` or `kept` follows for each."""
        self.settle_closed()
        victims = self.policy.victims(size, self.clock())
        if not victims and self._fresh:
            self.settle_closed(all_of_them=True)
            victims = self.policy.victims(size, self.clock())
        return self._leave(victims)

    def expired(self, ttl: float) -> list[Candidate]:
        """Blocks that were stored more than ``ttl`` seconds ago. `evicted` or `kept` follows for each."""
        now = self.clock()
        return self._leave(self.policy.expired(now - ttl, now))

    def in_slabs(self, slabs: Collection[int]) -> list[Candidate]:
        """Blocks whose first slots are in these slabs. `evicted` or `kept` follows for each."""
        return self._leave(self.policy.tagged(_SLAB_MASK, slabs, self.clock()))

    def _leave(self, victims: Sequence[Victim]) -> list[Candidate]:
        found = []
        for victim in victims:
            directory = victim.tag >> _SLAB_BITS
            found.append(Candidate(victim, directory, victim.key ^ (directory * _SPREAD & _MASK)))
        self._leaving.update([one.victim.key for one in found])
        return found

    def kept(self, candidates: Sequence[Candidate]) -> None:
        """These could not be evicted now."""
        now = self.clock()
        for candidate in candidates:
            key = candidate.victim.key
            if key in self._leaving and key not in self.policy:  # it was neither removed nor stored anew meanwhile
                self.policy.keep(candidate.victim, now)
        self._leaving.difference_update([one.victim.key for one in candidates])

    def evicted(self, victim: Victim, reason: str = "room") -> None:
        """A candidate is gone."""
        self._leaving.discard(victim.key)
        self.before.gone(victim.key)
        self._evicted[victim.key] = reason
        self.residence.add(self.clock() - victim.born)
        self.counters[reason] += 1
        if len(self._evicted) > EVICTED_MAX:
            for former in list(islice(self._evicted, EVICTED_MAX // 8)):
                del self._evicted[former]

    def absent(self, candidates: Sequence[Candidate]) -> None:
        """These were there no more."""
        self._leaving.difference_update([one.victim.key for one in candidates])

    def interrupted(self, candidates: Sequence[Candidate]) -> None:
        """Whoever has these candidates stops before each of them was evicted, kept or absent."""
        self.kept([one for one in candidates if one.victim.key in self._leaving])

    def clear(self) -> None:
        """All blocks are gone."""
        self.counters["cleared"] += len(self.policy) + len(self._fresh)
        self._fresh.clear()
        self.policy = make_policy(self._settings.eviction, self._settings.admission)
        self.before.end()  # of what the store has nothing is there

    # -- what was there before ---------------------------------------------------------------------------

    def found(self, key: int, size: int, idle: float, age: float, place: tuple[int, int]) -> None:
        """A block of the store, stored ``age`` and used ``idle`` seconds ago; those that were not for longest first.

        ``place``: (directory, slab).
        """
        if self.before.may_be_there(key) and key not in self.policy and key not in self._leaving:
            now, tag = self.clock(), place[0] << _SLAB_BITS | place[1]
            self.policy.added(key, max(size, 1), now - idle, tag, now - age)

    def statistics(
        self, unread: Mapping[str, int] = MappingProxyType({}), segments_tier: SegmentsTier = "remote"
    ) -> dict[str, Any]:
        """``unread``: why blocks were not read that were there -> how often. Each was a miss for whoever asked.

        All were counted as asked for and present, but for the "refused". ``segments_tier``: of hits that no nearer
        tier had.
        """
        counters = self.counters.copy()
        counters["asked"] += unread.get("refused", 0)
        counters["present"] = max(0, counters["present"] - sum(unread.values()) + unread.get("refused", 0))
        hits, left = {"dram": 0, "disk": 0, "remote": 0}, counters["present"]
        for tier in NEAR_TIERS:
            hits[tier] = min(counters[tier], left)
            left -= hits[tier]
        hits[segments_tier] += left
        names = ("asked", "present", "absent", "stored", "refused", *REASONS)
        blocks = len(self.policy) + len(self._leaving) + len(self._fresh)
        return {
            **{name: counters[name] for name in names},
            "hits": hits,
            "misses": {
                "absent": counters["absent"],
                **{word: counters[f"missed_{reason}"] for reason, word in MISSES},
                **unread,
            },
            "hit_ratio": round(counters["present"] / counters["asked"], 4) if counters["asked"] else None,
            "blocks": blocks,
            "bytes": self.policy.size,
            "residence": self.residence.statistics(),
            "reuse_gap": self.reuse_gap.statistics(),
            "estimated_hit_ratio": {
                f"{factor:g}x": round(ratio, 4) for factor, ratio in self.estimate.ratios(max(blocks, 1)).items()
            },
        }
