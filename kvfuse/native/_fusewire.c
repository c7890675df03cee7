/* What stands between pyfuse3 and libfuse; see fusewire.py.

pyfuse3 asks the dynamic linker for libfuse's functions. Loaded before it, for all to see, this module is asked first:
it has five of them, under their own names. All but the one that reads requests end in a call of libfuse's. All are called
with Python's lock held, by the one thread that answers the kernel; that lock also guards the state here, but for that of
the readers.

*Readers* are threads that read requests, one at a time, and answer what needs no interpreter: blocks, by the `way` that the
block store's core gives (blockdoor.h). What is left queues for pyfuse3. They read one descriptor, as answers have to go to
the one by which a request was read, and libfuse knows one.

*A kill is no error.* The kernel copies requests and answers page by page. Where a page is not in the daemon's page tables
it takes the way of a page fault, which a fatal signal ends at once; then the kernel fails the request with EIO, and nobody
can answer it again. So each request is read into the same memory, which is populated once, locked, and no child's; and the
pages of an answer are populated before the kernel copies it: a daemon that is killed in there has not answered. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#define FUSE_USE_VERSION 30

#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "requestprofile.h"

#define CAPABILITY "security.capability"
#define SEEK "kvfuse.seek" /* the name under which pyfuse3 gets LSEEK */
#define MARK_SHIFT 62 /* the bits of a handle that `fusewire.py` marks */
#define HANDLE_MASK ((1ull << MARK_SHIFT) - 1)
#define MARK_NO_FLUSH (1ull << 63)
#define MARK_DIRECT (1ull << 62)
#define PLAIN_COUNT (1u << 16)
#define SENT_AGAIN (1ull << 63) /* of a request's number, since Linux 6.9 */
#define NO_FLUSH (1u << 5)
#define PARALLEL_DIRECT_WRITES (1u << 6)
#define INIT_EXT (1u << 30)
#define HEADER_SIZE 4096         /* room for all of a WRITE that is not content, as libfuse has it */
#define BLOCK_SIZE 4096          /* of st_blksize */
#define CONTENT_SIZE_MIN 131072  /* attributes have 64 KiB, and INIT wants 8 KiB */
#define POPULATED_SECONDS 1
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22    /* Linux 5.14; an older one does not send requests again anyway */
#endif

static void (*process_buf)(struct fuse_session *, const struct fuse_buf *);
static int (*reply_buf)(fuse_req_t, const char *, size_t);
static int (*session_fd)(struct fuse_session *);
static int (*session_exited)(struct fuse_session *);
static void (*session_exit)(struct fuse_session *);

static struct {
    uint64_t wanted, unwanted;     /* flags of INIT's answer, flags2 in the upper half */
    uint16_t background;           /* 0: the kernel's own bound */
    uint64_t answered;             /* flags as they went to the kernel */
    int knows_plain;               /* nobody else sets attributes of files */
    uint64_t plain[PLAIN_COUNT];   /* inodes that were made here and never got an attribute, each at its own place */
    unsigned long long capability_count;
} wire;

static uint64_t unique, nodeid; /* of the request that is being handled */
static struct {
    uint64_t pid, op, size;
    int64_t began; /* when it was read; 0: nobody looks */
} handled; /* the same request, for `requestprofile.h` */
static int is_from_the_cache; /* it writes back pages, by whichever handle */
static struct fuse_lseek_in seek; /* it asks where data or a hole begins; whence 0: it asks for something else */

/* INIT as the kernel sent it once: to the first daemon of a mount. Those after it get it from here. */
static struct {
    char bytes[sizeof(struct fuse_in_header) + sizeof(struct fuse_init_in)];
    size_t size;
    int fd;          /* of the connection; -1: no INIT came */
    int is_replayed; /* the kernel has its answer */
    int is_due;      /* it is the next request */
} init = {.fd = -1};

/* Where requests are read to. pyfuse3 handles one, or copies what it needs of it, before it asks for the next one. */
static struct {
    char *bytes;
    size_t size;
    size_t size_wanted; /* since the kernel knows how much a WRITE may have */
    int is_lent;        /* it is a reader's */
} request_room = {.size_wanted = CONTENT_SIZE_MIN + HEADER_SIZE};

/* One request that was read. */
typedef struct room {
    char *bytes;
    size_t size;
    int length; /* of the request; or an error */
    int64_t read_at; /* 0: nobody looks */
    struct room *next;
} Room;

enum { READERS_MAX = 8, ROOMS_MORE = 4, SPIN_NS = 15000, SPIN_GAP_NS = 15000, TURN_NS = 500000, LONG = 32768 };
enum { SOON_NS = 100000, MISSED_MAX = 2, TRIALS = 16 };

typedef struct {
    uint64_t (*answer)(void *, int, const void *, size_t); /* 0: not; else the number of the file that was made, or 1 */
    int (*take_over)(void *, const void *, size_t); /* whether Python has to take something over before a request */
    void *door;
    uint64_t shown; /* a bit for each opcode that it wants to see */
} Way;

static struct {
    pthread_mutex_t lock;  /* of what is not the reading thread's alone */
    pthread_mutex_t turn;  /* of the one that reads next */
    pthread_cond_t freed;
    pthread_t threads[READERS_MAX];
    int count, is_stopping, is_over; /* ``is_over``: the mount is gone */
    int fd, queued, wake; /* the connection; readable while something is queued; readable once they are to stop */
    Room *free, *first, **last, *present; /* ``present``: what pyfuse3 has now */
    Way way;
    PyObject *heir; /* takes over what has to be */
} readers = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, .fd = -1, .queued = -1, .wake = -1};

