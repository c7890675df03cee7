/* The block store's core: it finds, stores, shows and drops blocks, without the interpreter.

   A block is a row of a table in shared memory (blocktable.h). Its bytes are in an arena, in a slot of a slab, or both.
   Python decides about memory, slabs, limits and victims, for many blocks at once; what is here happens for each block.
   `blocks.c` makes it a Python module, and `_blocks.pyi` says what each function expects.

   One lock guards all state but the bytes of blocks: these are copied while their arena is pinned. A daemon may be killed
   between two instructions. The next one finds tables, arenas and slab states in shared memory, and makes all else anew
   from them: `restore_table` says why that is right. */

#ifndef KVFUSE_BLOCKCORE_H
#define KVFUSE_BLOCKCORE_H

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "blocktable.h"
#include "crc32c.h"

enum { HEAD = 96, NAME_ROOM = 256, HEAD_MAGIC = 0x4B56, HEAD_VERSION = 1, STATE_FREE = 0, STATE_BLOCK = 1, STATE_SLAB = 2 };
enum { DIRTY = 1, WRITING = 2, HOT = 4 };
enum { NO_SLOT = -1, NO_MEMORY = -2, NO_QUOTA = -3, TOO_LARGE = -4, NOT_TRIED = -5, ENDED = -6, ODD_NAME = -7 };
enum { ABSENT = -1, NOT_RESIDENT = -2, NO_ROOM = -4 };
enum { SLOT_FREE = 0, SLOT_STALE = 1, SLOT_HELD = 2, SLOT_OWNED = 16 };
enum { ARENAS = 4096, TABLES = 4096, SPACES = 4096, SIZES = 256, SEEN = 256, LEARN_AFTER = 64 };
enum { SPARE, FILLING, FILLED, EMPTY };

#define TAIL_MAGIC 0x4C4941544156564Bull
#define NO_NOTE 0xFFFFFFFFu

typedef struct {
    uint16_t magic;
    uint8_t version, state;
    uint32_t length;
    Fingerprint fingerprint;
    uint64_t sequence, directory, name_space;
    uint32_t epoch, incarnation, uid, gid, checksum, stored, expires;
    uint16_t mode;
    uint8_t name_length, priority;
    uint32_t slot_size, token, spare, crc;
} Head;

_Static_assert(sizeof(Head) == HEAD, "a head has 96 bytes");

/* What the next daemon finds of a slab. */
typedef struct {
    uint32_t slot_size; /* 0: none yet */
    uint32_t incarnation;
    uint8_t is_ours, spare[3];
    uint32_t token; /* of the loan by which it is ours; its heads repeat it */
} SlabState;

_Static_assert(sizeof(SlabState) == 16, "the state of a slab has 16 bytes");

/* At the end of an arena. */
typedef struct {
    uint64_t magic, serial, used, notes, stamp, spare[3];
} Tail;

/* Of one block in an arena; they grow from the tail towards the blocks. The name follows. */
typedef struct {
    uint64_t sequence;
    uint32_t row;
    uint16_t size; /* of the note */
    uint8_t name_length, spare;
} Note;

typedef struct Space {
    int is_known, above;
    uint32_t epoch;
    uint64_t number, bytes, blocks, bytes_max, blocks_max;
} Space;

typedef struct Table {
    int is_known, is_ended, space, arena; /* ``arena``: index of the one that is filled, or -1 */
    Index index;
    uint32_t *free_rows, free_count, free_room, swept;
} Table;

typedef struct {
    int state, table;
    uint32_t number, pins, dirty, live;
    uint8_t *base;
    uint64_t size;
    Tail *tail;
} Arena;

typedef struct {
    uint32_t count, free, held, hint, lead, class, in_list, is_head_due;
    uint64_t *owners; /* of each slot: SLOT_FREE, SLOT_STALE, SLOT_HELD, or SLOT_OWNED + table << 32 + row */
} Slab;

typedef struct {
    uint32_t slot_size, count, room;
    uint32_t *slabs; /* that have free slots, the one to be used next last */
} Class;

typedef struct {
    uint32_t table, row;
    uint64_t sequence;
} Entry;

typedef struct {
    Entry *entries;
    uint64_t head, tail, room;
} Queue;

typedef struct Core {
    pthread_mutex_t lock;
    uint64_t sequence, slab_size, head_size;
    uint32_t slab_count, class_count, free_count, free_room, size_count, learned;
    SlabState *states;
    Slab *slabs;
    uint32_t *free_slabs;
    uint32_t sizes[SIZES];
    Class classes[SIZES];
    struct {
        uint32_t pages, count;
    } seen[SEEN];
    Space spaces[SPACES];
    Table tables[TABLES];
    Arena arenas[ARENAS];
    uint16_t places[2 * ARENAS]; /* arena by number: index + 1 */
    uint32_t arena_count;
    Queue dirty, stale, unsynced; /* ``unsynced``: heads that were marked as free since the last sync */
    uint64_t dirty_bytes, dirty_max, stamp, puts, put_bytes, gets, get_bytes, recycled, relocated, refused, batches;
    uint64_t resident, synced;
    int loading;
    struct Removed {
        Fingerprint fingerprint;
        uint64_t sequence; /* 0: a free place */
    } *removed; /* names that were dropped while slabs are loaded: see load_head */
    uint64_t removed_count, removed_room;
} Core;

/* -- small things ------------------------------------------------------------------------------------------------- */

static void lock(Core *core) { pthread_mutex_lock(&core->lock); }
static void unlock(Core *core) { pthread_mutex_unlock(&core->lock); }
static uint64_t padded(uint64_t size) { return (size + PAGE - 1) & ~(uint64_t)(PAGE - 1); }

static int push(Queue *queue, Entry entry)
{
    if (queue->tail - queue->head == queue->room) {
        uint64_t room = queue->room ? 2 * queue->room : 1024;
        Entry *entries = malloc(room * sizeof *entries);
        if (!entries)
            return 0;
        for (uint64_t i = queue->head; i < queue->tail; i++)
            entries[i & (room - 1)] = queue->entries[i & (queue->room - 1)];
        free(queue->entries);
        queue->entries = entries, queue->room = room;
    }
    queue->entries[queue->tail++ & (queue->room - 1)] = entry;
    return 1;
}

static Entry pop(Queue *queue) { return queue->entries[queue->head++ & (queue->room - 1)]; }

static Row *row_at(Core *core, uint32_t table, uint32_t row) { return core->tables[table].index.rows + row; }

static Arena *arena_of(Core *core, uint32_t number)
{
    for (uint32_t i = number % (2 * ARENAS); core->places[i]; i = (i + 1) % (2 * ARENAS))
        if (core->arenas[core->places[i] - 1].number == number)
            return core->arenas + core->places[i] - 1;
    return NULL;
}

