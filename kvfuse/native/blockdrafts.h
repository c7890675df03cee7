/* Files that are written in folders of blocks, without the interpreter: from CREATE to the RENAME that gives them their names.

   A draft is a file that was made here, and that is written by the descriptor that made it. Its bytes go to where they stay,
   an arena of the table that its block comes to; FLUSH makes it that block. From then on it is settled: its number means the
   block, as `Numbered` knows. All else is Python's, which takes a draft over before it handles a request about it
   (`take_over`), or makes a handle of its own of a settled one. The next daemon finds drafts that are not settled, and numbers
   of blocks, in shared memory (`keep_draft`, `note_written`): its Python takes these drafts over before it serves. What
   changed when a daemon was killed belongs to a request without an answer, and the kernel sends that again.

   Only in folders that Python has offered for it (`is_writable`): then nobody has to hear at once of what happens here. It
   hears of it by and by, from notes. */

#ifndef KVFUSE_BLOCKDRAFTS_H
#define KVFUSE_BLOCKDRAFTS_H

#define HELD_BACK ".kvfuse-" /* how names begin that no listing shows */

/* -- numbers of what was written ---------------------------------------------------------------------------------- */

static uint32_t written_key(uint64_t ino) { return (uint32_t)(ino * 0x9E3779B97F4A7C15ull >> 51) % WRITTEN; }

static uint32_t block_key(uint32_t table, uint32_t row, uint64_t sequence)
{
    return (uint32_t)(mix(OF_BLOCK, (uint64_t)table << 32 | row, sequence) >> 17) % WRITTEN;
}

static Numbered *find_written(Door *door, uint64_t ino)
{
    uint32_t at = door->by_number[written_key(ino)];
    while (at && door->written[at - 1].ino != ino)
        at = door->written[at - 1].next_number;
    return at ? door->written + at - 1 : NULL;
}

/* The number by which the kernel knows a block, or its own. */
static uint64_t number_of_block(const Door *door, uint32_t table, uint32_t row, uint64_t sequence)
{
    uint32_t at = door->by_block[block_key(table, row, sequence)];
    for (; at; at = door->written[at - 1].next_block) {
        const Numbered *one = door->written + at - 1;
        if (one->table == table && one->row == row && one->sequence == sequence)
            return one->ino;
    }
    return block_inode(table, row, sequence);
}

static void unlink_written(Door *door, Numbered *one)
{
    uint16_t place = (uint16_t)(one - door->written + 1), *at = door->by_number + written_key(one->ino);
    while (*at != place)
        at = &door->written[*at - 1].next_number;
    *at = one->next_number;
    for (at = door->by_block + block_key(one->table, one->row, one->sequence); *at != place;)
        at = &door->written[*at - 1].next_block;
    *at = one->next_block;
    __atomic_store_n(&one->ino, 0, __ATOMIC_SEQ_CST);
}

static Named *named_place(Door *door, uint64_t ino) { return door->named + (ino * 0x9E3779B97F4A7C15ull >> 54) % LOOKS; }

/* The number may mean something else from now on. */
static void forget_written(Door *door, uint64_t ino)
{
    Numbered *one = find_written(door, ino);
    if (named_place(door, ino)->look.number == ino)
        named_place(door, ino)->arena = 0;
    if (one)
        unlink_written(door, one);
}

/* The kernel has the bytes of a block as the content of this number. The oldest one is forgotten. */
static void note_written(Door *door, uint64_t ino, uint32_t table, uint32_t row, uint64_t sequence)
{
    forget_written(door, ino);
    forget_written(door, number_of_block(door, table, row, sequence));
    Numbered *one = door->written + door->written_next++ % WRITTEN;
    if (one->ino)
        unlink_written(door, one);
    uint16_t place = (uint16_t)(one - door->written + 1);
    uint16_t *number = door->by_number + written_key(ino), *block = door->by_block + block_key(table, row, sequence);
    one->sequence = sequence, one->table = table, one->row = row, one->next_number = *number, one->next_block = *block;
    __atomic_store_n(&one->ino, ino, __ATOMIC_SEQ_CST); /* last: the next daemon may find it */
    *number = *block = place;
}

