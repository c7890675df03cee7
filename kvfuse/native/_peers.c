/* Blocks that hosts read from each other's memory, by threads that need no interpreter: see peerserver.h, peerreader.h and
   peercopies.h. `_peers.pyi` says what each function expects. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "peerreader.h"
#include "peerserver.h"

typedef struct {
    PyObject_HEAD
    Spread spread;
} SpreadObject;

typedef struct Serving {
    Conversation with;
    PyObject *lender;
    struct Serving *next;
} Serving;

typedef struct {
    PyObject_HEAD
    SpreadObject *spread;
    Server server;
    Serving *all;
    Asking *callers;
} ServerObject;

typedef struct {
    PyObject_HEAD
    Reader reader;
    int is_running;
} ReaderObject;

static PyTypeObject spread_type;

/* -- who has copies ----------------------------------------------------------------------------------------------- */

#define SPREAD (&((SpreadObject *)self)->spread)

static PyObject *spread_new(PyTypeObject *type, PyObject *args, PyObject *words)
{
    SpreadObject *self = (SpreadObject *)type->tp_alloc(type, 0);
    if (self && !(self->spread.all = calloc(SETS * WAYS, sizeof *self->spread.all))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (self)
        pthread_mutex_init(&self->spread.lock, NULL);
    return (PyObject *)self;
}

static void spread_free(SpreadObject *self)
{
    free(self->spread.all);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *spread_set_clients(PyObject *self, PyObject *args)
{
    Py_buffer clients;
    if (!PyArg_ParseTuple(args, "y*", &clients))
        return NULL;
    pthread_mutex_lock(&SPREAD->lock);
    for (uint32_t i = 0; i < SPREAD->client_count; i++)
        SPREAD->clients[i].is_listed = 0;
    if (SPREAD->client_count + (size_t)clients.len / 8 > CLIENTS_MAX)
        SPREAD->client_count = 0; /* their loads are told again */
    for (Py_ssize_t i = 0; i < clients.len / 8; i++) {
        Client *found = client_of(SPREAD, ((const uint64_t *)clients.buf)[i], 1);
        if (found)
            found->is_listed = 1;
    }
    pthread_mutex_unlock(&SPREAD->lock);
    PyBuffer_Release(&clients);
    Py_RETURN_NONE;
}

static PyObject *spread_tell(PyObject *self, PyObject *args)
{
    unsigned long long client, load;
    if (!PyArg_ParseTuple(args, "KK", &client, &load))
        return NULL;
    tell_load(SPREAD, client, load);
    Py_RETURN_NONE;
}

static PyObject *spread_forget(PyObject *self, PyObject *args)
{
    unsigned long long address, generation, client;
    if (!PyArg_ParseTuple(args, "KKK", &address, &generation, &client))
        return NULL;
    forget_holder(SPREAD, address, generation, client);
    Py_RETURN_NONE;
}

static PyObject *spread_choose(PyObject *self, PyObject *args)
{
    unsigned long long address, generation, caller;
    int is_here, is_final;
    if (!PyArg_ParseTuple(args, "KKKpp", &address, &generation, &caller, &is_here, &is_final))
        return NULL;
    uint64_t named[NAMED_MAX];
    uint32_t count = choose_holders(SPREAD, address, generation, caller, is_here, is_final, named);
    PyObject *found = PyList_New(count);
    for (uint32_t i = 0; found && i < count; i++) {
        PyObject *client = PyLong_FromUnsignedLongLong(named[i]);
        if (!client)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, client);
    }
    return found;
}

static PyObject *spread_add_load(PyObject *self, PyObject *args)
{
    long long by;
    if (!PyArg_ParseTuple(args, "L", &by))
        return NULL;
    return PyLong_FromUnsignedLongLong(__atomic_add_fetch(&SPREAD->load, (uint64_t)by, __ATOMIC_RELAXED));
}

static PyMethodDef spread_methods[] = {
    {"set_clients", spread_set_clients, METH_VARARGS, "set_clients(clients)"},
    {"tell_load", spread_tell, METH_VARARGS, "tell_load(client, load)"},
    {"forget", spread_forget, METH_VARARGS, "forget(address, generation, client)"},
    {"choose", spread_choose, METH_VARARGS, "choose(address, generation, caller, is_here, is_final) -> clients"},
    {"add_load", spread_add_load, METH_VARARGS, "add_load(by) -> load"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject spread_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._peers.Spread",
    .tp_basicsize = sizeof(SpreadObject),
    .tp_dealloc = (destructor)spread_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = spread_methods,
    .tp_new = spread_new,
};

/* -- the side that answers ---------------------------------------------------------------------------------------- */

#define SERVER ((ServerObject *)self)

static PyObject *server_new(PyTypeObject *type, PyObject *args, PyObject *words)
{
    SpreadObject *spread;
    unsigned long long in_flight;
    if (!PyArg_ParseTuple(args, "O!K", &spread_type, &spread, &in_flight))
        return NULL;
    ServerObject *self = (ServerObject *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->spread = (SpreadObject *)Py_NewRef(spread);
    self->server = (Server){.spread = &spread->spread, .in_flight = in_flight, .send_ns = SEND_SECONDS * SECOND_NS};
    return (PyObject *)self;
}

static Asking *asking_of(ServerObject *self, uint64_t client)
{
    Asking *one = self->callers;
    while (one && one->client != client)
        one = one->next;
    if (!one && (one = calloc(1, sizeof *one)))
        one->client = client, one->next = self->callers, self->callers = one;
    return one;
}

/* The descriptor is this server's from now on, also where it fails. */
static PyObject *server_serve(PyObject *self, PyObject *args)
{
    int fd;
    unsigned long long client;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "iKO", &fd, &client, &capsule))
        return NULL;
    const Lender *lender = PyCapsule_GetPointer(capsule, "kvfuse.lender");
    Asking *caller = lender ? asking_of(SERVER, client) : NULL;
    Serving *made = caller ? calloc(1, sizeof *made) : NULL;
    if (made) {
        made->with.server = &SERVER->server, made->with.caller = caller, made->with.lender = lender, made->with.fd = fd;
        made->lender = Py_NewRef(capsule);
    }
    if (!made || !start_thread(&made->with.thread, converse, &made->with)) {
        if (made)
            Py_DECREF(made->lender);
        free(made);
        close(fd);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    caller->users++;
    made->next = SERVER->all, SERVER->all = made;
    Py_RETURN_NONE;
}

/* Join threads that have ended, or ``all`` once they do; the clients of their connections. */
static PyObject *reap(ServerObject *self, int all)
{
    PyObject *found = PyList_New(0);
    for (Serving **link = &self->all; found && *link;) {
        Serving *one = *link;
        if (!all && !__atomic_load_n(&one->with.is_over, __ATOMIC_ACQUIRE)) {
            link = &one->next;
            continue;
        }
        Py_BEGIN_ALLOW_THREADS
        pthread_join(one->with.thread, NULL);
        Py_END_ALLOW_THREADS
        PyObject *client = PyLong_FromUnsignedLongLong(one->with.caller->client);
        if (!client || PyList_Append(found, client) < 0)
            Py_CLEAR(found);
        Py_XDECREF(client);
        one->with.caller->users--;
        close(one->with.fd);
        *link = one->next;
        Py_DECREF(one->lender);
        free(one->with.copy), free(one);
    }
    return found;
}

static PyObject *server_reap(PyObject *self, PyObject *none) { return reap(SERVER, 0); }

/* End connections that are served from another lender than this one. */
static PyObject *server_end(PyObject *self, PyObject *capsule)
{
    const Lender *lender = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "kvfuse.lender");
    if (PyErr_Occurred())
        return NULL;
    for (Serving *one = SERVER->all; one; one = one->next)
        if (one->with.lender != lender)
            shutdown(one->with.fd, SHUT_RDWR);
    Py_RETURN_NONE;
}

static PyObject *server_close(PyObject *self, PyObject *none)
{
    Py_XDECREF(server_end(self, Py_None));
    return reap(SERVER, 1);
}

static void server_free(ServerObject *self)
{
    Py_XDECREF(server_close((PyObject *)self, NULL));
    while (self->callers) {
        Asking *one = self->callers;
        self->callers = one->next;
        free(one);
    }
    if (self->server.spans)
        close(self->server.spans->bell);
    free(self->server.spans);
    Py_DECREF(self->spread);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *server_trace(PyObject *self, PyObject *none)
{
    ServedSpans *spans = SERVER->server.spans;
    if (!spans) {
        if (!(spans = calloc(1, sizeof *spans)))
            return PyErr_NoMemory();
        if ((spans->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
            free(spans);
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        pthread_mutex_init(&spans->lock, NULL);
        __atomic_store_n(&SERVER->server.spans, spans, __ATOMIC_RELEASE);
    }
    return PyLong_FromLong(spans->bell);
}

static PyObject *server_take_spans(PyObject *self, PyObject *none)
{
    ServedSpans *spans = SERVER->server.spans;
    uint64_t rung;
    if (!spans)
        return PyBytes_FromStringAndSize(NULL, 0);
    if (read(spans->bell, &rung, sizeof rung) < 0 && errno != EAGAIN)
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_mutex_lock(&spans->lock);
    PyObject *found = PyBytes_FromStringAndSize((const char *)spans->spans, (Py_ssize_t)(spans->count * sizeof *spans->spans));
    spans->count = 0;
    pthread_mutex_unlock(&spans->lock);
    return found;
}

static PyObject *server_set_disk(PyObject *self, PyObject *has_disk)
{
    __atomic_store_n(&SERVER->server.has_disk, PyObject_IsTrue(has_disk), __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static PyObject *server_set_patience(PyObject *self, PyObject *args)
{
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds))
        return NULL;
    SERVER->server.send_ns = (int64_t)(seconds * SECOND_NS);
    Py_RETURN_NONE;
}

static PyObject *server_statistics(PyObject *self, PyObject *none)
{
    const Served *served = &SERVER->server.served;
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", "questions", served->questions, "rows", served->rows, "here", served->here,
                         "bytes", served->bytes, "absent", served->absent, "elsewhere", served->elsewhere, "busy",
                         served->busy, "malformed", served->malformed, "given_up", served->given_up);
}

static PyObject *server_callers(PyObject *self, PyObject *none)
{
    PyObject *found = PyDict_New();
    for (const Asking *one = SERVER->callers; found && one; one = one->next) {
        PyObject *client = PyLong_FromUnsignedLongLong(one->client), *value = Py_BuildValue("(KI)", one->served, one->users);
        if (!client || !value || PyDict_SetItem(found, client, value) < 0)
            Py_CLEAR(found);
        Py_XDECREF(client), Py_XDECREF(value);
    }
    return found;
}

static PyMethodDef server_methods[] = {
    {"serve", server_serve, METH_VARARGS, "serve(descriptor, client, lender)"},
    {"reap", server_reap, METH_NOARGS, "reap() -> clients"},
    {"close", server_close, METH_NOARGS, "close() -> clients"},
    {"end", server_end, METH_O, "end(lender or None)"},
    {"set_disk", server_set_disk, METH_O, "set_disk(whether)"},
    {"trace", server_trace, METH_NOARGS, "trace() -> descriptor"},
    {"take_spans", server_take_spans, METH_NOARGS, "take_spans() -> bytes"},
    {"set_patience", server_set_patience, METH_VARARGS, "set_patience(seconds)"},
    {"statistics", server_statistics, METH_NOARGS, "statistics()"},
    {"callers", server_callers, METH_NOARGS, "callers() -> {client: (bytes, connections)}"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject server_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._peers.Server",
    .tp_basicsize = sizeof(ServerObject),
    .tp_dealloc = (destructor)server_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = server_methods,
    .tp_new = server_new,
};

/* -- the side that asks ------------------------------------------------------------------------------------------- */

#define READER (&((ReaderObject *)self)->reader)

/* The descriptor is this reader's from now on. */
static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *words)
{
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    ReaderObject *self = (ReaderObject *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->reader = (Reader){.fd = fd, .low = 1, .bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    pthread_mutex_init(&self->reader.lock, NULL);
    self->is_running = start_thread(&self->reader.thread, receive_answers, &self->reader);
    if (!self->is_running) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *reader_close(PyObject *self, PyObject *none)
{
    ReaderObject *own = (ReaderObject *)self;
    if (own->is_running) {
        shutdown(READER->fd, SHUT_RDWR);
        Py_BEGIN_ALLOW_THREADS
        pthread_join(READER->thread, NULL);
        Py_END_ALLOW_THREADS
        own->is_running = 0;
        close(READER->fd);
        READER->fd = -1;
    }
    Py_RETURN_NONE;
}

static void reader_free(ReaderObject *self)
{
    if (self->is_running)
        Py_DECREF(reader_close((PyObject *)self, NULL));
    while (self->reader.open) {
        Question *one = self->reader.open;
        self->reader.open = one->next;
        free(one);
    }
    close(self->reader.bell);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *reader_bell(PyObject *self, PyObject *none) { return PyLong_FromLong(READER->bell); }

/* Columns of blocks; those of a question are ``chosen``. */
enum { ADDRESSES, GENERATIONS, LENGTHS, CHECKSUMS, TARGETS, PLACES, CHOSEN, ASK_COLUMNS };

/* ``parent``: NULL: it has none. */
static int send_question(Reader *reader, MessageHead *head, WantedRow *rows, const char *parent)
{
    size_t size = head->row_count * sizeof *rows, before = parent ? sizeof *head + sizeof(ParentRow) : 0;
    MessageHead named = {PARENT_MAGIC, 1, head->number, head->load, 0};
    struct iovec pieces[4] = {{&named, sizeof named}, {(void *)(uintptr_t)parent, sizeof(ParentRow)}, {head, sizeof *head}, {rows, size}};
    struct msghdr message = {.msg_iov = pieces + (parent ? 0 : 2), .msg_iovlen = parent ? 4 : 2};
    return sendmsg(reader->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)(before + sizeof *head + size);
}

static uint64_t ask(Reader *reader, Question *asked, WantedRow *rows, uint64_t size, uint64_t load, const char *parent)
{
    pthread_mutex_lock(&reader->lock);
    if (!reader->bytes_left)
        reader->heard_ns = now_ns();
    MessageHead head = {QUESTION_MAGIC, asked->count, asked->number = ++reader->last_number, load, 0};
    reader->bytes_left += size;
    asked->next = reader->open, reader->open = asked;
    pthread_mutex_unlock(&reader->lock);
    if (!send_question(reader, &head, rows, parent)) /* it takes no questions any more: then all that were asked are lost */
        shutdown(reader->fd, SHUT_RDWR);
    return head.number;
}

static PyObject *reader_ask(PyObject *self, PyObject *args)
{
    static const uint8_t sizes[] = {8, 8, 4, 4, 8, 4};
    Py_buffer columns[ASK_COLUMNS];
    unsigned flags;
    unsigned long long without, load;
    PyObject *capsule, *number = NULL;
    const char *parent = NULL;
    Py_ssize_t parent_size = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*IKOK|y#", columns, columns + 1, columns + 2, columns + 3, columns + 4,
                          columns + 5, columns + 6, &flags, &without, &capsule, &load, &parent, &parent_size))
        return NULL;
    Py_ssize_t count = columns[CHOSEN].len / 8;
    const int64_t *chosen = columns[CHOSEN].buf;
    const LandingWay *landing = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "kvfuse.landing");
    int is_sound = count >= 1 && count <= ROWS_MAX && (!parent_size || parent_size == sizeof(ParentRow));
    for (int i = 0; i < PLACES + 1; i++)
        for (Py_ssize_t k = 0; is_sound && k < count; k++)
            is_sound = chosen[k] >= 0 && (chosen[k] + 1) * sizes[i] <= columns[i].len;
    Question *asked = NULL;
    if (!is_sound)
        PyErr_SetString(PyExc_ValueError, "columns of another length");
    else if (!PyErr_Occurred() && !(asked = calloc(1, sizeof *asked + (size_t)count * sizeof *asked->rows)))
        PyErr_NoMemory();
    if (asked) {
        WantedRow rows[ROWS_MAX];
        uint64_t size = 0;
        asked->count = asked->left = (uint32_t)count;
        if (landing)
            asked->landing = *landing;
        for (Py_ssize_t k = 0; k < count; k++) {
            int64_t i = chosen[k];
            uint32_t length = ((const uint32_t *)columns[LENGTHS].buf)[i];
            rows[k] = (WantedRow){((const uint64_t *)columns[ADDRESSES].buf)[i], ((const uint64_t *)columns[GENERATIONS].buf)[i],
                                  length, flags, without};
            asked->rows[k] = (AskedRow){.target = (uint8_t *)(uintptr_t)((const uint64_t *)columns[TARGETS].buf)[i],
                                        .length = length, .checksum = ((const uint32_t *)columns[CHECKSUMS].buf)[i],
                                        .place = ((const uint32_t *)columns[PLACES].buf)[i]};
            size += length;
        }
        number = PyLong_FromUnsignedLongLong(ask(READER, asked, rows, size, load, parent_size ? parent : NULL));
    }
    for (int i = 0; i < ASK_COLUMNS; i++)
        PyBuffer_Release(columns + i);
    return number;
}

typedef struct {
    uint64_t number;
    uint32_t left, count; /* rows without a result; rows that follow */
} ToldHead;

/* What Python does not know of a question, behind what is there already. */
static void tell_rows(Question *asked, char **told, size_t *size)
{
    char *more = realloc(*told, *size + sizeof(ToldHead) + asked->untold * sizeof(AnswerRow));
    if (!more)
        abort(); /* whoever asked would wait for ever */
    ToldHead head = {asked->number, asked->left, asked->untold};
    memcpy(more + *size, &head, sizeof head);
    *told = more, *size += sizeof head;
    for (uint32_t i = 0; i < asked->count; i++) {
        AskedRow *row = asked->rows + i;
        if (!row->result || row->is_told)
            continue;
        AnswerRow own = {(uint32_t)row->result, i, {row->named[0], row->named[1], row->named[2]}};
        memcpy(*told + *size, &own, sizeof own);
        *size += sizeof own, row->is_told = 1;
    }
    asked->untold = 0;
}

static PyObject *reader_take(PyObject *self, PyObject *none)
{
    uint64_t rung;
    char *told = NULL;
    size_t size = 0;
    if (read(READER->bell, &rung, sizeof rung) < 0 && errno != EAGAIN)
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_mutex_lock(&READER->lock);
    for (Question **link = &READER->open; *link;) {
        Question *asked = *link;
        if (asked->untold)
            tell_rows(asked, &told, &size);
        if (asked->left)
            link = &asked->next;
        else {
            *link = asked->next;
            free(asked);
        }
    }
    pthread_mutex_unlock(&READER->lock);
    PyObject *found = PyBytes_FromStringAndSize(told, (Py_ssize_t)size);
    free(told);
    return found;
}

static PyObject *reader_abandon(PyObject *self, PyObject *args)
{
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "K", &number))
        return NULL;
    abandon_question(READER, number);
    Py_RETURN_NONE;
}

static PyObject *reader_facts(PyObject *self, PyObject *none)
{
    pthread_mutex_lock(&READER->lock);
    uint64_t left = READER->bytes_left, load = READER->load;
    double silence = left ? (double)(now_ns() - READER->heard_ns) / 1e9 : 0;
    int is_over = READER->is_over, is_malformed = READER->is_malformed;
    pthread_mutex_unlock(&READER->lock);
    return Py_BuildValue("KKdii", left, load, silence, is_over, is_malformed);
}

static PyMethodDef reader_methods[] = {
    {"bell", reader_bell, METH_NOARGS, "bell() -> descriptor"},
    {"ask", reader_ask, METH_VARARGS, "ask(columns..., flags, without, landing or None, load, parent) -> number"},
    {"take", reader_take, METH_NOARGS, "take() -> bytes"},
    {"abandon", reader_abandon, METH_VARARGS, "abandon(number)"},
    {"facts", reader_facts, METH_NOARGS, "facts() -> (bytes left, load, silence, is over, is malformed)"},
    {"close", reader_close, METH_NOARGS, "close()"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfuse.native._peers.Reader",
    .tp_basicsize = sizeof(ReaderObject),
    .tp_dealloc = (destructor)reader_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = reader_methods,
    .tp_new = reader_new,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvfuse.native._peers", "See _peers.pyi.", -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__peers(void)
{
    crc32c_begin();
    if (PyType_Ready(&spread_type) < 0 || PyType_Ready(&server_type) < 0 || PyType_Ready(&reader_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddObjectRef(made, "Spread", (PyObject *)&spread_type) < 0 ||
                 PyModule_AddObjectRef(made, "Server", (PyObject *)&server_type) < 0 ||
                 PyModule_AddObjectRef(made, "Reader", (PyObject *)&reader_type) < 0))
        Py_CLEAR(made);
    return made;
}
