/* Attention over a paged cache of keys and values. Rows of a pass r, positions t, head_dim D, tokens per block B (a multiple of
 * 16, as D, that divides CHUNK):
 *   keys    [block][kv_head][D][B]      values  [block][kv_head][B][D]
 *   queries [r][head][D], float, scaled by D^-1/2
 *
 * A tile is up to TILE queries, or AMX_ROWS, of one span that share a KV head; keys come in chunks, each softmaxed by itself, and chunks are
 * folded together by their maxima and sums (Dao et al., arXiv 2205.14135). Chunks lie at multiples of CHUNK positions and are
 * folded in order, so what a query gets does not depend on the batch or on threads; nor, as long as keys and values are finite,
 * on what other queries of the tile see, which for it has a weight of 0.
 *
 * Where the CPU multiplies pairs of bfloat16, queries and softmax weights are rounded to it and two dimensions, or two
 * positions, are multiplied and added by one instruction. Sums are float everywhere. Where there is AMX, it makes the two
 * products (attention_tiles.c) for AMX_ROWS queries at once.
 */
#include "attention.h"

/* scores[q][t] = query[q] . key[t] for the first num_keys keys of the chunk, rounded up to whole vectors. */
static inline __attribute__((always_inline)) void score(Tile *tile, const int num, const Context *at, int64_t start,
                                                        int64_t num_keys) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    for (int64_t first = 0; first < num_keys; first += B) {
        const kv *block = part(at, at->keys, start + first);
        const kv *next = ahead(at, block, start, first, num_keys, 1);
        const int64_t count = num_keys - first < B ? num_keys - first : B;
        for (int64_t t = 0; t < count; t += 2 * LANES) {
            const kv *k = block + t;
            float *to = tile->scores[0] + first + t;
            if (t + LANES < count) { /* two vectors at once */
                vf a[TILE] = {{0}}, b[TILE] = {{0}};
                for (int64_t i = 0; i < D; i += STEP) {
                    const kv *ki = k + i * B, *kj = ki + B;
                    const Operands k0 = load_operands(ki, kj), k1 = load_operands(ki + LANES, kj + LANES);
                    for (int s = 0; s < STEP; s++) __builtin_prefetch(next + t + (i + s) * B, 0, 2);
                    for (int q = 0; q < num; q++) {
                        a[q] = multiply_add(a[q], k0, tile->query.by_step[i / STEP][q]);
                        b[q] = multiply_add(b[q], k1, tile->query.by_step[i / STEP][q]);
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
                    for (int q = 0; q < num; q++) a[q] = multiply_add(a[q], k0, tile->query.by_step[i / STEP][q]);
                }
                for (int q = 0; q < num; q++) storef(to + q * CHUNK, a[q]);
            }
        }
    }
}

/* weights = exp(scores - max), 0 for keys that the query does not see and up to ``padded``; what earlier chunks gave is
 * rescaled. */
