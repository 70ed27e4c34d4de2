/* What lookups without a model have in common. Each file has the functions that drafters/native/lookup.py calls, with its own
 * prefix, on one drafter at a time:
 *
 *   open      follow request ``slot`` from its tokens on; one that is followed starts over
 *   extend    tokens were committed
 *   propose   for each of ``num`` demands up to ``num_tokens`` of them, each at most ``stride``, behind the committed tokens and
 *             those ahead: those of demand i end at ``ahead_ends[i]`` and begin where the ones before it end. Draft i lies at
 *             ``i * stride`` of ``token_ids`` and ``confidences``; ``lens[i]`` tokens are of it
 *   release   forget a request; one that is not followed is ignored
 *   check     what is wrong with the drafter's state, NULL if nothing
 *
 * Slots are small numbers, given by the caller and used again. What can fail for want of memory returns -1 then, else 0, and
 * leaves the drafter as it was or with less than was to be remembered, never broken. Doubles are computed in the order of the
 * Python that these replace, and give the same bits (-ffp-contract=off). */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t num;
    const int64_t *slots, *num_tokens;
    const double *least_survival; /* where the tokens of a draft survive less often, it ends, but for the first */
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

/* Room for ``num`` of ``*size`` elements, twice as many whenever it is too small. */
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
