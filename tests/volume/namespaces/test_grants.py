"""What clients may have of quotas: by a seeded play of clients that take, give, enter, die; and case by case."""

from __future__ import annotations

import random

import pytest

from kvfuse.volume.namespaces.accounts import UNBOUNDED, Accounts
from kvfuse.volume.namespaces.grants import GrantBook, Grants, decode_grants, encode_grants
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.store.schema import Malformed

SPACE = 9


def test_a_record_is_read_as_it_was_written() -> None:
    grants = Grants(100, 0, {0: NamespaceUse(-5, 2), 7: NamespaceUse(60, 0)}, (3, 4), {7: NamespaceUse(1, 0)})
    assert decode_grants(encode_grants(grants)) == grants
    with pytest.raises(Malformed):
        decode_grants(b"\x91\xa1x")


def test_a_client_takes_what_it_lacks_or_a_share() -> None:
    grants = Grants(100, 10)
    taken = grants.taken(1, NamespaceUse(10, 0), 4)
    assert taken is not None
    assert (taken.part(1), taken.free) == (NamespaceUse(25, 2), NamespaceUse(75, 8))
    assert taken.taken(2, NamespaceUse(76, 0), 4) is None
    rest = taken.taken(2, NamespaceUse(75, 0), 4)
    assert rest is not None
    assert rest.free.size == 0
    without_blocks = Grants(100).taken(1, NamespaceUse(10, 0), 4)
    assert without_blocks is not None
    assert without_blocks.bound(1) == NamespaceUse(25, UNBOUNDED)


def test_what_others_lack_is_given_from_what_is_not_used() -> None:
    grants = Grants(100, 0, {1: NamespaceUse(90, 0), 2: NamespaceUse(10, 0)}).with_lack(2, NamespaceUse(20, 0))
    assert (grants.wanted_by_others(2), grants.wanted_by_others(1)) == (NO_USE, NamespaceUse(20, 0))
    assert grants.given(1, NamespaceUse(90, 0)) is None
    given = grants.given(1, NamespaceUse(75, 0))
    assert given is not None
    assert (given.part(1), given.wanted_by_others(1)) == (NamespaceUse(75, 0), NamespaceUse(5, 0))
    plenty = grants.given(1, NamespaceUse(10, 0))
    less = Grants(40, 0, grants.parts, (), grants.lacks).given(1, NamespaceUse(10, 0))
    assert less is not None
    assert less.part(1) == NamespaceUse(10, 0), "all of it, as there was too much"
    assert plenty is not None
    assert plenty.part(1) == NamespaceUse(50, 0), "half of it"
    taken = plenty.taken(2, NamespaceUse(20, 0), 100)
    assert taken is not None
    assert taken.lacks == {}


def test_a_step_is_half_of_what_is_free_at_the_most() -> None:
    grants = Grants(100)
    for step, size in ((20, 25), (40, 40), (80, 50)):
        taken = grants.taken(1, NamespaceUse(10, 0), 4, NamespaceUse(step, 0))
        assert taken is not None
        assert taken.part(1).size == size


def test_a_client_that_is_short_gets_a_fair_part() -> None:
    grants = Grants(120, 0, {1: NamespaceUse(100, 0), 2: NamespaceUse(20, 0)})
    assert (grants.short(1), grants.short(2)) == (NO_USE, NamespaceUse(25, 0))
    assert grants.short(3) == NamespaceUse(30, 0), "an equal part of three is 40"
    given = grants.with_lack(2, NamespaceUse(25, 0)).with_part(1, NamespaceUse(75, 0))
    assert given.taken(3, NamespaceUse(1, 0), 6) is None, "it is for client 2"
    taken = given.taken(2, NamespaceUse(1, 0), 6)
    assert taken is not None
    assert (taken.part(2), taken.short(2), taken.lacks) == (NamespaceUse(45, 0), NO_USE, {})


def test_what_is_not_used_is_given_back_where_little_is_free() -> None:
    grants = Grants(100, 0, {1: NamespaceUse(50, 0), 2: NamespaceUse(48, 0)})
    returned = grants.returned(1, NamespaceUse(10, 0))
    assert returned is not None
    assert returned.part(1) == NamespaceUse(30, 0)
    assert grants.returned(1, NamespaceUse(25, 0)) is None
    assert returned.returned(2, NamespaceUse(0, 0)) is None, "others find some"


def test_nobody_grows_while_there_is_too_much() -> None:
    grants = Grants(100, 0, {1: NamespaceUse(80, 0), 2: NamespaceUse(50, 0)})
    assert grants.free.size == 0
    assert (grants.bound(1).size, grants.bound(2).size) == (50, 20)


def test_a_smaller_quota_awaits_clients_only_where_the_parts_do_not_fit() -> None:
    grants = Grants(100, 0, {0: NamespaceUse(10, 1), 1: NamespaceUse(40, 1)})
    assert grants.tightened(60, 0, [1]) == Grants(60, 0, grants.parts)
    less = grants.tightened(40, 0, [2, 1])
    assert less == Grants(40, 0, {0: NamespaceUse(10, 1)}, (1, 2))
    assert less.free == NO_USE
    assert grants.tightened(100, 5, [1]).awaited == (1,), "files were not bounded before"
    assert less.entered(1, NamespaceUse(35, 1)).entered(2, NO_USE) == Grants(
        40, 0, {0: NamespaceUse(10, 1), 1: NamespaceUse(35, 1)}
    )


