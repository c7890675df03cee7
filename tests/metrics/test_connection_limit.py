"""Which connection goes where all places are taken: against any mix of addresses that send nothing, or too much."""

from __future__ import annotations

from kvfuse.connection_limit import ConnectionLimit, HttpClient


class Crowd:
    """Some places, and who lost one."""

    def __init__(self, count: int) -> None:
        self.limit = ConnectionLimit(count)
        self.ended: list[HttpClient] = []

    def client(self, address: str, *, waits_for_us: bool = False) -> HttpClient:
        made = HttpClient(address, lambda: self.ended.append(made), waits_for_us)
        return made

    def enter(self, *addresses: str, waits_for_us: bool = False) -> list[HttpClient]:
        made = [self.client(address, waits_for_us=waits_for_us) for address in addresses]
        assert [self.limit.enter(client) for client in made] == [True] * len(made)
        return made


def test_a_newcomer_takes_the_place_of_the_slowest_of_the_largest_crowd() -> None:
    crowd = Crowd(4)
    _, slowest, *_ = crowd.enter("scraper", "crowd", "crowd", "crowd")
    crowd.enter("other")
    assert crowd.ended == [slowest]


def test_a_newcomer_of_the_crowd_takes_a_place_of_its_own_address() -> None:
    crowd = Crowd(3)
    _, slowest, _ = crowd.enter("scraper", "crowd", "crowd")
    crowd.enter("crowd")
    assert crowd.ended == [slowest]


def test_a_request_that_is_answered_goes_after_those_that_are_not_complete() -> None:
    crowd = Crowd(3)
    (answered,) = crowd.enter("crowd", waits_for_us=True)
    slow, _ = crowd.enter("crowd", "crowd")
    crowd.enter("crowd")
    assert crowd.ended == [slow]
    assert answered not in crowd.ended


def test_requests_that_are_answered_keep_out_their_own_address_alone() -> None:
    crowd = Crowd(2)
    first, _ = crowd.enter("crowd", "crowd", waits_for_us=True)
    assert not crowd.limit.enter(crowd.client("crowd"))
    assert crowd.ended == []
    crowd.enter("scraper")
    assert crowd.ended == [first]


def test_a_place_is_free_again_once_its_client_left() -> None:
    crowd = Crowd(1)
    (first,) = crowd.enter("a")
    crowd.limit.leave(first)
    (second,) = crowd.enter("b")
    crowd.limit.leave(first)
    crowd.enter("c")
    assert crowd.ended == [second]
