"""Keep blocks by key in a kvfuse mount: python examples/block_store.py MNT"""

import sys
from pathlib import Path

import numpy as np

from kvfuse.usrbio.client import BlockStore, connect

BLOCK_SIZE = 2 << 20
BLOCK_COUNT = 8


def main(mount: str) -> None:
    with connect(mount) as client, BlockStore(client, "block-example") as store:
        # memory of an engine, in an iov: the daemon copies straight out of it and into it
        pool = client.iov(BLOCK_SIZE * BLOCK_COUNT).array.reshape(BLOCK_COUNT, BLOCK_SIZE)
        pool[:] = np.arange(BLOCK_COUNT, dtype=np.uint8)[:, None]
        keys = [f"layer0/tokens-{number}" for number in range(BLOCK_COUNT)]

        stored = store.put_many(keys, list(pool))
        print(f"stored {stored.sum()} blocks of {BLOCK_SIZE} bytes")
        print(f"a prefix of {store.longest_prefix([*keys[:5], 'absent', *keys[5:]])} blocks is there")

        pool[:] = 255
        sizes = store.get_many_into([*keys[:7], "absent"], list(pool))
        print(f"got blocks of {sizes.tolist()} bytes; -1 is a miss")
        assert (pool[:7] == np.arange(7)[:, None]).all()

        # a view: no copy where the block is in shared memory
        view = store.get(keys[3])
        assert view is not None
        with view:
            print(f"a view of {len(view)} bytes, all {view[0]}")

        # blocks are files
        print("as files:", sorted(path.name for path in Path(mount, "block-example").iterdir())[0], "...")
        print(f"deleted {store.delete_many(keys).sum()}, left {store.exists(keys).sum()}")
    Path(mount, "block-example").rmdir()


if __name__ == "__main__":
    main(sys.argv[1])
