/* CRC32C of memory, and copies with their checksum. Included by the C modules of this folder, each of which calls
   crc32c_begin() once before any other function here. */

#ifndef KVFUSE_CRC32C_H
#define KVFUSE_CRC32C_H

#include <stdint.h>
#include <string.h>

enum { LONG = 8192, SHORT = 256 };

#if defined(__x86_64__)

/* What so many zero bytes make of a register of CRC32C, by each byte of it: three runs of bytes are summed side by side,
   as an instruction takes three cycles and one can begin in each. */
static uint32_t over_long[4][256], over_short[4][256];

__attribute__((target("sse4.2"))) static void fill_table(uint32_t table[4][256], int zeros)
{
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) {
        uint64_t sum = (uint64_t)1 << bit;
        for (int i = 0; i < zeros; i += 8)
            sum = __builtin_ia32_crc32di(sum, 0);
        bits[bit] = (uint32_t)sum;
    }
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            table[byte][value] = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1)
                    table[byte][value] ^= bits[8 * byte + bit];
        }
}

static uint64_t over_zeros(uint32_t table[4][256], uint64_t sum)
{
    return table[0][sum & 255] ^ table[1][sum >> 8 & 255] ^ table[2][sum >> 16 & 255] ^ table[3][sum >> 24 & 255];
}

static uint64_t word_at(const uint8_t *place)
{
    uint64_t word;
    memcpy(&word, place, 8);
    return word;
}

__attribute__((target("sse4.2"))) static uint64_t sum_runs(uint64_t sum, const uint8_t *place, int run,
                                                           uint32_t table[4][256])
{
    uint64_t second = 0, third = 0;
    for (int i = 0; i < run; i += 8) {
        sum = __builtin_ia32_crc32di(sum, word_at(place + i));
        second = __builtin_ia32_crc32di(second, word_at(place + run + i));
        third = __builtin_ia32_crc32di(third, word_at(place + 2 * run + i));
    }
    return over_zeros(table, over_zeros(table, sum) ^ second) ^ third;
}

__attribute__((target("sse4.2"))) static uint32_t checksum_on(uint32_t checksum, const uint8_t *place, int64_t length)
{
    uint64_t sum = checksum ^ 0xFFFFFFFF;
    for (; length >= 3 * LONG; length -= 3 * LONG, place += 3 * LONG)
        sum = sum_runs(sum, place, LONG, over_long);
    for (; length >= 3 * SHORT; length -= 3 * SHORT, place += 3 * SHORT)
        sum = sum_runs(sum, place, SHORT, over_short);
    for (; length >= 8; length -= 8, place += 8)
        sum = __builtin_ia32_crc32di(sum, word_at(place));
    for (; length; length--, place++)
        sum = __builtin_ia32_crc32qi((uint32_t)sum, *place);
    return (uint32_t)sum ^ 0xFFFFFFFF;
}

/* 0: this processor has no instruction for it; the twin is faster than any loop here would be. */
static int can_copy(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2"))
        return 0;
    fill_table(over_long, LONG);
    fill_table(over_short, SHORT);
    return 1;
}

#else

static int can_copy(void)
{
    return 0;
}

#endif

/* -- any processor ------------------------------------------------------------------------------------------------ */

static uint32_t crc_bytes[8][256];

static void fill_crc_bytes(void)
{
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t sum = value;
        for (int bit = 0; bit < 8; bit++)
            sum = sum & 1 ? sum >> 1 ^ 0x82F63B78u : sum >> 1;
        crc_bytes[0][value] = sum;
    }
    for (int step = 1; step < 8; step++)
        for (int value = 0; value < 256; value++)
            crc_bytes[step][value] = crc_bytes[step - 1][value] >> 8 ^ crc_bytes[0][crc_bytes[step - 1][value] & 255];
}

static uint32_t checksum_by_table(uint32_t checksum, const uint8_t *place, int64_t length)
{
    uint32_t sum = checksum ^ 0xFFFFFFFF;
    for (; length >= 8; length -= 8, place += 8) {
        uint32_t low = sum ^ (place[0] | (uint32_t)place[1] << 8 | (uint32_t)place[2] << 16 | (uint32_t)place[3] << 24);
        sum = crc_bytes[7][low & 255] ^ crc_bytes[6][low >> 8 & 255] ^ crc_bytes[5][low >> 16 & 255] ^
              crc_bytes[4][low >> 24] ^ crc_bytes[3][place[4]] ^ crc_bytes[2][place[5]] ^ crc_bytes[1][place[6]] ^
              crc_bytes[0][place[7]];
    }
    for (; length; length--, place++)
        sum = sum >> 8 ^ crc_bytes[0][(sum ^ *place) & 255];
    return sum ^ 0xFFFFFFFF;
}

static int has_instruction;

/* Before any checksum. 1: this processor has an instruction for it. */
static int crc32c_begin(void)
{
    fill_crc_bytes();
    return has_instruction = can_copy();
}

static uint32_t checksum_of(uint32_t checksum, const uint8_t *place, int64_t length)
{
#if defined(__x86_64__)
    if (has_instruction)
        return checksum_on(checksum, place, length);
#endif
    return checksum_by_table(checksum, place, length);
}
/* The checksum is that of the copy: the source may change meanwhile. Its bytes are in the cache when they are summed. */
static inline uint32_t copy_granule(uint8_t *target, const uint8_t *source, int64_t length)
{
    uint32_t checksum = 0;
    while (length) {
        int64_t part = length < 3 * LONG ? length : 3 * LONG;
        memcpy(target, source, (size_t)part);
        checksum = checksum_of(checksum, target, part);
        target += part, source += part, length -= part;
    }
    return checksum;
}


#endif
