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

/* Registers hold the sums of ROWS rows by COLUMNS outputs; with as many rows as would just fit, compilers spill some. */
#if __AVX512F__
enum { COLUMNS = 32 };
#define ROWS 8
#elif __AVX2__
enum { COLUMNS = 16 };
#define ROWS 3
#else
enum { COLUMNS = 8 };
#define ROWS 4
#endif
/* AHEAD: bytes. BATCH: rows that are rounded together. */
enum { PANEL = 32, PARTS = COLUMNS / LANES, LINE = 64, AHEAD = 4096, BATCH = 96, LARGEST = 127 * 256 + 127 };
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

static inline int32_t pair(const int16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return both;
}

/* Rounds x to 16 bits, into ``to`` [num_in]; ``sums`` [blocks] get the sums of blocks. Returns the scale: NaN for a row that holds
 * NaN or infinity. */
static float round_row(const Quantised *p, const elem *x, int16_t *to, int32_t *sums) {
    vf highest = {0}, broken = {0};
    for (int64_t i = 0; i < p->num_in; i += LANES) {
        const vf v = load_elems(x + i), size = choose(v < 0, -v, v);
        highest = choose(size > highest, size, highest);
        broken += v * 0.0f;
    }
    float max = 0;
    for (int i = 0; i < LANES; i++) max = highest[i] > max ? highest[i] : max;
    const float nothing = sum_lanes(broken); /* NaN differs from 0 */
    const float inverse = nothing != 0 || max < 1e-30f ? 0 : LARGEST / max;
    for (int64_t block = 0; block * p->block_len < p->num_in; block++) {
        vi sum = {0};
        for (int64_t i = block * p->block_len; i < (block + 1) * p->block_len; i += LANES) {
            /* 1.5 * 2^23 rounds to the nearest integer, held in the low bits */
            const vi n = inverse == 0 ? (vi){0} : (vi)(load_elems(x + i) * inverse + 12582912.0f) - 0x4b400000;
            *(rounded *)(to + i) = __builtin_convertvector(n, rounded);
            sum += n;
        }
        sums[block] = 0;
        for (int i = 0; i < LANES; i++) sums[block] += sum[i];
    }
    return nothing != 0 ? nothing : max / LARGEST;
}

typedef struct {
    const Quantised *p;
    const uint8_t *weights; /* of the panel */
    int64_t at;             /* the first of the columns */
    const int16_t *x;       /* rounded rows of num_in */
    const int32_t *sums;    /* of their blocks */
} Work;

/* totals[row * PANEL + column] = x W^T of ``num`` rows and COLUMNS outputs, in units of the rows' scales. All but ``w`` are
 * constants. */