/* Answers whose pages are in the page tables. Pages that were used so lately are not reclaimed. */
static struct populated {
    const char *bytes;
    size_t size;
    time_t second;
} populated[1 << 12];

/* Python's functions that answer without a task of their own, or NULL; see `fusewire.answer_at_once`. */
static struct {
    PyObject *look_up, *get_attributes, *forget, *release;
} at_once;

/* Names of an inode's attributes, as `api.Attributes` has them. */
static struct {
    PyObject *ino, *mode, *nlink, *uid, *gid, *rdev, *size, *blocks, *atime, *mtime, *ctime;
} names_of;

static uint64_t *place_of(uint64_t ino)
{
    return &wire.plain[(ino * 0x9E3779B97F4A7C15ull) >> 48];
}

static void forget_plain(uint64_t ino)
{
    uint64_t *place = place_of(ino);
    if (*place == ino)
        *place = 0;
}

/* -- requests ---------------------------------------------------------------------------------- */

static const struct fuse_in_header *header_of(size_t size)
{
    return size < sizeof(struct fuse_in_header) ? NULL : (const void *)request_room.bytes;
}

/* Memory for a request, populated, locked and no child's. NULL: there is none. */
static char *map_room(size_t size)
{
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (bytes == MAP_FAILED)
        return NULL;
    madvise(bytes, size, MADV_DONTFORK); /* a fork would have the kernel copy each page at its next write */
    mlock(bytes, size);                  /* where it may be swapped all the same, a kill finds it there most likely */
    return bytes;
}

/* 0: there is no memory. */
static int make_room(void)
{
    if (request_room.size >= request_room.size_wanted)
        return 1;
    size_t size = request_room.size_wanted;
    char *bytes = map_room(size);
    if (!bytes)
        return 0;
    if (request_room.bytes)
        munmap(request_room.bytes, request_room.size);
    request_room.bytes = bytes;
    request_room.size = size;
    return 1;
}

/* The kernel asks for this attribute before each write. What pyfuse3 needs 20 us for takes 1 us here. So does to say what
   libfuse says to each ioctl. */
static int answers_itself(int fd, const char *bytes, size_t size)
{
    const struct fuse_in_header *in = size < sizeof *in ? NULL : (const void *)bytes;
    const size_t name_at = sizeof(*in) + sizeof(struct fuse_getxattr_in);
    if (in && in->opcode == FUSE_IOCTL) { /* Python's open() asks each file whether it is a terminal */
        struct fuse_out_header none = {.len = sizeof(none), .error = -ENOSYS, .unique = in->unique};
        return write(fd, &none, sizeof(none)) > 0 || errno == ENOENT;
    }
    if (!in || in->opcode != FUSE_GETXATTR || size < name_at + sizeof(CAPABILITY) || *place_of(in->nodeid) != in->nodeid)
        return 0;
    if (memcmp(bytes + name_at, CAPABILITY, sizeof(CAPABILITY)) != 0)
        return 0;
    struct fuse_out_header out = {.len = sizeof(out), .error = -ENODATA, .unique = in->unique};
    if (write(fd, &out, sizeof(out)) < 0 && errno != ENOENT) /* who asked was killed */
        return 0;
    __atomic_fetch_add(&wire.capability_count, 1, __ATOMIC_RELAXED);
    return 1;
}

/* As libfuse has it: its size, 0 where the mount is gone, or an error. */
static int receive(struct fuse_session *se)
{
    ssize_t size;
    do
        size = read(session_fd(se), request_room.bytes, request_room.size);
    while (size < 0 && errno == ENOENT); /* who asked was killed */
    if (session_exited(se))
        return 0;
    if (size < 0 && errno == ENODEV) {
        session_exit(se);
        return 0;
    }
    if (size < 0)
        return -errno;
    return size < (ssize_t)sizeof(struct fuse_in_header) ? -EIO : (int)size;
}

/* -- readers: their threads never need the interpreter ------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Read one request: its size, 0 where they are to stop, or an error. ``spins``: another one is likely to come at once. */
static int read_next(Room *room, int spins)
{
    int64_t until = spins ? now_ns() + SPIN_NS : 0;
    for (;;) {
        if (__atomic_load_n(&readers.is_stopping, __ATOMIC_ACQUIRE))
            return 0;
        ssize_t size = read(readers.fd, room->bytes, room->size);
        if (size >= 0)
            return size < (ssize_t)sizeof(struct fuse_in_header) ? -EIO : (int)size;
        if (errno == ENOENT || errno == EINTR) /* who asked was killed */
            continue;
        if (errno != EAGAIN)
            return -errno;
        if (now_ns() < until)
            continue;
        struct pollfd ready[2] = {{.fd = readers.fd, .events = POLLIN}, {.fd = readers.wake, .events = POLLIN}};
        poll(ready, 2, -1);
    }
}

/* Memory to read to. NULL: they are to stop. */
static Room *take_room(void)
{
    pthread_mutex_lock(&readers.lock);
    while (!readers.free && !readers.is_stopping)
        pthread_cond_wait(&readers.freed, &readers.lock);
    Room *room = readers.is_stopping ? NULL : readers.free;
    if (room)
        readers.free = room->next;
    pthread_mutex_unlock(&readers.lock);
    return room;
}

