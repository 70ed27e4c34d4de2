/* drafters/suffix_automaton.py in C: the same states, counts and order of transitions. States and places of the pool have
 * numbers below 2^31; more of them count as no memory. Token ids are not negative. */
#ifndef AUTOMATON_H
#define AUTOMATON_H

#include "lookup.h"

enum { ROOT = 0, NONE = -1 }; /* NONE: no link (the root's), no transition, no block */

typedef struct {
    int32_t token_id, follower;
} Transition;

/* A state has as many transitions as there are tokens that followed, mostly one. The others lie in the pool in the order in
 * which they came, at ``others``, in a block of as many as the least power of two that holds them. */
typedef struct {
    int32_t len, link, count;
    Transition first;
    int32_t others, num_others;
} State;

/* Where the transition of a state is that has too many to look through: its ``place`` among the others. */
typedef struct {
    int32_t state, place;
} Entry;

/* Of zeros, an automaton has no memory, and may be freed or emptied but not used. */
typedef struct {
    State *states;
    int64_t num_states, states_size;
    Transition *pool;
    int64_t pool_len, pool_size;
    int32_t free_blocks[32]; /* by the logarithm of their size; the first transition of each leads to the next */
    Entry *index;            /* open addressing; at most half of it is taken, so that every search ends */
    int64_t num_indexed, index_size;
    int64_t num_tokens;
    int32_t last; /* the state of the whole text read since it was begun */
} Automaton;

/* The last ``match_len`` tokens of a text are among the substrings of ``state``. */
typedef struct {
    const Automaton *automaton;
    int32_t state, match_len;
} Place;

typedef struct {
    Transition transition;
    int64_t count, total; /* how often it followed, and how often any token did; 0 where none did */
} Likeliest;

/* Without a text. Fails only for an automaton without memory. */
int automaton_empty(Automaton *a);
void automaton_free(Automaton *a);

/* The tokens that follow start a new text. */
static inline void automaton_begin(Automaton *a) { a->last = ROOT; }

/* Fails with an empty automaton. */
int automaton_extend(Automaton *a, const int32_t *token_ids, int64_t num);

/* The longest match of the text with the tokens behind it. */
Place automaton_walk(Place at, const int32_t *token_ids, int64_t num);

/* The longest end that occurs in more places; of the root the root. */
static inline Place automaton_suffix(const Automaton *a, int32_t state) {
    const int32_t link = state == ROOT ? ROOT : a->states[state].link;
    return (Place){a, link, a->states[link].len};
}

/* The token that followed most often, of equals the one that came to the state last. */
Likeliest automaton_likeliest(const Automaton *a, int32_t state);

const char *automaton_check(const Automaton *a);

#endif