static void place_arenas(Core *core)
{
    memset(core->places, 0, sizeof core->places);
    for (uint32_t a = 0; a < ARENAS; a++)
        if (core->arenas[a].base) {
            uint32_t i = core->arenas[a].number % (2 * ARENAS);
            while (core->places[i])
                i = (i + 1) % (2 * ARENAS);
            core->places[i] = (uint16_t)(a + 1);
        }
}

/* -- slots -------------------------------------------------------------------------------------------------------- */

/* Slots of a slab: how many, behind how many that its heads and names take. Heads come first, then names; both lie in
   the slab's head table as far as that reaches, and then in the leading slots. */
static void plan_slab(const Core *core, uint32_t slot_size, uint32_t *count, uint32_t *lead)
{
    uint32_t all = (uint32_t)(core->slab_size / slot_size);
    for (*lead = 0; *lead < all; (*lead)++) {
        uint64_t meta = (uint64_t)HEAD * (all - *lead + 1) + (uint64_t)NAME_ROOM * (all - *lead);
        if (meta <= core->head_size + (uint64_t)*lead * slot_size)
            break;
    }
    *count = all - *lead;
}

static uint64_t name_place(uint32_t count, uint32_t slot) { return (uint64_t)HEAD * (count + 1) + (uint64_t)NAME_ROOM * slot; }

static int list_slab(Class *class, uint32_t slab)
{
    if (class->count == class->room) {
        uint32_t room = class->room ? 2 * class->room : 16, *slabs = realloc(class->slabs, room * sizeof *slabs);
        if (!slabs)
            return 0;
        class->slabs = slabs, class->room = room;
    }
    class->slabs[class->count++] = slab;
    return 1;
}

static int class_of(Core *core, uint32_t slot_size)
{
    for (uint32_t c = 0; c < core->class_count; c++)
        if (core->classes[c].slot_size == slot_size)
            return (int)c;
    if (core->class_count == SIZES)
        return -1;
    core->classes[core->class_count].slot_size = slot_size;
    return (int)core->class_count++;
}

/* Cut a slab into slots, all of them free. 0: no memory. */
static int cut_slab(Core *core, uint32_t number, uint32_t slot_size)
{
    Slab *slab = core->slabs + number;
    int class = class_of(core, slot_size);
    plan_slab(core, slot_size, &slab->count, &slab->lead);
    if (class < 0 || !slab->count || !(slab->owners = calloc(slab->count, sizeof *slab->owners)))
        return 0;
    slab->class = (uint32_t)class, slab->free = slab->count, slab->held = slab->hint = 0;
    slab->in_list = (uint32_t)list_slab(core->classes + class, number);
    return (int)slab->in_list;
}

static uint32_t random_word(void)
{
    static uint64_t state;
    if (!state) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        state = (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)(uintptr_t)&state;
    }
    state += 0x9E3779B97F4A7C15ull;
    uint64_t mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)(mixed >> 32) | 1;
}

/* The slab of a class to take a slot from next; -1: none has a free slot, and no free slab is left. */
static int64_t slab_with_room(Core *core, uint32_t slot_size)
{
    int found = class_of(core, slot_size);
    if (found < 0)
        return -1;
    Class *class = core->classes + found;
    while (class->count) {
        uint32_t number = class->slabs[class->count - 1];
        Slab *slab = core->slabs + number;
        if (slab->owners && slab->class == (uint32_t)found && slab->free)
            return number;
        class->count--;
        if (slab->class == (uint32_t)found)
            slab->in_list = 0;
    }
    if (!core->free_count)
        return -1;
    uint32_t number = core->free_slabs[--core->free_count];
    SlabState *state = core->states + number;
    state->incarnation = random_word();
    __atomic_store_n(&state->slot_size, slot_size, __ATOMIC_SEQ_CST);
    if (!cut_slab(core, number, slot_size)) {
        state->slot_size = 0;
        core->free_slabs[core->free_count++] = number;
        return -1;
    }
    core->slabs[number].is_head_due = 1;
    return number;
}

static uint32_t take_slot(Slab *slab)
{
    for (uint32_t i = 0; i < slab->count; i++) {
        uint32_t slot = slab->hint + i < slab->count ? slab->hint + i : slab->hint + i - slab->count;
        if (slab->owners[slot] < SLOT_HELD) {
            slab->hint = slot + 1 < slab->count ? slot + 1 : 0;
            slab->free--;
            return slot;
        }
    }
    return 0; /* not reached: the caller saw a free one */
}

/* A slab without blocks has no class any more: its head says so at the next write. */
static void free_slab(Core *core, uint32_t number)
{
    Slab *slab = core->slabs + number;
    if (slab->free != slab->count || slab->held || core->free_count == core->free_room)
        return;
    free(slab->owners);
    slab->owners = NULL;
    slab->in_list = 0;
    __atomic_store_n(&core->states[number].slot_size, 0, __ATOMIC_SEQ_CST);
    core->free_slabs[core->free_count++] = number;
    push(&core->stale, (Entry){number, NO_NOTE, core->states[number].incarnation});
}

static void free_slot(Core *core, uint32_t number, uint32_t slot, int is_held)
{
    Slab *slab = core->slabs + number;
    if (!slab->owners || slot >= slab->count)
        return;
    if (is_held) { /* a write to it is under way: `end_batch` frees it */
        slab->owners[slot] = SLOT_HELD;
        slab->held++;
        push(&core->stale, (Entry){number, slot, core->states[number].incarnation});
        return;
    }
    slab->owners[slot] = SLOT_STALE;
    slab->free++;
    push(&core->stale, (Entry){number, slot, core->states[number].incarnation});
    if (!slab->in_list && slab->free == 1)
        slab->in_list = (uint32_t)list_slab(core->classes + slab->class, number);
    free_slab(core, number);
}

/* The slot size for so many bytes. Sizes that come often get a size of their own. 0: larger than a slab. */
static uint32_t slot_size_for(Core *core, uint32_t length)
{
    uint32_t size = (uint32_t)padded(length ? length : 1), low = 0, high = core->size_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (core->sizes[middle] < size)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == core->size_count)
        return 0;
    if (core->sizes[low] == size || core->learned >= 64 || core->size_count == SIZES)
        return core->sizes[low];
    uint32_t place = (size / PAGE) % SEEN;
    if (core->seen[place].pages != size / PAGE)
        core->seen[place].pages = size / PAGE, core->seen[place].count = 0;
    uint64_t now = core->slab_size / core->sizes[low], then = core->slab_size / size;
    if (++core->seen[place].count < LEARN_AFTER || (then - now) * 64 < now)
        return core->sizes[low];
    memmove(core->sizes + low + 1, core->sizes + low, (core->size_count - low) * sizeof *core->sizes);
    core->sizes[low] = size;
    core->size_count++, core->learned++;
    return size;
}

