/* What the file door asks most of blocks, answered from the core's tables without the interpreter.

   Threads that read the kernel's requests (`_fusewire.c`) show those of some kinds to `answer_request`: the table `answers`
   has them. Files that are written are in blockdrafts.h. All else, and whatever is not plain, goes on to Python, which is
   always right. What may be answered here is what Python has said:

   folder   all its blocks are known, and tables are these; names of others mean nothing (`is_bare`), or Python knows. Files may
            be made there, and nobody has to hear of that at once (`is_writable`). Until `until`, or until it is taken back
   held     of a name or a number: Python knows more of it than the tables do, as somebody writes it

   A handle that was given here has bit HANDLE_MARK. Python makes one of its own of it where it gets a request by it: the
   number of the block, which comes with it, says all. The content of an open block stays, as its arena is pinned. */

#ifndef KVFUSE_BLOCKDOOR_H
#define KVFUSE_BLOCKDOOR_H

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "blockcore.h"

enum { FOLDERS = 1 << 12, FOLDER_TABLES = 8, HELD_MIN = 1 << 10, HANDLES_MAX = 1 << 16, LOOKS = 1 << 10, USES = 1 << 12 };
enum { ROW_SHIFT = 26, TABLE_SHIFT = 52, NO_FLUSH = 1 << 5, PRIORITY = 128 };
enum { DRAFTS = 256, WRITTEN = 1 << 13, PUTS = 1 << 12 };
enum { ACCESS_SHIFT = 57 }; /* of the access mode in the handle of a draft */
enum { ABSENT_NAME, MADE }; /* kinds of a look: the name means nothing, or a file was made under it */
enum { KINDS = 64 }; /* opcodes of the kernel are smaller numbers */

#define BLOCK_MARK (1ull << 62)
#define HANDLE_MARK (1ull << 60)
#define DRAFT_MARK (1ull << 59) /* of a handle, too */
#define SERIAL_MASK ((1ull << 43) - 1)
#define DRAFT_SERIAL_MASK ((1ull << 41) - 1)
#define LOW_26 ((1ull << 26) - 1)
#define SENT_BEFORE (1ull << 63) /* of a request's number: another daemon may have served it */
#define SECOND_NS 1000000000ll

/* Ways in which a key is held, mixed into it. */
enum { HELD_NAME = 1, HELD_INODE = 2, OF_BLOCK = 3 };

typedef struct {
    uint64_t ino, until; /* 0: no folder; nanoseconds of CLOCK_MONOTONIC_COARSE */
    int64_t changed; /* when names changed here, in nanoseconds, if Python does not know it yet */
    uint16_t is_bare, is_writable, count, tables[FOLDER_TABLES];
} Folder;

typedef struct {
    uint64_t key;
    uint32_t count, is_known;
} Held;

/* A block that is open for reading. */
typedef struct {
    uint64_t fh, ino, size;
    const uint8_t *content;
    Arena *arena;
    struct fuse_attr attr;
    uint32_t next, table, row; /* ``next``: free: index + 1 of the next free one */
    int is_shared; /* Python has one of its own, or is about to: it alone answers by this one */
    int is_taken;  /* Python knows what this one has open */
} Handle;

/* What the next daemon finds of an open block. ``number``: the block's own, which the kernel may know by another one. */
typedef struct {
    uint64_t fh, ino, number;
} KeptHandle;

/* A name that was looked up. ``number``: of its block, or of the folder where it means nothing. */
typedef struct {
    uint64_t number;
    uint8_t kind, length, name[NAME_MAX_BYTES];
} Look;

/* A block that was looked up: it is opened a moment later, also where it was replaced in between. ``arena``: its number, 0:
   none; its content is at ``page`` there as long as the stamp of that is the same. */
typedef struct {
    Look look;
    struct fuse_attr attr;
    uint64_t stamp;
    uint32_t arena, page, table, row;
} Named;

/* A number by which the kernel wrote what is this block now: as long as it is known, it uses its pages of it. The others are
   places + 1 of the next ones with the same key. */
