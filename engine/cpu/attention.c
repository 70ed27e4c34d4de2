/* Attention over a paged cache of keys and values. Rows of a pass r, positions t, head_dim D, tokens per block B (a multiple of
 * 16, as D, that divides CHUNK):
 *   keys    [block][kv_head][D][B]      values  [block][kv_head][B][D]
 *   queries [r][head][D], float, scaled by D^-1/2
 *
 * A tile is up to TILE queries of one span that share a KV head; keys come in chunks, each softmaxed by itself, and chunks are
 * folded together by their maxima and sums (Dao et al., arXiv 2205.14135). Chunks lie at multiples of CHUNK positions and are
 * folded in order, so what a query gets does not depend on the batch or on threads.
 *
 * Where the CPU multiplies pairs of bfloat16, queries and softmax weights are rounded to it and two dimensions, or two
 * positions, are multiplied and added by one instruction. Sums are float everywhere.
 */
#include "vectors.h"

#if ELEM_BF16 && __AVX512BF16__
#include <immintrin.h>
enum { STEP = 2 }; /* dimensions or positions at once */
typedef elem operand;
typedef __m512bh Operands; /* of 16 keys, or dimensions, two each: of row ``a`` and of row ``b`` */

static inline Operands load_operands(const elem *a, const elem *b) {
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

static inline Operands load_operands(const elem *a, const elem *b) {
    (void)b;
    return load16(a);
}
static inline vf multiply_add(vf sum, Operands x, const operand *factors) { return sum + x * *factors; }
static inline void store_operands(operand *to, vf x) { storef(to, x); }
#endif

#if __AVX512F__
enum { TILE = 12 }; /* with two vectors of sums for each, a vector of keys or values and a factor, 32 registers are full */
#else
enum { TILE = 4 };
#endif
enum { CHUNK = 512, MAX_D = 512, AHEAD = 4 };

typedef struct {
    operand query[MAX_D / STEP][TILE][STEP];
    int64_t num_keys[TILE]; /* of the chunk, that this query sees */
    float scores[TILE][CHUNK];
    operand weights[TILE][CHUNK]; /* of values: e^(score - max) */
    float max[TILE], sum[TILE];   /* over the chunks so far */
    float out[TILE][MAX_D];       /* not yet divided by sum */
} Tile;

typedef struct {
    const elem *keys, *values;
    const int32_t *table;
    int64_t kv_head;
    const Shape *shape;
    int products_only;
} Context;

/* Where the KV head's part of the block of position t begins, in keys or values: D * B elements. */
static inline const elem *part(const Context *at, const elem *cache, int64_t t) {
    const int64_t size = at->shape->head_dim * at->shape->block_len;
    return cache + (at->table[t / at->shape->block_len] * at->shape->kv_heads + at->kv_head) * size;
}

/* What is read AHEAD blocks later: blocks of keys, and after the last of the chunk blocks of values. A block takes less time
 * to compute than memory takes to answer, and neighbouring blocks are no neighbours in memory, which hardware would see. */
static inline const elem *ahead(const Context *at, const elem *now, int64_t start, int64_t t, int64_t num_keys, int is_keys) {
    const int64_t coming = t + AHEAD * at->shape->block_len;
    if (coming < num_keys) return part(at, is_keys ? at->keys : at->values, start + coming);
    if (is_keys && coming - num_keys < num_keys) return part(at, at->values, start + coming - num_keys);
    return now;
}

/* scores[q][t] = query[q] . key[t] for the first num_keys keys of the chunk, rounded up to whole vectors. */
static inline __attribute__((always_inline)) void score(Tile *tile, const int num, const Context *at, int64_t start,
                                                        int64_t num_keys) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    for (int64_t first = 0; first < num_keys; first += B) {
        const elem *block = part(at, at->keys, start + first);
        const elem *next = ahead(at, block, start, first, num_keys, 1);
        const int64_t count = num_keys - first < B ? num_keys - first : B;
        for (int64_t t = 0; t < count; t += 2 * LANES) {
            const elem *k = block + t;
            float *to = tile->scores[0] + first + t;
            if (t + LANES < count) { /* two vectors at once */
                vf a[TILE] = {{0}}, b[TILE] = {{0}};
                for (int64_t i = 0; i < D; i += STEP) {
                    const elem *ki = k + i * B, *kj = ki + B;
                    const Operands k0 = load_operands(ki, kj), k1 = load_operands(ki + LANES, kj + LANES);
                    for (int s = 0; s < STEP; s++) __builtin_prefetch(next + t + (i + s) * B, 0, 2);
                    for (int q = 0; q < num; q++) {
                        a[q] = multiply_add(a[q], k0, tile->query[i / STEP][q]);
                        b[q] = multiply_add(b[q], k1, tile->query[i / STEP][q]);
                    }
                }
                for (int q = 0; q < num; q++) {
                    storef(to + q * CHUNK, a[q]);
                    storef(to + q * CHUNK + LANES, b[q]);
                }
            } else {
                vf a[TILE] = {{0}};
                for (int64_t i = 0; i < D; i += STEP) {
                    const Operands k0 = load_operands(k + i * B, k + i * B + B);
                    for (int s = 0; s < STEP; s++) __builtin_prefetch(next + t + (i + s) * B, 0, 2);
                    for (int q = 0; q < num; q++) a[q] = multiply_add(a[q], k0, tile->query[i / STEP][q]);
                }
                for (int q = 0; q < num; q++) storef(to + q * CHUNK, a[q]);
            }
        }
    }
}

