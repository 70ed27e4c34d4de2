/* Products with block-quantised weights, as GGUF files have them: y = x W^T + bias, W[o][i] = scale q[o][i] + min, with a scale,
 * and a min if any, for each output and block of inputs; q has 4 or 8 bits.
 *
 * A row of x is rounded to 16 bits of its own scale. Sums over a block are integers, and blocks are added as floats in their
 * order, so a row's result depends neither on what else is in the batch nor on threads: many rows are multiplied as one is.
 *
 * Weights lie as [panel of 32 outputs][block], of each block first [word of inputs][output], then scales and mins of the
 * outputs. A word of 4 bits holds 8 inputs, shift by shift a pair: the pair k in bits 4k and 16 + 4k on. A word of 8 bits holds 4
 * inputs, as 0, 2, 1, 3.
 */
#include "operators.h"
#if __x86_64__
#include <immintrin.h>
#endif

/* Registers hold the sums of a block for ROWS rows by COLUMNS outputs, or of WHOLE_ROWS by a whole panel, beside weights and
 * inputs; totals are in memory. */
#if __AVX512F__
enum { COLUMNS = 32 };
#define ROWS 12
#define WHOLE_ROWS 12
#elif __AVX2__
enum { COLUMNS = 16 };
#define ROWS 4
#define WHOLE_ROWS 2
#else
enum { COLUMNS = 8 };
#define ROWS 4
#define WHOLE_ROWS 0
#endif
/* AHEAD: bytes. BATCH: rows that are rounded together. INFINITE: the bits of an infinite float. */
enum { PANEL = 32, PARTS = PANEL / LANES, AHEAD = 4096, BATCH = 96, LINE = 64, LARGEST = 127 * 256 + 127, INFINITE = 0x7f800000 };
typedef int16_t shorts __attribute__((vector_size(LANES * 4), aligned(1)));
typedef int16_t rounded __attribute__((vector_size(LANES * 2), aligned(2)));
typedef int32_t words __attribute__((vector_size(LANES * 4), aligned(1)));

/* As in engine/cpu/quantised.py. */
typedef struct {
    int64_t num_in, num_out, block_len; /* block_len divides num_in: 16 or 32 */
    int64_t bits, zero;                 /* zero: what is taken off q */
    int64_t has_halves, has_mins;       /* scales and mins are float16 */
    const uint8_t *weights;             /* outputs filled up to whole panels */
    const float *bias;                  /* the same; may be null */
} Quantised;

/* Whether scales may be float16 here. */
int quantised_halves(void) {
#if __F16C__ && __AVX2__ /* some CPUs have F16C alone */
    return 1;
#else
    return 0;
#endif
}

static inline vf load_factors(const uint8_t *p, int is_half) {
#if __AVX512F__
    if (is_half) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif __F16C__ && __AVX2__
    if (is_half) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
    (void)is_half;
    return loadf((const float *)p);
}

/* sum[i] += weights (2 signed shorts in lane i) . x (2 signed shorts) */
static inline vi add_pairs(vi sum, vi weights, int32_t x) {
#if __AVX512VNNI__
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif __AVX512BW__
    return sum + (vi)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(x));
#elif __AVXVNNI__ && __AVX2__ && !__AVX512F__
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(x));
#elif __AVX2__ && !__AVX512F__
    return sum + (vi)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#elif __SSE2__ && !__AVX2__
    return sum + (vi)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(x));
#else
    return sum + (weights << 16 >> 16) * (int32_t)(int16_t)x + (weights >> 16) * (x >> 16);
#endif
}

/* Keeps gcc from making all products before it adds them up, and from spilling them. */
#if __AVX2__
#define PIN(sum) __asm__ volatile("" : "+v"(sum))
#else
#define PIN(sum)
#endif

/* A group of rows that are multiplied together, as [pair of inputs][row], and of each block what is added to its sums, as
 * [block][row]: the integer -zero sum(x), or sum(x) as float for mins. */
typedef struct {
    int32_t *pairs;
    union { int32_t integer; float real; } *extra;
} Group;

static int64_t groups_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static int64_t group_start(int64_t rows, int64_t group) { return rows * group / groups_of(rows); } /* of like sizes */