static void give_room(Room *room)
{
    room->next = readers.free;
    readers.free = room;
    pthread_cond_signal(&readers.freed);
}

static void queue_room(Room *room, int length)
{
    pthread_mutex_lock(&readers.lock);
    room->length = length, room->next = NULL;
    *readers.last = room;
    readers.last = &room->next;
    uint64_t one = 1;
    if (readers.first == room && write(readers.queued, &one, sizeof one) < 0)
        abort(); /* nobody would ever see it */
    pthread_mutex_unlock(&readers.lock);
}

/* Of a kind that may be answered here. Others are queued in the order in which they came. */
static int is_asked_most(const Room *room)
{
    uint32_t opcode = ((const struct fuse_in_header *)room->bytes)->opcode;
    return opcode == FUSE_GETXATTR || opcode == FUSE_IOCTL || (opcode < 64 && readers.way.shown >> opcode & 1);
}

/* 0: Python has to answer. */
static int answer_here(const Room *room, size_t length)
{
    if (answers_itself(readers.fd, room->bytes, length))
        return 1;
    uint64_t made = readers.way.answer(readers.way.door, readers.fd, room->bytes, length);
    if (made > 1)
        __atomic_store_n(place_of(made), made, __ATOMIC_RELAXED);
    return made != 0;
}

/* Its answer takes a while, and another request is there: another reader may have it meanwhile. */
static int lets_others_go_on(const Room *room, int length)
{
    const struct fuse_in_header *in = (const void *)room->bytes;
    const struct fuse_read_in *read = (const void *)(in + 1);
    int is_long = length >= LONG || (in->opcode == FUSE_READ && length >= (int)(sizeof *in + sizeof *read) && read->size >= LONG);
    struct pollfd ready = {.fd = readers.fd, .events = POLLIN};
    return is_long && poll(&ready, 1, 0) > 0;
}

/* Who has the turn keeps it while there is not more to do than one can: to wake another one costs more than most answers. */
static void *read_requests(void *none)
{
    Room *room = NULL;
    int64_t answered_at = 0;
    int length = 0;
    pthread_mutex_lock(&readers.turn);
    while (room || (room = take_room())) {
        length = read_next(room, now_ns() - answered_at < SPIN_GAP_NS);
        if (length <= 0)
            break;
        room->read_at = profile_begin();
        int is_shown = is_asked_most(room), others_go_on = is_shown && lets_others_go_on(room, length);
        if (others_go_on)
            pthread_mutex_unlock(&readers.turn);
        if (is_shown && answer_here(room, (size_t)length)) {
            profile_request(room->bytes, (size_t)length, room->read_at);
            answered_at = now_ns();
        }
        else /* before it waits for its turn: who has that may wait for a request that comes after the answer to this one */
            queue_room(room, length), room = NULL;
        if (others_go_on)
            pthread_mutex_lock(&readers.turn);
    }
    pthread_mutex_unlock(&readers.turn);
    if (room && length < 0)
        queue_room(room, length); /* pyfuse3 decides; ENODEV: the mount is gone */
    else if (room) {
        pthread_mutex_lock(&readers.lock);
        give_room(room);
        pthread_mutex_unlock(&readers.lock);
    }
    return NULL;
}

/* The next request that was queued, as `receive` has it. */
static int receive_queued(struct fuse_session *se)
{
    pthread_mutex_lock(&readers.lock);
    Room *room = readers.first, *former = readers.present;
    if (room && !(readers.first = room->next)) {
        uint64_t count;
        readers.last = &readers.first;
        if (read(readers.queued, &count, sizeof count) < 0)
            abort();
    }
    if (!room && !readers.count && !former) { /* they have stopped: it reads by itself */
        former = readers.free;
        readers.free = former->next;
    }
    readers.present = room || readers.count ? room : former;
    if (former && former != readers.present)
        give_room(former);
    pthread_mutex_unlock(&readers.lock);
    if (!readers.present)
        return -EAGAIN;
    if (!request_room.is_lent)
        munmap(request_room.bytes, request_room.size);
    request_room.bytes = readers.present->bytes, request_room.size = readers.present->size, request_room.is_lent = 1;
    if (!room)
        return receive(se);
    if (session_exited(se))
        return 0;
    if (room->length == -ENODEV) {
        session_exit(se);
        return 0;
    }
    return room->length;
}

static void forget_all(const struct fuse_in_header *in, size_t size)
{
    const struct fuse_batch_forget_in *batch = (const void *)(in + 1);
    const struct fuse_forget_one *one = (const void *)(batch + 1);
    if (size < sizeof(*in) + sizeof(*batch))
        return;
    size_t room = (size - sizeof(*in) - sizeof(*batch)) / sizeof(*one);
    for (size_t index = 0; index < batch->count && index < room; index++)
        forget_plain(one[index].nodeid);
}

/* -- answers of Python without a task ----------------------------------------------------------- */

static void split(double seconds, uint64_t *whole, uint32_t *nanoseconds)
{
    double kept = seconds < 0 ? 0 : seconds < 1e9 ? seconds : 1e9;
    *whole = (uint64_t)kept;
    *nanoseconds = (uint32_t)((kept - floor(kept)) * 1e9);
}

