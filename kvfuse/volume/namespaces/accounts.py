"""What each namespace but the root's has: bytes of slots and files, against its quotas.

A slot counts from when it is allocated until it is free again, so while bytes are staged and while its release waits
for a commit or for readers, too. A file counts until the commit that removes its last name is in the store. So neither
memory nor what a crash leaves ever exceeds a quota. A namespace counts towards all namespaces that it is in.

The *stored* use is what records say: each commit that changes slots or files of a namespace puts the `u` record that
its client has of it. The record counts a namespace without those in it, with the slots of removed files that are open.

Where many hosts have the volume, each counts what it added less what it removed, whoever made that: slots when they
enter and leave the slabs that it holds. So the use of one may be below 0, and that of a namespace is the sum. What the
records of the others say is *elsewhere* here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvfuse.errors import QuotaExceeded
from kvfuse.volume.measures.limiter import Limiter
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse, NamespaceUsesElsewhere, OwnUses
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.store.schema import Counts

UNBOUNDED = 1 << 62
"""as a quota: there is none"""


@dataclass(slots=True, eq=False)
class Account:
    """Of one namespace."""

    number: int
    above: int
    """number of the namespace that it is in"""
    settings: Settings = field(default_factory=Settings)
    size: int = 0
    """bytes of slots, with those of namespaces in it"""
    files: int = 0
    """likewise"""
    size_elsewhere: int = 0
    files_elsewhere: int = 0
    """what other hosts have of it, likewise, as far as this one has heard"""
    returned: int = 0
    """bytes and files that it ever gave back, likewise"""
    is_known: bool = True
    """its settings were read; else what it has counts towards no other one yet"""
    is_gone: bool = False
    """the namespace was removed, and not all of its slots are free yet"""
    bound: NamespaceUse | None = None
    """what this client may have of it, where many hosts have the volume (`grants`); None: as much as its quotas"""
    lack: NamespaceUse = NO_USE
    """what was missing for the last call that was refused"""

    @property
    def most(self) -> NamespaceUse:
        """What this client may have of it."""
        if self.bound is not None:
            return self.bound
        return NamespaceUse(self.settings.capacity or UNBOUNDED, self.settings.blocks or UNBOUNDED)

    def excess(self, share: float, more_size: int = 0, more_files: int = 0) -> int:
        """Bytes above a share of its quotas, if it had so much more; not above 0: there are none.

        Files above that of ``blocks`` are of mean size.
        """
        settings = self.settings
        size, files = self.size + self.size_elsewhere + more_size, self.files + self.files_elsewhere + more_files
        excess = size - int(settings.capacity * share) if settings.capacity else 0
        if settings.blocks and (files_above := files - int(settings.blocks * share)) > 0:
            excess = max(excess, -(-files_above * size // files), 1)
        return excess


class BlockQuotas(Protocol):
    """What blocks of the block store have of quotas: they are counted there, as threads store them."""

    def claim(self, number: int, files: NamespaceUse) -> NamespaceUse:
        """Files of a namespace have so much, or are about to: blocks get the rest. Returns what blocks have."""


class Accounts:
    """The accounts of one volume: the `Ledger` of its slots. For the event loop alone."""

    def __init__(self) -> None:
        self.all: dict[int, Account] = {}
        """by number; empty where nothing is counted"""
        self.use_of_all: Callable[[], NamespaceUse] = lambda: NamespaceUse(0, 0)
        """of the volume; its inodes count as files, folders and links among them"""
        self._root = Settings()
        self.root_blocks = 0
        """files that the root may have; 0: any number"""
        self.blocks: BlockQuotas | None = None
        self.limiters: dict[int, Limiter] = {}
        """of those namespaces that have limits a second"""
        self.records = OwnUses(self._has_records)
        self.elsewhere = NamespaceUsesElsewhere()
        self.keeps_unknown = False
        """other hosts make namespaces: one may be charged before it was heard of"""
        self._dropped: set[int] = set()
        """those that are there no more: nothing is charged to them"""

    # -- namespaces ------------------------------------------------------------------------------------

    def put(self, number: int, above: int | None, settings: Settings) -> None:
        """A namespace is there, or has other settings. ``above``: that it is in; None: as before."""
        account = self.all.get(number)
        if account is None:
            bound = NO_USE if self.keeps_unknown else None
            account = self.all[number] = Account(number, ROOT, is_known=False, bound=bound)
        self._dropped.discard(number)
        if above is not None:
            is_circle = any(one is account for one in self._chain(above))  # records are damaged
            account.above = ROOT if is_circle else above
        if not account.is_known:
            account.is_known = True
            self._add(account.above, account.size, account.files)
            self._add_elsewhere(number, *self.elsewhere.use(number))
        account.settings, account.is_gone = settings, False

    def remove(self, number: int) -> None:
        """A namespace is there no more; its slots count towards those above it until they are free."""
        account = self.all.get(number)
        if account is not None:
            account.is_gone = True
            self.records.forget(number)
            self._forget_gone(account)

    def drop(self, number: int) -> None:
        """A namespace is there no more, nor is anything that it had: in a shared volume nobody counts that."""
        account = self.all.get(number)
        if account is not None:
            self._add_elsewhere(number, -account.size_elsewhere, -account.files_elsewhere)
            self._add(number, -account.size, -account.files)
            self.all.pop(number, None)
        self.records.forget(number)
        self.elsewhere.forget(number)
        self._dropped.add(number)

    def load(self, number: int, counts: Counts, *, is_own: bool = True) -> None:
        """The stored use of a namespace that is there. ``is_own``: by this client's record."""
        if number in self.all:
            self._add(number, counts.size or 0, counts.inodes)
            if is_own:
                self.records.load(number, counts)

    # -- other hosts -----------------------------------------------------------------------------------

    def hear(self, number: int, client: int, counts: Counts | None) -> None:
        """The stored use of a namespace by another client; None: it has none any more."""
        more = self.elsewhere.put(number, client, counts)
        account = self.all.get(number)
        if account is not None and account.is_known:
            self._add_elsewhere(number, *more)

    def _add_elsewhere(self, number: int, size: int, files: int) -> None:
        for account in self._chain(number):
            account.size_elsewhere += size
            account.files_elsewhere += files

    def put_root(self, settings: Settings) -> None:
        """The settings of the root, of which only the number of files is a quota."""
        self._root, self.root_blocks = settings, settings.blocks

    @property
    def root(self) -> Account:
        """The root's account at present."""
        return Account(ROOT, ROOT, self._root, *self.use_of_all())

    # -- quotas ----------------------------------------------------------------------------------------

    def check(self, owner: int, size: int) -> None:
        """QuotaExceeded where a namespace may not have so many bytes of slots more."""
        for account in self._chain(owner, meets=True):
            blocks = self._blocks_beside(account, size, 0).size if size > 0 else 0
            lack = account.size + blocks + size - account.most.size
            if size > 0 and lack > 0:
                account.lack = NamespaceUse(lack, 0)
                used = account.size + blocks + account.size_elsewhere
                what = f"{used} of {account.settings.capacity} bytes are used"
                raise QuotaExceeded(f"namespace {account.number}: no room for {size} bytes: {what}", account.number)

    def charge(self, owner: int, size: int) -> None:
        """A namespace has so many bytes of slots more, or fewer."""
        self._add(owner, size, 0)

    def is_full(self, owner: int) -> bool:
        """A namespace may not have one more file."""
        try:
            self.check_file(owner)
        except QuotaExceeded:
            return True
        return False

    def check_file(self, owner: int) -> None:
        """QuotaExceeded where `is_full`."""
        for account in self._chain(owner, meets=True):
            files = account.files + self._blocks_beside(account, 0, 1).files
            if files >= account.most.files:
                account.lack = NamespaceUse(0, files + 1 - account.most.files)
                count = files + account.files_elsewhere
                text = f"namespace {account.number} may have {account.settings.blocks} files, and has {count}"
                raise QuotaExceeded(text, account.number)
        if self.root_blocks > 0:
            count = (own := self.use_of_all()).files
            count += self.blocks.claim(ROOT, NamespaceUse(own.size, count + 1)).files if self.blocks is not None else 0
            if count >= self.root_blocks:
                raise QuotaExceeded(f"the volume may have {self.root_blocks} files, and has {count}", ROOT)

    def _blocks_beside(self, account: Account, size: int, files: int) -> NamespaceUse:
        """What blocks have of a namespace, if files get so much more of it."""
        if self.blocks is None:
            return NO_USE
        return self.blocks.claim(account.number, NamespaceUse(account.size + size, account.files + files))

    def add_files(self, owner: int, count: int) -> None:
        """A namespace has so many files more, or fewer."""
        self._add(owner, 0, count)

    def returned(self, number: int) -> int:
        """Grows with all that a namespace and those in it give back."""
        account = self.all.get(number)
        return account.returned if account is not None else 0

    def use(self, number: int) -> NamespaceUse:
        """Of a namespace and those in it, by this host."""
        account = self.all.get(number)
        return NamespaceUse(account.size, account.files) if account is not None else NamespaceUse(0, 0)

    def use_here(self, number: int) -> NamespaceUse:
        """As `use`, with the blocks of the block store, which keep to what this host may have now."""
        own = self.use(number)
        if self.blocks is None:
            return own
        blocks = self.blocks.claim(number, own)
        return NamespaceUse(own.size + blocks.size, own.files + blocks.files)

    def use_of_hosts(self, number: int) -> NamespaceUse:
        """Of a namespace and those in it, by all hosts."""
        account = self.all.get(number)
        if account is None:
            return NamespaceUse(0, 0)
        return NamespaceUse(account.size + account.size_elsewhere, account.files + account.files_elsewhere)

    def limit(self, number: int, quota: Literal["capacity", "blocks"]) -> int:
        """The least quota of a namespace and those that it is in; 0: none has one."""
        limits = [getattr(account.settings, quota) for account in self._chain(number)]
        return min([limit for limit in limits if limit], default=0)

    def is_within(self, number: int, namespace: int) -> bool:
        """A namespace is this one, or in it."""
        return namespace == ROOT or any(account.number == namespace for account in self._chain(number))

    def chain(self, number: int) -> list[int]:
        """A namespace and those that it is in, but for the root."""
        return [account.number for account in self._chain(number)]

    def _chain(self, number: int, *, meets: bool = False) -> Iterator[Account]:
        """The account of a namespace, and of those that it is in.

        ``meets``: one that was not heard of gets an account, in which nothing may be added.
        """
        if meets and self.keeps_unknown and number and number not in self.all and number not in self._dropped:
            self.all[number] = Account(number, ROOT, is_known=False, bound=NO_USE)
        while (account := self.all.get(number)) is not None:
            yield account
            number = account.above

    def _add(self, number: int, size: int, files: int) -> None:
        for account in self._chain(number, meets=True):
            account.size += size
            account.files += files
            account.returned += max(0, -size) + max(0, -files)
            if self.blocks is not None:
                self.blocks.claim(account.number, NamespaceUse(account.size, account.files))
            if account.is_gone:
                self._forget_gone(account)

    def _has_records(self, number: int) -> bool:
        account = self.all.get(number)
        return account is not None and not account.is_gone

    def _forget_gone(self, account: Account) -> None:
        if not account.size and not account.files:
            self.all.pop(account.number, None)
