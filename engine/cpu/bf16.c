/* Products with bfloat16 weights: y = x W^T + bias, sums in float, in the order of the inputs for every row, so that a row's
 * result does not depend on what else is in the batch or on threads.
 *
 * A panel of weights is read from memory once, ahead of its use, and multiplied with all rows while it is in the cache: with few
 * rows, reading is all that takes time. With more than one group of rows the next panel is read while all of them are
 * multiplied with this one. AMX does it where the CPU has it (tiles.c), else AVX-512 BF16, here.
 */
#include "bf16.h"
#if __x86_64__
#include <immintrin.h>
#endif

#if ELEM_BF16 && __AVX512BF16__
/* AHEAD: elements. What stays in registers is the sums of ROWS rows, and a pair of inputs of a panel. */
enum { ROWS = 12, AHEAD = 2048 };

/* What is read from memory meanwhile: ``stride`` bytes further at each pair of inputs. */
typedef struct {
    const char *from;
    int64_t stride;
} Ahead;

/* ``num``: of rows, a constant. */
static inline __attribute__((always_inline)) void multiply(const int num, const elem *weights, const elem *x, int64_t num_in,
                                                           Ahead ahead, vf sums[ROWS][PARTS]) {
    __m512 s[ROWS][PARTS];
    for (int r = 0; r < num; r++)
        for (int p = 0; p < PARTS; p++) s[r][p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < num_in; i += PAIR, weights += PANEL * PAIR, ahead.from += ahead.stride) {
        __m512bh w[PARTS];
        for (int p = 0; p < PARTS; p++) {
            w[p] = (__m512bh)_mm512_loadu_si512(weights + p * LANES * PAIR);
            __builtin_prefetch(ahead.from + p * LINE, 0, 3);
        }
        for (int r = 0; r < num; r++) {
            int32_t pair;
            memcpy(&pair, x + r * num_in + i, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int p = 0; p < PARTS; p++) s[r][p] = _mm512_dpbf16_ps(s[r][p], w[p], both);
        }
    }
    for (int r = 0; r < num; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = (vf)s[r][p];
}

static void multiply_rows(int num, const elem *weights, const elem *x, int64_t num_in, Ahead ahead, vf sums[ROWS][PARTS]) {
    switch (num) {
        case 1: multiply(1, weights, x, num_in, ahead, sums); break;
        case 2: multiply(2, weights, x, num_in, ahead, sums); break;
        case 3: multiply(3, weights, x, num_in, ahead, sums); break;
        case 4: multiply(4, weights, x, num_in, ahead, sums); break;
        case 5: multiply(5, weights, x, num_in, ahead, sums); break;
        case 6: multiply(6, weights, x, num_in, ahead, sums); break;
        case 7: multiply(7, weights, x, num_in, ahead, sums); break;
        case 8: multiply(8, weights, x, num_in, ahead, sums); break;
        case 9: multiply(9, weights, x, num_in, ahead, sums); break;
        case 10: multiply(10, weights, x, num_in, ahead, sums); break;
        case 11: multiply(11, weights, x, num_in, ahead, sums); break;
        default: multiply(ROWS, weights, x, num_in, ahead, sums);
    }
}

int has_bf16_products(void) { return 1; }

/* One panel times all rows. ``is_read``: the thread has just multiplied the panel before, and read this one meanwhile. */
static void multiply_panel(const Bf16Product *p, int64_t panel, const elem *x, elem *out, int64_t rows, int is_read) {
    const int64_t column = panel * PANEL, num_groups = (rows + ROWS - 1) / ROWS;
    const int64_t size = p->num_in / PAIR * PAIR_BYTES;
    const elem *weights = p->weights + column * p->num_in;
    for (int64_t group = 0, row = 0; group < num_groups; group++) {
        const int num = (int)((rows - row) / (num_groups - group)); /* groups of like sizes */
        Ahead ahead = {(const char *)(weights + AHEAD), PAIR_BYTES};
        if (num_groups > 1 && (is_read || group))
            ahead = (Ahead){(const char *)weights + size + size * group / num_groups, PAIR_BYTES / num_groups};
        vf sums[ROWS][PARTS];
        multiply_rows(num, weights, x + row * p->num_in, p->num_in, ahead, sums);
        for (int i = 0; i < num; i++, row++)
            for (int part = 0; part < PARTS && column + part * LANES < p->num_out; part++)
                put_sums(p, out + row * p->num_out, column + part * LANES, sums[i][part]);
    }
}

/* x [rows][num_in] -> out [rows][num_out] */
void bf16_product(const Bf16Product *p, const elem *x, elem *out, int64_t rows, int num_threads) {
    const int64_t num_panels = (p->num_out + PANEL - 1) / PANEL;
    const int tiles = takes_tiles(p);
    if (rows == 0) return;
#pragma omp parallel num_threads(threads_for(p->num_in *p->num_out / 4, num_threads))
    {
        int64_t before = -2;
        if (tiles) begin_tiles(rows);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++) {
            (tiles ? tile_panel : multiply_panel)(p, panel, x, out, rows, before + 1 == panel);
            before = panel;
        }
        if (tiles) end_tiles();
    }
}
#else
int has_bf16_products(void) { return 0; }
void bf16_product(const Bf16Product *p, const elem *x, elem *out, int64_t rows, int num_threads) {
    (void)p, (void)x, (void)out, (void)rows, (void)num_threads;
}
#endif
