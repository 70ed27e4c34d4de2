/* Attention's two products by AMX: up to 16 queries times 16 keys over 32 dimensions, or times 16 dimensions over 32 positions,
 * with one instruction. The second factor of such an instruction holds pairs, of dimensions or of positions, which lie apart in
 * the cache: they are put beside one another here, once for all queries of the tile.
 *
 * Sums are made in another order than by AVX-512, so a model attends by the one or the other, never by both.
 */
#include "attention.h"
#include "bf16.h"
#if KV_BF16 && __AMX_BF16__ && __AVX512BF16__ && __linux__

enum { PAIRS = AMX_DEPTH / PAIR, PAIRED = LANES * PAIR };
typedef bf16 Factor[PAIRS][PAIRED]; /* a tile: 16 pairs of 16 columns */

int attends_by_tiles(const Shape *shape) {
    return shape->head_dim % AMX_DEPTH == 0 && shape->block_len % AMX_DEPTH == 0 && has_tiles();
}

/* Between writing what tiles are loaded from and loading it, either way: the intrinsic does not say that it reads memory. */
static inline void keep_order(void) { __asm__ volatile("" ::: "memory"); }

static inline void put_pair(bf16 to[PAIRED], const bf16 *a, const bf16 *b) {
    const Operands pair = load_operands(a, b);
    memcpy(to, &pair, sizeof pair);
}

/* scores[q][t] up to whole AMX_DEPTH; those of keys that no query sees are of no use. */
void score_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    Factor keys[MAX_D / AMX_DEPTH][2] __attribute__((aligned(LINE)));
    for (int64_t first = 0; first < num_keys; first += B) {
        const bf16 *block = part(at, at->keys, start + first);
        const bf16 *next = ahead(at, block, start, first, num_keys, 1);
        for (int64_t t = 0; t < B && first + t < num_keys; t += AMX_DEPTH) {
            for (int64_t i = 0; i < D; i += PAIR) {
                const bf16 *a = block + t + i * B, *b = a + B;
                bf16 (*to)[PAIRS][PAIRED] = keys[i / AMX_DEPTH];
                put_pair(to[0][i % AMX_DEPTH / PAIR], a, b);
                put_pair(to[1][i % AMX_DEPTH / PAIR], a + LANES, b + LANES);
                __builtin_prefetch(next + t + i * B, 0, 2);
                __builtin_prefetch(next + t + (i + 1) * B, 0, 2);
            }
            keep_order();
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t i = 0; i < D; i += AMX_DEPTH) {
                _tile_loadd(4, tile->query.by_row[0] + i, sizeof tile->query.by_row[0]);
                _tile_loadd(6, keys[i / AMX_DEPTH][0], sizeof keys[0][0][0]);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, keys[i / AMX_DEPTH][1], sizeof keys[0][0][0]);
                _tile_dpbf16ps(1, 4, 7);
            }
            keep_order();
            _tile_stored(0, tile->scores[0] + first + t, sizeof tile->scores[0]);
            _tile_stored(1, tile->scores[0] + first + t + LANES, sizeof tile->scores[0]);
        }
    }
}

/* out[q][d ..] += sum over t of weights[q][t] * value[t][d ..], of 4 or 2 vectors; weights are 0 up to whole AMX_DEPTH. */
static inline __attribute__((always_inline)) void mix_width(Tile *tile, const int width, const Context *at, int64_t start,
                                                            int64_t num_keys, int64_t d) {
    const int64_t D = at->shape->head_dim, B = at->shape->block_len;
    float *out = tile->out[0] + d;
    Factor values[4] __attribute__((aligned(LINE)));
    _tile_loadd(0, out, sizeof tile->out[0]);
    _tile_loadd(1, out + LANES, sizeof tile->out[0]);
    if (width == 4) {
        _tile_loadd(2, out + 2 * LANES, sizeof tile->out[0]);
        _tile_loadd(3, out + 3 * LANES, sizeof tile->out[0]);
    }
    for (int64_t first = 0; first < num_keys; first += B) {
        const bf16 *block = part(at, at->values, start + first) + d;
        const bf16 *next = ahead(at, block - d, start, first, num_keys, 0) + d;
        const int64_t count = num_keys - first < B ? num_keys - first : B;
        for (int64_t t = 0; t < count; t += AMX_DEPTH) {
            for (int pair = 0; pair < PAIRS; pair++) { /* what an earlier owner of the block left may be no number */
                const int64_t at_t = t + pair * PAIR;
                const bf16 *a = at_t < count ? block + at_t * D : NOTHING, *b = at_t + 1 < count ? block + (at_t + 1) * D : NOTHING;
                for (int j = 0; j < width; j++) put_pair(values[j][pair], a + j * LANES, b + j * LANES);
                for (int s = 0; s < PAIR; s++)
                    for (int j = 0; j < width; j += 2) __builtin_prefetch(next + (at_t + s) * D + j * LANES, 0, 2);
            }
            keep_order();
            _tile_loadd(4, tile->weights[0] + first + t, sizeof tile->weights[0]);
            _tile_loadd(6, values[0], sizeof values[0][0]);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values[1], sizeof values[0][0]);
            _tile_dpbf16ps(1, 4, 7);
            if (width == 4) {
                _tile_loadd(6, values[2], sizeof values[0][0]);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, values[3], sizeof values[0][0]);
                _tile_dpbf16ps(3, 4, 7);
            }
            keep_order();
        }
    }
    _tile_stored(0, out, sizeof tile->out[0]);
    _tile_stored(1, out + LANES, sizeof tile->out[0]);
    if (width == 4) {
        _tile_stored(2, out + 2 * LANES, sizeof tile->out[0]);
        _tile_stored(3, out + 3 * LANES, sizeof tile->out[0]);
    }
}

void mix_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys) {
    const int64_t D = at->shape->head_dim;
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) mix_width(tile, 4, at, start, num_keys, d);
    for (; d < D; d += 2 * LANES) mix_width(tile, 2, at, start, num_keys, d);
}
#else
int attends_by_tiles(const Shape *shape) { return (void)shape, 0; }
void score_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys) {
    (void)tile, (void)at, (void)start, (void)num_keys;
}
void mix_by_tiles(Tile *tile, const Context *at, int64_t start, int64_t num_keys) {
    (void)tile, (void)at, (void)start, (void)num_keys;
}
#endif
