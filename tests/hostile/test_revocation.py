"""Who loses a right to a folder sees nothing of a block that is stored there later, whatever it got before."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hostile_lab import ATTACKER, AttackProcess, attacker
from mounting import KvfuseMount, temporary_mount
from ring_lab import stats, wait_for_rings
from upgrading import upgrade

pytestmark = pytest.mark.root

VICTIM = 65_000
"""a user, and a group of its own"""
WORDS = ("allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB", "cache.tier_size=32MiB", "outlive=true")
THEIRS, OTHER = "correct-horse-battery-staple", "another-horse-battery-staple"
"""the token that the attacker knows, and another one"""
SIZES = 4000, 8000, 60_000
LARGE = 1_000_000
"""of blocks of which a few fill an arena"""
NAMESPACE, TOKEN, CLEAR = "user.kvfuse.namespace", "user.kvfuse.namespace.token", "user.kvfuse.clear"
WAYS = "mapped", "answered", "found"


class User:
    """A process of a user, which does what `attack_revocation.User` can."""

    def __init__(self, process: AttackProcess) -> None:
        self._process = process

    def ask(self, do: str, **arguments: object) -> Any:
        self._process.tell(json.dumps({"do": do, **arguments}))
        return self._process.hear()["answer"]

    def open(self, *folders: Path, mode: int = 0o644) -> int:
        """How many folders are registered then. ``mode``: of new blocks."""
        return len(self.ask("open", folders=list(map(str, folders)), mode=mode))

    def put(self, folder: Path, *numbers: int, size: int = SIZES[0]) -> set[int]:
        """Those that were stored. ``folder``: where it was when it was registered."""
        results = self.ask("put", folder=str(folder), blocks=[(number, size) for number in numbers])
        return {number for number, result in zip(numbers, results, strict=True) if result == size}

    def look(self, *numbers: int) -> dict[str, set[int]]:
        """What it finds of blocks: in ``mapped`` memory, by ``answered`` calls, or that they are ``found`` at all."""
        return {way: set(seen) for way, seen in self.ask("look", numbers=numbers).items()}


@contextlib.contextmanager
def users_of(mount: KvfuseMount) -> Iterator[tuple[User, User]]:
    """The victim, and who attacks it."""
    with (
        attacker("attack_revocation.py", mount, uid=VICTIM) as victim,
        attacker("attack_revocation.py", mount, uid=ATTACKER) as thief,
    ):
        yield User(victim), User(thief)


@pytest.fixture(scope="module")
def mounts() -> Iterator[Callable[[str], KvfuseMount]]:
    """A mount for each kind of namespaces: they share its memory."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def mount_of(kind: str) -> KvfuseMount:
            mount = stack.enter_context(temporary_mount(WORDS))
            wait_for_rings(mount)
            return mount

        yield mount_of


@pytest.fixture
def kind() -> str:
    return "blocks"


@pytest.fixture
def mount(mounts: Callable[[str], KvfuseMount], kind: str) -> KvfuseMount:
    return mounts(kind)


@pytest.fixture
def users(mount: KvfuseMount) -> Iterator[tuple[User, User]]:
    with users_of(mount) as users:
        yield users


def by_all_ways(*numbers: int) -> dict[str, set[int]]:
    return {way: set(numbers) for way in WAYS}


def make_folder(path: Path, group: int = VICTIM) -> Path:
    path.mkdir()
    path.chmod(0o755)
    os.chown(path, VICTIM, group)
    return path


@pytest.fixture
def tree(mount: KvfuseMount, kind: str, request: pytest.FixtureRequest) -> Tree:
    return Tree(mount.point / f"tree-{abs(hash(request.node.nodeid))}", kind)


