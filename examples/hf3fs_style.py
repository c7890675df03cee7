"""A page cache as engines write it for 3FS's rings: one big file, equal pages, batches through shared memory.

    python examples/hf3fs_style.py /mnt/kv

With the distribution compat/hf3fs-fuse installed the import may also be `from hf3fs_fuse.io import ...`.
"""

import os
import sys
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory

from kvfuse.usrbio.hf3fs import deregister_fd, extract_mount_point, make_ioring, make_iovec, register_fd

PAGE_SIZE, PAGES = 256 << 10, 16

path = os.path.join(sys.argv[1], "pages")
mount = extract_mount_point(sys.argv[1])
shm = SharedMemory(create=True, size=PAGE_SIZE * PAGES)
memory = make_iovec(shm, mount)
shm.unlink()  # from here on nobody needs its name
writes, reads = (make_ioring(mount, PAGES, for_read=for_read) for for_read in (False, True))
fd = os.open(path, os.O_RDWR | os.O_CREAT)
register_fd(fd)

for page in range(PAGES):
    part = memory[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    part[:] = bytes([page]) * PAGE_SIZE
    writes.prepare(part, False, fd, page * PAGE_SIZE)
written = writes.submit().wait(min_results=PAGES, timeout=timedelta(seconds=10))
assert [part.result for part in written] == [PAGE_SIZE] * PAGES

memory[:] = bytes(len(memory))
for place, page in enumerate(reversed(range(PAGES))):
    part = memory[place * PAGE_SIZE : (place + 1) * PAGE_SIZE]
    reads.prepare(part, True, fd, page * PAGE_SIZE, userdata=page)
for part in reads.submit().wait(min_results=PAGES, timeout=timedelta(seconds=10)):
    assert part.result == PAGE_SIZE, os.strerror(-part.result)
    assert bytes(part) == bytes([part.userdata]) * PAGE_SIZE

deregister_fd(fd)
os.close(fd)
print(f"{PAGES} pages of {PAGE_SIZE >> 10} KiB went to {path} and came back")
