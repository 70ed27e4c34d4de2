/* Products with bfloat16 weights: y = x W^T + bias, sums in float, in the order of the inputs for every row, so that a row's
 * result does not depend on what else is in the batch or on threads.
 *
 * A panel of weights is read from memory once, ahead of its use, and multiplied with all rows while it is in the cache: with few
 * rows, reading is all that takes time. With more than one group of rows the next panel is read while all of them are
 * multiplied with this one.
 *
 * Three ways to multiply: AMX where the CPU has it (tiles.c); AVX-512 BF16 on AMD's CPUs; else weights are widened to float in
 * registers. Intel's CPUs take two cycles for an instruction of AVX-512 BF16, in which they make four float ones.
 */
#include "bf16.h"
#include "operators.h"
#if __x86_64__
#include <immintrin.h>
#endif

#if ELEM_BF16
/* Registers hold the sums of ROWS rows by COLUMNS outputs, or of WHOLE_ROWS by a whole panel, beside weights and an input. */
#if __AVX512F__
enum { COLUMNS = PANEL };
#define ROWS 12
#define WHOLE_ROWS 12
#elif __AVX2__
enum { COLUMNS = 16 };
#define ROWS 6
#define WHOLE_ROWS 3
#elif __aarch64__
enum { COLUMNS = 16 };
#define ROWS 6
#define WHOLE_ROWS 2
#else
enum { COLUMNS = 8 };
#define ROWS 4
#define WHOLE_ROWS 1
#endif
enum { AHEAD = 2048 }; /* elements */
typedef uint32_t pairs_of_elems __attribute__((vector_size(LANES * 4), aligned(2)));

/* What is read from memory meanwhile: ``stride`` bytes further at each pair of inputs. */
typedef struct {
    const char *from;
    int64_t stride;
} Ahead;

/* sums[row * PANEL + column] of ``num`` rows and ``columns`` outputs, both constants. ``x``: packed, see pack_group. */
static inline __attribute__((always_inline)) void multiply_widened(const int num, const int columns, const elem *weights,
                                                                   const float *x, int64_t num_in, Ahead ahead, float *sums) {
    const int vectors = columns / LANES;
    vf s[ROWS][PARTS];
    for (int r = 0; r < num; r++)
        for (int v = 0; v < vectors; v++) s[r][v] = (vf){0};
    for (int64_t i = 0; i < num_in; i += PAIR, weights += PANEL * PAIR, x += PAIR * num, ahead.from += ahead.stride) {
        pairs_of_elems pairs[PARTS];
        vf w[PARTS];
        __builtin_prefetch(ahead.from, 0, 3);
        __builtin_prefetch(ahead.from + LINE, 0, 3);
        for (int v = 0; v < vectors; v++) {
            pairs[v] = *(const pairs_of_elems *)(weights + v * LANES * PAIR);
            w[v] = (vf)(pairs[v] << 16);
        }
        for (int r = 0; r < num; r++)
            for (int v = 0; v < vectors; v++) s[r][v] += w[v] * x[r];
        for (int v = 0; v < vectors; v++) w[v] = (vf)(pairs[v] & 0xffff0000);
        for (int r = 0; r < num; r++)
            for (int v = 0; v < vectors; v++) s[r][v] += w[v] * x[num + r];
    }
    for (int r = 0; r < num; r++)
        for (int v = 0; v < vectors; v++) storef(sums + r * PANEL + v * LANES, s[r][v]);
}

#if __AVX512BF16__
static inline __attribute__((always_inline)) void multiply_pairs(const int num, const int columns, const elem *weights,
                                                                 const float *x, int64_t num_in, Ahead ahead, float *sums) {
    (void)columns;
    __m512 s[ROWS][PARTS];
    for (int r = 0; r < num; r++)
        for (int p = 0; p < PARTS; p++) s[r][p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < num_in; i += PAIR, weights += PANEL * PAIR, x += num, ahead.from += ahead.stride) {
        __m512bh w[PARTS];
        for (int p = 0; p < PARTS; p++) {
            w[p] = (__m512bh)_mm512_loadu_si512(weights + p * LANES * PAIR);
            __builtin_prefetch(ahead.from + p * LINE, 0, 3);
        }
        for (int r = 0; r < num; r++) {
            const __m512bh both = (__m512bh)_mm512_set1_ps(x[r]);
            for (int p = 0; p < PARTS; p++) s[r][p] = _mm512_dpbf16_ps(s[r][p], w[p], both);
        }
    }
    for (int r = 0; r < num; r++)
        for (int p = 0; p < PARTS; p++) _mm512_storeu_ps(sums + r * PANEL + p * LANES, s[r][p]);
}
#ifndef PAIRS_ARE_FASTER
#define PAIRS_ARE_FASTER __builtin_cpu_is("amd")
#endif
#else
#define multiply_pairs multiply_widened
#define PAIRS_ARE_FASTER 0
#endif

