/* Blocks that are in memory, for threads that send them to other hosts: see lending.h. */

#ifndef KVFUSE_BLOCKLEND_H
#define KVFUSE_BLOCKLEND_H

#include "blockcore.h"
#include "lending.h"

/* The slot that begins at an address of the volume. 0: none does, or nobody knows how its slab is cut. */
static int slot_at(const Core *core, uint64_t address, uint32_t *slab, uint32_t *slot)
{
    uint64_t number = address / core->slab_size, offset = address % core->slab_size;
    if (number >= core->slab_count)
        return 0;
    const Slab *own = core->slabs + number;
    const Foreign *foreign = core->foreign + number;
    uint32_t slot_size = own->owners ? core->classes[own->class].slot_size : foreign->slot_size;
    uint32_t lead = own->owners ? own->lead : foreign->lead, count = own->owners ? own->count : foreign->count;
    if (!slot_size || offset % slot_size || offset / slot_size < lead || offset / slot_size - lead >= count)
        return 0;
    *slab = (uint32_t)number, *slot = (uint32_t)(offset / slot_size - lead);
    return own->owners || foreign->rows;
}

static int is_on_its_way(const Core *core, uint32_t slab, uint32_t slot, uint64_t sequence)
{
    for (const Landing *landing = core->landings; landing; landing = landing->next)
        for (int64_t i = 0; i < landing->count && !landing->table->is_ended; i++) {
            const struct Coming *one = landing->rows + i;
            const Row *row = landing->table->index.rows + one->row;
            if (one->arena && one->sequence == sequence && row->slab == slab && row->slot == slot)
                return 1;
        }
    return 0;
}

static uint64_t lend_rows(void *of, const WantedRow *rows, Loan *loans, uint32_t count)
{
    Core *core = of;
    lock(core);
    for (uint32_t i = 0; i < count; i++) {
        Table *table;
        uint32_t slab, slot, place;
        loans[i].state = NOT_HERE;
        if (!slot_at(core, rows[i].address, &slab, &slot))
            continue;
        const Row *row = row_in_slot(core, slab, slot, rows[i].generation, &table, &place);
        Arena *arena = row && row->length == rows[i].length && row->arena ? arena_of(core, row->arena) : NULL;
        if (!arena) {
            loans[i].state = row && is_on_its_way(core, slab, slot, rows[i].generation) ? ON_ITS_WAY : NOT_HERE;
            continue;
        }
        uint32_t number = (uint32_t)(arena - core->arenas);
        int is_brief = !core->lent[number] && core->lent_count >= core->lent_max;
        loans[i] = (Loan){arena->base + (uint64_t)row->page * PAGE, number, is_brief ? LENT_BRIEFLY : LENT};
        arena->pins++;
        if (!is_brief)
            core->lent_count += !core->lent[number]++;
    }
    uint64_t landed = core->landed;
    unlock(core);
    return landed;
}

static void give_rows_back(void *of, Loan *loans, uint32_t count)
{
    Core *core = of;
    lock(core);
    for (uint32_t i = 0; i < count; i++) {
        if (loans[i].state < LENT)
            continue;
        unpin(core->arenas + loans[i].arena);
        if (loans[i].state == LENT)
            core->lent_count -= !--core->lent[loans[i].arena];
        loans[i].state = NOT_HERE;
    }
    unlock(core);
}

static void wait_for_landing(void *of, uint64_t landed, int64_t until_ns)
{
    Core *core = of;
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    int error = 0;
    lock(core);
    while (core->landed == landed && !error)
        error = pthread_cond_timedwait(&core->has_landed, &core->lock, &until);
    unlock(core);
}

#endif
