/* The block store's core: it finds, stores, shows and drops blocks, without the interpreter.

   A block is a row of a table in shared memory (blocktable.h). Its bytes are in an arena, in a slot of a slab, or both.
   Python decides about memory, slabs, limits and victims, for many blocks at once; what is here happens for each block.
   `blocks.c` makes it a Python module, and `_blocks.pyi` says what each function expects.

   One lock guards all state but the bytes of blocks: these are copied while their arena is pinned. Names are hashed, and
   heads are made, without it. A daemon may be killed between two instructions. The next one finds tables, arenas and slab
   states in shared memory, and makes all else anew from them: `restore_table` says why that is right.

   What the medium has to be told, blocks to write and heads of blocks that are no more, waits in one queue, in the order
   in which it happened. A batch takes the first of it. Batches may be written side by side, but heads of one only behind
   those of the batches before it: a slot may be used again while the head that says it is free is on its way. */

#ifndef KVFUSE_BLOCKCORE_H
#define KVFUSE_BLOCKCORE_H

#include <pthread.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#include "blocktable.h"
#include "crc32c.h"

enum { HEAD = 96, NAME_ROOM = 256, HEAD_MAGIC = 0x4B56, HEAD_VERSION = 1, STATE_FREE = 0, STATE_BLOCK = 1, STATE_SLAB = 2 };
enum { PACKED_VERSION = 2 }; /* of a block's head, if its bytes are compressed in the slot */
/* LOADED: as a head said. FOREIGN: as a head of another host's slab said. SHADOWS: such a slab has, or
   had, an older block of the name. From bit MICROS on: microseconds of
   the time that the block shows */
enum { DIRTY = 1, WRITING = 2, HOT = 4, LOADED = 8, FOREIGN = 16, SHADOWS = 32, MICROS = 12 };
enum { NO_LIST = 253 }; /* no policy decides about the row */
enum { NO_SLOT = -1, NO_MEMORY = -2, NO_QUOTA = -3, TOO_LARGE = -4, NOT_TRIED = -5, ENDED = -6, ODD_NAME = -7, PRESENT = -9 };
enum { ABSENT = -1, NOT_RESIDENT = -2, NOT_MAPPED = -3, NO_ROOM = -4, CHANGED = -8 };
enum { SLOT_FREE = 0, SLOT_STALE = 1, SLOT_HELD = 2, SLOT_OWNED = 16 };
enum { ARENAS = 4096, TABLES = 4096, TURNS = 1 << 18, SPACES = 4096, SIZES = 256, SEEN = 256, LEARN_AFTER = 64, LEARNED_MAX = 64 };
enum { SLOTS_MAX = 1 << 16, GROUP = 64, HEADS_AT_ONCE = 256, ROWS_AT_ONCE = 4096, SEQUENCE_BITS = 62 };
enum { FOREIGN_ROWS_MAX = 16 << 20 }; /* blocks of other hosts that are known: the rest is absent */
enum { SPARE, FILLING, FILLED, SEALED }; /* SEALED: no block comes to it, as people may have it mapped who lost a right */
enum { GONE_MAX = 1 << 16 };

#define TAIL_MAGIC 0x4C4941544156564Bull
#define NO_NOTE 0xFFFFFFFFu
#define OF_SLAB 0x80000000u  /* in an entry's table: it is about a slab's slot, or about the slab */
#define OWN_HEAD 0xFFFFFFFFu /* its slot then */

typedef struct {
    uint16_t magic;
    uint8_t version, state;
    uint32_t length;
    Fingerprint fingerprint;
    uint64_t sequence, directory, name_space;
    uint32_t epoch, incarnation, uid, gid, checksum, stored, expires;
    uint16_t mode;
    uint8_t name_length, priority;
    uint32_t slot_size;
    union {
        uint32_t token;  /* of a slab */
        uint32_t packed; /* of a block that is compressed: bytes in the slot; ``length`` and ``checksum`` are its own */
    };
    uint32_t micros, crc; /* ``micros``: behind the second ``stored`` */
} Head;

_Static_assert(sizeof(Head) == HEAD, "a head has 96 bytes");

/* What the next daemon finds of a slab. */
typedef struct {
    uint32_t slot_size; /* 0: none yet */
    uint32_t incarnation;
    /* whether its head on the medium says that; whether that may have heads of blocks in slots that are free */
    uint8_t is_ours, is_head_written, has_stale, spare;
    uint32_t token; /* of the loan by which it is ours: its head repeats it */
} SlabState;

_Static_assert(sizeof(SlabState) == 16, "the state of a slab has 16 bytes");

/* At the end of an arena. */
typedef struct {
    uint64_t magic, serial, used, notes, stamp, is_sealed, spare[2];
} Tail;

/* Of one block in an arena; they grow from the tail towards the blocks. The name follows. */
typedef struct {
    uint64_t sequence;
    uint32_t row;
    uint16_t size; /* of the note */
    uint8_t name_length, spare;
} Note;

typedef struct Space {
    int is_known, above, packs; /* ``packs``: its blocks are to be compressed */
    uint32_t epoch;
    uint64_t number, bytes, blocks, bytes_max, blocks_max;
} Space;

typedef struct Table {
    int is_known, is_ended, is_swept, space, arena; /* ``arena``: index of the one that is filled, or -1 */
    uint32_t turn; /* how often it went on in other memory */
    Index index;
    uint32_t users; /* calls that read the table without the lock */
    uint32_t *free_rows, free_count, free_room, swept;
    uint16_t next; /* of those with the same place in ``first_tables``: index + 1 */
} Table;

typedef struct {
    int state, table;
    uint32_t number, pins, dirty, live;
    uint8_t *base;
    uint64_t size;
    Tail *tail;
} Arena;

typedef struct {
    uint32_t count, free, held, hint, lead, class, in_list, is_head_due, stale; /* ``stale``: heads to be freed */
    uint32_t going; /* slots that are free when the writes to them end; they are held, too */
    uint64_t *owners; /* of each slot: SLOT_FREE, SLOT_STALE, SLOT_HELD, or SLOT_OWNED + table << 32 + row */
    uint64_t *takeable; /* a bit for each slot: it is free or stale */
} Slab;

/* What is known of a slab that another host has. ``rows``: of each slot: 0, or table << 32 | row + 1, if that row is still
   FOREIGN and in this slot. */
typedef struct {
    uint32_t slot_size, count, lead;
    uint64_t *rows;
} Foreign;

typedef struct {
    uint32_t slot_size, cut, count, room; /* ``cut``: slabs that have slots of this size */
    uint32_t *slabs; /* that have free slots, the one to be used next last */
} Class;

/* A block to write, if it still has this sequence. Or a slot whose head is to be freed, or a slab whose own head is to be
   written, if the slab still has this incarnation. */
typedef struct {
    uint32_t table, row;
    uint64_t sequence;
} Entry;

typedef struct {
    Entry *entries;
    uint64_t head, tail, room;
} Queue;

/* Bytes of a slot that are no block's any more: for who has copies of them, and for the index. */
typedef struct {
    uint64_t address, sequence, size; /* ``address``: in the volume; ``sequence``: of the block that it was */
    Fingerprint fingerprint; /* of the block, if it is no more; zeros: it has moved to another slot */
} Gone;

typedef struct Core {
    pthread_mutex_t lock;
    uint64_t sequence, slab_size, head_size;
    uint32_t kept_slabs; /* no slot is taken in slabs from this one on */
    uint32_t slab_count, class_count, free_count, free_room, size_count, learned;
    SlabState *states;
    Slab *slabs;
    Foreign *foreign;
    uint32_t *free_slabs;
    uint32_t sizes[SIZES];
    Class classes[SIZES];
    struct {
        uint32_t pages, count;
    } seen[SEEN];
    Space spaces[SPACES];
    Table tables[TABLES], ended; /* ``ended``: for who names a table as it was before it went on in other memory */
    TableHeader ended_header;
    uint64_t ended_multipliers[SUMS * MULTIPLIER_ROWS];
    Arena arenas[ARENAS];
    uint16_t places[2 * ARENAS]; /* arena by number: index + 1 */
    uint16_t first_tables[TABLES];
    uint32_t arena_count, table_end, unswept; /* ``table_end``: behind all tables; ``unswept``: tables that ended and have slots */
    Queue queue, unsynced; /* ``unsynced``: heads of free slots and of slabs that were written since the last sync */
    uint64_t synced; /* sequence up to which all blocks survive a loss of power */
    uint64_t dirty_bytes, dirty_max, stamp, puts, put_bytes, gets, get_bytes, recycled, relocated, refused, batches;
    uint64_t resident, foreign_rows, foreign_max, shadows; /* ``shadows``: whether rows may have that flag */
    Gone *gone; /* NULL: nobody asks for it */
    uint64_t gone_head, gone_tail;
    int loading;
    struct Removed {
        Fingerprint fingerprint;
        int is_known;
    } *removed; /* names that were dropped while slabs are loaded: see load_head */
    uint64_t removed_count, removed_room;
    struct Landing *landings; /* those that are under way */
    uint64_t landed; /* how often some of them landed, or were given up; each time `has_landed` is told */
    pthread_cond_t has_landed;
    uint32_t lent[ARENAS], lent_count, lent_max; /* by arena, blocks that are being sent; arenas that have some */
} Core;

/* -- small things ------------------------------------------------------------------------------------------------- */

static void lock(Core *core) { pthread_mutex_lock(&core->lock); }
static void unlock(Core *core) { pthread_mutex_unlock(&core->lock); }
static uint64_t padded(uint64_t size) { return (size + PAGE - 1) & ~(uint64_t)(PAGE - 1); }