typedef struct {
    uint64_t ino, sequence;
    uint32_t table, row;
    uint16_t next_number, next_block;
} Numbered;

/* See blockdrafts.h. ``room``: bytes that it has in its arena, from ``offset`` on. */
typedef struct {
    uint64_t fh, ino, folder, size, room, offset;
    Arena *arena;
    Note *note;
    int64_t made_ns, changed_ns;
    uint32_t table, mode, uid, gid, pid, checksum; /* ``checksum``: of all its bytes, if `has_checksum` */
    uint8_t has_checksum, is_busy, is_settled, is_shared, is_taken, is_given, name_length, name[NAME_MAX_BYTES];
} Draft;

/* What the next daemon finds of a draft that is not settled; ``fh`` is stored last. ``unique``: the number of its CREATE.
   ``place``: number of the arena << 32 | page there of its bytes; 0: it has none. */
typedef struct {
    uint64_t fh, ino, folder, unique, place, size;
    int64_t made_ns, changed_ns;
    uint32_t table, mode, uid, gid, pid;
    uint8_t name_length, name[NAME_MAX_BYTES];
} KeptDraft;

typedef struct {
    uint32_t table, row;
    uint64_t written; /* bytes, by who stored it */
} Use;

typedef struct {
    Core *core;
    uint64_t multipliers[SUMS * MULTIPLIER_ROWS];
    double attr_timeout;
    int64_t tick_max_ns, lag_ns;
    uint32_t arenas_max; /* that may be pinned */
    Folder folders[FOLDERS];
    Held *held;
    uint64_t held_count, held_room;
    Handle *handles;
    uint32_t handle_count, free_handle, open_count, pinned_count;
    uint64_t serial; /* of handles: begins with the time in microseconds, so no former daemon gave the same ones */
    uint32_t pins[ARENAS];
    Look looks[LOOKS]; /* names that mean nothing */
    Named named[LOOKS]; /* blocks that were looked up, each at the place of its number */
    uint64_t look_head, look_tail;
    Use uses[USES];
    uint64_t use_head, use_tail;
    uint64_t kinds; /* a bit for each opcode that may be answered; any thread */
    uint64_t answered[KINDS], absent, read_bytes, written_bytes;
    Numbered *written; /* WRITTEN of them, in shared memory where something outlives this daemon */
    uint16_t by_number[WRITTEN], by_block[WRITTEN]; /* place + 1 of the first one */
    uint32_t written_next;
    Draft drafts[DRAFTS];
    KeptDraft *kept_drafts; /* as many, in shared memory; NULL: nothing outlives this daemon */
    uint32_t draft_count, draft_end; /* ``draft_end``: behind the last one */
    uint64_t next_number, last_number; /* of inodes that may be made; the last one may not */
    Use puts[PUTS];
    uint64_t put_head, put_tail, block_max;
    uint64_t *decisions; /* rows of three words in shared memory; NULL: nothing outlives this daemon */
    KeptHandle *kept;    /* likewise, of the first handles */
    uint32_t decision_count, decision_next, kept_count;
    int bell, has_rung, has_changed; /* ``bell``: a descriptor of an event, or -1; the last: some folder has changed */
} Door;

enum { KEPT_NUMBERS_SIZE = WRITTEN * sizeof(Numbered), KEPT_DRAFTS_SIZE = DRAFTS * sizeof(KeptDraft) };