class Tree:
    """A namespace of the victim's with a folder three below it, which the attacker may use as one of its group."""

    def __init__(self, top: Path, kind: str = "blocks") -> None:
        self.top, self.middle, self.low = make_folder(top), top / "middle", top / "middle" / "low"
        os.setxattr(top, NAMESPACE, b"kind=%s" % kind.encode())
        self.elsewhere = make_folder(top / "elsewhere")
        self.blocks = self.low / "blocks"
        for path in (self.middle, self.low):
            make_folder(path)
        make_folder(self.blocks, ATTACKER).chmod(0o750)


def daemon_of(mount: KvfuseMount) -> int:
    return int(stats(mount)["pid"])


def kill_daemon(mount: KvfuseMount) -> None:
    former = daemon_of(mount)
    os.kill(former, signal.SIGKILL)
    assert daemon_of(mount) != former


def set_token(folder: Path, token: str) -> None:
    os.setxattr(folder, TOKEN, token.encode())


# -- each way to take a right away -------------------------------------------------------------------


def take_owner(path: Path) -> None:
    """The attacker owns it, and others may what the owner may not."""
    os.chown(path, ATTACKER, VICTIM)
    path.chmod(0o077)


def hide(path: Path, elsewhere: Path) -> None:
    elsewhere.chmod(0o700)
    path.rename(elsewhere / path.name)


LOSSES: dict[str, Callable[[Tree], None]] = {
    "mode": lambda tree: tree.blocks.chmod(0o700),
    "search": lambda tree: tree.blocks.chmod(0o740),
    "group": lambda tree: os.chown(tree.blocks, -1, VICTIM),
    "owner": lambda tree: take_owner(tree.blocks),
    "mode above": lambda tree: tree.low.chmod(0o700),
    "mode far above": lambda tree: tree.top.chmod(0o750),
    "owner above": lambda tree: take_owner(tree.middle),
    "place": lambda tree: hide(tree.blocks, tree.elsewhere),
    "place of one above": lambda tree: hide(tree.low, tree.elsewhere),
    "token": lambda tree: set_token(tree.top, OTHER),
}
CASES = [(way, "") for way in LOSSES] + [(way, kill) for way in ("mode", "mode above", "token") for kill in ("1", "2")]


def check_lost(seen: dict[str, set[int]], *former: int) -> None:
    """Nothing is answered. What it had before may be there still: until the daemon takes back memory that has ended."""
    assert seen["answered"] == set()
    assert seen["mapped"] | seen["found"] <= set(former)


@pytest.mark.parametrize("kind", ["blocks"])
@pytest.mark.parametrize(("way", "kill"), CASES)
def test_who_lost_a_right_sees_nothing_that_is_stored_later(
    mount: KvfuseMount, users: tuple[User, User], tree: Tree, way: str, kill: str
) -> None:
    """``kill`` "1": the daemon is killed before the right goes, "2": after that."""
    victim, thief = users
    assert victim.open(tree.blocks) == thief.open(tree.blocks) == 1
    assert victim.put(tree.blocks, 1, 2) == {1, 2}
    assert thief.look(1, 2) == by_all_ways(1, 2), "it may do so now"
    if kill == "1":
        kill_daemon(mount)
    LOSSES[way](tree)
    if kill == "2":
        kill_daemon(mount)
    assert victim.put(tree.blocks, 3) == {3}
    seen = thief.look(1, 2, 3)
    check_lost(seen, 1, 2)
    thief.ask("connect", token="")
    thief.open(tree.blocks)
    check_lost(thief.look(1, 2, 3), 1, 2)


@pytest.mark.parametrize("kind", ["blocks"])
def test_who_gets_a_right_again_sees_all(mount: KvfuseMount, users: tuple[User, User], tree: Tree) -> None:
    victim, thief = users
    victim.open(tree.blocks)
    thief.open(tree.blocks)
    victim.put(tree.blocks, 1)
    for number, folder in enumerate((tree.blocks, tree.low, tree.top), 2):
        mode = os.stat(folder).st_mode & 0o7777
        folder.chmod(0o700)
        victim.put(tree.blocks, number)
        assert number not in set().union(*thief.look(number).values())
        folder.chmod(mode)
        assert number in thief.look(number)["answered"]
        victim.put(tree.blocks, 10 * number)
        assert thief.look(10 * number)["mapped"] >= {10 * number}


