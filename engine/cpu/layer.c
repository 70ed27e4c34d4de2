/* A decoder layer by one call, with the operators of the other files and so with their results, bit by bit.
 *
 * Called one by one from Python, the nine operators of a layer release the interpreter's lock nine times, and threads of the team
 * fall asleep between them. At one row the calls take longer than the smaller operators.
 */
#include "operators.h"

/* As in engine/cpu/native_product.py. */
typedef struct {
    Multiply *multiply;
    const void *product;
    int64_t num_out;
} NativeProduct;

/* As in engine/cpu/layer.py. */
typedef struct {
    NativeProduct qkv, out, gate_up, down;
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm; /* may be null */
    int64_t hidden;
    float eps;
} DecoderLayer;

/* At a cache line, as torch's tensors are: rows of tiles are loaded a line at a time. */
static void *aligned(int64_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }

/* Adds delta (if any) and the attention to residual [rows][hidden]; out [rows][hidden]: the feed-forward output, still to be
 * added. cos_rows, sin_rows, slots: of rows; the other operands, from starts on: of attention (attention.c). Returns 0, or 1
 * when there is no memory. */
int decoder_layer(const DecoderLayer *l, float *residual, const elem *delta, elem *out, int64_t rows, const float *cos_rows,
                  const float *sin_rows, const int64_t *slots, const int32_t *starts, const int32_t *base_lens,
                  const int32_t *tables, int64_t table_width, int64_t num_spans, kv *keys, kv *values,
                  const Shape *shape, int num_threads) {
    const int64_t q_size = shape->heads * shape->head_dim, qkv_size = l->qkv.num_out, both = l->gate_up.num_out;
    /* Each by itself: from 32 MiB on, glibc maps a block anew each time. */
    float *queries = aligned(rows * q_size * sizeof(float));
    elem *normed = aligned(rows * l->hidden * sizeof(elem)), *qkv = aligned(rows * qkv_size * sizeof(elem));
    elem *attended = aligned(rows * q_size * sizeof(elem)), *gate_up = aligned(rows * both * sizeof(elem));
    elem *gated = aligned(rows * (both / 2) * sizeof(elem));
    int failed = 1;
    if (!queries || !normed || !qkv || !attended || !gate_up || !gated) goto end;
#define PRODUCT(of, x, y) \
    if (l->of.multiply(l->of.product, x, y, rows, num_threads)) goto end
    add_norm(residual, delta, l->input_norm, normed, rows, l->hidden, l->eps, num_threads);
    PRODUCT(qkv, normed, qkv);
    rotate_and_store(qkv, l->q_norm, l->k_norm, l->eps, cos_rows, sin_rows, slots, queries, keys, values, rows, shape,
                     num_threads);
    if (attention(queries, keys, values, starts, base_lens, tables, table_width, num_spans, attended, shape, 0, num_threads))
        goto end;
    PRODUCT(out, attended, out);
    add_norm(residual, out, l->post_norm, normed, rows, l->hidden, l->eps, num_threads);
    PRODUCT(gate_up, normed, gate_up);
    gate(gate_up, gated, rows, both / 2, num_threads);
    PRODUCT(down, gated, out);
#undef PRODUCT
    failed = 0;
end:
    free(queries), free(normed), free(qkv), free(attended), free(gate_up), free(gated);
    return failed;
}