/* -- quotas ------------------------------------------------------------------------------------------------------- */

static int has_quota(Core *core, int space, uint64_t size)
{
    for (; space >= 0; space = core->spaces[space].above) {
        const Space *one = core->spaces + space;
        if (one->bytes + size > one->bytes_max || one->blocks + 1 > one->blocks_max)
            return 0;
    }
    return 1;
}

static void charge(Core *core, int space, int64_t size, int64_t blocks)
{
    for (; space >= 0; space = core->spaces[space].above)
        core->spaces[space].bytes += (uint64_t)size, core->spaces[space].blocks += (uint64_t)blocks;
}

/* -- memory ------------------------------------------------------------------------------------------------------- */

static uint32_t distance_of(const Arena *arena, const Note *note);

static int is_resident_here(Core *core, const Arena *arena, const Note *note)
{
    const Table *table = core->tables + arena->table;
    if (note->row >= table->index.header->row_end)
        return 0;
    const Row *row = table->index.rows + note->row;
    return (row->version & 1) && row->arena == arena->number && row->sequence == note->sequence;
}

/* Nothing is found in an arena any more; blocks that were used since they came stay, up to a quarter of it. */
static void recycle_arena(Core *core, Arena *arena)
{
    uint64_t hot = 0, used = 0, end = arena->tail->notes, kept_notes = 0;
    struct Kept {
        uint32_t row, page;
        uint8_t name_length, name[NAME_MAX_BYTES];
    } *kept = NULL;
    uint32_t kept_count = 0, kept_room = 0;
    for (uint64_t at = 0; at < end;) {
        /* notes are read from the first one, which is next to the tail */
        const Note *note = (const Note *)((uint8_t *)arena->tail - at) - 1;
        at += note->size;
        if (note->row == NO_NOTE || !is_resident_here(core, arena, note))
            continue;
        Row *row = core->tables[arena->table].index.rows + note->row;
        begin_change(row);
        uint64_t size = padded(row->length);
        if ((row->flags & HOT) && hot + size <= arena->size / 4) {
            if (kept_count == kept_room) {
                uint32_t room = kept_room ? 2 * kept_room : 64;
                void *more = realloc(kept, room * sizeof *kept);
                if (more)
                    kept = more, kept_room = room;
            }
            if (kept_count < kept_room) {
                struct Kept *one = kept + kept_count++;
                one->row = note->row, one->page = row->page, one->name_length = note->name_length;
                memcpy(one->name, (const uint8_t *)note - (note->size - sizeof *note), note->name_length);
                hot += size;
                continue;
            }
        }
        row->arena = 0;
        row->flags &= ~(uint32_t)HOT;
        end_change(row);
        core->resident--;
    }
    __atomic_store_n(&arena->tail->notes, 0, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < kept_count; i++) { /* in the order of their places: each moves down, or stays */
        Row *row = core->tables[arena->table].index.rows + kept[i].row;
        memmove(arena->base + used, arena->base + (uint64_t)kept[i].page * PAGE, padded(row->length));
        uint64_t size = sizeof(Note) + (kept[i].name_length + 7u) / 8 * 8;
        Note *note = (Note *)((uint8_t *)arena->tail - kept_notes) - 1;
        memcpy((uint8_t *)note - (size - sizeof *note), kept[i].name, kept[i].name_length);
        *note = (Note){row->sequence, kept[i].row, (uint16_t)size, kept[i].name_length, 0};
        kept_notes += size;
        __atomic_store_n(&arena->tail->notes, kept_notes, __ATOMIC_SEQ_CST);
        row->page = (uint32_t)(used / PAGE), row->note = distance_of(arena, note);
        row->flags &= ~(uint32_t)HOT;
        end_change(row);
        used += padded(row->length);
    }
    free(kept);
    arena->live = kept_count;
    core->relocated += kept_count;
    core->recycled++;
    __atomic_store_n(&arena->tail->used, used, __ATOMIC_SEQ_CST);
}

/* An arena of a table with room, which takes the place of the one that is full. NULL: no memory is free now. */
static Arena *next_arena(Core *core, Table *table)
{
    int number = (int)(table - core->tables), spare = -1, oldest = -1;
    if (table->arena >= 0) {
        core->arenas[table->arena].state = FILLED;
        core->arenas[table->arena].tail->stamp = ++core->stamp;
        table->arena = -1;
    }
    for (uint32_t a = 0; a < core->arena_count; a++) {
        Arena *arena = core->arenas + a;
        if (!arena->base || (arena->table != number && arena->state != SPARE))
            continue;
        if (arena->state == FILLED && !arena->pins && !arena->dirty &&
            (oldest < 0 || arena->tail->stamp < core->arenas[oldest].tail->stamp || (!arena->live && core->arenas[oldest].live)))
            oldest = (int)a;
        if (arena->state == SPARE && spare < 0)
            spare = (int)a;
    }
    if (oldest >= 0 && !core->arenas[oldest].live)
        spare = -1;
    int chosen = spare >= 0 ? spare : oldest;
    if (chosen < 0)
        return NULL;
    Arena *arena = core->arenas + chosen;
    if (arena->state == SPARE) {
        arena->table = number;
        __atomic_store_n(&arena->tail->serial, table->index.header->serial, __ATOMIC_SEQ_CST);
    } else {
        recycle_arena(core, arena);
    }
    arena->state = FILLING;
    table->arena = chosen;
    return arena;
}

/* Room for a block and its note, pinned. NULL: there is none now. */
static Arena *take_memory(Core *core, Table *table, uint32_t length, uint32_t name_length, uint64_t *offset, Note **note)
{
    uint64_t size = padded(length), note_size = sizeof(Note) + (name_length + 7u) / 8 * 8;
    Arena *arena = table->arena >= 0 ? core->arenas + table->arena : NULL;
    for (int turn = 0; turn < 3; turn++) {
        if (arena && arena->tail->used + size + arena->tail->notes + note_size <= arena->size - sizeof(Tail))
            break;
        arena = next_arena(core, table);
        if (!arena)
            return NULL;
    }
    if (arena->tail->used + size + arena->tail->notes + note_size > arena->size - sizeof(Tail))
        return NULL;
    *offset = arena->tail->used;
    *note = (Note *)((uint8_t *)arena->tail - arena->tail->notes) - 1;
    **note = (Note){0, NO_NOTE, (uint16_t)note_size, (uint8_t)name_length, 0};
    __atomic_store_n(&arena->tail->notes, arena->tail->notes + note_size, __ATOMIC_SEQ_CST);
    __atomic_store_n(&arena->tail->used, arena->tail->used + size, __ATOMIC_SEQ_CST);
    arena->pins++;
    return arena;
}

