"""Schedules ring threads: Python's interpreter runs one thread at a time, and every ring has a thread.

Without an order among them, a thread that wants the interpreter waits for all others that want it, 0.1 ms for each: the
event loop waits for each of 256 rings, several times in one request. So the thread of a ring takes the turn before it
works, and gives it back when it has nothing more to do, or between two entries where somebody else precedes it:

* *One ring works in the interpreter at a time.* The threads of all others sleep, so the event loop waits for one thread
  at most. Large copies need no interpreter: others take the turn meanwhile. A user with ``COPIES_MAX`` copies has no
  turn until one of them ends, which may take as long as it likes: see `client_memory.HELD_SIZE`. A thread that wakes
  wants the interpreter, too: see `bell_watcher.py`.
* *Users take turns.* The user that had least of the interpreter lately precedes all others; the ring that works notices
  after its present entry. So a user waits for one entry of another user, however many rings that one has. Looking for
  more work counts like work. Rings of one user follow each other after ``TURN_SECONDS``.
* *The event loop precedes rings.* While it works, the rings of users that had much of the interpreter stand back - for
  ``STAND_BACK_SECONDS``, then one of them works for ``TURN_SECONDS``, however busy the event loop is.

The turn is a token in a list: a thread that finds it there needs no lock, and does nothing else where nobody waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

import trio

TURN_SECONDS = 0.0005
"""a turn's length, after which another ring of the same user, or of one that had as much, works"""
STAND_BACK_SECONDS = 0.0003
HALF_LIFE_SECONDS = 0.02
"""time in which half of what a user had is forgotten"""
MUCH_SECONDS = HALF_LIFE_SECONDS / 2
"""value of ``User.lately`` from which a user stands back: a quarter to a half of all recent time"""
ALONE_MAX = 4
"""Rings of a user that wait for their bells themselves"""
COPIES_MAX = min(8, max(2, len(os.sched_getaffinity(0))))


class User:
    """Seconds that all rings of a user had of the interpreter ``lately``, and seats that wait for it."""

    __slots__ = ("__weakref__", "alone", "copies", "lately", "waiting")

    def __init__(self) -> None:
        self.alone = 0
        """rings that wait for their bells themselves"""
        self.copies = 0
        """rings that lost the turn while they copied, and still copy"""
        self.lately = 0.0
        self.waiting: deque[Seat] = deque()


class Seat:
    """The place of one thread, which has the turn, waits for it, or neither. ``began``: when its turn began."""

    __slots__ = ("began", "has_turn", "lent", "user", "wake")

    def __init__(self, user: User) -> None:
        self.user = user
        self.began = 0.0
        self.lent: list[bool] = []
        """empty unless somebody may take the turn from it"""
        self.wake = threading.Lock()
        """released by the thread that hands the turn to this seat"""
        self.wake.acquire()
        self.has_turn = False
        """it woke up with the turn, and did nothing yet"""


