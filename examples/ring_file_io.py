"""Write and read a file of a kvfuse mount through a ring: python examples/ring_file_io.py MNT"""

import sys
from pathlib import Path

import numpy as np

from kvfuse.usrbio.client import connect

BLOCK_SIZE = 64 << 10
BLOCK_COUNT = 64


def main(mount: str) -> None:
    path = Path(mount, "ring-example.bin")
    with connect(mount) as client, client.iov(BLOCK_SIZE * BLOCK_COUNT) as iov, client.ring() as ring:
        places = np.arange(BLOCK_COUNT) * BLOCK_SIZE
        with client.file(path, "rw") as file:
            # 64 writes as one column of entries: buffer offsets, file offsets, lengths
            iov.array[:] = np.random.default_rng(1).integers(0, 256, iov.size, np.uint8)
            written = iov.array.copy()
            ring.prep_writes(iov, places, file, places, BLOCK_SIZE, user_data=np.arange(BLOCK_COUNT))
            ring.submit()
            done = ring.wait(min_results=BLOCK_COUNT, timeout=10)
            print(f"wrote {done['result'].sum()} bytes in {len(done)} entries")

            # the blocks come back in reverse order; results say how much each read got
            iov.array[:] = 0
            ring.prep_reads(iov, places, file, places[::-1], BLOCK_SIZE)
            ring.prep_fsync(file, user_data=1000)
            ring.submit()
            done = ring.wait(min_results=BLOCK_COUNT + 1, timeout=10)
            assert (done["result"] >= 0).all(), done
            assert (iov.array.reshape(BLOCK_COUNT, -1) == written.reshape(BLOCK_COUNT, -1)[::-1]).all()
            print("read them back, and they are durable")

    # the same bytes, as a file
    assert path.read_bytes() == written.tobytes()
    path.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