/* Go on with the numbers of the former daemon whose blocks are what they were. */
static void restore_written(Door *door)
{
    for (Numbered *one = door->written; one < door->written + WRITTEN; one++) {
        const Table *table = door->core->tables + one->table % TABLES;
        const Row *row = one->row < table->index.rows_max ? table->index.rows + one->row : NULL;
        if (one->table >= TABLES || !table->is_known || table->is_ended || !row || !(row->version & 1) ||
            row->sequence != one->sequence || find_written(door, one->ino))
            one->ino = 0;
        if (!one->ino)
            continue;
        uint16_t place = (uint16_t)(one - door->written + 1);
        uint16_t *number = door->by_number + written_key(one->ino);
        uint16_t *block = door->by_block + block_key(one->table, one->row, one->sequence);
        one->next_number = *number, one->next_block = *block;
        *number = *block = place;
        door->written_next = place;
    }
}

/* -- notes -------------------------------------------------------------------------------------------------------- */

/* Python hears of what happened when it looks: it is woken for the first note. */
static void ring_bell(Door *door)
{
    uint64_t one = 1;
    if (!door->has_rung && door->bell >= 0 && write(door->bell, &one, sizeof one) > 0)
        door->has_rung = 1;
}

static void note_name(Door *door, int kind, uint64_t folder, const uint8_t *name, size_t length)
{
    Look *last = door->look_tail > door->look_head ? door->looks + (door->look_tail - 1) % LOOKS : NULL;
    if (kind == MADE && last && last->kind == ABSENT_NAME && last->number == folder && last->length == length &&
        !memcmp(last->name, name, length)) {
        door->look_tail--; /* it was looked up for that */
        return;
    }
    if (door->look_tail - door->look_head == LOOKS)
        return;
    Look *look = door->looks + door->look_tail++ % LOOKS;
    look->number = folder, look->kind = (uint8_t)kind, look->length = (uint8_t)length;
    memcpy(look->name, name, length);
}

static void note_put(Door *door, uint32_t table, int64_t row, uint64_t written)
{
    if (door->put_tail - door->put_head < PUTS)
        door->puts[door->put_tail++ % PUTS] = (Use){table, (uint32_t)row, written};
    ring_bell(door);
}

static int64_t coarse_time(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}

static void note_change(Door *door, Folder *folder)
{
    folder->changed = coarse_time();
    door->has_changed = 1;
    ring_bell(door);
}

/* -- drafts ------------------------------------------------------------------------------------------------------- */

/* Wait until nobody copies to a draft: that takes no longer than the copy of one request. Under the lock, which it lets go
   of; 0: it is another one by then. */
static int wait_for_draft(Door *door, const Draft *draft, uint64_t fh)
{
    while (draft->fh == fh && draft->is_busy) {
        unlock(door->core);
        sched_yield();
        lock(door->core);
    }
    return draft->fh == fh;
}

static Draft *draft_of_handle(Door *door, uint64_t fh, uint64_t ino)
{
    uint64_t index = fh & (HANDLES_MAX - 1);
    if (!(fh & HANDLE_MARK) || !(fh & DRAFT_MARK) || index >= DRAFTS)
        return NULL;
    Draft *draft = door->drafts + index;
    int is_it = draft->fh == fh && draft->ino == ino && wait_for_draft(door, draft, fh) && !draft->is_taken;
    return is_it ? draft : NULL;
}

static Draft *draft_of_number(Door *door, uint64_t ino)
{
    for (uint32_t i = 0; i < door->draft_end; i++)
        if (door->drafts[i].fh && door->drafts[i].ino == ino)
            return door->drafts + i;
    return NULL;
}

