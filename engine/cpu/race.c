/* The choice of one token per row among the logits of a head: the lowest argmax_v(z_v / T + G(key, v)), G as engine/noise.py
 * defines it. As in engine/race.py, the largest noise of 64 consecutive tokens is known by one hash, so that few tokens are
 * looked at by themselves; here those of a reduced head too, of which a block of 64 holds fewer. */
#include "vectors.h"

enum { BLOCK_LEN = 64 };
static const double LARGEST_NOISE = 27.05;
static const double ROUNDING = 1e-5; /* more than a float32 of noise is off */

typedef struct {
    int64_t num_columns, num_blocks;
    const int64_t *token_ids; /* [num_columns], ascending */
    const int64_t *blocks;    /* [num_blocks], token id / 64, ascending: those that hold a token of the head */
    const int64_t *starts;    /* [num_blocks + 1]: first column of each block */
} Head;

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static inline uint64_t output(uint64_t key, uint64_t counter) { return mix(key + counter * 0x9E3779B97F4A7C15u); }
static inline double exponential(uint64_t bits) { return -log(((double)(bits >> 32) + 0.5) / 4294967296.0); }
static inline uint64_t block_bits(uint64_t key, int64_t block) { return output(key, (1ull << 32) + (uint64_t)block); }

static double noise(uint64_t key, int64_t token_id, uint64_t bits) {
    double arrival = exponential(bits) / BLOCK_LEN;
    if ((int64_t)(bits % BLOCK_LEN) != token_id % BLOCK_LEN) arrival += exponential(output(key, (uint64_t)token_id));
    return (float)-log(arrival);
}

static float largest(const float *z, int64_t num) {
    vf highest = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) highest = choose(loadf(z + i) > highest, loadf(z + i), highest);
    float max = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) max = highest[lane] > max ? highest[lane] : max;
    for (; i < num; i++) max = z[i] > max ? z[i] : max;
    return max;
}

/* The best score after those of a block's tokens that can be better; the column of the best in ``column``. */
static double look_into(const Head *head, const float *z, uint64_t key, double temperature, float max, int64_t block,
                        double best, int64_t *column) {
    const uint64_t bits = block_bits(key, head->blocks[block]);
    const double bound = ROUNDING - log(exponential(bits) / BLOCK_LEN);
    for (int64_t i = head->starts[block]; i < head->starts[block + 1]; i++) {
        const double below = (z[i] - max) / temperature;
        if (below + bound < best) continue;
        const double score = below + noise(key, head->token_ids[i], bits);
        if (score > best || (score == best && i < *column)) best = score, *column = i;
    }
    return best;
}

/* logits [rows][num_columns], keys and temperatures [rows] -> columns [rows]; temperature 0 takes the lowest argmax. */
void race(const Head *head, const float *logits, const uint64_t *keys, const float *temperatures, int64_t *columns,
          int64_t rows, int num_threads) {
#pragma omp parallel for num_threads(threads_for(rows * head->num_columns / 4, num_threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *z = logits + row * head->num_columns;
        const int64_t *starts = head->starts;
        float highest[head->num_blocks];
        for (int64_t b = 0; b < head->num_blocks; b++) highest[b] = largest(z + starts[b], starts[b + 1] - starts[b]);
        const float max = largest(highest, head->num_blocks);
        const double temperature = temperatures[row];
        int64_t first_block = 0;
        while (first_block + 1 < head->num_blocks && highest[first_block] < max) first_block++;
        int64_t winner = starts[first_block];
        while (winner + 1 < starts[first_block + 1] && z[winner] < max) winner++;
        columns[row] = winner;
        if (!(temperature > 0)) continue;
        const uint64_t key = keys[row];
        const int64_t first = head->token_ids[winner];
        double best = noise(key, first, block_bits(key, first / BLOCK_LEN));
        double bounds[head->num_blocks];
        int64_t likeliest = first_block;
        for (int64_t b = 0; b < head->num_blocks; b++) {
            bounds[b] = (highest[b] - max) / temperature + LARGEST_NOISE;
            if (bounds[b] < best) continue;
            bounds[b] += ROUNDING - LARGEST_NOISE - log(exponential(block_bits(key, head->blocks[b])) / BLOCK_LEN);
            if (bounds[b] > bounds[likeliest]) likeliest = b;
        }
        best = look_into(head, z, key, temperature, max, likeliest, best, columns + row);
        for (int64_t b = 0; b < head->num_blocks; b++)
            if (b != likeliest && bounds[b] >= best) best = look_into(head, z, key, temperature, max, b, best, columns + row);
    }
}