/* An attribute's value. Where there is none, an exception is set. */
static uint64_t number_of(PyObject *from, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(from, name);
    uint64_t number = value ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    return number;
}

static uint64_t time_of(PyObject *from, PyObject *name, uint32_t *nanoseconds)
{
    PyObject *value = PyObject_GetAttr(from, name);
    long long time = value ? PyLong_AsLongLong(value) : 0, billion = 1000000000, rest = (time % billion + billion) % billion;
    Py_XDECREF(value);
    *nanoseconds = (uint32_t)rest;
    return (uint64_t)((time - rest) / billion);
}

static struct fuse_attr attributes_of(PyObject *from)
{
    struct fuse_attr out = {.blksize = BLOCK_SIZE};
    out.ino = number_of(from, names_of.ino);
    out.mode = (uint32_t)number_of(from, names_of.mode);
    out.nlink = (uint32_t)number_of(from, names_of.nlink);
    out.uid = (uint32_t)number_of(from, names_of.uid);
    out.gid = (uint32_t)number_of(from, names_of.gid);
    out.rdev = (uint32_t)number_of(from, names_of.rdev);
    out.size = number_of(from, names_of.size);
    out.blocks = number_of(from, names_of.blocks);
    out.atime = time_of(from, names_of.atime, &out.atimensec);
    out.mtime = time_of(from, names_of.mtime, &out.mtimensec);
    out.ctime = time_of(from, names_of.ctime, &out.ctimensec);
    return out;
}

static int send_answer(int fd, uint64_t to, void *answer, size_t size)
{
    struct fuse_out_header *out = answer;
    *out = (struct fuse_out_header){.len = (uint32_t)size, .unique = to};
    if (write(fd, answer, size) < 0 && errno != ENOENT) /* who asked was killed */
        PySys_WriteStderr("kvfuse: the kernel refuses an answer: %s\n", strerror(errno));
    return 1;
}

/* ``found``: (attributes, or None for no such name; seconds for the name; seconds for these), or None. It is consumed. */
static int answer_found(int fd, const struct fuse_in_header *in, PyObject *found)
{
    struct {
        struct fuse_out_header header;
        struct fuse_entry_out entry;
    } name = {0};
    struct {
        struct fuse_out_header header;
        struct fuse_attr_out attr;
    } inode = {0};
    PyObject *attributes;
    double name_seconds, seconds;
    if (!found || found == Py_None || !PyArg_ParseTuple(found, "Odd", &attributes, &name_seconds, &seconds)) {
        Py_XDECREF(found);
        return 0;
    }
    split(name_seconds, &name.entry.entry_valid, &name.entry.entry_valid_nsec);
    if (attributes != Py_None) {
        split(seconds, &name.entry.attr_valid, &name.entry.attr_valid_nsec);
        name.entry.attr = attributes_of(attributes);
        name.entry.nodeid = name.entry.attr.ino;
    }
    Py_DECREF(found);
    if (PyErr_Occurred())
        return 0;
    if (in->opcode == FUSE_LOOKUP)
        return send_answer(fd, in->unique, &name, sizeof name);
    inode.attr.attr_valid = name.entry.attr_valid, inode.attr.attr_valid_nsec = name.entry.attr_valid_nsec;
    inode.attr.attr = name.entry.attr;
    return send_answer(fd, in->unique, &inode, sizeof inode);
}

static int forget_one(uint64_t ino, uint64_t count)
{
    PyObject *none = PyObject_CallFunction(at_once.forget, "KK", (unsigned long long)ino, (unsigned long long)count);
    Py_XDECREF(none);
    return none != NULL;
}

/* 0: it is for pyfuse3. ``rest``: of the request, after its header. */
static int answers_at_once(int fd, const struct fuse_in_header *in, const char *rest, size_t size)
{
    struct fuse_out_header done;
    PyObject *found = NULL;
    int is_answered = 0;
    if (in->opcode == FUSE_LOOKUP && size && !rest[size - 1])
        is_answered = answer_found(fd, in, PyObject_CallFunction(at_once.look_up, "Ky", (unsigned long long)in->nodeid, rest));
    else if (in->opcode == FUSE_GETATTR)
        is_answered = answer_found(fd, in, PyObject_CallFunction(at_once.get_attributes, "K", (unsigned long long)in->nodeid));
    else if (in->opcode == FUSE_FORGET && size >= sizeof(struct fuse_forget_in)) {
        forget_one(in->nodeid, ((const struct fuse_forget_in *)rest)->nlookup);
        is_answered = 1;
    } else if (in->opcode == FUSE_BATCH_FORGET && size >= sizeof(struct fuse_batch_forget_in)) {
        const struct fuse_batch_forget_in *batch = (const void *)rest;
        const struct fuse_forget_one *one = (const void *)(batch + 1);
        size_t count = (size - sizeof *batch) / sizeof *one;
        for (size_t i = 0; i < count && i < batch->count; i++)
            if (!forget_one(one[i].nodeid, one[i].nlookup))
                PyErr_WriteUnraisable(at_once.forget);
        is_answered = 1;
    } else if (in->opcode == FUSE_RELEASE && size >= sizeof(struct fuse_release_in)) {
        found = PyObject_CallFunction(at_once.release, "K", (unsigned long long)((const struct fuse_release_in *)rest)->fh);
        is_answered = found == Py_True && send_answer(fd, in->unique, &done, sizeof done);
        Py_XDECREF(found);
    }
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(NULL);
    return is_answered;
}

