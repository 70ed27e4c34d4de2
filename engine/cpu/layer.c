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

/* As in engine/cpu/ops.py. */
typedef struct {
    NativeProduct qkv, out, gate_up, down;
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm; /* may be null */
    int64_t hidden;
    float eps;
} DecoderLayer;

/* CHUNK: rows that all but the attention takes at once, so that what it works in stays in caches. */
enum { CHUNK = 256, LINE = 64 };

static int64_t at_most(int64_t rows) { return rows < CHUNK ? rows : CHUNK; }

/* Takes ``size`` bytes at a cache line, as torch's tensors are: rows of tiles are loaded a line at a time. */
static void *take(char **scratch, int64_t size) {
    void *taken = *scratch;
    *scratch += (size + LINE - 1) / LINE * LINE;
    return taken;
}

typedef struct {
    float *queries;                /* [rows][q_size] */
    elem *attended;                /* the same */
    elem *normed, *wide, *gated;   /* of a chunk: [hidden], [qkv or gate and up], [half of gate and up] */
} Buffers;

static Buffers lay_out(const DecoderLayer *l, int64_t rows, const Shape *shape, char **scratch) {
    const int64_t q_size = shape->heads * shape->head_dim, both = l->gate_up.num_out, some = at_most(rows);
    Buffers b;
    b.queries = take(scratch, rows * q_size * sizeof(float));
    b.attended = take(scratch, rows * q_size * sizeof(elem));
    b.normed = take(scratch, some * l->hidden * sizeof(elem));
    b.wide = take(scratch, some * (both > l->qkv.num_out ? both : l->qkv.num_out) * sizeof(elem));
    b.gated = take(scratch, some * (both / 2) * sizeof(elem));
    return b;
}

/* Bytes that a pass of ``rows`` works in. */
int64_t layer_scratch(const DecoderLayer *l, int64_t rows, const Shape *shape) {
    char *end = NULL;
    lay_out(l, rows, shape, &end);
    return (int64_t)(intptr_t)end;
}

/* Adds delta (if any) and the attention to residual [rows][hidden]; out [rows][hidden]: the feed-forward output, still to be
 * added. cos_rows, sin_rows, slots: of rows; the other operands, from starts on: of attention (attention.c). ``scratch``: at a
 * cache line, of layer_scratch. Returns 0, or 1 when there is no memory. */
int decoder_layer(const DecoderLayer *l, float *residual, const elem *delta, elem *out, int64_t rows, const float *cos_rows,
                  const float *sin_rows, const int64_t *slots, const int32_t *starts, const int32_t *base_lens,
                  const int32_t *tables, int64_t table_width, int64_t num_spans, kv *keys, kv *values,
                  const Shape *shape, char *scratch, int num_threads) {
    const int64_t q_size = shape->heads * shape->head_dim, half = shape->head_dim / 2, hidden = l->hidden;
    const Buffers b = lay_out(l, rows, shape, &scratch);
#define PRODUCT(of, x, y) \
    if (l->of.multiply(l->of.product, x, y, num, num_threads)) return 1
    for (int64_t r = 0, num; r < rows; r += num) {
        num = at_most(rows - r);
        add_norm(residual + r * hidden, delta ? delta + r * hidden : NULL, l->input_norm, b.normed, num, hidden, l->eps,
                 num_threads);
        PRODUCT(qkv, b.normed, b.wide);
        rotate_and_store(b.wide, l->q_norm, l->k_norm, l->eps, cos_rows + r * half, sin_rows + r * half, slots + r,
                         b.queries + r * q_size, keys, values, num, shape, num_threads);
    }
    if (attention(b.queries, keys, values, starts, base_lens, tables, table_width, num_spans, b.attended, shape, 0, num_threads))
        return 1;
    for (int64_t r = 0, num; r < rows; r += num) {
        num = at_most(rows - r);
        PRODUCT(out, b.attended + r * q_size, out + r * hidden);
        add_norm(residual + r * hidden, out + r * hidden, l->post_norm, b.normed, num, hidden, l->eps, num_threads);
        PRODUCT(gate_up, b.normed, b.wide);
        gate(b.wide, b.gated, num, l->gate_up.num_out / 2, num_threads);
        PRODUCT(down, b.gated, out + r * hidden);
    }
#undef PRODUCT
    return 0;
}
