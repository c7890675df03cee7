"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvfuse.policy.admission import Admission, AdmitAdaptive, AdmitAll, AdmitSecondTouch, VictimAge
from kvfuse.policy.books import Books
from kvfuse.policy.cache_policy import CachePolicy
from kvfuse.policy.chain import Chain
from kvfuse.policy.chains import Chains
from kvfuse.policy.eviction import Eviction, Fifo, Lfu, Lru
from kvfuse.policy.ghosts import Arc, S3Fifo
from kvfuse.policy.pace import Pace
from kvfuse.policy.seen import DEFAULT_SIZE, SeenKeys

POLICIES: dict[str, Callable[[Books, Pace], Eviction]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "chain": Chain,
}
ADMISSIONS: dict[str, Callable[[VictimAge, Pace], Admission]] = {
    "all": AdmitAll,
    "second-touch": AdmitSecondTouch,
    "adaptive": AdmitAdaptive,
}
DEFAULT_POLICY = "chain"
DEFAULT_ADMISSION = "adaptive"


def make_policy(
    policy: str = DEFAULT_POLICY,
    admission: str = DEFAULT_ADMISSION,
    seen_size: int = DEFAULT_SIZE,
    follows_gaps: bool = True,
) -> CachePolicy:
    """A policy with empty books. KeyError for a name that is none.

    ``seen_size``: bytes for what was ever asked for. ``follows_gaps``: false where `Pace` keeps its first values.
    """
    books, age, pace = Books(), VictimAge(), Pace(follows_gaps)
    eviction, strategy = POLICIES[policy](books, pace), ADMISSIONS[admission](age, pace)
    needs_seen = eviction.needs_seen or strategy.needs_seen
    chains = Chains(SeenKeys(seen_size) if needs_seen else None, pace)
    return CachePolicy(books, eviction, strategy, chains, age)