/* weights = exp(scores - max), 0 for keys the query does not see; what earlier chunks gave is rescaled. */
static void soften(Tile *tile, int num, int64_t num_keys, int64_t D) {
    for (int q = 0; q < num; q++) {
        float *s = tile->scores[q];
        const int64_t seen = tile->num_keys[q];
        const int64_t padded = (num_keys + LANES - 1) / LANES * LANES;
        for (int64_t t = seen; t < padded; t++) s[t] = -INFINITY;
        vf highest = splat(-INFINITY);
        for (int64_t t = 0; t < padded; t += LANES) {
            vf x = loadf(s + t);
            highest = choose(x > highest, x, highest);
        }
        float max = tile->max[q];
        for (int i = 0; i < LANES; i++) max = highest[i] > max ? highest[i] : max;
        if (max == -INFINITY) max = 0; /* nothing seen so far: every weight is 0 */
        vf sums = {0};
        for (int64_t t = 0; t < padded; t += LANES) {
            vf weight = exp16(loadf(s + t) - max);
            store_operands(tile->weights[q] + t, weight);
            sums += weight;
        }
        const float old = tile->max[q] == -INFINITY ? 0 : expf(tile->max[q] - max);
        tile->max[q] = max;
        tile->sum[q] = tile->sum[q] * old + sum_lanes(sums);
        if (old != 1)
            for (int64_t i = 0; i < D; i++) tile->out[q][i] *= old;
    }
}

static const elem NOTHING[4 * LANES];

/* out[q][d .. d + width] += sum over t of weights[q][t] * value[t][d ..]; width is a constant of 1, 2 or 4 vectors. */
static inline __attribute__((always_inline)) void mix(Tile *tile, const int num, const int width, const Context *at,
                                                      int64_t start, int64_t num_keys, int64_t d) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    vf sum[TILE][4];
    for (int q = 0; q < num; q++)
        for (int j = 0; j < width; j++) sum[q][j] = loadf(tile->out[q] + d + j * LANES);
    for (int64_t first = 0; first < num_keys; first += B) {
        const elem *v = part(at, at->values, start + first) + d;
        const elem *next = ahead(at, v - d, start, first, num_keys, 0) + d;
        const int64_t count = num_keys - first < B ? num_keys - first : B;
        for (int64_t t = 0; t < count; t += STEP, v += STEP * D, next += STEP * D) {
            const elem *later = t + 1 < count ? v + D : NOTHING; /* of weight 0 where there is none */
            Operands value[4];
            for (int j = 0; j < width; j++) value[j] = load_operands(v + j * LANES, later + j * LANES);
            for (int s = 0; s < STEP; s++)
                for (int j = 0; j < width; j += 2) __builtin_prefetch(next + s * D + j * LANES, 0, 2);
            for (int q = 0; q < num; q++)
                for (int j = 0; j < width; j++)
                    sum[q][j] = multiply_add(sum[q][j], value[j], tile->weights[q] + first + t);
        }
    }
    for (int q = 0; q < num; q++)
        for (int j = 0; j < width; j++) storef(tile->out[q] + d + j * LANES, sum[q][j]);
}

static inline __attribute__((always_inline)) void add_chunk(Tile *tile, const int num, const Context *at, int64_t start,
                                                            int64_t num_keys) {
    const int64_t D = at->shape->head_dim;
    score(tile, num, at, start, num_keys);
    if (at->products_only)
        for (int q = 0; q < num; q++)
            for (int64_t t = 0; t < num_keys; t += LANES) store_operands(tile->weights[q] + t, loadf(tile->scores[q] + t));
    else
        soften(tile, num, num_keys, D);
    int64_t d = 0;
    if (num <= TILE / 2)
        for (; d + 64 <= D; d += 64) mix(tile, num, 4, at, start, num_keys, d);
    for (; d + 32 <= D; d += 32) mix(tile, num, 2, at, start, num_keys, d);
    for (; d < D; d += 16) mix(tile, num, 1, at, start, num_keys, d);
}