/* -- what Python says --------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t kind, uint64_t one, uint64_t other)
{
    uint64_t word = (one ^ kind << 60) * 0x9E3779B97F4A7C15ull;
    word = (word ^ word >> 32 ^ other) * 0xD6E8FEB86659FD93ull;
    return word ^ word >> 29;
}

static Held *held_place(Held *all, uint64_t room, uint64_t key)
{
    uint64_t place = key & (room - 1);
    while (all[place].is_known && all[place].key != key)
        place = (place + 1) & (room - 1);
    return all + place;
}

static int is_held(const Door *door, uint64_t key) { return door->held_room && held_place(door->held, door->held_room, key)->count; }

/* Keys of two things may be equal: then both go to Python. 0: no memory. */
static int hold_key(Door *door, uint64_t key, int by)
{
    if (2 * door->held_count >= door->held_room) {
        uint64_t used = 0;
        for (uint64_t i = 0; i < door->held_room; i++)
            used += door->held[i].count != 0;
        uint64_t room = door->held_room > HELD_MIN ? door->held_room : HELD_MIN;
        while (4 * used >= room)
            room *= 2;
        Held *all = calloc(room, sizeof *all);
        if (!all)
            return 0;
        for (uint64_t i = 0; i < door->held_room; i++)
            if (door->held[i].count)
                *held_place(all, room, door->held[i].key) = door->held[i];
        free(door->held);
        door->held = all, door->held_room = room, door->held_count = used;
    }
    Held *place = held_place(door->held, door->held_room, key);
    door->held_count += !place->is_known;
    if (by < 0 && place->count < (uint32_t)-by)
        return 1;
    *place = (Held){key, place->count + (uint32_t)by, 1};
    return 1;
}

static Folder *folder_place(Door *door, uint64_t ino) { return door->folders + (ino * 0x9E3779B97F4A7C15ull >> 52) % FOLDERS; }

static uint64_t coarse_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

static const Folder *find_folder(Door *door, uint64_t ino)
{
    const Folder *found = folder_place(door, ino);
    return found->ino == ino && coarse_now() < found->until ? found : NULL;
}

/* -- blocks ------------------------------------------------------------------------------------------------------- */

static uint64_t block_tag(uint64_t sequence) { return sequence * 0x9E3779B97F4A7C15ull >> 38; }

static uint64_t block_inode(uint32_t table, uint32_t row, uint64_t sequence)
{
    return BLOCK_MARK | (uint64_t)table << TABLE_SHIFT | (uint64_t)row << ROW_SHIFT | block_tag(sequence);
}

static uint32_t now_in(const Table *table)
{
    return (uint32_t)((uint64_t)time(NULL) + __atomic_load_n(&table->index.header->ahead, __ATOMIC_RELAXED));
}

static int has_expired(const Table *table, const Row *row) { return row->expires && now_in(table) >= row->expires; }

static Numbered *find_written(Door *door, uint64_t ino);

/* The block of a number, as long as it is one. NULL: it is none, or Python knows more of it. */
static const Row *row_of(Door *door, uint64_t ino, uint32_t *place)
{
    uint32_t t = (uint32_t)(ino >> TABLE_SHIFT) & 1023, number = (uint32_t)(ino >> ROW_SHIFT & LOW_26);
    const Numbered *written = find_written(door, ino);
    if (written)
        t = written->table, number = written->row;
    else if (!(ino & BLOCK_MARK))
        return NULL;
    const Table *table = door->core->tables + t;
    if (!table->is_known || table->is_ended || number >= table->index.rows_max)
        return NULL;
    const Row *row = table->index.rows + number;
    int is_it = written ? row->sequence == written->sequence : block_tag(row->sequence) == (ino & LOW_26);
    if (!(row->version & 1) || row->flags & FOREIGN || !is_it || has_expired(table, row))
        return NULL;
    *place = t;
    return row;
}

static void set_time(int64_t ns, uint64_t *seconds, uint32_t *rest)
{
    *seconds = (uint64_t)(ns / SECOND_NS), *rest = (uint32_t)(ns % SECOND_NS);
}

