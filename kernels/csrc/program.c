/* A decoder's layers as one call: a list of nodes, recorded once, that work on the buffers of a step. A node is an op with
 * its weights; what it reads and writes is fixed, so the list alone says what a layer is. */
#include "ops.h"

/* Rows that attend together; block_stride is 0 when they share one list of blocks. */
struct context {
    int64_t first_row, num_rows, block_stride;
    const int64_t *block_idx, *seq_lens;
};

struct step {
    int64_t num_rows, num_live, hidden, num_topk, word, page_tokens, num_contexts;
    const struct context *contexts;
    const float *cis;                        /* [T][rotary] */
    const int64_t *row_idx;                  /* [T] */
    float *slab;                             /* [pages][layers][page_tokens][dim] */
    float *residual, *x, *out;               /* [T][hidden]: the stream, a half layer's input and output */
    float *q, *attended;                     /* [T][N][dim], [T][N][latent] */
    int64_t *topk_idx;                       /* [T][K] */
    float *topk_weights, *y;                 /* [T][K], [T][K][hidden] */
    float *rows, *outputs;                   /* [all pairs that may arrive][hidden] */
    int64_t *order, *sent, *counts, *words;  /* as fabric.c has them */
    int64_t *sizes;                          /* [local experts] */
    float *scratch;
};

struct node {
    int64_t (*run)(const void *op, struct step *s);
    const void *op;
};

/* 0, or what the node that failed returned. */
int64_t run_program(const struct node *nodes, int64_t num_nodes, struct step *s) {
    int64_t failed = 0;
    for (int64_t i = 0; i < num_nodes && !failed; i++) failed = nodes[i].run(nodes[i].op, s);
    return failed;
}

/* residual -> x */
struct norm {
    const float *weight;
    float eps;
};

int64_t node_norm(const struct norm *op, struct step *s) {
    rms_norm(s->residual, s->hidden, op->weight, s->x, s->num_rows, s->hidden, op->eps);
    return 0;
}

/* out -> residual */
int64_t node_add(const void *op, struct step *s) {
    (void)op;
    for (int64_t i = 0; i < s->num_rows * s->hidden; i++) s->residual[i] += s->out[i];
    return 0;
}

/* x -> out */
struct attention {
    const struct latent_project *project;
    const struct latent_output *output;
    int64_t layer;
    float scale;
};

int64_t node_attention(const struct attention *op, struct step *s) {
    const struct latent_project *p = op->project;
    int64_t dim = p->latent + p->rotary;
    float *cache = s->slab + op->layer * s->page_tokens * dim;
    if (!s->num_rows) return 0; /* nobody to attend for; the rank still comes to the experts */
    latent_project(p, s->x, s->cis, cache, s->row_idx, s->scratch, s->q, s->num_rows);
    for (const struct context *c = s->contexts; c < s->contexts + s->num_contexts; c++)
        latent_attention(s->q + c->first_row * p->num_heads * dim, cache, c->block_idx, c->block_stride, c->seq_lens,
                         s->attended + c->first_row * p->num_heads * p->latent, c->num_rows, p->num_heads, dim,
                         p->latent, s->page_tokens, op->scale);
    latent_output(op->output, s->attended, s->scratch, s->out, s->num_rows);
    return 0;
}

/* x -> out */
int64_t node_swiglu(const struct swiglu *op, struct step *s) {
    swiglu(op, s->x, s->scratch, s->out, s->num_rows);
    return 0;
}

/* x -> out */
struct moe {
    const struct router *router;
    const struct swiglu *experts, *shared; /* shared may be null */
    struct fabric *fabric;
    int64_t *load; /* [local experts] rows so far, then the experts seen */
};

int64_t node_moe(const struct moe *op, struct step *s) {
    struct fabric *f = op->fabric;
    int64_t num_pairs = s->num_live * s->num_topk, failed;
    route(op->router, s->x, s->scratch, s->topk_idx, s->topk_weights, s->num_rows);
    failed = fabric_dispatch(f, (char *)s->x, s->topk_idx, num_pairs, s->num_topk, s->word, s->order, s->sent,
                             s->counts, s->words);
    if (failed) return failed;
    fabric_take_rows(f, (char *)s->x, s->num_topk, s->order, s->sent, s->counts, (char *)s->rows);
    for (int64_t e = 0; e < f->num_local; e++) {
        s->sizes[e] = 0;
        for (int64_t r = 0; r < f->world_size; r++) s->sizes[e] += s->counts[r * f->num_local + e];
        op->load[e] += s->sizes[e], op->load[f->num_local] += s->sizes[e] > 0;
    }
    experts(op->experts, s->rows, s->sizes, s->scratch, s->outputs, f->num_local);
    failed = fabric_combine(f, (char *)s->outputs, s->order, s->sent, s->counts, (char *)s->y);
    if (failed) return failed;
    moe_output(op->shared, s->x, s->y, s->topk_weights, s->scratch, s->out, s->num_rows, s->num_live, s->num_topk,
               s->hidden);
    return 0;
}