class Interpreter:
    """Gives ring threads their turns; the listener owns it. Methods with a seat are for its thread."""

    def __init__(self) -> None:
        self.token = [True]
        """empty while a seat has the turn: no other module takes it out"""
        self._lock = threading.Lock()
        self._users: WeakValueDictionary[object, User] = WeakValueDictionary()
        self._waiting: set[User] = set()
        self._least = float("inf")
        """lately of the user that precedes all others who wait"""
        self._halved_at = time.perf_counter()
        self._is_loop_busy = False
        self._has_timer = False
        """a seat that stands back looks at the clock"""
        self._ours_until = 0.0
        """time until which the event loop precedes nobody"""
        self._copier: Seat | None = None
        """the seat that has the turn, while it copies"""
        self._looker = [True]
        """empty while a thread looks for more work without a rest"""

    def get_user(self, key: object) -> User:
        with self._lock:
            return self._users.setdefault(key, User())

    # -- turns ---------------------------------------------------------------------------------------

    def take_turn(self, seat: Seat) -> None:
        """Take the turn, or wait until somebody hands it on to this seat."""
        if seat.user.copies >= COPIES_MAX or (self._is_loop_busy and self._has_to_wait(seat.user)):
            self._wait(seat)
        else:
            try:
                self.token.pop()
            except IndexError:
                self._wait(seat)
        seat.began = time.perf_counter()

    def give_turn(self, seat: Seat) -> None:
        """Hand the turn on."""
        now = time.perf_counter()
        seat.user.lately += now - seat.began
        self.token.append(True)
        if self._waiting or now - self._halved_at > HALF_LIFE_SECONDS:
            with self._lock:
                self._decay(now)
                self._hand_turn()

    def is_wanted(self, seat: Seat) -> bool:
        """Whether the event loop or another seat precedes this seat, which has the turn."""
        if self._is_loop_busy and self._has_to_wait(seat.user):
            return True
        if not self._waiting:
            return False
        took = time.perf_counter() - seat.began
        return took > TURN_SECONDS or self._least + TURN_SECONDS < seat.user.lately + took

    def lend_turn(self, seat: Seat) -> None:
        """Hand the turn on to the seat that precedes this one, and wait until it is handed back."""
        seat.user.lately += time.perf_counter() - seat.began
        self._wait(seat, has_turn=True)
        seat.began = time.perf_counter()

    def pause(self, seat: Seat) -> None:
        """Lend the turn where the event loop or another seat precedes this one; return at once otherwise."""
        if self.is_wanted(seat):
            self.lend_turn(seat)

    def queue_seat(self, seat: Seat) -> None:
        """Queue a seat, whose thread blocks in `sleep`, for the turn."""
        with self._lock:
            self._append(seat)
            self._hand_turn()

    def sleep(self, seat: Seat) -> None:
        """Block this seat's thread until `queue_seat` queued the seat and the turn was handed to it."""
        seat.wake.acquire()
        seat.began = time.perf_counter()
        seat.has_turn = True

    def may_sleep_alone(self, user: User) -> bool:
        """Whether one more thread may wait for something by itself, until `end_sleep_alone`."""
        with self._lock:
            may = user.alone < ALONE_MAX
            user.alone += may
            return may

    def end_sleep_alone(self, user: User) -> None:
        with self._lock:
            user.alone -= 1

    @contextmanager
    def resting(self, seat: Seat) -> Iterator[None]:
        """Give the turn back for the body, which waits for something; after it the seat has the turn again."""
        self.give_turn(seat)
        try:
            yield
        finally:
            self.take_turn(seat)

    @contextmanager
    def copying(self, seat: Seat) -> Iterator[None]:
        """Let others take the turn from this seat during a large copy; after it the seat has the turn again."""
        seat.lent.append(True)
        self._copier = seat
        if self._waiting:
            with self._lock:
                self._hand_turn()
        try:
            yield
        finally:
            try:
                seat.lent.pop()
                self._copier = None
            except IndexError:
                with self._lock:
                    seat.user.copies -= 1
                    self._hand_turn()
                seat.user.lately += time.perf_counter() - seat.began
                self.take_turn(seat)

    # -- looking for more work -----------------------------------------------------------------------

    def may_look(self) -> bool:
        """Whether this thread may look for more work without a rest: one at a time, until `end_look`."""
        if not self.token:
            return False
        try:
            self._looker.pop()
        except IndexError:
            return False
        return True

    def end_look(self, seat: Seat, seconds: float) -> None:
        self._looker.append(True)
        seat.user.lately += seconds

    # -- the event loop ------------------------------------------------------------------------------

    def note_loop_busy(self) -> None:
        self._is_loop_busy = True

    def note_loop_idle(self) -> None:
        self._is_loop_busy = False
        if self._waiting and self.token:
            with self._lock:
                self._hand_turn()

    # -- within --------------------------------------------------------------------------------------

    def _has_to_wait(self, user: User) -> bool:
        return user.lately > MUCH_SECONDS and time.perf_counter() > self._ours_until

    def _wait(self, seat: Seat, *, has_turn: bool = False) -> None:
        """Block until the turn is handed to this seat; with ``has_turn`` the seat first gives up its turn."""
        with self._lock:
            self._append(seat)
            has_timer = self._is_loop_busy and not self._has_timer
            self._has_timer |= has_timer
            if has_turn:
                self.token.append(True)
            self._hand_turn()
        if not has_timer:
            seat.wake.acquire()
            return
        has_turn = seat.wake.acquire(timeout=STAND_BACK_SECONDS)
        with self._lock:
            self._has_timer = False
            if not has_turn:
                self._ours_until = time.perf_counter() + TURN_SECONDS
                self._hand_turn()
        if not has_turn:
            seat.wake.acquire()

    def _append(self, seat: Seat) -> None:
        """Queue a seat behind those of its user that wait. The caller holds the lock."""
        seat.user.waiting.append(seat)
        self._waiting.add(seat.user)
        self._least = min(self._least, seat.user.lately)

    def _hand_turn(self) -> None:
        """Hand a free turn to the user that had least, unless the event loop precedes it. The caller holds the lock."""
        users = [user for user in self._waiting if user.copies < COPIES_MAX]
        if not users:
            return
        self._decay(time.perf_counter())
        user = min(users, key=lambda user: user.lately)
        if self._is_loop_busy and self._has_timer and self._has_to_wait(user):
            return
        if not self._free_turn():
            return
        seat = user.waiting.popleft()
        if not user.waiting:
            self._waiting.discard(user)
        self._least = min((user.lately for user in self._waiting), default=float("inf"))
        seat.wake.release()

    def _free_turn(self) -> bool:
        """Take the turn from the list or from a seat that copies. False: neither has it. The caller holds the lock."""
        with suppress(IndexError):
            self.token.pop()
            return True
        copier = self._copier
        if copier is not None:
            with suppress(IndexError):
                copier.lent.pop()
                self._copier = None
                copier.user.copies += 1
                return True
        return False

    def _decay(self, now: float) -> None:
        """Decay what users had: by half in each ``HALF_LIFE_SECONDS``. The caller holds the lock."""
        if now - self._halved_at < HALF_LIFE_SECONDS:
            return
        factor = 0.5 ** ((now - self._halved_at) / HALF_LIFE_SECONDS)
        self._halved_at = now
        for user in self._users.values():
            user.lately *= factor
        self._least *= factor


class _Watch(trio.abc.Instrument):
    """Reports to the interpreter when the event loop works, and when it waits for events."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._interpreter.note_loop_idle()

    def after_io_wait(self, timeout: float) -> None:
        self._interpreter.note_loop_busy()


@contextmanager
def watch_loop(interpreter: Interpreter) -> Iterator[None]:
    """Report to ``interpreter`` when the event loop of this thread works, and when it waits for events."""
    watch = _Watch(interpreter)
    trio.lowlevel.add_instrument(watch)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(watch)
        interpreter.note_loop_idle()
