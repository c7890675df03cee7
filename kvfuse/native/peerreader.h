/* Receives blocks that were asked for by one connection: a thread has their bytes where they belong, sums them meanwhile,
   and shows those that are right. Nothing that comes is believed. Targets are written under the lock of the connection
   alone, so nothing writes to them once their question is given up. */

#ifndef KVFUSE_PEERREADER_H
#define KVFUSE_PEERREADER_H

#include "peerwire.h"

enum { GRANULE = 256 << 10, PIECES = 64, TOGETHER = 256 << 10, ALONE = 32 << 10, SINK = 64 << 10 };
enum { RIGHT = HERE, WRONG = -1, LOST = 0 }; /* results of a row, beside answers */
#define TOGETHER_NS (20 * 1000 * 1000ll)

typedef struct {
    uint8_t *target;
    uint32_t length, checksum, place; /* ``place``: in the landing */
    int32_t result, is_told;          /* ``is_told``: Python knows the result */
    uint64_t named[NAMED_MAX];
} AskedRow;

typedef struct Question {
    struct Question *next;
    uint64_t number;
    uint32_t count, left, untold; /* rows; those without a result; those with one that Python does not know */
    int is_abandoned;
    LandingWay landing; /* its `landing` may be NULL */
    AskedRow rows[];
} Question;

typedef struct {
    pthread_mutex_t lock;
    pthread_t thread;
    int fd, bell, is_over, is_malformed, low;
    uint64_t last_number, load, bytes_left; /* ``load``: as the other side last told; ``bytes_left``: of what was asked */
    int64_t heard_ns; /* when something came last, or was asked while nothing was to come */
    Question *open;   /* also those that Python has not taken */
} Reader;

static Question *question_of(Reader *reader, uint64_t number)
{
    Question *one = reader->open;
    while (one && one->number != number)
        one = one->next;
    return one;
}

/* The socket is readable from so many bytes on. */
static void wake_from(Reader *reader, int size)
{
    if (reader->low != size && !setsockopt(reader->fd, SOL_SOCKET, SO_RCVLOWAT, &size, sizeof size))
        reader->low = size;
}

/* Some of the bytes that are left have come, or there will be none. Those that come soon are waited for together. */
static void wait_for_bytes(Reader *reader, uint64_t left)
{
    int size = left < TOGETHER ? (int)left : TOGETHER;
    wake_from(reader, size > ALONE ? size : 1);
    if (reader->low == 1)
        wait_for(reader->fd, POLLIN, -1);
    else if (!wait_for(reader->fd, POLLIN, now_ns() + TOGETHER_NS)) {
        wake_from(reader, 1);
        wait_for(reader->fd, POLLIN, -1);
    }
}

/* A row has its answer, or its bytes. Under the lock. Of a question that is given up nobody hears any more. */
static void answer_row(Reader *reader, Question *asked, AskedRow *row, int32_t result)
{
    row->result = result, row->is_told = asked->is_abandoned;
    reader->bytes_left -= row->length;
    asked->left--, asked->untold += !asked->is_abandoned;
}