static uint32_t distance_of(const Arena *arena, const Note *note)
{
    return (uint32_t)(((const uint8_t *)arena->tail - (const uint8_t *)note) / 8);
}

static Note *note_of(const Arena *arena, const Row *row)
{
    return (Note *)((uint8_t *)arena->tail - 8 * (uint64_t)row->note);
}

static uint8_t *name_in(Note *note) { return (uint8_t *)note - (note->size - sizeof *note); }

static void unpin(Arena *arena) { arena->pins--; }

/* -- rows --------------------------------------------------------------------------------------------------------- */

static int64_t take_row(Table *table)
{
    TableHeader *header = table->index.header;
    if (table->free_count)
        return table->free_rows[--table->free_count];
    return header->row_end < header->rows_max ? (int64_t)header->row_end++ : -1;
}

static void give_row(Table *table, uint32_t row)
{
    if (table->free_count == table->free_room) {
        uint32_t room = table->free_room ? 2 * table->free_room : 256;
        uint32_t *rows = realloc(table->free_rows, room * sizeof *rows);
        if (!rows)
            return; /* the row is used again by the next daemon */
        table->free_rows = rows, table->free_room = room;
    }
    table->free_rows[table->free_count++] = row;
}

/* Let go of what a row has: its slot and its memory. The row is being changed, or is no block any more. */
static void release_row(Core *core, Table *table, Row *row)
{
    Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
    if (arena) {
        arena->live--;
        core->resident--;
        arena->dirty -= (row->flags & (DIRTY | WRITING)) != 0;
        if (row->flags & (DIRTY | WRITING))
            core->dirty_bytes -= padded(row->length);
    }
    if (core->slabs[row->slab].owners)
        charge(core, table->space, -(int64_t)core->classes[core->slabs[row->slab].class].slot_size, -1);
    free_slot(core, row->slab, row->slot, (row->flags & WRITING) != 0);
}

static struct Removed *removed_place(struct Removed *all, uint64_t room, Fingerprint wanted)
{
    uint64_t place = wanted.low & (room - 1);
    while (all[place].sequence && !is_same(all[place].fingerprint, wanted))
        place = (place + 1) & (room - 1);
    return all + place;
}

/* A slab that is not loaded yet may have an older block of this name. 0: no memory. */
static int note_removed(Core *core, const Row *row)
{
    if (!core->loading)
        return 1;
    if (2 * core->removed_count >= core->removed_room) {
        uint64_t room = core->removed_room ? 2 * core->removed_room : 1024;
        struct Removed *all = calloc(room, sizeof *all);
        if (!all)
            return 0;
        for (uint64_t i = 0; i < core->removed_room; i++)
            if (core->removed[i].sequence)
                *removed_place(all, room, core->removed[i].fingerprint) = core->removed[i];
        free(core->removed);
        core->removed = all, core->removed_room = room;
    }
    struct Removed *place = removed_place(core->removed, core->removed_room, row->fingerprint);
    core->removed_count += !place->sequence;
    *place = (struct Removed){row->fingerprint, core->sequence};
    return 1;
}

static void drop_row(Core *core, Table *table, uint32_t number)
{
    Row *row = table->index.rows + number;
    begin_change(row);
    leave_row(&table->index, number);
    note_removed(core, row);
    release_row(core, table, row);
    row->arena = row->flags = 0;
    table->index.header->live--;
    give_row(table, number);
}

static uint64_t next_sequence(Core *core, uint64_t now_us)
{
    return core->sequence = core->sequence + 1 > now_us ? core->sequence + 1 : now_us;
}

/* -- put ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t now_us, directory;
    uint32_t now, expires;
    uint8_t priority;
} PutTerms;

typedef struct {
    const uint8_t *source;
    uint32_t length, slab, slot, checksum;
    uint8_t name_length, name[NAME_MAX_BYTES];
    Arena *arena;
    Note *note;
    uint64_t offset;
    Fingerprint fingerprint;
} Plan;

static int is_plain_name(const uint8_t *name, size_t length)
{
    if (!length || name[0] == '%' || memchr(name, '/', length) || memchr(name, 0, length))
        return 0;
    return !(name[0] == '.' && (length == 1 || (length == 2 && name[1] == '.')));
}

/* Reserve slot, quota and memory. 0 or why not. */
static int plan_put(Core *core, Table *table, Plan *plan)
{
    uint32_t slot_size = slot_size_for(core, plan->length);
    if (!slot_size)
        return TOO_LARGE;
    if (!has_quota(core, table->space, slot_size))
        return NO_QUOTA;
    if (core->dirty_bytes >= core->dirty_max)
        return NO_MEMORY;
    int64_t slab = slab_with_room(core, slot_size);
    if (slab < 0)
        return NO_SLOT;
    plan->arena = take_memory(core, table, plan->length, plan->name_length, &plan->offset, &plan->note);
    if (!plan->arena)
        return NO_MEMORY;
    plan->slab = (uint32_t)slab;
    plan->slot = take_slot(core->slabs + slab);
    core->slabs[slab].owners[plan->slot] = SLOT_HELD;
    core->slabs[slab].held++;
    charge(core, table->space, slot_size, 1);
    core->dirty_bytes += padded(plan->length);
    return 0;
}

static void undo_plan(Core *core, Table *table, Plan *plan)
{
    Slab *slab = core->slabs + plan->slab;
    charge(core, table->space, -(int64_t)core->classes[slab->class].slot_size, -1);
    core->dirty_bytes -= padded(plan->length);
    slab->held--;
    free_slot(core, plan->slab, plan->slot, 0);
    unpin(plan->arena);
}

static void copy_plan(const Table *table, uint64_t directory, Plan *plan)
{
    plan->fingerprint = fingerprint_of(table->index.multipliers, directory, plan->name, plan->name_length);
    uint8_t *target = plan->arena->base + plan->offset;
    plan->checksum = copy_granule(target, plan->source, plan->length);
    memset(target + plan->length, 0, padded(plan->length) - plan->length);
    memcpy(name_in(plan->note), plan->name, plan->name_length);
}