def test_an_account_may_grow_when_all_is_known_of_it() -> None:
    accounts = Accounts()
    accounts.keeps_unknown = True
    book = GrantBook(accounts, client=1)
    assert accounts.is_full(SPACE), "nobody has heard of it"
    accounts.put(SPACE, 0, Settings(blocks=5))
    book.settle(SPACE)
    assert accounts.is_full(SPACE), "not all was read"
    book.begin()
    assert accounts.is_full(SPACE), "it has a quota, and no record was heard"
    book.hear(SPACE, Grants(0, 5, {1: NamespaceUse(0, 1)}))
    assert not accounts.is_full(SPACE)
    accounts.add_files(SPACE, 2)
    assert accounts.is_full(SPACE)
    book.hear(SPACE, None)
    accounts.put(SPACE, None, Settings())
    book.settle(SPACE)
    assert not accounts.is_full(SPACE)


def test_a_part_that_is_given_back_is_not_used_from_before_it_is_sent() -> None:
    accounts = Accounts()
    book = GrantBook(accounts, client=1)
    accounts.put(SPACE, 0, Settings(capacity=100))
    book.begin()
    book.hear(SPACE, Grants(100, 0, {1: NamespaceUse(80, 0)}))
    book.hold(SPACE, NamespaceUse(30, 0))
    assert accounts.all[SPACE].bound == NamespaceUse(30, UNBOUNDED)
    book.hear(SPACE, Grants(100, 0, {1: NamespaceUse(80, 0), 2: NamespaceUse(5, 0)}))
    assert accounts.all[SPACE].bound == NamespaceUse(30, UNBOUNDED), "what another one did says nothing of it"
    book.release(SPACE)
    assert accounts.all[SPACE].bound == NamespaceUse(80, UNBOUNDED)
    accounts.charge(SPACE, 60)
    book.hear(SPACE, Grants(50, 0, {}, (1,)))
    assert accounts.all[SPACE].bound == NamespaceUse(60, UNBOUNDED), "as much as it has by then"


def test_the_use_of_clients_never_exceeds_quotas(seed: int) -> None:
    """Each client works by its own, perhaps old, copy of the record; a change succeeds if that is the newest."""
    rng = random.Random(seed)
    record, quota, agreed = Grants(100, 0), 100, 100
    clients = {client: Player(client, record) for client in range(1, 4)}
    departed = 0
    for _ in range(3000):
        player = rng.choice(list(clients.values()))
        action = rng.random()
        if action < 0.2:
            player.hear(record)
        elif action < 0.6:
            player.change_use(rng.randint(-20, 20))
        elif action < 0.9:
            if player.heard == record and (wanted := player.decide(rng)) is not None:
                record = wanted
                player.succeeded(record)
        elif action < 0.93 and not record.awaited:
            quota = rng.randrange(20, 150)
            record = (
                record.tightened(quota, 0, list(clients))
                if record.is_tighter(quota, 0)
                else Grants(quota, 0, record.parts, (), record.lacks)
            )
        elif action < 0.95:
            record = record.moved(player.client, NamespaceUse(player.use, 0)).left(player.client, NO_USE)
            departed += player.use
            del clients[player.client]
            new = max(clients) + 1 if clients else player.client + 1
            clients[new + 1000] = Player(new + 1000, record)
        use = sum([one.use for one in clients.values()]) + departed
        if not record.awaited:
            assert use <= max(quota, agreed), (use, quota)
            agreed = use
    assert record.part(0).size == departed


class Player:
    """One client of the play."""

    def __init__(self, client: int, heard: Grants) -> None:
        self.client, self.use = client, 0
        self.accounts = Accounts()
        self.accounts.put(SPACE, 0, Settings(capacity=1))
        self.book = GrantBook(self.accounts, client)
        self.book.begin()
        self.hear(heard)

    @property
    def heard(self) -> Grants:
        return self.book.heard[SPACE]

    def hear(self, record: Grants) -> None:
        self.book.hear(SPACE, record)

    def change_use(self, more: int) -> None:
        bound = self.accounts.all[SPACE].bound
        assert bound is not None
        if more < 0 or self.use + more <= bound.size:
            self.accounts.charge(SPACE, more)
            self.use += more

    def decide(self, rng: random.Random) -> Grants | None:
        use = NamespaceUse(self.use, 0)
        if self.client in self.heard.awaited:
            wanted: Grants | None = self.heard.entered(self.client, use)
        elif rng.random() < 0.5:
            lack, step = [NamespaceUse(rng.randint(1, 20), 0) for _ in range(2)]
            wanted = self.heard.taken(self.client, lack, 4, step)
            wanted = wanted or self.heard.with_lack(self.client, NamespaceUse(rng.randint(1, 20), 0))
        else:
            wanted = rng.choice([self.heard.given, self.heard.returned])(self.client, use)
        if wanted is not None:
            self.book.hold(SPACE, wanted.part(self.client))
        return wanted

    def succeeded(self, record: Grants) -> None:
        self.hear(record)
        self.book.release(SPACE)