/* One that is not settled: the name of a settled one is its block's. */
static Draft *draft_of_name(Door *door, uint64_t folder, const uint8_t *name, size_t length)
{
    for (uint32_t i = 0; i < door->draft_end; i++) {
        Draft *draft = door->drafts + i;
        if (draft->fh && !draft->is_settled && draft->folder == folder && draft->name_length == length &&
            !memcmp(draft->name, name, length))
            return draft;
    }
    return NULL;
}

/* NULL: there are too many, or no number is left. */
static Draft *take_draft(Door *door, uint32_t flags)
{
    for (uint32_t i = 0; i < DRAFTS && door->next_number < door->last_number; i++) {
        if (door->drafts[i].fh)
            continue;
        Draft *draft = door->drafts + i;
        uint64_t serial = ++door->serial;
        memset(draft, 0, offsetof(Draft, name));
        draft->fh = HANDLE_MARK | DRAFT_MARK | (uint64_t)(flags & O_ACCMODE) << ACCESS_SHIFT | (serial & DRAFT_SERIAL_MASK) << 16 | i;
        draft->ino = door->next_number++;
        door->draft_end = door->draft_end > i + 1 ? door->draft_end : i + 1;
        door->draft_count++;
        return draft;
    }
    return NULL;
}

/* -- for the next daemon ------------------------------------------------------------------------------------------ */

static KeptDraft *kept_of(const Door *door, const Draft *draft)
{
    return door->kept_drafts ? door->kept_drafts + (draft - door->drafts) : NULL;
}

static void keep_draft(Door *door, const Draft *draft, uint64_t unique)
{
    KeptDraft *kept = kept_of(door, draft);
    if (!kept)
        return;
    kept->ino = draft->ino, kept->folder = draft->folder, kept->unique = unique, kept->place = kept->size = 0;
    kept->made_ns = draft->made_ns, kept->changed_ns = draft->changed_ns, kept->table = draft->table, kept->mode = draft->mode;
    kept->uid = draft->uid, kept->gid = draft->gid, kept->pid = draft->pid, kept->name_length = draft->name_length;
    memcpy(kept->name, draft->name, draft->name_length);
    __atomic_store_n(&kept->fh, draft->fh, __ATOMIC_SEQ_CST);
}

/* The draft has other memory, with all its bytes. */
static void keep_place(Door *door, const Draft *draft)
{
    KeptDraft *kept = kept_of(door, draft);
    if (kept)
        __atomic_store_n(&kept->place, (uint64_t)draft->arena->number << 32 | draft->offset / PAGE, __ATOMIC_SEQ_CST);
}

static void keep_size(Door *door, const Draft *draft)
{
    KeptDraft *kept = kept_of(door, draft);
    if (!kept)
        return;
    __atomic_store_n(&kept->changed_ns, draft->changed_ns, __ATOMIC_SEQ_CST);
    __atomic_store_n(&kept->size, draft->size, __ATOMIC_SEQ_CST);
}

static void end_kept_draft(Door *door, const Draft *draft)
{
    KeptDraft *kept = kept_of(door, draft);
    if (kept)
        __atomic_store_n(&kept->fh, 0, __ATOMIC_SEQ_CST);
}

/* The arena of a kept draft. NULL: the row is damaged, or its bytes are not there any more. */
static Arena *sound_arena(Door *door, const KeptDraft *kept)
{
    Arena *arena = arena_of(door->core, (uint32_t)(kept->place >> 32));
    uint64_t offset = (kept->place & UINT32_MAX) * PAGE;
    if (!arena || arena->state == SPARE || arena->table != (int)kept->table || kept->size > arena->size ||
        offset + padded(kept->size) > arena->tail->used || arena->tail->used > arena->size)
        return NULL;
    return arena;
}