static void multiply(const int num, const elem *weights, const float *x, int64_t num_in, Ahead ahead, float *sums) {
    const int by_pairs = PAIRS_ARE_FASTER;
#define OF_ROWS(n)                                                                                         \
    case n:                                                                                                \
        if (by_pairs) multiply_pairs(n, n <= WHOLE_ROWS ? PANEL : COLUMNS, weights, x, num_in, ahead, sums); \
        else multiply_widened(n, n <= WHOLE_ROWS ? PANEL : COLUMNS, weights, x, num_in, ahead, sums);        \
        break;
    switch (num) {
        OF_ROWS(1)
        OF_ROWS(2)
        OF_ROWS(3)
        OF_ROWS(4)
#if ROWS > 4
        OF_ROWS(5)
        OF_ROWS(6)
#endif
#if ROWS > 6
        OF_ROWS(7)
        OF_ROWS(8)
        OF_ROWS(9)
        OF_ROWS(10)
        OF_ROWS(11)
        OF_ROWS(12)
#endif
    }
#undef OF_ROWS
}

/* Rows are multiplied in groups of like sizes, at most ROWS. */
static int64_t groups_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static int64_t group_start(int64_t rows, int64_t group) { return rows * group / groups_of(rows); }

/* Four-byte words of a row of packed inputs: each input as float, or pairs as they are. */
static int64_t packed_len(const Bf16Product *p) { return PAIRS_ARE_FASTER ? p->num_in / PAIR : p->num_in; }

/* The inputs of a group as [word][row], one stream for whoever multiplies. */
static void pack_group(const Bf16Product *p, const elem *x, float *packed, int64_t rows, int64_t group) {
    const int64_t first = group_start(rows, group), num = group_start(rows, group + 1) - first, words = packed_len(p);
    float *to = packed + first * words;
    for (int64_t r = 0; r < num; r++) {
        const elem *row = x + (first + r) * p->num_in;
        if (PAIRS_ARE_FASTER)
            for (int64_t i = 0; i < words; i++) memcpy(to + i * num + r, row + i * PAIR, PAIR * sizeof(elem));
        else
            for (int64_t i = 0; i < words; i++) to[i * num + r] = load1(row[i]);
    }
}

/* One panel times all rows. ``is_read``: the thread has just multiplied the panel before, and read this one meanwhile. */
static void multiply_panel(const Bf16Product *p, int64_t panel, const float *packed, elem *out, int64_t rows, int is_read) {
    const int64_t column = panel * PANEL, num_groups = groups_of(rows), size = p->num_in / PAIR * PAIR_BYTES;
    const elem *weights = p->weights + column * p->num_in;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t first = group_start(rows, group);
        const int num = (int)(group_start(rows, group + 1) - first), columns = num <= WHOLE_ROWS ? PANEL : COLUMNS;
        const int64_t num_passes = num_groups * (PANEL / columns);
        float sums[ROWS * PANEL];
        for (int at = 0; at < PANEL; at += columns) {
            const int64_t pass = group * (PANEL / columns) + at / columns;
            Ahead ahead = {(const char *)(weights + AHEAD), PAIR_BYTES};
            if (num_passes > 1 && (is_read || pass))
                ahead = (Ahead){(const char *)weights + size + size * pass / num_passes, PAIR_BYTES / num_passes};
            multiply(num, weights + at * PAIR, packed + first * packed_len(p), p->num_in, ahead, sums + at);
        }
        for (int r = 0; r < num; r++)
            for (int part = 0; part < PARTS && column + part * LANES < p->num_out; part++)
                put_sums(p, out + (first + r) * p->num_out, column + part * LANES, loadf(sums + r * PANEL + part * LANES));
    }
}

/* x [rows][num_in] -> out [rows][num_out]. Returns 0, or 1 when there is no memory. */
int bf16_product(const void *product, const elem *x, elem *out, int64_t rows, int num_threads) {
    const Bf16Product *p = product;
    const int64_t num_panels = (p->num_out + PANEL - 1) / PANEL, num_groups = groups_of(rows);
    const int tiles = takes_tiles(p);
    float *packed = NULL;
    if (rows == 0) return 0;
    if (!tiles && !(packed = malloc(rows * packed_len(p) * sizeof(float)))) return 1;
#pragma omp parallel num_threads(threads_for(p->num_in *p->num_out / 4, num_threads))
    {
        int64_t before = -2;
        if (tiles) begin_tiles(rows);
        else {
#pragma omp for schedule(static)
            for (int64_t group = 0; group < num_groups; group++) pack_group(p, x, packed, rows, group);
        }
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++) {
            if (tiles) tile_panel(p, panel, x, out, rows, before + 1 == panel);
            else multiply_panel(p, panel, packed, out, rows, before + 1 == panel);
            before = panel;
        }
        if (tiles) end_tiles();
    }
    free(packed);
    return 0;
}
#endif
