/* tests/reference/suffix_automaton.py in C: the same states, counts and order of transitions. Indices of states and of the pool are
 * below 2^31; more count as out of memory. Token ids are not negative. */
#ifndef AUTOMATON_H
#define AUTOMATON_H

#include "lookup.h"

enum { ROOT = 0, NONE = -1 }; /* NONE: no link (a root's), no transition, no block */

typedef struct {
    int32_t token_id, follower;
} Transition;

/* A state has a transition per token that followed, mostly one. The others are in the pool at ``others``, oldest first, in a
 * block whose size is the next power of two. */
typedef struct {
    int32_t len, link, count;
    Transition first;
    int32_t others, num_others;
} State;

/* Index entry of a transition of a state with many: its ``place`` among the others. */
typedef struct {
    int32_t state, place;
} Entry;

/* All zeros: an automaton without memory, which may be freed or emptied but not used. */
typedef struct {
    State *states;
    int64_t num_states, states_size;
    Transition *pool;
    int64_t pool_len, pool_size;
    int32_t free_blocks[32]; /* free blocks by the logarithm of their size; the first transition of each leads to the next */
    Entry *index;            /* open addressing, at most half full, so that every search ends */
    int64_t num_indexed, index_size;
    int64_t num_tokens, num_roots;
    int32_t root; /* of the text that was begun; substrings of texts with different roots have different states */
    int32_t last; /* the state of the whole text since it was begun */
} Automaton;

/* The last ``match_len`` tokens of a text are among the substrings of ``state``. */
typedef struct {
    const Automaton *automaton;
    int32_t state, match_len;
} Place;

typedef struct {
    Transition transition;
    int64_t count, total; /* counts of it, and of all next tokens; 0: none */
} Likeliest;

/* Empties it. Fails only for an automaton without memory. */
int automaton_empty(Automaton *a);
void automaton_free(Automaton *a);

/* Begins a new text at a root. */
static inline void automaton_begin(Automaton *a, int32_t root) { a->root = a->last = root; }

/* A root beside ROOT. NONE: out of memory. */
int32_t automaton_add_root(Automaton *a);

/* On failure the automaton is empty. */
int automaton_extend(Automaton *a, const int32_t *token_ids, int64_t num);

/* The longest match of the text extended by the tokens. */
Place automaton_walk(Place at, const int32_t *token_ids, int64_t num);

static inline int automaton_is_root(const Automaton *a, int32_t state) { return a->states[state].link == NONE; }

/* The longest suffix that occurs in more places; of a root itself. */
static inline Place automaton_suffix(const Automaton *a, int32_t state) {
    const int32_t suffix = automaton_is_root(a, state) ? state : a->states[state].link;
    return (Place){a, suffix, a->states[suffix].len};
}

/* The most frequent next token, of equals the newest. */
Likeliest automaton_likeliest(const Automaton *a, int32_t state);

const char *automaton_check(const Automaton *a);

#endif
