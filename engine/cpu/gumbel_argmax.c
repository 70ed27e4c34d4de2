/* The choice of one token per row among the logits of a head: the lowest argmax_v(z_v / T + G(key, v)), G as engine/noise.py
 * defines it. As in engine/gumbel_argmax.py, the largest noise of 64 consecutive tokens is known by one hash, so that few tokens are
 * looked at by themselves; here those of a reduced head too, of which a block of 64 holds fewer. z are float, differences and
 * quotients of them too, and scores double, as there: the winner is the same to the last bit. */
#include "../noise.h"
#include "vectors.h"

static const double LARGEST_NOISE = 27.05;
static const double ROUNDING = 1e-5; /* more than a float32 of noise is off */
static const float LOWEST_TEMPERATURE = 1e-6f;

typedef struct {
    int64_t num_columns, num_blocks;
    const int64_t *token_ids; /* [num_columns], ascending */
    const int64_t *blocks;    /* [num_blocks], token id / 64, ascending: those that hold a token of the head */
    const int64_t *starts;    /* [num_blocks + 1]: first column of each block */
} Head;

/* Logits of one row: elements as they are compiled for, or floats. */
typedef struct {
    const void *z;
    int is_float;
} Row;

static inline float logit(Row row, int64_t i) {
    return row.is_float ? ((const float *)row.z)[i] : load1(((const elem *)row.z)[i]);
}
static inline vf logits_at(Row row, int64_t i) {
    return row.is_float ? loadf((const float *)row.z + i) : load_elems((const elem *)row.z + i);
}

/* Of ``num`` logits from ``start``; NaN if there is one. */
static inline float largest(Row row, int64_t start, int64_t num) {
    vf highest = splat(-INFINITY);
    vi is_nan = {0};
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) {
        const vf x = logits_at(row, start + i);
        highest = choose(x > highest, x, highest);
        is_nan |= (x != x);
    }
    float max = -INFINITY;
    int found_nan = 0;
    for (int lane = 0; lane < LANES; lane++) {
        max = highest[lane] > max ? highest[lane] : max;
        found_nan |= is_nan[lane] != 0;
    }
    for (; i < num; i++) {
        const float x = logit(row, start + i);
        max = x > max ? x : max;
        found_nan |= x != x;
    }
    return found_nan ? NAN : max;
}

/* The row under evaluation. */
typedef struct {
    double score;
    int64_t column;
} Best;

/* What is the same for all tokens of a row. */
typedef struct {
    const Head *head;
    Row row;
    uint64_t key;
    float max, temperature, floor;
} Choice;

static inline float below(const Choice *at, float z) { return (z - at->max) / at->temperature; }

/* The best after those of a block's tokens that can be better; ``left_out`` is none of them (-1: all are). */
static Best look_into(const Choice *at, int64_t block, int64_t left_out, Best best) {
    const Head *head = at->head;
    const uint64_t bits = block_bits(at->key, head->blocks[block]);
    const double bound = ROUNDING - log(exponential(bits) / BLOCK_LEN);
    for (int64_t i = head->starts[block]; i < head->starts[block + 1]; i++) {
        const float z = below(at, logit(at->row, i));
        if (!(z >= at->floor) || z + bound < best.score || i == left_out) continue;
        const double score = z + noise(at->key, head->token_ids[i], bits);
        if (score > best.score || (score == best.score && i < best.column)) best = (Best){score, i};
    }
    return best;
}

/* ``first``: the lowest of the most probable tokens' columns. ``highest``: of each block. ``margin``, or none: by how much the
 * winner's score exceeds the next. */
static int64_t winner(const Choice *at, int64_t first, const float *highest, float *margin) {
    const Head *head = at->head;
    const int64_t token_id = head->token_ids[first];
    Best best = {noise(at->key, token_id, block_bits(at->key, token_id / BLOCK_LEN)), first};
    double bounds[head->num_blocks];
    int64_t likeliest = -1;
    for (int64_t b = 0; b < head->num_blocks; b++) {
        const float z = below(at, highest[b]);
        bounds[b] = z >= at->floor ? z + LARGEST_NOISE : -INFINITY;
        if (bounds[b] < best.score) continue;
        bounds[b] = z + ROUNDING - log(exponential(block_bits(at->key, head->blocks[b])) / BLOCK_LEN);
        if (likeliest < 0 || bounds[b] > bounds[likeliest]) likeliest = b;
    }
    if (likeliest >= 0) best = look_into(at, likeliest, -1, best);
    for (int64_t b = 0; b < head->num_blocks; b++)
        if (b != likeliest && bounds[b] >= best.score) best = look_into(at, b, -1, best);
    if (margin) {
        Best next = {-INFINITY, first};
        if (likeliest >= 0) next = look_into(at, likeliest, best.column, next);
        for (int64_t b = 0; b < head->num_blocks; b++)
            if (b != likeliest && bounds[b] >= next.score) next = look_into(at, b, best.column, next);
        *margin = (float)(best.score - next.score);
    }
    return best.column;
}

/* The largest logit beside that of column ``first``, which lies in ``block``. */
static float second_largest(const Head *head, Row row, int64_t first, int64_t block, float *highest) {
    const int64_t start = head->starts[block], stop = head->starts[block + 1];
    const float before = largest(row, start, first - start), behind = largest(row, first + 1, stop - first - 1);
    highest[block] = before > behind ? before : behind;
    return largest((Row){highest, 1}, 0, head->num_blocks);
}

/* Logits of rows ``stride`` apart, keys, temperatures and floors [rows] -> columns and the largest logits [rows].
 *
 * Temperature 0 takes the lowest argmax. A token whose (z - max) / T is below the floor is not chosen; no floors admit all.
 * A row without a finite maximum has column 0. ``margins`` [rows], or none: by how much the best score exceeds the next. */
void gumbel_argmax(const Head *head, const void *logits, int64_t stride, int is_float, const uint64_t *keys, const float *temperatures,
          const float *floors, int64_t *columns, float *maxima, float *margins, int64_t rows, int num_threads) {
    const int64_t size = is_float ? (int64_t)sizeof(float) : (int64_t)sizeof(elem);
#pragma omp parallel for num_threads(threads_for(rows * head->num_columns / 4, num_threads)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const Row row = {(const char *)logits + r * stride * size, is_float};
        const int64_t *starts = head->starts;
        float highest[head->num_blocks];
        for (int64_t b = 0; b < head->num_blocks; b++) highest[b] = largest(row, starts[b], starts[b + 1] - starts[b]);
        const float max = maxima[r] = largest((Row){highest, 1}, 0, head->num_blocks);
        columns[r] = 0;
        if (margins) margins[r] = 0;
        if (!isfinite(max)) continue;
        int64_t block = 0;
        while (highest[block] < max) block++;
        int64_t first = starts[block];
        while (logit(row, first) < max) first++;
        columns[r] = first;
        if (!(temperatures[r] > 0)) {
            if (margins) margins[r] = max - second_largest(head, row, first, block, highest);
            continue;
        }
        const float temperature = temperatures[r] < LOWEST_TEMPERATURE ? LOWEST_TEMPERATURE : temperatures[r];
        const Choice at = {head, row, keys[r], max, temperature, floors ? floors[r] : -INFINITY};
        columns[r] = winner(&at, first, highest, margins ? margins + r : NULL);
    }
}
