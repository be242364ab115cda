/* What the ops are made of, and what they do; each is described where it is defined. */
#pragma once
#include "linear.h"

/* latent.c */
/* From the layer's input to queries and cache rows. */
struct latent_project {
    struct packed qkv_a, q_b;    /* q_b.num_in is 0 where there is none */
    const struct packed *w_uk;   /* [N]: nope -> latent */
    const float *q_a_norm, *kv_a_norm;
    int64_t num_heads, nope, latent, rotary;
    float eps;
};

/* From what attention gave to the layer's output. */
struct latent_output {
    struct packed o_proj;
    const struct packed *w_uv;   /* [N]: latent -> value */
    int64_t num_heads, latent, value;
};

void rms_norm(const float *x, int64_t x_stride, const float *weight, float *out, int64_t num_rows, int64_t hidden,
              float eps);
void latent_attention(const float *q, const float *blocks, const int64_t *block_idx, int64_t block_stride,
                      const int64_t *seq_lens, float *out, int64_t num_rows, int64_t num_heads, int64_t dim,
                      int64_t latent, int64_t page_tokens, float scale);
void latent_project(const struct latent_project *l, const float *x, const float *cis, float *cache,
                    const int64_t *row_idx, float *scratch, float *out, int64_t num_rows);
void latent_output(const struct latent_output *l, const float *attended, float *scratch, float *out, int64_t num_rows);

/* moe.c */
/* gate and up side by side in gate_up; scratch holds both, and their product, for each row. */
struct swiglu {
    struct packed gate_up, down;
};

struct router {
    struct packed gate;
    const float *bias; /* or null */
    int64_t num_topk, num_groups, num_topk_groups, best_of, is_sigmoid, norm_topk_prob;
    float scale;
};

void swiglu(const struct swiglu *w, const float *x, float *scratch, float *out, int64_t num_rows);
void experts(const struct swiglu *w, const float *x, const int64_t *group_sizes, float *scratch, float *out,
             int64_t num_experts);
void route(const struct router *r, const float *x, float *scratch, int64_t *topk_idx, float *topk_weights,
           int64_t num_rows);
void moe_output(const struct swiglu *shared, const float *x, const float *y, const float *weights, float *scratch,
                float *out, int64_t num_rows, int64_t num_live, int64_t num_topk, int64_t hidden);

/* fabric.c */
struct door {
    int64_t arrivals[2], state;
    int64_t came[]; /* [rank]: exchanges that it has come to */
};

struct fabric {
    int64_t world_size, rank, num_local, row_bytes, timeout_ms;
    struct door **doors;                             /* [rank], the own one too */
    int32_t *bells;                                  /* [rank] -> descriptor, the own one too */
    int64_t **out_header, **in_header;               /* [rank] -> chain word, then pairs for each local expert */
    char **out_rows, **in_rows, **out_back, **in_back; /* [rank] -> rows to compute; outputs that come home */
    int64_t *waiting_for;                            /* rank that is being waited for, -1 for none */
    int64_t num_done, exchange_ns;                   /* exchanges that are over, and the time in them so far */
};

int64_t fabric_dispatch(struct fabric *f, const char *x, const int64_t *expert, int64_t num_pairs, int64_t num_topk,
                        int64_t word, int64_t *order, int64_t *sent, int64_t *counts, int64_t *words);
void fabric_take_rows(const struct fabric *f, const char *x, int64_t num_topk, const int64_t *order,
                      const int64_t *sent, const int64_t *counts, char *rows);
int64_t fabric_combine(struct fabric *f, const char *outputs, const int64_t *order, const int64_t *sent,
                       const int64_t *counts, char *y);