@pytest.mark.parametrize("kind", ["blocks"])
def test_the_token_that_a_client_showed_is_another_one(users: tuple[User, User], tree: Tree) -> None:
    victim, thief = users
    victim.open(tree.blocks)
    thief.ask("connect", token=THEIRS)
    thief.open(tree.blocks)
    set_token(tree.top, THEIRS)
    victim.put(tree.blocks, 1)
    assert thief.look(1) == by_all_ways(1)
    set_token(tree.top, OTHER)
    victim.put(tree.blocks, 2)
    check_lost(thief.look(1, 2), 1)


@pytest.mark.parametrize("kind", ["blocks"])
def test_what_only_a_token_opened_is_closed_without_it(users: tuple[User, User], tree: Tree) -> None:
    """The folder lets the attacker in all the same, but not to blocks that their modes keep from it."""
    victim, thief = users
    thief.ask("connect", token=THEIRS)
    victim.open(tree.blocks, mode=0o600)
    thief.open(tree.blocks)
    set_token(tree.top, THEIRS)
    victim.put(tree.blocks, 1)
    for _ in range(3):
        assert thief.ask("get", folder=str(tree.blocks), number=1) == [1]
    set_token(tree.top, "")
    tree.top.chmod(0o755)
    victim.put(tree.blocks, 2)
    assert thief.ask("get", folder=str(tree.blocks), number=2) == []
    seen = thief.look(1, 2)
    assert seen["answered"] == set()
    assert seen["mapped"] <= {1}


def test_a_token_ends_with_its_namespace(users: tuple[User, User], tree: Tree) -> None:
    victim, thief = users
    os.setxattr(tree.blocks, NAMESPACE, b"kind=blocks")
    victim.open(tree.blocks)
    thief.ask("connect", token=THEIRS)
    thief.open(tree.blocks)
    set_token(tree.blocks, THEIRS)
    victim.put(tree.blocks, 1)
    assert thief.look(1) == by_all_ways(1)
    for path in tree.blocks.iterdir():
        path.unlink()
    os.removexattr(tree.blocks, NAMESPACE)
    victim.put(tree.blocks, 2)
    check_lost(thief.look(1, 2), 1)


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("way", ["group", "mode"])
def test_new_blocks_have_the_group_that_their_folder_gives_now(
    mount: KvfuseMount, users: tuple[User, User], tree: Tree, way: str, kill: bool
) -> None:
    """Their bytes lie in no memory of a group that may not read them; blocks of that group bring it there."""
    victim, thief = users
    tree.blocks.chmod(0o2755)
    victim.open(tree.blocks, mode=0o640)
    thief.open(tree.blocks)
    victim.put(tree.blocks, 1)
    if way == "group":
        os.chown(tree.blocks, -1, VICTIM)
    else:
        tree.blocks.chmod(0o755)
    if kill:
        kill_daemon(mount)
    subprocess.run(["sync", "-f", tree.top], check=True)
    victim.ask("prefetch", folder=str(tree.blocks), number=1)
    assert thief.look(1) == by_all_ways(1), "its group has not changed"
    assert victim.put(tree.blocks, 2, 3, 4) == {2, 3, 4}
    assert {os.stat(tree.blocks / f"key-{number:08d}").st_gid for number in (2, 3, 4)} == {VICTIM}
    seen = thief.look(1, 2, 3, 4)
    assert seen["mapped"] | seen["answered"] == {1}