/* No memory: the daemon ends, as it cannot remember what it owes the medium. The next one finds that in shared memory. */
static void push(Queue *queue, uint32_t table, uint32_t row, uint64_t sequence)
{
    if (queue->tail - queue->head == queue->room) {
        uint64_t room = queue->room ? 2 * queue->room : 1024;
        Entry *entries = malloc(room * sizeof *entries);
        if (!entries)
            abort();
        for (uint64_t i = queue->head; i < queue->tail; i++)
            entries[i & (room - 1)] = queue->entries[i & (queue->room - 1)];
        free(queue->entries);
        queue->entries = entries, queue->room = room;
    }
    queue->entries[queue->tail++ & (queue->room - 1)] = (Entry){table, row, sequence};
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

/* Where the bytes of a slot are in its slab. 0: nobody knows how the slab is cut. */
static int data_place(const Core *core, uint32_t number, uint32_t slot, uint64_t *offset, uint32_t *count)
{
    const Slab *slab = core->slabs + number;
    const Foreign *foreign = core->foreign + number;
    uint32_t slot_size = slab->owners ? core->classes[slab->class].slot_size : foreign->slot_size;
    *count = slab->owners ? slab->count : foreign->count;
    *offset = (uint64_t)(slot + (slab->owners ? slab->lead : foreign->lead)) * slot_size;
    return slot < *count;
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

/* A class that has no slab any more gives its place to a new one, where all places are taken. */
static int class_of(Core *core, uint32_t slot_size)
{
    uint32_t place = core->class_count;
    for (uint32_t c = 0; c < core->class_count; c++) {
        if (core->classes[c].slot_size == slot_size)
            return (int)c;
        if (core->class_count == SIZES && !core->classes[c].cut)
            place = c;
    }
    if (place == SIZES)
        return -1;
    core->classes[place].slot_size = slot_size, core->classes[place].count = 0;
    core->class_count += place == core->class_count;
    return (int)place;
}

/* From now on, blocks of such a size get slots of that size. */
static void learn_size(Core *core, uint32_t size)
{
    uint32_t place = 0;
    while (place < core->size_count && core->sizes[place] < size)
        place++;
    if (core->learned >= LEARNED_MAX || core->size_count == SIZES || (place < core->size_count && core->sizes[place] == size))
        return;
    memmove(core->sizes + place + 1, core->sizes + place, (core->size_count - place) * sizeof *core->sizes);
    core->sizes[place] = size;
    core->size_count++, core->learned++;
}

/* Cut a slab into slots, all of them free; nobody is offered them yet. 0: no memory, or it has no room for one. */
static int cut_slab(Core *core, uint32_t number, uint32_t slot_size)
{
    Slab *slab = core->slabs + number;
    int class = class_of(core, slot_size);
    plan_slab(core, slot_size, &slab->count, &slab->lead);
    uint32_t words = (slab->count + 63) / 64;
    if (class < 0 || !slab->count || !(slab->owners = calloc(slab->count + words, sizeof *slab->owners)))
        return 0;
    slab->takeable = slab->owners + slab->count;
    memset(slab->takeable, 0xFF, words * sizeof *slab->takeable);
    if (slab->count % 64)
        slab->takeable[words - 1] = ((uint64_t)1 << slab->count % 64) - 1;
    core->classes[class].cut++;
    slab->class = (uint32_t)class, slab->free = slab->count;
    slab->held = slab->going = slab->hint = slab->in_list = slab->is_head_due = slab->stale = 0;
    return 1;
}

/* Where there is no memory for it, this is tried again when the next slot becomes free. */
static void offer_slab(Core *core, uint32_t number)
{
    Slab *slab = core->slabs + number;
    if (!slab->in_list && slab->free)
        slab->in_list = (uint32_t)list_slab(core->classes + slab->class, number);
}

static uint32_t random_word(void)
{
    uint32_t word;
    if (getrandom(&word, sizeof word, GRND_NONBLOCK) != sizeof word) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        word = (uint32_t)(now.tv_nsec ^ now.tv_sec << 11);
    }
    return word | 1;
}

/* The slab's own head is to be written: by the batch that takes this entry, or by an earlier one with a block of it. */
static void owe_head(Core *core, uint32_t number)
{
    core->slabs[number].is_head_due = 1;
    core->states[number].is_head_written = 0;
    push(&core->queue, OF_SLAB | number, OWN_HEAD, core->states[number].incarnation);
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
        if (slab->owners && slab->class == (uint32_t)found && slab->free && number < core->kept_slabs)
            return number;
        class->count--;
        if (slab->class == (uint32_t)found)
            slab->in_list = 0;
    }
    uint32_t place = core->free_count;
    while (place && core->free_slabs[place - 1] >= core->kept_slabs)
        place--;
    if (!place)
        return -1;
    uint32_t number = core->free_slabs[place - 1];
    if (!cut_slab(core, number, slot_size))
        return -1;
    core->free_slabs[place - 1] = core->free_slabs[--core->free_count];
    SlabState *state = core->states + number;
    state->incarnation = random_word(); /* what the medium has of its slots is not believed from now on */
    state->is_head_written = state->has_stale = 0;
    __atomic_store_n(&state->slot_size, slot_size, __ATOMIC_SEQ_CST);
    owe_head(core, number);
    offer_slab(core, number);
    return number;
}

/* The next one that may be taken: blocks that come together lie together. */
static uint32_t take_slot(Slab *slab)
{
    uint32_t words = (slab->count + 63) / 64;
    for (uint32_t i = 0; i <= words; i++) {
        uint32_t word = (slab->hint / 64 + i) % words;
        uint64_t bits = slab->takeable[word] & (i ? ~(uint64_t)0 : ~(uint64_t)0 << slab->hint % 64);
        if (!bits)
            continue;
        uint32_t slot = 64 * word + (uint32_t)__builtin_ctzll(bits);
        slab->takeable[word] &= ~((uint64_t)1 << slot % 64);
        slab->hint = slot + 1 < slab->count ? slot + 1 : 0;
        slab->free--;
        return slot;
    }
    return 0; /* not reached: the caller saw a free one */
}

/* A slab without blocks has no class any more: its head says so at the next write. */
static void free_slab(Core *core, uint32_t number)
{
    Slab *slab = core->slabs + number;
    if (slab->free != slab->count || slab->held)
        return;
    free(slab->owners);
    slab->owners = NULL;
    slab->in_list = 0;
    core->classes[slab->class].cut--;
    core->states[number].is_head_written = 0;
    __atomic_store_n(&core->states[number].slot_size, 0, __ATOMIC_SEQ_CST);
    core->free_slabs[core->free_count++] = number;
    owe_head(core, number);
}

/* The medium may have the head of a block in this slot that is no more. */
static void owe_free_head(Core *core, uint32_t number, uint32_t slot)
{
    Slab *slab = core->slabs + number;
    if (slab->owners[slot] == SLOT_FREE)
        slab->owners[slot] = SLOT_STALE;
    slab->stale++;
    core->states[number].has_stale = 1;
    push(&core->queue, OF_SLAB | number, slot, core->states[number].incarnation);
}

static void free_slot(Core *core, uint32_t number, uint32_t slot, int is_held)
{
    Slab *slab = core->slabs + number;
    if (!slab->owners || slot >= slab->count)
        return;
    if (is_held) { /* a write to it is under way: `end_batch` frees it. A flush that begins now waits for the free head */
        slab->owners[slot] = SLOT_HELD;
        slab->held++;
        slab->going++;
        owe_free_head(core, number, slot);
        return;
    }
    slab->owners[slot] = SLOT_FREE;
    owe_free_head(core, number, slot);
    slab->takeable[slot / 64] |= (uint64_t)1 << slot % 64;
    slab->free++;
    offer_slab(core, number);
    free_slab(core, number);
}

/* The medium has all heads of a slab that it was owed. While blocks of an ended table wait to be swept, who knows. */
static void settle_slab(Core *core, uint32_t number)
{
    const Slab *slab = core->slabs + number;
    if (slab->owners && !slab->stale && !slab->held && !core->unswept)
        core->states[number].has_stale = 0;
}

