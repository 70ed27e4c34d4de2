/* Products of few rows with int8 weights: y = (x W^T) scale + bias, W int8 [num_out][num_in] with a scale per row.
 *
 * A row of x is rounded to 16 bits of its own scale and split into two int8, x = 256 high + low. With 8 bits, one token in
 * thirty of a head would be another one; reading the weights takes longer than multiplying them twice. All sums are integers,
 * so a row's result does not depend on what else is in the batch or on threads.
 *
 * Weights lie as [panel of 32 outputs][quad of 4 inputs][output][input of the quad], as W + 128, unsigned, because that is
 * what the instruction multiplies with signed numbers; 128 sum(x) is taken off at the end.
 */
#include "vectors.h"
#if __x86_64__
#include <immintrin.h>
#endif

/* sum[i] += weights (4 unsigned bytes in lane i) . x (4 signed bytes). What stays in registers is the sums of ROWS rows, high and
 * low, with a panel of weights: DSpark's blocks mostly have seven rows. */
#if __AVX512VNNI__
enum { ROWS = 7 };
static inline vi dot4(vi sum, vi weights, int32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}
#elif __AVX2__
typedef union {
    vi all;
    __m256i half[2];
} Halves;
static inline __m256i dot4_half(__m256i sum, __m256i weights, __m256i x) {
#if __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, weights, x);
#else /* bytes 0 and 2 of each lane, then 1 and 3, as 16 bits: nothing saturates */
    const __m256i bytes = _mm256_set1_epi16(0xff);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, bytes), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
enum { ROWS = 1 };
static inline vi dot4(vi sum, vi weights, int32_t x) {
    Halves s = {sum}, w = {weights};
    for (int i = 0; i < 2; i++) s.half[i] = dot4_half(s.half[i], w.half[i], _mm256_set1_epi32(x));
    return s.all;
}
#else
enum { ROWS = 1 };
static inline vi dot4(vi sum, vi weights, int32_t x) {
    const vu w = (vu)weights;
    for (int i = 0; i < 32; i += 8) sum += (vi)(w >> i & 0xff) * (int32_t)(int8_t)(x >> i);
    return sum;
}
#endif

/* AHEAD: bytes; a panel is multiplied faster than memory answers, and hardware looks no further than a page. */
enum { QUAD = 4, PARTS = 2, PANEL = PARTS * LANES, AHEAD = 4096, LARGEST = 127 * 256 + 127, CHUNK = 64 };
typedef int8_t vb __attribute__((vector_size(16), aligned(1)));

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
    return columns ? load16(x + i) * loadf(columns + i) : load16(x + i);
}
static inline float scaled1(const elem *x, const float *columns, int64_t i) {
    return columns ? load1(x[i]) * columns[i] : load1(x[i]);
}

/* x -> high [width], low [width], zeros behind num_in. A row that holds no number gets a scale that is none. */
static RowInfo split(const Product *p, const elem *x, int8_t *high, int8_t *low) {
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
    memset(high + whole, 0, p->width - whole);
    memset(low + whole, 0, p->width - whole);
    if (sum != 0 || max < 1e-30f) { /* NaN differs from 0 */
        memset(high, 0, whole);
        memset(low, 0, whole);
        return (RowInfo){sum, 0, 0};
    }
    const float inverse = LARGEST / max;
    vi sums[2] = {{0}};
    for (int64_t i = 0; i < whole; i += LANES) {
        /* 1.5 * 2^23 rounds to the nearest integer, held in the low bits */
        const vi n = (vi)(scaled(x, p->columns, i) * inverse + 12582912.0f) - 0x4b400000;
        const vi l = n << 24 >> 24, h = (n - l) >> 8;
        *(vb *)(high + i) = __builtin_convertvector(h, vb);
        *(vb *)(low + i) = __builtin_convertvector(l, vb);
        sums[0] += h, sums[1] += l;
    }
    RowInfo info = {max / LARGEST, 0, 0};
    for (int i = 0; i < LANES; i++) info.sum_high += sums[0][i], info.sum_low += sums[1][i];
    for (int64_t i = whole; i < p->num_in; i++) {
        const int32_t n = (int32_t)lrintf(scaled1(x, p->columns, i) * inverse);
        low[i] = (int8_t)(n & 0xff);
        high[i] = (int8_t)((n - low[i]) >> 8);
        info.sum_high += high[i], info.sum_low += low[i];
    }
    return info;
}

