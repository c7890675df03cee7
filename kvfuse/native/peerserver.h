/* Answers questions for blocks: a thread for each connection, and one question after the other. What of it is in memory is
   sent from there, some at a time, as long as its arena is pinned; what is on its way here is waited for. */

#ifndef KVFUSE_PEERSERVER_H
#define KVFUSE_PEERSERVER_H

#include "peercopies.h"

enum { PORTION = 4 << 20, REFERRED_SIZE = 64 << 10, ROWS_SECONDS = 5, SEND_SECONDS = 10, SEND_RATE = 10 << 20 };
#define ON_ITS_WAY_NS (100 * 1000 * 1000ll) /* for which a question waits for blocks that are to come */

typedef struct {
    uint64_t questions, rows, here, bytes, absent, elsewhere, busy, malformed, given_up;
} Served;

/* A question that named its span, and what it got: `SERVED_SPAN` of peer/served_spans.py. Times: ns since 1970. */
typedef struct {
    ParentRow parent;
    uint64_t client, begin_ns, end_ns, bytes;
    uint32_t rows, here;
} ServedSpan;

_Static_assert(sizeof(ServedSpan) == 72, "a span has 72 bytes");

enum { SPANS_MAX = 256 };

/* Those that Python has not taken; where there are too many, further ones are forgotten. */
typedef struct {
    pthread_mutex_t lock;
    int bell;
    uint32_t count;
    ServedSpan spans[SPANS_MAX];
} ServedSpans;

/* One host that asks: by all its connections. */
typedef struct Asking {
    uint64_t client, sending, served; /* ``sending``: bytes on their way to it; ``served``: that it got */
    uint32_t users;
    struct Asking *next;
} Asking;

typedef struct {
    Spread *spread;
    uint64_t in_flight; /* bytes that one host may have on their way to it */
    int has_disk;       /* Python may have blocks that are not in memory */
    int64_t send_ns;    /* for a message, beside those for its bytes */
    Served served;      /* changed by atomic operations */
    ServedSpans *spans; /* NULL: parents of questions are not heeded */
} Server;

typedef struct {
    Server *server;
    Asking *caller;
    const Lender *lender;
    uint8_t *copy; /* PORTION bytes, once they are needed */
    pthread_t thread;
    int fd, is_over;
    struct {
        MessageHead head;
        WantedRow rows[ROWS_MAX];
    } question;
    size_t have; /* bytes of it, and of those behind it */
    int has_parent;
    ServedSpan span; /* of the question, if it has a parent */
} Conversation;

static void count(uint64_t *counter, uint64_t by) { __atomic_fetch_add(counter, by, __ATOMIC_RELAXED); }

static uint32_t answer_of(Conversation *with, const WantedRow *row, int state, uint64_t *named)
{
    Server *server = with->server;
    int is_here = state >= LENT, is_final = row->flags & FINAL || (is_here && row->length < REFERRED_SIZE);
    if (choose_holders(server->spread, row->address, row->generation, with->caller->client, is_here, is_final, named))
        return ELSEWHERE;
    if (!is_here)
        return server->has_disk ? STORED : ABSENT;
    if (__atomic_add_fetch(&with->caller->sending, row->length, __ATOMIC_RELAXED) <= server->in_flight)
        return HERE;
    __atomic_fetch_sub(&with->caller->sending, row->length, __ATOMIC_RELAXED);
    return BUSY;
}

/* Answer some rows by one message; those that are on their way are put off, if ``later`` is given. The last thing that is
   done with what is lent: it is given back. 1, ENDED or LATE. */
static int answer_some(Conversation *with, const uint32_t *some, uint32_t some_count, uint32_t *later, uint32_t *later_count,
                       uint64_t *landed)
{
    Server *server = with->server;
    WantedRow rows[ROWS_MAX] = {{0}};
    Loan loans[ROWS_MAX];
    AnswerRow answers[ROWS_MAX];
    struct iovec pieces[ROWS_MAX + 2];
    uint32_t answered = 0, here = 0;
    uint64_t size = 0;
    for (uint32_t i = 0; i < some_count; i++)
        rows[i] = with->question.rows[some[i]];
    *landed = with->lender->lend(with->lender->core, rows, loans, some_count);
    for (uint32_t i = 0; i < some_count; i++) {
        if (loans[i].state == ON_ITS_WAY && later) {
            later[(*later_count)++] = some[i];
            continue;
        }
        AnswerRow *own = answers + answered++;
        *own = (AnswerRow){0, some[i], {0, 0, 0}};
        own->answer = answer_of(with, rows + i, loans[i].state, own->named);
        if (own->answer == HERE && loans[i].state == LENT_BRIEFLY) {
            if (!with->copy && !(with->copy = malloc(QUESTION_BYTES_MAX)))
                abort();
            memcpy(with->copy + size, loans[i].bytes, rows[i].length);
            loans[i].bytes = with->copy + size;
        }
        if (own->answer == HERE) {
            pieces[2 + here++] = (struct iovec){(void *)(uintptr_t)loans[i].bytes, rows[i].length};
            size += rows[i].length;
        }
        if (loans[i].state == LENT_BRIEFLY || (loans[i].state == LENT && own->answer != HERE))
            with->lender->give_back(with->lender->core, loans + i, 1);
        count(own->answer == HERE        ? &server->served.here
              : own->answer == ELSEWHERE ? &server->served.elsewhere
              : own->answer == BUSY      ? &server->served.busy
                                         : &server->served.absent, 1);
    }
    int result = 1;
    if (answered) {
        uint64_t load = __atomic_fetch_add(&server->spread->load, size, __ATOMIC_RELAXED);
        MessageHead head = {ANSWER_MAGIC, answered, with->question.head.number, load, 0};
        pieces[0] = (struct iovec){&head, sizeof head}, pieces[1] = (struct iovec){answers, answered * sizeof *answers};
        int64_t until = now_ns() + server->send_ns + (int64_t)(size * SECOND_NS / SEND_RATE);
        result = send_all(with->fd, pieces, here + 2, until);
        __atomic_fetch_sub(&server->spread->load, size, __ATOMIC_RELAXED);
        __atomic_fetch_sub(&with->caller->sending, size, __ATOMIC_RELAXED);
        count(&with->caller->served, size), count(&server->served.bytes, size), count(&server->served.rows, answered);
        with->span.here += here, with->span.bytes += size;
    }
    with->lender->give_back(with->lender->core, loans, some_count);
    return result;
}