/* Go on with drafts of the former daemon, for Python to take them over; see `next_taken`. */
static void restore_drafts(Door *door)
{
    for (uint32_t i = 0; i < DRAFTS; i++) {
        KeptDraft kept = door->kept_drafts[i];
        const uint64_t marks = HANDLE_MARK | DRAFT_MARK;
        const Table *table = door->core->tables + kept.table % TABLES;
        Arena *arena = kept.size ? sound_arena(door, &kept) : NULL;
        if ((kept.fh & marks) != marks || (kept.fh & (HANDLES_MAX - 1)) != i || !kept.ino || kept.table >= TABLES ||
            !table->is_known || table->is_ended || table->index.header->directory != kept.folder || kept.mode & ~0777u ||
            !is_plain_name(kept.name, kept.name_length) || (kept.size && !arena)) {
            door->kept_drafts[i].fh = 0;
            continue;
        }
        Draft *draft = door->drafts + i;
        *draft = (Draft){.fh = kept.fh, .ino = kept.ino, .folder = kept.folder, .size = kept.size, .room = padded(kept.size),
                         .offset = (kept.place & UINT32_MAX) * PAGE, .arena = arena, .made_ns = kept.made_ns,
                         .changed_ns = kept.changed_ns, .table = kept.table, .mode = kept.mode, .uid = kept.uid,
                         .gid = kept.gid, .pid = kept.pid, .is_taken = 1, .name_length = kept.name_length};
        memcpy(draft->name, kept.name, kept.name_length);
        if (arena)
            pin_content(door, arena);
        door->draft_end = i + 1, door->draft_count++;
    }
}

static void give_draft(Door *door, Draft *draft)
{
    end_kept_draft(door, draft);
    if (draft->arena)
        unpin_content(door, draft->arena);
    draft->fh = 0, draft->arena = NULL;
    door->draft_count--;
    while (door->draft_end && !door->drafts[door->draft_end - 1].fh)
        door->draft_end--;
}

static void note_decision(Door *door, uint64_t ino, uint64_t other, uint64_t unique);

/* As `Sketch` has it. */
static void fill_draft(const Draft *draft, struct fuse_attr *attr)
{
    *attr = (struct fuse_attr){.ino = draft->ino, .size = draft->size, .blocks = padded(draft->size) / 512, .nlink = 1,
                               .mode = S_IFREG | draft->mode, .uid = draft->uid, .gid = draft->gid, .blksize = PAGE};
    set_time(draft->made_ns, &attr->atime, &attr->atimensec);
    set_time(draft->changed_ns, &attr->mtime, &attr->mtimensec);
    set_time(draft->changed_ns, &attr->ctime, &attr->ctimensec);
}

/* The table of a folder that blocks of this owner and mode come to, or -1. */
static int table_for_writer(const Door *door, const Folder *folder, uint32_t uid, uint32_t gid, uint32_t mode)
{
    for (int i = 0; i < folder->count; i++) {
        const Table *table = door->core->tables + folder->tables[i];
        const TableHeader *header = table->index.header;
        if (table->is_known && !table->is_ended && header->directory == folder->ino && header->uid == uid && header->gid == gid &&
            header->mode == mode)
            return folder->tables[i];
    }
    return -1;
}

