/* Float32 kernels for the CPU, one thread, row-invariant by construction: what a row's result is made of, and in what
 * order, depends on that row alone. Compiled on first use for this processor (kernels/native.py).
 *
 * Shape letters as in the Python modules: T rows, I input features, O output features, N heads, C latent dims,
 * D latent + rotary dims. All arrays are dense and row-major unless a stride is given; strides count elements.
 */
#include <math.h>
#include <stdint.h>

/* One vector register of floats, and sum + a * b with one rounding where the processor has it. The compiler is told not
 * to contract products and sums by itself (-ffp-contract=off): it may do so in one copy of a loop and not in another. */
#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define REGISTERS 32
#elif defined __FMA__
#include <immintrin.h>
#define LANES 8
#define REGISTERS 16
#elif defined __aarch64__
#include <arm_neon.h>
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }

#if defined __AVX512F__
static inline vec splat(float x) { return (vec)_mm512_set1_ps(x); }
static inline vec add_product(vec sum, vec a, vec b) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#elif defined __FMA__
static inline vec splat(float x) { return (vec)_mm256_set1_ps(x); }
static inline vec add_product(vec sum, vec a, vec b) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
#elif defined __aarch64__
static inline vec splat(float x) { return (vec)vdupq_n_f32(x); }
static inline vec add_product(vec sum, vec a, vec b) {
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}
#else
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec add_product(vec sum, vec a, vec b) { return sum + a * b; }
#endif

/* ---- products over rows ------------------------------------------------------------------------------------------
 * Each output element is one accumulator that adds x[k] * w[k][o] for k = 0, 1, ..., whatever block of rows and columns
 * it is computed in: so blocks may follow the row count and the bits do not. */

#define DEFINE_BLOCK(NAME, ROWS, VECS)                                                                                \
    static void NAME(const float *x, int64_t x_stride, const float *w, float *out, int64_t num_in, int64_t num_out) { \
        vec sum[ROWS][VECS];                                                                                          \
        for (int r = 0; r < ROWS; r++)                                                                                \
            for (int v = 0; v < VECS; v++) sum[r][v] = (vec){0};                                                      \
        for (int64_t k = 0; k < num_in; k++) {                                                                        \
            for (int v = 0; v < VECS; v++) {                                                                          \
                vec weight = load(w + k * num_out + v * LANES);                                                       \
                for (int r = 0; r < ROWS; r++)                                                                        \
                    sum[r][v] = add_product(sum[r][v], splat(x[r * x_stride + k]), weight);                           \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                                \
            for (int v = 0; v < VECS; v++) store(out + r * num_out + v * LANES, sum[r][v]);                           \
    }

/* Accumulators fill the registers but for weights and broadcasts; few rows take wide columns. */
#define WIDE_1 (REGISTERS / 2)
#define WIDE_2 (REGISTERS / 4)
#define WIDE_N (REGISTERS / 8)
DEFINE_BLOCK(block_1_wide, 1, WIDE_1)
DEFINE_BLOCK(block_1_some, 1, WIDE_N)
DEFINE_BLOCK(block_1_one, 1, 1)
DEFINE_BLOCK(block_2_wide, 2, WIDE_2)
DEFINE_BLOCK(block_2_some, 2, WIDE_N)
DEFINE_BLOCK(block_2_one, 2, 1)
DEFINE_BLOCK(block_4_some, 4, WIDE_N)
DEFINE_BLOCK(block_4_one, 4, 1)
DEFINE_BLOCK(block_6_some, 6, WIDE_N)
DEFINE_BLOCK(block_6_one, 6, 1)

typedef void (*block_fn)(const float *, int64_t, const float *, float *, int64_t, int64_t);

static void columns(const float *x, int64_t x_stride, const float *w, float *out, int64_t rows, int64_t num_in,
                    int64_t num_out, int wide, block_fn wide_fn, block_fn some_fn, block_fn one_fn) {
    int64_t o = 0;
    for (; o + wide * LANES <= num_out; o += wide * LANES) wide_fn(x, x_stride, w + o, out + o, num_in, num_out);
    for (; o + WIDE_N * LANES <= num_out; o += WIDE_N * LANES) some_fn(x, x_stride, w + o, out + o, num_in, num_out);
    for (; o + LANES <= num_out; o += LANES) one_fn(x, x_stride, w + o, out + o, num_in, num_out);
    for (; o < num_out; o++)
        for (int64_t r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t k = 0; k < num_in; k++) sum = fmaf(x[r * x_stride + k], w[k * num_out + o], sum);
            out[r * num_out + o] = sum;
        }
}

/* out[T][O] = x[T][I] @ w[I][O] */
void matmul_rows(const float *x, int64_t x_stride, const float *w, float *out, int64_t num_rows, int64_t num_in,
                 int64_t num_out) {
    while (num_rows > 0) {
        int64_t rows = num_rows >= 6 ? 6 : num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1;
        if (rows == 6) columns(x, x_stride, w, out, 6, num_in, num_out, WIDE_N, block_6_some, block_6_some, block_6_one);
        if (rows == 4) columns(x, x_stride, w, out, 4, num_in, num_out, WIDE_N, block_4_some, block_4_some, block_4_one);
        if (rows == 2) columns(x, x_stride, w, out, 2, num_in, num_out, WIDE_2, block_2_wide, block_2_some, block_2_one);
        if (rows == 1) columns(x, x_stride, w, out, 1, num_in, num_out, WIDE_1, block_1_wide, block_1_some, block_1_one);
        x += rows * x_stride, out += rows * num_out, num_rows -= rows;
    }
}

/* ---- exp ---------------------------------------------------------------------------------------------------------
 * 2^n * p(r), the polynomial of the Cephes library (expf), for arguments clamped to [-87, 88]: no denormals. */
static inline vec exp_vec(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = x[i] < -87.0f ? -87.0f : x[i] > 88.0f ? 88.0f : x[i];
    vec scaled = x * 1.44269504088896341f;
    ivec n;
    for (int i = 0; i < LANES; i++) n[i] = (int32_t)(scaled[i] + (scaled[i] < 0 ? -0.5f : 0.5f));
    vec whole;
    for (int i = 0; i < LANES; i++) whole[i] = (float)n[i];
    vec r = add_product(add_product(x, whole, splat(-0.693359375f)), whole, splat(2.12194440e-4f));
    vec p = add_product(splat(1.3981999507e-3f), splat(1.9875691500e-4f), r);
    p = add_product(splat(8.3334519073e-3f), p, r);
    p = add_product(splat(4.1665795894e-2f), p, r);
    p = add_product(splat(1.6666665459e-1f), p, r);
    p = add_product(splat(5.0000001201e-1f), p, r);
    p = add_product(r, p, r * r) + 1.0f;
    ivec bits = (n + 127) << 23;
    return p * (vec)bits;
}

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */
static inline float silu(float x) { return x / (1.0f + expf(-x)); }

static void silu_and_mul_row(const float *gate, const float *up, float *out, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec g = load(gate + i);
        store(out + i, g / (1.0f + exp_vec(-g)) * load(up + i));
    }
    for (; i < width; i++) out[i] = silu(gate[i]) * up[i];
}

