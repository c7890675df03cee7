/* What is worth doing without the interpreter: writing many pieces of memory to files (rowwriter.py), and receiving into
   many with their checksums (rowreceiver.py), and the checksums of what files have (filesums.py). And fields of messages
   (messagefields.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.h"

enum { PIECES = 256, MAPPED_ROWS = 4, MAPPED_MAX = 256 << 10 };

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

/* -- what comes over a connection, with checksums ----------------------------------------------------------------- */

enum { GRANULE = 256 << 10, AT_ONCE = 64, ENDED = -1 };

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

/* -- what a file has, by its checksums ------------------------------------------------------------------------------ */

/* Read at least `length` and at most `room` bytes. 0, an errno, or ENDED: the file is shorter. */
static int read_all(int descriptor, uint8_t *target, int64_t offset, int64_t length, int64_t room)
{
    int64_t done = 0;
    while (done < length) {
        ssize_t found = pread(descriptor, target + done, (size_t)(room - done), offset + done);
        if (found < 0 && errno == EINTR)
            continue;
        if (found <= 0)
            return found ? errno : ENDED;
        done += found;
    }
    return 0;
}

static int64_t granule_at(int64_t start, int64_t length) { return length - start < GRANULE ? length - start : GRANULE; }

/* Sum each granule of a range, which is in the page cache afterwards. 0, an errno, or ENDED: the file is shorter. */
static int sum_all(int descriptor, int64_t offset, int64_t length, uint32_t *sums)
{
    uint8_t piece[GRANULE];
    posix_fadvise(descriptor, offset, length, POSIX_FADV_WILLNEED);
    for (int64_t start = 0; start < length; start += GRANULE) {
        int64_t part = granule_at(start, length);
        int error = read_all(descriptor, piece, offset + start, part, part);
        if (error)
            return error;
        *sums++ = checksum_of(0, piece, part);
    }
    return 0;
}

/* Fill memory with a range, and sum each granule of what is there then. As `sum_all`. */
static int fill_all(int descriptor, uint8_t *target, int64_t offset, int64_t length, int64_t room, uint32_t *sums)
{
    int error = read_all(descriptor, target, offset, length, room);
    for (int64_t start = 0; !error && start < length; start += GRANULE)
        *sums++ = checksum_of(0, target + start, granule_at(start, length));
    return error;
}

static PyObject *new_sums(int64_t length) { return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((length + GRANULE - 1) / GRANULE * 4)); }

static PyObject *fill_and_sum(PyObject *self, PyObject *args)
{
    Py_buffer target;
    int descriptor, error;
    long long offset, length;
    if (!PyArg_ParseTuple(args, "iw*LL", &descriptor, &target, &offset, &length))
        return NULL;
    PyObject *sums = NULL;
    if (length < 0 || length > target.len)
        PyErr_SetString(PyExc_ValueError, "the target has fewer bytes");
    else if ((sums = new_sums(length))) {
        Py_BEGIN_ALLOW_THREADS
        error = fill_all(descriptor, target.buf, offset, length, target.len, (uint32_t *)PyBytes_AS_STRING(sums));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&target);
    return sums ? Py_BuildValue("Ni", sums, error) : NULL;
}

static PyObject *sum_file(PyObject *self, PyObject *args)
{
    int descriptor, error;
    long long offset, length;
    if (!PyArg_ParseTuple(args, "iLL", &descriptor, &offset, &length))
        return NULL;
    PyObject *sums = new_sums(length);
    if (!sums)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = sum_all(descriptor, offset, length, (uint32_t *)PyBytes_AS_STRING(sums));
    Py_END_ALLOW_THREADS
    return Py_BuildValue("Ni", sums, error);
}

/* An integer of up to 10 bytes. Where it ends; NULL: it does not, before `end`. */
static const unsigned char *varint(const unsigned char *place, const unsigned char *end, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; place < end && shift < 70; shift += 7) {
        *value |= (uint64_t)(*place & 127) << shift;
        if (*place++ < 128)
            return place;
    }
    return NULL;
}

static PyObject *fields(PyObject *self, PyObject *data)
{
    char *begin;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &begin, &size))
        return NULL;
    const unsigned char *place = (const unsigned char *)begin, *end = place + size;
    PyObject *found = PyList_New(0);
    while (found && place && place < end) {
        uint64_t key, number;
        PyObject *value = NULL;
        if (!(place = varint(place, end, &key)))
            break;
        if ((key & 7) == 1 || (key & 7) == 5) {
            Py_ssize_t fixed = (key & 7) == 1 ? 8 : 4;
            place = end - place < fixed ? NULL : place + fixed;
            continue;
        }
        if (((key & 7) != 0 && (key & 7) != 2) || !(place = varint(place, end, &number)))
            place = NULL;
        else if ((key & 7) == 0)
            value = PyLong_FromUnsignedLongLong(number);
        else if (number > (uint64_t)(end - place))
            place = NULL;
        else {
            value = PyBytes_FromStringAndSize((const char *)place, (Py_ssize_t)number);
            place += number;
        }
        if (!place)
            break;
        PyObject *numbered = value ? PyTuple_New(2) : NULL, *field = numbered ? PyLong_FromUnsignedLongLong(key >> 3) : NULL;
        if (field) {
            PyTuple_SET_ITEM(numbered, 0, field);
            PyTuple_SET_ITEM(numbered, 1, value);
        } else
            Py_XDECREF(value);
        if (!field || PyList_Append(found, numbered))
            Py_CLEAR(found);
        Py_XDECREF(numbered);
    }
    if (place || !found)
        return found;
    Py_DECREF(found);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fields", fields, METH_O, "fields(data) -> [(number, value), ...], or None where it is no message"},
    {"write_rows", write_rows, METH_VARARGS, "write_rows(rows) -> (rows that were written, errno of the next)"},
    {"receive_rows", receive_rows, METH_VARARGS, "receive_rows(descriptor, rows, first, budget), where CHECKSUMS"},
    {"sum_file", sum_file, METH_VARARGS, "sum_file(descriptor, offset, length) -> (checksums, error), where CHECKSUMS"},
    {"fill_and_sum", fill_and_sum, METH_VARARGS, "fill_and_sum(descriptor, target, offset, length), as sum_file"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvfuse.native._native", "See rowwriter.py and rowreceiver.py.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "CHECKSUMS", crc32c_begin()))
        Py_CLEAR(made);
    return made;
}
