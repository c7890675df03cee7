/* Blocks between hosts: what goes over a connection, by `peer_wire.py`, and how threads without the interpreter send and
   receive. A connection is one of `greeting.BLOCKS`: Python greeted, and uses it no more. */

#ifndef KVFUSE_PEERWIRE_H
#define KVFUSE_PEERWIRE_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"
#include "lending.h"

#define QUESTION_MAGIC 0x4250564Bu /* "KVPB" */
#define ANSWER_MAGIC 0x4350564Bu   /* "KVPC" */
#define PARENT_MAGIC 0x5450564Bu   /* "KVPT" */
#define SECOND_NS 1000000000ll
enum { ROWS_MAX = 256, NAMED_MAX = 3, FINAL = 1, QUESTION_BYTES_MAX = 64 << 20, STACK = 256 << 10 };
enum { HERE = 1, ABSENT = 2, ELSEWHERE = 4, BUSY = 5, STORED = 6 }; /* as `neighbours.Answer` has them */
enum { ENDED = 0, MALFORMED = -1, LATE = -2 };

typedef struct {
    uint32_t magic, row_count;
    uint64_t number, load, spare;
} MessageHead;

typedef struct {
    uint32_t answer, row; /* ``row``: which one of the question's */
    uint64_t named[NAMED_MAX];
} AnswerRow;

/* The row of a message that names the span of the next question, as `traceparent` packs it. */
typedef struct {
    uint8_t bytes[32];
} ParentRow;

_Static_assert(sizeof(MessageHead) == 32 && sizeof(AnswerRow) == 32 && sizeof(ParentRow) == 32, "heads and rows have 32 bytes");

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static void ring(int bell)
{
    uint64_t one = 1;
    if (write(bell, &one, sizeof one) < 0 && errno != EAGAIN)
        abort(); /* nobody would ever see it */
}

/* Wait for a socket. 0: the time is over; ``until_ns`` -1: there is none. */
static int wait_for(int fd, short events, int64_t until_ns)
{
    struct pollfd ready = {.fd = fd, .events = events};
    for (;;) {
        int64_t left = until_ns < 0 ? 0 : until_ns - now_ns();
        if (until_ns >= 0 && left <= 0)
            return 0;
        int found = poll(&ready, 1, until_ns < 0 ? -1 : (int)(left / 1000000 + 1));
        if (found > 0)
            return 1;
        if (found < 0 && errno != EINTR)
            return 1; /* the next call says what it is */
    }
}

/* Have at least ``least`` bytes at the start of memory that has ``have`` and room for ``most``. 1, ENDED or LATE. */
static int receive_some(int fd, void *memory, size_t *have, size_t least, size_t most, int64_t until_ns)
{
    while (*have < least) {
        ssize_t count = recv(fd, (char *)memory + *have, most - *have, MSG_DONTWAIT);
        if (count > 0)
            *have += (size_t)count;
        else if (count < 0 && errno == EAGAIN) {
            if (!wait_for(fd, POLLIN, until_ns))
                return LATE;
        } else if (!count || errno != EINTR)
            return ENDED;
    }
    return 1;
}

/* Send all pieces, which are changed. 1, ENDED or LATE. */
static int send_all(int fd, struct iovec *pieces, size_t count, int64_t until_ns)
{
    while (count) {
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            if (!wait_for(fd, POLLOUT, until_ns))
                return LATE;
            continue;
        }
        if (sent < 0 && errno != EINTR)
            return ENDED;
        for (; sent > 0 || (count && !pieces->iov_len); pieces++, count--) {
            if (sent < (ssize_t)pieces->iov_len) {
                pieces->iov_base = (char *)pieces->iov_base + sent, pieces->iov_len -= (size_t)sent;
                break;
            }
            sent -= (ssize_t)pieces->iov_len;
        }
    }
    return 1;
}

/* A thread that no signal interrupts. 0: there is none. */
static int start_thread(pthread_t *thread, void *(*run)(void *), void *of)
{
    sigset_t all, former;
    pthread_attr_t small;
    sigfillset(&all);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    int error = pthread_create(thread, &small, run, of);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    pthread_attr_destroy(&small);
    return !error;
}

#endif
