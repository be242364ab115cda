/* The FFNs: SwiGLU, router, routed experts, the sum of what comes home. Row-invariant by construction, float32, one thread.
 * Shape letters as in the Python modules: T rows, E experts, K experts a row, H hidden. */
#include "ops.h"

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

/* out[T][H] = (silu(x gate) * (x up)) down */
void swiglu(const struct swiglu *w, const float *x, float *scratch, float *out, int64_t num_rows) {
    int64_t both = w->gate_up.num_out, width = w->down.num_in;
    float *act = scratch + num_rows * both;
    linear(&w->gate_up, x, w->gate_up.num_in, scratch, both, num_rows);
    for (int64_t r = 0; r < num_rows; r++)
        silu_and_mul_row(scratch + r * both, scratch + r * both + width, act + r * width, width);
    linear(&w->down, act, width, out, w->down.num_out, num_rows);
}

/* Rows of consecutive groups, each through its expert; scratch is that of the largest group. */
void experts(const struct swiglu *w, const float *x, const int64_t *group_sizes, float *scratch, float *out,
             int64_t num_experts) {
    for (int64_t e = 0; e < num_experts; e++) {
        swiglu(w + e, x, scratch, out, group_sizes[e]);
        x += group_sizes[e] * w->gate_up.num_in, out += group_sizes[e] * w->down.num_out;
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
static void route_tokens(const float *logits, const float *bias, int64_t *topk_idx, float *topk_weights, int64_t num_rows,
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

/* x [T][H] to topk_idx [T][K] and topk_weights [T][K]; scratch holds [T][E]. */
void route(const struct router *r, const float *x, float *scratch, int64_t *topk_idx, float *topk_weights,
           int64_t num_rows) {
    linear(&r->gate, x, r->gate.num_in, scratch, r->gate.num_out, num_rows);
    route_tokens(scratch, r->bias, topk_idx, topk_weights, num_rows, r->gate.num_out, r->num_topk, r->num_groups,
                 r->num_topk_groups, r->best_of, r->is_sigmoid, r->norm_topk_prob, r->scale);
}

/* out[t] = shared(x[t]) + (weights[t][0] * y[t][0] + weights[t][1] * y[t][1] + ...), in this order; the sum for the first
 * num_live rows only. shared may be null. */
void moe_output(const struct swiglu *shared, const float *x, const float *y, const float *weights, float *scratch,
                float *out, int64_t num_rows, int64_t num_live, int64_t num_topk, int64_t hidden) {
    if (shared) swiglu(shared, x, scratch, out, num_rows);
    else
        for (int64_t i = 0; i < num_rows * hidden; i++) out[i] = 0;
    for (int64_t t = 0; t < num_live; t++, y += num_topk * hidden, weights += num_topk, out += hidden)
        for (int64_t h = 0; h < hidden; h++) {
            float sum = weights[0] * y[h];
            for (int64_t k = 1; k < num_topk; k++) sum = fmaf(weights[k], y[k * hidden + h], sum);
            out[h] += sum;
        }
}
