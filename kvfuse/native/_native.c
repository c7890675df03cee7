/* What is worth doing without the interpreter: finding blocks in an index and copying them (blockindex.py, which has
   the same in Python, and says what the layout is and why a copy that was kept is right), writing many pieces of
   memory to files (rowwriter.py), copying many pieces of memory with their checksums (rowcopier.py), and receiving into many
   with their checksums (rowreceiver.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.h"

enum { HEADER = 4096, MULTIPLIERS = 128, SUMS = 4, BUCKET = 8, SLOT = 64, KEY_MAX = 255 };
enum { PIECES = 256, MAPPED_ROWS = 4, MAPPED_MAX = 256 << 10 };
enum { ABSENT = -1, UNMAPPED = -2, TOO_LARGE = -3 };

typedef struct {
    uint64_t low, high;
} Fingerprint;

typedef struct {
    uint64_t version;
    uint32_t arena, tier;
    uint64_t offset, length;
    uint32_t checksum, has_checksum;
    uint64_t generation, reserved[2];
} Slot;

typedef struct {
    uint64_t number, address, size;
} Arena;

_Static_assert(sizeof(Slot) == SLOT, "a slot has 64 bytes");

static Fingerprint fingerprint_of(const uint64_t *multipliers, const uint8_t *key, size_t length)
{
    uint64_t sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = multipliers[s] * length;
    const uint64_t *row = multipliers + SUMS;
    uint32_t word;
    for (; length >= 4; length -= 4, key += 4, row += SUMS) {
        memcpy(&word, key, 4);
        for (int s = 0; s < SUMS; s++)
            sums[s] += row[s] * word;
    }
    if (length) {
        word = 0;
        memcpy(&word, key, length);
        for (int s = 0; s < SUMS; s++)
            sums[s] += row[s] * word;
    }
    Fingerprint found = {sums[0] >> 32 | (sums[1] >> 32) << 32, sums[2] >> 32 | (sums[3] >> 32) << 32};
    if (!found.low)
        found.low = 1;
    return found;
}

/* A sequence of keys; its items as bytes objects. NULL with an error set. */
static PyObject *keys_of(PyObject *given)
{
    PyObject *keys = PySequence_Fast(given, "keys must be a sequence of bytes");
    if (!keys)
        return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(keys); i++) {
        PyObject *key = PySequence_Fast_GET_ITEM(keys, i);
        if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) < 1 || PyBytes_GET_SIZE(key) > KEY_MAX) {
            PyErr_SetString(PyExc_ValueError, "a key has 1 to 255 bytes");
            Py_DECREF(keys);
            return NULL;
        }
    }
    return keys;
}

static Fingerprint fingerprint_at(const uint64_t *multipliers, PyObject *keys, Py_ssize_t i)
{
    PyObject *key = PySequence_Fast_GET_ITEM(keys, i);
    return fingerprint_of(multipliers, (const uint8_t *)PyBytes_AS_STRING(key), (size_t)PyBytes_GET_SIZE(key));
}

static int has_size(const Py_buffer *buffer, Py_ssize_t size)
{
    if (buffer->len >= size)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a buffer is too small");
    return 0;
}

static PyObject *fingerprints(PyObject *self, PyObject *args)
{
    Py_buffer multipliers, out;
    PyObject *given, *keys;
    if (!PyArg_ParseTuple(args, "y*Ow*", &multipliers, &given, &out))
        return NULL;
    keys = keys_of(given);
    if (keys) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
        if (has_size(&out, count * (Py_ssize_t)sizeof(Fingerprint)) && has_size(&multipliers, 65 * SUMS * 8))
            for (Py_ssize_t i = 0; i < count; i++)
                ((Fingerprint *)out.buf)[i] = fingerprint_at(multipliers.buf, keys, i);
        Py_DECREF(keys);
    }
    PyBuffer_Release(&multipliers);
    PyBuffer_Release(&out);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    const uint64_t *multipliers;
    const Fingerprint *fingerprints;
    const Slot *slots;
    uint64_t buckets;
} Table;