/* Rounds x to 16 bits, as the ``row`` of ``num`` in its group. Returns the scale: NaN for a row that holds NaN or infinity. */
static float round_row(const Quantised *p, const elem *x, Group to, int64_t row, int64_t num) {
    vi highest = {0}; /* bits of |x|, in whose order they are; those of infinity and NaN come last */
    for (int64_t i = 0; i < p->num_in; i += LANES) {
        const vi size = (vi)load_elems(x + i) & 0x7fffffff;
        highest = (vi)choose(size > highest, (vf)size, (vf)highest);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = highest[i] > bits ? highest[i] : bits;
    float max;
    memcpy(&max, &bits, sizeof max);
    const float inverse = bits >= INFINITE || max < 1e-30f ? 0 : LARGEST / max;
    for (int64_t block = 0; block * p->block_len < p->num_in; block++) {
        vi sum = {0};
        for (int64_t i = block * p->block_len; i < (block + 1) * p->block_len; i += LANES) {
            /* 1.5 * 2^23 rounds to the nearest integer, held in the low bits */
            const vi n = inverse == 0 ? (vi){0} : (vi)(load_elems(x + i) * inverse + 12582912.0f) - 0x4b400000;
            const rounded shorts_of_n = __builtin_convertvector(n, rounded);
            int32_t pairs[LANES / 2];
            memcpy(pairs, &shorts_of_n, sizeof pairs);
            for (int k = 0; k < LANES / 2; k++) to.pairs[(i / 2 + k) * num + row] = pairs[k];
            sum += n;
        }
        int32_t total = 0;
#if __AVX512F__
        total = _mm512_reduce_add_epi32((__m512i)sum);
#else
        for (int i = 0; i < LANES; i++) total += sum[i];
#endif
        if (p->has_mins) to.extra[block * num + row].real = (float)total;
        else to.extra[block * num + row].integer = -(int32_t)p->zero * total;
    }
    return bits >= INFINITE ? NAN : max / LARGEST;
}

/* totals[row * PANEL + column] = x W^T of ``num`` rows and some outputs of a panel, from ``at`` on, in units of the rows'
 * scales. All but ``p``, ``weights``, ``at``, ``x`` are constants. */
static inline __attribute__((always_inline)) void multiply_kind(const int num, const int bits, const int halves, const int mins,
                                                                const int zero, const Quantised *p, const uint8_t *weights,
                                                                int64_t at, Group x, float *totals) {
    const int64_t num_blocks = p->num_in / p->block_len, num_words = p->block_len * bits / 32, factor = halves ? 2 : 4;
    const int parts = (num <= WHOLE_ROWS ? PANEL : COLUMNS) / LANES;
    for (int r = 0; r < num; r++)
        for (int v = 0; v < parts; v++) storef(totals + r * PANEL + v * LANES, (vf){0});
    for (int64_t block = 0; block < num_blocks; block++, x.extra += num) {
        vi s[ROWS][PARTS];
        for (int r = 0; r < num; r++)
            for (int v = 0; v < parts; v++) s[r][v] = zero ? (vi){0} + x.extra[r].integer : (vi){0};
        for (int64_t word = 0; word < num_words; word++, weights += PANEL * 4, x.pairs += num * 16 / bits) {
            vi q[PARTS];
            for (int v = 0; v < parts; v++) {
                const uint8_t *from = weights + (at + v * LANES) * 4;
                __builtin_prefetch(from + AHEAD, 0, 2);
                q[v] = (vi)*(const words *)from;
            }
#define ADD(k, of_q)                                                                                         \
    do {                                                                                                     \
        vi both[PARTS];                                                                                      \
        for (int v = 0; v < parts; v++) both[v] = (vi)(of_q);                                                \
        for (int r = 0; r < num; r++)                                                                        \
            for (int v = 0; v < parts; v++) {                                                                \
                s[r][v] = add_pairs(s[r][v], both[v], x.pairs[(k) * num + r]);                               \
                PIN(s[r][v]);                                                                                \
            }                                                                                                \
    } while (0)
            if (bits == 4) {
                ADD(0, q[v] & 0x000f000f);
                ADD(1, q[v] >> 4 & 0x000f000f);
                ADD(2, q[v] >> 8 & 0x000f000f);
                ADD(3, q[v] >> 12 & 0x000f000f);
            } else {
                ADD(0, (shorts)q[v] << 8 >> 8);
                ADD(1, (shorts)q[v] >> 8);
            }
#undef ADD
        }
        vf scale[PARTS], min[PARTS];
        for (int64_t line = 0; line < PANEL * factor * (1 + mins); line += LINE)
            __builtin_prefetch(weights + line + AHEAD, 0, 2);
        for (int v = 0; v < parts; v++) {
            scale[v] = load_factors(weights + (at + v * LANES) * factor, halves);
            if (mins) min[v] = load_factors(weights + (PANEL + at + v * LANES) * factor, halves);
        }
        for (int r = 0; r < num; r++)
            for (int v = 0; v < parts; v++) {
                float *to = totals + r * PANEL + v * LANES;
                vf total = loadf(to) + __builtin_convertvector(s[r][v], vf) * scale[v];
                if (mins) total += x.extra[r].real * min[v];
                storef(to, total);
            }
        weights += PANEL * factor * (1 + mins);
        __asm__ volatile("" ::: "memory"); /* or gcc keeps totals in registers, and spills sums */
    }
}

static void multiply(const int num, const Quantised *p, const uint8_t *weights, int64_t at, Group x, float *totals) {
#define OF_KIND(n, ...) multiply_kind(n, __VA_ARGS__, p, weights, at, x, totals)
#define OF_ROWS(n)                                                          \
    case n:                                                                 \
        if (p->bits == 4 && p->has_mins && p->has_halves) OF_KIND(n, 4, 1, 1, 0); \
        else if (p->bits == 4 && p->has_mins) OF_KIND(n, 4, 0, 1, 0);             \
        else if (p->bits == 4 && p->has_halves) OF_KIND(n, 4, 1, 0, 1);           \
        else if (p->bits == 4) OF_KIND(n, 4, 0, 0, 1);                            \
        else if (p->has_mins) OF_KIND(n, 8, 0, 1, 0);                             \
        else if (p->has_halves) OF_KIND(n, 8, 1, 0, 0);                           \
        else OF_KIND(n, 8, 0, 0, 0);                                              \
        break;
    switch (num) {
        OF_ROWS(1)
        OF_ROWS(2)
        OF_ROWS(3)
        OF_ROWS(4)
#if ROWS > 4
        OF_ROWS(5)
        OF_ROWS(6)
        OF_ROWS(7)
        OF_ROWS(8)
        OF_ROWS(9)
        OF_ROWS(10)
        OF_ROWS(11)
        OF_ROWS(12)
#endif
    }
#undef OF_ROWS
#undef OF_KIND
}

static inline void put(elem *to, vf value, int64_t num) {
    if (num >= LANES) store_elems(to, value);
    else
        for (int64_t i = 0; i < num; i++) to[i] = store1(value[i]);
}

/* One panel times ``num`` rows, which are rounded: ``x`` and ``scales``. */
static void multiply_panel(const Quantised *p, int64_t panel, Group x, const float *scales, elem *out, int64_t num) {
    const int64_t num_blocks = p->num_in / p->block_len, factor = p->has_halves ? 2 : 4;
    const int64_t block_bytes = PANEL * (p->block_len * p->bits / 8 + factor * (1 + p->has_mins));
    for (int64_t group = 0; group < groups_of(num); group++) {
        const int64_t r = group_start(num, group);
        const int some = (int)(group_start(num, group + 1) - r);
        const Group rows = {x.pairs + r * p->num_in / 2, x.extra + r * num_blocks};
        float totals[ROWS * PANEL];
        for (int at = 0; at < PANEL; at += some <= WHOLE_ROWS ? PANEL : COLUMNS)
            multiply(some, p, p->weights + panel * num_blocks * block_bytes, at, rows, totals + at);
        for (int i = 0; i < some; i++)
            for (int64_t at = 0; at < PANEL && panel * PANEL + at < p->num_out; at += LANES) {
                const int64_t column = panel * PANEL + at;
                vf y = loadf(totals + i * PANEL + at) * scales[r + i];
                if (p->bias) y += loadf(p->bias + column);
                put(out + (r + i) * p->num_out + column, y, p->num_out - column);
            }
    }
}

/* x [rows][num_in] -> out [rows][num_out], a Multiply (operators.h). */
int quantised_product(const void *product, const elem *x, elem *out, int64_t rows, int num_threads) {
    const Quantised *p = product;
    const int64_t most = rows < BATCH ? rows : BATCH, num_blocks = p->num_in / p->block_len;
    const int64_t num_panels = (p->num_out + PANEL - 1) / PANEL;
    if (rows == 0) return 0;
    int32_t *pairs = malloc(most * (p->num_in / 2 + num_blocks + 1) * sizeof(int32_t));
    if (!pairs) return 1;
    const Group to = {pairs, (void *)(pairs + most * p->num_in / 2)};
    float *scales = (float *)(to.extra + most * num_blocks);
#pragma omp parallel num_threads(threads_for(p->num_in *p->num_out / 8, num_threads))
    for (int64_t first = 0; first < rows; first += BATCH) {
        const int64_t num = rows - first < BATCH ? rows - first : BATCH;
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups_of(num); group++) {
            const int64_t start = group_start(num, group), stop = group_start(num, group + 1);
            const Group rows = {to.pairs + start * p->num_in / 2, to.extra + start * num_blocks};
            for (int64_t r = start; r < stop; r++)
                scales[r] = round_row(p, x + (first + r) * p->num_in, rows, r - start, stop - start);
        }
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++)
            multiply_panel(p, panel, to, scales, out + first * p->num_out, num);
    }
    free(pairs);
    return 0;
}