static int is_answered(int fd, const char *bytes, size_t size)
{
    const struct fuse_in_header *in = (const void *)bytes;
    if (answers_itself(fd, bytes, size))
        return 1;
    if (size < sizeof *in || !at_once.look_up)
        return 0;
    if (in->opcode == FUSE_FORGET)
        forget_plain(in->nodeid);
    else if (in->opcode == FUSE_BATCH_FORGET)
        forget_all(in, size);
    return answers_at_once(fd, in, bytes + sizeof *in, size - sizeof *in);
}

static int is_readable(int fd, int64_t ns)
{
    struct pollfd coming = {.fd = fd, .events = POLLIN};
    return ppoll(&coming, 1, &(struct timespec){ns / 1000000000, ns % 1000000000}, NULL) > 0;
}

/* The next request, as `receive` has it; the event loop waits with this thread. So where it did not come soon the last times,
   most do not wait for it here. */
static int receive_soon(struct fuse_session *se)
{
    static unsigned missed;
    int size;
    if (readers.queued >= 0)
        return receive_queued(se);
    if (missed >= MISSED_MAX && ++missed % TRIALS)
        return -EAGAIN;
    Py_BEGIN_ALLOW_THREADS
    size = is_readable(session_fd(se), SOON_NS) ? receive(se) : -EAGAIN;
    Py_END_ALLOW_THREADS
    missed = size == -EAGAIN ? missed + 1 : 0;
    return size;
}

/* When the request in `request_room` was read; 0: nobody looks. */
static int64_t read_when(void)
{
    return readers.present && request_room.is_lent ? readers.present->read_at : profile_begin();
}

__attribute__((visibility("default"))) int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
    if (!make_room())
        return -ENOMEM;
    int size;
    int64_t began = 0;
    if (init.is_due) {
        memcpy(request_room.bytes, init.bytes, init.size);
        size = (int)init.size;
        init.is_due = 0;
    } else
        size = readers.queued >= 0 ? receive_queued(se) : receive(se);
    handled.began = read_when();
    while (size > 0 && is_answered(session_fd(se), request_room.bytes, (size_t)size)) {
        profile_request(request_room.bytes, (size_t)size, handled.began);
        began = began ? began : now_ns();
        size = now_ns() - began < TURN_NS ? receive_soon(se) : -EAGAIN;
        handled.began = read_when();
    }
    if (size == -EAGAIN)
        return -EINTR; /* pyfuse3 waits for the next one */
    buf->size = size > 0 ? size : 0;
    buf->flags = 0;
    return size;
}

static void change_answer(const struct fuse_init_in *asked, char *answer, size_t size)
{
    struct fuse_init_out *out = (void *)(answer + sizeof(struct fuse_out_header));
    if (size < sizeof(struct fuse_out_header) + sizeof(*out) || ((struct fuse_out_header *)answer)->error)
        return;
    uint64_t offered = asked->flags | (asked->flags & INIT_EXT ? (uint64_t)asked->flags2 << 32 : 0);
    uint64_t flags = (out->flags | (uint64_t)out->flags2 << 32 | (wire.wanted & offered)) & ~wire.unwanted;
    if (flags >> 32)
        flags |= INIT_EXT;
    out->flags = (uint32_t)flags;
    out->flags2 = (uint32_t)(flags >> 32);
    if (wire.background) {
        out->max_background = wire.background;
        out->congestion_threshold = (uint16_t)(wire.background / 4 * 3);
    }
    wire.answered = flags;
    size_t content_size = out->max_write > CONTENT_SIZE_MIN ? out->max_write : CONTENT_SIZE_MIN;
    request_room.size_wanted = content_size + HEADER_SIZE;
}

static int keep_init(const struct fuse_in_header *in, size_t size)
{
    if (!init.is_replayed) {
        init.size = size < sizeof(init.bytes) ? size : sizeof(init.bytes);
        memcpy(init.bytes, in, init.size);
    }
    return 1;
}

/* libfuse answers INIT with the flags that it knows, and writes to its descriptor: a socket of ours meanwhile. */
static int process_init(struct fuse_session *se, const struct fuse_buf *buf, const struct fuse_init_in *asked)
{
    char answer[4096];
    int ends[2], fd = session_fd(se), kernel = dup(fd);
    if (kernel < 0)
        return 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) {
        close(kernel);
        return 0;
    }
    dup2(ends[1], fd);
    process_buf(se, buf);
    ssize_t size = recv(ends[0], answer, sizeof(answer), MSG_DONTWAIT);
    dup3(kernel, fd, O_CLOEXEC);
    close(kernel);
    close(ends[0]);
    close(ends[1]);
    init.fd = fd;
    if (size > 0) {
        change_answer(asked, answer, size);
        if (!init.is_replayed && write(fd, answer, size) < 0)
            PySys_WriteStderr("kvfuse: the kernel refuses INIT's answer: %s\n", strerror(errno));
    }
    return 1;
}