/* Make a block visible, in the place of the one of its name. 0, or why it is not. */
static int publish(Core *core, Table *table, Plan *plan, const PutTerms *terms, uint64_t *sequence)
{
    int64_t number = find_row(&table->index, plan->fingerprint);
    Row *row;
    int is_new = number < 0;
    if (is_new) {
        number = take_row(table);
        if (number < 0)
            return NO_SLOT;
        row = table->index.rows + number;
        begin_change(row);
        row->fingerprint = plan->fingerprint;
        if (!enter_row(&table->index, (uint32_t)number)) {
            give_row(table, (uint32_t)number);
            return NO_SLOT;
        }
        table->index.header->live++;
    } else {
        row = table->index.rows + number;
        begin_change(row);
        release_row(core, table, row);
    }
    *sequence = next_sequence(core, terms->now_us);
    plan->note->sequence = *sequence;
    __atomic_store_n(&plan->note->row, (uint32_t)number, __ATOMIC_SEQ_CST);
    row->arena = plan->arena->number;
    row->page = (uint32_t)(plan->offset / PAGE), row->note = distance_of(plan->arena, plan->note);
    row->length = plan->length, row->checksum = plan->checksum;
    row->slab = plan->slab, row->slot = (uint16_t)plan->slot;
    row->flags = DIRTY;
    row->sequence = *sequence, row->directory = terms->directory;
    row->due = terms->now_us, row->used = row->stored = terms->now, row->expires = terms->expires;
    row->uses = row->list = 0, row->priority = terms->priority, row->name_length = plan->name_length;
    plan->arena->dirty++, plan->arena->live++;
    core->resident++;
    core->slabs[plan->slab].held--;
    core->slabs[plan->slab].owners[plan->slot] =
        SLOT_OWNED + ((uint64_t)(table - core->tables) << 32) + (uint64_t)number;
    end_change(row);
    push(&core->dirty, (Entry){(uint32_t)(table - core->tables), (uint32_t)number, *sequence});
    unpin(plan->arena);
    core->puts++, core->put_bytes += plan->length;
    return 0;
}

/* Names in one piece of memory, which a client may change at any time: each is copied once. */
typedef struct {
    const uint8_t *text;
    const uint64_t *offsets;
    const uint32_t *lengths;
    uint64_t size;
} Names;

static int copy_name(const Names *names, int64_t i, int plain_only, uint8_t *name, uint8_t *length)
{
    uint64_t offset = names->offsets[i];
    uint32_t size = names->lengths[i];
    if (!size || size > NAME_MAX_BYTES || offset > names->size || size > names->size - offset)
        return 0;
    memcpy(name, names->text + offset, size);
    *length = (uint8_t)size;
    return !plain_only || is_plain_name(name, size);
}

static int64_t put_all(Core *core, Table *table, const Names *names, int plain_only, const uint64_t *sources,
                          const int64_t *sizes, int64_t count, const PutTerms *terms, Plan *plans, int64_t *results,
                          uint64_t *sequences)
{
    int64_t planned = 0;
    lock(core);
    int why = table->is_known && !table->is_ended ? 0 : ENDED;
    for (; !why && planned < count; planned += !why) {
        Plan *plan = plans + planned;
        plan->source = (const uint8_t *)(uintptr_t)sources[planned];
        plan->length = (uint32_t)sizes[planned];
        if (!copy_name(names, planned, plain_only, plan->name, &plan->name_length))
            why = ODD_NAME;
        else if (sizes[planned] <= 0 || (uint64_t)sizes[planned] > core->slab_size)
            why = TOO_LARGE;
        else
            why = plan_put(core, table, plan);
    }
    core->refused += why != 0;
    unlock(core);
    for (int64_t i = planned; i < count; i++)
        results[i] = i == planned ? why : NOT_TRIED;
    for (int64_t i = 0; i < planned; i++)
        copy_plan(table, terms->directory, plans + i);
    lock(core);
    for (int64_t i = 0; i < planned; i++) {
        results[i] = table->is_ended ? ENDED : publish(core, table, plans + i, terms, sequences + i);
        if (results[i])
            undo_plan(core, table, plans + i);
    }
    unlock(core);
    return planned;
}

/* -- find, get, drop ---------------------------------------------------------------------------------------------- */

static int64_t find_name(const Index *index, uint64_t directory, const Names *names, int64_t i, int plain_only,
                         uint32_t now, Fingerprint *wanted)
{
    uint8_t name[NAME_MAX_BYTES], length;
    if (!copy_name(names, i, plain_only, name, &length))
        return ODD_NAME;
    *wanted = fingerprint_of(index->multipliers, directory, name, length);
    int64_t row = find_row(index, *wanted);
    if (row >= 0 && index->rows[row].expires && now >= index->rows[row].expires)
        return ABSENT;
    return row;
}

/* Copy blocks that are in memory to where there is room for them. */
static void get_all(Core *core, Table *table, uint64_t directory, const Names *names, int plain_only,
                    const uint64_t *targets, const int64_t *rooms, int64_t count, uint32_t now, int64_t *rows,
                    int64_t *results, Arena **pinned, uint64_t *offsets)
{
    Fingerprint wanted;
    lock(core);
    for (int64_t i = 0; i < count; i++) {
        pinned[i] = NULL;
        rows[i] = table->is_ended ? ABSENT : find_name(&table->index, directory, names, i, plain_only, now, &wanted);
        results[i] = rows[i];
        if (rows[i] < 0)
            continue;
        Row *row = table->index.rows + rows[i];
        Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
        row->used = now;
        if (row->length > rooms[i]) {
            results[i] = NO_ROOM;
            continue;
        }
        if (!arena) {
            results[i] = NOT_RESIDENT;
            continue;
        }
        row->flags |= HOT;
        arena->pins++;
        pinned[i] = arena, offsets[i] = (uint64_t)row->page * PAGE, results[i] = row->length;
        core->gets++, core->get_bytes += row->length;
    }
    unlock(core);
    for (int64_t i = 0; i < count; i++)
        if (pinned[i])
            memcpy((void *)(uintptr_t)targets[i], pinned[i]->base + offsets[i], (size_t)results[i]);
    lock(core);
    for (int64_t i = 0; i < count; i++)
        if (pinned[i])
            unpin(pinned[i]);
    unlock(core);
}

/* -- writing ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t table, row, slab, slot, arena;
    uint64_t sequence;
} Written;

typedef struct {
    int64_t slab, offset; /* ``offset``: in the slab's data, or in its heads and names */
    uint64_t address;
    int64_t length;
} Run;

typedef struct {
    Written *rows;
    Run *data, *heads;
    uint8_t *staging;
    uint64_t count, data_count, head_count, upto, stale_upto, bytes;
} Batch;

static int by_place(const void *one, const void *other)
{
    const Written *a = one, *b = other;
    if (a->slab != b->slab)
        return a->slab < b->slab ? -1 : 1;
    return a->slot < b->slot ? -1 : a->slot > b->slot;
}