/* The place among the slot sizes of the least one for so many bytes; ``size_count``: there is none. */
static uint32_t size_place(const Core *core, uint32_t size)
{
    uint32_t low = 0, high = core->size_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (core->sizes[middle] < size)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The slot size for so many bytes. Sizes that come often get a size of their own. 0: larger than a slab. */
static uint32_t slot_size_for(Core *core, uint32_t length)
{
    uint32_t size = (uint32_t)padded(length ? length : 1), low = size_place(core, size);
    if (low == core->size_count)
        return 0;
    if (core->sizes[low] == size || core->learned >= LEARNED_MAX || core->size_count == SIZES)
        return core->sizes[low];
    uint32_t place = (size / PAGE) % SEEN;
    if (core->seen[place].pages != size / PAGE)
        core->seen[place].pages = size / PAGE, core->seen[place].count = 0;
    uint64_t now = core->slab_size / core->sizes[low], then = core->slab_size / size;
    if (++core->seen[place].count < LEARN_AFTER || (then - now) * 64 < now)
        return core->sizes[low];
    learn_size(core, size);
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

static uint32_t distance_of(const Arena *arena, const Note *note)
{
    return (uint32_t)(((const uint8_t *)arena->tail - (const uint8_t *)note) / 8);
}

static Note *note_of(const Arena *arena, const Row *row)
{
    return (Note *)((uint8_t *)arena->tail - 8 * (uint64_t)row->note);
}

static uint8_t *name_in(Note *note) { return (uint8_t *)note - (note->size - sizeof *note); }

static int is_resident_here(Core *core, const Arena *arena, const Note *note)
{
    const Table *table = core->tables + arena->table;
    if (note->row >= table->index.header->row_end)
        return 0;
    const Row *row = table->index.rows + note->row;
    return (row->version & 1) && row->arena == arena->number && row->sequence == note->sequence;
}

static uint64_t note_bytes(uint32_t name_length) { return sizeof(Note) + (name_length + 7u) / 8 * 8; }

typedef struct {
    struct Kept {
        uint32_t row, page;
        uint8_t name_length, name[NAME_MAX_BYTES];
    } *rows;
    uint64_t count, room, bytes, bytes_max;
} KeptRows;

static void keep_row(KeptRows *kept, const Row *row, Note *note)
{
    uint64_t size = padded(row->length) + note->size;
    if (kept->bytes + size > kept->bytes_max)
        return;
    if (kept->count == kept->room) {
        uint64_t room = kept->room ? 2 * kept->room : 64;
        struct Kept *more = realloc(kept->rows, room * sizeof *more);
        if (!more)
            return;
        kept->rows = more, kept->room = room;
    }
    struct Kept *one = kept->rows + kept->count++;
    one->row = note->row, one->page = row->page, one->name_length = note->name_length;
    memcpy(one->name, name_in(note), note->name_length);
    kept->bytes += size;
}

/* No block is in an arena any more, as far as anybody sees. Those that were used since they came are remembered. */
static void empty_arena(Core *core, Arena *arena, KeptRows *kept)
{
    Table *table = core->tables + arena->table;
    uint64_t end = arena->tail->notes;
    for (uint64_t at = 0; at < end;) { /* notes are read from the first one, which is next to the tail */
        Note *note = (Note *)((uint8_t *)arena->tail - at) - 1;
        at += note->size;
        if (note->row == NO_NOTE || !is_resident_here(core, arena, note))
            continue;
        Row *row = table->index.rows + note->row;
        if (row->flags & HOT)
            keep_row(kept, row, note);
        row->flags &= ~(uint32_t)HOT;
        move_row(&table->index, note->row, 0, 0, 0);
        core->resident--;
    }
    arena->live = 0;
    __atomic_store_n(&arena->tail->notes, 0, __ATOMIC_SEQ_CST);
}

static int by_page(const void *one, const void *other)
{
    const struct Kept *a = one, *b = other;
    return a->page < b->page ? -1 : a->page > b->page;
}

/* Use an arena again, for a block of so many bytes at first. Blocks that were used since they came stay, up to a quarter
   of it: they are in no memory while they move down, each to behind the one before, and so never onto one that is still
   to move. */
static void recycle_arena(Core *core, Arena *arena, uint64_t size)
{
    uint64_t rest = arena->size - sizeof(Tail) - size;
    KeptRows kept = {.bytes_max = rest < arena->size / 4 ? rest : arena->size / 4};
    uint64_t used = 0, notes = 0;
    Table *table = core->tables + arena->table;
    empty_arena(core, arena, &kept);
    if (kept.count) /* notes of blocks that got other names come later */
        qsort(kept.rows, kept.count, sizeof *kept.rows, by_page);
    for (uint64_t i = 0; i < kept.count; i++) {
        const struct Kept *one = kept.rows + i;
        const Row *row = table->index.rows + one->row;
        memmove(arena->base + used, arena->base + (uint64_t)one->page * PAGE, padded(row->length));
        uint64_t note_size = note_bytes(one->name_length);
        Note *note = (Note *)((uint8_t *)arena->tail - notes) - 1;
        *note = (Note){row->sequence, one->row, (uint16_t)note_size, one->name_length, 0};
        memcpy(name_in(note), one->name, one->name_length);
        notes += note_size;
        __atomic_store_n(&arena->tail->notes, notes, __ATOMIC_SEQ_CST);
        move_row(&table->index, one->row, arena->number, (uint32_t)(used / PAGE), distance_of(arena, note));
        used += padded(row->length);
    }
    free(kept.rows);
    arena->live = (uint32_t)kept.count;
    core->resident += kept.count;
    core->relocated += kept.count;
    core->recycled++;
    __atomic_store_n(&arena->tail->used, used, __ATOMIC_SEQ_CST);
}

static uint64_t room_in(const Arena *arena) { return arena->size - sizeof(Tail) - arena->tail->used - arena->tail->notes; }

/* An arena with room for so much, which takes the place of the table's full one. NULL: no memory is free now. A new one is
   taken first, but for an own one without blocks; else the one that was begun first, if it is large enough. */
static Arena *next_arena(Core *core, Table *table, uint64_t size)
{
    int number = (int)(table - core->tables);
    Arena *spare = NULL, *oldest = NULL;
    for (Arena *arena = core->arenas; arena < core->arenas + core->arena_count; arena++) {
        if (!arena->base || size > arena->size - sizeof(Tail))
            continue;
        if (arena->state == SPARE)
            spare = spare ? spare : arena;
        else if (arena->table == number && arena->state != SEALED && !arena->pins && !arena->dirty &&
                 (!oldest || (!arena->live != !oldest->live ? !arena->live : arena->tail->stamp < oldest->tail->stamp)))
            oldest = arena;
    }
    Arena *arena = spare && !(oldest && !oldest->live) ? spare : oldest;
    if (!arena)
        return NULL;
    if (table->arena >= 0)
        core->arenas[table->arena].state = FILLED;
    if (arena->state == SPARE) {
        arena->table = number;
        __atomic_store_n(&arena->tail->serial, table->index.header->origin, __ATOMIC_SEQ_CST);
    } else {
        recycle_arena(core, arena, size);
    }
    arena->state = FILLING;
    arena->tail->stamp = ++core->stamp;
    table->arena = (int)(arena - core->arenas);
    return arena;
}

/* Room for a block and its note, pinned. NULL: there is none now. */
static Arena *take_memory(Core *core, Table *table, uint32_t length, uint32_t name_length, uint64_t *offset, Note **note)
{
    uint64_t size = padded(length), note_size = note_bytes(name_length);
    Arena *arena = table->arena >= 0 ? core->arenas + table->arena : NULL;
    if (!arena || room_in(arena) < size + note_size)
        arena = next_arena(core, table, size + note_size);
    if (!arena)
        return NULL;
    *offset = arena->tail->used;
    *note = (Note *)((uint8_t *)arena->tail - arena->tail->notes) - 1;
    **note = (Note){0, NO_NOTE, (uint16_t)note_size, (uint8_t)name_length, 0};
    __atomic_store_n(&arena->tail->notes, arena->tail->notes + note_size, __ATOMIC_SEQ_CST);
    __atomic_store_n(&arena->tail->used, arena->tail->used + size, __ATOMIC_SEQ_CST);
    arena->pins++;
    return arena;
}

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

/* Where the bytes of a slot are in their slab. */
static uint64_t slot_offset(const Core *core, uint32_t number, uint32_t slot)
{
    const Slab *slab = core->slabs + number;
    return (uint64_t)(slot + slab->lead) * core->classes[slab->class].slot_size;
}

/* The oldest ones are forgotten where there are too many. */
static void note_gone(Core *core, const Row *row, Fingerprint fingerprint)
{
    if (!core->gone || !core->slabs[row->slab].owners)
        return;
    core->gone_head += core->gone_tail - core->gone_head == GONE_MAX;
    core->gone[core->gone_tail++ % GONE_MAX] =
        (Gone){row->slab * core->slab_size + slot_offset(core, row->slab, row->slot), row->sequence,
               core->classes[core->slabs[row->slab].class].slot_size, fingerprint};
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
    note_gone(core, row, row->fingerprint);
    if (row->flags & FOREIGN) {
        core->foreign_rows--;
        return;
    }
    if (core->slabs[row->slab].owners)
        charge(core, table->space, -(int64_t)core->classes[core->slabs[row->slab].class].slot_size, -1);
    free_slot(core, row->slab, row->slot, (row->flags & WRITING) != 0);
}

static struct Removed *removed_place(struct Removed *all, uint64_t room, Fingerprint wanted)
{
    uint64_t place = wanted.low & (room - 1);
    while (all[place].is_known && !is_same(all[place].fingerprint, wanted))
        place = (place + 1) & (room - 1);
    return all + place;
}

/* A slab that is not loaded yet may have an older block of this name. */
static void note_removed(Core *core, Fingerprint fingerprint)
{
    if (!core->loading)
        return;
    if (2 * core->removed_count >= core->removed_room) {
        uint64_t room = core->removed_room ? 2 * core->removed_room : 1024;
        struct Removed *all = calloc(room, sizeof *all);
        if (!all)
            abort(); /* as in `push` */
        for (uint64_t i = 0; i < core->removed_room; i++)
            if (core->removed[i].is_known)
                *removed_place(all, room, core->removed[i].fingerprint) = core->removed[i];
        free(core->removed);
        core->removed = all, core->removed_room = room;
    }
    struct Removed *place = removed_place(core->removed, core->removed_room, fingerprint);
    core->removed_count += !place->is_known;
    *place = (struct Removed){fingerprint, 1};
}

/* A block is no more. ``heir``: the row of the one that replaces it, or NO_ROW. That its slot's head is stale is said
   first, for the next daemon. */
static void end_row(Core *core, Table *table, uint32_t number, int64_t heir)
{
    Row *row = table->index.rows + number;
    if (!(row->flags & FOREIGN))
        core->states[row->slab].has_stale = 1;
    if (heir >= 0)
        change_entries(&table->index, number, heir);
    begin_change(row);
    if (heir < 0)
        change_entries(&table->index, number, NO_ROW); /* no row that is odd is in no bucket */
    release_row(core, table, row);
    row->arena = row->flags = 0;
    table->index.header->live--;
    give_row(table, number);
}

static void drop_row(Core *core, Table *table, uint32_t number)
{
    note_removed(core, table->index.rows[number].fingerprint);
    end_row(core, table, number, NO_ROW);
}

static uint64_t next_sequence(Core *core, uint64_t now_us)
{
    return core->sequence = core->sequence + 1 > now_us ? core->sequence + 1 : now_us;
}

/* -- put ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t now_us, directory, shown_us; /* the last: time that the block shows; 0: now */
    uint32_t now, expires;
    uint8_t priority, only_absent; /* the last: a block that has the name stays */
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

/* Reserve slot, quota and, where the plan has none, memory. 0 or why not. */
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
    if (!plan->arena)
        plan->arena = take_memory(core, table, plan->length, plan->name_length, &plan->offset, &plan->note);
    if (!plan->arena) {
        free_slab(core, (uint32_t)slab); /* it may have been cut for this block */
        return NO_MEMORY;
    }
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

/* Make a block visible, in the place of the one of its name. 0, or why it is not. The row is whole before it is odd, and
   odd before an entry of the former row becomes its own: a daemon that is killed on the way leaves one of the two. */
static int64_t publish(Core *core, Table *table, Plan *plan, const PutTerms *terms, uint64_t *sequence)
{
    TableHeader *header = table->index.header;
    int64_t former = find_row(&table->index, plan->fingerprint), number;
    if (former >= 0 && terms->only_absent)
        return PRESENT;
    number = take_row(table);
    if (number < 0 && former >= 0) {
        drop_row(core, table, (uint32_t)former);
        former = NO_ROW, number = take_row(table);
    }
    if (number < 0)
        return NO_SLOT;
    Row *row = table->index.rows + number;
    begin_change(row);
    row->fingerprint = plan->fingerprint;
    if (former < 0 && !enter_row(&table->index, (uint32_t)number)) {
        give_row(table, (uint32_t)number);
        return NO_SLOT;
    }
    *sequence = next_sequence(core, terms->now_us);
    plan->note->sequence = *sequence;
    __atomic_store_n(&plan->note->row, (uint32_t)number, __ATOMIC_SEQ_CST);
    row->arena = plan->arena->number;
    row->page = (uint32_t)(plan->offset / PAGE), row->note = distance_of(plan->arena, plan->note);
    row->length = plan->length, row->checksum = plan->checksum;
    row->slab = plan->slab, row->slot = (uint16_t)plan->slot, row->packed = 0;
    row->flags = DIRTY | (uint32_t)((terms->shown_us ? terms->shown_us : terms->now_us) % 1000000) << MICROS;
    if (former >= 0 && table->index.rows[former].flags & (FOREIGN | SHADOWS))
        row->flags |= SHADOWS, core->shadows = 1;
    row->sequence = *sequence, row->directory = terms->directory;
    row->due = terms->now_us, row->used = terms->now, row->expires = terms->expires;
    row->stored = terms->shown_us ? (uint32_t)(terms->shown_us / 1000000) : terms->now;
    row->uses = row->list = 0, row->priority = terms->priority, row->name_length = plan->name_length;
    plan->arena->dirty++, plan->arena->live++;
    core->resident++;
    core->slabs[plan->slab].held--;
    core->slabs[plan->slab].owners[plan->slot] =
        SLOT_OWNED + ((uint64_t)(table - core->tables) << 32) + (uint64_t)number;
    header->live++;
    push(&core->queue, (uint32_t)(table - core->tables), (uint32_t)number, *sequence);
    if (former >= 0) {
        header->replaced = (uint32_t)former + 1;
        __atomic_store_n(&header->replacing, (uint32_t)number + 1, __ATOMIC_SEQ_CST);
    }
    if (header->renamed) /* see `rename_block` */
        __atomic_store_n(&header->renaming, (uint32_t)number + 1, __ATOMIC_SEQ_CST);
    end_change(row);
    if (former >= 0) {
        end_row(core, table, (uint32_t)former, number);
        __atomic_store_n(&header->replacing, 0, __ATOMIC_SEQ_CST);
    }
    unpin(plan->arena);
    core->puts++, core->put_bytes += plan->length;
    return number;
}

/* Names in one piece of memory, which a client may change at any time: each is copied once. */
typedef struct {
    const uint8_t *text;
    const uint8_t *text_offsets, *text_lengths; /* columns of u64 and u32 */
    uint64_t size;
} Names;

static int copy_name(const Names *names, int64_t i, int plain_only, uint8_t *name, uint8_t *length)
{
    uint64_t offset;
    uint32_t size;
    memcpy(&offset, names->text_offsets + 8 * i, sizeof offset); /* they may be at any address */
    memcpy(&size, names->text_lengths + 4 * i, sizeof size);
    __asm__ volatile("" : "+r"(offset), "+r"(size)); /* what is tested is what is used */
    if (!size || size > NAME_MAX_BYTES || offset > names->size || size > names->size - offset)
        return 0;
    memcpy(name, names->text + offset, size);
    *length = (uint8_t)size;
    return !plain_only || is_plain_name(name, size);
}

/* Give a block another name: its bytes stay where they are in memory, and get another slot. Its row, or why not; NOT_TRIED:
   they are in no memory where the name may be, too. Both rows are odd for a moment, and have the same bytes: a daemon that
   is killed then leaves words that say so. */
static int64_t rename_block(Core *core, Table *table, uint32_t number, uint64_t wanted, Plan *plan, const PutTerms *terms,
                            uint64_t *sequence)
{
    TableHeader *header = table->index.header;
    Row *row = table->index.rows + number;
    if (table->is_ended)
        return ENDED;
    if (number >= header->row_end || !(row->version & 1) || row->sequence != wanted)
        return ABSENT;
    Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
    uint64_t note_size = note_bytes(plan->name_length);
    if (!arena || arena->state == SEALED || row->flags & (FOREIGN | SHADOWS) || room_in(arena) < note_size)
        return NOT_TRIED;
    PutTerms as_before = *terms;
    as_before.shown_us = row->stored * 1000000ull + (row->flags >> MICROS);
    as_before.now = row->used, as_before.expires = row->expires, as_before.priority = row->priority;
    plan->length = row->length, plan->checksum = row->checksum;
    plan->arena = arena, plan->offset = (uint64_t)row->page * PAGE;
    int why = plan_put(core, table, plan);
    if (why)
        return why;
    arena->pins++;
    plan->note = (Note *)((uint8_t *)arena->tail - arena->tail->notes) - 1;
    *plan->note = (Note){0, NO_NOTE, (uint16_t)note_size, plan->name_length, 0};
    memcpy(name_in(plan->note), plan->name, plan->name_length);
    __atomic_store_n(&arena->tail->notes, arena->tail->notes + note_size, __ATOMIC_SEQ_CST);
    header->renamed = number + 1;
    int64_t made = publish(core, table, plan, &as_before, sequence);
    if (made < 0)
        undo_plan(core, table, plan);
    else
        drop_row(core, table, number);
    __atomic_store_n(&header->renaming, 0, __ATOMIC_SEQ_CST);
    header->renamed = 0;
    return made;
}

static int64_t put_all(Core *core, Table *table, const Names *names, int plain_only, const uint64_t *sources,
                          const int64_t *sizes, int64_t count, const PutTerms *terms, Plan *plans, int64_t *results,
                          uint64_t *sequences)
{
    int64_t planned = 0;
    lock(core);
    int why = table->is_ended ? ENDED : 0;
    for (; !why && planned < count; planned += !why) {
        Plan *plan = plans + planned;
        int64_t size = sizes[planned];
        plan->source = (const uint8_t *)(uintptr_t)sources[planned];
        plan->length = (uint32_t)size, plan->arena = NULL;
        if (!copy_name(names, planned, plain_only, plan->name, &plan->name_length))
            why = ODD_NAME;
        else if (size <= 0 || (uint64_t)size > core->slab_size)
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
        if (i + 4 < planned)
            prefetch_buckets(&table->index, plans[i + 4].fingerprint);
        results[i] = table->is_ended ? ENDED : publish(core, table, plans + i, terms, sequences + i);
        if (results[i] < 0)
            undo_plan(core, table, plans + i);
    }
    unlock(core);
    return planned;
}

/* -- find, get, drop ---------------------------------------------------------------------------------------------- */

/* Up to GROUP names that are looked for at once, so that memory of one comes while another one is looked at. */
typedef struct {
    Fingerprint wanted[GROUP];
    uint8_t is_odd[GROUP];
    int count;
} Group;

/* Hash names and let their buckets be fetched. */
static void begin_group(Group *group, const Index *index, uint64_t directory, const Names *names, int64_t first,
                        int64_t count, int plain_only)
{
    group->count = count - first < GROUP ? (int)(count - first) : GROUP;
    for (int i = 0; i < group->count; i++) {
        uint8_t name[NAME_MAX_BYTES], length;
        group->is_odd[i] = !copy_name(names, first + i, plain_only, name, &length);
        if (group->is_odd[i])
            continue;
        group->wanted[i] = fingerprint_of(index->multipliers, directory, name, length);
        prefetch_buckets(index, group->wanted[i]);
    }
}

static void fetch_group(const Group *group, const Index *index)
{
    for (int i = 0; i < group->count; i++)
        if (!group->is_odd[i])
            prefetch_rows(index, group->wanted[i]);
}

/* The row of the i-th name; ABSENT, also where it expired; or ODD_NAME. */
static int64_t find_of_group(const Group *group, const Index *index, int i, uint32_t now)
{
    if (group->is_odd[i])
        return ODD_NAME;
    int64_t row = find_row(index, group->wanted[i]);
    return row >= 0 && index->rows[row].expires && now >= index->rows[row].expires ? ABSENT : row;
}

/* Copy blocks that are in memory to where there is room for them. */
static void get_all(Core *core, Table *table, uint64_t directory, const Names *names, int plain_only,
                    const uint64_t *targets, const int64_t *rooms, int64_t count, uint32_t now, int64_t *rows,
                    int64_t *results)
{
    Group group;
    Arena *pinned[GROUP];
    const uint8_t *sources[GROUP];
    for (int64_t first = 0; first < count; first += GROUP) {
        begin_group(&group, &table->index, directory, names, first, count, plain_only);
        lock(core);
        fetch_group(&group, &table->index);
        for (int i = 0; i < group.count; i++) {
            int64_t at = first + i, found = table->is_ended ? ABSENT : find_of_group(&group, &table->index, i, now);
            pinned[i] = NULL;
            rows[at] = results[at] = found;
            if (found < 0)
                continue;
            Row *row = table->index.rows + found;
            Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
            row->used = now;
            if (row->length > rooms[at] || !arena) {
                results[at] = row->length > rooms[at] ? NO_ROOM : NOT_RESIDENT;
                continue;
            }
            row->flags |= HOT;
            arena->pins++;
            pinned[i] = arena, sources[i] = arena->base + (uint64_t)row->page * PAGE, results[at] = row->length;
            core->gets++, core->get_bytes += row->length;
        }
        unlock(core);
        for (int i = 0; i < group.count; i++)
            if (pinned[i])
                memcpy((void *)(uintptr_t)targets[first + i], sources[i], (size_t)results[first + i]);
        lock(core);
        for (int i = 0; i < group.count; i++)
            if (pinned[i])
                unpin(pinned[i]);
        unlock(core);
    }
}

/* Row and sequence of each name. ``drops``: and they are no more. */
static void find_all(Core *core, Table *table, uint64_t directory, const Names *names, int plain_only, int64_t count,
                     uint32_t now, int64_t *rows, uint64_t *sequences, int drops)
{
    Group group;
    for (int64_t first = 0; first < count; first += GROUP) {
        begin_group(&group, &table->index, directory, names, first, count, plain_only);
        lock(core);
        fetch_group(&group, &table->index);
        for (int i = 0; i < group.count; i++) {
            int64_t found = table->is_ended ? ABSENT : find_of_group(&group, &table->index, i, now);
            rows[first + i] = found;
            sequences[first + i] = found < 0 ? 0 : table->index.rows[found].sequence;
            if (drops && found >= 0)
                drop_row(core, table, (uint32_t)found);
            else if (drops && found == ABSENT)
                note_removed(core, group.wanted[i]);
        }
        unlock(core);
    }
}

/* -- writing ------------------------------------------------------------------------------------------------------ */

enum { NO_PACKING, MAY_PACK, MUST_PACK };

/* What a batch writes of a slot: a block's bytes, name and head; or a head alone, where ``data`` is NULL. */
typedef struct {
    uint32_t table, row, slab, slot, arena; /* ``slot``: OWN_HEAD for the slab's head */
    uint32_t size, order;                   /* ``size``: of the data; 0: it is not written, as its slot has no room for it */
    int wants_packing;                      /* NO_PACKING, MAY_PACK, or MUST_PACK: its slot is one for compressed bytes */
    uint64_t sequence;
    const uint8_t *data, *name;
    Head head;
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
    uint64_t count, blocks, wanting, data_count, head_count, upto, bytes; /* ``wanting``: blocks that may be packed */
} Batch;

static Head head_of_slab(const SlabState *state)
{
    return (Head){.magic = HEAD_MAGIC, .version = HEAD_VERSION, .state = state->slot_size ? STATE_SLAB : STATE_FREE,
                  .incarnation = state->incarnation, .slot_size = state->slot_size, .token = state->token};
}

static Head head_of_row(const Core *core, const Table *table, const Row *row)
{
    const TableHeader *of = table->index.header;
    const SlabState *state = core->states + row->slab;
    return (Head){
        .magic = HEAD_MAGIC, .version = HEAD_VERSION, .state = STATE_BLOCK, .length = row->length,
        .fingerprint = row->fingerprint, .sequence = row->sequence, .directory = row->directory,
        .name_space = of->name_space, .epoch = core->spaces[table->space].epoch, .incarnation = state->incarnation,
        .uid = of->uid, .gid = of->gid, .mode = (uint16_t)of->mode, .checksum = row->checksum, .stored = row->stored,
        .expires = row->expires, .name_length = row->name_length, .priority = row->priority, .slot_size = state->slot_size,
        .micros = row->flags >> MICROS};
}

static void add_written(Core *core, Batch *batch, Table *table, Row *row, const Entry *entry, Arena *arena)
{
    Written *one = batch->rows + batch->count++;
    *one = (Written){
        .table = entry->table, .row = entry->row, .slab = row->slab, .slot = row->slot,
        .arena = (uint32_t)(arena - core->arenas), .size = row->packed ? 0 : row->length, .sequence = entry->sequence,
        .data = arena->base + (uint64_t)row->page * PAGE, .name = name_in(note_of(arena, row))};
    if (row->packed)
        one->wants_packing = MUST_PACK;
    else if (core->spaces[table->space].packs && core->states[row->slab].slot_size > PAGE)
        one->wants_packing = MAY_PACK;
    batch->wanting += one->wants_packing != NO_PACKING;
    one->head = head_of_row(core, table, row);
    row->flags = (row->flags & ~(uint32_t)DIRTY) | WRITING;
    arena->pins++;
    batch->bytes += padded(row->length);
}

/* What is to be written of a slab's slot, or of the slab, whose entry this is. 0: nothing any more. */
static int is_owed(Core *core, Written *one)
{
    SlabState *state = core->states + one->slab;
    Slab *slab = core->slabs + one->slab;
    if (state->incarnation != one->sequence)
        return 0;
    if (one->slot == OWN_HEAD) {
        if (!slab->is_head_due || !state->is_ours)
            return 0;
        slab->is_head_due = 0;
        one->head = head_of_slab(state);
        return 1;
    }
    if (!slab->owners)
        return 0;
    uint64_t owner = slab->owners[one->slot];
    int is_due = owner == SLOT_STALE || owner == SLOT_HELD; /* a put may be on its way: its head comes with a later batch */
    if (owner >= SLOT_OWNED)
        is_due = row_at(core, (uint32_t)((owner - SLOT_OWNED) >> 32), (uint32_t)(owner - SLOT_OWNED))->flags & DIRTY;
    if (owner == SLOT_STALE)
        slab->owners[one->slot] = SLOT_FREE;
    slab->stale -= !is_due;
    one->head = (Head){.magic = HEAD_MAGIC, .version = HEAD_VERSION, .state = STATE_FREE, .incarnation = state->incarnation};
    return is_due;
}

/* Heads of slabs are written with the first blocks that these get, or before. */
static void add_due_heads(Core *core, Batch *batch)
{
    uint64_t count = batch->count;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t slab = batch->rows[i].slab;
        if (!batch->rows[i].data || !core->slabs[slab].is_head_due)
            continue;
        core->slabs[slab].is_head_due = 0;
        batch->rows[batch->count] = (Written){
            .table = OF_SLAB | slab, .slab = slab, .slot = OWN_HEAD, .sequence = core->states[slab].incarnation};
        batch->rows[batch->count++].head = head_of_slab(core->states + slab);
    }
}

/* Take the first entries of the queue. 0: no memory. */
static int take_batch(Core *core, Batch *batch, uint64_t bytes_max, uint64_t rows_max)
{
    Queue *queue = &core->queue;
    uint64_t count = queue->tail - queue->head, end;
    end = queue->head + (count < rows_max ? count : rows_max), count = end - queue->head;
    batch->rows = malloc((3 * count + 1) * sizeof *batch->rows); /* `add_due_heads` may be called twice */
    if (!batch->rows)
        return 0;
    while (queue->head < end && batch->bytes < bytes_max) {
        Entry entry = pop(queue);
        if (entry.table & OF_SLAB) {
            batch->rows[batch->count++] = (Written){
                .table = entry.table, .slab = entry.table & ~OF_SLAB, .slot = entry.row, .sequence = entry.sequence};
            continue;
        }
        Table *table = core->tables + entry.table;
        Row *row = table->index.rows + entry.row;
        Arena *arena;
        if (table->is_known && !table->is_ended && entry.row < table->index.header->row_end && (row->version & 1) &&
            row->sequence == entry.sequence && (row->flags & DIRTY) && (arena = arena_of(core, row->arena)))
            add_written(core, batch, table, row, &entry, arena);
    }
    batch->upto = queue->head;
    uint64_t taken = batch->count;
    batch->count = 0;
    for (uint64_t i = 0; i < taken; i++) /* now that it is known which blocks are written */
        if (batch->rows[i].data || is_owed(core, batch->rows + i))
            batch->rows[batch->count++] = batch->rows[i];
    for (uint64_t i = 0; i < batch->count; i++)
        batch->blocks += batch->rows[i].data != NULL;
    add_due_heads(core, batch);
    return 1;
}

/* Of one place, what is written comes last: a block, else the head that was made last. */
static int by_place(const void *one, const void *other)
{
    const Written *a = one, *b = other;
    if (a->slab != b->slab)
        return a->slab < b->slab ? -1 : 1;
    uint32_t slot = a->slot + 1, after = b->slot + 1; /* OWN_HEAD: 0 */
    if (slot != after)
        return slot < after ? -1 : 1;
    if (!a->size != !b->size)
        return a->size ? 1 : -1;
    return a->order < b->order ? -1 : a->order > b->order;
}

/* Another entry of the batch writes the same head, or nothing is to be written. */
static int is_left_out(const Batch *batch, uint64_t i)
{
    const Written *one = batch->rows + i;
    return (one->data && !one->size) ||
           (i + 1 < batch->count && one[1].slab == one->slab && one[1].slot == one->slot);
}

static void add_run(Run *runs, uint64_t *count, int64_t slab, uint64_t offset, const uint8_t *address, uint64_t length)
{
    Run *last = runs + *count - 1;
    if (*count && last->slab == slab && (uint64_t)(last->offset + last->length) == offset &&
        last->address + (uint64_t)last->length == (uint64_t)(uintptr_t)address)
        last->length += (int64_t)length;
    else
        runs[(*count)++] = (Run){slab, (int64_t)offset, (uint64_t)(uintptr_t)address, (int64_t)length};
}

/* Say what is to be written where, without the lock: the arenas are pinned, and slabs whose slots are owned or held stay
   as they are cut. 0: no memory. */
static int lay_out_batch(Core *core, Batch *batch)
{
    batch->data = malloc((batch->blocks + 1) * sizeof *batch->data);
    batch->heads = malloc((batch->count + batch->blocks + 1) * sizeof *batch->heads);
    uint8_t *place = batch->staging = malloc(batch->count * HEAD + batch->blocks * NAME_ROOM + 1);
    if (!batch->data || !batch->heads || !batch->staging)
        return 0;
    for (uint64_t i = 0; i < batch->count; i++)
        batch->rows[i].order = (uint32_t)i;
    qsort(batch->rows, batch->count, sizeof *batch->rows, by_place);
    for (uint64_t i = 0; i < batch->count; i++) {
        Written *one = batch->rows + i;
        if (is_left_out(batch, i))
            continue;
        one->head.crc = checksum_of(0, (const uint8_t *)&one->head, HEAD - 4);
        memcpy(place, &one->head, HEAD);
        add_run(batch->heads, &batch->head_count, one->slab, (uint64_t)HEAD * (uint32_t)(one->slot + 1), place, HEAD);
        if (one->data)
            add_run(batch->data, &batch->data_count, one->slab,
                    (uint64_t)(one->slot + core->slabs[one->slab].lead) * one->head.slot_size, one->data,
                    padded(one->size));
        place += HEAD;
    }
    const Written *former = NULL;
    for (uint64_t i = 0; i < batch->count; i++) { /* neighbours make one run, and the last one is short */
        const Written *one = batch->rows + i;
        if (!one->size)
            continue;
        if (former && former->slab == one->slab && former->slot + 1 == one->slot)
            batch->heads[batch->head_count - 1].length += NAME_ROOM - (former->head.name_length + 7) / 8 * 8;
        memset(place, 0, NAME_ROOM);
        memcpy(place, one->name, one->head.name_length);
        add_run(batch->heads, &batch->head_count, one->slab, name_place(core->slabs[one->slab].count, one->slot), place,
                (one->head.name_length + 7u) / 8 * 8);
        place += NAME_ROOM;
        former = one;
    }
    return 1;
}

/* All of it is written; or it is not, and waits again. */
static void end_batch(Core *core, Batch *batch, int is_written)
{
    for (uint64_t i = 0; i < batch->count; i++) {
        const Written *one = batch->rows + i;
        Slab *slab = core->slabs + one->slab;
        SlabState *state = core->states + one->slab;
        if (!one->data) {
            if (state->incarnation != one->sequence)
                continue; /* it was cut again */
            if (one->slot == OWN_HEAD) {
                if (!is_written && state->is_ours)
                    owe_head(core, one->slab);
                if (is_written)
                    push(&core->unsynced, one->table, one->slot, one->sequence);
                if (is_written && !slab->is_head_due && state->slot_size == one->head.slot_size)
                    state->is_head_written = 1;
            } else if (slab->owners) {
                slab->stale--;
                if (is_written)
                    push(&core->unsynced, one->table, one->slot, one->sequence);
                else
                    owe_free_head(core, one->slab, one->slot);
                settle_slab(core, one->slab);
            }
            continue;
        }
        Table *table = core->tables + one->table;
        Row *row = table->index.rows + one->row;
        Arena *arena = core->arenas + one->arena;
        if ((row->version & 1) && row->sequence == one->sequence) { /* the pin of its arena keeps the table */
            row->flags &= ~(uint32_t)WRITING;
            if (is_written && one->size) {
                arena->dirty--;
                core->dirty_bytes -= padded(row->length);
            } else {
                row->flags |= DIRTY;
                push(&core->queue, one->table, one->row, one->sequence);
            }
        } else if (slab->owners && slab->owners[one->slot] == SLOT_HELD) {
            slab->held--;
            slab->going--;
            free_slot(core, one->slab, one->slot, 0);
        }
        unpin(arena);
    }
    core->batches += (uint64_t)is_written;
}

/* A sync failed: what was written since the last one may be lost. It is written again where it is in memory; other blocks
   are dropped. */
static void doubt_unsynced(Core *core)
{
    while (core->unsynced.head < core->unsynced.tail) {
        Entry entry = pop(&core->unsynced);
        uint32_t number = entry.table & ~OF_SLAB;
        if (core->states[number].incarnation != entry.sequence || !core->states[number].is_ours)
            continue;
        if (entry.row == OWN_HEAD)
            owe_head(core, number);
        else if (core->slabs[number].owners && core->slabs[number].owners[entry.row] == SLOT_FREE)
            owe_free_head(core, number, entry.row);
    }
    for (uint32_t t = 0; t < TABLES; t++) {
        Table *table = core->tables + t;
        for (uint32_t r = 0; table->is_known && !table->is_ended && r < table->index.header->row_end; r++) {
            Row *row = table->index.rows + r;
            if (!(row->version & 1) || row->sequence <= core->synced || (row->flags & (DIRTY | WRITING | FOREIGN | LOADED)))
                continue;
            Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
            if (!arena) {
                drop_row(core, table, r);
                continue;
            }
            row->flags |= DIRTY;
            arena->dirty++;
            core->dirty_bytes += padded(row->length);
            push(&core->queue, t, r, row->sequence);
        }
    }
}

/* -- from the medium into memory ---------------------------------------------------------------------------------- */

typedef struct Landing {
    Core *core;
    Table *table;
    int64_t count;
    struct Coming {
        uint32_t row, length;
        uint64_t sequence, offset;
        Arena *arena; /* NULL: it is not to come, or has */
        Note *note;
        int64_t result; /* of `land_row` */
    } *rows;
    struct Landing *next, **link;
} Landing;

/* Reserve memory for blocks that only a slab has. ``places``: address, or 0; then ``sizes`` has the reason, 0 for a block
   that is in memory by now. ``packed``: bytes in the slot, if they are compressed there; the block's own belong to its
   place. Names may come from the medium, and be anything: they count if they have the fingerprint. */
static void reserve_all(Core *core, Landing *landing, const Names *names, const int64_t *rows, const uint64_t *sequences,
                        uint64_t *places, int64_t *sizes, uint32_t *slabs, uint64_t *offsets, int64_t *packed)
{
    Table *table = landing->table;
    for (int64_t i = 0; i < landing->count; i++) {
        struct Coming *one = landing->rows + i;
        uint8_t name[NAME_MAX_BYTES], length;
        uint32_t count;
        one->arena = NULL, places[i] = offsets[i] = 0, sizes[i] = ABSENT, slabs[i] = 0, packed[i] = 0;
        if (!copy_name(names, i, 0, name, &length) || rows[i] < 0 || rows[i] >= table->index.rows_max)
            continue;
        const Row *row = table->index.rows + rows[i];
        Fingerprint wanted = fingerprint_of(table->index.multipliers, row->directory, name, length);
        lock(core);
        int is_there = !table->is_ended && (row->version & 1) && row->sequence == sequences[i];
        if (is_there && row->arena) {
            sizes[i] = 0;
        } else if (is_there && data_place(core, row->slab, row->slot, offsets + i, &count) &&
                   row->name_length == length && is_same(row->fingerprint, wanted)) {
            one->row = (uint32_t)rows[i], one->sequence = row->sequence, one->length = row->length;
            one->arena = take_memory(core, table, row->length, length, &one->offset, &one->note);
            sizes[i] = one->arena ? (int64_t)row->length : NO_MEMORY;
            slabs[i] = row->slab, packed[i] = (int64_t)row->packed * PAGE;
        }
        unlock(core);
        if (!one->arena)
            continue;
        memcpy(name_in(one->note), name, length);
        places[i] = (uint64_t)(uintptr_t)(one->arena->base + one->offset);
    }
}

/* Others may wait for what comes. */
static void begin_landing(Landing *landing)
{
    Core *core = landing->core;
    lock(core);
    landing->next = core->landings, landing->link = &core->landings;
    if (landing->next)
        landing->next->link = &landing->next;
    core->landings = landing;
    unlock(core);
}

static void end_landing(Landing *landing)
{
    Core *core = landing->core;
    lock(core);
    for (int64_t i = 0; i < landing->count; i++)
        if (landing->rows[i].arena)
            unpin(landing->rows[i].arena);
    *landing->link = landing->next;
    if (landing->next)
        landing->next->link = landing->link;
    core->landed++;
    pthread_cond_broadcast(&core->has_landed);
    unlock(core);
    free(landing->rows);
}

/* Show one block whose bytes came, and have that checksum, where they are what the row says. ``result``: 1: it is in
   memory, whoever brought it; 0: the bytes are not the block's; ABSENT: the block is no more. */
static void land_row(Landing *landing, struct Coming *one, int has_come, uint32_t checksum)
{
    Core *core = landing->core;
    Table *table = landing->table;
    uint8_t *bytes = one->arena->base + one->offset;
    memset(bytes + one->length, 0, padded(one->length) - one->length);
    lock(core);
    const Row *row = table->index.rows + one->row;
    one->result = 0;
    if (table->is_ended || !(row->version & 1) || row->sequence != one->sequence)
        one->result = ABSENT;
    else if (row->arena)
        one->result = 1;
    else if (has_come && row->checksum == checksum) {
        one->note->sequence = one->sequence;
        __atomic_store_n(&one->note->row, one->row, __ATOMIC_SEQ_CST);
        move_row(&table->index, one->row, one->arena->number, (uint32_t)(one->offset / PAGE),
                 distance_of(one->arena, one->note));
        one->arena->live++;
        core->resident++;
        one->result = 1;
    }
    unpin(one->arena);
    one->arena = NULL;
    core->landed++;
    pthread_cond_broadcast(&core->has_landed);
    unlock(core);
}

/* For a thread that received it: `LandingWay`. */
static void land_received(void *of, uint32_t place, uint32_t checksum)
{
    Landing *landing = of;
    if (place < landing->count && landing->rows[place].arena)
        land_row(landing, landing->rows + place, 1, checksum);
}

/* Show what came, but for what has landed already. */
static void land_all(Landing *landing, const uint8_t *came, int64_t *results)
{
    for (int64_t i = 0; i < landing->count; i++) {
        struct Coming *one = landing->rows + i;
        if (one->arena)
            land_row(landing, one, came[i], came[i] ? checksum_of(0, one->arena->base + one->offset, one->length) : 0);
        results[i] = one->result;
    }
}

/* -- at a start --------------------------------------------------------------------------------------------------- */

static int is_sound_head(const Head *head, uint32_t state)
{
    int is_known = head->version == HEAD_VERSION || (head->version == PACKED_VERSION && state == STATE_BLOCK);
    return head->magic == HEAD_MAGIC && is_known && head->state == state &&
           head->crc == checksum_of(0, (const uint8_t *)head, HEAD - 4);
}

static uint32_t table_place(uint64_t name_space, uint64_t directory)
{
    return (uint32_t)((directory * 0x9E3779B97F4A7C15ull ^ name_space * 0xBF58476D1CE4E5B9ull) >> 32) % TABLES;
}

static Table *table_for(Core *core, const Head *head)
{
    uint32_t t = core->first_tables[table_place(head->name_space, head->directory)];
    for (; t; t = core->tables[t - 1].next) {
        Table *table = core->tables + (t - 1);
        const TableHeader *of = table->index.header;
        if (!table->is_ended && of->name_space == head->name_space && of->directory == head->directory &&
            of->uid == head->uid && of->gid == head->gid && (uint16_t)of->mode == head->mode)
            return table;
    }
    return NULL;
}

/* A row that was found has its slot. */
static void own_slot(Core *core, Table *table, uint32_t number)
{
    const Row *row = table->index.rows + number;
    Slab *slab = core->slabs + row->slab;
    slab->owners[row->slot] = SLOT_OWNED + ((uint64_t)(table - core->tables) << 32) + number;
    slab->takeable[row->slot / 64] &= ~((uint64_t)1 << row->slot % 64);
    slab->free--;
    charge(core, table->space, core->classes[slab->class].slot_size, 1);
}

/* Bytes in the slot of a block that is compressed there; 0: it is not. */
static uint32_t packed_of(const Head *head) { return head->version == PACKED_VERSION ? head->packed : 0; }

/* Whether so many bytes, compressed or not (``packed`` 0), can be in a slot. What is compressed takes fewer pages. */
static int fits_slot(const Core *core, uint32_t length, uint32_t packed, uint32_t slot_size)
{
    return packed ? packed <= slot_size && padded(packed) < padded(length) && length <= core->slab_size
                  : length <= slot_size;
}

/* The table of a block that a head describes. The head has its checksum, and yet may be anything. NULL: it is none. */
static Table *table_of_head(Core *core, uint32_t slot_size, const Head *head)
{
    Table *table = table_for(core, head);
    if (!table || !head->length || !fits_slot(core, head->length, packed_of(head), slot_size) ||
        head->slot_size != slot_size || !head->name_length ||
        !head->sequence || head->sequence >> SEQUENCE_BITS || core->spaces[table->space].epoch != head->epoch)
        return NULL;
    if (head->sequence > core->sequence)
        core->sequence = head->sequence;
    return table;
}

/* Enter a block that a head describes, which has no row. Its number; below 0: there is no place for it. */
static int64_t enter_head(Table *table, uint32_t number, uint32_t slot, const Head *head, uint32_t flags)
{
    int64_t place = take_row(table);
    if (place < 0)
        return NO_ROW;
    Row *row = table->index.rows + place;
    begin_change(row);
    row->fingerprint = head->fingerprint;
    if (!enter_row(&table->index, (uint32_t)place)) {
        give_row(table, (uint32_t)place);
        return NO_ROW;
    }
    row->arena = row->page = row->note = 0, row->flags = flags | head->micros % 1000000 << MICROS;
    row->length = head->length, row->checksum = head->checksum;
    row->slab = number, row->slot = (uint16_t)slot, row->packed = (uint16_t)(padded(packed_of(head)) / PAGE);
    row->sequence = head->sequence, row->directory = head->directory;
    row->due = (uint64_t)head->stored * 1000000, row->used = row->stored = head->stored, row->expires = head->expires;
    row->uses = 0, row->list = flags & FOREIGN ? NO_LIST : 0, row->priority = head->priority, row->name_length = head->name_length;
    end_change(row);
    table->index.header->live++;
    return place;
}

/* Enter a block of an own slab, unless there is a newer one of its name. 1: its slot is taken. */
static int load_head(Core *core, uint32_t number, uint32_t slot, const Head *head)
{
    Table *table = table_of_head(core, core->classes[core->slabs[number].class].slot_size, head);
    if (!table || (core->removed_count && removed_place(core->removed, core->removed_room, head->fingerprint)->is_known))
        return 0;
    int64_t place = find_row(&table->index, head->fingerprint);
    if (place >= 0) {
        Row *other = table->index.rows + place; /* one that was put since is newer, whatever clocks said */
        if (other->flags & FOREIGN && other->slab == number && other->slot == slot && other->sequence == head->sequence) {
            core->foreign_rows--; /* another host had the slab until now */
            other->flags = (other->flags & ~(uint32_t)FOREIGN) | LOADED;
            other->list = 0;
            own_slot(core, table, (uint32_t)place);
            return 1;
        }
        if (!(other->flags & (LOADED | FOREIGN)) || other->sequence >= head->sequence)
            return 0;
        end_row(core, table, (uint32_t)place, NO_ROW);
    }
    place = enter_head(table, number, slot, head, LOADED);
    if (place < 0)
        return 0;
    own_slot(core, table, (uint32_t)place);
    return 1;
}

/* -- slabs of other hosts ----------------------------------------------------------------------------------------- */

/* The row of a slot of another host's slab; NULL: it has none. */
static Row *foreign_row(Core *core, uint32_t number, uint32_t slot, Table **table, uint32_t *place)
{
    uint64_t known = core->foreign[number].rows ? core->foreign[number].rows[slot] : 0;
    if (!known)
        return NULL;
    *table = core->tables + (known >> 32), *place = (uint32_t)known - 1;
    if (!(*table)->is_known || (*table)->is_ended || *place >= (*table)->index.header->row_end)
        return NULL;
    Row *row = (*table)->index.rows + *place;
    return (row->version & 1) && row->flags & FOREIGN && row->slab == number && row->slot == slot ? row : NULL;
}

/* Nothing is known of a slab of another host any more. */
static void forget_foreign(Core *core, uint32_t number)
{
    Foreign *foreign = core->foreign + number;
    Table *table;
    uint32_t place;
    for (uint32_t slot = 0; foreign->rows && slot < foreign->count; slot++)
        if (foreign_row(core, number, slot, &table, &place))
            end_row(core, table, place, NO_ROW);
    free(foreign->rows);
    *foreign = (Foreign){0};
}

/* A head of another host's slab: 1: its row is entered, or is as it was. A block of ours that is older has been replaced. */
static int meet_head(Core *core, uint32_t number, uint32_t slot, const Head *head)
{
    Table *table = table_of_head(core, core->foreign[number].slot_size, head);
    if (!table)
        return 0;
    int64_t place = find_row(&table->index, head->fingerprint);
    if (place >= 0) {
        Row *other = table->index.rows + place;
        if (other->flags & FOREIGN && other->slab == number && other->slot == slot && other->sequence == head->sequence)
            return 1;
        if (other->sequence > head->sequence || (other->sequence == head->sequence && other->slab >= number)) {
            if (!(other->flags & FOREIGN))
                other->flags |= SHADOWS, core->shadows = 1;
            return 0;
        }
        end_row(core, table, (uint32_t)place, NO_ROW);
    }
    if (core->foreign_rows >= core->foreign_max || (place = enter_head(table, number, slot, head, FOREIGN)) < 0)
        return 0;
    core->foreign_rows++;
    core->foreign[number].rows[slot] = ((uint64_t)(table - core->tables) << 32) + (uint64_t)place + 1;
    return 1;
}

/* All hosts know of blocks of ours up to a sequence: these shadow none. */
static void settle_shadows(Core *core, uint64_t sequence)
{
    int is_any = 0;
    for (uint32_t t = 0; t < TABLES && core->shadows; t++) {
        Table *table = core->tables + t;
        for (uint32_t r = 0; table->is_known && !table->is_ended && r < table->index.header->row_end; r++) {
            Row *row = table->index.rows + r;
            if (!(row->version & 1) || !(row->flags & SHADOWS))
                continue;
            if (row->sequence <= sequence)
                row->flags &= ~(uint32_t)SHADOWS;
            is_any |= (row->flags & SHADOWS) != 0;
        }
    }
    core->shadows = (uint64_t)is_any;
}

/* Know the blocks of a slab of another host as its heads say it now. -1: it is ours. */
static int64_t load_foreign(Core *core, uint32_t number, uint32_t token, const uint8_t *meta, uint64_t size)
{
    Foreign *foreign = core->foreign + number;
    Head first = {0}, head;
    Table *table;
    int64_t count = 0;
    memcpy(&first, meta, size < HEAD ? 0 : HEAD);
    lock(core);
    if (core->states[number].is_ours || core->slabs[number].owners) {
        unlock(core);
        return -1;
    }
    int is_slab = is_sound_head(&first, STATE_SLAB) && first.token == token && first.slot_size &&
                  !(first.slot_size % PAGE) && first.slot_size <= core->slab_size;
    if (!is_slab || foreign->slot_size != first.slot_size)
        forget_foreign(core, number);
    if (is_slab && !foreign->rows) {
        plan_slab(core, first.slot_size, &foreign->count, &foreign->lead);
        foreign->rows = calloc(foreign->count + 1, sizeof *foreign->rows);
        foreign->slot_size = first.slot_size;
    }
    uint32_t end = size / HEAD && foreign->rows ? (uint32_t)(size / HEAD - 1) : 0, place;
    end = end < foreign->count ? end : foreign->count;
    for (uint32_t slot = 0; slot < end; slot++) {
        if (slot % HEADS_AT_ONCE == HEADS_AT_ONCE - 1) {
            unlock(core);
            lock(core);
        }
        memcpy(&head, meta + (uint64_t)HEAD * (slot + 1), HEAD);
        int is_block = head.magic == HEAD_MAGIC && head.incarnation == first.incarnation && is_sound_head(&head, STATE_BLOCK);
        Row *row = foreign_row(core, number, slot, &table, &place);
        if (row && !(is_block && row->sequence == head.sequence && is_same(row->fingerprint, head.fingerprint)))
            end_row(core, table, place, NO_ROW);
        count += is_block && meet_head(core, number, slot, &head);
    }
    unlock(core);
    return count;
}

/* Take over a slab by its heads, some at a time: the lock is free between. How many blocks it has; -1: it is here already. */
static int64_t load_slab(Core *core, uint32_t number, uint32_t token, const uint8_t *meta, uint64_t size)
{
    int64_t count = 0;
    Slab *slab = core->slabs + number;
    SlabState *state = core->states + number;
    Head first = {0}, head;
    memcpy(&first, meta, size < HEAD ? 0 : HEAD);
    lock(core);
    if (state->is_ours || slab->owners) {
        unlock(core);
        return -1;
    }
    state->slot_size = state->is_head_written = state->has_stale = 0;
    state->incarnation = first.incarnation, state->token = token;
    int is_slab = is_sound_head(&first, STATE_SLAB) && first.token == token && first.slot_size == core->foreign[number].slot_size;
    if (!is_slab)
        forget_foreign(core, number);
    if (!is_sound_head(&first, STATE_SLAB) || first.token != token || !first.slot_size || first.slot_size % PAGE ||
        first.slot_size > core->slab_size || !cut_slab(core, number, first.slot_size)) {
        core->free_slabs[core->free_count++] = number;
        state->is_ours = 1;
        state->is_head_written = is_sound_head(&first, STATE_FREE) && first.token == token;
        if (!state->is_head_written)
            owe_head(core, number);
        unlock(core);
        return 0;
    }
    state->slot_size = first.slot_size;
    state->is_head_written = 1;
    learn_size(core, first.slot_size);
    slab->held = slab->in_list = 1; /* it stays, and nobody else takes slots of it, until all are known */
    uint32_t end = size / HEAD - 1 < slab->count ? (uint32_t)(size / HEAD - 1) : slab->count;
    for (uint32_t slot = 0; slot < end; slot++) {
        memcpy(&head, meta + (uint64_t)HEAD * (slot + 1), HEAD);
        if (slot % HEADS_AT_ONCE == HEADS_AT_ONCE - 1) {
            unlock(core);
            lock(core);
        }
        if (head.magic != HEAD_MAGIC || head.incarnation != first.incarnation || !is_sound_head(&head, STATE_BLOCK))
            continue;
        if (load_head(core, number, slot, &head))
            count++;
        else
            owe_free_head(core, number, slot);
    }
    state->is_ours = 1; /* not before: a daemon that finds half of it loads it again */
    forget_foreign(core, number); /* those that are no more */
    slab->held = slab->in_list = 0;
    offer_slab(core, number);
    free_slab(core, number);
    unlock(core);
    return count;
}

/* -- between hosts that ask each other ---------------------------------------------------------------------------- */

/* What a host tells another one of a block. */
typedef struct {
    Head head;
    uint32_t slab, slot, spare[2];
} Told;

_Static_assert(sizeof(Told) == 112, "what is told of a block has 112 bytes");

/* The newest block of ours with a fingerprint, an expired one, too. 0: there is none. */
static int tell_block(Core *core, Fingerprint wanted, Told *told)
{
    uint64_t sequence = 0;
    for (uint32_t t = 0; t < TABLES; t++) {
        Table *table = core->tables + t;
        int64_t place = table->is_known && !table->is_ended ? find_row(&table->index, wanted) : NO_ROW;
        const Row *row = place >= 0 ? table->index.rows + place : NULL;
        if (!row || row->flags & FOREIGN || row->sequence <= sequence)
            continue;
        sequence = row->sequence;
        *told = (Told){head_of_row(core, table, row), row->slab, row->slot, {0, 0}};
        if (row->packed)
            told->head.version = PACKED_VERSION, told->head.packed = row->packed * (uint32_t)PAGE;
    }
    told->head.crc = checksum_of(0, (const uint8_t *)&told->head, HEAD - 4);
    return sequence != 0;
}

/* Another host has told of a block. 1: it counts. */
static int hear_block(Core *core, const Told *told)
{
    const Head *head = &told->head;
    if (told->slab >= core->slab_count || !is_sound_head(head, STATE_BLOCK) || core->states[told->slab].is_ours ||
        core->slabs[told->slab].owners || !head->slot_size || head->slot_size % PAGE || head->slot_size > core->slab_size)
        return 0;
    Foreign *foreign = core->foreign + told->slab;
    if (foreign->slot_size != head->slot_size)
        forget_foreign(core, told->slab);
    if (!foreign->rows) {
        plan_slab(core, head->slot_size, &foreign->count, &foreign->lead);
        foreign->rows = calloc(foreign->count + 1, sizeof *foreign->rows);
        foreign->slot_size = head->slot_size;
    }
    Table *table;
    uint32_t place;
    if (!foreign->rows || told->slot >= foreign->count)
        return 0;
    Row *row = foreign_row(core, told->slab, told->slot, &table, &place);
    if (row && row->sequence != head->sequence)
        end_row(core, table, place, NO_ROW);
    return meet_head(core, told->slab, told->slot, head);
}

/* Table and row of the block in a slot, whoever has the slab; NULL: there is none of this sequence. */
static const Row *row_in_slot(Core *core, uint32_t slab, uint32_t slot, uint64_t sequence, Table **table, uint32_t *place)
{
    const Slab *own = core->slabs + slab;
    const Row *row = NULL;
    if (own->owners && slot < own->count && own->owners[slot] >= SLOT_OWNED) {
        uint64_t owner = own->owners[slot] - SLOT_OWNED;
        *table = core->tables + (owner >> 32), *place = (uint32_t)owner;
        row = (*table)->index.rows + *place;
    } else if (!own->owners && slot < core->foreign[slab].count)
        row = foreign_row(core, slab, slot, table, place);
    return row && (row->version & 1) && row->sequence == sequence && !(*table)->is_ended ? row : NULL;
}

/* Whether the arena has what a row says about it: a daemon may have been killed while it used the arena again. */
static int is_noted(const Arena *arena, const Row *row, uint32_t number)
{
    uint64_t distance = 8 * (uint64_t)row->note;
    if (distance < sizeof(Note) || distance > arena->tail->notes ||
        (uint64_t)row->page * PAGE + padded(row->length) > arena->tail->used)
        return 0;
    const Note *note = note_of(arena, row);
    return note->row == number && note->sequence == row->sequence && note->name_length == row->name_length &&
           note->size == note_bytes(row->name_length) && distance - sizeof(Note) + note->size <= arena->tail->notes;
}

/* Go on with the rows of the daemon before this one. A row with an odd version is whole, as it was made odd last, and has
   its slot and its memory: both were reserved before, and are given away after it was made even. One row may be even that
   is a block: the one that was moving, of which nothing but its memory changed. Two may be odd of one name: the one that
   was replacing the other. Two may be odd of the same bytes: the one that got another name counts. What is no row's is
   free. */
static void restore_table(Core *core, Table *table)
{
    TableHeader *header = table->index.header;
    Row *rows = table->index.rows;
    uint32_t moving = header->moving - 1, replacing = header->replacing - 1, replaced = header->replaced - 1;
    if (header->moving && moving < header->row_end && !(rows[moving].version & 1)) {
        rows[moving].arena = 0;
        end_change(rows + moving);
    }
    if (header->replacing && replacing < header->row_end && replaced < header->row_end && (rows[replacing].version & 1) &&
        (rows[replaced].version & 1)) {
        core->states[rows[replaced].slab].has_stale = 1;
        change_entries(&table->index, replaced, replacing);
        begin_change(rows + replaced);
    }
    uint32_t renaming = header->renaming - 1, renamed = header->renamed - 1;
    if (header->renaming && renaming < header->row_end && header->renamed && renamed < header->row_end &&
        renaming != renamed && (rows[renaming].version & 1) && (rows[renamed].version & 1)) {
        core->states[rows[renamed].slab].has_stale = 1;
        begin_change(rows + renamed);
        change_entries(&table->index, renamed, NO_ROW);
    }
    header->moving = header->replacing = header->renaming = header->renamed = 0;
    header->live = 0;
    for (uint32_t number = 0; number < header->row_end; number++) {
        Row *row = rows + number;
        if (!(row->version & 1)) {
            give_row(table, number);
            continue;
        }
        Slab *slab = row->slab < core->slab_count ? core->slabs + row->slab : NULL;
        Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
        int is_dirty = (row->flags & (DIRTY | WRITING)) != 0;
        if (arena && (arena->table != (int)(table - core->tables) || !is_noted(arena, row, number)))
            arena = NULL;
        if (!slab || !slab->owners || row->slot >= slab->count || slab->owners[row->slot] >= SLOT_OWNED ||
            !fits_slot(core, row->length, row->packed * (uint32_t)PAGE, core->classes[slab->class].slot_size) ||
            (!arena && is_dirty) || row->flags & FOREIGN) { /* slabs or arenas were taken away meanwhile: it is lost */
            if (slab && slab->owners && !(row->flags & FOREIGN))
                core->states[row->slab].has_stale = 1;
            begin_change(row);
            change_entries(&table->index, number, NO_ROW);
            row->arena = row->flags = 0;
            give_row(table, number);
            continue;
        }
        header->live++;
        if (!arena && row->arena)
            move_row(&table->index, number, 0, 0, 0);
        own_slot(core, table, number);
        if (row->sequence > core->sequence)
            core->sequence = row->sequence;
        if (!arena)
            continue;
        arena->live++;
        core->resident++;
        if (!is_dirty)
            continue;
        row->flags = (row->flags & ~(uint32_t)WRITING) | DIRTY;
        arena->dirty++;
        core->dirty_bytes += padded(row->length);
        push(&core->queue, (uint32_t)(table - core->tables), number, row->sequence);
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
            learn_size(core, state->slot_size);
        if (!state->is_head_written)
            owe_head(core, number);
    }
    for (int t = 0; t < TABLES; t++)
        if (core->tables[t].is_known && !core->tables[t].is_ended)
            restore_table(core, core->tables + t);
    for (uint32_t number = 0; number < core->slab_count; number++) {
        Slab *slab = core->slabs + number;
        if (!slab->owners)
            continue;
        for (uint32_t slot = 0; slot < slab->count && core->states[number].has_stale; slot++)
            if (slab->owners[slot] == SLOT_FREE)
                owe_free_head(core, number, slot);
        offer_slab(core, number);
        free_slab(core, number);
    }
}

/* No block of a table is found any more. Its slots are known to be free when it is swept: until then, any slab may have
   heads of its blocks. */
static void end_table_now(Core *core, Table *table)
{
    if (table->is_ended)
        return;
    for (uint32_t number = 0; number < core->slab_count; number++)
        core->states[number].has_stale |= core->slabs[number].owners != NULL;
    table->is_ended = 1;
    core->unswept++;
    __atomic_store_n(&table->index.header->state, TABLE_ENDED, __ATOMIC_SEQ_CST);
}

/* Have a table go on in other memory, which was begun with its limits: whoever has the former mapped finds nothing in it
   any more, and sees no byte that is stored from now on. Rows keep their numbers. Blocks stay in the arenas that they are
   in until these are removed; no other comes to them.

   A daemon may be killed in between. The former memory counts as long as the new one is not live, then the new one. */
static void renew_table_now(Core *core, Table *table, const Index *fresh)
{
    TableHeader *former = table->index.header, *header = fresh->header;
    for (uint32_t a = 0; a < core->arena_count; a++) {
        Arena *arena = core->arenas + a;
        if (!arena->base || arena->state == SPARE || arena->table != (int)(table - core->tables))
            continue;
        arena->state = SEALED;
        __atomic_store_n(&arena->tail->is_sealed, 1, __ATOMIC_SEQ_CST);
    }
    table->arena = -1;
    memcpy(fresh->buckets, table->index.buckets, former->bucket_count * sizeof(Bucket));
    memcpy(fresh->rows, table->index.rows, former->row_end * sizeof(Row));
    header->bucket_count = former->bucket_count, header->row_end = former->row_end, header->live = former->live;
    header->valid_until = former->valid_until, header->neighbours = former->neighbours;
    header->asks = former->asks, header->ahead = former->ahead, header->origin = former->origin;
    __atomic_store_n(&header->state, TABLE_LIVE, __ATOMIC_SEQ_CST);
    __atomic_store_n(&former->state, TABLE_ENDED, __ATOMIC_SEQ_CST);
    table->index = *fresh;
    table->turn++;
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
    if (table->swept == end && !table->is_swept) {
        table->is_swept = 1;
        core->unswept--;
    }
    return !table->is_swept;
}

#endif
