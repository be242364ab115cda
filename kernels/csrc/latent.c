/* Latent attention and RMSNorm. Row-invariant by construction: what a row's result is made of, and in what order, depends
 * on that row alone. Float32, one thread. Shape letters as in the Python modules: T rows, N heads, C latent dims,
 * D latent + rotary dims. All arrays are dense and row-major unless a stride is given; strides count elements. */
#include "ops.h"

/* ---- RMSNorm ----------------------------------------------------------------------------------------------------- */
void rms_norm(const float *x, int64_t x_stride, const float *weight, float *out, int64_t num_rows, int64_t hidden,
              float eps) {
    for (int64_t r = 0; r < num_rows; r++, x += x_stride, out += hidden) {
        vec squares = {0};
        int64_t i = 0;
        for (; i + LANES <= hidden; i += LANES) squares = add_product(squares, load(x + i), load(x + i));
        float sum = sum_lanes(squares);
        for (int64_t j = i; j < hidden; j++) sum = fmaf(x[j], x[j], sum);
        float scale = 1.0f / sqrtf(sum / hidden + eps);
        for (i = 0; i + LANES <= hidden; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
        for (; i < hidden; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* ---- latent attention, absorbed, paged ---------------------------------------------------------------------------
 * One row and head at a time: scores of a split of SPLIT visible tokens, their max, weights, values; splits are merged
 * in order. Nothing that the row does not see is read. */
#define SPLIT 256

static inline float dot(const float *a, const float *b, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = add_product(sum, load(a + i), load(b + i));
    float total = sum_lanes(sum);
    for (; i < n; i++) total = fmaf(a[i], b[i], total);
    return total;
}

static void attend_split(const float *q, const float *const *rows, int64_t num_tokens, float scale, int64_t dim,
                         int64_t latent, float *max, float *sum, float *out) {
    float scores[SPLIT];
    float top = *max;
    for (int64_t s = 0; s < num_tokens; s++) {
        scores[s] = dot(q, rows[s], dim) * scale;
        top = scores[s] > top ? scores[s] : top;
    }
    for (int64_t s = num_tokens; s % LANES; s++) scores[s] = top; /* fill the last vector; not read below */
    for (int64_t s = 0; s < num_tokens; s += LANES) store(scores + s, exp_vec(load(scores + s) - top));
    float old = *max == -INFINITY ? 0.0f : expf(*max - top);
    float total = *sum * old;
    for (int64_t s = 0; s < num_tokens; s++) total += scores[s];
    int64_t c = 0;
    for (; c + 4 * LANES <= latent; c += 4 * LANES) {
        vec a[4];
        for (int v = 0; v < 4; v++) a[v] = load(out + c + v * LANES) * old;
        for (int64_t s = 0; s < num_tokens; s++)
            for (int v = 0; v < 4; v++) a[v] = add_product(a[v], splat(scores[s]), load(rows[s] + c + v * LANES));
        for (int v = 0; v < 4; v++) store(out + c + v * LANES, a[v]);
    }
    for (; c < latent; c++) {
        float a = out[c] * old;
        for (int64_t s = 0; s < num_tokens; s++) a = fmaf(scores[s], rows[s][c], a);
        out[c] = a;
    }
    *max = top, *sum = total;
}

/* q [T][N][dim], blocks [X][page_tokens][dim], block_idx [T or 1][pages] (block_stride 0: all rows share one list),
 * seq_lens [T], out [T][N][latent]. */
void latent_attention(const float *q, const float *blocks, const int64_t *block_idx, int64_t block_stride,
                      const int64_t *seq_lens, float *out, int64_t num_rows, int64_t num_heads, int64_t dim,
                      int64_t latent, int64_t page_tokens, float scale) {
    const float *rows[SPLIT];
    for (int64_t t = 0; t < num_rows; t++, block_idx += block_stride) {
        float max[num_heads], sum[num_heads];
        for (int64_t n = 0; n < num_heads; n++) max[n] = -INFINITY, sum[n] = 0;
        for (int64_t i = 0; i < num_heads * latent; i++) out[i] = 0;
        for (int64_t first = 0; first < seq_lens[t]; first += SPLIT) {
            int64_t left = seq_lens[t] - first, num_tokens = left < SPLIT ? left : SPLIT;
            for (int64_t s = 0; s < num_tokens; s++) {
                int64_t token = first + s;
                rows[s] = blocks + (block_idx[token / page_tokens] * page_tokens + token % page_tokens) * dim;
            }
            for (int64_t n = 0; n < num_heads; n++)
                attend_split(q + n * dim, rows, num_tokens, scale, dim, latent, max + n, sum + n, out + n * latent);
        }
        for (int64_t n = 0; n < num_heads; n++)
            for (int64_t c = 0; c < latent; c++) out[n * latent + c] /= sum[n];
        q += num_heads * dim, out += num_heads * latent;
    }
}

/* ---- the layer around it ------------------------------------------------------------------------------------------- */
static inline void rotate(const float *x, const float *cis, float *out, int64_t rotary) {
    for (int64_t i = 0; i < rotary; i += 2) {
        float even = x[i], odd = x[i + 1], cosine = cis[i], sine = cis[i + 1];
        out[i] = even * cosine - odd * sine;
        out[i + 1] = odd * cosine + even * sine;
    }
}

/* x [T][hidden] to queries out [T][N][latent + rotary]: absorbed, then rotated; the rows' latents and rotated keys go to
 * cache [..][latent + rotary] at row_idx [T]; cis [T][rotary]. Scratch: what the three products give, for each row. */
void latent_project(const struct latent_project *l, const float *x, const float *cis, float *cache, const int64_t *row_idx,
                    float *scratch, float *out, int64_t num_rows) {
    int64_t width = l->qkv_a.num_out, dim = l->latent + l->rotary, head = l->nope + l->rotary;
    int64_t num_q = width - dim, q_stride = width;
    float *q = scratch, *kv = scratch + num_q;
    linear(&l->qkv_a, x, l->qkv_a.num_in, scratch, width, num_rows);
    if (l->q_b.num_in) {
        float *normed = scratch + num_rows * width;
        rms_norm(q, width, l->q_a_norm, normed, num_rows, num_q, l->eps);
        q = normed + num_rows * num_q, q_stride = l->q_b.num_out;
        linear(&l->q_b, normed, num_q, q, q_stride, num_rows);
    }
    for (int64_t t = 0; t < num_rows; t++) {
        float *row = cache + row_idx[t] * dim;
        rms_norm(kv + t * width, width, l->kv_a_norm, row, 1, l->latent, l->eps);
        rotate(kv + t * width + l->latent, cis + t * l->rotary, row + l->latent, l->rotary);
        for (int64_t n = 0; n < l->num_heads; n++)
            rotate(q + t * q_stride + n * head + l->nope, cis + t * l->rotary,
                   out + (t * l->num_heads + n) * dim + l->latent, l->rotary);
    }
    for (int64_t n = 0; n < l->num_heads; n++)
        linear(l->w_uk + n, q + n * head, q_stride, out + n * dim, l->num_heads * dim, num_rows);
}

/* What attention gave, [T][N][latent], to out [T][hidden]; scratch [T][N][value]. */
void latent_output(const struct latent_output *l, const float *attended, float *scratch, float *out, int64_t num_rows) {
    int64_t width = l->num_heads * l->value;
    for (int64_t n = 0; n < l->num_heads; n++)
        linear(l->w_uv + n, attended + n * l->latent, l->num_heads * l->latent, scratch + n * l->value, width, num_rows);
    linear(&l->o_proj, scratch, width, out, l->o_proj.num_out, num_rows);
}