static uint64_t answer_create(Door *door, const Request *asked)
{
    const struct fuse_create_in *in = asked->body;
    if (asked->size < sizeof *in)
        return 0;
    const uint8_t *name = (const uint8_t *)(in + 1);
    size_t rest = asked->size - sizeof *in, length = strnlen((const char *)name, rest);
    uint32_t mode = in->mode & 07777 & ~in->umask;
    if (length == rest || length > NAME_MAX_BYTES || !is_plain_name(name, length) || mode & ~0777u || in->flags & O_DIRECT ||
        (length >= sizeof HELD_BACK - 1 && !memcmp(name, HELD_BACK, sizeof HELD_BACK - 1)))
        return 0;
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } out = {.open.open_flags = FOPEN_KEEP_CACHE};
    uint32_t uid = asked->in->uid, gid = asked->in->gid, place, row;
    lock(door->core);
    Folder *folder = (Folder *)find_folder(door, asked->in->nodeid);
    int table = folder && folder->is_writable ? table_for_writer(door, folder, uid, gid, mode) : -1;
    Draft *draft = NULL;
    if (table >= 0 && !draft_of_name(door, folder->ino, name, length) && !find_block(door, folder, name, length, &place, &row))
        draft = take_draft(door, in->flags);
    if (draft) {
        draft->folder = folder->ino, draft->table = (uint32_t)table, draft->mode = mode, draft->uid = uid, draft->gid = gid;
        draft->pid = asked->in->pid, draft->name_length = (uint8_t)length;
        memcpy(draft->name, name, length);
        draft->made_ns = draft->changed_ns = coarse_time();
        fill_draft(draft, &out.entry.attr);
        out.entry.nodeid = draft->ino, out.open.fh = draft->fh;
        note_decision(door, draft->ino, 0, asked->in->unique);
        keep_draft(door, draft, asked->in->unique);
        note_name(door, MADE, folder->ino, name, length);
        note_change(door, folder);
    }
    unlock(door->core);
    if (!draft)
        return 0;
    split_seconds(door->attr_timeout, &out.entry.attr_valid, &out.entry.attr_valid_nsec);
    reply(asked, 0, &out, sizeof out);
    return out.entry.nodeid;
}

/* Memory for so many bytes of a draft: behind those that it has, if nobody else's are there; else in another place, for
   twice as many. 0: there is none now. */
static int has_room(Door *door, Draft *draft, uint64_t end)
{
    Core *core = door->core;
    Table *table = core->tables + draft->table;
    Arena *arena = draft->arena;
    if (end <= draft->room)
        return 1;
    if (table->is_ended)
        return 0;
    uint64_t more = padded(end) - draft->room;
    if (arena && arena->state == FILLING && arena->tail->used == draft->offset + draft->room && room_in(arena) >= more) {
        __atomic_store_n(&arena->tail->used, arena->tail->used + more, __ATOMIC_SEQ_CST);
        draft->room += more;
        return 1;
    }
    uint64_t wanted = padded(arena ? 2 * end : end), offset;
    Note *note;
    if (wanted > door->block_max)
        wanted = padded(end);
    Arena *other = take_memory(core, table, (uint32_t)wanted, draft->name_length, &offset, &note);
    if (!other)
        return 0;
    unpin(other);
    if (!may_pin(door, other))
        return 0;
    pin_content(door, other);
    if (arena) {
        memcpy(other->base + offset, arena->base + draft->offset, draft->size);
        unpin_content(door, arena);
    }
    draft->arena = other, draft->offset = offset, draft->room = wanted, draft->note = note;
    keep_place(door, draft);
    return 1;
}

static uint64_t answer_write(Door *door, const Request *asked)
{
    const struct fuse_write_in *in = asked->body;
    if (asked->size < sizeof *in || asked->size - sizeof *in < in->size || !in->size || in->write_flags & FUSE_WRITE_CACHE)
        return 0;
    uint64_t end = in->offset + in->size;
    lock(door->core);
    Draft *draft = draft_of_handle(door, in->fh, asked->in->nodeid);
    if (!draft || draft->is_settled || in->offset > draft->size || end < in->offset || end > door->block_max ||
        !has_room(door, draft, end)) {
        unlock(door->core);
        return 0;
    }
    draft->is_busy = 1;
    uint8_t *target = draft->arena->base + draft->offset + in->offset;
    int is_first = !in->offset && !draft->size, is_next = in->offset == draft->size && draft->has_checksum;
    uint32_t checksum = draft->checksum;
    unlock(door->core);
    if (is_first)
        checksum = copy_granule(target, (const uint8_t *)(in + 1), in->size);
    else {
        memcpy(target, in + 1, in->size);
        if (is_next)
            checksum = checksum_of(checksum, target, in->size);
    }
    lock(door->core);
    draft->checksum = checksum, draft->has_checksum = (uint8_t)(is_first || is_next);
    draft->size = draft->size > end ? draft->size : end;
    draft->changed_ns = coarse_time();
    keep_size(door, draft);
    draft->is_busy = 0;
    door->written_bytes += in->size;
    unlock(door->core);
    struct fuse_write_out out = {.size = in->size};
    reply(asked, 0, &out, sizeof out);
    return 1;
}

