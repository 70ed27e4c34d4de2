/* Products of few rows with int8 weights: y = (x W^T) scale + bias, W int8 [num_out][num_in] with a scale per row.
 *
 * A row of x is rounded to 16 bits of its own scale. With 8 bits, one token in thirty of a head would be another one. Sums are
 * integers, or floats of integers in a fixed order, so a row's result does not depend on what else is in the batch or on
 * threads.
 *
 * Weights lie as [panel of 32 outputs][quad of 4 inputs][output][input of the quad]. With VNNI, x is split into two int8, 256
 * high + low, and weights are held as W + 128, unsigned, because the instruction multiplies unsigned by signed bytes; 128 sum(x)
 * is taken off at the end. Without, weights are widened to 16 bits in registers, each once for several rows; the inputs of a quad
 * lie as 0, 2, 1, 3 then, so that its even bytes are the weights of inputs 0 and 1. See int8_by_bytes.
 */
#include "operators.h"
#if __x86_64__
#include <immintrin.h>
#endif

/* Registers hold the sums of ROWS rows by COLUMNS outputs, or of WHOLE_ROWS by a whole panel. DSpark's blocks mostly have seven
 * rows. BY_BYTES: with VNNI, where a sum takes two registers. */
#if __AVX512VNNI__
enum { BY_BYTES = 1, COLUMNS = 32 };
#define ROWS 7
#define WHOLE_ROWS 7
#elif __AVX512BW__
enum { BY_BYTES = 0, COLUMNS = 32 };
#define ROWS 8
#define WHOLE_ROWS 8
#elif __AVXVNNI__ && !__AVX512BW__
enum { BY_BYTES = 1, COLUMNS = 16 };
#define ROWS 3
#define WHOLE_ROWS 1
#elif __AVX2__
enum { BY_BYTES = 0, COLUMNS = 16 };
#define ROWS 4
#define WHOLE_ROWS 2
#else
enum { BY_BYTES = 0, COLUMNS = 8 };
#define ROWS 4
#define WHOLE_ROWS 1
#endif
typedef int32_t quads __attribute__((vector_size(LANES * 4), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(LANES * 4), aligned(1)));

/* sum[i] += weights (4 unsigned bytes in lane i) . x (4 signed bytes) */
static inline vi add_bytes(vi sum, vi weights, int32_t x) {
#if __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif __AVXVNNI__ && !__AVX512BW__
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(x));
#else
    return (void)weights, (void)x, sum;
#endif
}

/* sum[i] += weights (2 signed shorts in lane i) . x (2 signed shorts) */
static inline vi add_shorts(vi sum, vi weights, int32_t x) {
#if __AVX512BW__
    return sum + (vi)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(x));
#elif __AVX2__
    return sum + (vi)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#elif __SSE2__
    return sum + (vi)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(x));
#else
    return sum + (weights << 16 >> 16) * (int32_t)(int16_t)x + (weights >> 16) * (x >> 16);
#endif
}

/* AHEAD: bytes; a panel is multiplied faster than memory answers, and hardware looks no further than a page. FLUSH: quads, as many
 * as cannot overflow a sum of products of 16 bits and 8. */
enum { QUAD = 4, PANEL = 32, PARTS = PANEL / LANES, AHEAD = 4096, LARGEST = 127 * 256 + 127, CHUNK = 64, FLUSH = 128 };
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t vs __attribute__((vector_size(LANES * 2), aligned(1)));

/* Whether weights are expected as unsigned bytes, else as signed ones with the inputs of a quad as 0, 2, 1, 3. */
int int8_by_bytes(void) { return BY_BYTES; }

typedef struct {
    float scale;
    int32_t sum_high, sum_low;
} RowInfo;

typedef struct {
    int64_t num_in, num_out, width; /* width: num_in in whole vectors */
    const uint8_t *weights;
    const float *scales, *bias; /* [num_out]; bias may be null */
    const float *columns;       /* [num_in], what inputs are multiplied with before they are rounded; may be null */
} Product;

static inline vf scaled(const elem *x, const float *columns, int64_t i) {
    return columns ? load_elems(x + i) * loadf(columns + i) : load_elems(x + i);
}
static inline float scaled1(const elem *x, const float *columns, int64_t i) {
    return columns ? load1(x[i]) * columns[i] : load1(x[i]);
}

/* ``n`` to ``to``, which has room for two bytes of each of ``width`` inputs: high and low bytes apart, or shorts. */
static inline void put_rounded(int8_t *to, int64_t width, int64_t i, vi n, vi *sum_high, vi *sum_low) {
    if (!BY_BYTES) {
        *(vs *)(to + 2 * i) = __builtin_convertvector(n, vs);
        return;
    }
    const vi low = n << 24 >> 24, high = (n - low) >> 8;
    *(vb *)(to + i) = __builtin_convertvector(high, vb);
    *(vb *)(to + width + i) = __builtin_convertvector(low, vb);
    *sum_high += high, *sum_low += low;
}