/* The table in a mapping, whose header the caller has checked. */
static int open_table(const Py_buffer *memory, Table *table)
{
    const uint8_t *bytes = memory->buf;
    if (!has_size(memory, HEADER))
        return 0;
    uint32_t buckets;
    memcpy(&buckets, bytes + 12, 4);
    table->buckets = buckets;
    if (!buckets || (buckets & (buckets - 1)) ||
        !has_size(memory, HEADER + (Py_ssize_t)buckets * BUCKET * (SLOT + (Py_ssize_t)sizeof(Fingerprint)))) {
        PyErr_SetString(PyExc_ValueError, "no index of blocks");
        return 0;
    }
    table->multipliers = (const uint64_t *)(bytes + MULTIPLIERS);
    table->fingerprints = (const Fingerprint *)(bytes + HEADER);
    table->slots = (const Slot *)(table->fingerprints + (uint64_t)buckets * BUCKET);
    return 1;
}

static int is_at(const Table *table, int64_t slot, Fingerprint wanted)
{
    const Fingerprint *found = table->fingerprints + slot;
    return __atomic_load_n(&found->low, __ATOMIC_RELAXED) == wanted.low &&
           __atomic_load_n(&found->high, __ATOMIC_RELAXED) == wanted.high;
}

static int64_t find_one(const Table *table, Fingerprint wanted)
{
    uint64_t halves[2] = {wanted.low, wanted.high};
    for (int half = 0; half < 2; half++) {
        int64_t first = (int64_t)(halves[half] & (table->buckets - 1)) * BUCKET;
        for (int64_t slot = first; slot < first + BUCKET; slot++)
            if (is_at(table, slot, wanted))
                return __atomic_load_n(&table->slots[slot].version, __ATOMIC_ACQUIRE) & 1 ? slot : ABSENT;
    }
    return ABSENT;
}

static int64_t copy_one(const Table *table, int64_t number, Fingerprint wanted, const Arena *arenas, Py_ssize_t count,
                        uint8_t *target, int64_t room)
{
    const Slot *slot = table->slots + number;
    uint64_t version = __atomic_load_n(&slot->version, __ATOMIC_ACQUIRE);
    if (!(version & 1) || !is_at(table, number, wanted))
        return ABSENT;
    uint32_t arena = __atomic_load_n(&slot->arena, __ATOMIC_RELAXED);
    uint64_t offset = __atomic_load_n(&slot->offset, __ATOMIC_RELAXED);
    uint64_t length = __atomic_load_n(&slot->length, __ATOMIC_RELAXED);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (arenas[i].number != arena)
            continue;
        if (length > arenas[i].size || offset > arenas[i].size - length)
            return ABSENT; /* half of it is another block's by now */
        if (room < 0 || length > (uint64_t)room)
            return TOO_LARGE;
        memcpy(target, (const uint8_t *)(uintptr_t)arenas[i].address + offset, length);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&slot->version, __ATOMIC_RELAXED) == version ? (int64_t)length : ABSENT;
    }
    return UNMAPPED;
}

/* As find_one, of many; numbers of slots. */
static void find_all(const Table *table, const Fingerprint *wanted, Py_ssize_t count, int64_t *numbers)
{
    enum { AHEAD = 8 }; /* their buckets are on the way to the cache meanwhile */
    for (Py_ssize_t i = 0; i < count + AHEAD; i++) {
        if (i < count) {
            const char *row = (const char *)(table->fingerprints + (wanted[i].low & (table->buckets - 1)) * BUCKET);
            __builtin_prefetch(row);
            __builtin_prefetch(row + 64);
        }
        if (i >= AHEAD)
            numbers[i - AHEAD] = find_one(table, wanted[i - AHEAD]);
    }
}

static Fingerprint *fingerprints_of(const uint64_t *multipliers, PyObject *keys)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    Fingerprint *found = PyMem_Malloc((size_t)count * sizeof *found + 1);
    if (!found)
        PyErr_NoMemory();
    else
        for (Py_ssize_t i = 0; i < count; i++)
            found[i] = fingerprint_at(multipliers, keys, i);
    return found;
}