void silu_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t width) {
    for (int64_t r = 0; r < num_rows; r++, gate_up += 2 * width, out += width)
        silu_and_mul_row(gate_up, gate_up + width, out, width);
}

/* Rows of consecutive groups, each through its expert: out = (silu(x gate) * (x up)) down.
 * scratch holds 3 * width floats for each row of the largest group. */
void grouped_swiglu(const float *x, const float *gate_up, const float *down, const int64_t *group_sizes, float *out,
                    float *scratch, int64_t num_experts, int64_t hidden, int64_t width) {
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t rows = group_sizes[e];
        if (!rows) continue;
        float *both = scratch, *act = scratch + rows * 2 * width;
        matmul_rows(x, hidden, gate_up + e * hidden * 2 * width, both, rows, hidden, 2 * width);
        silu_and_mul(both, act, rows, width);
        matmul_rows(act, width, down + e * width * hidden, out, rows, width, hidden);
        x += rows * hidden, out += rows * hidden;
    }
}

/* ---- RMSNorm ----------------------------------------------------------------------------------------------------- */
static inline float sum_lanes(vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

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

/* ---- rotation, query rows and cache rows of latent attention ------------------------------------------------------ */
static inline void rotate(const float *x, const float *cis, float *out, int64_t rotary) {
    for (int64_t i = 0; i < rotary; i += 2) {
        float even = x[i], odd = x[i + 1], cosine = cis[i], sine = cis[i + 1];
        out[i] = even * cosine - odd * sine;
        out[i + 1] = odd * cosine + even * sine;
    }
}

static inline void copy(const float *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
}

/* q [T][N][nope + rotary], absorbed [N][T][latent], kv_latent [T][latent], k_pe [T] rows k_pe_stride apart,
 * cis [T][rotary], cache rows [..][latent + rotary] at row_idx [T]; out [T][N][latent + rotary]. */
void latent_rows(const float *q, const float *absorbed, const float *kv_latent, const float *k_pe, int64_t k_pe_stride,
                 const float *cis, float *cache, const int64_t *row_idx, float *out, int64_t num_rows,
                 int64_t num_heads, int64_t nope, int64_t latent, int64_t rotary) {
    for (int64_t t = 0; t < num_rows; t++, cis += rotary) {
        float *row = cache + row_idx[t] * (latent + rotary);
        copy(kv_latent + t * latent, row, latent);
        rotate(k_pe + t * k_pe_stride, cis, row + latent, rotary);
        for (int64_t n = 0; n < num_heads; n++, out += latent + rotary, q += nope + rotary) {
            copy(absorbed + (n * num_rows + t) * latent, out, latent);
            rotate(q + nope, cis, out + latent, rotary);
        }
    }
}

/* ---- router ------------------------------------------------------------------------------------------------------- */

/* Mark the `count` best not yet marked, by value, ties to the lowest index. */
static void take_best(const float *values, int64_t num, int64_t count, unsigned char *taken) {
    for (int64_t i = 0; i < count; i++) {
        int64_t best = -1;
        for (int64_t j = 0; j < num; j++)
            if (!taken[j] && (best < 0 || values[j] > values[best])) best = j;
        if (best >= 0) taken[best] = 1;
    }
}

static void keep_groups(float *choice, int64_t num_experts, int64_t num_groups, int64_t kept, int64_t best_of) {
    int64_t size = num_experts / num_groups;
    float group_scores[num_groups];
    unsigned char taken[num_groups];
    for (int64_t g = 0; g < num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            float value = choice[i];
            if (value > first) second = first, first = value;
            else if (value > second) second = value;
        }
        group_scores[g] = best_of > 1 && size > 1 ? first + second : first;
        taken[g] = 0;
    }
    take_best(group_scores, num_groups, kept, taken);
    for (int64_t i = 0; i < num_experts; i++)
        if (!taken[i / size]) choice[i] = -INFINITY;
}

