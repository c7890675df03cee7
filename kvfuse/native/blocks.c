/* The block store's core (blockcore.h) as a Python module: arguments are numbers and buffers, columns of a batch.
   `_blocks.pyi` has them with types. The interpreter's lock is released while the core works. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "blockdoor.h"
#include "blocklend.h"
#include "blockpack.h"

typedef struct {
    PyObject_HEAD
    Core *core;
    PyObject *held; /* memory by its address: it ends after the core, however Python's collector finds both */
    Lender lender;  /* for _peers */
} CoreObject;

typedef struct {
    PyObject_HEAD
    CoreObject *of;
    Batch batch;
    Py_buffer packed; /* compressed bytes */
    int is_ended, is_laid_out;
} BatchObject;

typedef struct {
    PyObject_HEAD
    CoreObject *of;
    Landing landing;
    LandingWay way; /* for _peers */
} LandingObject;

static PyTypeObject core_type, batch_type, landing_type;

#define CORE (((CoreObject *)self)->core)

enum { ENTRY_COLUMNS = 4 };

static int has_column(const Py_buffer *column, Py_ssize_t count, Py_ssize_t size)
{
    if (column->len >= count * size)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a column is too short");
    return 0;
}

static Table *table_in(Core *core, unsigned place)
{
    if (place < TABLES && core->tables[place].is_known)
        return core->tables + place;
    PyErr_Format(PyExc_ValueError, "no table %u", place);
    return NULL;
}

static unsigned number_of(const Core *core, const Table *table)
{
    return (unsigned)(table - core->tables) + table->turn % TURNS * TABLES;
}

/* The table of a number: its place, and above that its turn. It has ended for who knows an earlier turn. */
static Table *table_at(Core *core, unsigned number)
{
    Table *table = table_in(core, number % TABLES);
    return table && number != number_of(core, table) ? &core->ended : table;
}

/* The table stays, in the memory that it is in, until `leave_table`: who changes that has the interpreter's lock, too. So
   `leave_table` is called without that lock. */
static Table *use_table(Core *core, unsigned number)
{
    Table *table = table_at(core, number);
    lock(core);
    if (table)
        table->users++;
    unlock(core);
    return table;
}

static void leave_table(Core *core, Table *table)
{
    lock(core);
    table->users--;
    unlock(core);
}

static int space_at(Core *core, int number)
{
    if (number >= 0 && number < SPACES && core->spaces[number].is_known)
        return 1;
    PyErr_Format(PyExc_ValueError, "no space %d", number);
    return 0;
}

/* Columns of a batch. The first three are names; ``sizes`` has the bytes of an item of each one. -1: one is too short. */
static int64_t open_columns(const Py_buffer *columns, const char *sizes, Names *names)
{
    Py_ssize_t count = columns[2].len / 4;
    for (int i = 1; sizes[i]; i++)
        if (!has_column(columns + i, count, sizes[i] - '0'))
            return -1;
    *names = (Names){columns[0].buf, columns[1].buf, columns[2].buf, (uint64_t)columns[0].len};
    return count;
}

static void release_all(Py_buffer *columns, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(columns + i);
}

/* -- making ------------------------------------------------------------------------------------------------------- */