typedef struct {
    int32_t span, first; /* the tile's first query, counted in (row, head of the group) order within the span */
} Item;

/* out [rows][heads D] for all rows; spans s have rows starts[s] .. starts[s + 1] at positions base_lens[s] + i and blocks
 * tables[s][]. With products_only the softmax is left out, for measuring what the two products alone take: out is then of no
 * use. Returns 0, or 1 when there is no memory. */
int attention(const float *queries, const elem *keys, const elem *values, const int32_t *starts, const int32_t *base_lens,
              const int32_t *tables, int64_t table_width, int64_t num_spans, elem *out, const Shape *shape,
              int products_only, int num_threads) {
    const int64_t D = shape->head_dim, heads = shape->heads, kv_heads = shape->kv_heads, group = heads / kv_heads;
    int64_t num_tiles = 0, num_scores = 0;
    for (int64_t s = 0; s < num_spans; s++) {
        const int64_t num_queries = (starts[s + 1] - starts[s]) * group;
        num_tiles += (num_queries + TILE - 1) / TILE;
        num_scores += num_queries * base_lens[s];
    }
    Item *items = malloc(num_tiles * sizeof(Item));
    if (!items) return 1;
    int64_t filled = 0;
    for (int64_t s = num_spans - 1; s >= 0; s--) /* of a span the last tiles, which see most, first */
        for (int64_t n = (starts[s + 1] - starts[s]) * group, first = n > 0 ? (n - 1) / TILE * TILE : -1; first >= 0; first -= TILE)
            items[filled++] = (Item){(int32_t)s, (int32_t)first};
#pragma omp parallel for num_threads(threads_for(num_scores * D / 4, num_threads)) schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < num_tiles; i++) {
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int64_t s = items[i].span, first = items[i].first;
            const int64_t left = (starts[s + 1] - starts[s]) * group - first;
            const int num = left < TILE ? (int)left : TILE;
            const Context at = {keys, values, tables + s * table_width, kv_head, shape, products_only};
            Tile tile;
            int64_t last_row = 0;
            for (int q = 0; q < num; q++) {
                last_row = (first + q) / group;
                const float *query = queries + ((starts[s] + last_row) * heads + kv_head * group + (first + q) % group) * D;
                for (int64_t i = 0; i < D; i += LANES) {
                    operand rounded[LANES];
                    store_operands(rounded, loadf(query + i));
                    for (int j = 0; j < LANES; j++) tile.query[(i + j) / STEP][q][j % STEP] = rounded[j];
                }
                tile.max[q] = -INFINITY;
                tile.sum[q] = 0;
                memset(tile.out[q], 0, D * sizeof(float));
            }
            const int64_t total = base_lens[s] + last_row + 1;
            for (int64_t start = 0; start < total; start += CHUNK) {
                const int64_t num_keys = total - start < CHUNK ? total - start : CHUNK;
                for (int q = 0; q < num; q++) {
                    const int64_t seen = base_lens[s] + (first + q) / group + 1 - start;
                    tile.num_keys[q] = seen < 0 ? 0 : seen < num_keys ? seen : num_keys;
                }
                switch (num) {
                    case 1: add_chunk(&tile, 1, &at, start, num_keys); break;
                    case 2: add_chunk(&tile, 2, &at, start, num_keys); break;
                    case 3: add_chunk(&tile, 3, &at, start, num_keys); break;
#if __AVX512F__
                    case 4: add_chunk(&tile, 4, &at, start, num_keys); break;
                    case 5: add_chunk(&tile, 5, &at, start, num_keys); break;
                    case 6: add_chunk(&tile, 6, &at, start, num_keys); break;
                    case 7: add_chunk(&tile, 7, &at, start, num_keys); break;
                    case 8: add_chunk(&tile, 8, &at, start, num_keys); break;
                    case 9: add_chunk(&tile, 9, &at, start, num_keys); break;
                    case 10: add_chunk(&tile, 10, &at, start, num_keys); break;
                    case 11: add_chunk(&tile, 11, &at, start, num_keys); break;
#endif
                    default: add_chunk(&tile, TILE, &at, start, num_keys);
                }
            }
            for (int q = 0; q < num; q++) {
                const int64_t row = starts[s] + (first + q) / group, head = kv_head * group + (first + q) % group;
                elem *to = out + (row * heads + head) * D;
                const float scale = 1.0f / tile.sum[q];
                for (int64_t d = 0; d < D; d += LANES) store16(to + d, loadf(tile.out[q] + d) * scale);
            }
        }
    }
    free(items);
    return 0;
}
