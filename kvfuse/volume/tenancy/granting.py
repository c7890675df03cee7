"""What clients do with their parts of quotas (`namespaces.grants` has the rules): take more, give back, ask, begin.

A call that a quota keeps from adding something asks `take` as the first source of room. It takes what is nobody's. If
others seem to have more than they use, it says in the record what it lacks, and waits for them to give some back. Only
then do caches evict, blocks of their own: first this client's (`Evictor`), and those of others where it has none
(`await_others`).
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

import trio
from msgspec.structs import replace

from kvfuse.errors import EngineError, OperationError, Unsupported
from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.grants import DEPARTED, FAIR_SHARE, TAKEN_SHARE, Grants, encode_grants
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import all_keys, get_sound
from kvfuse.volume.store.transaction import Transaction
from kvfuse.volume.tenancy.namespace_news import NamespaceNews

ATTEMPTS_MAX = 100
"""Each refusal means that another client changed the record."""
SPREAD_SECONDS = 0.02
"""for each client that has a part: over so long those spread that are about to change the record together"""
STEP_SECONDS, STEPS_MAX = 2.0, 10
"""for which what is taken should last, and how often all clients together may take some in a second"""
RETURN_SECONDS = 15.0
"""between two looks for what is not used here"""
SHORT_SECONDS = 10.0
"""before a client whose blocks can go asks again; what nobody gave is not asked for any longer"""
LOOK_SECONDS = 0.2
"""between two looks at what others do"""
FAIR_SECONDS = 1.0
"""for which those alone evict for others that have more than a fair part"""
ASK_SECONDS = 1.0
"""for which a call waits for what others seem not to use"""
PAUSE_SECONDS = 3.0
"""after which they are asked again, if none gave any"""
PATIENCE_SECONDS = 8.0
"""So long, and two graces, a call waits for others to evict blocks, after the last one came."""
AGREE_SECONDS = 30.0
"""for which a smaller quota waits until all hosts keep to it"""
INNER_MAX = 50
"""namespaces in one that may get its first quota when there is something in it"""

log = logging.getLogger(__name__)
Decide = Callable[[Grants], Grants | None]
"""how a record is to be, by how it is; None: it stays"""


@dataclass
class Granting:
    """The parts of one client. One of each membership of a shared volume."""

    core: Core
    journal: Journal
    news: NamespaceNews
    has_orphans: Callable[[], bool] = lambda: False
    """slabs have blocks of the block store, and no client that is alive holds them"""

    def __post_init__(self) -> None:
        self._accounts = self.core.namespaces.accounts
        self._book = self.news.grants
        self._client = self.core.client
        self._turns = defaultdict[int, trio.Lock](trio.Lock)
        """namespace -> turn of one transaction"""
        self._steps: dict[int, tuple[float, NamespaceUse]] = {}
        """namespace -> when some was taken, and how much"""
        self._short: dict[int, float] = {}
        """namespace -> when this client asked for a fair part"""
        self._wanted: dict[int, float] = {}
        """namespace -> since when others lack some of it"""
        self._inherited: dict[int, tuple[NamespaceUse, bool]] = {}
        """namespace -> (client 0's part, whether blocks are to be adopted) when nothing was to be taken of it"""
        self._unused: dict[int, bool] = {}
        """namespace -> whether this client used little of its part at the last look"""
        self._in_vain: dict[int, float] = {}
        """namespace -> when others were last asked, and gave nothing"""
        self._waits: dict[int, tuple[float, float]] = {}
        """namespace -> when calls began to wait for others since some came, and when one last did"""
        self._serving = trio.CancelScope()

    # -- room ------------------------------------------------------------------------------------------

    async def take(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: take what is nobody's of the quotas of a namespace, or what others do not use."""
        account = self._accounts.all.get(namespace or 0)
        if not namespace or account is None:
            return False
        if not self._book.is_ready.is_set():
            with trio.move_on_after(LOOK_SECONDS):
                await self._book.is_ready.wait()
            return True
        if not account.is_known or (account.bound is not None and namespace not in self._book.heard):
            await self.news.read(namespace)
            return account.is_known and (account.bound is None or namespace in self._book.heard)
        lack = account.lack
        if account.bound is None or await self._take(namespace, lack):
            return True
        if self._has_blocks(namespace):  # they go for it
            await self._ask_if_short(namespace)
            return False
        slack, asked = self._book.room_elsewhere(namespace), self._in_vain.get(namespace, -PAUSE_SECONDS)
        if slack.size < lack.size or slack.files < lack.files or trio.current_time() < asked + PAUSE_SECONDS:
            return False
        await self._ask(namespace, lack)
        with trio.move_on_at(min(deadline, trio.current_time() + ASK_SECONDS)):
            while not await self._take(namespace, lack):
                await self._book.changed.wait()
            return True
        self._in_vain[namespace] = trio.current_time()
        return False

    async def _take(self, namespace: int, lack: NamespaceUse) -> bool:
        grants = self._book.heard.get(namespace)
        if grants is None:
            return True
        if DEPARTED in grants.parts and self._is_block_namespace(namespace):
            await self._inherit(namespace)
            grants = self._book.heard.get(namespace, grants)
        share = TAKEN_SHARE * (len(grants.parts.keys() - {DEPARTED, self._client}) + 1)
        before, step = grants.part(self._client), self._step(namespace, grants)

        def decide(grants: Grants) -> Grants | None:
            has_come = grants.part(self._client) != before  # another call took some
            return grants.taken(self._client, lack, share, step) if not has_come else None

        if await self._change(namespace, decide):
            part = self._book.heard.get(namespace, Grants()).part(self._client)
            taken = NamespaceUse(*[max(now - then, 0) for now, then in zip(part, before, strict=True)])
            self._steps[namespace] = trio.current_time(), taken
            self._waits.pop(namespace, None)
            return True
        part = self._book.heard.get(namespace, Grants()).part(self._client)
        return part != before and all(now >= then for now, then in zip(part, before, strict=True))

    def _step(self, namespace: int, grants: Grants) -> NamespaceUse:
        """What is to be taken, as the last step lasted long enough, or not."""
        taken_at, step = self._steps.get(namespace, (0.0, NO_USE))
        lasted = trio.current_time() - taken_at >= max(STEP_SECONDS, grants.client_count / STEPS_MAX)
        return step if lasted else NamespaceUse(2 * step.size, 2 * step.files)

    def _has_blocks(self, namespace: int) -> bool:
        """Blocks of this client in it can go."""
        return self.core.blocks is not None and self.core.blocks.use(namespace)[0] > 0

    async def _ask_if_short(self, namespace: int) -> None:
        """Tell the others what lacks to a fair part, and do not wait for it."""
        now, grants = trio.current_time(), self._book.heard.get(namespace, Grants())
        if now < self._short.get(namespace, -SHORT_SECONDS) + SHORT_SECONDS or grants.awaited:
            return
        self._short[namespace] = now
        if any(lack := grants.short(self._client)):
            await self._ask(namespace, lack)

    async def _inherit(self, namespace: int) -> None:
        """Take of the part of clients that are gone what their blocks need that this one adopted; and, when all of
        these are adopted, give the rest of it free."""
        use = self._accounts.use_here(namespace)
        before = self._book.heard[namespace]
        state = before.part(DEPARTED), self.has_orphans()
        has_enough = all(have >= used for have, used in zip(before.part(self._client), use, strict=True))
        if has_enough and self._inherited.get(namespace) == state:
            return
        left = (await self._read_uses(namespace, {DEPARTED}))[DEPARTED]
        are_adopted = not self.has_orphans()

        def decide(grants: Grants) -> Grants:
            departed, own = grants.part(DEPARTED), grants.part(self._client)
            slack = [max(have - need, 0) for have, need in zip(departed, left, strict=True)]
            more = [min(one, max(used - has, 0)) for one, used, has in zip(slack, use, own, strict=True)]
            rest = [0 if are_adopted else one - mine for one, mine in zip(slack, more, strict=True)]
            kept = NamespaceUse(*[have - one + other for have, one, other in zip(departed, slack, rest, strict=True)])
            part = NamespaceUse(*[has + mine for has, mine in zip(own, more, strict=True)])
            return grants.with_part(DEPARTED, kept).with_part(self._client, part)

        if not await self._change(namespace, decide):
            self._inherited[namespace] = state

    async def _ask(self, namespace: int, lack: NamespaceUse) -> None:
        """Tell the others what is missing."""

        def decide(grants: Grants) -> Grants:
            said = grants.lacks.get(self._client, NO_USE)
            return grants.with_lack(self._client, NamespaceUse(max(said.size, lack.size), max(said.files, lack.files)))

        await self._change(namespace, decide)

    async def await_others(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: waits while others may agree on quotas, or evict blocks of theirs for this client."""
        grants = self._book.heard.get(namespace or 0)
        if not namespace or grants is None:
            return False
        if await self._drop_gone(namespace):
            return True
        if not (grants.awaited or self._may_come(namespace)):
            await self._change(namespace, lambda grants: grants.with_lack(self._client, NO_USE))
            self._waits.pop(namespace, None)
            return False
        if not grants.awaited:
            await self._ask(namespace, self._accounts.all[namespace].lack)
        with trio.move_on_at(min(deadline, trio.current_time() + LOOK_SECONDS)):
            await self._book.changed.wait()
        return True

    def _may_come(self, namespace: int) -> bool:
        """Others have blocks of caches there, and gave some lately."""
        is_cache = any(self._is_block_namespace(one) for one in self._inner(namespace))
        parts = self._book.heard[namespace].parts.items() if namespace in self._book.heard else ()
        has_blocks = any(count > 0 for count in self._accounts.use_of_hosts(namespace))
        has_blocks |= any(part.size > 0 for client, part in parts if client not in (self._client, DEPARTED))
        has_blocks &= not self.core.is_alone()
        now = trio.current_time()
        began, last = self._waits.get(namespace, (now, now))
        self._waits[namespace] = (began if now < last + PAUSE_SECONDS else now, now)
        patience = PATIENCE_SECONDS + 2 * self.core.grace.seconds
        return is_cache and has_blocks and now < self._waits[namespace][0] + patience

    # -- others ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Give nothing back any more: this client's records are about to become client 0's, and memory has them yet."""
        self._serving.cancel()

    async def run(self) -> None:
        """Say what is used where others wait for that, and give back what they lack, until cancelled or `stop`."""
        with self._serving:
            await self._serve_all()

    async def _serve_all(self) -> None:
        await self._book.is_ready.wait()
        looked = trio.current_time()
        while True:
            changed, is_asked = self._book.changed, False
            for number in list(self._book.heard):
                try:
                    is_asked |= await self._serve(number)
                except OperationError as error:
                    log.warning("a part of a quota is given later: %s", error)
                    is_asked = True
            if trio.current_time() >= looked + RETURN_SECONDS:
                looked = trio.current_time()
                await self._return_unused()
            with trio.move_on_after(LOOK_SECONDS if is_asked else RETURN_SECONDS * random.uniform(1, 1.5)):
                await changed.wait()

    async def _return_unused(self) -> None:
        """Give back what this client has not used for a while; and end what it asked for and does not get."""
        for number in list(self._book.heard):
            try:
                await self._return(number, partial(self._accounts.use_here, number))
            except OperationError as error:
                log.warning("what is not used of a quota is given back later: %s", error)

    async def _return(self, number: int, use: Callable[[], NamespaceUse]) -> None:
        grants, was_unused = self._book.heard.get(number, Grants()), self._unused.get(number, False)
        self._unused[number] = grants.returned(self._client, use()) is not None
        if self._client in grants.lacks and trio.current_time() >= self._short.get(number, 0.0) + SHORT_SECONDS:
            await self._change(number, lambda grants: grants.with_lack(self._client, NO_USE))
        if grants.lacks.keys() - {self._client}:
            await self._drop_gone(number)
        if was_unused and self._unused[number]:
            await self._change(number, lambda grants: grants.returned(self._client, use()), gives=True)

    async def _serve(self, number: int) -> bool:
        """True: others still lack something."""
        use, grants = partial(self._accounts.use_here, number), self._book.heard.get(number)
        if grants is None:  # its quotas ended while another namespace was served
            return False
        if self._client in grants.awaited:
            await self._change(number, lambda grants: self._entered(grants, use()))
            return False
        if not any(grants.wanted_by_others(self._client)):
            self._wanted.pop(number, None)
            return False
        if number not in self._wanted:
            self._wanted[number] = trio.current_time()
            await self._spread(grants)  # others may give it
        await self._change(number, lambda grants: grants.given(self._client, use()), gives=True)
        grants = self._book.heard.get(number, Grants())
        wanted = grants.wanted_by_others(self._client)
        if any(wanted):
            self._evict(number, wanted)
        return any(wanted)

    async def _spread(self, grants: Grants, most: float = inf) -> None:
        await trio.sleep(random.uniform(0, SPREAD_SECONDS * min(most, grants.client_count)))

    def _entered(self, grants: Grants, use: NamespaceUse) -> Grants | None:
        return grants.entered(self._client, use) if self._client in grants.awaited else None

    def _evict(self, number: int, wanted: NamespaceUse) -> None:
        """Evict for what others lack: what is more than a fair part here; after a while this client's part of it, as
        others may have nothing that can go."""
        blocks = self.core.blocks
        size, count = blocks.use(number) if blocks is not None else (0, 0)
        if self.core.read_only or blocks is None or not size:
            return
        grants = self._book.heard.get(number, Grants())
        if trio.current_time() < self._wanted.get(number, 0.0) + FAIR_SECONDS:
            rows = zip(wanted, grants.part(self._client), grants.share(self._client, FAIR_SHARE), strict=True)
            wanted = NamespaceUse(*[min(lack, max(part - fair, 0)) for lack, part, fair in rows])
        lack = max(wanted.size, -(-wanted.files * size // max(count, 1)))
        if trio.current_time() >= self._wanted.get(number, 0.0) + FAIR_SECONDS:
            others = [max(part.size, 0) for one, part in grants.parts.items() if one not in (self._client, DEPARTED)]
            lack = -(-lack * size // (size + sum(others)))
        if lack:
            blocks.evict(number, lack)

    def _is_block_namespace(self, number: int) -> bool:
        found = self.core.namespaces.all.get(number)
        return found is not None and found.settings.is_blocks

    async def _drop_gone(self, number: int) -> bool:
        """Take back parts of clients that are gone. True: there were some. EngineError."""
        grants = self._book.heard[number]
        others = {*grants.parts, *grants.awaited, *grants.lacks} - {DEPARTED, self._client}
        gone = others - await self._members() if others else set()
        if not gone:
            return False
        _, version = await self.news.read_settings()  # namespaces in it
        uses = await self._read_uses(number, gone)
        if any(self._is_block_namespace(one) for one in self._inner(number)):
            # Its blocks are on the medium, and count for whoever adopts them: see `_inherit`.
            uses = {
                client: NamespaceUse(*map(max, uses[client], self._book.heard[number].part(client))) for client in gone
            }

        def decide(grants: Grants) -> Grants:
            for client in gone:
                grants = grants.left(client, uses[client])
            return grants

        expect = dict.fromkeys([schema.member_key(client) for client in gone], ABSENT)
        return await self._change(number, decide, {**expect, schema.COUNTER_NAMESPACES: version})

    async def _read_uses(self, number: int, clients: set[int]) -> dict[int, NamespaceUse]:
        uses = dict.fromkeys(clients, NO_USE)
        pairs = [(inner, client) for inner in self._inner(number) for client in clients]
        rows = await get_sound(self.core.records, [schema.use_key(*pair) for pair in pairs])
        for (_, client), row in zip(pairs, rows, strict=True):
            if row is not None:
                counts, use = schema.decode_counts(row.value), uses[client]
                uses[client] = NamespaceUse(use.size + (counts.size or 0), use.files + counts.inodes)
        return uses

    def _inner(self, number: int) -> list[int]:
        """A namespace and those in it."""
        return [one for one in self._accounts.all if self._accounts.is_within(one, number)]

    async def _members(self) -> set[int]:
        return {schema.key_client(key) for key in await all_keys(self.core.records, schema.MEMBER_PREFIX)}

    # -- quotas ----------------------------------------------------------------------------------------

    async def tighten(self, number: int, settings: Settings, version: int) -> bool:
        """Have all hosts keep to smaller quotas, before the settings say so; see `namespaces.grants`.

        ``version``: of the number of changes, when settings were read. False: something was changed at the same time.
        EngineError: some hosts do not answer.
        """
        await self.news.read(number)
        capacity, blocks = settings.capacity, settings.blocks
        grants = self._book.heard.get(number)
        if not (capacity or blocks):
            return True
        if grants is None and not await self._begin(number, Grants(capacity, blocks), version):
            return False
        if grants is not None and grants.is_tighter(capacity, blocks):
            clients = await self._members() | self._book.stored_uses(number).keys() - {DEPARTED}
            await self._change(number, lambda grants: grants.tightened(capacity, blocks, clients))
        await self._await_newcomers(number)
        with trio.move_on_after(AGREE_SECONDS):
            while (grants := self._book.heard.get(number)) is not None and grants.awaited:
                await self._drop_gone(number)
                with trio.move_on_after(LOOK_SECONDS):
                    await self._book.changed.wait()
            return grants is not None
        raise EngineError("other hosts have not said yet what they use of the namespace: try again")

    async def _begin(self, number: int, grants: Grants, version: int) -> bool:
        """The first quotas of what may have something. False: something was changed at the same time."""
        inner = self._inner(number)
        if len(inner) > INNER_MAX:
            raise Unsupported(f"a namespace with more than {INNER_MAX} namespaces in it gets no first quota any more")
        clients = await self._members() | self._book.stored_uses(number).keys() - {DEPARTED}
        keys = [schema.use_key(one, DEPARTED) for one in inner]
        rows = await get_sound(self.core.records, keys)
        counts = [schema.decode_counts(row.value) for row in rows if row is not None]
        departed = NamespaceUse(sum([one.size or 0 for one in counts]), sum([one.inodes for one in counts]))
        begun = replace(grants.with_part(DEPARTED, departed), awaited=tuple(sorted(clients)))
        expect = {key: row.version if row is not None else ABSENT for key, row in zip(keys, rows, strict=True)}
        expect |= {schema.COUNTER_NAMESPACES: version, schema.grants_key(number): ABSENT}
        return await self._put(number, begun, expect)

    async def _await_newcomers(self, number: int) -> None:
        """Those that came while the record was changed may have read what was there before."""
        members, before = await self._members(), self._book.heard.get(number)
        if before is None or not before.awaited:
            return

        def decide(grants: Grants) -> Grants | None:
            new = members - {*grants.parts, *grants.awaited}
            return replace(grants, awaited=tuple(sorted({*grants.awaited, *new}))) if grants.awaited else None

        await self._change(number, decide)

    def record(self, number: int, settings: Settings) -> tuple[dict[bytes, bytes | None], dict[bytes, int]]:
        """(the record with these quotas, what is to be expected) for the transaction of the settings."""
        key, grants = schema.grants_key(number), self._book.heard.get(number)
        if grants is None:
            return {}, {key: ABSENT}
        expect = {key: self.news.versions[key]}
        if not (settings.capacity or settings.blocks):
            return {key: None}, expect
        if (grants.capacity, grants.blocks) == (settings.capacity, settings.blocks):
            return {}, expect if grants.awaited else {}
        return {key: encode_grants(replace(grants, capacity=settings.capacity, blocks=settings.blocks))}, expect

    async def restore(self, number: int) -> None:
        """The quotas are as the settings say: a change was given up."""
        found, grants = self.core.namespaces.all.get(number), self._book.heard.get(number)
        if found is None or grants is None:
            return
        records, expect = self.record(number, found.stored)
        for key, value in records.items():
            expect = {key: self.news.versions[key], **expect}
            applied = partial(self.news.stored, key, value)
            puts = {key: value} if value is not None else {}
            await self.journal.transact(Transaction(expect, puts, [] if puts else [key], applied))

    # -- transactions ----------------------------------------------------------------------------------

    async def _change(
        self, number: int, decide: Decide, expect: Mapping[bytes, int] | None = None, *, gives: bool = False
    ) -> bool:
        """Change a record, until that is not refused. False: it stays, or is not there. EngineError.

        ``gives``: the client keeps what it uses; if threads use more by now, the record stays.
        """
        key = schema.grants_key(number)
        async with self._turns[number]:
            for attempt in range(ATTEMPTS_MAX):
                grants = self._book.heard.get(number)
                wanted = decide(grants) if grants is not None else None
                if grants is None or wanted is None or wanted == grants:
                    return False
                self._book.hold(number, wanted.part(self._client))
                if gives and self._book.has_given_too_much(number):  # a thread stored a block meanwhile
                    self._book.release(number)
                    return False
                if await self._put(number, wanted, {key: self.news.versions[key], **(expect or {})}):
                    return True
                await self._spread(grants, 2 << attempt)
                await self.news.read(number)
                if expect:
                    return False
        raise EngineError(f"others changed what they have of namespace {number} {ATTEMPTS_MAX} times in a row")

    async def _put(self, number: int, grants: Grants, expect: Mapping[bytes, int]) -> bool:
        key, value = schema.grants_key(number), encode_grants(grants)

        def applied(version: int) -> None:
            self.news.stored(key, value, version)
            self._book.release(number)

        if await self.journal.transact(Transaction(expect, {key: value}, applied=applied)):
            return True
        self._book.release(number)
        return False


def first_grants(number: int, settings: Settings) -> dict[bytes, bytes]:
    """The record of a new namespace, if it has quotas: it is empty."""
    if not (settings.capacity or settings.blocks):
        return {}
    return {schema.grants_key(number): encode_grants(Grants(settings.capacity, settings.blocks))}