static void add_run(Run *runs, uint64_t *count, int64_t slab, int64_t offset, uint64_t address, int64_t length)
{
    Run *last = runs + *count - 1;
    if (*count && last->slab == slab && last->offset + last->length == offset && last->address + (uint64_t)last->length == address)
        last->length += length;
    else
        runs[(*count)++] = (Run){slab, offset, address, length};
}

static void seal_head(Head *head)
{
    head->crc = checksum_of(0, (const uint8_t *)head, HEAD - 4);
}

static int fill_batch(Core *core, Batch *batch, uint64_t bytes_max, uint64_t rows_max)
{
    uint64_t stale = core->stale.tail - core->stale.head, dirty = core->dirty.tail - core->dirty.head;
    stale = stale < rows_max ? stale : rows_max, dirty = dirty < rows_max ? dirty : rows_max;
    batch->rows = malloc((dirty + 1) * sizeof *batch->rows);
    batch->data = malloc((dirty + 1) * sizeof *batch->data);
    batch->heads = malloc((3 * dirty + stale + 1) * sizeof *batch->heads);
    batch->staging = malloc(dirty * (2 * HEAD + NAME_ROOM) + stale * HEAD + 1);
    if (!batch->rows || !batch->data || !batch->heads || !batch->staging)
        return 0;
    while (batch->count < dirty && batch->bytes < bytes_max && core->dirty.head < core->dirty.tail) {
        Entry entry = pop(&core->dirty);
        Table *table = core->tables + entry.table;
        Row *row = table->index.rows + entry.row;
        Arena *arena = NULL;
        if (!table->is_known || table->is_ended || !(row->version & 1) || row->sequence != entry.sequence ||
            !(row->flags & DIRTY) || !(arena = arena_of(core, row->arena)))
            continue;
        row->flags = (row->flags & ~(uint32_t)DIRTY) | WRITING;
        arena->pins++;
        batch->rows[batch->count++] = (Written){entry.table, entry.row, row->slab, row->slot, (uint32_t)(arena - core->arenas), row->sequence};
        batch->bytes += padded(row->length);
    }
    batch->upto = core->dirty.head;
    qsort(batch->rows, batch->count, sizeof *batch->rows, by_place);
    uint8_t *place = batch->staging;
    for (uint64_t i = 0; i < batch->count; i++) {
        const Written *one = batch->rows + i;
        const Row *row = row_at(core, one->table, one->row);
        const Table *table = core->tables + one->table;
        Slab *slab = core->slabs + one->slab;
        SlabState *state = core->states + one->slab;
        Arena *arena = core->arenas + one->arena;
        uint32_t slot_size = core->classes[slab->class].slot_size;
        add_run(batch->data, &batch->data_count, one->slab, (int64_t)(one->slot + slab->lead) * slot_size,
                (uint64_t)(uintptr_t)(arena->base + (uint64_t)row->page * PAGE), (int64_t)padded(row->length));
        if (slab->is_head_due) {
            Head *head = (Head *)place;
            memset(head, 0, HEAD);
            head->magic = HEAD_MAGIC, head->version = HEAD_VERSION, head->state = STATE_SLAB;
            head->incarnation = state->incarnation, head->slot_size = slot_size, head->token = state->token;
            seal_head(head);
            add_run(batch->heads, &batch->head_count, one->slab, 0, (uint64_t)(uintptr_t)place, HEAD);
            place += HEAD;
            slab->is_head_due = 0;
        }
        Head *head = (Head *)place;
        const TableHeader *of = table->index.header;
        memset(head, 0, HEAD);
        head->magic = HEAD_MAGIC, head->version = HEAD_VERSION, head->state = STATE_BLOCK;
        head->length = row->length, head->fingerprint = row->fingerprint, head->sequence = row->sequence;
        head->directory = row->directory, head->name_space = of->name_space;
        head->epoch = core->spaces[table->space].epoch, head->incarnation = state->incarnation;
        head->uid = of->uid, head->gid = of->gid, head->mode = (uint16_t)of->mode;
        head->checksum = row->checksum, head->stored = row->stored, head->expires = row->expires;
        head->name_length = row->name_length, head->priority = row->priority, head->slot_size = slot_size;
        seal_head(head);
        add_run(batch->heads, &batch->head_count, one->slab, HEAD * (int64_t)(one->slot + 1), (uint64_t)(uintptr_t)place, HEAD);
        place += HEAD;
    }
    for (uint64_t i = 0; i < batch->count; i++) {
        const Written *one = batch->rows + i;
        const Row *row = row_at(core, one->table, one->row);
        memset(place, 0, NAME_ROOM);
        memcpy(place, name_in(note_of(core->arenas + one->arena, row)), row->name_length);
        int64_t size = (row->name_length + 7) / 8 * 8; /* neighbours make one run */
        if (i + 1 < batch->count && one[1].slab == one->slab && one[1].slot == one->slot + 1)
            size = NAME_ROOM;
        add_run(batch->heads, &batch->head_count, one->slab, (int64_t)name_place(core->slabs[one->slab].count, one->slot),
                (uint64_t)(uintptr_t)place, size);
        place += NAME_ROOM;
    }
    for (uint64_t i = 0; i < stale && core->stale.head < core->stale.tail; i++) {
        Entry entry = pop(&core->stale);
        const SlabState *state = core->states + entry.table;
        Slab *slab = core->slabs + entry.table;
        if (state->incarnation != entry.sequence)
            continue;
        if (entry.row != NO_NOTE && slab->owners && slab->owners[entry.row] == SLOT_HELD) {
            push(&core->stale, entry); /* a write to it is under way */
            continue;
        }
        if (entry.row == NO_NOTE ? state->slot_size != 0 || !state->is_ours
                                 : !slab->owners || slab->owners[entry.row] != SLOT_STALE)
            continue; /* it is in use again, and its head was, or will be, written */
        push(&core->unsynced, entry);
        if (entry.row != NO_NOTE)
            slab->owners[entry.row] = SLOT_FREE;
        Head *head = (Head *)place;
        memset(head, 0, HEAD);
        head->magic = HEAD_MAGIC, head->version = HEAD_VERSION, head->state = STATE_FREE;
        head->incarnation = state->incarnation;
        seal_head(head);
        add_run(batch->heads, &batch->head_count, entry.table, entry.row == NO_NOTE ? 0 : HEAD * (int64_t)(entry.row + 1),
                (uint64_t)(uintptr_t)place, HEAD);
        place += HEAD;
    }
    batch->stale_upto = core->stale.head;
    return 1;
}

