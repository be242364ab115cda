/* The fabric's exchanges on one host: rows into peers' slabs, doorbells through the kernel, rows out of the own slab.
 *
 * A doorbell is a non-blocking eventfd semaphore. The write after a put and the read before a take are system calls,
 * which order the memory accesses around them on every processor. Pairs (row, expert) are numbered row * num_topk + slot.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

struct fabric {
    int64_t world_size, rank, num_local, row_bytes, timeout_ms;
    int64_t **out_header, **in_header;               /* [rank] -> chain word, then pairs for each local expert */
    char **out_rows, **in_rows, **out_back, **in_back; /* [rank] -> rows to compute; outputs that come home */
    int32_t *out_bells, *in_bells;                   /* [rank] -> descriptor */
    int64_t *waiting_for;                            /* rank that is being waited for, -1 for none */
};

static int ring(int bell) {
    uint64_t one = 1;
    while (write(bell, &one, sizeof one) != sizeof one)
        if (errno != EINTR) return -1;
    return 0;
}

/* 0 when the bell has rung, 1 when it has not within the bound, -1 on an error. */
static int await(const struct fabric *f, int64_t rank) {
    uint64_t rung;
    struct pollfd waited = {.fd = f->in_bells[rank], .events = POLLIN};
    for (;;) {
        if (read(f->in_bells[rank], &rung, sizeof rung) == sizeof rung) break;
        if (errno != EAGAIN && errno != EINTR) return -1;
        __atomic_store_n(f->waiting_for, rank, __ATOMIC_RELAXED);
        int ready = poll(&waited, 1, (int)f->timeout_ms);
        if (ready == 0) return 1;
        if (ready < 0 && errno != EINTR) return -1;
    }
    __atomic_store_n(f->waiting_for, -1, __ATOMIC_RELAXED);
    return 0;
}

/* Take one ring of every peer. 0, or 1 + the rank that did not come, or -errno. */
static int64_t await_all(const struct fabric *f) {
    for (int64_t i = 1; i < f->world_size; i++) {
        int64_t rank = (f->rank + i) % f->world_size;
        int missing = await(f, rank);
        if (missing > 0) return 1 + rank;
        if (missing < 0) return -errno;
    }
    return 0;
}

/* Sort the pairs by expert and send each peer its rows, then wait for all. Experts are numbered over all ranks.
 * Out: order [num_pairs], sent [world_size], counts [world_size][num_local] of arrived pairs, words [world_size]. */
int64_t fabric_dispatch(const struct fabric *f, const char *x, const int64_t *expert, int64_t num_pairs,
                        int64_t num_topk, int64_t word, int64_t *order, int64_t *sent, int64_t *counts,
                        int64_t *words) {
    int64_t num_experts = f->world_size * f->num_local;
    int64_t outgoing[num_experts], next[num_experts];
    memset(outgoing, 0, sizeof outgoing);
    for (int64_t q = 0; q < num_pairs; q++) outgoing[expert[q]]++;
    for (int64_t e = 0, total = 0; e < num_experts; e++) next[e] = total, total += outgoing[e];
    for (int64_t q = 0; q < num_pairs; q++) order[next[expert[q]]++] = q;
    for (int64_t r = 0; r < f->world_size; r++) {
        sent[r] = 0;
        for (int64_t e = 0; e < f->num_local; e++) sent[r] += outgoing[r * f->num_local + e];
    }
    for (int64_t i = 1; i < f->world_size; i++) {
        int64_t rank = (f->rank + i) % f->world_size, first = 0;
        for (int64_t r = 0; r < rank; r++) first += sent[r];
        f->out_header[rank][0] = word;
        memcpy(f->out_header[rank] + 1, outgoing + rank * f->num_local, f->num_local * sizeof(int64_t));
        for (int64_t q = 0; q < sent[rank]; q++)
            memcpy(f->out_rows[rank] + q * f->row_bytes, x + order[first + q] / num_topk * f->row_bytes, f->row_bytes);
        if (ring(f->out_bells[rank])) return -errno;
    }
    int64_t missing = await_all(f);
    if (missing) return missing;
    for (int64_t r = 0; r < f->world_size; r++) {
        const int64_t *header = f->in_header[r];
        words[r] = r == f->rank ? word : header[0];
        memcpy(counts + r * f->num_local, r == f->rank ? outgoing + r * f->num_local : header + 1,
               f->num_local * sizeof(int64_t));
    }
    return 0;
}

/* Arrived rows (and the own ones, from x) into groups by local expert, ranks in order within a group. */
void fabric_take_rows(const struct fabric *f, const char *x, int64_t num_topk, const int64_t *order,
                      const int64_t *sent, const int64_t *counts, char *rows) {
    int64_t taken[f->world_size], first = 0;
    for (int64_t r = 0; r < f->world_size; r++) taken[r] = 0;
    for (int64_t r = 0; r < f->rank; r++) first += sent[r];
    for (int64_t e = 0; e < f->num_local; e++)
        for (int64_t r = 0; r < f->world_size; r++) {
            int64_t count = counts[r * f->num_local + e];
            if (r != f->rank) memcpy(rows, f->in_rows[r] + taken[r] * f->row_bytes, count * f->row_bytes);
            else
                for (int64_t q = 0; q < count; q++)
                    memcpy(rows + q * f->row_bytes, x + order[first + taken[r] + q] / num_topk * f->row_bytes,
                           f->row_bytes);
            taken[r] += count, rows += count * f->row_bytes;
        }
}

/* Outputs, grouped as fabric_take_rows grouped the rows, to their homes; then this rank's own into y [pair]. */
int64_t fabric_combine(const struct fabric *f, const char *outputs, const int64_t *order, const int64_t *sent,
                       const int64_t *counts, char *y) {
    int64_t put[f->world_size], first[f->world_size];
    for (int64_t r = 0, total = 0; r < f->world_size; r++) put[r] = 0, first[r] = total, total += sent[r];
    for (int64_t e = 0; e < f->num_local; e++)
        for (int64_t r = 0; r < f->world_size; r++) {
            int64_t count = counts[r * f->num_local + e];
            if (r != f->rank) memcpy(f->out_back[r] + put[r] * f->row_bytes, outputs, count * f->row_bytes);
            else
                for (int64_t q = 0; q < count; q++)
                    memcpy(y + order[first[r] + put[r] + q] * f->row_bytes, outputs + q * f->row_bytes, f->row_bytes);
            put[r] += count, outputs += count * f->row_bytes;
        }
    for (int64_t i = 1; i < f->world_size; i++)
        if (ring(f->out_bells[(f->rank + i) % f->world_size])) return -errno;
    int64_t missing = await_all(f);
    if (missing) return missing;
    for (int64_t r = 0; r < f->world_size; r++)
        for (int64_t q = 0; r != f->rank && q < sent[r]; q++)
            memcpy(y + order[first[r] + q] * f->row_bytes, f->in_back[r] + q * f->row_bytes, f->row_bytes);
    return 0;
}
