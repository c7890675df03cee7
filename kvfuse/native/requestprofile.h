/* Counts the kernel's requests by process, place and kind, while somebody looks; see `volume/measures/profiling.py`.

   A row is of one process, opcode and place: the inode that a request is about, or of a block the place of its table. Rows
   are taken out, and begin anew, each time Python asks. What finds no room is counted in one row without a place. Any thread
   may note; off, a request costs one load. */

#ifndef KVFUSE_REQUESTPROFILE_H
#define KVFUSE_REQUESTPROFILE_H

#include <linux/fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PROFILE_ROWS = 1 << 12, PROFILE_TIMES = 64, PROFILE_TRIES = 16, PROFILE_TABLE_SHIFT = 52 };

#define PROFILE_BLOCK_MARK (1ull << 62)

/* A row as Python gets it: 8-byte numbers, then times: two classes for each doubling of nanoseconds. */
typedef struct {
    uint64_t pid, op, place, calls, failed, bytes, ns;
    uint32_t times[PROFILE_TIMES];
} ProfileRow;

static struct {
    pthread_mutex_t lock;
    ProfileRow *rows; /* the last one has what found no room */
    int is_on;
} profile = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t profile_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The time, or 0: nobody looks. */
static int64_t profile_begin(void) { return __atomic_load_n(&profile.is_on, __ATOMIC_RELAXED) ? profile_now() : 0; }

static unsigned profile_class(uint64_t ns)
{
    if (ns < 2)
        return 0;
    unsigned top = 63 - (unsigned)__builtin_clzll(ns), class = 2 * top + (ns >> (top - 1) & 1);
    return class < PROFILE_TIMES ? class : PROFILE_TIMES - 1;
}

/* Bytes that a request asks for, or has. */
static uint64_t profile_size(const struct fuse_in_header *in, size_t length)
{
    const struct fuse_read_in *read = (const void *)(in + 1);
    const struct fuse_write_in *write = (const void *)(in + 1);
    if (in->opcode == FUSE_READ && length >= sizeof *in + sizeof *read)
        return read->size;
    return in->opcode == FUSE_WRITE && length >= sizeof *in + sizeof *write ? write->size : 0;
}

/* The caller has the lock. */
static ProfileRow *profile_row(uint64_t pid, uint64_t op, uint64_t place)
{
    uint64_t at = (pid * 0x9E3779B97F4A7C15ull ^ op * 0xD6E8FEB86659FD93ull ^ place * 0xC2B2AE3D27D4EB4Full) >> 20;
    for (int i = 0; i < PROFILE_TRIES; i++) {
        ProfileRow *row = profile.rows + (at + (uint64_t)i) % (PROFILE_ROWS - 1);
        if (!row->calls)
            row->pid = pid, row->op = op, row->place = place;
        if (row->pid == pid && row->op == op && row->place == place)
            return row;
    }
    return profile.rows + PROFILE_ROWS - 1;
}

static void profile_note(uint64_t pid, uint64_t op, uint64_t inode, uint64_t bytes, int64_t began, int has_failed)
{
    uint64_t ns = (uint64_t)(profile_now() - began);
    uint64_t place = inode & PROFILE_BLOCK_MARK ? inode >> PROFILE_TABLE_SHIFT << PROFILE_TABLE_SHIFT : inode;
    pthread_mutex_lock(&profile.lock);
    if (profile.rows) {
        ProfileRow *row = profile_row(pid, op, place);
        row->calls++, row->failed += has_failed, row->bytes += has_failed ? 0 : bytes, row->ns += ns;
        row->times[profile_class(ns)]++;
    }
    pthread_mutex_unlock(&profile.lock);
}

/* A request that was answered without pyfuse3. ``began`` 0: nobody looked then. */
static void profile_request(const char *request, size_t length, int64_t began)
{
    const struct fuse_in_header *in = (const void *)request;
    if (began)
        profile_note(in->pid, in->opcode, in->nodeid, profile_size(in, length), began, 0);
}

/* 0: there is no memory. */
static int profile_turn(int on)
{
    pthread_mutex_lock(&profile.lock);
    if (on && !profile.rows)
        profile.rows = calloc(PROFILE_ROWS, sizeof *profile.rows);
    else if (!on) {
        free(profile.rows);
        profile.rows = NULL;
    }
    int is_on = profile.rows != NULL;
    __atomic_store_n(&profile.is_on, is_on, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&profile.lock);
    return is_on == on;
}

/* Rows since the last call go to ``rows``, which has room for all. How many there are. */
static size_t profile_take(ProfileRow *rows)
{
    size_t count = 0;
    pthread_mutex_lock(&profile.lock);
    for (size_t i = 0; profile.rows && i < PROFILE_ROWS; i++)
        if (profile.rows[i].calls) {
            rows[count++] = profile.rows[i];
            profile.rows[i] = (ProfileRow){0};
        }
    pthread_mutex_unlock(&profile.lock);
    return count;
}

#endif