def test_memory_is_not_mapped_without_the_folder_it_is_of(users: tuple[User, User], tree: Tree) -> None:
    """A client that closed its handle has a live index, but no right that could be looked at."""
    victim, thief = users
    victim.open(tree.blocks)
    thief.open(tree.blocks)
    victim.put(tree.blocks, 1)
    first = victim.ask("arena", folder=str(tree.blocks), number=1)
    assert thief.look(1) == by_all_ways(1)
    thief.ask("close")
    last = 1
    while victim.ask("arena", folder=str(tree.blocks), number=last) == first:
        last += 1
        assert victim.put(tree.blocks, last, size=LARGE) == {last}
    assert thief.look(1, last)["mapped"] & {1, last} == {1}
    thief.open(tree.blocks)
    assert last in thief.look(1, last)["mapped"], "the handle is what it lacked"


@pytest.mark.parametrize("kind", ["blocks"])
def test_a_descriptor_of_a_folder_is_a_right(
    users: tuple[User, User], tree: Tree, mount: KvfuseMount, kind: str
) -> None:
    """As for the kernel: who has it, or a bind mount, needs no way there. The folder's own mode counts all the same."""
    victim, thief = users
    victim.open(tree.blocks)
    thief.ask("hold", folder=str(tree.blocks))
    tree.low.chmod(0o700)
    thief.open(tree.blocks)
    victim.put(tree.blocks, 1)
    assert thief.look(1) == by_all_ways(1)
    kill_daemon(mount)
    tree.top.chmod(0o700)
    if kind == "blocks":
        victim.put(tree.blocks, 1)  # a table that others may have mapped ended with its blocks
    assert thief.look(1)["answered"] == {1}
    tree.blocks.chmod(0o700)
    victim.put(tree.blocks, 2)
    check_lost(thief.look(1, 2), 1)


# -- any sequence ------------------------------------------------------------------------------------

STEPS, LAST = 50, 40
KINDS = (
    *["chmod"] * 6, *["group", "token_set", "move", "open"] * 2, "owner", "clear", "reset", "close", "connect"
)  # fmt: skip
MODES = 0o755, 0o750, 0o700, 0o710, 0o740, 0o711