/* logits [T][E]; bias [E] or null; topk_idx [T][K] ascending; topk_weights [T][K]. */
void route_tokens(const float *logits, const float *bias, int64_t *topk_idx, float *topk_weights, int64_t num_rows,
                  int64_t num_experts, int64_t num_topk, int64_t num_groups, int64_t num_topk_groups, int64_t best_of,
                  int64_t is_sigmoid, int64_t norm_topk_prob, float scale) {
    float scores[num_experts], choice[num_experts];
    unsigned char taken[num_experts];
    for (int64_t t = 0; t < num_rows; t++, logits += num_experts, topk_idx += num_topk, topk_weights += num_topk) {
        float top = -INFINITY, total = 0;
        for (int64_t e = 0; e < num_experts; e++) top = logits[e] > top ? logits[e] : top;
        for (int64_t e = 0; e < num_experts; e++)
            total += scores[e] = is_sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : expf(logits[e] - top);
        for (int64_t e = 0; e < num_experts; e++) {
            scores[e] = is_sigmoid ? scores[e] : scores[e] / total;
            choice[e] = bias ? scores[e] + bias[e] : scores[e];
            taken[e] = 0;
        }
        if (num_groups > 1) keep_groups(choice, num_experts, num_groups, num_topk_groups, best_of);
        take_best(choice, num_experts, num_topk, taken);
        float chosen = 0;
        for (int64_t e = 0, k = 0; e < num_experts; e++)
            if (taken[e]) topk_idx[k] = e, topk_weights[k] = scores[e], chosen += scores[e], k++;
        for (int64_t k = 0; k < num_topk; k++)
            topk_weights[k] = (norm_topk_prob ? topk_weights[k] / (chosen + 1e-20f) : topk_weights[k]) * scale;
    }
}

/* y [T][K][H], weights [T][K]: out[T][H] = weights[0] * y[0] + weights[1] * y[1] + ... in this order. */
void weighted_sum(const float *y, const float *weights, float *out, int64_t num_rows, int64_t num_topk,
                  int64_t hidden) {
    for (int64_t t = 0; t < num_rows; t++, y += num_topk * hidden, weights += num_topk, out += hidden)
        for (int64_t h = 0; h < hidden; h++) {
            float sum = weights[0] * y[h];
            for (int64_t k = 1; k < num_topk; k++) sum = fmaf(weights[k], y[k * hidden + h], sum);
            out[h] = sum;
        }
}
