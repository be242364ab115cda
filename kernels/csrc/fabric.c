/* The fabric's exchanges on one host: rows into peers' slabs, doorbells, rows out of the own slab.
 *
 * Every slab begins with its owner's door. A peer that has put what an exchange brings arrives there: it adds itself up,
 * and rings the owner's bell (an eventfd) only if the owner sleeps and is to wake: for the last arrival of an exchange,
 * or for the first of a step when it is idle. So an exchange wakes a rank once at most, and costs no system call when
 * all have come before it. Arrivals of odd and even exchanges are counted apart, since a peer may be one exchange ahead,
 * never two: it needs this rank's arrival too. Pairs (row, expert) are numbered row * num_topk + slot.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ops.h"

#define LOOK_AGAIN_MS 50 /* a sleeper tells anew so often whom it waits for */

enum state { RUNNING, AWAITING, RESTING };

static int64_t ring(int bell) {
    uint64_t one = 1;
    while (write(bell, &one, sizeof one) != sizeof one)
        if (errno != EINTR) return -errno;
    return 0;
}

/* All that this exchange brings `rank` is in its slab. The order of all: add, then look whether the owner sleeps; the
 * owner says that it sleeps, then looks at the sum. One of the two sees the other. */
static int64_t arrive(const struct fabric *f, int64_t rank) {
    struct door *door = f->doors[rank];
    int64_t sum = __atomic_add_fetch(&door->arrivals[f->num_done % 2], 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&door->came[f->rank], f->num_done + 1, __ATOMIC_RELEASE); /* who is seen here has added itself */
    int64_t state = __atomic_load_n(&door->state, __ATOMIC_SEQ_CST);
    int is_last = sum % (f->world_size - 1) == 0;
    return state == RESTING || (state == AWAITING && is_last) ? ring(f->bells[rank]) : 0;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The first peer that has not come to exchange num_done, -1 when all have. */
static int64_t missing_peer(const struct fabric *f) {
    for (int64_t i = 1; i < f->world_size; i++) {
        int64_t rank = (f->rank + i) % f->world_size;
        if (__atomic_load_n(&f->doors[f->rank]->came[rank], __ATOMIC_ACQUIRE) <= f->num_done) return rank;
    }
    return -1;
}

/* Until every peer has come. 0, or 1 + the rank that did not within the bound, or -errno. */
static int64_t await_all(struct fabric *f) {
    struct door *door = f->doors[f->rank];
    const int64_t *arrivals = &door->arrivals[f->num_done % 2];
    int64_t all = (f->num_done / 2 + 1) * (f->world_size - 1);
    if (__atomic_load_n(arrivals, __ATOMIC_ACQUIRE) < all) {
        int64_t deadline_ns = now_ns() + f->timeout_ms * 1000000;
        __atomic_store_n(&door->state, AWAITING, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(arrivals, __ATOMIC_SEQ_CST) < all) {
            struct pollfd bell = {.fd = f->bells[f->rank], .events = POLLIN};
            uint64_t rung;
            int64_t missing = missing_peer(f); /* -1: the last one has come since */
            __atomic_store_n(f->waiting_for, missing, __ATOMIC_RELAXED);
            if (missing >= 0 && now_ns() >= deadline_ns) return 1 + missing;
            int ready = poll(&bell, 1, LOOK_AGAIN_MS);
            if (ready < 0 && errno != EINTR) return -errno;
            if (ready > 0 && read(bell.fd, &rung, sizeof rung) < 0 && errno != EAGAIN && errno != EINTR) return -errno;
        }
        __atomic_store_n(f->waiting_for, -1, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&door->state, RUNNING, __ATOMIC_RELAXED);
    __atomic_store_n(&f->num_done, f->num_done + 1, __ATOMIC_RELAXED);
    return 0;
}

/* From now to the next exchange's wait the own bell rings when a peer comes, at once if one has come already. */
int64_t fabric_rest(struct fabric *f) {
    struct door *door = f->doors[f->rank];
    uint64_t rung;
    if (read(f->bells[f->rank], &rung, sizeof rung) < 0 && errno != EAGAIN && errno != EINTR) return -errno;
    __atomic_store_n(&door->state, RESTING, __ATOMIC_SEQ_CST);
    int64_t before = f->num_done / 2 * (f->world_size - 1); /* arrivals at earlier exchanges of this parity */
    int64_t sum = __atomic_load_n(&door->arrivals[f->num_done % 2], __ATOMIC_SEQ_CST);
    return sum > before ? ring(f->bells[f->rank]) : 0;
}

/* Sort the pairs by expert and send each peer its rows, then wait for all. Experts are numbered over all ranks.
 * Out: order [num_pairs], sent [world_size], counts [world_size][num_local] of arrived pairs, words [world_size]. */
int64_t fabric_dispatch(struct fabric *f, const char *x, const int64_t *expert, int64_t num_pairs,
                        int64_t num_topk, int64_t word, int64_t *order, int64_t *sent, int64_t *counts,
                        int64_t *words) {
    int64_t num_experts = f->world_size * f->num_local, started_ns = now_ns();
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
        int64_t failed = arrive(f, rank);
        if (failed) return failed;
    }
    int64_t missing = await_all(f);
    if (missing) return missing;
    for (int64_t r = 0; r < f->world_size; r++) {
        const int64_t *header = f->in_header[r];
        words[r] = r == f->rank ? word : header[0];
        memcpy(counts + r * f->num_local, r == f->rank ? outgoing + r * f->num_local : header + 1,
               f->num_local * sizeof(int64_t));
    }
    f->exchange_ns += now_ns() - started_ns;
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
int64_t fabric_combine(struct fabric *f, const char *outputs, const int64_t *order, const int64_t *sent,
                       const int64_t *counts, char *y) {
    int64_t put[f->world_size], first[f->world_size], started_ns = now_ns();
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
    for (int64_t i = 1; i < f->world_size; i++) {
        int64_t failed = arrive(f, (f->rank + i) % f->world_size);
        if (failed) return failed;
    }
    int64_t missing = await_all(f);
    if (missing) return missing;
    for (int64_t r = 0; r < f->world_size; r++)
        for (int64_t q = 0; r != f->rank && q < sent[r]; q++)
            memcpy(y + order[first[r] + q] * f->row_bytes, f->in_back[r] + q * f->row_bytes, f->row_bytes);
    f->exchange_ns += now_ns() - started_ns;
    return 0;
}
