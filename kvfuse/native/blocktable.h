/* The index of blocks in shared memory: how it is read, by any process that maps it, and how the daemon changes it.

   A table is one mapping: a header page, buckets, rows. A row is one block. A bucket is one cache line: numbers of up to
   12 rows, and a byte of the fingerprint of each. A block may be in two buckets, which two halves of its fingerprint
   choose. Buckets grow one at a time (linear hashing): bucket ``split`` gives its entries to a new one.

   A row has a version: odd while it describes a block. A reader

       finds the row by its fingerprint; the version must be odd
       copies the bytes from the row's arena, where it has one
       reads the version again: if it differs, throws the copy away

   The daemon makes the version even before it changes a row, or memory that a row describes, and odd afterwards. A fence
   stands between, on both sides: a reader whose copy has a byte from after the change sees the other version, too. As the
   version only grows, a row that was used again does not look like the former one. A block that replaces another has a
   row of its own, and its number takes the other's place in the bucket: the name is found at any time. Readers may miss a
   block whose entry moves to its other bucket twice while they look. They never find another block: the fingerprint is
   in the row. */

#ifndef KVFUSE_BLOCKTABLE_H
#define KVFUSE_BLOCKTABLE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TABLE_MAGIC 0x534B434F4C42564Bull /* "KVBLOCKS" */
enum { TABLE_VERSION = 4, PAGE = 4096, NAME_MAX_BYTES = 255, SUMS = 4, MULTIPLIER_ROWS = 2 + 1 + 64 };
enum { MULTIPLIERS = 256, ENTRIES = 12, BUCKETS_MIN = 16, NO_ROW = -1, FULL = -2 };
enum { TABLE_LIVE = 1, TABLE_ENDED = 2 };

typedef struct {
    uint64_t low, high;
} Fingerprint;

typedef struct {
    uint64_t version;
    Fingerprint fingerprint;
    uint32_t arena; /* 0: not in memory */
    uint32_t page;  /* of the first byte in the arena */
    uint32_t length, checksum;
    uint32_t slab; /* with the next two, a word that is stored as a whole */
    uint16_t slot;
    uint16_t packed; /* pages that its bytes take in the slot, if they are compressed there; else 0 */
    uint32_t note;   /* eighths of its distance from the arena's tail */
    uint32_t flags;
    uint64_t sequence, directory, due;
    uint32_t used, stored, expires;
    uint8_t uses, list, priority, name_length;
} Row;

typedef struct {
    uint8_t tags[ENTRIES];
    uint32_t spare;
    uint32_t rows[ENTRIES]; /* number + 1; 0: free */
} Bucket;

typedef struct {
    uint64_t magic;
    uint32_t version, buckets_max;
    uint64_t rows_offset, size;
    uint64_t directory, name_space;
    uint32_t uid, gid, mode, rows_max;
    uint64_t serial;
    /* words that change */
    uint64_t state, valid_until, complete, neighbours; /* at byte 72 */
    uint32_t bucket_count, row_end;
    uint64_t live;
    /* for the next daemon: row + 1 of a block that just moves in memory, that just replaces one, that is just replaced */
    uint32_t moving, replacing, replaced;
    uint32_t asks;  /* 1: who looks blocks up asks the daemon of those that are not in memory. At byte 132 */
    uint64_t ahead; /* seconds by which the namespace's clock is ahead of the real one */
    uint64_t origin; /* serial of the table that went on as this one; arenas name it. At byte 144 */
    uint32_t renaming, renamed; /* row + 1 of a block that just gets the bytes of another one, and its row + 1 */
} TableHeader;

_Static_assert(sizeof(Row) == 96, "a row has 96 bytes");
_Static_assert(offsetof(Row, slab) % 8 == 0, "the place of a row is a word");
_Static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");
_Static_assert(offsetof(TableHeader, state) == 72, "words that change have their place");
_Static_assert(offsetof(TableHeader, asks) == 132 && offsetof(TableHeader, origin) == 144, "as well as these");
_Static_assert(sizeof(TableHeader) <= MULTIPLIERS, "the multipliers are behind the header");
_Static_assert(MULTIPLIERS + 8 * SUMS * MULTIPLIER_ROWS <= PAGE, "the header is one page");