/* As `BlockEntry` of open_blocks.py has it. */
static void fill_attr(const Door *door, uint32_t place, const Row *row, uint64_t ino, struct fuse_attr *attr)
{
    const TableHeader *header = door->core->tables[place].index.header;
    int64_t mtime = row->stored * SECOND_NS + (int64_t)(row->flags >> MICROS) * 1000, stored = (int64_t)row->sequence * 1000;
    int64_t used = row->used * SECOND_NS, late = mtime - stored;
    *attr = (struct fuse_attr){.ino = ino, .size = row->length, .blocks = padded(row->length) / 512, .nlink = 1,
                               .mode = S_IFREG | header->mode, .uid = header->uid, .gid = header->gid, .blksize = PAGE};
    set_time(used > mtime ? used : mtime, &attr->atime, &attr->atimensec);
    set_time(mtime, &attr->mtime, &attr->mtimensec);
    set_time(-door->tick_max_ns < late && late <= door->lag_ns ? mtime : stored, &attr->ctime, &attr->ctimensec);
}

static void split_seconds(double seconds, uint64_t *whole, uint32_t *rest)
{
    *whole = (uint64_t)seconds, *rest = (uint32_t)((seconds - (double)*whole) * 1e9);
}

/* -- answers ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int fd;
    const struct fuse_in_header *in;
    const void *body;
    size_t size; /* of the body */
} Request;

static void reply(const Request *asked, int error, const void *bytes, size_t size)
{
    struct fuse_out_header out = {(uint32_t)(sizeof out + size), -error, asked->in->unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)(uintptr_t)bytes, size}};
    ssize_t done;
    do
        done = writev(asked->fd, parts, size ? 2 : 1);
    while (done < 0 && errno == EINTR);
    if (done < 0 && errno == EFAULT && size) /* the pages cannot be read */
        reply(asked, EIO, NULL, 0);
}

/* The newest block of a name. Under the lock. 0: there is none; -1: Python has to look. */
static int find_block(Door *door, const Folder *folder, const uint8_t *name, size_t length, uint32_t *place, uint32_t *number)
{
    Fingerprint wanted = fingerprint_of(door->multipliers, folder->ino, name, length);
    uint64_t sequence = 0;
    if (is_held(door, mix(HELD_NAME, wanted.low, wanted.high)))
        return -1;
    for (int i = 0; i < folder->count; i++) {
        const Table *table = door->core->tables + folder->tables[i];
        if (!table->is_known || table->is_ended || table->index.header->directory != folder->ino)
            return -1;
        int64_t found = find_row(&table->index, wanted);
        if (found < 0 || table->index.rows[found].sequence <= sequence || has_expired(table, table->index.rows + found))
            continue;
        sequence = table->index.rows[found].sequence;
        *place = folder->tables[i], *number = (uint32_t)found;
    }
    return sequence != 0;
}

static int may_pin(const Door *door, const Arena *arena)
{
    return door->pins[arena - door->core->arenas] || door->pinned_count < door->arenas_max;
}

static void pin_content(Door *door, Arena *arena)
{
    door->pinned_count += !door->pins[arena - door->core->arenas]++;
    arena->pins++;
}

static void unpin_content(Door *door, Arena *arena)
{
    door->pinned_count -= !--door->pins[arena - door->core->arenas];
    unpin(arena);
}

#include "blockdrafts.h"

