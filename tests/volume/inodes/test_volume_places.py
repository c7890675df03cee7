"""`KnownInodes` against a dict, and the memory a million inodes take."""

from __future__ import annotations

import random
import tracemalloc

from kvfuse.volume.inodes.known_inodes import KnownInodes


def test_places_are_what_a_dict_says(rng: random.Random) -> None:
    places, model = KnownInodes(), {}
    for _ in range(50_000):
        ino = rng.randrange(1024, 6000)
        event = rng.random()
        if event < 0.4:
            place = (rng.randrange(1, 9), b"n" * rng.randrange(0, 255))
            places.add(ino, *place)
            model[ino] = (place, model[ino][1] + 1 if ino in model else 1)
        elif event < 0.7:
            place = (rng.randrange(1, 9), rng.randbytes(rng.randrange(0, 255)))
            places.set(ino, *place)
            if ino in model:
                model[ino] = (place, model[ino][1])
        else:
            count = rng.randrange(1, 4)
            gone = ino not in model or model[ino][1] <= count
            assert places.forget(ino, count) is gone
            if ino in model:
                model[ino] = (model[ino][0], model[ino][1] - count)
                if gone:
                    del model[ino]
        assert places.get(ino) == (model[ino][0] if ino in model else None)
    assert len(places) == len(model)
    assert all(places.get(ino) == place for ino, (place, _) in model.items())


def test_an_inode_takes_few_bytes() -> None:
    tracemalloc.start()
    try:
        places = KnownInodes()
        for ino in range(1024, 1024 + 100_000):
            places.add(ino, 1, b"temporary-name-%016d" % ino)
            places.set(ino, 1, b"block-%026d" % ino)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size / 100_000 < 100