/* All of it is written. */
static void end_batch(Core *core, Batch *batch)
{
    for (uint64_t i = 0; i < batch->count; i++) {
        const Written *one = batch->rows + i;
        Table *table = core->tables + one->table;
        Row *row = table->index.rows + one->row;
        Arena *arena = core->arenas + one->arena;
        Slab *slab = core->slabs + one->slab;
        if (table->is_known && !table->is_ended && (row->version & 1) && row->sequence == one->sequence) {
            row->flags &= ~(uint32_t)WRITING;
            arena->dirty--;
            core->dirty_bytes -= padded(row->length);
        } else if (slab->owners && slab->owners[one->slot] == SLOT_HELD) {
            slab->held--; /* `free_slot` noted then that its head is stale */
            slab->owners[one->slot] = SLOT_STALE;
            slab->free++;
            if (!slab->in_list)
                slab->in_list = (uint32_t)list_slab(core->classes + slab->class, one->slab);
            free_slab(core, one->slab);
        }
        unpin(arena);
    }
    core->batches++;
}

/* A sync failed: what was written since the last one may be lost. It is written again where it is in memory, else it is
   dropped. */
static void doubt_unsynced(Core *core)
{
    while (core->unsynced.head < core->unsynced.tail) {
        Entry entry = pop(&core->unsynced);
        Slab *slab = core->slabs + entry.table;
        if (entry.row != NO_NOTE && slab->owners && core->states[entry.table].incarnation == entry.sequence &&
            slab->owners[entry.row] == SLOT_FREE)
            slab->owners[entry.row] = SLOT_STALE;
        push(&core->stale, entry);
    }
    for (uint32_t number = 0; number < core->slab_count; number++)
        core->slabs[number].is_head_due = core->slabs[number].owners != NULL;
    for (uint32_t t = 0; t < TABLES; t++) {
        Table *table = core->tables + t;
        for (uint32_t r = 0; table->is_known && !table->is_ended && r < table->index.header->row_end; r++) {
            Row *row = table->index.rows + r;
            if (!(row->version & 1) || row->sequence <= core->synced || (row->flags & (DIRTY | WRITING)))
                continue;
            Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
            if (!arena) {
                drop_row(core, table, r);
                continue;
            }
            row->flags |= DIRTY;
            arena->dirty++;
            core->dirty_bytes += padded(row->length);
            push(&core->dirty, (Entry){t, r, row->sequence});
        }
    }
}

/* -- from the medium into memory ---------------------------------------------------------------------------------- */

typedef struct {
    uint32_t table;
    int64_t count;
    struct Coming {
        uint32_t row;
        uint64_t sequence, offset;
        Arena *arena; /* NULL: it is not to come */
        Note *note;
    } *rows;
} Landing;

/* Reserve memory for blocks that only a slab has. ``places``: address, or 0; then ``sizes`` has the reason. */
static void reserve_all(Core *core, Landing *landing, const Names *names, const int64_t *rows, const uint64_t *sequences,
                        uint64_t *places, int64_t *sizes, uint32_t *slabs, uint64_t *offsets)
{
    Table *table = core->tables + landing->table;
    lock(core);
    for (int64_t i = 0; i < landing->count; i++) {
        struct Coming *one = landing->rows + i;
        uint8_t name[NAME_MAX_BYTES], length;
        one->arena = NULL, places[i] = 0, sizes[i] = ABSENT;
        if (table->is_ended || rows[i] < 0 || rows[i] >= table->index.header->row_end || !copy_name(names, i, 0, name, &length))
            continue;
        Row *row = table->index.rows + rows[i];
        if (!(row->version & 1) || row->sequence != sequences[i] || row->arena || !core->slabs[row->slab].owners)
            continue;
        one->row = (uint32_t)rows[i], one->sequence = row->sequence;
        one->arena = take_memory(core, table, row->length, length, &one->offset, &one->note);
        if (!one->arena) {
            sizes[i] = NO_MEMORY;
            continue;
        }
        memcpy(name_in(one->note), name, length);
        places[i] = (uint64_t)(uintptr_t)(one->arena->base + one->offset), sizes[i] = row->length;
        const Slab *slab = core->slabs + row->slab;
        slabs[i] = row->slab;
        offsets[i] = (uint64_t)(row->slot + slab->lead) * core->classes[slab->class].slot_size;
    }
    unlock(core);
}

/* Show what came, where it is what the row says. ``results``: 1, or 0 for bytes that are not the block's. */
static void land_all(Core *core, Landing *landing, const uint8_t *came, int64_t *results)
{
    Table *table = core->tables + landing->table;
    for (int64_t i = 0; i < landing->count; i++) {
        struct Coming *one = landing->rows + i;
        results[i] = 0;
        if (!one->arena)
            continue;
        Row *row = table->index.rows + one->row;
        uint32_t sum = 0, length = row->length;
        uint64_t room = one->arena->size - one->offset;
        if (came[i] && length <= room)
            sum = checksum_of(0, one->arena->base + one->offset, length);
        lock(core);
        if (came[i] && !table->is_ended && (row->version & 1) && row->sequence == one->sequence && !row->arena &&
            row->length == length && row->checksum == sum) {
            one->note->sequence = one->sequence;
            __atomic_store_n(&one->note->row, one->row, __ATOMIC_SEQ_CST);
            begin_change(row);
            row->arena = one->arena->number, row->page = (uint32_t)(one->offset / PAGE);
            row->note = distance_of(one->arena, one->note);
            end_change(row);
            one->arena->live++;
            core->resident++;
            results[i] = 1;
        }
        unpin(one->arena);
        one->arena = NULL;
        unlock(core);
    }
}

/* -- at a start --------------------------------------------------------------------------------------------------- */

static int is_sound_head(const Head *head, uint32_t state)
{
    return head->magic == HEAD_MAGIC && head->version == HEAD_VERSION && head->state == state &&
           head->crc == checksum_of(0, (const uint8_t *)head, HEAD - 4);
}

static int table_for(Core *core, const Head *head, int hint)
{
    for (int t = -1; t < TABLES; t++) {
        const Table *table = core->tables + (t < 0 ? hint : t);
        if (!table->is_known || table->is_ended)
            continue;
        const TableHeader *of = table->index.header;
        if (of->name_space == head->name_space && of->directory == head->directory && of->uid == head->uid &&
            of->gid == head->gid && (uint16_t)of->mode == head->mode)
            return (int)(table - core->tables);
    }
    return -1;
}

