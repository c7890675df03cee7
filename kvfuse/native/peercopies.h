/* Who has copies of a host's blocks, so that hot ones spread and their writer need not serve all who want them.

   A host remembers who fetched what from it, or was sent elsewhere for it: who asks then is sent to one of them, which
   waits for the block if that is still on its way to it. The host itself sends a block `OWN_COPIES` times, and each of the
   others twice, those first that have had it longest; then all of them more, those first that have least to do. */

#ifndef KVFUSE_PEERCOPIES_H
#define KVFUSE_PEERCOPIES_H

#include "peerwire.h"

enum { SETS = 1 << 14, WAYS = 4, HOLDERS_MAX = 8, CLIENTS_MAX = 1024, OWN_COPIES = 2, COPIES = 2, LOAD_STEP = 4 << 20 };

typedef struct {
    uint64_t client, load; /* bytes that it has still to send, as it last told */
    int is_listed;         /* others can ask it */
} Client;

typedef struct {
    uint64_t address, generation, used;
    uint32_t own_count, count;
    struct Holder {
        uint64_t client;
        uint32_t chosen; /* how often others were sent to it */
    } holders[HOLDERS_MAX];
} Copies;

typedef struct {
    pthread_mutex_t lock;
    Copies *all;
    Client clients[CLIENTS_MAX];
    uint32_t client_count;
    uint64_t turn, load; /* ``load``: bytes that this host has still to send; changed by atomic operations */
} Spread;

static Client *client_of(Spread *spread, uint64_t client, int make)
{
    for (uint32_t i = 0; i < spread->client_count; i++)
        if (spread->clients[i].client == client)
            return spread->clients + i;
    if (!make || spread->client_count == CLIENTS_MAX)
        return NULL;
    spread->clients[spread->client_count] = (Client){client, 0, 0};
    return spread->clients + spread->client_count++;
}

static void tell_load(Spread *spread, uint64_t client, uint64_t load)
{
    pthread_mutex_lock(&spread->lock);
    Client *found = client_of(spread, client, 1);
    if (found)
        found->load = load;
    pthread_mutex_unlock(&spread->lock);
}

/* What is remembered of a block; of those in the same place the one that nobody asked for longest is forgotten. */
static Copies *copies_of(Spread *spread, uint64_t address, uint64_t generation, int make)
{
    uint64_t hash = (address ^ generation * 0xD6E8FEB86659FD93ull) * 0x9E3779B97F4A7C15ull;
    Copies *set = spread->all + (hash >> 32) % SETS * WAYS, *oldest = set;
    for (Copies *one = set; one < set + WAYS; one++) {
        if (one->used && one->address == address && one->generation == generation) {
            one->used = ++spread->turn;
            return one;
        }
        oldest = one->used < oldest->used ? one : oldest;
    }
    if (!make)
        return NULL;
    *oldest = (Copies){address, generation, ++spread->turn, 0, 0, {{0, 0}}};
    return oldest;
}

static void forget_holder(Spread *spread, uint64_t address, uint64_t generation, uint64_t client)
{
    pthread_mutex_lock(&spread->lock);
    Copies *copies = copies_of(spread, address, generation, 0);
    for (uint32_t i = 0; copies && i < copies->count; i++)
        if (copies->holders[i].client == client) {
            memmove(copies->holders + i, copies->holders + i + 1, (--copies->count - i) * sizeof *copies->holders);
            break;
        }
    pthread_mutex_unlock(&spread->lock);
}

static void note_holder(Copies *copies, uint64_t client)
{
    struct Holder *place = copies->holders, *end = place + copies->count;
    for (struct Holder *one = copies->holders; one < end; one++) {
        if (one->client == client)
            return;
        place = one->chosen > place->chosen ? one : place;
    }
    if (copies->count == HOLDERS_MAX) { /* who was chosen most has done its part */
        memmove(place, place + 1, (size_t)(end - place - 1) * sizeof *place);
        copies->count--;
    }
    copies->holders[copies->count++] = (struct Holder){client, 0};
}

/* Whom the caller is to ask for a block: up to three, the best first. 0: this host, if it ``is_here``. Who is sent there, or
   answered here, has it a moment later. ``is_final``: nobody else is to be asked. */
static uint32_t choose_holders(Spread *spread, uint64_t address, uint64_t generation, uint64_t caller, int is_here,
                               int is_final, uint64_t *named)
{
    uint32_t found = 0;
    pthread_mutex_lock(&spread->lock);
    const Client *asking = client_of(spread, caller, 0);
    Copies *copies = copies_of(spread, address, generation, is_here);
    uint64_t costs[NAMED_MAX], own_load = __atomic_load_n(&spread->load, __ATOMIC_RELAXED);
    struct Holder *best = NULL;
    int may_be_others = copies && !is_final && (!is_here || copies->own_count >= OWN_COPIES);
    for (uint32_t i = 0; may_be_others && i < copies->count; i++) {
        struct Holder *one = copies->holders + i;
        const Client *client = client_of(spread, one->client, 0);
        if (one->client == caller || !client || !client->is_listed)
            continue;
        uint64_t cost = client->load / LOAD_STEP + one->chosen / COPIES;
        uint32_t place = found;
        while (place && costs[place - 1] > cost)
            place--;
        if (place == NAMED_MAX)
            continue;
        found += found < NAMED_MAX;
        for (uint32_t k = found - 1; k > place; k--)
            costs[k] = costs[k - 1], named[k] = named[k - 1];
        costs[place] = cost, named[place] = one->client;
        best = place ? best : one;
    }
    if (found && is_here && own_load / LOAD_STEP + copies->own_count / OWN_COPIES < costs[0])
        found = 0;
    if (found)
        best->chosen++;
    else if (is_here)
        copies->own_count++;
    if ((found || is_here) && asking && asking->is_listed)
        note_holder(copies, caller);
    pthread_mutex_unlock(&spread->lock);
    return found;
}

#endif
