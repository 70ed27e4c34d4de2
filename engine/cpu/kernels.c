/* The operators of a forward pass that are not matrix products, for one CPU.
 *
 * Compiled once per element type: ELEM_BF16 selects bfloat16 for activations and KV cache, else they are float. All sums are
 * float. Vectors are GCC's own (gcc, clang), so the same text becomes AVX-512, AVX2, NEON or plain C.
 *
 * Layouts, rows of a pass r, positions t, head_dim D, tokens per block B (a multiple of 16, as D):
 *   keys    [block][kv_head][D][B]      values  [block][kv_head][B][D]
 *   queries [r][head][D], float, scaled by D^-1/2
 */
#include "vectors.h"

/* e^x to about 2 ulp: 2^n times a polynomial on |r| <= ln(2)/2. Below -87 it is 0, which holds for -inf too. */
static inline vf exp16(vf x) {
    vi tiny = x < -87.0f;
    x = choose(tiny, splat(-87.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer, held in the low bits */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi scale = ((vi)shifted - 0x4b400000 + 127) << 23;
    return choose(tiny, splat(0), p * (vf)scale);
}

/* residual [rows][size] += delta (if any); out = residual / rms(residual) * weight. */
void add_norm(float *residual, const elem *delta, const float *weight, elem *out, int64_t rows, int64_t size, float eps,
              int num_threads) {
    const int64_t whole = size - size % LANES;
#pragma omp parallel for num_threads(threads_for(rows * size, num_threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *x = residual + row * size;
        const elem *d = delta ? delta + row * size : NULL;
        elem *y = out + row * size;
        vf squares = {0};
        for (int64_t i = 0; i < whole; i += LANES) {
            vf v = loadf(x + i);
            if (d) storef(x + i, v = v + load16(d + i));
            squares += v * v;
        }
        float sum = sum_lanes(squares);
        for (int64_t i = whole; i < size; i++) {
            if (d) x[i] += load1(d[i]);
            sum += x[i] * x[i];
        }
        const float scale = 1.0f / sqrtf(sum / (float)size + eps);
        for (int64_t i = 0; i < whole; i += LANES) store16(y + i, loadf(x + i) * scale * loadf(weight + i));
        for (int64_t i = whole; i < size; i++) y[i] = store1(x[i] * scale * weight[i]);
    }
}

/* out [rows][size] = silu(gate) * up of gate_up [rows][2 size]. */
void gate(const elem *gate_up, elem *out, int64_t rows, int64_t size, int num_threads) {
    const int64_t whole = size - size % LANES;
#pragma omp parallel for num_threads(threads_for(rows * size * 4, num_threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const elem *g = gate_up + row * 2 * size, *up = g + size;
        elem *y = out + row * size;
        for (int64_t i = 0; i < whole; i += LANES) {
            vf x = load16(g + i);
            store16(y + i, x / (1.0f + exp16(-x)) * load16(up + i));
        }
        for (int64_t i = whole; i < size; i++) {
            float x = load1(g[i]);
            y[i] = store1(x / (1.0f + expf(-x)) * load1(up[i]));
        }
    }
}

typedef struct {
    int64_t heads, kv_heads, head_dim, block_len;
} Shape;

/* One head, normed (if weights are given) and rotated: out[i], out[i + D/2] from x[i], x[i + D/2]. */
static void rotate(const elem *x, const float *norm, float eps, const float *cos_row, const float *sin_row, float scale,
                   int64_t head_dim, float *out) {
    const int64_t half = head_dim / 2;
    if (norm) {
        float sum = 0;
        for (int64_t i = 0; i < head_dim; i++) sum += load1(x[i]) * load1(x[i]);
        scale /= sqrtf(sum / (float)head_dim + eps);
    }
    for (int64_t i = 0; i < half; i++) {
        float first = load1(x[i]) * scale, second = load1(x[i + half]) * scale;
        if (norm) first *= norm[i], second *= norm[i + half];
        out[i] = first * cos_row[i] - second * sin_row[i];
        out[i + half] = second * cos_row[i] + first * sin_row[i];
    }
}