/* Bytes of one message: of rows whose numbers are in ``here``, as long as the question is open. */
static int receive_blocks(Reader *reader, uint64_t number, const uint32_t *here, uint32_t here_count, const uint32_t *lengths)
{
    static __thread uint8_t sink[SINK];
    uint64_t left = 0;
    for (uint32_t i = 0; i < here_count; i++)
        left += lengths[i];
    uint32_t first = 0, done = 0, checksum = 0;
    while (left) {
        struct iovec pieces[PIECES];
        struct msghdr message = {.msg_iov = pieces};
        uint64_t room = GRANULE;
        int used = 0;
        pthread_mutex_lock(&reader->lock);
        Question *asked = question_of(reader, number);
        for (uint32_t i = first; i < here_count && used < PIECES && room; i++, used++) {
            uint32_t from = i == first ? done : 0, part = lengths[i] - from < room ? lengths[i] - from : (uint32_t)room;
            uint8_t *target = asked && !asked->is_abandoned ? asked->rows[here[i]].target : NULL; /* else for nobody */
            if (!target && part > SINK)
                part = SINK;
            pieces[used] = (struct iovec){target ? target + from : sink, part};
            room -= part;
            if (part < lengths[i] - from)
                room = 0;
        }
        message.msg_iovlen = (size_t)used;
        ssize_t came = recvmsg(reader->fd, &message, MSG_DONTWAIT);
        int error = came < 0 ? errno : 0;
        for (ssize_t rest = came; rest > 0;) {
            uint32_t part = lengths[first] - done < (uint64_t)rest ? lengths[first] - done : (uint32_t)rest;
            AskedRow *row = asked ? asked->rows + here[first] : NULL;
            int is_waited_for = asked && !asked->is_abandoned;
            if (is_waited_for)
                checksum = checksum_of(checksum, row->target + done, part);
            done += part, rest -= part;
            if (done < lengths[first])
                continue;
            int is_right = is_waited_for && checksum == row->checksum;
            if (is_right && asked->landing.landing)
                asked->landing.land(asked->landing.landing, row->place, checksum);
            if (row)
                answer_row(reader, asked, row, is_right ? RIGHT : WRONG);
            first++, done = checksum = 0;
        }
        if (came > 0)
            reader->heard_ns = now_ns(), left -= (uint64_t)came;
        pthread_mutex_unlock(&reader->lock);
        if (!came || (came < 0 && error != EAGAIN && error != EINTR))
            return ENDED;
        if (error == EAGAIN)
            wait_for_bytes(reader, left);
    }
    return 1;
}

/* One message, with all its bytes. 1, ENDED or MALFORMED. */
static int receive_message(Reader *reader)
{
    struct {
        MessageHead head;
        AnswerRow rows[ROWS_MAX];
    } message;
    uint32_t here[ROWS_MAX], lengths[ROWS_MAX], here_count = 0;
    size_t have = 0, size = sizeof message.head + sizeof *message.rows; /* a message has one row at least */
    wake_from(reader, 1);
    if (receive_some(reader->fd, &message, &have, size, size, -1) != 1)
        return ENDED;
    if (message.head.magic != ANSWER_MAGIC || !message.head.row_count || message.head.row_count > ROWS_MAX)
        return MALFORMED;
    size = sizeof message.head + message.head.row_count * sizeof *message.rows;
    if (receive_some(reader->fd, &message, &have, size, size, -1) != 1)
        return ENDED;
    int is_sound = 1;
    pthread_mutex_lock(&reader->lock);
    Question *asked = question_of(reader, message.head.number);
    reader->load = message.head.load, reader->heard_ns = now_ns();
    uint8_t is_answered[ROWS_MAX] = {0};
    for (uint32_t i = 0; i < message.head.row_count && is_sound; i++) {
        const AnswerRow *own = message.rows + i;
        AskedRow *row = asked && own->row < asked->count ? asked->rows + own->row : NULL;
        is_sound = row && !row->result && !is_answered[own->row] && own->answer >= HERE && own->answer <= STORED;
        if (!is_sound)
            break;
        is_answered[own->row] = 1;
        if (own->answer == HERE) {
            here[here_count] = own->row, lengths[here_count++] = row->length;
        } else {
            memcpy(row->named, own->named, sizeof row->named);
            answer_row(reader, asked, row, (int32_t)own->answer);
        }
    }
    pthread_mutex_unlock(&reader->lock);
    if (!is_sound)
        return MALFORMED;
    if (here_count < message.head.row_count)
        ring(reader->bell); /* who asked may ask others for these meanwhile */
    int result = receive_blocks(reader, message.head.number, here, here_count, lengths);
    if (here_count)
        ring(reader->bell);
    return result;
}

static void *receive_answers(void *of)
{
    Reader *reader = of;
    int result;
    while ((result = receive_message(reader)) == 1)
        ;
    shutdown(reader->fd, SHUT_RDWR);
    pthread_mutex_lock(&reader->lock);
    reader->is_over = 1, reader->is_malformed = result == MALFORMED;
    pthread_mutex_unlock(&reader->lock);
    ring(reader->bell);
    return NULL;
}

/* Nothing is written to the targets of a question any more; what has come until now is still told. */
static void abandon_question(Reader *reader, uint64_t number)
{
    pthread_mutex_lock(&reader->lock);
    Question *asked = question_of(reader, number);
    if (asked)
        asked->is_abandoned = 1, asked->landing.landing = NULL;
    pthread_mutex_unlock(&reader->lock);
}

#endif
