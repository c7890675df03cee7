"""Quotas where many hosts have the volume: a record for each namespace says which part of them each client may use.

The record (`g`) has the quotas and a *part* for each client, in bytes and files, with what is in namespaces in it.
A client's use is what it added less what it removed, so use and part may be below 0. Client 0 stands for those that
are gone. Two rules make that the use of a namespace is never above its quotas, whoever dies and however late news are:

* No client's use in memory, staged bytes and files on their way included, is above its part (`GrantBook` tells its
  account, which refuses). Memory never has less than the client's records say.
* The sum of all parts is within the quotas. Only transactions that expect the record as it was change it.

A client that gives some of its part back keeps to the smaller one from before the transaction is sent; one that takes
some uses it after the transaction is in the store. So the rules do not depend on when a client hears of the record.
One that has not heard of a namespace, or not of its record, adds nothing to it.

**Quotas for what is there already.** Clients that have not heard of them may be adding to the namespace. So whoever
lowers quotas, or sets the first ones, puts the record first: with the new limits, and with the clients that are alive
as *awaited*. Each of them takes its use at that moment as its part, and adds nothing until that is in the store. While
somebody is awaited nobody takes more. A client that came meanwhile, and has read what was there before, is awaited
too: the members are read again after the record is there. The settings follow when nobody is awaited any more: so the
quotas hold from the moment on in which anybody can see them. Where the use is larger than they allow, nobody may grow:
each client may use its part less all that is too much (`bound`), so all of them together at most the quotas, or what
they have.

**Steps.** What a client takes lasts for some seconds (`Granting` doubles what it takes, if it did not), but is never
more than half of what is free. One whose blocks fill its part evicts of them: it asks others for more only where its
part is far below an equal one, and they give of theirs down to about that. So where a namespace is full, blocks come
and go, and nobody changes the record.

**Clients that are gone.** Their use is added to client 0's in the transaction that moves that much of their part.
What is left of a part is nobody's, when its client is gone and has no records of use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
import trio
from msgspec.structs import replace

from kvfuse.volume.namespaces.accounts import UNBOUNDED, Accounts
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import Counts

DEPARTED = schema.NOBODY
"""the client that stands for those that are gone"""
TAKEN_SHARE = 2
"""A client takes one part in so many of its equal share of what is free, where that is more than it lacks."""
LITTLE_SHARE = 16
"""Less than one part in so many of a quota is little."""
SHORT_SHARE, FAIR_SHARE = 5 / 8, 3 / 4
"""of an equal part: a client with less than the first is short, and gets the second from those that have more"""


class Grants(msgspec.Struct, array_like=True, frozen=True):
    """The value of a `g` record. The quotas are 0 where there is none."""

    capacity: int = 0
    blocks: int = 0
    parts: dict[int, NamespaceUse] = {}
    """client -> what it may have; absent: nothing"""
    awaited: tuple[int, ...] = ()
    """clients that have not said yet what they use"""
    lacks: dict[int, NamespaceUse] = {}
    """client -> what it would need more: others give back what they do not use"""

    @property
    def quotas(self) -> NamespaceUse:
        return NamespaceUse(_limit_of(self.capacity), _limit_of(self.blocks))

    @property
    def total(self) -> NamespaceUse:
        """All parts together."""
        return NamespaceUse(*map(sum, zip(*self.parts.values(), strict=True))) if self.parts else NO_USE

    @property
    def free(self) -> NamespaceUse:
        """What a client may take."""
        if self.awaited:
            return NO_USE
        return NamespaceUse(*[max(quota - total, 0) for quota, total in zip(self.quotas, self.total, strict=True)])

    def part(self, client: int) -> NamespaceUse:
        return self.parts.get(client, NO_USE)

    def bound(self, client: int) -> NamespaceUse:
        """What a client may use, which is not awaited; `UNBOUNDED` where there is no quota."""
        rows = zip(self.quotas, self.total, self.part(client), strict=True)
        return NamespaceUse(
            *[part - max(total - quota, 0) if quota < UNBOUNDED else UNBOUNDED for quota, total, part in rows]
        )

    @property
    def client_count(self) -> int:
        """Clients that have a part."""
        return len(self.parts.keys() - {DEPARTED})

    def share(self, client: int, share: float) -> NamespaceUse:
        """A share of an equal part for each client that has one, and for this one."""
        count = len(self.parts.keys() - {DEPARTED} | {client})
        return NamespaceUse(*[int(share * quota) // count if quota < UNBOUNDED else 0 for quota in self.quotas])

    def short(self, client: int) -> NamespaceUse:
        """What a client that is short of quotas lacks to a fair part; else nothing."""
        part, least, fair = self.part(client), self.share(client, SHORT_SHARE), self.share(client, FAIR_SHARE)
        is_short = any(have < need for have, need in zip(part, least, strict=True))
        return NamespaceUse(*[max(need - have, 0) if is_short else 0 for have, need in zip(part, fair, strict=True)])

    def is_tighter(self, capacity: int, blocks: int) -> bool:
        """These quotas allow less than the present ones."""
        return _limit_of(capacity) < self.quotas.size or _limit_of(blocks) < self.quotas.files

    def is_unfinished(self, capacity: int, blocks: int) -> bool:
        """Settings with these quotas are larger: smaller ones are about to follow, or whoever began that is gone."""
        return Grants(capacity, blocks).is_tighter(self.capacity, self.blocks)

    # -- changes -----------------------------------------------------------------------------------------

    def with_part(self, client: int, part: NamespaceUse) -> Grants:
        parts = {**self.parts, client: part}
        return replace(self, parts={one: of for one, of in parts.items() if of != NO_USE})

    def taken(self, client: int, lack: NamespaceUse, share: int, step: NamespaceUse = NO_USE) -> Grants | None:
        """A client takes what it lacks, or said that it does; or one part in ``share`` of what is free, or a ``step``
        if that is more, half of it at the most. None: that is too few, or others lack it.
        """
        part, said = self.part(client), self.lacks.get(client, NO_USE)
        kept = [0, 0] if said != NO_USE else [sum([one[at] for one in self.lacks.values()]) for at in range(2)]
        free = NamespaceUse(*[max(have - other, 0) for have, other in zip(self.free, kept, strict=True)])
        if free.size < lack.size or free.files < lack.files:
            return None
        more = [
            min(have, max(need, wanted, min(max(have // share, least), have // 2))) if quota < UNBOUNDED else 0
            for quota, have, need, wanted, least in zip(self.quotas, free, lack, said, step, strict=True)
        ]
        return self.with_lack(client, NO_USE).with_part(client, NamespaceUse(part.size + more[0], part.files + more[1]))

    def given(self, client: int, use: NamespaceUse) -> Grants | None:
        """A client that uses so much gives back some of the rest: what others lack, or half. None: it has none.

        All of it, where there was more than the quotas allow.
        """
        part, wanted, total, quotas = self.part(client), self.wanted_by_others(client), self.total, self.quotas
        slack = [max(have - used, 0) for have, used in zip(part, use, strict=True)]
        halves = [slack[at] if total[at] > quotas[at] else slack[at] // 2 for at in range(2)]
        given = [min(slack[at], max(wanted[at], halves[at])) if wanted[at] else 0 for at in range(2)]
        if not any(given):
            return None
        return self.with_part(client, NamespaceUse(part.size - given[0], part.files - given[1]))

    def returned(self, client: int, use: NamespaceUse) -> Grants | None:
        """A client that uses less than half of its part gives half of the rest back, where little is free. None: it
        does not."""
        part, quotas, free = self.part(client), self.quotas, self.free
        given = [
            (have - used) // 2 if quota < UNBOUNDED and 2 * max(used, 0) < have and left < quota // LITTLE_SHARE else 0
            for have, used, quota, left in zip(part, use, quotas, free, strict=True)
        ]
        if self.awaited or not any(given):
            return None
        return self.with_part(client, NamespaceUse(part.size - given[0], part.files - given[1]))

    def wanted_by_others(self, client: int) -> NamespaceUse:
        """What clients but this one lack, and is not free."""
        lacks = [lack for one, lack in self.lacks.items() if one != client]
        return NamespaceUse(*[max(sum([lack[at] for lack in lacks]) - self.free[at], 0) for at in range(2)])

    def with_lack(self, client: int, lack: NamespaceUse) -> Grants:
        """A client lacks so much."""
        lacks = {**self.lacks, client: lack}
        return replace(self, lacks={one: of for one, of in lacks.items() if of != NO_USE})

    def entered(self, client: int, use: NamespaceUse) -> Grants:
        """A client that was awaited uses so much."""
        awaited = tuple([one for one in self.awaited if one != client])
        return replace(self, awaited=awaited).with_part(client, use)

    def left(self, client: int, use: NamespaceUse) -> Grants:
        """A client is gone, and its records say so much."""
        return self.entered(client, use).with_lack(client, NO_USE)

    def moved(self, client: int, use: NamespaceUse) -> Grants:
        """So much of a client's use is client 0's."""
        part, departed = self.part(client), self.part(DEPARTED)
        moved = self.with_part(client, NamespaceUse(part.size - use.size, part.files - use.files))
        return moved.with_part(DEPARTED, NamespaceUse(departed.size + use.size, departed.files + use.files))

    def tightened(self, capacity: int, blocks: int, clients: Collection[int]) -> Grants:
        """Quotas of which at least one is smaller. Where the parts do not fit, these clients are awaited."""
        limited = replace(
            self,
            capacity=min(self.capacity or capacity, capacity or self.capacity),
            blocks=min(self.blocks or blocks, blocks or self.blocks),
        )
        is_tracked = (self.capacity or not capacity) and (self.blocks or not blocks)
        if is_tracked and not self.awaited and not is_over(limited):
            return limited
        parts = {DEPARTED: self.part(DEPARTED)}
        return replace(limited, parts=parts, awaited=tuple(sorted(clients)))


def _limit_of(quota: int) -> int:
    """0: there is none."""
    return quota or UNBOUNDED


def is_over(grants: Grants) -> bool:
    """There is more than the quotas allow."""
    return any(total > quota for total, quota in zip(grants.total, grants.quotas, strict=True))


encode_grants: Callable[[Grants], bytes] = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grants).decode


def decode_grants(value: bytes) -> Grants:
    """Malformed."""
    try:
        return _decode(value)
    except msgspec.DecodeError as error:
        raise schema.Malformed(f"what clients may have of a namespace makes no sense: {error}") from error


def moved_part(value: bytes, client: int, counts: Counts) -> bytes:
    """A record, after so much of a client's stored use became client 0's. Malformed."""
    return encode_grants(decode_grants(value).moved(client, NamespaceUse(counts.size or 0, counts.inodes)))


class GrantBook:
    """What this client may have of each namespace, by the records as it knows them. It alone sets `Account.bound`."""

    def __init__(self, accounts: Accounts, client: int) -> None:
        self._accounts = accounts
        self._client = client
        self.heard: dict[int, Grants] = {}
        """namespace -> its record"""
        self._held: dict[int, NamespaceUse] = {}
        """namespace -> what the client keeps to, while it tells others that it gives the rest back"""
        self.is_ready = trio.Event()
        """all records were read once"""
        self.changed = trio.Event()
        """set, and made anew, when a record changed"""

    def begin(self) -> None:
        """All records were read."""
        self.is_ready.set()
        for number in self._accounts.all:
            self.settle(number)

    def hear(self, number: int, grants: Grants | None) -> None:
        """A record is so; None: there is none."""
        if grants is None:
            self.heard.pop(number, None)
            self._held.pop(number, None)
        else:
            self.heard[number] = grants
        self.settle(number)
        self.changed.set()
        self.changed = trio.Event()

    def hold(self, number: int, part: NamespaceUse) -> None:
        """Keep to this part from now on, if it is smaller: a transaction that says so is about to be sent."""
        grants = self.heard[number]
        if self._client not in grants.awaited:
            part = NamespaceUse(*map(min, part, grants.part(self._client)))
        self._held[number] = NamespaceUse(*map(min, part, self._held.get(number, part)))
        self.settle(number)

    def release(self, number: int) -> None:
        """The transaction is known to have happened, and the record was heard; or it is known that it will not."""
        self._held.pop(number, None)
        self.settle(number)

    def settle(self, number: int) -> None:
        """Tell the account of a namespace what it may have."""
        account = self._accounts.all.get(number)
        if account is not None:
            is_first = number not in self._held
            account.bound = self._bound(number) if self.is_ready.is_set() and account.is_known else NO_USE
            use = self._accounts.use_here(number)  # blocks keep to it from here on
            held = self._held.get(number)
            if is_first and held is not None and use != NamespaceUse(*map(min, use, held)):
                del self._held[number]  # threads stored blocks meanwhile: nobody was told of it yet
                self.settle(number)

    def _bound(self, number: int) -> NamespaceUse | None:
        grants = self.heard.get(number)
        if grants is None:
            settings = self._accounts.all[number].settings
            return NO_USE if settings.capacity or settings.blocks else None
        if self._client in grants.awaited:
            held = bound = self._held.setdefault(number, self._accounts.use_here(number))
        else:
            bound = grants.bound(self._client)
            held = self._held.get(number, bound)
        rows = zip(grants.quotas, bound, held, strict=True)
        return NamespaceUse(*[min(one, most) if quota < UNBOUNDED else quota for quota, one, most in rows])

    def room_elsewhere(self, number: int) -> NamespaceUse:
        """What is free, and what other clients could give back, as far as their records say."""
        grants = self.heard.get(number, Grants())
        uses = self.stored_uses(number)
        others = (grants.parts.keys() | uses.keys()) - {self._client, DEPARTED}
        slack = [(grants.part(client), uses.get(client, NO_USE)) for client in others]
        return NamespaceUse(
            *[grants.free[at] + sum([max(part[at] - use[at], 0) for part, use in slack]) for at in range(2)]
        )

    def has_given_too_much(self, number: int) -> bool:
        """More was stored, before `hold` was called, than the part that the client was about to keep."""
        held, use, grants = self._held.get(number), self._accounts.use_here(number), self.heard.get(number)
        if held is None or grants is None:
            return False
        return (grants.capacity > 0 and use.size > held.size) or (grants.blocks > 0 and use.files > held.files)

    def stored_uses(self, number: int) -> Mapping[int, NamespaceUse]:
        """Other clients' stored use of a namespace and those in it."""
        uses: dict[int, NamespaceUse] = {}
        for inner in self._accounts.all:
            if self._accounts.is_within(inner, number):
                for client, counts in self._accounts.elsewhere.of(inner).items():
                    use = uses.get(client, NO_USE)
                    uses[client] = NamespaceUse(use.size + (counts.size or 0), use.files + counts.inodes)
        return uses