/* pyfuse3 does not know LSEEK. It gets it as a GETXATTR, whose answer may be the 8 bytes that LSEEK's has, too. */
static void process_seek(struct fuse_session *se, const struct fuse_in_header *in)
{
    struct {
        struct fuse_in_header header;
        struct fuse_getxattr_in asked;
        char name[sizeof(SEEK)];
    } request = {.header = *in, .asked.size = sizeof(struct fuse_lseek_out), .name = SEEK};
    request.header.len = sizeof(request);
    request.header.opcode = FUSE_GETXATTR;
    seek = *(const struct fuse_lseek_in *)(in + 1);
    process_buf(se, &(struct fuse_buf){.mem = &request, .size = sizeof(request)});
}

__attribute__((visibility("default"))) void fuse_session_process_buf(struct fuse_session *se, const struct fuse_buf *asked)
{
    struct fuse_buf request = *asked, *buf = &request; /* pyfuse3 frees what its own has */
    buf->mem = request_room.bytes;
    const struct fuse_in_header *in = header_of(buf->size);
    seek.whence = 0;
    unique = in ? in->unique : 0, nodeid = in ? in->nodeid : 0;
    handled.pid = in ? in->pid : 0, handled.op = in ? in->opcode : 0, handled.size = in ? profile_size(in, buf->size) : 0;
    is_from_the_cache = in && in->opcode == FUSE_WRITE && buf->size >= sizeof(*in) + sizeof(struct fuse_write_in)
        && ((const struct fuse_write_in *)(in + 1))->write_flags & FUSE_WRITE_CACHE;
    if (in && in->opcode == FUSE_INIT && buf->size >= sizeof(*in) + sizeof(struct fuse_init_in)
        && keep_init(in, buf->size) && process_init(se, buf, (const void *)(in + 1)))
        return;
    if (in && readers.heir && readers.way.take_over(readers.way.door, in, buf->size)) {
        PyObject *none = PyObject_CallNoArgs(readers.heir);
        if (!none)
            PyErr_WriteUnraisable(readers.heir);
        Py_XDECREF(none);
    }
    if (in && in->opcode == FUSE_LSEEK && buf->size >= sizeof(*in) + sizeof(seek))
        return process_seek(se, in);
    if (in && (in->opcode == FUSE_SETXATTR || in->opcode == FUSE_FORGET))
        forget_plain(in->nodeid);
    else if (in && in->opcode == FUSE_BATCH_FORGET)
        forget_all(in, buf->size);
    process_buf(se, buf);
}

/* -- answers ----------------------------------------------------------------------------------- */

/* An answer may be a view of a segment's file, of which the page tables have nothing yet. Not touched here: a medium that
fails would be a signal, and is EFAULT where the kernel copies. What was populated just now still is: it costs a fifth of
the copy. */
static void populate(const char *bytes, size_t size)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)bytes / page * page, end = ((uintptr_t)bytes + size + page - 1) / page * page;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    struct populated *before = &populated[(((uintptr_t)bytes ^ size) * 0x9E3779B97F4A7C15ull) >> 52];
    if (before->bytes == bytes && before->size == size && now.tv_sec <= before->second + POPULATED_SECONDS)
        return;
    if (size && madvise((void *)begin, end - begin, MADV_POPULATE_READ) == 0)
        *before = (struct populated){bytes, size, now.tv_sec};
}

__attribute__((visibility("default"))) int fuse_reply_buf(fuse_req_t req, const char *bytes, size_t size)
{
    populate(bytes, size);
    return reply_buf(req, bytes, size);
}

static struct fuse_open_out opened(const struct fuse_file_info *fi)
{
    struct fuse_open_out out = {.fh = fi->fh & HANDLE_MASK};
    out.open_flags = (fi->direct_io ? FOPEN_DIRECT_IO : 0) | (fi->keep_cache ? FOPEN_KEEP_CACHE : 0)
        | (fi->nonseekable ? FOPEN_NONSEEKABLE : 0) | (fi->fh & MARK_NO_FLUSH ? NO_FLUSH : 0)
        | (fi->fh & MARK_DIRECT ? FOPEN_DIRECT_IO | PARALLEL_DIRECT_WRITES : 0);
    return out;
}

static struct fuse_entry_out entry_of(const struct fuse_entry_param *e)
{
    struct fuse_entry_out out = {.nodeid = e->ino, .generation = e->generation};
    split(e->entry_timeout, &out.entry_valid, &out.entry_valid_nsec);
    split(e->attr_timeout, &out.attr_valid, &out.attr_valid_nsec);
    out.attr.ino = e->attr.st_ino;
    out.attr.mode = e->attr.st_mode;
    out.attr.nlink = e->attr.st_nlink;
    out.attr.uid = e->attr.st_uid;
    out.attr.gid = e->attr.st_gid;
    out.attr.rdev = e->attr.st_rdev;
    out.attr.size = e->attr.st_size;
    out.attr.blksize = e->attr.st_blksize;
    out.attr.blocks = e->attr.st_blocks;
    out.attr.atime = e->attr.st_atim.tv_sec;
    out.attr.mtime = e->attr.st_mtim.tv_sec;
    out.attr.ctime = e->attr.st_ctim.tv_sec;
    out.attr.atimensec = e->attr.st_atim.tv_nsec;
    out.attr.mtimensec = e->attr.st_mtim.tv_nsec;
    out.attr.ctimensec = e->attr.st_ctim.tv_nsec;
    return out;
}

__attribute__((visibility("default"))) int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    struct fuse_open_out out = opened(fi);
    return reply_buf(req, (const char *)&out, sizeof(out));
}