static int answer_question(Conversation *with)
{
    uint32_t some[ROWS_MAX], later[ROWS_MAX], later_count = 0, row_count = with->question.head.row_count;
    uint64_t landed = 0;
    int result = 1;
    for (uint32_t at = 0; at < row_count && result == 1;) {
        uint32_t some_count = 0;
        uint64_t size = 0;
        do {
            size += with->question.rows[at].length;
            some[some_count++] = at++;
        } while (at < row_count && size + with->question.rows[at].length <= PORTION);
        result = answer_some(with, some, some_count, later, &later_count, &landed);
    }
    int64_t until = later_count ? now_ns() + ON_ITS_WAY_NS : 0;
    while (later_count && result == 1) {
        with->lender->wait(with->lender->core, landed, until);
        uint32_t some_count = later_count;
        int is_last = now_ns() >= until;
        memcpy(some, later, sizeof some);
        later_count = 0;
        result = answer_some(with, some, some_count, is_last ? NULL : later, &later_count, &landed);
    }
    return result;
}

static int is_sound_question(const WantedRow *rows, uint32_t row_count)
{
    uint64_t size = 0;
    for (uint32_t i = 0; i < row_count; i++) {
        size += rows[i].length;
        if (!rows[i].length)
            return 0;
    }
    return size <= QUESTION_BYTES_MAX;
}

static size_t size_of_question(const Conversation *with)
{
    return sizeof(MessageHead) + with->question.head.row_count * sizeof(WantedRow);
}

static void forget_question(Conversation *with)
{
    size_t size = size_of_question(with);
    with->have -= size;
    memmove(&with->question, (const char *)&with->question + size, with->have);
}

/* The next message is there, whose row may be a parent: rows of both kinds have one size. 1, ENDED or MALFORMED. */
static int hear_message(Conversation *with)
{
    const MessageHead *head = &with->question.head;
    int result = receive_some(with->fd, &with->question, &with->have, sizeof *head, sizeof with->question, -1);
    if (result != 1)
        return result;
    int is_parent = head->magic == PARENT_MAGIC;
    if ((head->magic != QUESTION_MAGIC && !is_parent) || !head->row_count || head->row_count > (is_parent ? 1 : ROWS_MAX))
        return MALFORMED;
    result = receive_some(with->fd, &with->question, &with->have, size_of_question(with), sizeof with->question,
                          now_ns() + ROWS_SECONDS * SECOND_NS);
    if (result != 1)
        return result == LATE ? MALFORMED : result;
    return is_parent || is_sound_question(with->question.rows, head->row_count) ? 1 : MALFORMED;
}

/* The next question is there, and its parent, if it has one. 1, ENDED or MALFORMED. */
static int hear_question(Conversation *with)
{
    int result;
    with->has_parent = 0;
    while ((result = hear_message(with)) == 1 && with->question.head.magic == PARENT_MAGIC) {
        with->has_parent = __atomic_load_n(&with->server->spans, __ATOMIC_ACQUIRE) != NULL;
        memcpy(&with->span.parent, with->question.rows, sizeof with->span.parent);
        forget_question(with);
    }
    return result;
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/* `answer_question`, and note how that was. */
static int answer_traced(Conversation *with)
{
    ServedSpans *all = with->server->spans;
    ServedSpan *own = &with->span;
    own->client = with->caller->client, own->rows = with->question.head.row_count, own->begin_ns = clock_ns();
    own->here = 0, own->bytes = 0;
    int result = answer_question(with);
    own->end_ns = clock_ns();
    pthread_mutex_lock(&all->lock);
    if (all->count < SPANS_MAX)
        all->spans[all->count++] = *own;
    pthread_mutex_unlock(&all->lock);
    ring(all->bell);
    return result;
}

static void *converse(void *of)
{
    Conversation *with = of;
    Server *server = with->server;
    int result;
    while ((result = hear_question(with)) == 1) {
        const MessageHead *head = &with->question.head;
        count(&server->served.questions, 1);
        tell_load(server->spread, with->caller->client, head->load);
        for (uint32_t i = 0; i < head->row_count; i++)
            if (with->question.rows[i].without)
                forget_holder(server->spread, with->question.rows[i].address, with->question.rows[i].generation,
                              with->question.rows[i].without);
        if ((result = with->has_parent ? answer_traced(with) : answer_question(with)) != 1)
            break;
        forget_question(with);
    }
    if (result == MALFORMED || result == LATE)
        count(result == LATE ? &server->served.given_up : &server->served.malformed, 1);
    shutdown(with->fd, SHUT_RDWR);
    __atomic_store_n(&with->is_over, 1, __ATOMIC_RELEASE);
    return NULL;
}

#endif