/* No other table of its folder has a block of this name. */
static int is_alone(Door *door, const Folder *folder, uint32_t table, Fingerprint name)
{
    for (int i = 0; i < folder->count; i++)
        if (folder->tables[i] != table && find_row(&door->core->tables[folder->tables[i]].index, name) >= 0)
            return 0;
    return 1;
}

static PutTerms terms_now(const Door *door, const Table *table, uint64_t folder)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (PutTerms){.now_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000 - (uint64_t)door->lag_ns / 1000,
                      .directory = folder, .now = now_in(table), .priority = PRIORITY};
}

/* Make a draft the block of its name. 0: Python has to. */
static int settle_draft(Door *door, Draft *draft)
{
    Core *core = door->core;
    Table *table = core->tables + draft->table;
    const Folder *folder = find_folder(door, draft->folder);
    Arena *arena = draft->arena;
    if (!folder || !folder->is_writable || table->is_ended || arena->state == SEALED)
        return 0;
    Plan plan = {.length = (uint32_t)draft->size, .checksum = draft->checksum, .name_length = draft->name_length,
                 .arena = arena, .note = draft->note, .offset = draft->offset};
    memcpy(plan.name, draft->name, draft->name_length);
    plan.fingerprint = fingerprint_of(table->index.multipliers, draft->folder, plan.name, plan.name_length);
    if (is_held(door, mix(HELD_NAME, plan.fingerprint.low, plan.fingerprint.high)) ||
        !is_alone(door, folder, draft->table, plan.fingerprint) || plan_put(core, table, &plan))
        return 0;
    if (arena->tail->used == draft->offset + draft->room)
        __atomic_store_n(&arena->tail->used, draft->offset + padded(draft->size), __ATOMIC_SEQ_CST);
    memcpy(name_in(plan.note), plan.name, plan.name_length);
    PutTerms terms = terms_now(door, table, draft->folder);
    terms.shown_us = (uint64_t)draft->changed_ns / 1000;
    uint64_t sequence;
    arena->pins++; /* for the plan, which lets go of it */
    int64_t row = publish(core, table, &plan, &terms, &sequence);
    if (row < 0) {
        undo_plan(core, table, &plan);
        return 0;
    }
    unpin_content(door, arena);
    draft->arena = NULL, draft->is_settled = 1;
    note_written(door, draft->ino, draft->table, (uint32_t)row, sequence);
    end_kept_draft(door, draft);
    note_put(door, draft->table, row, draft->size);
    return 1;
}

static uint64_t answer_flush(Door *door, const Request *asked)
{
    const struct fuse_flush_in *in = asked->body;
    if (asked->size < sizeof *in)
        return 0;
    lock(door->core);
    Draft *draft = draft_of_handle(door, in->fh, asked->in->nodeid);
    uint64_t is_done = draft && draft->is_settled && !draft->is_shared;
    if (draft && !is_done && !draft->is_settled && draft->size) {
        uint8_t *content = draft->arena->base + draft->offset;
        uint64_t size = draft->size;
        int has_checksum = draft->has_checksum;
        uint32_t checksum = draft->checksum;
        draft->is_busy = 1;
        unlock(door->core);
        memset(content + size, 0, padded(size) - size);
        if (!has_checksum)
            checksum = checksum_of(0, content, (int64_t)size);
        lock(door->core);
        draft->checksum = checksum, draft->has_checksum = 1, draft->is_busy = 0;
        is_done = (uint64_t)settle_draft(door, draft);
    }
    unlock(door->core);
    if (is_done)
        reply(asked, 0, NULL, 0);
    return is_done;
}