__attribute__((visibility("default"))) int fuse_reply_create(
    fuse_req_t req, const struct fuse_entry_param *e, const struct fuse_file_info *fi)
{
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } out = {entry_of(e), opened(fi)};
    if ((wire.knows_plain || fi->fh & MARK_NO_FLUSH) && fi->fh & HANDLE_MASK) /* in relaxed folders others are heard */
        *place_of(e->ino) = e->ino;
    return reply_buf(req, (const char *)&out, sizeof(out));
}

/* -- for Python --------------------------------------------------------------------------------- */

static PyObject *configure(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"wanted", "unwanted", "background", "knows_plain", NULL};
    unsigned long long wanted, unwanted;
    unsigned short background;
    int knows_plain;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KKHp", names, &wanted, &unwanted, &background, &knows_plain))
        return NULL;
    memset(&wire, 0, sizeof(wire));
    wire.wanted = wanted;
    wire.unwanted = unwanted;
    wire.background = background;
    wire.knows_plain = knows_plain;
    Py_RETURN_NONE;
}

static PyObject *answer_at_once(PyObject *self, PyObject *args)
{
    PyObject *all[4] = {NULL}, **kept[4] = {&at_once.look_up, &at_once.get_attributes, &at_once.forget, &at_once.release};
    if (!PyArg_ParseTuple(args, "|OOOO", &all[0], &all[1], &all[2], &all[3]))
        return NULL;
    for (int i = 0; i < 4; i++) {
        Py_XINCREF(all[i]);
        Py_XSETREF(*kept[i], all[i]);
    }
    Py_RETURN_NONE;
}

static PyObject *connection(PyObject *self, PyObject *none)
{
    if (init.fd < 0)
        Py_RETURN_NONE;
    return Py_BuildValue("(y#i)", init.bytes, (Py_ssize_t)init.size, init.fd);
}

static PyObject *replay(PyObject *self, PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#", &bytes, &size))
        return NULL;
    if (size < (Py_ssize_t)sizeof(struct fuse_in_header) || size > (Py_ssize_t)sizeof(init.bytes)
        || ((const struct fuse_in_header *)bytes)->opcode != FUSE_INIT) {
        PyErr_SetString(PyExc_ValueError, "that is no INIT");
        return NULL;
    }
    memcpy(init.bytes, bytes, size);
    init.size = size;
    init.is_replayed = init.is_due = 1;
    Py_RETURN_NONE;
}

