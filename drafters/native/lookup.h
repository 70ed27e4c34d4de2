/* The interface of lookups. Each file has these functions, with its own prefix, for drafters/native/lookup.py; not thread-safe:
 *
 *   open      follow request ``slot`` with its tokens; a followed one is reset. What is learned serves requests with the same
 *             ``salt``; 0: none
 *   extend    append committed tokens
 *   propose   one draft for each of ``num`` demands, of up to ``num_tokens`` tokens (at most ``stride``), behind the committed
 *             tokens and the tokens ahead. The tokens ahead of demand i end at ``ahead_ends[i]``; they begin where those of demand i - 1
 *             end. Draft i is at ``i * stride`` of ``token_ids`` and ``confidences`` and has ``lens[i]`` tokens
 *   release   forget a request; unknown ones are ignored
 *   check     what is inconsistent in the drafter's state; NULL: nothing
 *
 * Slots are small numbers, given by the caller and reused. Functions that allocate return -1 if out of memory, else 0. A failure
 * leaves the drafter consistent, possibly with fewer tokens. Doubles are computed in the order of the Python implementation and
 * give the same bits (-ffp-contract=off). */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t num;
    const int64_t *slots, *num_tokens;
    const double *least_survival; /* survival below which a draft ends; the first token is kept */
    const int32_t *ahead;
    const int64_t *ahead_ends;
    int64_t stride;
    int32_t *token_ids;
    double *confidences;
    int64_t *lens;
} Demands;

static inline const int32_t *ahead_of(const Demands *d, int64_t i, int64_t *num) {
    const int64_t start = i ? d->ahead_ends[i - 1] : 0;
    *num = d->ahead_ends[i] - start;
    return d->ahead + start;
}

/* Makes room for ``num`` elements; doubles ``*size`` as often as needed. */
static inline int reserve(void **at, int64_t *size, int64_t num, size_t element) {
    if (num <= *size) return 0;
    int64_t larger = *size ? *size : 16;
    while (larger < num) larger *= 2;
    void *moved = realloc(*at, (size_t)larger * element);
    if (!moved) return -1;
    *at = moved;
    *size = larger;
    return 0;
}

#endif