/* The handle of a draft is closed. As `answer_release`. */
static int release_draft(Door *door, const Request *asked, uint64_t fh)
{
    lock(door->core);
    Draft *draft = draft_of_handle(door, fh, asked->in->nodeid);
    int is_ours = draft && draft->is_settled && !draft->is_shared;
    if (draft && draft->is_settled)
        give_draft(door, draft);
    unlock(door->core);
    if (is_ours)
        reply(asked, 0, NULL, 0);
    return is_ours;
}

/* -- names -------------------------------------------------------------------------------------------------------- */

/* What a change of names is about to do, for the next daemon: as `Decisions` of idempotent_changes.py has it. */
static void note_decision(Door *door, uint64_t ino, uint64_t other, uint64_t unique)
{
    if (!door->decision_count)
        return;
    volatile uint64_t *row = door->decisions + 3 * (door->decision_next++ % door->decision_count);
    __atomic_store_n(row + 2, 0, __ATOMIC_SEQ_CST);
    row[0] = ino, row[1] = other;
    __atomic_store_n(row + 2, unique, __ATOMIC_SEQ_CST);
}

/* A block of a folder gets another name there. */
static uint64_t answer_rename(Door *door, const Request *asked)
{
    uint64_t new_folder = 0;
    uint32_t flags = 0;
    size_t head = asked->in->opcode == FUSE_RENAME2 ? sizeof(struct fuse_rename2_in) : sizeof(struct fuse_rename_in);
    if (asked->size < head)
        return 0;
    memcpy(&new_folder, asked->body, sizeof new_folder);
    if (asked->in->opcode == FUSE_RENAME2)
        flags = ((const struct fuse_rename2_in *)asked->body)->flags;
    const uint8_t *name = (const uint8_t *)asked->body + head;
    size_t rest = asked->size - head, length = strnlen((const char *)name, rest);
    if (flags || new_folder != asked->in->nodeid || length == rest)
        return 0;
    const uint8_t *other = name + length + 1;
    size_t other_length = strnlen((const char *)other, rest - length - 1);
    if (other_length == rest - length - 1 || length > NAME_MAX_BYTES || other_length > NAME_MAX_BYTES ||
        !is_plain_name(name, length) || !is_plain_name(other, other_length) || (length == other_length && !memcmp(name, other, length)) ||
        (other_length >= sizeof HELD_BACK - 1 && !memcmp(other, HELD_BACK, sizeof HELD_BACK - 1)))
        return 0;
    Core *core = door->core;
    uint32_t place, row, other_place, other_row;
    int64_t made = -1;
    lock(core);
    Folder *folder = (Folder *)find_folder(door, new_folder);
    if (folder && folder->is_writable && !draft_of_name(door, folder->ino, name, length) &&
        !draft_of_name(door, folder->ino, other, other_length) &&
        find_block(door, folder, name, length, &place, &row) > 0) {
        Table *table = core->tables + place;
        Row *source = table->index.rows + row;
        uint64_t before = source->sequence, sequence, number = number_of_block(door, place, row, before), replaced = 0;
        Plan plan = {.name_length = (uint8_t)other_length};
        memcpy(plan.name, other, other_length);
        plan.fingerprint = fingerprint_of(table->index.multipliers, folder->ino, plan.name, plan.name_length);
        int found = find_block(door, folder, other, other_length, &other_place, &other_row);
        if (found > 0)
            replaced = number_of_block(door, other_place, other_row, core->tables[other_place].index.rows[other_row].sequence);
        if (found >= 0 && is_alone(door, folder, place, plan.fingerprint) && !is_held(door, mix(HELD_INODE, number, 0)) &&
            !(replaced && is_held(door, mix(HELD_INODE, replaced, 0)))) {
            PutTerms terms = terms_now(door, table, folder->ino);
            note_decision(door, number, replaced, asked->in->unique);
            made = rename_block(core, table, row, before, &plan, &terms, &sequence);
            if (made >= 0) {
                note_written(door, number, place, (uint32_t)made, sequence);
                note_put(door, place, made, 0);
                note_change(door, folder);
                Draft *draft = draft_of_number(door, number);
                if (draft) {
                    draft->name_length = plan.name_length;
                    memcpy(draft->name, plan.name, plan.name_length);
                }
            }
        }
    }
    unlock(core);
    if (made < 0)
        return 0;
    reply(asked, 0, NULL, 0);
    return 1;
}