typedef struct {
    TableHeader *header;
    const uint64_t *multipliers;
    Bucket *buckets;
    Row *rows;
    uint32_t buckets_max, rows_max;
} Index;

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* 0: this is no table of this version in so many bytes. Nothing in it is trusted before; later, whatever is in it leads to
   no place outside of it, as limits are those that were seen here. */
static int open_index(uint8_t *memory, uint64_t size, Index *index)
{
    TableHeader *header = (TableHeader *)memory;
    if (size < PAGE || (uintptr_t)memory % 8 || header->magic != TABLE_MAGIC || header->version != TABLE_VERSION)
        return 0;
    index->buckets_max = __atomic_load_n(&header->buckets_max, __ATOMIC_RELAXED);
    index->rows_max = __atomic_load_n(&header->rows_max, __ATOMIC_RELAXED);
    uint64_t rows = PAGE + (uint64_t)index->buckets_max * sizeof(Bucket);
    if (index->buckets_max < BUCKETS_MIN || header->rows_offset != rows || header->size != size ||
        size != rows + (uint64_t)index->rows_max * sizeof(Row))
        return 0;
    index->header = header;
    index->multipliers = (const uint64_t *)(memory + MULTIPLIERS);
    index->buckets = (Bucket *)(memory + PAGE);
    index->rows = (Row *)(memory + rows);
    return 1;
}

/* Strongly universal: two names that do not depend on the multipliers have the same one with a probability of 2^-128. */
static Fingerprint fingerprint_of(const uint64_t *multipliers, uint64_t directory, const uint8_t *name, size_t length)
{
    uint64_t sums[SUMS];
    const uint64_t *row = multipliers + 3 * SUMS;
    for (int s = 0; s < SUMS; s++)
        sums[s] = multipliers[s] * (uint32_t)directory + multipliers[SUMS + s] * (directory >> 32) +
                  multipliers[2 * SUMS + s] * length;
    uint32_t word;
    for (; length >= 4; length -= 4, name += 4, row += SUMS) {
        memcpy(&word, name, 4);
        for (int s = 0; s < SUMS; s++)
            sums[s] += row[s] * word;
    }
    if (length) {
        word = 0;
        memcpy(&word, name, length);
        for (int s = 0; s < SUMS; s++)
            sums[s] += row[s] * word;
    }
    return (Fingerprint){sums[0] >> 32 | (sums[1] >> 32) << 32, sums[2] >> 32 | (sums[3] >> 32) << 32};
}

static int is_same(Fingerprint one, Fingerprint other) { return one.low == other.low && one.high == other.high; }

static uint8_t tag_of(Fingerprint fingerprint) { return (uint8_t)(fingerprint.low >> 56); }

/* The bucket of one half, while there are so many. */
static uint32_t bucket_of(uint64_t half, uint32_t count)
{
    uint32_t top = 1u << (31 - __builtin_clz(count)); /* the largest power of two up to count */
    uint32_t bucket = (uint32_t)half & (2 * top - 1);
    return bucket < count ? bucket : bucket & (top - 1);
}

/* Entries of a bucket that may have this tag: a bit for each, of which `entry_of` says the entry. */
static uint64_t entries_with(const Bucket *line, uint8_t tag)
{
    uint64_t first, ones = 0x0101010101010101ull, tops = 0x8080808080808080ull;
    uint32_t rest;
    memcpy(&first, line->tags, 8);
    memcpy(&rest, line->tags + 8, 4);
    first ^= ones * tag, rest ^= (uint32_t)ones * tag;
    return ((first - ones) & ~first & tops) | ((rest - (uint32_t)ones) & ~rest & (uint32_t)tops) >> 4;
}

static int entry_of(uint64_t bits)
{
    int bit = __builtin_ctzll(bits);
    return bit / 8 + (bit % 8 == 7 ? 0 : 8);
}

static int64_t find_in(const Index *index, uint32_t bucket, Fingerprint wanted)
{
    const Bucket *line = index->buckets + bucket;
    for (uint64_t bits = entries_with(line, tag_of(wanted)); bits; bits &= bits - 1) {
        uint32_t row = __atomic_load_n(&line->rows[entry_of(bits)], __ATOMIC_ACQUIRE);
        if (!row || row > index->rows_max)
            continue;
        const Row *found = index->rows + (row - 1);
        if (__atomic_load_n(&found->fingerprint.low, __ATOMIC_RELAXED) == wanted.low &&
            __atomic_load_n(&found->fingerprint.high, __ATOMIC_RELAXED) == wanted.high && (load(&found->version) & 1))
            return row - 1;
    }
    return NO_ROW;
}