static uint64_t answer_lookup(Door *door, const Request *asked)
{
    const uint8_t *name = asked->body;
    size_t length = strnlen(asked->body, asked->size);
    if (length == asked->size || length > NAME_MAX_BYTES || !is_plain_name(name, length))
        return 0;
    struct fuse_entry_out entry = {0};
    uint32_t place, number;
    int found = -1;
    lock(door->core);
    const Folder *folder = find_folder(door, asked->in->nodeid);
    const Draft *draft = draft_of_name(door, asked->in->nodeid, name, length);
    if (folder && !draft)
        found = find_block(door, folder, name, length, &place, &number);
    if (!found && !folder->is_bare)
        found = -1;
    if (found > 0) {
        const Row *row = door->core->tables[place].index.rows + number;
        entry.nodeid = number_of_block(door, place, number, row->sequence);
        if (is_held(door, mix(HELD_INODE, entry.nodeid, 0)))
            found = -1;
        else {
            Named *named = named_place(door, entry.nodeid);
            const Arena *arena = row->arena && !row->expires ? arena_of(door->core, row->arena) : NULL;
            fill_attr(door, place, row, entry.nodeid, &entry.attr);
            named->look.number = entry.nodeid, named->look.length = (uint8_t)length;
            memcpy(named->look.name, name, length);
            named->attr = entry.attr, named->table = place, named->row = number, named->page = row->page;
            named->arena = arena ? row->arena : 0, named->stamp = arena ? arena->tail->stamp : 0;
        }
    } else if (draft && !draft->is_taken) {
        entry.nodeid = draft->ino, found = 1;
        fill_draft(draft, &entry.attr);
    } else if (!found) {
        note_name(door, ABSENT_NAME, asked->in->nodeid, name, length);
        door->absent++;
    }
    unlock(door->core);
    if (found < 0)
        return 0;
    split_seconds(door->attr_timeout, &entry.attr_valid, &entry.attr_valid_nsec);
    reply(asked, found ? 0 : ENOENT, &entry, found ? sizeof entry : 0);
    return 1;
}

static Handle *handle_of(Door *door, uint64_t fh, uint64_t ino)
{
    uint64_t index = fh & (HANDLES_MAX - 1);
    Handle *handle = door->handles + index;
    return fh & HANDLE_MARK && index < door->handle_count && handle->fh == fh && handle->ino == ino ? handle : NULL;
}

/* Any handle of a block; the search is long, and for blocks that have lost their names alone. */
static const Handle *open_handle(const Door *door, uint64_t ino)
{
    for (uint32_t i = 0; door->open_count && i < door->handle_count; i++)
        if (door->handles[i].fh && door->handles[i].ino == ino && !door->handles[i].is_shared)
            return door->handles + i;
    return NULL;
}

static uint64_t answer_getattr(Door *door, const Request *asked)
{
    const struct fuse_getattr_in *in = asked->body;
    uint64_t ino = asked->in->nodeid;
    struct fuse_attr_out out = {0};
    uint32_t place;
    if (asked->size < sizeof *in)
        return 0;
    lock(door->core);
    int is_free = !is_held(door, mix(HELD_INODE, ino, 0));
    const Row *row = is_free ? row_of(door, ino, &place) : NULL;
    if (row)
        fill_attr(door, place, row, ino, &out.attr);
    const Draft *draft = is_free && !row ? draft_of_number(door, ino) : NULL;
    int is_draft = draft && !draft->is_taken && !draft->is_settled;
    if (is_draft)
        fill_draft(draft, &out.attr);
    const Handle *lost = is_free && !row && !draft && ino & BLOCK_MARK ? open_handle(door, ino) : NULL;
    if (lost)
        out.attr = lost->attr, out.attr.nlink = 0; /* it has lost its name */
    unlock(door->core);
    if (!row && !lost && !is_draft)
        return 0;
    split_seconds(door->attr_timeout, &out.attr_valid, &out.attr_valid_nsec);
    reply(asked, 0, &out, sizeof out);
    return 1;
}

/* -- open blocks -------------------------------------------------------------------------------------------------- */

/* NULL: there are too many. */
static Handle *take_handle(Door *door)
{
    uint32_t index = door->free_handle ? door->free_handle - 1 : door->handle_count;
    if (index == HANDLES_MAX)
        return NULL;
    if (index == door->handle_count) {
        if (!(index & (index - 1))) { /* room for twice as many */
            Handle *all = realloc(door->handles, (index ? 2 * index : 1) * sizeof *all);
            if (!all)
                return NULL;
            door->handles = all;
        }
        door->handle_count++;
    } else
        door->free_handle = door->handles[index].next;
    Handle *handle = door->handles + index;
    *handle = (Handle){.fh = HANDLE_MARK | (++door->serial & SERIAL_MASK) << 16 | index};
    door->open_count++;
    return handle;
}