static PyObject *find(PyObject *self, PyObject *args)
{
    Py_buffer memory, numbers;
    PyObject *given, *keys;
    if (!PyArg_ParseTuple(args, "y*Ow*", &memory, &given, &numbers))
        return NULL;
    Table table;
    keys = keys_of(given);
    if (keys) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
        Fingerprint *wanted = NULL;
        if (has_size(&numbers, count * 8) && open_table(&memory, &table))
            wanted = fingerprints_of(table.multipliers, keys);
        if (wanted)
            find_all(&table, wanted, count, numbers.buf);
        PyMem_Free(wanted);
        Py_DECREF(keys);
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&numbers);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *get(PyObject *self, PyObject *args)
{
    Py_buffer memory, arenas, targets, rooms, numbers, results;
    PyObject *given, *keys;
    if (!PyArg_ParseTuple(args, "y*Oy*y*y*w*w*", &memory, &given, &arenas, &targets, &rooms, &numbers, &results))
        return NULL;
    Table table;
    keys = keys_of(given);
    if (keys) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(keys), size = count * 8;
        Fingerprint *wanted = NULL;
        if (has_size(&targets, size) && has_size(&rooms, size) && has_size(&numbers, size) &&
            has_size(&results, size) && open_table(&memory, &table))
            wanted = fingerprints_of(table.multipliers, keys);
        Py_DECREF(keys);
        if (wanted) {
            const int64_t *room = rooms.buf;
            const uint64_t *target = targets.buf;
            int64_t *number = numbers.buf, *result = results.buf;
            Py_ssize_t known = arenas.len / (Py_ssize_t)sizeof(Arena);
            Py_BEGIN_ALLOW_THREADS
            find_all(&table, wanted, count, number);
            for (Py_ssize_t i = 0; i < count; i++)
                result[i] = number[i] < 0 ? ABSENT
                                          : copy_one(&table, number[i], wanted[i], arenas.buf, known,
                                                     (uint8_t *)(uintptr_t)target[i], room[i]);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(wanted);
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&arenas);
    PyBuffer_Release(&targets);
    PyBuffer_Release(&rooms);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&results);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    int64_t descriptor, offset;
    uint64_t address;
    int64_t length, source, source_offset;
    uint64_t target;
} Row;

/* Write a row through a map of the file, if its pages are resident there. The kernel copies, which so has an error where
   touching the map would be a signal. 0: it was not, or not wholly, done. */
static int write_mapped(const Row *row)
{
    static const uint64_t page = 4096;
    unsigned char there[MAPPED_MAX / 4096 + 2];
    uint64_t start = row->target & ~(page - 1), count = (row->target + (uint64_t)row->length - start + page - 1) / page;
    if (mincore((void *)(uintptr_t)start, count * page, there))
        return 0;
    for (uint64_t i = 0; i < count; i++)
        if (!(there[i] & 1))
            return 0;
    return pread((int)row->source, (void *)(uintptr_t)row->target, (size_t)row->length, row->source_offset) == row->length;
}

/* Write rows, runs of neighbours in one system call each. How many were written before one failed: then *error. */
static Py_ssize_t write_all(const Row *rows, Py_ssize_t count, int *error)
{
    struct iovec pieces[PIECES];
    Py_ssize_t done = 0;
    *error = 0;
    while (done < count) {
        const Row *first = rows + done;
        int64_t end = first->offset;
        int used = 0;
        for (; used < PIECES && done + used < count; used++) {
            const Row *row = first + used;
            if (row->descriptor != first->descriptor || row->offset != end)
                break;
            pieces[used].iov_base = (void *)(uintptr_t)row->address;
            pieces[used].iov_len = (size_t)row->length;
            end += row->length;
        }
        if (used <= MAPPED_ROWS && first->target && first->length <= MAPPED_MAX && write_mapped(first)) {
            done++;
            continue;
        }
        struct iovec *left = pieces;
        int64_t offset = first->offset;
        while (offset < end) {
            ssize_t written = pwritev((int)first->descriptor, left, used - (int)(left - pieces), offset);
            if (written < 0 && errno == EINTR)
                continue;
            if (written <= 0) {
                *error = written ? errno : EIO;
                return done + (left - pieces);
            }
            offset += written;
            while (left < pieces + used && (size_t)written >= left->iov_len)
                written -= (ssize_t)(left++)->iov_len;
            if (written) {
                left->iov_base = (char *)left->iov_base + written;
                left->iov_len -= (size_t)written;
            }
        }
        done += used;
    }
    return done;
}

static PyObject *write_rows(PyObject *self, PyObject *args)
{
    Py_buffer rows;
    Py_ssize_t done;
    int error;
    if (!PyArg_ParseTuple(args, "y*", &rows))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = write_all(rows.buf, rows.len / (Py_ssize_t)sizeof(Row), &error);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    return Py_BuildValue("ni", done, error);
}

/* -- copies with checksums ---------------------------------------------------------------------------------------- */

enum { GRANULE = 256 << 10 };

typedef struct {
    uint64_t source, target;
    int64_t length;
} Copy;

