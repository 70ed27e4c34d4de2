/* What the two kernels of attention share: operands, a tile of queries, and where keys and values lie. See attention.c. */
#pragma once
#include "bf16.h"
#include "operators.h"

#if KV_BF16 && __AVX512BF16__
#include <immintrin.h>
enum { STEP = PAIR }; /* dimensions or positions at once */
typedef bf16 operand;
typedef __m512bh Operands; /* of LANES keys, or dimensions, two each: of row ``a`` and of row ``b`` */

static inline Operands load_operands(const kv *a, const kv *b) {
    static const uint16_t turns[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
    const __m512i second = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)b));
    return (__m512bh)_mm512_permutex2var_epi16(first, _mm512_loadu_si512(turns), second);
}
static inline vf multiply_add(vf sum, Operands x, const operand *factors) {
    int32_t pair;
    memcpy(&pair, factors, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, x, (__m512bh)_mm512_set1_epi32(pair));
}
static inline void store_operands(operand *to, vf x) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, sizeof rounded);
}
#else
enum { STEP = 1 };
typedef float operand;
typedef vf Operands;

static inline Operands load_operands(const kv *a, const kv *b) {
    (void)b;
    return load_kv(a);
}
static inline vf multiply_add(vf sum, Operands x, const operand *factors) { return sum + x * *factors; }
static inline void store_operands(operand *to, vf x) { storef(to, x); }
#endif

static const kv NOTHING[4 * LANES];

/* With two vectors of sums for each, two of keys or values and a factor, the registers are full: 32, or 16. */
#if __AVX512F__ || __aarch64__
#define TILE 12
#elif __AVX2__
#define TILE 6
#else
#define TILE 4 /* a product takes a register without FMA */
#endif
enum { CHUNK = 512, MAX_D = 512, AHEAD = 4 };

typedef struct {
    union {
        operand by_step[MAX_D / STEP][TILE][STEP]; /* steps of dimensions, queries: for AVX-512, which takes a step at once */
        bf16 by_row[AMX_ROWS][MAX_D];              /* for AMX */
    } query;
    int64_t num_keys[AMX_ROWS]; /* of the chunk, that this query sees */
    float scores[AMX_ROWS][CHUNK];
    operand weights[AMX_ROWS][CHUNK]; /* of values: e^(score - max) */
    float max[AMX_ROWS], sum[AMX_ROWS]; /* over the chunks so far */
    float out[AMX_ROWS][MAX_D];         /* not yet divided by sum */
} Tile;

typedef struct {
    const kv *keys, *values;
    const int32_t *table;
    int64_t kv_head;
    const Shape *shape;
    int products_only;
} Context;

/* Where the KV head's part of the block of position t begins, in keys or values: D * B elements. */
static inline const kv *part(const Context *at, const kv *cache, int64_t t) {
    const int64_t size = at->shape->head_dim * at->shape->block_len;
    return cache + (at->table[t / at->shape->block_len] * at->shape->kv_heads + at->kv_head) * size;
}

/* What is read AHEAD blocks later: blocks of keys, and after the last of the chunk blocks of values. A block takes less time
 * to compute than memory takes to answer, and neighbouring blocks are no neighbours in memory, which hardware would see. */
static inline const kv *ahead(const Context *at, const kv *now, int64_t start, int64_t t, int64_t num_keys, int is_keys) {
    const int64_t coming = t + AHEAD * at->shape->block_len;
    if (coming < num_keys) return part(at, is_keys ? at->keys : at->values, start + coming);
    if (is_keys && coming - num_keys < num_keys) return part(at, at->values, start + coming - num_keys);
    return now;
}

/* attention_tiles.c, where AMX is: whether it attends for such a model; and what attention.c does of a chunk for up to AMX_ROWS
 * queries, between begin_tiles and end_tiles (bf16.h). */
int attends_by_tiles(const Shape *shape);
void score_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys);
void mix_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys);