/* Memory for slabs: those that there are not yet take none of it, which `calloc` does not promise. NULL: there is none. */
static void *map_zeros(size_t count, size_t size)
{
    void *memory = mmap(NULL, (count + 1) * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void unmap(void *memory, size_t count, size_t size)
{
    if (memory)
        munmap(memory, (count + 1) * size);
}

static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *words)
{
    unsigned long long states, slab_size, head_size;
    unsigned slab_count, slab_room = 0;
    Py_buffer sizes;
    if (!PyArg_ParseTuple(args, "KIKKy*|I", &states, &slab_count, &slab_size, &head_size, &sizes, &slab_room))
        return NULL;
    slab_room = slab_room > slab_count ? slab_room : slab_count;
    CoreObject *self = NULL;
    Core *core = NULL;
    Py_ssize_t count = sizes.len / 4;
    const uint32_t *size = sizes.buf;
    int is_sound = count >= 1 && count <= SIZES - LEARNED_MAX && slab_room < OF_SLAB && slab_size % PAGE == 0 &&
                   slab_size / PAGE <= SLOTS_MAX && head_size >= HEAD + HEAD + NAME_ROOM;
    for (Py_ssize_t i = 0; is_sound && i < count; i++)
        is_sound = size[i] && size[i] % PAGE == 0 && size[i] <= slab_size && (!i || size[i - 1] < size[i]);
    if (!is_sound)
        PyErr_SetString(PyExc_ValueError, "no such slabs, or slot sizes");
    else if ((self = (CoreObject *)type->tp_alloc(type, 0)) && (self->held = PyDict_New()) && (core = self->core = calloc(1, sizeof *core))) {
        core->states = (SlabState *)(uintptr_t)states;
        core->slab_count = slab_count, core->free_room = slab_room, core->kept_slabs = UINT32_MAX, core->slab_size = slab_size, core->head_size = head_size;
        core->slabs = map_zeros(slab_room, sizeof *core->slabs);
        core->free_slabs = map_zeros(slab_room, sizeof *core->free_slabs);
        core->foreign = map_zeros(slab_room, sizeof *core->foreign);
        core->foreign_max = FOREIGN_ROWS_MAX;
        core->size_count = (uint32_t)count;
        memcpy(core->sizes, sizes.buf, (size_t)count * 4);
        core->dirty_max = UINT64_MAX;
        core->ended = (Table){.is_known = 1, .is_ended = 1, .is_swept = 1, .arena = -1};
        core->ended.index.header = &core->ended_header, core->ended.index.multipliers = core->ended_multipliers;
        pthread_mutex_init(&core->lock, NULL);
        pthread_condattr_t clock;
        pthread_condattr_init(&clock);
        pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
        pthread_cond_init(&core->has_landed, &clock);
        self->lender = (Lender){core, lend_rows, give_rows_back, wait_for_landing};
    }
    if (is_sound && (!core || !core->slabs || !core->free_slabs || !core->foreign)) {
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
    PyBuffer_Release(&sizes);
    return (PyObject *)self;
}

static void core_free(CoreObject *self)
{
    Core *core = self->core;
    if (core) {
        for (uint32_t i = 0; core->slabs && i < core->slab_count; i++)
            free(core->slabs[i].owners);
        for (uint32_t i = 0; core->foreign && i < core->slab_count; i++)
            free(core->foreign[i].rows);
        for (int i = 0; i < SIZES; i++)
            free(core->classes[i].slabs);
        for (int i = 0; i < TABLES; i++)
            free(core->tables[i].free_rows);
        unmap(core->slabs, core->free_room, sizeof *core->slabs);
        unmap(core->free_slabs, core->free_room, sizeof *core->free_slabs);
        unmap(core->foreign, core->free_room, sizeof *core->foreign);
        free(core->queue.entries), free(core->unsynced.entries), free(core->removed), free(core->gone);
        pthread_mutex_destroy(&core->lock), pthread_cond_destroy(&core->has_landed);
        free(core);
    }
    Py_XDECREF(self->held);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Hold memory that the core, its batches and its landings use, until it is held no more, or all of them have ended. */
static PyObject *hold(PyObject *self, PyObject *args)
{
    PyObject *address, *memory;
    if (!PyArg_ParseTuple(args, "O!O", &PyLong_Type, &address, &memory))
        return NULL;
    PyObject *held = ((CoreObject *)self)->held;
    if (memory != Py_None ? PyDict_SetItem(held, address, memory) < 0
                          : PyDict_Contains(held, address) && PyDict_DelItem(held, address) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *put_space(PyObject *self, PyObject *args)
{
    int place, above;
    unsigned epoch;
    unsigned long long number, bytes_max, blocks_max;
    if (!PyArg_ParseTuple(args, "iKiIKK", &place, &number, &above, &epoch, &bytes_max, &blocks_max))
        return NULL;
    if (place < 0 || place >= SPACES || above >= place || (above >= 0 && !CORE->spaces[above].is_known))
        return PyErr_Format(PyExc_ValueError, "no place %d for a namespace below %d", place, above);
    Space *space = CORE->spaces + place;
    lock(CORE);
    space->is_known = 1, space->number = number, space->above = above, space->epoch = epoch;
    space->bytes_max = bytes_max, space->blocks_max = blocks_max;
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *set_packing(PyObject *self, PyObject *args)
{
    int place, packs;
    if (!PyArg_ParseTuple(args, "ip", &place, &packs) || !space_at(CORE, place))
        return NULL;
    lock(CORE);
    CORE->spaces[place].packs = packs;
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *space_use(PyObject *self, PyObject *args)
{
    int place;
    if (!PyArg_ParseTuple(args, "i", &place) || !space_at(CORE, place))
        return NULL;
    lock(CORE);
    Space space = CORE->spaces[place];
    unlock(CORE);
    return Py_BuildValue("KK", (unsigned long long)space.bytes, (unsigned long long)space.blocks);
}

static PyObject *add_table(PyObject *self, PyObject *args)
{
    unsigned place;
    int space;
    unsigned long long address, size;
    if (!PyArg_ParseTuple(args, "IiKK", &place, &space, &address, &size) || !space_at(CORE, space))
        return NULL;
    Index index;
    if (place >= TABLES || CORE->tables[place].is_known)
        return PyErr_Format(PyExc_ValueError, "no place %u for a table", place);
    if (!open_index((uint8_t *)(uintptr_t)address, size, &index) || index.header->bucket_count < BUCKETS_MIN ||
        index.header->bucket_count > index.header->buckets_max || index.header->row_end > index.header->rows_max)
        return PyErr_Format(PyExc_ValueError, "no table of version %d", TABLE_VERSION);
    lock(CORE);
    Table *table = CORE->tables + place;
    memset(table, 0, sizeof *table);
    table->is_known = 1, table->space = space, table->arena = -1, table->index = index;
    uint16_t *first = CORE->first_tables + table_place(index.header->name_space, index.header->directory);
    table->next = *first;
    *first = (uint16_t)(place + 1);
    if (place >= CORE->table_end)
        CORE->table_end = place + 1;
    unlock(CORE);
    Py_RETURN_NONE;
}

/* Its number from now on. */
static PyObject *renew_table(PyObject *self, PyObject *args)
{
    unsigned number;
    unsigned long long address, size;
    Table *table;
    Index fresh;
    if (!PyArg_ParseTuple(args, "IKK", &number, &address, &size) || !(table = table_at(CORE, number)))
        return NULL;
    if (table->is_ended || !open_index((uint8_t *)(uintptr_t)address, size, &fresh) ||
        fresh.buckets_max != table->index.buckets_max || fresh.rows_max != table->index.rows_max ||
        fresh.header->serial == table->index.header->serial || fresh.header->state == TABLE_LIVE)
        return PyErr_Format(PyExc_ValueError, "no memory for table %u to go on in", number);
    for (lock(CORE); table->users; lock(CORE)) { /* no more come, and those that are there need the core's lock alone */
        unlock(CORE);
        sched_yield();
    }
    renew_table_now(CORE, table, &fresh);
    number = number_of(CORE, table);
    unlock(CORE);
    return PyLong_FromUnsignedLong(number);
}

static PyObject *end_table(PyObject *self, PyObject *args)
{
    unsigned place;
    Table *table;
    if (!PyArg_ParseTuple(args, "I", &place) || !(table = table_in(CORE, place)))
        return NULL;
    lock(CORE);
    end_table_now(CORE, table);
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *sweep(PyObject *self, PyObject *args)
{
    unsigned place, rows_max;
    Table *table;
    if (!PyArg_ParseTuple(args, "II", &place, &rows_max) || !(table = table_in(CORE, place)))
        return NULL;
    int more;
    Py_BEGIN_ALLOW_THREADS
    lock(CORE);
    more = table->is_ended && sweep_table(CORE, table, rows_max);
    unlock(CORE);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(more);
}

/* A swept table's place is free, and its arenas belong to nobody. Refused while memory of it is pinned. */
static PyObject *remove_table(PyObject *self, PyObject *args)
{
    unsigned place;
    Table *table;
    if (!PyArg_ParseTuple(args, "I", &place) || !(table = table_in(CORE, place)))
        return NULL;
    lock(CORE);
    int may_go = table->is_swept && !table->users;
    for (uint32_t a = 0; a < CORE->arena_count; a++)
        may_go &= !(CORE->arenas[a].base && CORE->arenas[a].state != SPARE && CORE->arenas[a].table == (int)place);
    if (may_go) {
        const TableHeader *header = table->index.header;
        uint16_t *link = CORE->first_tables + table_place(header->name_space, header->directory);
        while (*link != place + 1)
            link = &CORE->tables[*link - 1].next;
        *link = table->next;
        free(table->free_rows);
        memset(table, 0, sizeof *table);
    }
    unlock(CORE);
    return PyBool_FromLong(may_go);
}

static PyObject *add_arena(PyObject *self, PyObject *args)
{
    unsigned place, number;
    unsigned long long address, size;
    int table;
    if (!PyArg_ParseTuple(args, "IIKKi", &place, &number, &address, &size, &table))
        return NULL;
    Core *core = CORE;
    const Tail *tail = (const Tail *)(uintptr_t)(address + size) - 1;
    if (place >= ARENAS || core->arenas[place].base || !number || arena_of(core, number) || size < 2 * PAGE || size % PAGE ||
        (table >= 0 && !table_in(core, (unsigned)table)) ||
        (table >= 0 && (tail->magic != TAIL_MAGIC || tail->used > size || tail->notes > size - sizeof *tail - tail->used)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no place %u for such an arena", place);
    lock(core);
    Arena *arena = core->arenas + place;
    memset(arena, 0, sizeof *arena);
    arena->number = number, arena->base = (uint8_t *)(uintptr_t)address, arena->size = size;
    arena->tail = (Tail *)(arena->base + size) - 1;
    arena->table = table;
    if (table >= 0) {
        arena->state = arena->tail->is_sealed ? SEALED : FILLED;
        if (arena->tail->stamp > core->stamp)
            core->stamp = arena->tail->stamp;
    } else {
        *arena->tail = (Tail){.magic = TAIL_MAGIC};
    }
    if (place >= core->arena_count)
        core->arena_count = place + 1;
    place_arenas(core);
    unlock(core);
    Py_RETURN_NONE;
}

/* Empty an arena and forget it, if nobody uses it and all in it is on the medium. */
static PyObject *remove_arena(PyObject *self, PyObject *args)
{
    unsigned place;
    if (!PyArg_ParseTuple(args, "I", &place))
        return NULL;
    Core *core = CORE;
    if (place >= ARENAS || !core->arenas[place].base)
        return PyErr_Format(PyExc_ValueError, "no arena %u", place);
    Arena *arena = core->arenas + place;
    int may_go;
    Py_BEGIN_ALLOW_THREADS
    lock(core);
    may_go = arena->base && !arena->pins && !arena->dirty;
    if (may_go) {
        if (arena->state != SPARE) {
            empty_arena(core, arena, &(KeptRows){0});
            if (core->tables[arena->table].arena == (int)place)
                core->tables[arena->table].arena = -1;
        }
        arena->base = NULL;
        place_arenas(core);
    }
    unlock(core);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(may_go);
}

/* (state, table, pins, dirty, live, used, stamp) of an arena, for who decides which one goes. */
static PyObject *arena_facts(PyObject *self, PyObject *args)
{
    unsigned place;
    if (!PyArg_ParseTuple(args, "I", &place))
        return NULL;
    if (place >= ARENAS || !CORE->arenas[place].base)
        return PyErr_Format(PyExc_ValueError, "no arena %u", place);
    lock(CORE);
    Arena arena = CORE->arenas[place];
    unsigned long long used = arena.tail->used + arena.tail->notes, stamp = arena.tail->stamp;
    unlock(CORE);
    return Py_BuildValue("iiIIIKK", arena.state, arena.state == SPARE ? -1 : arena.table, arena.pins, arena.dirty,
                         arena.live, used, stamp);
}

static PyObject *pin_arena(PyObject *self, PyObject *args)
{
    unsigned number;
    int by;
    if (!PyArg_ParseTuple(args, "Ii", &number, &by))
        return NULL;
    lock(CORE);
    Arena *arena = arena_of(CORE, number);
    if (arena)
        arena->pins += (uint32_t)by;
    unlock(CORE);
    return PyBool_FromLong(arena != NULL);
}

static PyObject *set_slab_count(PyObject *self, PyObject *args)
{
    unsigned slab_count;
    if (!PyArg_ParseTuple(args, "I", &slab_count))
        return NULL;
    int may_be = slab_count <= CORE->free_room;
    lock(CORE);
    for (uint32_t i = slab_count; may_be && i < CORE->slab_count; i++)
        may_be = !CORE->states[i].is_ours && !CORE->slabs[i].owners && !CORE->foreign[i].rows;
    if (may_be)
        CORE->slab_count = slab_count;
    unlock(CORE);
    if (!may_be)
        return PyErr_Format(PyExc_ValueError, "%u slabs: there is room for %u, or others are in use", slab_count, CORE->free_room);
    Py_RETURN_NONE;
}

static PyObject *keep_to(PyObject *self, PyObject *args)
{
    unsigned slab_count;
    if (!PyArg_ParseTuple(args, "I", &slab_count))
        return NULL;
    lock(CORE);
    CORE->kept_slabs = slab_count;
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *add_slabs(PyObject *self, PyObject *args)
{
    Py_buffer numbers;
    unsigned token;
    if (!PyArg_ParseTuple(args, "y*I", &numbers, &token))
        return NULL;
    const uint32_t *number = numbers.buf;
    Core *core = CORE;
    lock(core);
    for (Py_ssize_t i = 0; i < numbers.len / 4; i++)
        if (number[i] < core->slab_count && !core->states[number[i]].is_ours && core->free_count < core->free_room) {
            core->states[number[i]].slot_size = core->states[number[i]].has_stale = 0;
            core->states[number[i]].token = token;
            core->states[number[i]].is_ours = core->states[number[i]].is_head_written = 1;
            core->free_slabs[core->free_count++] = number[i];
        }
    unlock(core);
    PyBuffer_Release(&numbers);
    Py_RETURN_NONE;
}

/* Up to so many free slabs, which are the core's no more. The medium knows that they are free: who takes them over may
   lose power before he writes his own head. */
static PyObject *take_slabs(PyObject *self, PyObject *args)
{
    unsigned count, first = 0;
    if (!PyArg_ParseTuple(args, "I|I", &count, &first))
        return NULL;
    Core *core = CORE;
    uint32_t *taken = malloc((core->slab_count + 1) * sizeof *taken), found = 0, left = 0;
    if (!taken)
        return PyErr_NoMemory();
    lock(core);
    for (uint32_t i = 0; i < core->free_count; i++) {
        uint32_t number = core->free_slabs[i];
        if (found < count && number >= first && core->states[number].is_head_written) {
            core->states[number].is_ours = 0;
            taken[found++] = number;
        } else
            core->free_slabs[left++] = number;
    }
    core->free_count = left;
    unlock(core);
    PyObject *list = PyList_New(found); /* what makes objects may run anything: not under the lock */
    for (uint32_t i = 0; list && i < found; i++) {
        PyObject *item = PyLong_FromUnsignedLong(taken[i]);
        if (item)
            PyList_SET_ITEM(list, i, item);
        else
            Py_CLEAR(list);
    }
    free(taken);
    return list;
}

static PyObject *load_slab_heads(PyObject *self, PyObject *args)
{
    unsigned number, token;
    Py_buffer meta;
    if (!PyArg_ParseTuple(args, "IIy*", &number, &token, &meta))
        return NULL;
    Core *core = CORE;
    long long count = -1;
    if (number < core->slab_count) {
        Py_BEGIN_ALLOW_THREADS
        count = load_slab(core, number, token, meta.buf, (uint64_t)meta.len);
        Py_END_ALLOW_THREADS
    }
    if (count < 0)
        PyErr_Format(PyExc_ValueError, "slab %u is there already, or cannot be", number);
    PyBuffer_Release(&meta);
    return count < 0 ? NULL : PyLong_FromLongLong(count);
}

static PyObject *load_foreign_heads(PyObject *self, PyObject *args)
{
    unsigned number, token;
    Py_buffer meta;
    if (!PyArg_ParseTuple(args, "IIy*", &number, &token, &meta))
        return NULL;
    Core *core = CORE;
    long long count = -1;
    if (number < core->slab_count) {
        Py_BEGIN_ALLOW_THREADS
        count = load_foreign(core, number, token, meta.buf, (uint64_t)meta.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&meta);
    return PyLong_FromLongLong(count);
}

static PyObject *forget_foreign_slab(PyObject *self, PyObject *args)
{
    unsigned number;
    if (!PyArg_ParseTuple(args, "I", &number))
        return NULL;
    Core *core = CORE;
    if (number < core->slab_count) {
        Py_BEGIN_ALLOW_THREADS
        lock(core);
        forget_foreign(core, number);
        unlock(core);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *tell(PyObject *self, PyObject *args)
{
    unsigned long long low, high;
    if (!PyArg_ParseTuple(args, "KK", &low, &high))
        return NULL;
    Told told = {0};
    lock(CORE);
    int is_there = tell_block(CORE, (Fingerprint){low, high}, &told);
    unlock(CORE);
    return is_there ? PyBytes_FromStringAndSize((const char *)&told, sizeof told) : Py_NewRef(Py_None);
}

static PyObject *hear(PyObject *self, PyObject *args)
{
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    Told told;
    int counts = 0;
    if (data.len == sizeof told) {
        memcpy(&told, data.buf, sizeof told);
        lock(CORE);
        counts = hear_block(CORE, &told);
        unlock(CORE);
    }
    PyBuffer_Release(&data);
    return PyBool_FromLong(counts);
}

static PyObject *row_at_slot(PyObject *self, PyObject *args)
{
    unsigned slab, slot, place = 0, number = 0;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "IIK", &slab, &slot, &sequence))
        return NULL;
    Core *core = CORE;
    Table *table;
    lock(core);
    int is_there = slab < core->slab_count && row_in_slot(core, slab, slot, sequence, &table, &place);
    number = is_there ? (unsigned)(table - core->tables) : 0;
    unlock(core);
    return is_there ? Py_BuildValue("II", number, place) : Py_NewRef(Py_None);
}

static PyObject *settle_shadowing(PyObject *self, PyObject *args)
{
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "K", &sequence))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lock(CORE);
    settle_shadows(CORE, sequence);
    unlock(CORE);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *set_loading(PyObject *self, PyObject *args)
{
    int loading;
    if (!PyArg_ParseTuple(args, "p", &loading))
        return NULL;
    lock(CORE);
    CORE->loading = loading;
    if (!loading) {
        free(CORE->removed);
        CORE->removed = NULL;
        CORE->removed_count = CORE->removed_room = 0;
    }
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *restore(PyObject *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    lock(CORE);
    restore_all(CORE);
    unlock(CORE);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -- blocks ------------------------------------------------------------------------------------------------------- */

static PyObject *put(PyObject *self, PyObject *args)
{
    unsigned place, now, expires, priority;
    unsigned long long directory, now_us, shown_us = 0;
    int plain_only, only_absent = 0;
    Py_buffer columns[7];
    if (!PyArg_ParseTuple(args, "IKy*y*y*py*y*KIIIw*w*|Kp", &place, &directory, columns, columns + 1, columns + 2, &plain_only,
                          columns + 3, columns + 4, &now_us, &now, &expires, &priority, columns + 5, columns + 6, &shown_us,
                          &only_absent))
        return NULL;
    Names names;
    int64_t count = open_columns(columns, "-848888", &names), planned = -1;
    Table *table = count < 0 ? NULL : use_table(CORE, place);
    if (table) {
        PutTerms terms = {now_us, directory, shown_us, now, expires, (uint8_t)priority, (uint8_t)only_absent};
        Py_BEGIN_ALLOW_THREADS
        Plan *plans = malloc((size_t)(count + 1) * sizeof *plans);
        if (plans)
            planned = put_all(CORE, table, &names, plain_only, columns[3].buf, columns[4].buf, count, &terms, plans,
                              columns[5].buf, columns[6].buf);
        free(plans);
        leave_table(CORE, table);
        Py_END_ALLOW_THREADS
        if (planned < 0)
            PyErr_NoMemory();
    }
    release_all(columns, 7);
    return planned < 0 ? NULL : PyLong_FromLongLong(planned);
}

static PyObject *rename_row(PyObject *self, PyObject *args)
{
    unsigned place, row;
    unsigned long long sequence, now_us;
    Py_buffer name;
    Plan plan = {0};
    if (!PyArg_ParseTuple(args, "IIKy*K", &place, &row, &sequence, &name, &now_us))
        return NULL;
    int64_t made = ODD_NAME;
    uint64_t found = 0;
    Table *table = use_table(CORE, place);
    if (table && name.len > 0 && name.len <= NAME_MAX_BYTES) {
        PutTerms terms = {.now_us = now_us, .directory = table->index.header->directory};
        plan.name_length = (uint8_t)name.len;
        memcpy(plan.name, name.buf, (size_t)name.len);
        plan.fingerprint = fingerprint_of(table->index.multipliers, terms.directory, plan.name, plan.name_length);
        lock(CORE);
        made = rename_block(CORE, table, row, sequence, &plan, &terms, &found);
        unlock(CORE);
    }
    if (table) {
        Py_BEGIN_ALLOW_THREADS
        leave_table(CORE, table);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&name);
    return table ? Py_BuildValue("LK", (long long)made, (unsigned long long)found) : NULL;
}

static PyObject *get(PyObject *self, PyObject *args)
{
    unsigned place, now;
    unsigned long long directory;
    int plain_only;
    Py_buffer columns[7];
    if (!PyArg_ParseTuple(args, "IKy*y*y*py*y*Iw*w*", &place, &directory, columns, columns + 1, columns + 2, &plain_only,
                          columns + 3, columns + 4, &now, columns + 5, columns + 6))
        return NULL;
    Names names;
    int64_t count = open_columns(columns, "-848888", &names);
    Table *table = count < 0 ? NULL : use_table(CORE, place);
    if (table) {
        Py_BEGIN_ALLOW_THREADS
        get_all(CORE, table, directory, &names, plain_only, columns[3].buf, columns[4].buf, count, now, columns[5].buf,
                columns[6].buf);
        leave_table(CORE, table);
        Py_END_ALLOW_THREADS
    }
    release_all(columns, 7);
    return table ? Py_NewRef(Py_None) : NULL;
}

static PyObject *find_or_drop(PyObject *self, PyObject *args, int drops)
{
    unsigned place, now;
    unsigned long long directory;
    int plain_only;
    Py_buffer columns[5];
    if (!PyArg_ParseTuple(args, "IKy*y*y*pIw*w*", &place, &directory, columns, columns + 1, columns + 2, &plain_only, &now,
                          columns + 3, columns + 4))
        return NULL;
    Names names;
    int64_t count = open_columns(columns, "-8488", &names);
    Table *table = count < 0 ? NULL : use_table(CORE, place);
    if (table) {
        Py_BEGIN_ALLOW_THREADS
        find_all(CORE, table, directory, &names, plain_only, count, now, columns[3].buf, columns[4].buf, drops);
        leave_table(CORE, table);
        Py_END_ALLOW_THREADS
    }
    release_all(columns, 5);
    return table ? Py_NewRef(Py_None) : NULL;
}

static PyObject *find(PyObject *self, PyObject *args) { return find_or_drop(self, args, 0); }
static PyObject *drop(PyObject *self, PyObject *args) { return find_or_drop(self, args, 1); }

/* Drop rows that still have these sequences, and are on the medium or not. The bytes of their slots, 0 for others. */
static PyObject *drop_rows(PyObject *self, PyObject *args)
{
    unsigned place;
    Py_buffer columns[3];
    if (!PyArg_ParseTuple(args, "Iy*y*w*", &place, columns, columns + 1, columns + 2))
        return NULL;
    Py_ssize_t count = columns[0].len / 8;
    Table *table = NULL;
    if (has_column(columns + 1, count, 8) && has_column(columns + 2, count, 8) && (table = use_table(CORE, place))) {
        const int64_t *number = columns[0].buf;
        const uint64_t *sequence = columns[1].buf;
        int64_t *size = columns[2].buf;
        Core *core = CORE;
        Py_BEGIN_ALLOW_THREADS
        lock(core);
        for (Py_ssize_t i = 0; i < count; i++) {
            size[i] = 0;
            if (table->is_ended || number[i] < 0 || number[i] >= table->index.header->row_end)
                continue;
            const Row *row = table->index.rows + number[i];
            if (!(row->version & 1) || row->sequence != sequence[i])
                continue;
            size[i] = row->flags & FOREIGN ? core->foreign[row->slab].slot_size : core->states[row->slab].slot_size;
            drop_row(core, table, (uint32_t)number[i]);
        }
        unlock(core);
        leave_table(core, table);
        Py_END_ALLOW_THREADS
    }
    release_all(columns, 3);
    return table ? Py_NewRef(Py_None) : NULL;
}

/* All blocks of a slab: (table, row, sequence) of each, as bytes of u64. */
static PyObject *slab_rows(PyObject *self, PyObject *args)
{
    unsigned number;
    if (!PyArg_ParseTuple(args, "I", &number))
        return NULL;
    Core *core = CORE;
    if (number >= core->slab_count)
        return PyErr_Format(PyExc_ValueError, "no slab %u", number);
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(24 * (core->slab_size / PAGE)));
    if (!found)
        return NULL;
    uint64_t *out = (uint64_t *)PyBytes_AS_STRING(found);
    Py_ssize_t count = 0;
    lock(core);
    const Slab *slab = core->slabs + number;
    for (uint32_t slot = 0; slab->owners && slot < slab->count; slot++)
        if (slab->owners[slot] >= SLOT_OWNED) {
            uint64_t owner = slab->owners[slot] - SLOT_OWNED;
            out[3 * count] = owner >> 32, out[3 * count + 1] = owner & 0xFFFFFFFF;
            out[3 * count++ + 2] = row_at(core, (uint32_t)(owner >> 32), (uint32_t)owner)->sequence;
        }
    unlock(core);
    return _PyBytes_Resize(&found, 24 * count) < 0 ? NULL : found;
}

/* Live rows of a directory behind a row, some in a call. */
static PyObject *list_rows(PyObject *self, PyObject *args)
{
    unsigned place, limit, now;
    unsigned long long directory;
    long long after;
    if (!PyArg_ParseTuple(args, "IKLII", &place, &directory, &after, &limit, &now))
        return NULL;
    typedef struct {
        Row row;
        int64_t number;
        uint8_t has_name, name[NAME_MAX_BYTES];
    } Found;
    limit = limit < ROWS_AT_ONCE ? limit : ROWS_AT_ONCE;
    Core *core = CORE;
    Table *table = use_table(core, place);
    if (!table)
        return NULL;
    Found *found = malloc((limit + 1) * sizeof *found);
    unsigned count = 0;
    if (found) {
        Py_BEGIN_ALLOW_THREADS
        lock(core);
        int64_t end = table->is_ended ? 0 : table->index.header->row_end;
        after = after < -1 || after >= end ? end : after + 1;
        for (int64_t stop = after + 8 * ROWS_AT_ONCE; after < end && after < stop && count < limit; after++) {
            const Row *row = table->index.rows + after;
            if (!(row->version & 1) || row->directory != directory || (row->expires && now >= row->expires))
                continue;
            Found *one = found + count++;
            one->row = *row, one->number = after;
            Arena *arena = row->arena ? arena_of(core, row->arena) : NULL;
            one->has_name = arena != NULL;
            if (arena)
                memcpy(one->name, name_in(note_of(arena, row)), row->name_length);
        }
        after = after >= end ? -1 : after - 1;
        unlock(core);
        Py_END_ALLOW_THREADS
    }
    leave_table(core, table);
    if (!found)
        return PyErr_NoMemory();
    PyObject *rows = PyList_New(count);
    for (unsigned i = 0; rows && i < count; i++) {
        const Found *one = found + i;
        PyObject *name = Py_NewRef(Py_None);
        if (one->has_name)
            Py_SETREF(name, PyBytes_FromStringAndSize((const char *)one->name, one->row.name_length));
        PyObject *item = Py_BuildValue("LKIINIIi", (long long)one->number, (unsigned long long)one->row.sequence,
                                       one->row.length, one->row.stored, name, one->row.slab, (unsigned)one->row.slot,
                                       (int)one->row.name_length);
        if (!item)
            Py_CLEAR(rows);
        else
            PyList_SET_ITEM(rows, i, item);
    }
    free(found);
    return rows ? Py_BuildValue("NL", rows, after) : NULL;
}

/* Offset of a slot's name among the heads and names of its slab, and the slot's in its data; ValueError. */
static PyObject *slot_places(PyObject *self, PyObject *args)
{
    unsigned number, slot;
    if (!PyArg_ParseTuple(args, "II", &number, &slot))
        return NULL;
    Core *core = CORE;
    uint64_t name = 0, data = 0;
    uint32_t count;
    lock(core);
    if (number < core->slab_count && data_place(core, number, slot, &data, &count))
        name = name_place(count, slot);
    unlock(core);
    return name ? Py_BuildValue("KK", (unsigned long long)name, (unsigned long long)data) : PyErr_Format(PyExc_ValueError, "slab %u has no slot %u", number, slot);
}

/* -- batches ------------------------------------------------------------------------------------------------------ */

static PyObject *take_dirty(PyObject *self, PyObject *args)
{
    unsigned long long bytes_max, rows_max;
    if (!PyArg_ParseTuple(args, "KK", &bytes_max, &rows_max))
        return NULL;
    BatchObject *made = PyObject_New(BatchObject, &batch_type);
    if (!made)
        return NULL;
    made->of = (CoreObject *)Py_NewRef(self);
    memset(&made->batch, 0, sizeof made->batch);
    made->is_ended = 1, made->is_laid_out = 0, made->packed = (Py_buffer){0};
    int is_filled;
    Py_BEGIN_ALLOW_THREADS
    lock(CORE);
    is_filled = take_batch(CORE, &made->batch, bytes_max, rows_max);
    unlock(CORE);
    Py_END_ALLOW_THREADS
    made->is_ended = !is_filled;
    PyObject *found = (PyObject *)made;
    if (!is_filled)
        found = PyErr_NoMemory();
    else if (!made->batch.count)
        found = PyLong_FromUnsignedLongLong(made->batch.upto);
    if (found != (PyObject *)made)
        Py_DECREF(made);
    return found;
}

/* Once. ``is_written`` 0: its blocks and heads wait to be written again. */
static void finish_batch(BatchObject *self, int is_written)
{
    if (self->is_ended)
        return;
    self->is_ended = 1;
    Py_BEGIN_ALLOW_THREADS
    lock(self->of->core);
    end_batch(self->of->core, &self->batch, is_written);
    unlock(self->of->core);
    Py_END_ALLOW_THREADS
}

static void batch_free(BatchObject *self)
{
    finish_batch(self, 0);
    free(self->batch.rows), free(self->batch.data), free(self->batch.heads), free(self->batch.staging);
    PyBuffer_Release(&self->packed);
    Py_DECREF(self->of);
    PyObject_Free(self);
}

static PyObject *batch_end(BatchObject *self, PyObject *unused)
{
    finish_batch(self, 1);
    Py_RETURN_NONE;
}

static PyObject *batch_fail(BatchObject *self, PyObject *unused)
{
    finish_batch(self, 0);
    Py_RETURN_NONE;
}

static PyObject *batch_runs(BatchObject *self, PyObject *unused)
{
    if (!self->is_laid_out) {
        int is_done;
        self->is_laid_out = 1;
        Py_BEGIN_ALLOW_THREADS
        is_done = lay_out_batch(self->of->core, &self->batch);
        Py_END_ALLOW_THREADS
        if (!is_done)
            return PyErr_NoMemory();
    }
    return Py_BuildValue("y#y#", (const char *)self->batch.data, (Py_ssize_t)(self->batch.data_count * sizeof(Run)),
                         (const char *)self->batch.heads, (Py_ssize_t)(self->batch.head_count * sizeof(Run)));
}

enum { STORED_WORDS = 8 };

/* The blocks of a batch that are written, or those that may be compressed, as bytes: see `STORED` of blockforms.py. */
static PyObject *batch_blocks(BatchObject *self, PyObject *args)
{
    int to_pack;
    if (!PyArg_ParseTuple(args, "p", &to_pack))
        return NULL;
    const Core *core = self->of->core;
    const Batch *batch = &self->batch;
    uint64_t count = self->is_ended ? 0 : to_pack ? batch->wanting : batch->blocks;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * STORED_WORDS * 8));
    if (!found)
        return NULL;
    char *out = PyBytes_AS_STRING(found);
    uint64_t done = 0;
    for (uint64_t i = 0; i < batch->count && done < count; i++) {
        const Written *one = batch->rows + i;
        if (!one->data || (to_pack ? one->wants_packing == NO_PACKING : !one->size))
            continue;
        uint64_t size = one->head.packed ? padded(one->size) : one->head.length;
        const uint64_t words[STORED_WORDS] = {
            i, one->head.name_space, one->slab * core->slab_size + slot_offset(core, one->slab, one->slot), one->sequence,
            (uint64_t)(uintptr_t)one->data, size, one->head.slot_size, one->wants_packing == MUST_PACK};
        memcpy(out + done++ * sizeof words, words, sizeof words);
    }
    return _PyBytes_Resize(&found, (Py_ssize_t)(done * STORED_WORDS * 8)) < 0 ? NULL : found;
}

static PyObject *batch_told(BatchObject *self, PyObject *unused)
{
    const Batch *batch = &self->batch;
    PyObject *found = PyBytes_FromStringAndSize(NULL, self->is_ended ? 0 : (Py_ssize_t)(batch->blocks * sizeof(Told)));
    if (!found)
        return NULL;
    char *out = PyBytes_AS_STRING(found);
    uint64_t done = 0;
    lock(self->of->core);
    for (uint64_t i = 0; !self->is_ended && self->is_laid_out && i < batch->count; i++) {
        const Written *one = batch->rows + i;
        if (!one->data || !one->size)
            continue;
        const Row *row = row_at(self->of->core, one->table, one->row);
        if (!(row->version & 1) || row->sequence != one->sequence)
            continue; /* it went before its entry could come */
        const Told told = {.head = one->head, .slab = one->slab, .slot = one->slot};
        memcpy(out + done++ * sizeof told, &told, sizeof told);
    }
    unlock(self->of->core);
    return _PyBytes_Resize(&found, (Py_ssize_t)(done * sizeof(Told))) < 0 ? NULL : found;
}

static PyObject *batch_pack(BatchObject *self, PyObject *args)
{
    Py_buffer packed, buffer, saved;
    if (!PyArg_ParseTuple(args, "y*y*w*", &packed, &buffer, &saved))
        return NULL;
    Py_ssize_t count = packed.len / (Py_ssize_t)sizeof(Packed);
    const Packed *one = packed.buf;
    int is_sound = !self->is_ended && !self->is_laid_out && !self->packed.obj && has_column(&saved, count, 8);
    uint64_t room = (uint64_t)buffer.len;
    for (Py_ssize_t i = 0; is_sound && i < count; i++)
        is_sound = one[i].size <= room && padded(one[i].size) <= room && one[i].offset <= room - padded(one[i].size);
    if (is_sound) {
        self->packed = buffer;
        Py_BEGIN_ALLOW_THREADS
        lock(self->of->core);
        pack_batch(self->of->core, &self->batch, one, count, buffer.buf, saved.buf);
        unlock(self->of->core);
        Py_END_ALLOW_THREADS
    } else {
        PyBuffer_Release(&buffer);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a batch is packed once, before its runs are asked for, from a buffer");
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&saved);
    return is_sound ? Py_NewRef(Py_None) : NULL;
}

static PyObject *batch_facts(BatchObject *self, PyObject *unused)
{
    return Py_BuildValue("KKK", (unsigned long long)self->batch.blocks, (unsigned long long)self->batch.bytes,
                         (unsigned long long)self->batch.upto);
}

static PyMethodDef batch_methods[] = {
    {"end", (PyCFunction)batch_end, METH_NOARGS, "end()"},
    {"fail", (PyCFunction)batch_fail, METH_NOARGS, "fail()"},
    {"runs", (PyCFunction)batch_runs, METH_NOARGS, "runs() -> (data, heads)"},
    {"blocks", (PyCFunction)batch_blocks, METH_VARARGS, "blocks(whether to be packed) -> bytes"},
    {"told", (PyCFunction)batch_told, METH_NOARGS, "told() -> bytes"},
    {"pack", (PyCFunction)batch_pack, METH_VARARGS, "pack(packed, buffer, saved)"},
    {"facts", (PyCFunction)batch_facts, METH_NOARGS, "facts() -> (blocks, bytes, queue position)"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject batch_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._blocks.Batch",
    .tp_basicsize = sizeof(BatchObject),
    .tp_dealloc = (destructor)batch_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = batch_methods,
};

/* -- landings ----------------------------------------------------------------------------------------------------- */

static PyObject *reserve(PyObject *self, PyObject *args)
{
    unsigned place;
    Py_buffer columns[10];
    if (!PyArg_ParseTuple(args, "Iy*y*y*y*y*w*w*w*w*w*", &place, columns, columns + 1, columns + 2, columns + 3,
                          columns + 4, columns + 5, columns + 6, columns + 7, columns + 8, columns + 9))
        return NULL;
    Names names;
    int64_t count = open_columns(columns, "-848888488", &names);
    Table *table = count < 0 ? NULL : use_table(CORE, place);
    LandingObject *made = table ? PyObject_New(LandingObject, &landing_type) : NULL;
    if (made) {
        made->of = (CoreObject *)Py_NewRef(self);
        made->landing = (Landing){CORE, table, count, calloc((size_t)count + 1, sizeof *made->landing.rows)};
        made->way = (LandingWay){&made->landing, land_received};
        begin_landing(&made->landing);
        if (!made->landing.rows) {
            made->landing.count = 0;
            Py_CLEAR(made);
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            reserve_all(CORE, &made->landing, &names, columns[3].buf, columns[4].buf, columns[5].buf, columns[6].buf,
                        columns[7].buf, columns[8].buf, columns[9].buf);
            Py_END_ALLOW_THREADS
        }
    }
    if (table) {
        Py_BEGIN_ALLOW_THREADS
        leave_table(CORE, table);
        Py_END_ALLOW_THREADS
    }
    release_all(columns, 10);
    return (PyObject *)made;
}

static PyObject *landing_land(LandingObject *self, PyObject *args)
{
    Py_buffer came, results;
    if (!PyArg_ParseTuple(args, "y*w*", &came, &results))
        return NULL;
    int is_sound = has_column(&came, self->landing.count, 1) && has_column(&results, self->landing.count, 8);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        land_all(&self->landing, came.buf, results.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&came);
    PyBuffer_Release(&results);
    if (!is_sound)
        return NULL;
    Py_RETURN_NONE;
}

static void landing_free(LandingObject *self)
{
    end_landing(&self->landing);
    Py_DECREF(self->of);
    PyObject_Free(self);
}

static PyObject *landing_way(LandingObject *self, PyObject *none)
{
    return PyCapsule_New(&self->way, "kvfuse.landing", NULL);
}

static PyMethodDef landing_methods[] = {
    {"land", (PyCFunction)landing_land, METH_VARARGS, "land(came, results)"},
    {"way", (PyCFunction)landing_way, METH_NOARGS, "way() -> how _peers says what it received, as long as this lives"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject landing_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._blocks.Landing",
    .tp_basicsize = sizeof(LandingObject),
    .tp_dealloc = (destructor)landing_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = landing_methods,
};

/* -- the rest of the core ----------------------------------------------------------------------------------------- */

static void lender_free(PyObject *capsule) { Py_DECREF((PyObject *)PyCapsule_GetContext(capsule)); }

static PyObject *lender(PyObject *self, PyObject *args)
{
    unsigned arenas_max;
    if (!PyArg_ParseTuple(args, "I", &arenas_max))
        return NULL;
    PyObject *made = PyCapsule_New(&((CoreObject *)self)->lender, "kvfuse.lender", NULL);
    if (!made)
        return NULL;
    PyCapsule_SetContext(made, Py_NewRef(self));
    PyCapsule_SetDestructor(made, lender_free);
    lock(CORE);
    CORE->lent_max = arenas_max;
    unlock(CORE);
    return made;
}

static PyObject *set_dirty_max(PyObject *self, PyObject *args)
{
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "K", &bytes))
        return NULL;
    lock(CORE);
    CORE->dirty_max = bytes;
    unlock(CORE);
    Py_RETURN_NONE;
}

static PyObject *doubt(PyObject *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    lock(CORE);
    doubt_unsynced(CORE);
    unlock(CORE);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *note_synced(PyObject *self, PyObject *args)
{
    unsigned long long sequence, heads;
    if (!PyArg_ParseTuple(args, "KK", &sequence, &heads))
        return NULL;
    lock(CORE);
    if (CORE->synced < sequence)
        CORE->synced = sequence;
    if (CORE->unsynced.head < heads && heads <= CORE->unsynced.tail)
        CORE->unsynced.head = heads;
    unlock(CORE);
    Py_RETURN_NONE;
}

/* From now on `take_gone` has the blocks that are no more. */
static PyObject *follow_gone(PyObject *self, PyObject *unused)
{
    Gone *gone = malloc(GONE_MAX * sizeof *gone);
    if (!gone)
        return PyErr_NoMemory();
    lock(CORE);
    if (!CORE->gone) {
        CORE->gone = gone;
        gone = NULL;
    }
    unlock(CORE);
    free(gone);
    Py_RETURN_NONE;
}

static PyObject *take_gone(PyObject *self, PyObject *args)
{
    unsigned count;
    if (!PyArg_ParseTuple(args, "I", &count))
        return NULL;
    count = count < GONE_MAX ? count : GONE_MAX;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(Gone)));
    if (!found)
        return NULL;
    Gone *out = (Gone *)PyBytes_AS_STRING(found);
    Py_ssize_t taken = 0;
    lock(CORE);
    for (; taken < count && CORE->gone_head < CORE->gone_tail; CORE->gone_head++)
        out[taken++] = CORE->gone[CORE->gone_head % GONE_MAX];
    unlock(CORE);
    return _PyBytes_Resize(&found, taken * (Py_ssize_t)sizeof(Gone)) < 0 ? NULL : found;
}

static PyObject *statistics(PyObject *self, PyObject *unused)
{
    Core *core = CORE;
    uint64_t live = 0, free_bytes = 0, going_bytes = 0, free_slabs = 0;
    lock(core);
    for (uint32_t i = 0; i < core->free_count; i++)
        free_slabs += core->free_slabs[i] < core->kept_slabs;
    for (uint32_t s = 0; s < core->slab_count; s++)
        if (core->slabs[s].owners && s < core->kept_slabs) {
            free_bytes += (uint64_t)core->slabs[s].free * core->states[s].slot_size;
            going_bytes += (uint64_t)core->slabs[s].going * core->states[s].slot_size;
        }
    for (uint32_t t = 0; t < core->table_end; t++)
        if (core->tables[t].is_known && !core->tables[t].is_ended)
            live += core->tables[t].index.header->live;
    const struct {
        const char *name;
        uint64_t value;
    } all[] = {{"blocks", live}, {"resident", core->resident}, {"puts", core->puts}, {"put_bytes", core->put_bytes},
               {"gets", core->gets}, {"get_bytes", core->get_bytes}, {"recycled_arenas", core->recycled},
               {"relocated", core->relocated}, {"refused", core->refused}, {"batches", core->batches},
               {"dirty_bytes", core->dirty_bytes}, {"dirty", core->queue.tail - core->queue.head},
               {"free_slabs", free_slabs}, {"queued", core->queue.tail},
               {"free_slots_bytes", free_bytes}, {"going_slots_bytes", going_bytes}, {"foreign", core->foreign_rows},
               {"shadows", core->shadows}, {"sequence", core->sequence}, {"written_heads", core->unsynced.tail}};
    unlock(core);
    PyObject *found = PyDict_New(); /* what makes objects may run anything: not under the lock */
    for (size_t i = 0; found && i < sizeof all / sizeof *all; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(all[i].value);
        if (!value || PyDict_SetItemString(found, all[i].name, value) < 0)
            Py_CLEAR(found);
        Py_XDECREF(value);
    }
    return found;
}

static PyMethodDef core_methods[] = {
    {"hold", hold, METH_VARARGS, "hold(address, memory or None)"},
    {"put_space", put_space, METH_VARARGS, "put_space(place, number, above, epoch, bytes_max, blocks_max)"},
    {"set_packing", set_packing, METH_VARARGS, "set_packing(space, whether)"},
    {"space_use", space_use, METH_VARARGS, "space_use(place) -> (bytes, blocks)"},
    {"add_table", add_table, METH_VARARGS, "add_table(place, space, address, size)"},
    {"renew_table", renew_table, METH_VARARGS, "renew_table(number, address, size)"},
    {"end_table", end_table, METH_VARARGS, "end_table(place)"},
    {"sweep_table", sweep, METH_VARARGS, "sweep_table(place, rows_max) -> whether there are more"},
    {"remove_table", remove_table, METH_VARARGS, "remove_table(place) -> whether it could go"},
    {"add_arena", add_arena, METH_VARARGS, "add_arena(place, number, address, size, table)"},
    {"remove_arena", remove_arena, METH_VARARGS, "remove_arena(place) -> whether it could go"},
    {"arena_facts", arena_facts, METH_VARARGS, "arena_facts(place) -> (state, table, pins, dirty, live, used, stamp)"},
    {"pin_arena", pin_arena, METH_VARARGS, "pin_arena(number, by) -> whether there is one"},
    {"add_slabs", add_slabs, METH_VARARGS, "add_slabs(numbers, token)"},
    {"take_slabs", take_slabs, METH_VARARGS, "take_slabs(count) -> numbers"},
    {"load_slab", load_slab_heads, METH_VARARGS, "load_slab(number, token, heads) -> blocks"},
    {"load_foreign", load_foreign_heads, METH_VARARGS, "load_foreign(number, token, heads) -> blocks, or -1"},
    {"forget_foreign", forget_foreign_slab, METH_VARARGS, "forget_foreign(number)"},
    {"tell", tell, METH_VARARGS, "tell(low, high) -> what another host needs to know of a block"},
    {"hear", hear, METH_VARARGS, "hear(told) -> whether it counts"},
    {"row_at", row_at_slot, METH_VARARGS, "row_at(slab, slot, sequence) -> (table, row)"},
    {"settle_shadows", settle_shadowing, METH_VARARGS, "settle_shadows(sequence)"},
    {"keep_to", keep_to, METH_VARARGS, "keep_to(slab_count)"},
    {"set_slab_count", set_slab_count, METH_VARARGS, "set_slab_count(slab_count)"},
    {"set_loading", set_loading, METH_VARARGS, "set_loading(whether)"},
    {"restore", restore, METH_NOARGS, "restore()"},
    {"put", put, METH_VARARGS, "put(...) -> how many have a place"},
    {"rename_row", rename_row, METH_VARARGS, "rename_row(table, row, sequence, name, now_us) -> (row, sequence)"},
    {"get", get, METH_VARARGS, "get(...)"},
    {"find", find, METH_VARARGS, "find(...)"},
    {"drop", drop, METH_VARARGS, "drop(...)"},
    {"drop_rows", drop_rows, METH_VARARGS, "drop_rows(table, rows, sequences, sizes)"},
    {"slab_rows", slab_rows, METH_VARARGS, "slab_rows(slab) -> rows"},
    {"list_rows", list_rows, METH_VARARGS, "list_rows(table, directory, after, limit, now) -> (rows, after)"},
    {"slot_places", slot_places, METH_VARARGS, "slot_places(slab, slot) -> (name, data)"},
    {"take_dirty", take_dirty, METH_VARARGS, "take_dirty(bytes_max, rows_max) -> Batch, or the queue position"},
    {"reserve", reserve, METH_VARARGS, "reserve(...) -> Landing"},
    {"lender", lender, METH_VARARGS, "lender(arenas_max) -> what _peers sends blocks from"},
    {"set_dirty_max", set_dirty_max, METH_VARARGS, "set_dirty_max(bytes)"},
    {"doubt_unsynced", doubt, METH_NOARGS, "doubt_unsynced()"},
    {"note_synced", note_synced, METH_VARARGS, "note_synced(sequence, written heads)"},
    {"follow_gone", follow_gone, METH_NOARGS, "follow_gone()"},
    {"take_gone", take_gone, METH_VARARGS, "take_gone(count) -> bytes"},
    {"statistics", statistics, METH_NOARGS, "statistics()"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject core_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._blocks.Core",
    .tp_basicsize = sizeof(CoreObject),
    .tp_dealloc = (destructor)core_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = core_methods,
    .tp_new = core_new,
};

/* -- the file door ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    CoreObject *of;
    Door *door;
    struct {
        uint64_t (*answer)(void *, int, const void *, size_t);
        int (*take_over)(void *, const void *, size_t);
        void *door;
        uint64_t shown; /* bits of the opcodes that it wants to see */
    } way; /* for _fusewire */
    Py_buffer decisions, kept, numbers, drafts;
    Numbered *own_numbers; /* in the place of kept ones */
} DoorObject;

#define DOOR (((DoorObject *)self)->door)

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *words)
{
    CoreObject *of;
    Py_buffer multipliers;
    double attr_timeout;
    long long tick_max_ns, lag_ns;
    if (!PyArg_ParseTuple(args, "O!y*dLL", &core_type, &of, &multipliers, &attr_timeout, &tick_max_ns, &lag_ns))
        return NULL;
    DoorObject *self = NULL;
    if (multipliers.len != 8 * SUMS * MULTIPLIER_ROWS)
        PyErr_SetString(PyExc_ValueError, "no multipliers");
    else if ((self = (DoorObject *)type->tp_alloc(type, 0)) && (!(self->door = calloc(1, sizeof *self->door)) ||
                                                               !(self->own_numbers = calloc(WRITTEN, sizeof(Numbered)))))
        PyErr_NoMemory();
    if (self && self->own_numbers) {
        self->door->written = self->own_numbers;
        self->of = (CoreObject *)Py_NewRef(of);
        self->door->core = of->core, self->door->attr_timeout = attr_timeout;
        self->door->tick_max_ns = tick_max_ns, self->door->lag_ns = lag_ns;
        self->door->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        self->door->kinds = ~0ull;
        memcpy(self->door->multipliers, multipliers.buf, sizeof self->door->multipliers);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        self->door->serial = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
        self->way.answer = answer_request, self->way.take_over = take_over, self->way.door = self->door;
        self->way.shown = shown_kinds();
    }
    PyBuffer_Release(&multipliers);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void door_free(DoorObject *self)
{
    if (self->door) {
        free(self->door->held);
        free(self->door->handles);
        if (self->own_numbers && self->door->bell >= 0)
            close(self->door->bell);
        free(self->door);
    }
    if (self->decisions.obj)
        PyBuffer_Release(&self->decisions);
    free(self->own_numbers);
    Py_buffer *kept[] = {&self->kept, &self->numbers, &self->drafts};
    for (int i = 0; i < 3; i++)
        if (kept[i]->obj)
            PyBuffer_Release(kept[i]);
    Py_XDECREF(self->of);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* False: names of another folder with the same place have changed, and Python has to hear of that first. */
static PyObject *door_offer(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    double seconds;
    int is_bare, is_writable, is_offered = 0;
    Py_buffer tables;
    if (!PyArg_ParseTuple(args, "Ky*ppd", &ino, &tables, &is_bare, &is_writable, &seconds))
        return NULL;
    Py_ssize_t count = tables.len / 2;
    int is_sound = ino && count <= FOLDER_TABLES && seconds >= 0 && seconds < 1e6;
    for (Py_ssize_t i = 0; is_sound && i < count; i++)
        is_sound = ((const uint16_t *)tables.buf)[i] < TABLES;
    if (is_sound) {
        lock(DOOR->core);
        Folder *folder = folder_place(DOOR, ino);
        is_offered = folder->ino == ino || !folder->changed;
        if (is_offered) {
            *folder = (Folder){.ino = ino, .until = coarse_now() + (uint64_t)(seconds * 1e9), .is_bare = (uint16_t)is_bare,
                               .is_writable = (uint16_t)(is_bare && is_writable), .count = (uint16_t)count,
                               .changed = folder->changed};
            memcpy(folder->tables, tables.buf, (size_t)count * 2);
        }
        unlock(DOOR->core);
    } else
        PyErr_SetString(PyExc_ValueError, "no such folder");
    PyBuffer_Release(&tables);
    return is_sound ? PyBool_FromLong(is_offered) : NULL;
}

static PyObject *door_take_back(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    if (!ino)
        take_back_all(DOOR);
    lock(DOOR->core);
    if (ino && folder_place(DOOR, ino)->ino == ino)
        folder_place(DOOR, ino)->until = 0;
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

static PyObject *held_with(PyObject *self, uint64_t key, int by)
{
    lock(DOOR->core);
    int is_done = hold_key(DOOR, key, by);
    unlock(DOOR->core);
    return is_done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *door_hold_name(PyObject *self, PyObject *args)
{
    unsigned long long folder;
    Py_buffer name;
    int by;
    if (!PyArg_ParseTuple(args, "Ky*i", &folder, &name, &by))
        return NULL;
    size_t length = name.len < NAME_MAX_BYTES ? (size_t)name.len : NAME_MAX_BYTES;
    Fingerprint one = fingerprint_of(DOOR->multipliers, folder, name.buf, length);
    PyBuffer_Release(&name);
    return held_with(self, mix(HELD_NAME, one.low, one.high), by);
}

static PyObject *door_hold_inode(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    int by;
    if (!PyArg_ParseTuple(args, "Ki", &ino, &by))
        return NULL;
    return held_with(self, mix(HELD_INODE, ino, 0), by);
}

static PyObject *door_take_handles(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    PyObject *found = PyArg_ParseTuple(args, "K", &ino) ? PyList_New(0) : NULL;
    for (uint32_t i = 0, is_more = 1; found && is_more;) {
        Handle one = {0};
        uint32_t arena = 0;
        uint64_t start = 0;
        lock(DOOR->core);
        for (is_more = 0; i < DOOR->handle_count && !is_more; i++) {
            Handle *handle = DOOR->handles + i;
            if ((is_more = handle->fh && handle->ino == ino && !handle->is_taken)) {
                one = *handle;
                arena = one.arena->number, start = (uint64_t)(one.content - one.arena->base);
                leave_handle(DOOR, handle);
                handle->is_taken = 1;
            }
        }
        unlock(DOOR->core);
        PyObject *row = !is_more ? NULL : Py_BuildValue("KIIIKKIIIL", (unsigned long long)one.fh, one.table, one.row, arena,
            (unsigned long long)start, (unsigned long long)one.size, one.attr.mode, one.attr.uid,
            one.attr.gid, (long long)(one.attr.mtime * SECOND_NS + one.attr.mtimensec));
        if (is_more && (!row || PyList_Append(found, row) < 0))
            Py_CLEAR(found);
        Py_XDECREF(row);
    }
    return found;
}

static PyObject *door_set_limits(PyObject *self, PyObject *args)
{
    unsigned count;
    double attr_timeout;
    if (!PyArg_ParseTuple(args, "dI", &attr_timeout, &count))
        return NULL;
    lock(DOOR->core);
    DOOR->arenas_max = count, DOOR->attr_timeout = attr_timeout;
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

static PyObject *door_set_kinds(PyObject *self, PyObject *args)
{
    unsigned long long kinds;
    if (!PyArg_ParseTuple(args, "K", &kinds))
        return NULL;
    __atomic_store_n(&DOOR->kinds, kinds, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static void append_new(PyObject *list, PyObject *one)
{
    if (one)
        PyList_Append(list, one);
    Py_XDECREF(one);
}

static PyObject *door_take_notes(PyObject *self, PyObject *none)
{
    PyObject *uses = PyList_New(0), *puts = PyList_New(0), *looks = PyList_New(0), *changed = PyList_New(0);
    Door *door = DOOR;
    uint64_t count;
    int are_lists = uses && puts && looks && changed;
    if (door->has_rung && read(door->bell, &count, sizeof count) < 0 && errno != EAGAIN)
        PyErr_SetFromErrno(PyExc_OSError);
    for (int is_more = 1; are_lists && is_more && !PyErr_Occurred();) {
        Use use, put;
        Look look;
        lock(door->core);
        door->has_rung = 0;
        int has_use = door->use_head < door->use_tail, has_look = door->look_head < door->look_tail;
        int has_put = door->put_head < door->put_tail;
        if (has_use)
            use = door->uses[door->use_head++ % USES];
        if (has_put)
            put = door->puts[door->put_head++ % PUTS];
        if (has_look)
            look = door->looks[door->look_head++ % LOOKS];
        unlock(door->core);
        is_more = has_use || has_look || has_put;
        if (has_use)
            append_new(uses, Py_BuildValue("II", use.table, use.row));
        if (has_put)
            append_new(puts, Py_BuildValue("IIK", put.table, put.row, (unsigned long long)put.written));
        if (has_look)
            append_new(looks, Py_BuildValue("KOy#", (unsigned long long)look.number, look.kind == MADE ? Py_True : Py_False,
                                            look.name, (Py_ssize_t)look.length));
    }
    lock(door->core);
    int has_changed = door->has_changed;
    door->has_changed = 0;
    unlock(door->core);
    for (Folder *folder = door->folders; are_lists && has_changed && folder < door->folders + FOLDERS; folder++) {
        if (!folder->changed)
            continue;
        lock(door->core);
        int64_t when = folder->changed;
        folder->changed = 0;
        unlock(door->core);
        append_new(changed, Py_BuildValue("KL", (unsigned long long)folder->ino, (long long)when));
    }
    if (are_lists && !PyErr_Occurred())
        return Py_BuildValue("NNNN", uses, looks, puts, changed);
    Py_XDECREF(uses);
    Py_XDECREF(looks);
    Py_XDECREF(puts);
    Py_XDECREF(changed);
    return NULL;
}

/* See `take_over` of blockdrafts.h. */
static PyObject *door_next_taken(PyObject *self, PyObject *none)
{
    PyObject *found = NULL;
    lock(DOOR->core);
    for (uint32_t i = 0; i < DOOR->draft_end && !found; i++) {
        Draft *draft = DOOR->drafts + i;
        if (!draft->fh || !draft->is_taken || draft->is_given)
            continue;
        const KeptDraft *kept = kept_of(DOOR, draft);
        const char *content = draft->arena ? (const char *)draft->arena->base + draft->offset : "";
        found = Py_BuildValue("KKKIKIIIIIy#y#LL", (unsigned long long)draft->fh, (unsigned long long)draft->ino,
                              (unsigned long long)draft->folder, draft->table,
                              (unsigned long long)(kept ? kept->unique : 0), draft->mode, draft->uid, draft->gid, draft->pid,
                              (unsigned)(draft->fh >> ACCESS_SHIFT) & O_ACCMODE, draft->name, (Py_ssize_t)draft->name_length,
                              content, (Py_ssize_t)draft->size, (long long)draft->made_ns, (long long)draft->changed_ns);
        if (!found)
            break;
        draft->is_given = 1;
    }
    unlock(DOOR->core);
    return found || PyErr_Occurred() ? found : Py_NewRef(Py_None);
}

/* Python has what `next_taken` gave, and the next daemon would find it there. */
static PyObject *door_drop_taken(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    if (!PyArg_ParseTuple(args, "K", &fh))
        return NULL;
    lock(DOOR->core);
    Draft *draft = DOOR->drafts + fh % DRAFTS;
    if (draft->fh == fh && draft->is_given)
        give_draft(DOOR, draft);
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

/* Once. */
static PyObject *door_keep_rows(PyObject *self, PyObject *args)
{
    Py_buffer numbers, drafts;
    if (!PyArg_ParseTuple(args, "w*w*", &numbers, &drafts))
        return NULL;
    DoorObject *mine = (DoorObject *)self;
    int is_sound = !mine->numbers.obj && numbers.len == KEPT_NUMBERS_SIZE && drafts.len == KEPT_DRAFTS_SIZE;
    if (!is_sound) {
        PyBuffer_Release(&numbers);
        PyBuffer_Release(&drafts);
        PyErr_SetString(PyExc_ValueError, "memory of another size, or it has some");
        return NULL;
    }
    mine->numbers = numbers, mine->drafts = drafts;
    lock(DOOR->core);
    DOOR->written = numbers.buf, DOOR->kept_drafts = drafts.buf;
    restore_written(DOOR);
    restore_drafts(DOOR);
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

/* As `take_over`, for all of them. */
static PyObject *door_take_all(PyObject *self, PyObject *none)
{
    lock(DOOR->core);
    for (uint32_t i = 0; i < DOOR->draft_end; i++) {
        Draft *draft = DOOR->drafts + i;
        if (draft->fh && wait_for_draft(DOOR, draft, draft->fh) && !draft->is_settled)
            draft->is_taken = 1;
    }
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

static PyObject *door_has_drafts(PyObject *self, PyObject *args)
{
    unsigned long long folder;
    int has = 0;
    if (!PyArg_ParseTuple(args, "K", &folder))
        return NULL;
    lock(DOOR->core);
    for (uint32_t i = 0; i < DOOR->draft_end; i++)
        has |= DOOR->drafts[i].fh && !DOOR->drafts[i].is_settled && DOOR->drafts[i].folder == folder;
    unlock(DOOR->core);
    return PyBool_FromLong(has);
}

static PyObject *door_begin_drafts(PyObject *self, PyObject *args)
{
    unsigned long long block_max;
    Py_buffer decisions, kept;
    if (!PyArg_ParseTuple(args, "Kw*w*", &block_max, &decisions, &kept))
        return NULL;
    DoorObject *mine = (DoorObject *)self;
    lock(DOOR->core);
    Py_buffer before[2] = {mine->decisions, mine->kept};
    mine->decisions = decisions, mine->kept = kept;
    DOOR->block_max = block_max;
    DOOR->decisions = decisions.buf, DOOR->decision_count = (uint32_t)(decisions.len / 24), DOOR->decision_next = 0;
    for (uint32_t i = 0; i < DOOR->decision_count; i++) /* the oldest one is the first to go */
        if (DOOR->decisions[3 * i + 2] > DOOR->decisions[3 * (DOOR->decision_next ? DOOR->decision_next - 1 : 0) + 2])
            DOOR->decision_next = i + 1;
    DOOR->kept = kept.buf, DOOR->kept_count = (uint32_t)((size_t)kept.len / sizeof *DOOR->kept);
    int is_there = restore_handles(DOOR);
    unlock(DOOR->core);
    for (int i = 0; i < 2; i++)
        if (before[i].obj)
            PyBuffer_Release(before + i);
    return is_there ? PyLong_FromLong(DOOR->bell) : PyErr_NoMemory();
}

static PyObject *door_give_numbers(PyObject *self, PyObject *args)
{
    unsigned long long first, count;
    if (!PyArg_ParseTuple(args, "KK", &first, &count))
        return NULL;
    lock(DOOR->core);
    if (count)
        DOOR->next_number = first, DOOR->last_number = first + count;
    uint64_t left = DOOR->last_number - DOOR->next_number;
    unlock(DOOR->core);
    return PyLong_FromUnsignedLongLong(left);
}

static PyObject *door_note_written(PyObject *self, PyObject *args)
{
    unsigned long long ino, sequence;
    unsigned table, row;
    if (!PyArg_ParseTuple(args, "KIIK", &ino, &table, &row, &sequence))
        return NULL;
    lock(DOOR->core);
    note_written(DOOR, ino, table, row, sequence);
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

static PyObject *door_forget_written(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    lock(DOOR->core);
    forget_written(DOOR, ino);
    unlock(DOOR->core);
    Py_RETURN_NONE;
}

static PyObject *door_find_written(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    lock(DOOR->core);
    const Numbered *found = find_written(DOOR, ino);
    Numbered one = found ? *found : (Numbered){0};
    unlock(DOOR->core);
    if (!found)
        Py_RETURN_NONE;
    return Py_BuildValue("IIK", one.table, one.row, (unsigned long long)one.sequence);
}

static PyObject *door_number_of(PyObject *self, PyObject *args)
{
    unsigned table, row;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "IIK", &table, &row, &sequence))
        return NULL;
    lock(DOOR->core);
    uint64_t number = number_of_block(DOOR, table, row, sequence);
    unlock(DOOR->core);
    return PyLong_FromUnsignedLongLong(number);
}

static PyObject *door_name_of(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    lock(DOOR->core);
    Look look = named_place(DOOR, ino)->look;
    unlock(DOOR->core);
    if (look.number != ino)
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)look.name, look.length);
}

static PyObject *door_statistics(PyObject *self, PyObject *none)
{
    uint32_t drafts = 0; /* of which Python has no handle */
    lock(DOOR->core);
    for (uint32_t i = 0; i < DOOR->draft_end; i++)
        drafts += DOOR->drafts[i].fh && !DOOR->drafts[i].is_shared;
    unlock(DOOR->core);
    PyObject *found = Py_BuildValue("{s:K,s:K,s:K,s:I,s:I}", "absent", (unsigned long long)DOOR->absent, "read_bytes",
                                    (unsigned long long)DOOR->read_bytes, "written_bytes", (unsigned long long)DOOR->written_bytes,
                                    "open_handles", DOOR->open_count,
                                    "drafts", drafts);
    for (int i = 0; found && i < ANSWERS; i++) {
        uint64_t count = 0; /* of all opcodes of this kind */
        for (int j = 0; answers[i].answer && j < ANSWERS; j++)
            count += strcmp(answers[i].kind, answers[j].kind) ? 0 : __atomic_load_n(&DOOR->answered[answers[j].opcode], __ATOMIC_RELAXED);
        PyObject *value = PyLong_FromUnsignedLongLong(count);
        if (!value || (answers[i].answer && PyDict_SetItemString(found, answers[i].kind, value) < 0))
            Py_CLEAR(found);
        Py_XDECREF(value);
    }
    return found;
}

/* As `answers` of blockdoor.h has them. */
static PyObject *list_answers(void)
{
    PyObject *found = PyTuple_New(ANSWERS);
    for (int i = 0; found && i < ANSWERS; i++) {
        PyObject *row = Py_BuildValue("sIOs", answers[i].kind, answers[i].opcode, answers[i].answer ? Py_True : Py_False,
                                      answers[i].why);
        if (!row)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, row);
    }
    return found;
}

static PyObject *door_answer(PyObject *self, PyObject *args)
{
    int fd;
    Py_buffer request;
    if (!PyArg_ParseTuple(args, "iy*", &fd, &request))
        return NULL;
    uint64_t is_answered;
    Py_BEGIN_ALLOW_THREADS
    is_answered = answer_request(DOOR, fd, request.buf, (size_t)request.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&request);
    return PyBool_FromLong(is_answered != 0);
}

static PyObject *door_take_over(PyObject *self, PyObject *args)
{
    Py_buffer request;
    if (!PyArg_ParseTuple(args, "y*", &request))
        return NULL;
    int is_any = (size_t)request.len >= sizeof(struct fuse_in_header) && take_over(DOOR, request.buf, (size_t)request.len);
    PyBuffer_Release(&request);
    return PyBool_FromLong(is_any);
}

static PyObject *door_way(PyObject *self, PyObject *none)
{
    return PyCapsule_New(&((DoorObject *)self)->way, "kvfuse.door", NULL);
}

static PyMethodDef door_methods[] = {
    {"offer", door_offer, METH_VARARGS, "offer(folder, tables, is_bare, is_writable, seconds) -> whether it was"},
    {"take_back", door_take_back, METH_VARARGS, "take_back(folder, or 0 for all)"},
    {"hold_name", door_hold_name, METH_VARARGS, "hold_name(folder, name, by)"},
    {"hold_inode", door_hold_inode, METH_VARARGS, "hold_inode(ino, by)"},
    {"take_handles", door_take_handles, METH_VARARGS, "take_handles(ino) -> what is open of it, which is Python's now"},
    {"set_limits", door_set_limits, METH_VARARGS, "set_limits(attr_timeout, arenas_max)"},
    {"set_kinds", door_set_kinds, METH_VARARGS, "set_kinds(a bit for each opcode that may be answered)"},
    {"name_of", door_name_of, METH_VARARGS, "name_of(ino) -> the name by which it was looked up, or None"},
    {"take_notes", door_take_notes, METH_NOARGS, "take_notes() -> (uses, looks, puts, changed)"},
    {"begin_drafts", door_begin_drafts, METH_VARARGS, "begin_drafts(block_max, decisions, kept) -> readable once there are notes"},
    {"next_taken", door_next_taken, METH_NOARGS, "next_taken() -> a draft to take over, or None"},
    {"drop_taken", door_drop_taken, METH_VARARGS, "drop_taken(fh): it was taken over"},
    {"keep_rows", door_keep_rows, METH_VARARGS, "keep_rows(numbers, drafts): memory that the next daemon finds"},
    {"take_all", door_take_all, METH_NOARGS, "take_all(): all drafts are to be taken over"},
    {"has_drafts", door_has_drafts, METH_VARARGS, "has_drafts(folder)"},
    {"give_numbers", door_give_numbers, METH_VARARGS, "give_numbers(first, count; 0: none) -> how many are left"},
    {"note_written", door_note_written, METH_VARARGS, "note_written(ino, table, row, sequence)"},
    {"forget_written", door_forget_written, METH_VARARGS, "forget_written(ino)"},
    {"find_written", door_find_written, METH_VARARGS, "find_written(ino) -> (table, row, sequence), or None"},
    {"number_of", door_number_of, METH_VARARGS, "number_of(table, row, sequence) -> its inode"},
    {"take_over", door_take_over, METH_VARARGS, "take_over(request) -> whether something is to be taken over before it"},
    {"statistics", door_statistics, METH_NOARGS, "statistics()"},
    {"answer", door_answer, METH_VARARGS, "answer(descriptor, request) -> whether it was answered there"},
    {"way", door_way, METH_NOARGS, "way() -> what _fusewire answers by, as long as the door lives"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject door_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._blocks.Door",
    .tp_basicsize = sizeof(DoorObject),
    .tp_dealloc = (destructor)door_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = door_methods,
    .tp_new = door_new,
};

/* -- tables, for any process that maps one ------------------------------------------------------------------------ */

static PyObject *begin_table(PyObject *self, PyObject *args)
{
    Py_buffer memory, multipliers;
    unsigned buckets_max, rows_max, uid, gid, mode;
    unsigned long long directory, name_space, serial;
    if (!PyArg_ParseTuple(args, "w*y*IIKKIIIK", &memory, &multipliers, &buckets_max, &rows_max, &directory, &name_space,
                          &uid, &gid, &mode, &serial))
        return NULL;
    uint64_t rows = PAGE + (uint64_t)buckets_max * sizeof(Bucket), size = rows + (uint64_t)rows_max * sizeof(Row);
    int is_sound = (uint64_t)memory.len == size && multipliers.len == 8 * SUMS * MULTIPLIER_ROWS && buckets_max >= BUCKETS_MIN;
    if (is_sound) {
        TableHeader *header = memory.buf;
        *header = (TableHeader){.magic = TABLE_MAGIC, .version = TABLE_VERSION, .buckets_max = buckets_max,
                                .rows_offset = rows, .size = size, .directory = directory, .name_space = name_space,
                                .uid = uid, .gid = gid, .mode = mode, .rows_max = rows_max, .serial = serial, .origin = serial,
                                .state = TABLE_LIVE, .bucket_count = BUCKETS_MIN};
        memcpy((uint8_t *)memory.buf + MULTIPLIERS, multipliers.buf, (size_t)multipliers.len);
    } else
        PyErr_SetString(PyExc_ValueError, "the memory has another size than the table");
    PyBuffer_Release(&memory);
    PyBuffer_Release(&multipliers);
    if (!is_sound)
        return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    uint64_t number, address, size;
} MappedArena;

/* The length of a block that was copied, ABSENT, NOT_RESIDENT, NO_ROOM, NOT_MAPPED; or CHANGED: look for it again. */
static int64_t copy_row(const Index *index, int64_t number, Fingerprint wanted, uint32_t now, const MappedArena *arenas,
                        Py_ssize_t count, uint8_t *target, int64_t room)
{
    const Row *row = index->rows + number;
    uint64_t version = load(&row->version);
    Row copy = *row;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!(version & 1) || __atomic_load_n(&row->version, __ATOMIC_RELAXED) != version || !is_same(copy.fingerprint, wanted))
        return CHANGED;
    if (copy.expires && now >= copy.expires)
        return ABSENT;
    if (!copy.arena)
        return NOT_RESIDENT;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (arenas[i].number != copy.arena)
            continue;
        uint64_t offset = (uint64_t)copy.page * PAGE;
        if (offset > arenas[i].size || copy.length > arenas[i].size - offset)
            return ABSENT;
        if (room < 0 || copy.length > (uint64_t)room)
            return NO_ROOM;
        memcpy(target, (const uint8_t *)(uintptr_t)arenas[i].address + offset, copy.length);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&row->version, __ATOMIC_RELAXED) == version ? (int64_t)copy.length : CHANGED;
    }
    return NOT_MAPPED;
}

static PyObject *table_get(PyObject *self, PyObject *args)
{
    Py_buffer columns[7], memory, arenas; /* targets and rooms count only if there is something to copy */
    unsigned long long directory;
    unsigned now;
    int copies;
    if (!PyArg_ParseTuple(args, "y*Ky*y*y*Iy*y*y*w*w*p", &memory, &directory, columns, columns + 1, columns + 2, &now,
                          &arenas, columns + 5, columns + 6, columns + 3, columns + 4, &copies))
        return NULL;
    Index index;
    Names names;
    int64_t count = open_columns(columns, copies ? "-848888" : "-8488", &names);
    if (count >= 0 && !open_index(memory.buf, (uint64_t)memory.len, &index)) {
        PyErr_SetString(PyExc_ValueError, "no table of blocks");
        count = -1;
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t *rows = columns[3].buf, *results = columns[4].buf;
    const uint64_t *targets = columns[5].buf;
    const int64_t *rooms = columns[6].buf;
    Group group;
    for (int64_t first = 0; first < count; first += GROUP) {
        begin_group(&group, &index, directory, &names, first, count, 0);
        fetch_group(&group, &index);
        for (int i = 0; i < group.count; i++) {
            int64_t at = first + i;
            for (int turn = 0; turn < 4; turn++) {
                rows[at] = results[at] = find_of_group(&group, &index, i, now);
                if (copies && rows[at] >= 0)
                    results[at] = copy_row(&index, rows[at], group.wanted[i], now, arenas.buf,
                                           arenas.len / (Py_ssize_t)sizeof(MappedArena),
                                           (uint8_t *)(uintptr_t)targets[at], rooms[at]);
                if (results[at] != CHANGED)
                    break;
                results[at] = ABSENT;
            }
        }
    }
    Py_END_ALLOW_THREADS
    release_all(columns, 7);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&arenas);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* An entry of a ring, as its client submits it: `SQE` of usrbio/protocol/wire.py. */
typedef struct {
    uint64_t kind; /* operation, priority, flags, handle */
    uint32_t iov, key_length;
    uint64_t offset, iov_offset, length, key_offset, user_data;
    uint32_t timeout_us, parent;
} RingEntry;

_Static_assert(sizeof(RingEntry) == 64, "an entry has 64 bytes");

/* Entries of one kind, each with one key: what they name, as columns. How many bytes they are; -1: not all are plain. */
static PyObject *entry_columns(PyObject *self, PyObject *args)
{
    Py_buffer entries, columns;
    unsigned long long aux_size, address, iov_size, length_max, waited_us;
    if (!PyArg_ParseTuple(args, "y*KKKKKw*", &entries, &aux_size, &address, &iov_size, &length_max, &waited_us, &columns))
        return NULL;
    Py_ssize_t count = entries.len / (Py_ssize_t)sizeof(RingEntry);
    long long total = has_column(&columns, count, 8 * ENTRY_COLUMNS) ? 0 : -1;
    uint64_t *column = columns.buf;
    uint8_t *lengths = (uint8_t *)(column + 3 * count);
    for (Py_ssize_t i = 0; i < count && total >= 0; i++) {
        RingEntry one;
        memcpy(&one, (const uint8_t *)entries.buf + i * (Py_ssize_t)sizeof one, sizeof one);
        if (!one.length || one.length > length_max || one.length > iov_size || one.iov_offset > iov_size - one.length ||
            !one.key_length || one.key_length > NAME_MAX_BYTES || one.key_length > aux_size ||
            one.key_offset > aux_size - one.key_length || one.parent ||
            (one.timeout_us && one.timeout_us < waited_us)) {
            total = -1;
            break;
        }
        column[i] = one.key_offset, column[count + i] = address + one.iov_offset;
        column[2 * count + i] = one.length;
        memcpy(lengths + 4 * i, &one.key_length, 4);
        total += (long long)one.length;
    }
    PyBuffer_Release(&entries);
    PyBuffer_Release(&columns);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(total);
}

/* Where the bytes of buffers are. How many of the first ones are plain: what else is a buffer is the caller's to know. */
static PyObject *buffer_spans(PyObject *self, PyObject *args)
{
    PyObject *buffers;
    Py_buffer addresses, sizes;
    int writes;
    if (!PyArg_ParseTuple(args, "O!pw*w*", &PyList_Type, &buffers, &writes, &addresses, &sizes))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(buffers), i = 0;
    int is_sound = has_column(&addresses, count, 8) && has_column(&sizes, count, 8);
    for (; is_sound && i < count && i < PyList_GET_SIZE(buffers); i++) {
        Py_buffer one;
        PyObject *buffer = Py_NewRef(PyList_GET_ITEM(buffers, i));
        int is_found = PyObject_GetBuffer(buffer, &one, writes ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
        if (is_found) {
            ((uint64_t *)addresses.buf)[i] = (uint64_t)(uintptr_t)one.buf;
            ((int64_t *)sizes.buf)[i] = one.len;
            PyBuffer_Release(&one);
        }
        Py_DECREF(buffer);
        if (!is_found) {
            PyErr_Clear();
            break;
        }
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    return is_sound ? PyLong_FromSsize_t(i) : NULL;
}

/* The bytes of a key, text as UTF-8; NULL: it is neither bytes nor text, or no name as it is. */
static const char *plain_name_of(PyObject *key, Py_ssize_t *length)
{
    const char *text = NULL;
    if (PyBytes_Check(key))
        text = PyBytes_AS_STRING(key), *length = PyBytes_GET_SIZE(key);
    else if (PyUnicode_Check(key))
        text = PyUnicode_AsUTF8AndSize(key, length);
    if (text && *length <= NAME_MAX_BYTES && is_plain_name((const uint8_t *)text, (size_t)*length))
        return text;
    PyErr_Clear();
    return NULL;
}

/* Names of keys as three columns; None: they are not all names as they are. */
static PyObject *plain_names(PyObject *self, PyObject *keys)
{
    if (!PyList_Check(keys))
        return PyErr_Format(PyExc_TypeError, "keys are a list");
    Py_ssize_t count = PyList_GET_SIZE(keys), total = 0, length, i;
    for (i = 0; i < count && plain_name_of(PyList_GET_ITEM(keys, i), &length); i++)
        total += length;
    if (i < count)
        Py_RETURN_NONE;
    PyObject *text = PyBytes_FromStringAndSize(NULL, total), *offsets = PyBytes_FromStringAndSize(NULL, 8 * count),
             *lengths = PyBytes_FromStringAndSize(NULL, 4 * count);
    if (!text || !offsets || !lengths) {
        Py_XDECREF(text), Py_XDECREF(offsets), Py_XDECREF(lengths);
        return NULL;
    }
    char *place = PyBytes_AS_STRING(text);
    for (uint64_t at = 0; i > 0; i--) { /* nothing runs between that could change the list */
        Py_ssize_t number = count - i;
        const char *name = plain_name_of(PyList_GET_ITEM(keys, number), &length);
        uint32_t size = (uint32_t)length;
        memcpy(place + at, name, size);
        memcpy(PyBytes_AS_STRING(offsets) + 8 * number, &at, 8);
        memcpy(PyBytes_AS_STRING(lengths) + 4 * number, &size, 4);
        at += size;
    }
    return Py_BuildValue("NNN", text, offsets, lengths);
}

/* Both halves of each name's fingerprint. 0 for an odd name. */
static PyObject *fingerprints(PyObject *self, PyObject *args)
{
    Py_buffer columns[4], multipliers;
    unsigned long long directory;
    if (!PyArg_ParseTuple(args, "y*Ky*y*y*w*", &multipliers, &directory, columns, columns + 1, columns + 2, columns + 3))
        return NULL;
    Names names;
    int64_t count = open_columns(columns, "-848", &names);
    if (count >= 0 && (multipliers.len != 8 * SUMS * MULTIPLIER_ROWS || columns[3].len < 16 * count)) {
        PyErr_SetString(PyExc_ValueError, "no multipliers, or no room");
        count = -1;
    }
    Fingerprint *found = columns[3].buf;
    uint8_t name[NAME_MAX_BYTES], length;
    for (int64_t i = 0; i < count; i++)
        found[i] = copy_name(&names, i, 0, name, &length) ? fingerprint_of(multipliers.buf, directory, name, length)
                                                          : (Fingerprint){0, 0};
    release_all(columns, 4);
    PyBuffer_Release(&multipliers);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* The first half of each name's fingerprint. 0 for an odd name. */
static PyObject *name_keys(PyObject *self, PyObject *args)
{
    Py_buffer columns[4], memory;
    unsigned long long directory;
    if (!PyArg_ParseTuple(args, "y*Ky*y*y*w*", &memory, &directory, columns, columns + 1, columns + 2, columns + 3))
        return NULL;
    Index index;
    Names names;
    int64_t count = open_columns(columns, "-848", &names);
    if (count >= 0 && !open_index(memory.buf, (uint64_t)memory.len, &index)) {
        PyErr_SetString(PyExc_ValueError, "no table of blocks");
        count = -1;
    }
    uint64_t *keys = columns[3].buf;
    uint8_t name[NAME_MAX_BYTES], length;
    for (int64_t i = 0; i < count; i++)
        keys[i] = copy_name(&names, i, 0, name, &length) ? fingerprint_of(index.multipliers, directory, name, length).low : 0;
    release_all(columns, 4);
    PyBuffer_Release(&memory);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"plain_names", plain_names, METH_O, "plain_names(keys) -> (text, offsets, lengths) or None"},
    {"buffer_spans", buffer_spans, METH_VARARGS, "buffer_spans(buffers, writes, addresses, sizes) -> how many"},
    {"entry_columns", entry_columns, METH_VARARGS, "entry_columns(entries, aux_size, address, ..., columns) -> bytes"},
    {"fingerprints", fingerprints, METH_VARARGS, "fingerprints(multipliers, directory, names, halves)"},
    {"name_keys", name_keys, METH_VARARGS, "name_keys(table, directory, names, keys)"},
    {"begin_table", begin_table, METH_VARARGS, "begin_table(memory, multipliers, buckets_max, rows_max, ...)"},
    {"table_get", table_get, METH_VARARGS, "table_get(table, directory, names, now, arenas, targets, rooms, rows, results, copies)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvfuse.native._blocks", "See blockforms.py.", -1, functions,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocks(void)
{
    crc32c_begin();
    if (PyType_Ready(&core_type) < 0 || PyType_Ready(&batch_type) < 0 || PyType_Ready(&landing_type) < 0 ||
        PyType_Ready(&door_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddObjectRef(made, "Core", (PyObject *)&core_type) < 0 ||
                 PyModule_AddObjectRef(made, "Batch", (PyObject *)&batch_type) < 0 ||
                 PyModule_AddObjectRef(made, "Door", (PyObject *)&door_type) < 0 ||
                 PyModule_AddIntConstant(made, "ROW", sizeof(Row)) < 0 ||
                 PyModule_AddIntConstant(made, "KEPT_NUMBERS_SIZE", KEPT_NUMBERS_SIZE) < 0 ||
                 PyModule_AddIntConstant(made, "KEPT_DRAFTS_SIZE", KEPT_DRAFTS_SIZE) < 0))
        Py_CLEAR(made);
    PyObject *rows = made ? list_answers() : NULL;
    if (made && (!rows || PyModule_AddObjectRef(made, "ANSWERS", rows) < 0))
        Py_CLEAR(made);
    Py_XDECREF(rows);
    return made;
}
