/* Products over rows, row-invariant by construction: each output element is one accumulator that adds x[k] * w[k][o] for
 * k = 0, 1, ..., whatever block of rows and columns it is computed in. So blocks follow the row count and bits do not.
 *
 * Packed weights are panels of PANEL columns, one after the other, each [num_in][PANEL] and read from its beginning to its
 * end for up to ROWS rows at once. A panel stays in the cache for the next rows, so that weights come from memory once.
 * The last panel is padded with zeros to whole vectors. Weights that bfloat16 holds without loss are kept as bfloat16
 * and widened in the register: half the bytes, the same bits. Two vectors of them lie interleaved, the first in the lower
 * halves of the words, so that one operation widens each. */
#include <stddef.h>

#include "linear.h"

#define MAX_VECS (NUM_REGISTERS / 8)
#define PANEL (MAX_VECS * LANES)
#define AHEAD_BYTES 2048 /* weights are asked for so far ahead: the processor's own prefetch ends with each 4 KiB page */

typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint32_t loose_uvec __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

/* Vector v of a panel's row that has `vecs` of them. */
static inline vec load_float32(const float *row, int v, int vecs) {
    (void)vecs;
    return load(row + v * LANES);
}
static inline vec load_bfloat16(const uint16_t *row, int v, int vecs) {
    if (v == vecs - 1 && v % 2 == 0) /* the last one, without a partner */
        return (vec)(__builtin_convertvector(*(const half_vec *)(row + v * LANES), uvec) << 16);
    uvec both = *(const loose_uvec *)(row + (v & ~1) * LANES);
    return (vec)(v % 2 ? (both & 0xffff0000u) : (both << 16));
}

static int64_t padded(int64_t num_out) { return (num_out + LANES - 1) / LANES * LANES; }

/* Elements that pack() writes. */
int64_t packed_elements(int64_t num_in, int64_t num_out) { return num_in * padded(num_out); }

/* Where column o of a row of `vecs` vectors lies, in halves. */
static int64_t interleaved(int64_t o, int64_t vecs) {
    int64_t v = o / LANES, lane = o % LANES;
    return v == vecs - 1 && v % 2 == 0 ? o : (v & ~1) * LANES + 2 * lane + v % 2;
}

/* w [num_in][num_out] into panels; is_bfloat16: its values have no bit below the upper half. */
void pack(const float *w, void *to, int64_t num_in, int64_t num_out, int64_t is_bfloat16) {
    float *floats = to;
    uint16_t *halves = to;
    for (int64_t first = 0, width; first < num_out; first += PANEL, floats += num_in * width, halves += num_in * width) {
        width = padded(num_out - first) < PANEL ? padded(num_out - first) : PANEL;
        for (int64_t k = 0; k < num_in; k++)
            for (int64_t o = 0; o < width; o++) {
                union { float value; uint32_t bits; } element = {
                    .value = first + o < num_out ? w[k * num_out + first + o] : 0.0f};
                if (is_bfloat16) halves[k * width + interleaved(o, width / LANES)] = element.bits >> 16;
                else floats[k * width + o] = element.value;
            }
    }
}