@dataclass
class Play:
    """Changes of folders, tokens and daemons in any order, blocks between them, and what the attacker may have seen.

    It may know of a block from any moment in which the block was there and the attacker had a way to the folder.
    """

    mount: KvfuseMount
    victim: User
    thief: User
    rng: random.Random
    kind: str = "blocks"
    token: str = ""
    """of the namespace"""
    shown: str = ""
    """by the attacker"""
    stored: dict[str, set[int]] = field(default_factory=dict)
    """name of a folder -> blocks in it"""
    allowed: set[int] = field(default_factory=set)
    withheld: set[int] = field(default_factory=set)
    """stored where the attacker was not let in, though it had memory of that folder mapped"""
    seen: dict[str, set[int]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        base = make_folder(self.mount.point / "play")
        os.setxattr(make_folder(base / "space"), NAMESPACE, b"kind=%s" % self.kind.encode())
        self.places = {"space": base / "space"}
        self.places |= {name: make_folder(base / name) for name in ("space/x", "a", "b", "c")}
        self.folders = {"d0": base / "space/x/d0", "d1": base / "a/d1", "d2": base / "c/d2"}
        self.first = dict(self.folders)
        """where each was when it was registered"""
        for name, path in self.folders.items():
            make_folder(path)
            self.stored[name] = set()
        self.victim.open(*self.folders.values())
        self.thief.open(*self.folders.values())

    @property
    def paths(self) -> list[Path]:
        return [*self.places.values(), *self.folders.values()]

    # -- what may be seen

    def is_let_in(self, name: str) -> bool:
        if name == "d0" and self.token and self.token == self.shown:
            return True
        folder = self.folders[name]
        return all(may_search(path) for path in [folder, *folder.parents] if path.is_relative_to(self.mount.point))

    def put(self) -> None:
        name = self.rng.choice(list(self.folders))
        numbers = range(self.count + 1, self.count + 1 + self.rng.randint(1, 4))
        self.count = numbers[-1]
        stored = self.victim.put(self.first[name], *numbers, size=self.rng.choice(SIZES))
        self.stored[name] |= stored
        if not self.is_let_in(name) and self.allowed:
            self.withheld |= stored
        self.log.append(f"put {sorted(stored)} into {name}")

    def look(self) -> None:
        self.allowed |= set().union(*[self.stored[name] for name in self.folders if self.is_let_in(name)])
        seen = self.thief.look(*range(max(1, self.count - LAST), self.count + 1))
        self.seen = {way: self.seen.get(way, set()) | numbers for way, numbers in seen.items()}
        for way, numbers in seen.items():
            assert numbers <= self.allowed, (way, sorted(numbers - self.allowed), *self.log)

    # -- what happens

    def step(self) -> None:
        kinds = (
            ["chmod"] * 6 + ["group"] * 2 + ["owner", "token_set", "token_set", "move", "move", "clear", "open", "open"]
        )
        kind = self.rng.choice([*kinds, "reset", "close", "connect"])
        said = getattr(self, kind)()
        self.log.append(f"{kind} {said}")

    def chmod(self) -> str:
        path, mode = self.rng.choice(self.paths), self.rng.choice(MODES)
        if self.token and path == self.places["space"]:
            mode &= ~0o7
        path.chmod(mode)
        return f"{path} {mode:o}"

    def group(self) -> str:
        path, group = self.rng.choice(self.paths), self.rng.choice((VICTIM, ATTACKER))
        os.chown(path, -1, group)
        return f"{path} {group}"

    def owner(self) -> str:
        path = self.rng.choice([path for path in self.paths if path != self.places["space"]])
        take_owner(path)
        return str(path)

    def reset(self) -> str:
        """All are as at first, but for the token."""
        for path in self.paths:
            os.chown(path, VICTIM, VICTIM)
            path.chmod(0o750 if self.token and path == self.places["space"] else 0o755)
        return ""

    def token_set(self) -> str:
        self.token = self.rng.choice([token for token in ("", THEIRS, OTHER) if token != self.token])
        set_token(self.places["space"], self.token)
        return self.token

    def move(self) -> str:
        path = self.places[self.rng.choice("ab")] / "d1"
        self.folders["d1"] = self.folders["d1"].rename(path)
        return str(path)

    def clear(self) -> str:
        os.setxattr(self.places["space"], CLEAR, b"now")
        self.stored["d0"].clear()
        return ""

    def open(self) -> int:
        return self.thief.open(*self.folders.values())

    def close(self) -> None:
        self.thief.ask("close")

    def connect(self) -> str:
        self.shown = self.rng.choice(("", THEIRS))
        self.thief.ask("connect", token=self.shown)
        return self.shown + f", {self.open()} folders"


def may_search(path: Path) -> bool:
    status = os.stat(path)
    if status.st_uid == ATTACKER:
        return bool(status.st_mode & 0o100)
    return bool(status.st_mode & (0o010 if status.st_gid == ATTACKER else 0o001))


@pytest.mark.ring(3)
@pytest.mark.parametrize("kind", ["blocks"])
def test_any_sequence_of_changes(rng: random.Random, kind: str) -> None:
    """Each folder is registered under the path that it has first; kills and one upgrade come in between."""
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        with users_of(mount) as (victim, thief):
            play = Play(mount, victim, thief, rng, kind)
            ends: dict[int, Callable[[KvfuseMount], object]] = dict.fromkeys(rng.sample(range(STEPS), 3), kill_daemon)
            ends[rng.randrange(STEPS)] = upgrade
            for number in range(STEPS):
                play.step()
                if number in ends:
                    ends[number](mount)
                    play.log.append("another daemon")
                if rng.random() < 0.3:
                    play.look()
                play.put()
                play.look()
            print(f"{play.count} blocks, {len(play.allowed)} allowed, {len(play.withheld)} withheld")
            assert all(play.seen.values()), "it does see blocks in each way"
            assert play.withheld, "and others were kept from it"