/* Rounds x to 16 bits: into ``to`` [2 width], zeros behind num_in. A row with NaN or infinity gets a NaN scale. */
static RowInfo split(const Product *p, const elem *x, int8_t *to) {
    const int64_t whole = p->num_in - p->num_in % LANES;
    vf highest = {0}, broken = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = scaled(x, p->columns, i);
        vf size = choose(v < 0, -v, v);
        highest = choose(size > highest, size, highest);
        broken += v * 0.0f;
    }
    float max = 0, sum = sum_lanes(broken);
    for (int i = 0; i < LANES; i++) max = highest[i] > max ? highest[i] : max;
    for (int64_t i = whole; i < p->num_in; i++) {
        const float v = scaled1(x, p->columns, i);
        max = fabsf(v) > max ? fabsf(v) : max;
        sum += v * 0.0f;
    }
    if (sum != 0 || max < 1e-30f) { /* NaN differs from 0 */
        memset(to, 0, 2 * p->width);
        return (RowInfo){sum, 0, 0};
    }
    const float inverse = LARGEST / max;
    vi sum_high = {0}, sum_low = {0};
    /* 1.5 * 2^23 rounds to the nearest integer, held in the low bits */
    for (int64_t i = 0; i < whole; i += LANES) {
        const vi n = (vi)(scaled(x, p->columns, i) * inverse + 12582912.0f) - 0x4b400000;
        put_rounded(to, p->width, i, n, &sum_high, &sum_low);
    }
    if (whole < p->width) {
        vi n = {0};
        for (int64_t i = whole; i < p->num_in; i++) n[i - whole] = (int32_t)lrintf(scaled1(x, p->columns, i) * inverse);
        put_rounded(to, p->width, whole, n, &sum_high, &sum_low);
    }
    RowInfo info = {max / LARGEST, 0, 0};
    for (int i = 0; i < LANES; i++) info.sum_high += sum_high[i], info.sum_low += sum_low[i];
    return info;
}

static inline int32_t word(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}

typedef struct {
    const uint8_t *weights; /* of the panel, from the first of the columns on */
    int64_t num_quads;
    const int8_t *x; /* rounded rows of 2 width bytes */
    int64_t width;
    const RowInfo *rows;
} Tile;

/* sums[row * PANEL + column] = x W^T of ``num`` rows and ``columns`` outputs, both constants, in units of the scales. */
static inline __attribute__((always_inline)) void multiply_bytes(const int num, const int columns, const Tile *t, float *sums) {
    const int vectors = columns / LANES;
    vi h[ROWS][PARTS], l[ROWS][PARTS];
    for (int r = 0; r < num; r++)
        for (int v = 0; v < vectors; v++) h[r][v] = l[r][v] = (vi){0};
    for (int64_t q = 0; q < t->num_quads; q++) {
        const uint8_t *weights = t->weights + q * PANEL * QUAD;
        vi w[PARTS];
        for (int line = 0; line < 2; line++) __builtin_prefetch(weights + line * 64 + AHEAD, 0, 2);
        for (int v = 0; v < vectors; v++) w[v] = (vi)*(const quads *)(weights + v * LANES * QUAD);
        for (int r = 0; r < num; r++) {
            const int8_t *row = t->x + 2 * r * t->width + q * QUAD;
            const int32_t xh = word(row), xl = word(row + t->width);
            for (int v = 0; v < vectors; v++) h[r][v] = add_bytes(h[r][v], w[v], xh);
            for (int v = 0; v < vectors; v++) l[r][v] = add_bytes(l[r][v], w[v], xl);
        }
    }
    for (int r = 0; r < num; r++)
        for (int v = 0; v < vectors; v++) {
            const vf high = __builtin_convertvector(h[r][v] - 128 * t->rows[r].sum_high, vf);
            const vf low = __builtin_convertvector(l[r][v] - 128 * t->rows[r].sum_low, vf);
            storef(sums + r * PANEL + v * LANES, high * 256.0f + low);
        }
}

