/* Products over rows with packed weights. */
#pragma once
#include "vec.h"

/* A matrix [num_in][num_out], packed by pack(). */
struct packed {
    const void *data;
    int64_t num_in, num_out, is_bfloat16;
};

/* out[T][num_out] = x[T][num_in] @ w; strides between rows count elements. */
void linear(const struct packed *w, const float *x, int64_t x_stride, float *out, int64_t out_stride, int64_t num_rows);
