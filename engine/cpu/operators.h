/* The operators of a layer, each in a file of its own; layer.c calls them one after the other. */
#pragma once
#include "vectors.h"

/* A product with weights: x [rows][in] -> out [rows][out]. Returns 0, or 1 when there is no memory. */
typedef int Multiply(const void *product, const elem *x, elem *out, int64_t rows, int num_threads);
Multiply bf16_product, int8_linear, quantised_product; /* bf16.c, products.c, quantised.c */

void add_norm(float *residual, const elem *delta, const float *weight, elem *out, int64_t rows, int64_t size, float eps,
              int num_threads);
void gate(const elem *gate_up, elem *out, int64_t rows, int64_t size, int num_threads);
void rotate_and_store(const elem *qkv, const float *q_norm, const float *k_norm, float eps, const float *cos_rows,
                      const float *sin_rows, const int64_t *slots, float *queries, kv *keys, kv *values, int64_t rows,
                      const Shape *shape, int num_threads);
int attention(const float *queries, const kv *keys, const kv *values, const int32_t *starts, const int32_t *base_lens,
              const int32_t *tables, int64_t table_width, int64_t num_spans, elem *out, const Shape *shape,
              int products_only, int num_threads);