/* -- what Python takes over --------------------------------------------------------------------------------------- */

static void take_back_all(Door *door)
{
    lock(door->core);
    for (Folder *folder = door->folders; folder < door->folders + FOLDERS; folder++)
        folder->until = 0;
    unlock(door->core);
}

/* Mark what Python has to take over before it handles a request: it gets these by `next_taken`. Returns whether there is any,
   or the times of a folder are to be told. The event loop's thread. */
static int take_over(void *of, const void *request, size_t size)
{
    Door *door = of;
    const struct fuse_in_header *in = request;
    const uint8_t *body = (const uint8_t *)(in + 1), *names[2] = {NULL, NULL};
    uint64_t folders[2] = {in->nodeid, in->nodeid};
    size_t rest = size - sizeof *in, head = 0, lengths[2] = {0, 0};
    int is_any = 0, is_listing = 0;
    if (in->opcode == FUSE_SETXATTR || in->opcode == FUSE_REMOVEXATTR || in->opcode == FUSE_SETATTR)
        take_back_all(door); /* what may be done in folders may be another thing after that */
    if (!door->draft_count && !door->has_changed)
        return 0;
    switch (in->opcode) {
    case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: case FUSE_INIT: case FUSE_STATFS: case FUSE_DESTROY:
        return 0;
    case FUSE_OPENDIR: case FUSE_READDIR: case FUSE_READDIRPLUS:
        is_listing = 1;
        break;
    case FUSE_CREATE: head = sizeof(struct fuse_create_in); break;
    case FUSE_MKNOD: head = sizeof(struct fuse_mknod_in); break;
    case FUSE_MKDIR: head = sizeof(struct fuse_mkdir_in); break;
    case FUSE_LINK: head = sizeof(struct fuse_link_in); break;
    case FUSE_RENAME: head = sizeof(struct fuse_rename_in); break;
    case FUSE_RENAME2: head = sizeof(struct fuse_rename2_in); break;
    case FUSE_LOOKUP: case FUSE_UNLINK: case FUSE_RMDIR: case FUSE_SYMLINK: break;
    default: head = SIZE_MAX;
    }
    uint64_t number = in->opcode == FUSE_LINK && rest >= 8 ? *(const uint64_t *)body : in->nodeid;
    if (head != SIZE_MAX && !is_listing && rest > head) {
        names[0] = body + head;
        lengths[0] = strnlen((const char *)names[0], rest - head);
        size_t used = head + lengths[0] + 1;
        if ((in->opcode == FUSE_RENAME || in->opcode == FUSE_RENAME2) && used < rest) {
            names[1] = body + used;
            lengths[1] = strnlen((const char *)names[1], rest - used);
            memcpy(folders + 1, body, sizeof *folders);
        }
    }
    lock(door->core);
    for (uint32_t i = 0; i < door->draft_end; i++) {
        Draft *draft = door->drafts + i;
        uint64_t fh = draft->fh;
        if (!fh || !wait_for_draft(door, draft, fh))
            continue;
        int is_meant = draft->ino == number || (is_listing && draft->folder == in->nodeid);
        for (int n = 0; n < 2 && !is_meant; n++)
            is_meant = names[n] && draft->folder == folders[n] && draft->name_length == lengths[n] &&
                       !memcmp(draft->name, names[n], lengths[n]);
        if (is_meant && draft->is_settled && draft->ino == number)
            draft->is_shared = 1;
        if (is_meant && !draft->is_settled)
            draft->is_taken = is_any = 1;
    }
    const Folder *folder = folder_place(door, in->nodeid);
    is_any |= folder->ino == in->nodeid && folder->changed;
    unlock(door->core);
    return is_any;
}

#endif
