"""Parts of vLLM's tier by themselves: look-ups ahead of need, news of blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import wait_until

from kvfuse.connectors.vllm.block_news import BlockNews
from kvfuse.connectors.vllm.lookups import Lookups
from kvfuse.usrbio.client import News, NewsKind

KEYS = [b"one", b"two", b"three"]


class Finder:
    """Answers when it may: yes for all keys but the last of `KEYS`."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.asked: list[list[bytes]] = []

    def __call__(self, keys: list[bytes], request: str) -> list[bool]:
        self.asked.append(keys)
        self.may.wait()
        return [key != KEYS[-1] for key in keys]


@pytest.fixture
def finder() -> Iterator[Finder]:
    finder = Finder()
    yield finder
    finder.may.set()


def test_keys_of_a_step_are_asked_about_together(finder: Finder) -> None:
    lookups = Lookups(finder, deadline=60)
    finder.may.set()
    assert [lookups.lookup(key, "request") for key in KEYS] == [None] * 3
    assert lookups.lookup(KEYS[0], "another") is None
    lookups.flush()
    wait_until(lambda: lookups.lookup(KEYS[2], "request") is not None, "an answer")
    assert [lookups.lookup(key, "request") for key in KEYS] == [True, True, False]
    assert finder.asked == [KEYS]
    lookups.miss(KEYS[:1])
    lookups.forget("request")
    assert lookups.lookup(KEYS[0], "another") is False
    lookups.forget("another")
    assert lookups.lookup(KEYS[0], "another") is None  # asked anew
    lookups.close()


def test_an_answer_that_is_late_is_a_miss_for_good(finder: Finder) -> None:
    lookups = Lookups(finder, deadline=0.01)
    assert lookups.lookup(KEYS[0], "request") is None
    lookups.flush()
    wait_until(lambda: lookups.lookup(KEYS[0], "request") is False, "the deadline")
    finder.may.set()
    lookups.close()
    assert lookups.lookup(KEYS[0], "request") is False
    assert lookups.late == 1


def test_a_look_up_that_fails_is_a_miss() -> None:
    def fail(keys: list[bytes], request: str) -> list[bool]:
        raise RuntimeError("of no kind that is known")

    lookups = Lookups(fail, deadline=60)
    assert lookups.lookup(KEYS[0], "request") is None
    lookups.flush()
    wait_until(lambda: lookups.lookup(KEYS[0], "request") is False, "an answer")
    lookups.close()


def test_news_are_what_has_changed_in_the_end(tmp_path: Path) -> None:
    news = BlockNews(str(tmp_path), "absent", None)
    try:
        hear = [
            (NewsKind.PRESENT, [b"a", b"b"]), (NewsKind.READY, []), (NewsKind.STORED, [b"c", b"a"]),
            (NewsKind.REMOVED, [b"b", b"never"]),
        ]  # fmt: skip
        news._present = set()  # as at the start of a connection
        for kind, names in hear:
            news._hear(News(kind, names))
        assert news.take(9) == [(False, [b"a", b"c"])]  # b came and went
        news._hear(News(NewsKind.REMOVED, [b"a"]))
        news._hear(News(NewsKind.STORED, [b"a"]))
        assert news.take(9) == []
        news._hear(News(NewsKind.CLEARED, []))
        ((removed, keys),) = news.take(9)
        assert (removed, sorted(keys)) == (True, [b"a", b"c"])
        news._hear(News(NewsKind.STORED, [b"d", b"e", b"f"]))
        assert [news.take(2) for _ in range(3)] == [[(False, [b"d", b"e"])], [(False, [b"f"])], []]
    finally:
        news.close()


def test_news_of_a_new_connection_are_the_difference(tmp_path: Path) -> None:
    news = BlockNews(str(tmp_path), "absent", None)
    try:
        for present in ([b"a", b"b"], [b"b", b"c"]):
            news._present = set()
            news._hear(News(NewsKind.PRESENT, present))
            news._hear(News(NewsKind.READY, []))
            last = news.take(9)
        assert last == [(True, [b"a"]), (False, [b"c"])]
    finally:
        news.close()