static inline __attribute__((always_inline)) void multiply_shorts(const int num, const int columns, const Tile *t, float *sums) {
    const int vectors = columns / LANES;
    for (int64_t start = 0; start < t->num_quads; start += FLUSH) {
        const int64_t stop = t->num_quads < start + FLUSH ? t->num_quads : start + FLUSH;
        vi s[ROWS][PARTS];
        for (int r = 0; r < num; r++)
            for (int v = 0; v < vectors; v++) s[r][v] = (vi){0};
        for (int64_t q = start; q < stop; q++) {
            const uint8_t *weights = t->weights + q * PANEL * QUAD;
            const int8_t *x = t->x + 2 * q * QUAD;
            shorts bytes[PARTS], w[PARTS];
            for (int line = 0; line < 2; line++) __builtin_prefetch(weights + line * 64 + AHEAD, 0, 2);
            for (int v = 0; v < vectors; v++) {
                bytes[v] = *(const shorts *)(weights + v * LANES * QUAD);
                w[v] = bytes[v] << 8 >> 8;
            }
            for (int r = 0; r < num; r++)
                for (int v = 0; v < vectors; v++) s[r][v] = add_shorts(s[r][v], (vi)w[v], word(x + 2 * r * t->width));
            for (int v = 0; v < vectors; v++) w[v] = bytes[v] >> 8;
            for (int r = 0; r < num; r++)
                for (int v = 0; v < vectors; v++) s[r][v] = add_shorts(s[r][v], (vi)w[v], word(x + 2 * r * t->width + 4));
        }
        for (int r = 0; r < num; r++)
            for (int v = 0; v < vectors; v++) {
                float *to = sums + r * PANEL + v * LANES;
                const vf part = __builtin_convertvector(s[r][v], vf);
                storef(to, start ? loadf(to) + part : part);
            }
    }
}

static void multiply(const int num, const Tile *t, float *sums) {
#define OF_ROWS(n)                                                                     \
    case n:                                                                            \
        if (BY_BYTES) multiply_bytes(n, n <= WHOLE_ROWS ? PANEL : COLUMNS, t, sums);   \
        else multiply_shorts(n, n <= WHOLE_ROWS ? PANEL : COLUMNS, t, sums);           \
        break;
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
#endif
#if ROWS > 7
        OF_ROWS(8)
#endif
    }
#undef OF_ROWS
}

/* Into ``to`` as elements, or as floats with ``base`` (if any) added. Only ``num`` of the LANES outputs are there. */
static inline void put(elem *to, float *to_float, const float *base, vf value, int64_t num) {
    if (num == LANES) {
        if (to_float) storef(to_float, base ? value + loadf(base) : value);
        else store_elems(to, value);
        return;
    }
    for (int64_t i = 0; i < num; i++) {
        if (to_float) to_float[i] = value[i] + (base ? base[i] : 0);
        else to[i] = store1(value[i]);
    }
}

/* x [rows][num_in] -> out [rows][num_out] in elements; or, if out_float is given, out_float = product + base, whose rows are
 * base_stride apart (base may be null). Returns 0, or 1 when there is no memory. */
int int8_product(const Product *p, const elem *x, elem *out, float *out_float, const float *base, int64_t base_stride,
                 int64_t rows, int num_threads) {
    const int64_t width = p->width, num_quads = (p->num_in + QUAD - 1) / QUAD, panel_size = num_quads * QUAD * PANEL;
    const int64_t num_panels = (p->num_out + PANEL - 1) / PANEL, most = rows < CHUNK ? rows : CHUNK;
    int8_t *split_rows = malloc(most * (2 * width + sizeof(RowInfo)));
    if (!split_rows) return 1;
    RowInfo *info = (RowInfo *)(split_rows + most * 2 * width);
    const int64_t work = p->num_in * p->num_out / 8 * (rows < 8 ? 1 : (rows + 7) / 8);
#pragma omp parallel num_threads(threads_for(work, num_threads))
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t num = rows - first < CHUNK ? rows - first : CHUNK;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num; r++) {
            info[r] = split(p, x + (first + r) * p->num_in, split_rows + r * 2 * width);
        }
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++) {
            const int64_t num_groups = (num + ROWS - 1) / ROWS;
            for (int64_t group = 0; group < num_groups; group++) {
                const int64_t r = num * group / num_groups; /* groups of like sizes */
                const int some = (int)(num * (group + 1) / num_groups - r), columns = some <= WHOLE_ROWS ? PANEL : COLUMNS;
                float sums[ROWS * PANEL];
                for (int at = 0; at < PANEL; at += columns) {
                    const uint8_t *weights = p->weights + panel * panel_size + at * QUAD;
                    const Tile t = {weights, num_quads, split_rows + r * 2 * width, width, info + r};
                    multiply(some, &t, sums + at);
                }
                for (int i = 0; i < some; i++) {
                    const int64_t row = first + r + i;
                    for (int part = 0; part < PARTS; part++) {
                        const int64_t column = panel * PANEL + part * LANES, left = p->num_out - column;
                        const int64_t at = row * p->num_out + column;
                        if (left <= 0) break;
                        vf y = loadf(sums + i * PANEL + part * LANES) * (loadf(p->scales + column) * info[r + i].scale);
                        if (p->bias) y += loadf(p->bias + column);
                        put(out + at, out_float ? out_float + at : NULL, base ? base + row * base_stride + column : NULL, y,
                            left < LANES ? left : LANES);
                    }
                }
            }
        }
    }
    free(split_rows);
    return 0;
}

/* int8_product as a Multiply (operators.h). */
int int8_linear(const void *product, const elem *x, elem *out, int64_t rows, int num_threads) {
    return int8_product(product, x, out, NULL, NULL, 0, rows, num_threads);
}
