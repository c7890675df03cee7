/* Blocks that are compressed in their slots. Python compresses blocks of a batch before it is written (`Batch.pack`).

   A put takes a slot for the bytes as they are: it does not wait for a compressor, and quotas hold whatever comes of it. The
   batch that writes the block moves it to a smaller slot, if there is one that its compressed bytes fit into. Its row
   names the new place by one store. So a daemon that is killed leaves the block in memory and in one of the two slots; the
   other one is no row's. In the smaller slot it has to be compressed again, as it is not written yet. */

#ifndef KVFUSE_BLOCKPACK_H
#define KVFUSE_BLOCKPACK_H

#include "blockcore.h"

typedef struct {
    uint64_t number, offset; /* of the block in its batch; of the compressed bytes in the buffer, filled up to a page */
    uint64_t size;           /* of these; 0: they are no fewer */
} Packed;

_Static_assert(offsetof(Row, slot) == offsetof(Row, slab) + 4 && offsetof(Row, packed) == offsetof(Row, slab) + 6 &&
                   __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the place of a row is one word");

static void set_place(Row *row, uint32_t slab, uint32_t slot, uint32_t pages)
{
    uint64_t word = slab | (uint64_t)slot << 32 | (uint64_t)pages << 48;
    __atomic_store_n((uint64_t *)(void *)&row->slab, word, __ATOMIC_SEQ_CST);
}

/* Give a block that is being written another slot. 0: there is none, or no quota for it. */
static int move_block(Core *core, Table *table, Written *one, Row *row, uint32_t slot_size, uint32_t pages)
{
    uint32_t former_slab = row->slab, former_slot = row->slot;
    uint32_t former_size = core->classes[core->slabs[former_slab].class].slot_size;
    if (slot_size > former_size && !has_quota(core, table->space, slot_size - former_size))
        return 0;
    int64_t number = slab_with_room(core, slot_size);
    if (number < 0)
        return 0;
    note_gone(core, row, (Fingerprint){0, 0});
    uint32_t slot = take_slot(core->slabs + number);
    core->slabs[number].owners[slot] = core->slabs[former_slab].owners[former_slot];
    core->states[former_slab].has_stale = 1;
    set_place(row, (uint32_t)number, slot, pages);
    charge(core, table->space, (int64_t)slot_size - former_size, 0);
    free_slot(core, former_slab, former_slot, 0);
    one->slab = (uint32_t)number, one->slot = slot;
    one->head.slot_size = slot_size, one->head.incarnation = core->states[number].incarnation;
    return 1;
}

/* Have a block of a batch written compressed, or as it is. The bytes that this saves in slots. */
static int64_t pack_block(Core *core, Written *one, const Packed *packed, const uint8_t *buffer)
{
    Table *table = core->tables + one->table;
    Row *row = row_at(core, one->table, one->row);
    if (!(row->version & 1) || row->sequence != one->sequence)
        return 0; /* it was dropped: nobody will read it */
    uint32_t slot_size = core->classes[core->slabs[row->slab].class].slot_size;
    uint32_t plain = size_place(core, (uint32_t)padded(row->length)), size = (uint32_t)packed->size;
    size = size && packed->size < row->length && padded(size) < padded(row->length) ? size : 0;
    uint32_t least = size_place(core, (uint32_t)padded(size ? size : row->length));
    uint32_t wanted = least < core->size_count ? core->sizes[least] : slot_size;
    if (one->wants_packing == MAY_PACK) {
        if (!size || wanted >= slot_size || !move_block(core, table, one, row, wanted, (uint32_t)(padded(size) / PAGE)))
            return 0;
    } else if (padded(size ? size : row->length) <= slot_size) {
        set_place(row, row->slab, row->slot, (uint32_t)(padded(size) / PAGE));
    } else if (!move_block(core, table, one, row, wanted, (uint32_t)(padded(size) / PAGE))) {
        drop_row(core, table, one->row); /* another compressor needs more room for it, and there is none */
        return 0;
    }
    one->size = size ? size : row->length;
    one->head.packed = size, one->head.version = size ? PACKED_VERSION : HEAD_VERSION;
    if (size)
        one->data = buffer + packed->offset;
    uint32_t now = core->classes[core->slabs[row->slab].class].slot_size;
    return size && plain < core->size_count ? (int64_t)core->sizes[plain] - now : 0;
}

static void pack_batch(Core *core, Batch *batch, const Packed *packed, int64_t count, const uint8_t *buffer, int64_t *saved)
{
    for (int64_t i = 0; i < count; i++) {
        Written *one = packed[i].number < batch->count ? batch->rows + packed[i].number : NULL;
        saved[i] = one && one->data && one->wants_packing ? pack_block(core, one, packed + i, buffer) : 0;
        if (one)
            one->wants_packing = NO_PACKING; /* once */
    }
    add_due_heads(core, batch);
}

#endif