static PyObject *copy_rows(PyObject *self, PyObject *args)
{
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "y*", &buffer))
        return NULL;
    const Copy *rows = buffer.buf;
    Py_ssize_t count = buffer.len / (Py_ssize_t)sizeof(Copy), granules = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        granules += (Py_ssize_t)((rows[i].length + GRANULE - 1) / GRANULE);
    PyObject *found = PyBytes_FromStringAndSize(NULL, 4 * granules);
    if (found) {
        uint8_t *out = (uint8_t *)PyBytes_AS_STRING(found);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            for (int64_t done = 0; done < rows[i].length; done += GRANULE, out += 4) {
                int64_t length = rows[i].length - done < GRANULE ? rows[i].length - done : GRANULE;
                uint32_t checksum = copy_granule((uint8_t *)(uintptr_t)rows[i].target + done,
                                                 (const uint8_t *)(uintptr_t)rows[i].source + done, length);
                for (int byte = 0; byte < 4; byte++)
                    out[byte] = (uint8_t)(checksum >> 8 * byte);
            }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&buffer);
    return found;
}

/* -- what comes over a connection, with checksums ----------------------------------------------------------------- */

enum { AT_ONCE = 64, ENDED = -1 };

typedef struct {
    uint64_t target;
    int64_t length, done, checksum;
} Landing;

/* So many bytes came into rows from *first on: sum them while they are in the cache, and go on to the first row that is not
   full. */
static void account(Landing *rows, Py_ssize_t *first, int64_t came)
{
    while (came) {
        Landing *row = rows + *first;
        int64_t part = row->length - row->done < came ? row->length - row->done : came;
        row->checksum = checksum_of((uint32_t)row->checksum, (const uint8_t *)(uintptr_t)row->target + row->done, part);
        row->done += part;
        came -= part;
        *first += row->done == row->length;
    }
}

/* Fill rows from *first on with at most so many bytes that are there. 0, an errno, or ENDED. */
static int receive_all(int descriptor, Landing *rows, Py_ssize_t count, Py_ssize_t *first, int64_t budget, int64_t *came)
{
    struct iovec pieces[AT_ONCE];
    struct msghdr message = {.msg_iov = pieces};
    while (*first < count && *came < budget) {
        int64_t room = budget - *came < GRANULE ? budget - *came : GRANULE;
        int used = 0;
        for (; used < AT_ONCE && *first + used < count && room; used++) {
            const Landing *row = rows + *first + used;
            int64_t part = row->length - row->done < room ? row->length - row->done : room;
            pieces[used].iov_base = (uint8_t *)(uintptr_t)row->target + row->done;
            pieces[used].iov_len = (size_t)part;
            room -= part;
        }
        message.msg_iovlen = (size_t)used;
        ssize_t found = recvmsg(descriptor, &message, MSG_DONTWAIT);
        if (found < 0 && errno == EINTR)
            continue;
        if (found <= 0)
            return found ? errno : ENDED;
        *came += found;
        account(rows, first, found);
    }
    return 0;
}

static PyObject *receive_rows(PyObject *self, PyObject *args)
{
    Py_buffer buffer;
    int descriptor, error;
    Py_ssize_t first;
    long long budget;
    int64_t came = 0;
    if (!PyArg_ParseTuple(args, "iw*nL", &descriptor, &buffer, &first, &budget))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = receive_all(descriptor, buffer.buf, buffer.len / (Py_ssize_t)sizeof(Landing), &first, budget, &came);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return Py_BuildValue("nLi", first, (long long)came, error);
}

static PyMethodDef methods[] = {
    {"fingerprints", fingerprints, METH_VARARGS, "fingerprints(multipliers, keys, out)"},
    {"find", find, METH_VARARGS, "find(table, keys, numbers)"},
    {"get", get, METH_VARARGS, "get(table, keys, arenas, targets, rooms, numbers, results)"},
    {"write_rows", write_rows, METH_VARARGS, "write_rows(rows) -> (rows that were written, errno of the next)"},
    {"copy_rows", copy_rows, METH_VARARGS, "copy_rows(rows) -> checksums, where COPIES"},
    {"receive_rows", receive_rows, METH_VARARGS, "receive_rows(descriptor, rows, first, budget), where COPIES"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvfuse.native._native", "See blockindex.py, rowwriter.py, rowcopier.py and rowreceiver.py.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "COPIES", crc32c_begin()))
        Py_CLEAR(made);
    return made;
}
