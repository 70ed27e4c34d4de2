/* The operators of a forward pass that are neither matrix products nor attention, for one CPU.
 *
 * Compiled once per element type: ELEM_BF16 selects bfloat16 for activations and KV cache, else they are float. All sums are
 * float. Vectors are GCC's own (gcc, clang), so the same text becomes AVX-512, AVX2, NEON or plain C.
 *
 * Layouts of queries, keys and values: attention.c.
 */
#include "operators.h"

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
            if (d) storef(x + i, v = v + load_elems(d + i));
            squares += v * v;
        }
        float sum = sum_lanes(squares);
        for (int64_t i = whole; i < size; i++) {
            if (d) x[i] += load1(d[i]);
            sum += x[i] * x[i];
        }
        const float scale = 1.0f / sqrtf(sum / (float)size + eps);
        for (int64_t i = 0; i < whole; i += LANES) store_elems(y + i, loadf(x + i) * scale * loadf(weight + i));
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
            vf x = load_elems(g + i);
            store_elems(y + i, x / (1.0f + exp_lanes(-x)) * load_elems(up + i));
        }
        for (int64_t i = whole; i < size; i++) {
            float x = load1(g[i]);
            y[i] = store1(x / (1.0f + expf(-x)) * load1(up[i]));
        }
    }
}

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
                      const float *sin_rows, const int64_t *slots, float *queries, kv *keys, kv *values, int64_t rows,
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
            kv *to = keys + (block * kv_heads + h) * D * B + offset;
            for (int64_t i = 0; i < D; i++) to[i * B] = store_kv(key[i]);
            const elem *value = x + (heads + kv_heads + h) * D;
            kv *value_to = values + ((block * kv_heads + h) * B + offset) * D;
            for (int64_t i = 0; i < D; i++) value_to[i] = store_kv(load1(value[i]));
        }
    }
}