static PyObject *start_readers(PyObject *self, PyObject *args)
{
    int fd, count;
    PyObject *capsule, *heir;
    if (!PyArg_ParseTuple(args, "iiOO", &fd, &count, &capsule, &heir))
        return NULL;
    const Way *way = PyCapsule_GetPointer(capsule, "kvfuse.door");
    if (!way)
        return NULL;
    if (readers.count || count < 1 || count > READERS_MAX) {
        PyErr_SetString(PyExc_ValueError, "there are readers, or too many are wanted");
        return NULL;
    }
    readers.way = *way, readers.fd = fd, readers.is_stopping = 0;
    Py_XSETREF(readers.heir, Py_NewRef(heir));
    if (readers.queued < 0) {
        readers.last = &readers.first;
        readers.queued = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), readers.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        for (int i = 0; readers.queued >= 0 && readers.wake >= 0 && i < count + ROOMS_MORE; i++) {
            Room *room = calloc(1, sizeof *room);
            if (!room || !(room->bytes = map_room(request_room.size_wanted)))
                return PyErr_NoMemory();
            room->size = request_room.size_wanted;
            give_room(room);
        }
        if (readers.queued < 0 || readers.wake < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
    int error = 0;
    while (readers.count < count && !error) {
        error = pthread_create(&readers.threads[readers.count], NULL, read_requests, NULL);
        readers.count += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return PyErr_Format(PyExc_OSError, "only %d of %d readers could be started: %s", readers.count, count, strerror(error));
    Py_RETURN_NONE;
}

static PyObject *source(PyObject *self, PyObject *args)
{
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    pthread_mutex_lock(&readers.lock);
    fd = readers.count || readers.first ? readers.queued : fd;
    pthread_mutex_unlock(&readers.lock);
    return PyLong_FromLong(fd);
}

static PyObject *end_way(PyObject *self, PyObject *none)
{
    Py_CLEAR(readers.heir);
    Py_RETURN_NONE;
}

static PyObject *are_queued(PyObject *self, PyObject *none)
{
    pthread_mutex_lock(&readers.lock);
    int are = readers.first != NULL;
    pthread_mutex_unlock(&readers.lock);
    return PyBool_FromLong(are);
}

static PyObject *await_request(PyObject *self, PyObject *args)
{
    int fd, is_there;
    double seconds;
    if (!PyArg_ParseTuple(args, "id", &fd, &seconds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    is_there = is_readable(fd, (int64_t)(seconds * 1e9));
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_there);
}

static PyObject *stop_readers(PyObject *self, PyObject *none)
{
    uint64_t one = 1, count;
    if (!readers.count)
        Py_RETURN_NONE;
    pthread_mutex_lock(&readers.lock);
    __atomic_store_n(&readers.is_stopping, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&readers.freed);
    pthread_mutex_unlock(&readers.lock);
    if (write(readers.wake, &one, sizeof one) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_BEGIN_ALLOW_THREADS
    for (; readers.count; readers.count--)
        pthread_join(readers.threads[readers.count - 1], NULL);
    Py_END_ALLOW_THREADS
    if (read(readers.wake, &count, sizeof count) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *self, PyObject *ino)
{
    uint64_t number = PyLong_AsUnsignedLongLong(ino);
    if (PyErr_Occurred())
        return NULL;
    forget_plain(number);
    Py_RETURN_NONE;
}

static PyObject *counts(PyObject *self, PyObject *none)
{
    return Py_BuildValue("{s:K,s:K}", "flags", (unsigned long long)wire.answered, "capability", wire.capability_count);
}

static PyObject *request(PyObject *self, PyObject *none)
{
    return Py_BuildValue("KO", (unsigned long long)(unique & ~SENT_AGAIN), unique & SENT_AGAIN ? Py_True : Py_False);
}

static PyObject *node(PyObject *self, PyObject *none) { return PyLong_FromUnsignedLongLong(nodeid); }

static PyObject *begin_profiled(PyObject *self, PyObject *none)
{
    return Py_BuildValue("KKKKL", handled.pid, handled.op, nodeid, handled.size, (long long)handled.began);
}

static PyObject *end_profiled(PyObject *self, PyObject *args)
{
    unsigned long long pid, op, inode, size;
    long long began;
    int has_failed;
    if (!PyArg_ParseTuple(args, "(KKKKL)p", &pid, &op, &inode, &size, &began, &has_failed))
        return NULL;
    if (began)
        profile_note(pid, op, inode, size, began, has_failed);
    Py_RETURN_NONE;
}

static PyObject *profile_requests(PyObject *self, PyObject *on)
{
    int is_on = PyObject_IsTrue(on);
    if (is_on < 0)
        return NULL;
    return profile_turn(is_on) ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *take_profile(PyObject *self, PyObject *none)
{
    ProfileRow *rows = malloc(PROFILE_ROWS * sizeof *rows);
    if (!rows)
        return PyErr_NoMemory();
    size_t count;
    Py_BEGIN_ALLOW_THREADS
    count = profile_take(rows);
    Py_END_ALLOW_THREADS
    PyObject *taken = PyBytes_FromStringAndSize((const char *)rows, (Py_ssize_t)(count * sizeof *rows));
    free(rows);
    return taken;
}

static PyObject *writes_back(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(is_from_the_cache);
}

static PyObject *sought(PyObject *self, PyObject *none)
{
    if (seek.whence != SEEK_DATA && seek.whence != SEEK_HOLE)
        Py_RETURN_NONE;
    return Py_BuildValue("LO", (long long)seek.offset, seek.whence == SEEK_DATA ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"begin_profiled", begin_profiled, METH_NOARGS, "See fusewire.py."},
    {"end_profiled", end_profiled, METH_VARARGS, "See fusewire.py."},
    {"profile_requests", profile_requests, METH_O, "See fusewire.py."},
    {"take_profile", take_profile, METH_NOARGS, "See fusewire.py."},
    {"sought", sought, METH_NOARGS, "See fusewire.py."},
    {"writes_back", (PyCFunction)writes_back, METH_NOARGS, "See fusewire.py."},
    {"request", (PyCFunction)request, METH_NOARGS, "See fusewire.py."},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS, "See fusewire.py."},
    {"answer_at_once", answer_at_once, METH_VARARGS, "See fusewire.py."},
    {"connection", connection, METH_NOARGS, "See fusewire.py."},
    {"replay", replay, METH_VARARGS, "See fusewire.py."},
    {"start_readers", start_readers, METH_VARARGS, "See fusewire.py."},
    {"source", source, METH_VARARGS, "See fusewire.py."},
    {"end_way", end_way, METH_NOARGS, "See fusewire.py."},
    {"are_queued", are_queued, METH_NOARGS, "See fusewire.py."},
    {"await_request", await_request, METH_VARARGS, "See fusewire.py."},
    {"stop_readers", stop_readers, METH_NOARGS, "See fusewire.py."},
    {"node", node, METH_NOARGS, "See fusewire.py."},
    {"forget", forget, METH_O, "See fusewire.py."},
    {"counts", counts, METH_NOARGS, "See fusewire.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvfuse.native._fusewire", "See fusewire.py.", -1, methods,
                                    NULL, NULL, NULL, NULL};

static int find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    if (!found) {
        PyErr_Format(PyExc_ImportError, "libfuse has no %s", name);
        return 0;
    }
    memcpy(function, &found, sizeof(found));
    return 1;
}

PyMODINIT_FUNC PyInit__fusewire(void)
{
    void *library = dlopen("libfuse3.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = dlopen("libfuse3.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        PyErr_SetString(PyExc_ImportError, "there is no libfuse3");
        return NULL;
    }
    if (!find(library, "fuse_session_process_buf", &process_buf) || !find(library, "fuse_reply_buf", &reply_buf)
        || !find(library, "fuse_session_fd", &session_fd) || !find(library, "fuse_session_exited", &session_exited)
        || !find(library, "fuse_session_exit", &session_exit))
        return NULL;
    static const char *const words[] = {"ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blocks", "atime", "mtime", "ctime"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!(((PyObject **)&names_of)[i] = PyUnicode_InternFromString(words[i])))
            return NULL;
    return PyModule_Create(&module);
}