/* Enter a block that a head describes, unless there is a newer one of its name. 1: its slot is taken. */
static int load_head(Core *core, uint32_t number, uint32_t slot, const Head *head, int *hint)
{
    int found = table_for(core, head, *hint);
    Slab *slab = core->slabs + number;
    uint32_t slot_size = core->classes[slab->class].slot_size;
    if (found < 0 || !head->length || head->length > slot_size || head->slot_size != slot_size)
        return 0;
    *hint = found;
    Table *table = core->tables + found;
    if (core->spaces[table->space].epoch != head->epoch)
        return 0;
    if (core->removed_count) {
        const struct Removed *gone = removed_place(core->removed, core->removed_room, head->fingerprint);
        if (gone->sequence > head->sequence)
            return 0;
    }
    if (head->sequence > core->sequence)
        core->sequence = head->sequence;
    int64_t place = find_row(&table->index, head->fingerprint);
    if (place >= 0) {
        Row *row = table->index.rows + place;
        if (row->sequence >= head->sequence)
            return 0;
        drop_row(core, table, (uint32_t)place);
    }
    place = take_row(table);
    if (place < 0)
        return 0;
    Row *row = table->index.rows + place;
    begin_change(row);
    row->fingerprint = head->fingerprint;
    if (!enter_row(&table->index, (uint32_t)place)) {
        give_row(table, (uint32_t)place);
        return 0;
    }
    row->arena = row->page = row->note = row->flags = 0;
    row->length = head->length, row->checksum = head->checksum;
    row->slab = number, row->slot = (uint16_t)slot, row->spare_slot = 0;
    row->sequence = head->sequence, row->directory = head->directory;
    row->due = (uint64_t)head->stored * 1000000, row->used = row->stored = head->stored, row->expires = head->expires;
    row->uses = row->list = 0, row->priority = head->priority, row->name_length = head->name_length;
    end_change(row);
    table->index.header->live++;
    slab->owners[slot] = SLOT_OWNED + ((uint64_t)found << 32) + (uint64_t)place;
    slab->free--;
    charge(core, table->space, slot_size, 1);
    return 1;
}

/* Take over a slab by its heads. How many blocks it has. */
static int64_t load_slab(Core *core, uint32_t number, uint32_t token, const uint8_t *meta, uint64_t size)
{
    const Head *first = (const Head *)meta;
    int64_t count = 0;
    int hint = 0;
    SlabState *state = core->states + number;
    state->is_ours = 1, state->token = token;
    if (size < HEAD || !is_sound_head(first, STATE_SLAB) || first->token != token || !first->slot_size || first->slot_size % PAGE ||
        first->slot_size > core->slab_size)
        goto none;
    state->incarnation = first->incarnation;
    state->slot_size = first->slot_size;
    if (!cut_slab(core, number, first->slot_size))
        goto none;
    Slab *slab = core->slabs + number;
    for (uint32_t slot = 0; slot < slab->count && (uint64_t)HEAD * (slot + 2) <= size; slot++) {
        const Head *head = (const Head *)(meta + (uint64_t)HEAD * (slot + 1));
        if (head->magic != HEAD_MAGIC || head->incarnation != first->incarnation || !is_sound_head(head, STATE_BLOCK))
            continue;
        if (load_head(core, number, slot, head, &hint))
            count++;
        else {
            slab->owners[slot] = SLOT_STALE;
            push(&core->stale, (Entry){number, slot, state->incarnation});
        }
    }
    free_slab(core, number);
    return count;
none:
    state->slot_size = 0;
    core->free_slabs[core->free_count++] = number;
    return 0;
}

/* Go on with the rows of the daemon before this one. A row with an odd version is whole, as it was made odd last, and has
   its slot and its memory: both were reserved before, and are given away after it was made even. What is no row's is
   free. */
static void restore_table(Core *core, Table *table)
{
    TableHeader *header = table->index.header;
    header->live = 0;
    for (uint32_t number = 0; number < header->row_end; number++) {
        Row *row = table->index.rows + number;
        if (!(row->version & 1)) {
            give_row(table, number);
            continue;
        }
        header->live++;
        Slab *slab = row->slab < core->slab_count ? core->slabs + row->slab : NULL;
        Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
        int is_lost = !slab || !slab->owners || row->slot >= slab->count || slab->owners[row->slot] >= SLOT_OWNED ||
                      (!arena && (row->flags & (DIRTY | WRITING)));
        if (is_lost) {
            begin_change(row);
            leave_row(&table->index, number);
            row->arena = row->flags = 0;
            header->live--;
            give_row(table, number);
            continue;
        }
        if (!arena && row->arena) {
            begin_change(row);
            row->arena = 0;
            end_change(row);
        }
        slab->owners[row->slot] = SLOT_OWNED + ((uint64_t)(table - core->tables) << 32) + number;
        slab->free--;
        charge(core, table->space, core->classes[slab->class].slot_size, 1);
        if (row->sequence > core->sequence)
            core->sequence = row->sequence;
        if (!arena)
            continue;
        arena->live++;
        core->resident++;
        if (row->flags & (DIRTY | WRITING)) {
            row->flags = (row->flags & ~(uint32_t)WRITING) | DIRTY;
            arena->dirty++;
            core->dirty_bytes += padded(row->length);
            push(&core->dirty, (Entry){(uint32_t)(table - core->tables), number, row->sequence});
        }
    }
}

static void restore_all(Core *core)
{
    for (uint32_t number = 0; number < core->slab_count; number++) {
        SlabState *state = core->states + number;
        if (!state->is_ours)
            continue;
        if (!state->slot_size || state->slot_size % PAGE || state->slot_size > core->slab_size ||
            !cut_slab(core, number, state->slot_size)) {
            state->slot_size = 0;
            core->free_slabs[core->free_count++] = number;
        } else
            core->slabs[number].is_head_due = 1;
    }
    for (int t = 0; t < TABLES; t++)
        if (core->tables[t].is_known && !core->tables[t].is_ended)
            restore_table(core, core->tables + t);
    for (uint32_t number = 0; number < core->slab_count; number++) {
        Slab *slab = core->slabs + number;
        if (!slab->owners)
            continue;
        for (uint32_t slot = 0; slot < slab->count; slot++)
            if (slab->owners[slot] == SLOT_FREE) {
                slab->owners[slot] = SLOT_STALE; /* its head may describe a block that was dropped */
                push(&core->stale, (Entry){number, slot, core->states[number].incarnation});
            }
        free_slab(core, number);
    }
}

/* Give the slots and the memory of an ended table's rows away, so many rows in a call. 0: nothing is left. */
static int sweep_table(Core *core, Table *table, uint32_t rows_max)
{
    uint32_t end = table->index.header->row_end;
    for (; table->swept < end && rows_max; table->swept++, rows_max--) {
        Row *row = table->index.rows + table->swept;
        if (!(row->version & 1))
            continue;
        begin_change(row);
        release_row(core, table, row);
        row->arena = row->flags = 0;
    }
    return table->swept < end;
}

#endif