static inline __attribute__((always_inline)) void multiply_kind(const int num, const int bits, const int halves, const int mins,
                                                                const Work *w, float *totals) {
    const int64_t num_in = w->p->num_in, block_len = w->p->block_len, num_blocks = num_in / block_len;
    const int64_t num_words = block_len * bits / 32, factor = halves ? 2 : 4;
    const int32_t zero = (int32_t)w->p->zero;
    const uint8_t *weights = w->weights;
    vf total[ROWS][PARTS];
    for (int r = 0; r < num; r++)
        for (int v = 0; v < PARTS; v++) total[r][v] = (vf){0};
    for (int64_t block = 0; block < num_blocks; block++) {
        const int16_t *x = w->x + block * block_len;
        vi s[ROWS][PARTS];
        for (int r = 0; r < num; r++)
            for (int v = 0; v < PARTS; v++) s[r][v] = (vi){0} - zero * w->sums[r * num_blocks + block];
        for (int64_t word = 0; word < num_words; word++, weights += PANEL * 4, x += 32 / bits) {
            vi q[PARTS];
            for (int v = 0; v < PARTS; v++) {
                const uint8_t *from = weights + (w->at + v * LANES) * 4;
                __builtin_prefetch(from + AHEAD, 0, 2);
                q[v] = (vi)*(const words *)from;
            }
#define ADD(k, pairs)                                                                           \
    do {                                                                                        \
        vi both[PARTS];                                                                         \
        for (int v = 0; v < PARTS; v++) both[v] = (vi)(pairs);                                  \
        for (int r = 0; r < num; r++)                                                           \
            for (int v = 0; v < PARTS; v++) s[r][v] = add_pairs(s[r][v], both[v], pair(x + r * num_in + 2 * (k))); \
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
        for (int v = 0; v < PARTS; v++) {
            const vf scale = load_factors(weights + (w->at + v * LANES) * factor, halves);
            for (int r = 0; r < num; r++) total[r][v] += __builtin_convertvector(s[r][v], vf) * scale;
        }
        weights += PANEL * factor;
        if (!mins) continue;
        for (int v = 0; v < PARTS; v++) {
            const vf min = load_factors(weights + (w->at + v * LANES) * factor, halves);
            for (int r = 0; r < num; r++) total[r][v] += (float)w->sums[r * num_blocks + block] * min;
        }
        weights += PANEL * factor;
    }
    for (int r = 0; r < num; r++)
        for (int v = 0; v < PARTS; v++) storef(totals + r * PANEL + v * LANES, total[r][v]);
}

static inline __attribute__((always_inline)) void multiply_rows(const int num, const Work *w, float *totals) {
    const Quantised *p = w->p;
    if (p->bits == 4 && p->has_mins && p->has_halves) multiply_kind(num, 4, 1, 1, w, totals);
    else if (p->bits == 4 && p->has_mins) multiply_kind(num, 4, 0, 1, w, totals);
    else if (p->bits == 4 && p->has_halves) multiply_kind(num, 4, 1, 0, w, totals);
    else if (p->bits == 4) multiply_kind(num, 4, 0, 0, w, totals);
    else if (p->has_mins) multiply_kind(num, 8, 0, 1, w, totals);
    else if (p->has_halves) multiply_kind(num, 8, 1, 0, w, totals);
    else multiply_kind(num, 8, 0, 0, w, totals);
}

static void multiply(const int num, const Work *w, float *totals) {
#define OF_ROWS(n) \
    case n: multiply_rows(n, w, totals); break;
    switch (num) {
        OF_ROWS(1)
        OF_ROWS(2)
        OF_ROWS(3)
#if ROWS > 3
        OF_ROWS(4)
#endif
#if ROWS > 4
        OF_ROWS(5)
        OF_ROWS(6)
        OF_ROWS(7)
        OF_ROWS(8)
#endif
    }
#undef OF_ROWS
}

static inline void put(elem *to, vf value, int64_t num) {
    if (num >= LANES) store_elems(to, value);
    else
        for (int64_t i = 0; i < num; i++) to[i] = store1(value[i]);
}

/* One panel times ``num`` rows, which are rounded: ``x``, ``sums`` and ``scales``. */
static void multiply_panel(const Quantised *p, int64_t panel, const int16_t *x, const int32_t *sums, const float *scales,
                           elem *out, int64_t num) {
    const int64_t num_blocks = p->num_in / p->block_len, factor = p->has_halves ? 2 : 4;
    const int64_t block_bytes = PANEL * (p->block_len * p->bits / 8 + factor * (1 + p->has_mins));
    const int64_t num_groups = (num + ROWS - 1) / ROWS;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t r = num * group / num_groups; /* groups of like sizes */
        const int some = (int)(num * (group + 1) / num_groups - r);
        float totals[ROWS * PANEL];
        for (int at = 0; at < PANEL; at += COLUMNS) {
            const Work w = {p, p->weights + panel * num_blocks * block_bytes, at, x + r * p->num_in, sums + r * num_blocks};
            multiply(some, &w, totals + at);
        }
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
    int32_t *sums = malloc(most * (num_blocks * sizeof(int32_t) + sizeof(float) + p->num_in * sizeof(int16_t)));
    if (!sums) return 1;
    float *scales = (float *)(sums + most * num_blocks);
    int16_t *to = (int16_t *)(scales + most);
#pragma omp parallel num_threads(threads_for(p->num_in *p->num_out / 8, num_threads))
    for (int64_t first = 0; first < rows; first += BATCH) {
        const int64_t num = rows - first < BATCH ? rows - first : BATCH;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num; r++)
            scales[r] = round_row(p, x + (first + r) * p->num_in, to + r * p->num_in, sums + r * num_blocks);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++)
            multiply_panel(p, panel, to, sums, scales, out + first * p->num_out, num);
    }
    free(sums);
    return 0;
}
