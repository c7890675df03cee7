/* What the block store lends to who sends its blocks to other hosts, and takes from who receives theirs: between blocks.c
   and _peers.c, whose threads have no interpreter. The bytes of a loan stay until it is given back. */

#ifndef KVFUSE_LENDING_H
#define KVFUSE_LENDING_H

#include <stdint.h>

/* Of a question: a whole block, by the address and generation of its slot, and what `peer_wire.BLOCK_QUESTION` says. */
typedef struct {
    uint64_t address, generation;
    uint32_t length, flags;
    uint64_t without;
} WantedRow;

/* LENT_BRIEFLY: so many arenas are lent already that this one is to be copied from, and given back at once. */
enum { NOT_HERE, ON_ITS_WAY, LENT, LENT_BRIEFLY };

typedef struct {
    const uint8_t *bytes;
    uint32_t arena; /* its index */
    int state;
} Loan;

typedef struct {
    void *core;
    uint64_t (*lend)(void *core, const WantedRow *rows, Loan *loans, uint32_t count); /* how many batches have landed so far */
    void (*give_back)(void *core, Loan *loans, uint32_t count);
    void (*wait)(void *core, uint64_t landed, int64_t until_ns); /* until more have landed, or until a time of CLOCK_MONOTONIC */
} Lender;

/* Memory that was reserved for blocks: one with this checksum has come to its place. */
typedef struct {
    void *landing;
    void (*land)(void *landing, uint32_t place, uint32_t checksum);
} LandingWay;

_Static_assert(sizeof(WantedRow) == 32, "a row of a question has 32 bytes");

#endif
