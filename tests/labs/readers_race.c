/* The readers of `_fusewire` and its queue, without an interpreter: threads read requests from a socket, an `answer` takes
   some, and one thread gets the others, while the readers are stopped and started again. Each request has to come once.
   Built with a sanitizer for threads. */

#include <Python.h>

#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#undef Py_RETURN_NONE
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }
#define Py_RETURN_NONE return (PyObject *)1

#include SOURCE

#include <assert.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>

enum { REQUESTS = 30000, ROUNDS = 60, COUNT = 3 };

static int ends[2], seen[REQUESTS];
static Way way;
static PyObject heir = {.ob_refcnt = 1 << 20}; /* takes nothing over */

/* What start_readers asks the interpreter for. */
int PyArg_ParseTuple(PyObject *args, const char *format, ...)
{
    va_list to;
    va_start(to, format);
    *va_arg(to, int *) = ends[0], *va_arg(to, int *) = COUNT, *va_arg(to, PyObject **) = NULL;
    *va_arg(to, PyObject **) = &heir;
    va_end(to);
    return 1;
}

void *PyCapsule_GetPointer(PyObject *capsule, const char *name) { return &way; }

static int fd_of(struct fuse_session *se) { return ends[0]; }
static int has_exited(struct fuse_session *se) { return 0; }

static void see(const void *request)
{
    const struct fuse_in_header *in = request;
    assert(in->unique < REQUESTS && !__atomic_fetch_add(&seen[in->unique], 1, __ATOMIC_RELAXED));
    assert(in->nodeid == in->unique * 3);
}

static uint64_t answer(void *door, int fd, const void *request, size_t size)
{
    const struct fuse_in_header *in = request;
    if (in->unique / 6 % 2 == 0)
        return 0;
    see(request);
    return 1;
}

static int is_seen(uint64_t i) { return __atomic_load_n(&seen[i], __ATOMIC_RELAXED); }

static void *ask(void *none)
{
    static const uint32_t kinds[] = {FUSE_LOOKUP, FUSE_WRITE, FUSE_READ, FUSE_GETXATTR, FUSE_READ, FUSE_READ};
    for (uint64_t i = 0; i < REQUESTS; i++) {
        struct {
            struct fuse_in_header head;
            struct fuse_read_in read;
        } in = {{.len = sizeof in, .opcode = kinds[i % 6], .unique = i, .nodeid = i * 3}, {.size = LONG}};
        assert(write(ends[1], &in, sizeof in) == sizeof in);
        while (i % 2 && !(is_seen(i) && is_seen(i - 1))) /* two at once, and then none until both are answered */
            sched_yield();
    }
    return NULL;
}

int main(void)
{
    assert(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) && !fcntl(ends[0], F_SETFL, O_NONBLOCK));
    session_fd = fd_of, session_exited = has_exited;
    way = (Way){.answer = answer, .shown = 1ull << FUSE_LOOKUP | 1ull << FUSE_READ};
    assert(make_room());
    pthread_t asking;
    pthread_create(&asking, NULL, ask, NULL);
    int total = 0;
    for (int round = 0; total < REQUESTS; round++) {
        int stops = round < ROUNDS && total < REQUESTS / 2; /* then nothing but an answer lets one go on */
        assert(start_readers(NULL, NULL));
        for (int i = 0; total < REQUESTS && (!stops || i < 40); i++) {
            struct pollfd ready = {.fd = readers.queued, .events = POLLIN};
            poll(&ready, 1, 20);
            int size = receive_queued(NULL);
            if (size > 0)
                see(request_room.bytes);
            total = 0;
            for (int j = 0; j < REQUESTS; j++)
                total += __atomic_load_n(&seen[j], __ATOMIC_RELAXED);
        }
        assert(stop_readers(NULL, NULL));
        for (int size; (size = receive_queued(NULL)) != -EAGAIN;) /* by itself, as the readers have stopped */
            see(request_room.bytes);
    }
    pthread_join(asking, NULL);
    printf("%d requests\n", total);
    return 0;
}