/* qkv [rows][(heads + 2 kv_heads) D] -> queries; keys and values to slot[row] = block * B + offset. */
void rotate_and_store(const elem *qkv, const float *q_norm, const float *k_norm, float eps, const float *cos_rows,
                      const float *sin_rows, const int64_t *slots, float *queries, elem *keys, elem *values, int64_t rows,
                      const Shape *shape, int num_threads) {
    const int64_t D = shape->head_dim, B = shape->block_len, heads = shape->heads, kv_heads = shape->kv_heads;
    const int64_t width = (heads + 2 * kv_heads) * D;
    const float query_scale = 1.0f / sqrtf((float)D);
#pragma omp parallel for num_threads(threads_for(rows * width * 2, num_threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const elem *x = qkv + row * width;
        const float *cos_row = cos_rows + row * (D / 2), *sin_row = sin_rows + row * (D / 2);
        const int64_t block = slots[row] / B, offset = slots[row] % B;
        float key[D];
        for (int64_t h = 0; h < heads; h++) {
            float *query = queries + (row * heads + h) * D;
            rotate(x + h * D, q_norm, eps, cos_row, sin_row, 1.0f, D, query);
            for (int64_t i = 0; i < D; i++) query[i] *= query_scale;
        }
        for (int64_t h = 0; h < kv_heads; h++) {
            rotate(x + (heads + h) * D, k_norm, eps, cos_row, sin_row, 1.0f, D, key);
            elem *to = keys + (block * kv_heads + h) * D * B + offset;
            for (int64_t i = 0; i < D; i++) to[i * B] = store1(key[i]);
            memcpy(values + ((block * kv_heads + h) * B + offset) * D, x + (heads + kv_heads + h) * D, D * sizeof(elem));
        }
    }
}

/* Attention. A tile is up to TILE queries of one span that share a KV head; keys come in chunks, each softmaxed by itself,
 * and chunks are folded together by their maxima and sums (Dao et al., arXiv 2205.14135). Chunks lie at multiples of CHUNK
 * positions and are folded in order, so what a query gets does not depend on the batch or on threads. */
#if __AVX512F__
enum { TILE = 12 }; /* with two vectors of sums for each, a vector of keys or values and a factor, 32 registers are full */
#else
enum { TILE = 4 };
#endif
enum { CHUNK = 512, MAX_D = 512, AHEAD = 4 };

typedef struct {
    float query[MAX_D][TILE];
    int64_t num_keys[TILE]; /* of the chunk, that this query sees */
    float scores[TILE][CHUNK];
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
                for (int64_t i = 0; i < D; i++) {
                    const vf k0 = load16(k + i * B), k1 = load16(k + i * B + LANES);
                    __builtin_prefetch(next + t + i * B, 0, 2);
                    for (int q = 0; q < num; q++) {
                        a[q] += k0 * tile->query[i][q];
                        b[q] += k1 * tile->query[i][q];
                    }
                }
                for (int q = 0; q < num; q++) {
                    storef(to + q * CHUNK, a[q]);
                    storef(to + q * CHUNK + LANES, b[q]);
                }
            } else {
                vf a[TILE] = {{0}};
                for (int64_t i = 0; i < D; i++) {
                    const vf k0 = load16(k + i * B);
                    __builtin_prefetch(next + t + i * B, 0, 2);
                    for (int q = 0; q < num; q++) a[q] += k0 * tile->query[i][q];
                }
                for (int q = 0; q < num; q++) storef(to + q * CHUNK, a[q]);
            }
        }
    }
}

/* scores -> exp(scores - max), 0 for keys the query does not see; what earlier chunks gave is rescaled. */
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
            storef(s + t, weight);
            sums += weight;
        }
        const float old = tile->max[q] == -INFINITY ? 0 : expf(tile->max[q] - max);
        tile->max[q] = max;
        tile->sum[q] = tile->sum[q] * old + sum_lanes(sums);
        if (old != 1)
            for (int64_t i = 0; i < D; i++) tile->out[q][i] *= old;
    }
}

/* out[q][d .. d + width] += sum over t of weight[q][t] * value[t][d ..]; width is a constant of 1, 2 or 4 vectors. */
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
        for (int64_t t = 0; t < count; t++, v += D, next += D) {
            for (int j = 0; j < width; j += 2) __builtin_prefetch(next + j * LANES, 0, 2);
            vf value[4];
            for (int j = 0; j < width; j++) value[j] = load16(v + j * LANES);
            for (int q = 0; q < num; q++)
                for (int j = 0; j < width; j++) sum[q][j] += value[j] * tile->scores[q][first + t];
        }
    }
    for (int q = 0; q < num; q++)
        for (int j = 0; j < width; j++) storef(tile->out[q] + d + j * LANES, sum[q][j]);
}

static inline __attribute__((always_inline)) void add_chunk(Tile *tile, const int num, const Context *at, int64_t start,
                                                            int64_t num_keys) {
    const int64_t D = at->shape->head_dim;
    score(tile, num, at, start, num_keys);
    if (!at->products_only) soften(tile, num, num_keys, D);
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
        for (int64_t n = (starts[s + 1] - starts[s]) * group, first = (n - 1) / TILE * TILE; first >= 0; first -= TILE)
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
                for (int64_t i = 0; i < D; i++) tile.query[i][q] = query[i];
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