static void give_handle(Door *door, Handle *handle)
{
    if (handle - door->handles < door->kept_count)
        __atomic_store_n(&door->kept[handle - door->handles].fh, 0, __ATOMIC_SEQ_CST);
    unpin_content(door, handle->arena);
    door->open_count -= !handle->is_shared;
    handle->fh = 0;
    handle->next = door->free_handle;
    door->free_handle = (uint32_t)(handle - door->handles) + 1;
}

/* From here on Python has one of its own, and counts it. */
static void leave_handle(Door *door, Handle *handle)
{
    door->open_count -= !handle->is_shared;
    handle->is_shared = 1;
}

static void keep_handle(Door *door, const Handle *handle, uint64_t number)
{
    uint32_t index = (uint32_t)(handle - door->handles);
    if (index >= door->kept_count)
        return;
    door->kept[index].ino = handle->ino, door->kept[index].number = number;
    __atomic_store_n(&door->kept[index].fh, handle->fh, __ATOMIC_SEQ_CST);
}

/* Go on with blocks that were open in the former daemon. One whose content is not there any more is opened again by Python,
   if that is asked for it. 0: no memory. */
static int restore_handles(Door *door)
{
    uint32_t end = door->kept_count, room = 1;
    while (end && !door->kept[end - 1].fh)
        end--;
    while (room < end)
        room *= 2;
    if (!end || door->handle_count)
        return 1;
    if (!(door->handles = calloc(room, sizeof *door->handles)))
        return 0;
    door->handle_count = end;
    for (uint32_t i = 0; i < end; i++) {
        KeptHandle kept = door->kept[i];
        Handle *handle = door->handles + i;
        uint32_t place;
        const Row *row = (kept.fh & (HANDLES_MAX - 1)) == i && kept.fh & HANDLE_MARK ? row_of(door, kept.number, &place) : NULL;
        Arena *arena = row && row->arena ? arena_of(door->core, row->arena) : NULL;
        if (arena) {
            *handle = (Handle){.fh = kept.fh, .ino = kept.ino, .size = row->length, .arena = arena,
                               .content = arena->base + (uint64_t)row->page * PAGE, .table = place,
                               .row = (uint32_t)(row - door->core->tables[place].index.rows)};
            pin_content(door, arena);
            fill_attr(door, place, row, kept.ino, &handle->attr);
            door->open_count++;
            if (kept.ino != kept.number)
                note_written(door, kept.ino, place, handle->row, row->sequence);
        } else {
            door->kept[i].fh = 0;
            handle->next = door->free_handle;
            door->free_handle = i + 1;
        }
    }
    return 1;
}

/* Open a block that was replaced, or removed, since it was looked up. NULL: Python has to see. */
static Handle *open_lost(Door *door, uint64_t ino)
{
    const Named *named = named_place(door, ino);
    Arena *arena = named->look.number == ino && named->arena ? arena_of(door->core, named->arena) : NULL;
    if (!arena || arena->state == SPARE || arena->tail->stamp != named->stamp || door->core->tables[named->table].is_ended ||
        !may_pin(door, arena))
        return NULL;
    Handle *handle = take_handle(door);
    if (!handle)
        return NULL;
    handle->ino = ino, handle->size = named->attr.size, handle->arena = arena, handle->attr = named->attr;
    handle->table = named->table, handle->row = named->row;
    handle->content = arena->base + (uint64_t)named->page * PAGE;
    pin_content(door, arena);
    return handle;
}

