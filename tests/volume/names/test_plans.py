"""The rules of POSIX for changes of names, of plans alone: no volume, no store, nothing that waits."""

from __future__ import annotations

from stat import S_IFDIR, S_IFREG

import pytest

from kvfuse import errors
from kvfuse.volume.api import LINK_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, SYMLINK_MAX, Caller
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Found
from kvfuse.volume.names.plans import (
    End,
    NewInode,
    Plan,
    plan_create,
    plan_link,
    plan_rename,
    plan_replacement,
    plan_rmdir,
    plan_unlink,
)


def node(ino: int, kind: int = S_IFREG) -> Node:
    made = Node(ino, kind | 0o700, 0, 0, 1 << 20)
    made.name = b"node-%d" % ino
    if kind == S_IFDIR:
        made.nlink, made.own_record = 2, True
    return made


FOLDER, OTHER_FOLDER = node(2, S_IFDIR), node(3, S_IFDIR)
NEW, TOO_LONG = NewInode(Caller(0, 0), S_IFREG), NewInode(Caller(0, 0), S_IFREG, target=bytes(SYMLINK_MAX + 1))


def end(meant: Node | None, directory: Node = FOLDER, name: bytes = b"name", above: tuple[Node, ...] = ()) -> End:
    return End(directory, name, Found(meant, meant is not None, None, 0), above)


def removed_folder() -> Node:
    folder = node(4, S_IFDIR)
    folder.nlink = 0
    return folder


def refused(plan: object, *arguments: object) -> type[BaseException]:
    assert callable(plan)
    with pytest.raises(errors.OperationError) as caught:
        plan(*arguments)
    return caught.type


def test_what_is_made_takes_a_free_name_in_a_directory_that_is_there() -> None:
    made: list[Node] = []

    def make(kind: int) -> Plan:
        return plan_create(end(None), NEW, lambda end, new: made.append(node(10, kind)) or made[-1])

    plan = make(S_IFREG)
    assert (plan.made, plan.means, plan.counts) == (made[0], (made[0],), ())
    assert make(S_IFDIR).counts == [(FOLDER, 1)]
    assert refused(plan_create, end(node(5)), NEW, made.pop) is errors.Exists
    assert refused(plan_create, end(None, removed_folder()), NEW, made.pop) is errors.NotFound
    assert refused(plan_create, end(None), TOO_LONG, made.pop) is errors.NameTooLong
    assert len(made) == 2, "nothing is made for a change that is refused"


def test_a_new_file_takes_a_name_from_a_file() -> None:
    old, new = node(5), node(6)
    plan = plan_replacement(end(old), NEW, lambda end, wanted: new)
    assert (plan.made, plan.unlinked, plan.means) == (new, old, (new,))
    assert plan_replacement(end(None), NEW, lambda end, wanted: new).unlinked is None
    assert refused(plan_replacement, end(OTHER_FOLDER), NEW, node) is errors.IsADirectory
    assert refused(plan_replacement, end(None, removed_folder()), NEW, node) is errors.NotFound


def test_a_link_is_of_a_file_that_has_names_and_may_have_more() -> None:
    file = node(5)
    plan = plan_link(end(None), file)
    assert (plan.linked, plan.means, plan.counts) == (file, (file,), ())
    assert refused(plan_link, end(None), OTHER_FOLDER) is errors.NotPermitted
    assert refused(plan_link, end(node(6)), file) is errors.Exists
    assert refused(plan_link, end(None, removed_folder()), file) is errors.NotFound
    file.nlink = LINK_MAX
    assert refused(plan_link, end(None), file) is errors.TooManyLinks
    file.nlink = 0
    assert refused(plan_link, end(None), file) is errors.NotFound


def test_unlink_is_for_files_and_rmdir_for_directories() -> None:
    file = node(5)
    plan = plan_unlink(end(file))
    assert (plan.unlinked, plan.removed, plan.means, plan.counts) == (file, None, (None,), ())
    plan = plan_rmdir(end(OTHER_FOLDER))
    assert (plan.unlinked, plan.removed, plan.means, plan.counts) == (None, OTHER_FOLDER, (None,), [(FOLDER, -1)])
    assert refused(plan_unlink, end(OTHER_FOLDER)) is errors.IsADirectory
    assert refused(plan_rmdir, end(file)) is errors.NotADirectory
    assert refused(plan_unlink, end(None)) is refused(plan_rmdir, end(None)) is errors.NotFound


def test_a_rename_moves_an_inode_and_what_has_the_name_loses_it() -> None:
    file, other = node(5), node(6)
    plan = plan_rename(end(file), end(None, OTHER_FOLDER, b"longer"), 0)
    assert (plan.means, plan.is_move, plan.unlinked, plan.counts) == ((None, file), True, None, ())
    assert plan.weight == 2
    assert plan_rename(end(file), end(other), 0).unlinked is other
    assert plan_rename(end(file), end(file), 0).means == (), "two names of one file: nothing happens"


def test_directories_are_counted_where_they_come_and_go() -> None:
    one, two = node(7, S_IFDIR), node(8, S_IFDIR)
    assert plan_rename(end(one), end(None), 0).counts == []
    assert plan_rename(end(one), end(None, OTHER_FOLDER), 0).counts == [(FOLDER, -1), (OTHER_FOLDER, 1)]
    assert plan_rename(end(one), end(two), 0).counts == [(FOLDER, -1)]
    plan = plan_rename(end(one), end(two, OTHER_FOLDER), 0)
    assert (plan.counts, plan.removed, plan.unlinked) == ([(FOLDER, -1)], two, None)
    assert plan_rename(end(one), end(two, OTHER_FOLDER), RENAME_EXCHANGE).counts == []
    exchanged = plan_rename(end(one), end(node(5), OTHER_FOLDER), RENAME_EXCHANGE)
    assert exchanged.counts == [(FOLDER, -1), (OTHER_FOLDER, 1)]


def test_what_a_rename_may_not_do() -> None:
    file, folder = node(5), node(7, S_IFDIR)
    assert refused(plan_rename, end(file), end(None), 4) is errors.InvalidArgument
    assert refused(plan_rename, end(None), end(file), 0) is errors.NotFound
    assert refused(plan_rename, end(file), end(None), RENAME_EXCHANGE) is errors.NotFound
    assert refused(plan_rename, end(file), end(None, removed_folder()), 0) is errors.NotFound
    assert refused(plan_rename, end(file), end(node(6)), RENAME_NOREPLACE) is errors.Exists
    assert refused(plan_rename, end(file), end(file), RENAME_NOREPLACE) is errors.Exists
    assert refused(plan_rename, end(file), end(folder), 0) is errors.IsADirectory
    assert refused(plan_rename, end(folder), end(file), 0) is errors.NotADirectory


def test_no_directory_comes_into_itself() -> None:
    folder, below = node(7, S_IFDIR), node(8, S_IFDIR)
    inside = (below, folder)
    assert refused(plan_rename, end(folder), end(None, below, above=inside), 0) is errors.InvalidArgument
    other = end(node(5), below, above=inside)
    assert refused(plan_rename, end(folder), other, RENAME_EXCHANGE) is errors.InvalidArgument
    assert refused(plan_rename, other, end(folder), RENAME_EXCHANGE) is errors.InvalidArgument
    assert plan_rename(other, end(None), 0).is_move


def test_an_exchange_loses_nothing() -> None:
    one, two = node(5), node(6)
    plan = plan_rename(end(one), end(two, OTHER_FOLDER), RENAME_EXCHANGE)
    assert (plan.means, plan.unlinked, plan.removed, plan.is_move) == ((two, one), None, None, True)
