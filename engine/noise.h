/* Gumbel noise G(key, token) as engine/noise.py defines it: times of arrival in blocks of 64 consecutive tokens. */
#ifndef NOISE_H
#define NOISE_H

#include <math.h>
#include <stdint.h>

enum { BLOCK_LEN = 64 };

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static inline uint64_t output(uint64_t key, uint64_t counter) { return mix(key + counter * 0x9E3779B97F4A7C15u); }
static inline uint64_t noise_key(uint64_t seed, int64_t position) { return output(output(seed, 1), (uint64_t)position); }
static inline double exponential(uint64_t bits) { return -log(((double)(bits >> 32) + 0.5) / 4294967296.0); }
static inline uint64_t block_bits(uint64_t key, int64_t block) { return output(key, (1ull << 32) + (uint64_t)block); }

/* Of a token; ``bits`` are those of its block. A value of a float. */
static inline double noise(uint64_t key, int64_t token_id, uint64_t bits) {
    double arrival = exponential(bits) / BLOCK_LEN;
    if ((int64_t)(bits % BLOCK_LEN) != token_id % BLOCK_LEN) arrival += exponential(output(key, (uint64_t)token_id));
    return (float)-log(arrival);
}

#endif