/* How many buckets there are. 0: it is no table. */
static uint32_t count_buckets(const Index *index)
{
    uint32_t count = __atomic_load_n(&index->header->bucket_count, __ATOMIC_ACQUIRE);
    return count < BUCKETS_MIN || count > index->buckets_max ? 0 : count;
}

/* The row of a block, or NO_ROW. A reader without the daemon's lock checks the version again after it has used the row.
   An entry may come to the first bucket after that was seen, and leave the second before: so the first is seen again. */
static int64_t find_row(const Index *index, Fingerprint wanted)
{
    for (int turn = 0; turn < 4; turn++) {
        uint32_t count = count_buckets(index);
        if (!count)
            return NO_ROW;
        uint32_t first = bucket_of(wanted.low, count);
        int64_t row = find_in(index, first, wanted);
        if (row == NO_ROW)
            row = find_in(index, bucket_of(wanted.high, count), wanted);
        if (row == NO_ROW)
            row = find_in(index, first, wanted);
        if (row != NO_ROW || count == count_buckets(index))
            return row;
    }
    return NO_ROW;
}

static void prefetch_buckets(const Index *index, Fingerprint wanted)
{
    uint32_t count = count_buckets(index);
    if (!count)
        return;
    __builtin_prefetch(index->buckets + bucket_of(wanted.low, count));
    __builtin_prefetch(index->buckets + bucket_of(wanted.high, count));
}

/* Fetch rows that look like this one by their tags: their buckets are here. */
static void prefetch_rows(const Index *index, Fingerprint wanted)
{
    uint32_t count = count_buckets(index);
    uint64_t halves[2] = {wanted.low, wanted.high};
    for (int half = 0; half < 2 && count; half++) {
        const Bucket *line = index->buckets + bucket_of(halves[half], count);
        for (uint64_t bits = entries_with(line, tag_of(wanted)); bits; bits &= bits - 1) {
            uint32_t number = __atomic_load_n(&line->rows[entry_of(bits)], __ATOMIC_RELAXED);
            if (!number || number > index->rows_max)
                continue;
            const uint8_t *row = (const uint8_t *)(index->rows + (number - 1));
            __builtin_prefetch(row);
            __builtin_prefetch(row + sizeof(Row) - 1);
        }
    }
}

/* -- changes: the daemon's alone, one at a time ------------------------------------------------------------------- */

static int free_entry(const Bucket *line)
{
    for (int entry = 0; entry < ENTRIES; entry++)
        if (!line->rows[entry])
            return entry;
    return -1;
}

static int count_entries(const Bucket *line)
{
    int count = 0;
    for (int entry = 0; entry < ENTRIES; entry++)
        count += line->rows[entry] != 0;
    return count;
}

static void set_entry(Bucket *line, int entry, uint8_t tag, uint32_t row)
{
    line->tags[entry] = tag;
    __atomic_store_n(&line->rows[entry], row, __ATOMIC_RELEASE);
}

/* An entry in a bucket that its row does not name: a daemon was killed while it moved it. Free such entries. */
static int reclaim_entries(Index *index, uint32_t bucket)
{
    uint32_t count = index->header->bucket_count;
    Bucket *line = index->buckets + bucket;
    int found = -1;
    for (int entry = 0; entry < ENTRIES; entry++) {
        if (!line->rows[entry])
            continue;
        const Row *row = index->rows + (line->rows[entry] - 1);
        if (line->rows[entry] > index->rows_max || !(row->version & 1) ||
            (bucket_of(row->fingerprint.low, count) != bucket && bucket_of(row->fingerprint.high, count) != bucket))
            set_entry(line, found = entry, 0, 0);
    }
    return found;
}