static inline int32_t quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}

typedef struct {
    const uint8_t *weights; /* of the panel */
    int64_t num_quads;
    const int8_t *x;
    int64_t width;
} Tile;

/* high[r], low[r] of ``num`` rows, a constant. */
static inline __attribute__((always_inline)) void multiply(const int num, const Tile *t, vi high[ROWS][PARTS],
                                                           vi low[ROWS][PARTS]) {
    vi h[ROWS][PARTS] = {{{0}}}, l[ROWS][PARTS] = {{{0}}};
    for (int64_t q = 0; q < t->num_quads; q++) {
        const uint8_t *weights = t->weights + q * PANEL * QUAD;
        vi w[PARTS];
        for (int p = 0; p < PARTS; p++) {
            w[p] = *(const vi *)(weights + p * LANES * QUAD);
            __builtin_prefetch(weights + p * LANES * QUAD + AHEAD, 0, 2);
        }
        for (int r = 0; r < num; r++) {
            const int8_t *row = t->x + 2 * r * t->width + q * QUAD;
            const int32_t xh = quad(row), xl = quad(row + t->width);
            for (int p = 0; p < PARTS; p++) h[r][p] = dot4(h[r][p], w[p], xh);
            for (int p = 0; p < PARTS; p++) l[r][p] = dot4(l[r][p], w[p], xl);
        }
    }
    for (int r = 0; r < num; r++)
        for (int p = 0; p < PARTS; p++) high[r][p] = h[r][p], low[r][p] = l[r][p];
}

static inline void multiply_rows(int num, const Tile *t, vi high[ROWS][PARTS], vi low[ROWS][PARTS]) {
    switch (num) {
#if __AVX512VNNI__
        case 1: multiply(1, t, high, low); break;
        case 2: multiply(2, t, high, low); break;
        case 3: multiply(3, t, high, low); break;
        case 4: multiply(4, t, high, low); break;
        case 5: multiply(5, t, high, low); break;
        case 6: multiply(6, t, high, low); break;
#endif
        default: multiply(ROWS, t, high, low);
    }
}

/* Into ``to`` as elements, or as floats with ``base`` (if any) added. Only ``num`` of the 16 outputs are there. */
static inline void put(elem *to, float *to_float, const float *base, vf value, int64_t num) {
    if (num == LANES) {
        if (to_float) storef(to_float, base ? value + loadf(base) : value);
        else store16(to, value);
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
            int8_t *high = split_rows + r * 2 * width;
            info[r] = split(p, x + (first + r) * p->num_in, high, high + width);
        }
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++) {
            for (int64_t r = 0; r < num; r += ROWS) {
                const int some = num - r < ROWS ? (int)(num - r) : ROWS;
                const Tile t = {p->weights + panel * panel_size, num_quads, split_rows + r * 2 * width, width};
                vi high[ROWS][PARTS], low[ROWS][PARTS];
                multiply_rows(some, &t, high, low);
                for (int i = 0; i < some; i++) {
                    const RowInfo *of_row = info + r + i;
                    const int64_t row = first + r + i;
                    for (int part = 0; part < PARTS; part++) {
                        const int64_t column = panel * PANEL + part * LANES, left = p->num_out - column;
                        const int64_t at = row * p->num_out + column;
                        if (left <= 0) break;
                        const vf h = __builtin_convertvector(high[i][part] - 128 * of_row->sum_high, vf);
                        const vf l = __builtin_convertvector(low[i][part] - 128 * of_row->sum_low, vf);
                        vf y = (h * 256.0f + l) * (loadf(p->scales + column) * of_row->scale);
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