static void soften(Tile *tile, int num, int64_t padded, int64_t D) {
    for (int q = 0; q < num; q++) {
        float *s = tile->scores[q];
        const int64_t seen = tile->num_keys[q];
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
            vf weight = exp_lanes(loadf(s + t) - max);
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

/* Weights up to a multiple of ``multiple``. */
static void weigh(Tile *tile, int num, const Context *at, int64_t num_keys, int64_t multiple) {
    const int64_t padded = (num_keys + multiple - 1) / multiple * multiple;
    if (at->products_only)
        for (int q = 0; q < num; q++)
            for (int64_t t = 0; t < padded; t += LANES) store_operands(tile->weights[q] + t, loadf(tile->scores[q] + t));
    else
        soften(tile, num, padded, at->shape->head_dim);
}

/* out[q][d .. d + width] += sum over t of weights[q][t] * value[t][d ..]; width is a constant of 1, 2 or 4 vectors. */
static inline __attribute__((always_inline)) void mix(Tile *tile, const int num, const int width, const Context *at,
                                                      int64_t start, int64_t num_keys, int64_t d) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    vf sum[TILE][4];
    for (int q = 0; q < num; q++)
        for (int j = 0; j < width; j++) sum[q][j] = loadf(tile->out[q] + d + j * LANES);
    for (int64_t first = 0; first < num_keys; first += B) {
        const kv *v = part(at, at->values, start + first) + d;
        const kv *next = ahead(at, v - d, start, first, num_keys, 0) + d;
        const int64_t count = num_keys - first < B ? num_keys - first : B;
        for (int64_t t = 0; t < count; t += STEP, v += STEP * D, next += STEP * D) {
            const kv *later = t + 1 < count ? v + D : NOTHING; /* of weight 0 where there is none */
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
    weigh(tile, num, at, num_keys, LANES);
    int64_t d = 0;
    if (num <= TILE / 2)
        for (; d + 4 * LANES <= D; d += 4 * LANES) mix(tile, num, 4, at, start, num_keys, d);
    for (; d + 2 * LANES <= D; d += 2 * LANES) mix(tile, num, 2, at, start, num_keys, d);
    for (; d < D; d += LANES) mix(tile, num, 1, at, start, num_keys, d);
}

static void put_query(Tile *tile, int q, const float *query, int64_t D, int by_tiles) {
    for (int64_t i = 0; i < D; i += LANES) {
        operand rounded[LANES];
        store_operands(rounded, loadf(query + i));
        if (by_tiles) memcpy(tile->query.by_row[q] + i, rounded, LANES * sizeof(bf16));
        else
            for (int j = 0; j < LANES; j++) tile->query.by_step[(i + j) / STEP][q][j % STEP] = rounded[j];
    }
}

static void add_chunk_by_tiles(Tile *tile, int num, const Context *at, int64_t start, int64_t num_keys) {
    score_by_tiles(tile, at, start, num_keys);
    weigh(tile, num, at, num_keys, AMX_DEPTH);
    mix_by_tiles(tile, at, start, num_keys);
}

typedef struct {
    int32_t span, first; /* the tile's first query, counted in (row, head of the group) order within the span */
} Item;

/* out [rows][heads D] for all rows; spans s have rows starts[s] .. starts[s + 1] at positions base_lens[s] + i and blocks
 * tables[s][]. With products_only the softmax is left out, for measuring what the two products alone take: out is then of no
 * use. Returns 0, or 1 when there is no memory. */
int attention(const float *queries, const kv *keys, const kv *values, const int32_t *starts, const int32_t *base_lens,
              const int32_t *tables, int64_t table_width, int64_t num_spans, elem *out, const Shape *shape,
              int products_only, int num_threads) {
    const int64_t D = shape->head_dim, heads = shape->heads, kv_heads = shape->kv_heads, group = heads / kv_heads;
    const int by_tiles = attends_by_tiles(shape), most = by_tiles ? AMX_ROWS : TILE;
    int64_t num_tiles = 0, num_scores = 0;
    for (int64_t s = 0; s < num_spans; s++) {
        const int64_t num_queries = (starts[s + 1] - starts[s]) * group;
        num_tiles += (num_queries + most - 1) / most;
        num_scores += num_queries * (base_lens[s] + starts[s + 1] - starts[s]);
    }
    Item *items = malloc(num_tiles * sizeof(Item));
    if (!items) return 1;
    int64_t filled = 0;
    for (int64_t s = num_spans - 1; s >= 0; s--) /* of a span the last tiles, which see most, first */
        for (int64_t n = (starts[s + 1] - starts[s]) * group, first = n > 0 ? (n - 1) / most * most : -1; first >= 0; first -= most)
            items[filled++] = (Item){(int32_t)s, (int32_t)first};
#pragma omp parallel for num_threads(threads_for(num_scores * D / 4, num_threads)) schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < num_tiles; i++) {
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int64_t s = items[i].span, first = items[i].first;
            const int64_t left = (starts[s + 1] - starts[s]) * group - first;
            const int num = left < most ? (int)left : most;
            const Context at = {keys, values, tables + s * table_width, kv_head, shape, products_only};
            Tile tile;
            int64_t last_row = 0;
            for (int q = 0; q < num; q++) {
                last_row = (first + q) / group;
                const float *query = queries + ((starts[s] + last_row) * heads + kv_head * group + (first + q) % group) * D;
                put_query(&tile, q, query, D, by_tiles);
                tile.max[q] = -INFINITY;
                tile.sum[q] = 0;
                memset(tile.out[q], 0, D * sizeof(float));
            }
            const int64_t total = base_lens[s] + last_row + 1;
            if (by_tiles) begin_tiles(num);
            for (int64_t start = 0; start < total; start += CHUNK) {
                const int64_t num_keys = total - start < CHUNK ? total - start : CHUNK;
                for (int q = 0; q < num; q++) {
                    const int64_t seen = base_lens[s] + (first + q) / group + 1 - start;
                    tile.num_keys[q] = seen < 0 ? 0 : seen < num_keys ? seen : num_keys;
                }
                if (by_tiles) {
                    add_chunk_by_tiles(&tile, num, &at, start, num_keys);
                    continue;
                }
                switch (num) {
                    case 1: add_chunk(&tile, 1, &at, start, num_keys); break;
                    case 2: add_chunk(&tile, 2, &at, start, num_keys); break;
                    case 3: add_chunk(&tile, 3, &at, start, num_keys); break;
#if TILE > 4
                    case 4: add_chunk(&tile, 4, &at, start, num_keys); break;
                    case 5: add_chunk(&tile, 5, &at, start, num_keys); break;
#endif
#if TILE > 6
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
            if (by_tiles) end_tiles();
            for (int q = 0; q < num; q++) {
                const int64_t row = starts[s] + (first + q) / group, head = kv_head * group + (first + q) % group;
                elem *to = out + (row * heads + head) * D;
                const float scale = 1.0f / tile.sum[q];
                for (int64_t d = 0; d < D; d += LANES) store_elems(to + d, loadf(tile.out[q] + d) * scale);
            }
        }
    }
    free(items);
    return 0;
}