/* Give the entries of one bucket that belong to a new one to that. 0: there are as many as there may be. */
static int split_bucket(Index *index)
{
    uint32_t count = index->header->bucket_count;
    if (count >= index->buckets_max)
        return 0;
    uint32_t top = 1u << (31 - __builtin_clz(count)), source = count - top;
    Bucket *from = index->buckets + source, *to = index->buckets + count;
    memset(to, 0, sizeof *to);
    uint32_t moves = 0;
    int target = 0;
    for (int entry = 0; entry < ENTRIES; entry++) {
        if (!from->rows[entry])
            continue;
        Fingerprint one = index->rows[from->rows[entry] - 1].fingerprint;
        if (bucket_of(one.low, count + 1) == source || bucket_of(one.high, count + 1) == source)
            continue;
        set_entry(to, target++, from->tags[entry], from->rows[entry]);
        moves |= 1u << entry;
    }
    __atomic_store_n(&index->header->bucket_count, count + 1, __ATOMIC_RELEASE);
    for (int entry = 0; entry < ENTRIES; entry++)
        if (moves >> entry & 1)
            set_entry(from, entry, 0, 0);
    return 1;
}

/* A free place in a bucket, or -1. Entries move to their other buckets for it, and ``depth`` - 1 times others for them. While
   buckets grow, those that are not yet split have twice as many entries as the others, and are full often. */
static int make_room(Index *index, uint32_t bucket, int depth)
{
    uint32_t count = index->header->bucket_count;
    Bucket *line = index->buckets + bucket;
    int place = free_entry(line);
    if (place < 0)
        place = reclaim_entries(index, bucket);
    for (int entry = 0; entry < ENTRIES && place < 0 && depth; entry++) {
        Fingerprint one = index->rows[line->rows[entry] - 1].fingerprint;
        uint32_t other = bucket_of(one.low, count);
        if (other == bucket)
            other = bucket_of(one.high, count);
        int target = other == bucket ? -1 : make_room(index, other, depth - 1);
        if (target < 0)
            continue;
        set_entry(index->buckets + other, target, line->tags[entry], line->rows[entry]);
        set_entry(line, place = entry, 0, 0);
    }
    return place;
}

/* Enter a row, whose fingerprint is set. 0: there is no place for it. */
static int enter_row(Index *index, uint32_t row)
{
    Fingerprint one = index->rows[row].fingerprint;
    if (index->header->live * 10 > (uint64_t)index->header->bucket_count * ENTRIES * 7)
        split_bucket(index);
    for (int depth = 0; depth < 16; depth++) {
        uint32_t count = index->header->bucket_count;
        uint32_t bucket = bucket_of(one.low, count), other = bucket_of(one.high, count);
        if (count_entries(index->buckets + other) < count_entries(index->buckets + bucket)) {
            bucket = other;
            other = bucket_of(one.low, count);
        }
        int place = make_room(index, bucket, depth < 2 ? depth : 2);
        if (place < 0)
            place = make_room(index, bucket = other, depth < 2 ? depth : 2);
        if (place >= 0) {
            set_entry(index->buckets + bucket, place, tag_of(one), row + 1);
            return 1;
        }
        if (depth >= 2 && !split_bucket(index))
            return 0;
    }
    return 0;
}

/* Entries of a row are those of another one of the same name from now on. ``other``: NO_ROW for none. */
static void change_entries(Index *index, uint32_t row, int64_t other)
{
    Fingerprint one = index->rows[row].fingerprint;
    uint64_t halves[2] = {one.low, one.high};
    for (int half = 0; half < 2; half++) {
        Bucket *line = index->buckets + bucket_of(halves[half], index->header->bucket_count);
        for (int entry = 0; entry < ENTRIES; entry++)
            if (line->rows[entry] == row + 1)
                set_entry(line, entry, other < 0 ? 0 : tag_of(one), (uint32_t)(other + 1));
    }
}

static void begin_change(Row *row)
{
    __atomic_store_n(&row->version, row->version + (row->version & 1), __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void end_change(Row *row) { __atomic_store_n(&row->version, row->version | 1, __ATOMIC_SEQ_CST); }

/* Say where in memory a block is. Its row is even meanwhile, and yet no row of a dropped block: ``moving`` says so to a
   daemon that finds it like that. */
static void move_row(Index *index, uint32_t number, uint32_t arena, uint32_t page, uint32_t note)
{
    Row *row = index->rows + number;
    __atomic_store_n(&index->header->moving, number + 1, __ATOMIC_SEQ_CST);
    begin_change(row);
    row->arena = arena, row->page = page, row->note = note;
    end_change(row);
    __atomic_store_n(&index->header->moving, 0, __ATOMIC_SEQ_CST);
}

#endif