static uint64_t answer_open(Door *door, const Request *asked)
{
    const struct fuse_open_in *in = asked->body;
    uint64_t ino = asked->in->nodeid;
    struct fuse_open_out out = {.open_flags = FOPEN_KEEP_CACHE | NO_FLUSH};
    uint32_t place;
    if (asked->size < sizeof *in || in->flags & (O_ACCMODE | O_TRUNC | O_DIRECT | O_APPEND))
        return 0;
    lock(door->core);
    int is_free = !is_held(door, mix(HELD_INODE, ino, 0));
    Row *row = is_free ? (Row *)row_of(door, ino, &place) : NULL;
    Arena *arena = row && row->arena ? arena_of(door->core, row->arena) : NULL;
    Handle *handle = arena && may_pin(door, arena) ? take_handle(door) : NULL;
    Handle *lost = is_free && !row ? open_lost(door, ino) : NULL;
    if (lost)
        out.fh = lost->fh;
    if (handle) {
        const Table *table = door->core->tables + place;
        row->used = now_in(table);
        row->flags |= HOT;
        pin_content(door, arena);
        handle->ino = ino, handle->size = row->length, handle->arena = arena;
        handle->table = place, handle->row = (uint32_t)(row - table->index.rows);
        handle->content = arena->base + (uint64_t)row->page * PAGE;
        fill_attr(door, place, row, ino, &handle->attr);
        keep_handle(door, handle, block_inode(place, handle->row, row->sequence));
        if (door->use_tail - door->use_head < USES)
            door->uses[door->use_tail++ % USES] = (Use){place, handle->row, 0};
        out.fh = handle->fh;
    }
    unlock(door->core);
    if (!handle && !lost)
        return 0;
    reply(asked, 0, &out, sizeof out);
    return 1;
}

/* Pages of arenas are in no page tables after a daemon's start. See _fusewire.c: a copy that meets a page fault fails where
   the daemon is killed meanwhile. */