/* ROWS rows by VECS vectors of one panel that is VECS wide; of the last vector `tail` columns are stored. */
#define DEFINE_BLOCK(TYPE, ELEMENT, ROWS, VECS)                                                                       \
    static void TYPE##_##ROWS##_##VECS(const ELEMENT *w, const float *x, int64_t x_stride, float *out,                \
                                       int64_t out_stride, int64_t num_in, int64_t tail) {                            \
        vec sum[ROWS][VECS];                                                                                          \
        for (int r = 0; r < ROWS; r++)                                                                                \
            for (int v = 0; v < VECS; v++) sum[r][v] = (vec){0};                                                      \
        for (int64_t k = 0; k < num_in; k++, w += VECS * LANES) {                                                     \
            for (size_t line = 0; line < VECS * LANES * sizeof(ELEMENT); line += 64)                                  \
                __builtin_prefetch((const char *)w + AHEAD_BYTES + line, 0, 2);                                       \
            for (int v = 0; v < VECS; v++) {                                                                          \
                vec weight = load_##TYPE(w, v, VECS);                                                                     \
                for (int r = 0; r < ROWS; r++)                                                                        \
                    sum[r][v] = add_product(sum[r][v], splat(x[r * x_stride + k]), weight);                           \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < ROWS; r++, out += out_stride) {                                                           \
            for (int v = 0; v < VECS - 1; v++) store(out + v * LANES, sum[r][v]);                                     \
            if (tail == LANES) store(out + (VECS - 1) * LANES, sum[r][VECS - 1]);                                     \
            else                                                                                                      \
                for (int64_t i = 0; i < tail; i++) out[(VECS - 1) * LANES + i] = sum[r][VECS - 1][i];                 \
        }                                                                                                             \
    }

#define DEFINE_PANEL(TYPE, ELEMENT, VECS)                                                                             \
    DEFINE_BLOCK(TYPE, ELEMENT, 1, VECS)                                                                              \
    DEFINE_BLOCK(TYPE, ELEMENT, 2, VECS)                                                                              \
    DEFINE_BLOCK(TYPE, ELEMENT, 4, VECS)                                                                              \
    DEFINE_BLOCK(TYPE, ELEMENT, 6, VECS)                                                                              \
    static void TYPE##_panel_##VECS(const ELEMENT *w, const float *x, int64_t x_stride, float *out,                   \
                                    int64_t out_stride, int64_t num_in, int64_t tail, int64_t num_rows) {             \
        for (int64_t rows; num_rows > 0; x += rows * x_stride, out += rows * out_stride, num_rows -= rows) {          \
            rows = num_rows == 4 || num_rows == 8 ? 4 : num_rows >= 6 ? 6 : num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1;  \
            if (rows == 6) TYPE##_6_##VECS(w, x, x_stride, out, out_stride, num_in, tail);                            \
            else if (rows == 4) TYPE##_4_##VECS(w, x, x_stride, out, out_stride, num_in, tail);                       \
            else if (rows == 2) TYPE##_2_##VECS(w, x, x_stride, out, out_stride, num_in, tail);                       \
            else TYPE##_1_##VECS(w, x, x_stride, out, out_stride, num_in, tail);                                      \
        }                                                                                                             \
    }

#define DEFINE_LINEAR(TYPE, ELEMENT)                                                                                  \
    DEFINE_PANEL(TYPE, ELEMENT, 1)                                                                                    \
    DEFINE_PANEL(TYPE, ELEMENT, 2)                                                                                    \
    DEFINE_PANEL(TYPE, ELEMENT, 3)                                                                                    \
    DEFINE_PANEL(TYPE, ELEMENT, 4)                                                                                    \
    static void linear_##TYPE(const struct packed *p, const float *x, int64_t x_stride, float *out,                   \
                              int64_t out_stride, int64_t num_rows) {                                                 \
        const ELEMENT *w = p->data;                                                                                   \
        for (int64_t left = p->num_out; left > 0; left -= PANEL, out += PANEL, w += p->num_in * PANEL) {              \
            int64_t width = left < PANEL ? left : PANEL, vecs = padded(width) / LANES;                                \
            int64_t tail = width - (vecs - 1) * LANES;                                                                \
            if (vecs == 4) TYPE##_panel_4(w, x, x_stride, out, out_stride, p->num_in, tail, num_rows);                \
            else if (vecs == 3) TYPE##_panel_3(w, x, x_stride, out, out_stride, p->num_in, tail, num_rows);           \
            else if (vecs == 2) TYPE##_panel_2(w, x, x_stride, out, out_stride, p->num_in, tail, num_rows);           \
            else TYPE##_panel_1(w, x, x_stride, out, out_stride, p->num_in, tail, num_rows);                          \
        }                                                                                                             \
    }

DEFINE_LINEAR(float32, float)
DEFINE_LINEAR(bfloat16, uint16_t)

void linear(const struct packed *w, const float *x, int64_t x_stride, float *out, int64_t out_stride,
            int64_t num_rows) {
    if (w->is_bfloat16) linear_bfloat16(w, x, x_stride, out, out_stride, num_rows);
    else linear_float32(w, x, x_stride, out, out_stride, num_rows);
}