static void populate_pages(const uint8_t *bytes, size_t size)
{
    uintptr_t begin = (uintptr_t)bytes & ~(uintptr_t)(PAGE - 1), end = ((uintptr_t)bytes + size + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
    madvise((void *)begin, end - begin, 22); /* MADV_POPULATE_READ */
}

static uint64_t answer_read(Door *door, const Request *asked)
{
    const struct fuse_read_in *in = asked->body;
    if (asked->size < sizeof *in)
        return 0;
    lock(door->core);
    Handle *handle = handle_of(door, in->fh, asked->in->nodeid);
    const uint8_t *content = NULL;
    uint64_t size = 0;
    Arena *arena = NULL;
    if (handle && !handle->is_shared && !is_held(door, mix(HELD_INODE, handle->ino, 0))) {
        size = in->offset < handle->size ? handle->size - in->offset : 0;
        size = size < in->size ? size : in->size;
        content = handle->content + (size ? in->offset : 0), arena = handle->arena;
        arena->pins++;
        door->read_bytes += size;
    }
    unlock(door->core);
    if (!content)
        return 0;
    if (size)
        populate_pages(content, size);
    reply(asked, 0, content, size);
    lock(door->core);
    unpin(arena);
    unlock(door->core);
    return 1;
}

static uint64_t answer_release(Door *door, const Request *asked)
{
    const struct fuse_release_in *in = asked->body;
    if (asked->size < sizeof *in)
        return 0;
    if (in->fh & DRAFT_MARK)
        return release_draft(door, asked, in->fh);
    lock(door->core);
    Handle *handle = handle_of(door, in->fh, asked->in->nodeid);
    int is_ours = handle && !handle->is_shared;
    if (is_ours)
        give_handle(door, handle);
    unlock(door->core);
    if (is_ours)
        reply(asked, 0, NULL, 0);
    return is_ours;
}

/* Python gets a request by a handle of ours, and makes one of its own of it: it closes that, then. */
static void share_handle(Door *door, const Request *asked)
{
    uint64_t fh, is_closed = asked->in->opcode == FUSE_RELEASE;
    if (asked->size < sizeof fh)
        return;
    memcpy(&fh, asked->body, sizeof fh);
    lock(door->core);
    Handle *handle = handle_of(door, fh, asked->in->nodeid);
    if (handle && is_closed)
        give_handle(door, handle);
    else if (handle)
        leave_handle(door, handle);
    unlock(door->core);
}

/* Nothing is kept for the number of a block that the kernel knows. */
static uint64_t answer_forget(Door *door, const Request *asked)
{
    return (asked->in->nodeid & BLOCK_MARK) != 0 && !(asked->in->nodeid >> 63);
}

static uint64_t answer_forgets(Door *door, const Request *asked)
{
    const struct fuse_batch_forget_in *batch = asked->body;
    const struct fuse_forget_one *one = (const void *)(batch + 1);
    if (asked->size < sizeof *batch || (asked->size - sizeof *batch) / sizeof *one < batch->count)
        return 0;
    for (uint32_t i = 0; i < batch->count; i++)
        if (!(one[i].nodeid & BLOCK_MARK) || one[i].nodeid >> 63)
            return 0;
    return 1;
}

/* -- what may be answered here ------------------------------------------------------------------------------------- */

/* `answer`: as `answer_request`. NULL: it always has to, and the door hears of it.
   `has_handle`: the body begins with one. `why`: as in docs/internals/decisions/045. */
static const struct {
    uint32_t opcode;
    const char *kind;
    uint64_t (*answer)(Door *, const Request *);
    int has_handle;
    const char *why;
} answers[] = {
    {FUSE_LOOKUP, "lookup", answer_lookup, 0, "a folder that Python offered has these tables, and no name that it holds"},
    {FUSE_GETATTR, "getattr", answer_getattr, 0, "the row has all attributes; an open block without a name has those of its open"},
    {FUSE_OPEN, "open", answer_open, 0, "for reading, of a block in memory: its arena is pinned until the close"},
    {FUSE_READ, "read", answer_read, 1, "the bytes of an open block never change, but by a writer, whose number is held"},
    {FUSE_RELEASE, "release", answer_release, 1, "of a handle that C gave, and by which Python was asked nothing"},
    {FUSE_FORGET, "forget", answer_forget, 0, "nothing is kept for the number of a block"},
    {FUSE_BATCH_FORGET, "forget", answer_forgets, 0, "likewise, where all numbers are those of blocks"},
    {FUSE_CREATE, "create", answer_create, 0, "where Python offered that, and a block of that owner and mode is, the file is its name and its bytes"},
    {FUSE_WRITE, "write", answer_write, 0, "by who made the file, without a hole: its bytes have their place in an arena"},
    {FUSE_FLUSH, "flush", answer_flush, 1, "of a file that C made, where there is room: it is a block from then on"},
    {FUSE_RENAME, "rename", answer_rename, 0, "of a block in its folder: its bytes stay, and what is about to happen is kept for the next daemon"},
    {FUSE_RENAME2, "rename", answer_rename, 0, "likewise, without flags"},
    {FUSE_FSYNC, "fsync", NULL, 1, "Python makes a handle of its own, and closes it"},
};
enum { ANSWERS = sizeof answers / sizeof *answers };

/* A bit for each opcode of the table. */
static uint64_t shown_kinds(void)
{
    uint64_t kinds = 0;
    for (int i = 0; i < ANSWERS; i++)
        kinds |= 1ull << answers[i].opcode;
    return kinds;
}

/* Any thread. 0: Python has to answer. Else it was answered: the number of the file that was made, or 1. */
static uint64_t answer_request(void *of, int fd, const void *request, size_t size)
{
    Door *door = of;
    const struct fuse_in_header *in = request;
    Request asked = {fd, in, in + 1, size - sizeof *in};
    if (size < sizeof *in)
        return 0;
    int i = 0;
    while (i < ANSWERS && answers[i].opcode != in->opcode)
        i++;
    if (i == ANSWERS)
        return 0;
    int may = answers[i].answer && __atomic_load_n(&door->kinds, __ATOMIC_RELAXED) >> in->opcode & 1 && !(in->unique & SENT_BEFORE);
    uint64_t is_answered = may ? answers[i].answer(door, &asked) : 0;
    if (is_answered) {
        __atomic_fetch_add(&door->answered[in->opcode], 1, __ATOMIC_RELAXED);
        return is_answered;
    }
    if (answers[i].has_handle)
        share_handle(door, &asked);
    return 0;
}

#endif
