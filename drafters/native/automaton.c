/* A suffix automaton that grows token by token (tests/reference/suffix_automaton.py in Python).
 *
 * Transitions are added and redirected, never removed; among equals their order decides. A few are searched one by one; states
 * with more, such as the root, share an index. Out of memory, the automaton is emptied, since one without a transition would be
 * wrong. */
#include "automaton.h"

enum {
    MAX_COUNTED_LINKS = 64, /* as in Python */
    MAX_SCANNED = 16,       /* transitions beside the first that are searched one by one; two cache lines */
    LEAST_INDEX = 64,
};

static inline int32_t log2_above(int32_t num) { return num <= 1 ? 0 : 32 - __builtin_clz((unsigned)num - 1); }

static inline int64_t slot_of(const Automaton *a, int32_t state, int32_t token_id) {
    const uint64_t key = (uint64_t)state << 32 | (uint32_t)token_id;
    return (int64_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (a->index_size - 1);
}

/* Address of the follower of ``state`` by a token, NULL if there is none. Valid until a state or transition is added. */
static inline int32_t *find(const Automaton *a, int32_t state, int32_t token_id) {
    State *s = a->states + state;
    if (s->first.token_id == token_id) return &s->first.follower;
    Transition *others = a->pool + s->others;
    if (s->num_others <= MAX_SCANNED) {
        for (int32_t i = 0; i < s->num_others; i++)
            if (others[i].token_id == token_id) return &others[i].follower;
        return NULL;
    }
    for (int64_t i = slot_of(a, state, token_id); a->index[i].state != NONE; i = (i + 1) & (a->index_size - 1)) {
        Transition *found = others + a->index[i].place;
        if (a->index[i].state == state && found->token_id == token_id) return &found->follower;
    }
    return NULL;
}

static void put_entry(Automaton *a, Entry entry) {
    const State *s = a->states + entry.state;
    int64_t i = slot_of(a, entry.state, a->pool[s->others + entry.place].token_id);
    while (a->index[i].state != NONE) i = (i + 1) & (a->index_size - 1);
    a->index[i] = entry;
}

static int grow_index(Automaton *a, int64_t num) {
    if (2 * num <= a->index_size) return 0;
    int64_t size = a->index_size ? a->index_size : LEAST_INDEX;
    while (size < 2 * num) size *= 2;
    Entry *old = a->index, *larger = malloc((size_t)size * sizeof(Entry));
    const int64_t old_size = a->index_size;
    if (!larger) return -1;
    memset(larger, NONE, (size_t)size * sizeof(Entry));
    a->index = larger;
    a->index_size = size;
    for (int64_t i = 0; i < old_size; i++)
        if (old[i].state != NONE) put_entry(a, old[i]);
    free(old);
    return 0;
}

/* Indexes the other transitions of ``state`` from ``place`` on, if they are many. */
static int index_others(Automaton *a, int32_t state, int32_t place) {
    const int32_t num = a->states[state].num_others;
    if (num <= MAX_SCANNED) return 0;
    if (place == MAX_SCANNED) place = 0; /* those before were searched one by one until now */
    if (grow_index(a, a->num_indexed + num - place)) return -1;
    for (; place < num; place++, a->num_indexed++) put_entry(a, (Entry){state, place});
    return 0;
}

/* A block of 2^log2 transitions; NONE: out of memory. */
static int32_t take_block(Automaton *a, int32_t log2) {
    const int32_t freed = a->free_blocks[log2];
    if (freed != NONE) {
        a->free_blocks[log2] = a->pool[freed].follower;
        return freed;
    }
    const int64_t start = a->pool_len, end = start + (1ll << log2);
    if (end > INT32_MAX || reserve((void **)&a->pool, &a->pool_size, end, sizeof(Transition))) return NONE;
    a->pool_len = end;
    return (int32_t)start;
}

static int add_transition(Automaton *a, int32_t state, Transition transition) {
    State *s = a->states + state;
    if (s->first.token_id == NONE) {
        s->first = transition;
        return 0;
    }
    const int32_t num = s->num_others, old_log2 = log2_above(num), log2 = log2_above(num + 1);
    if (num == 0 || log2 > old_log2) {
        const int32_t block = take_block(a, log2);
        if (block == NONE) return -1;
        if (num) {
            memcpy(a->pool + block, a->pool + s->others, (size_t)num * sizeof(Transition));
            a->pool[s->others].follower = a->free_blocks[old_log2];
            a->free_blocks[old_log2] = s->others;
        }
        s->others = block;
    }
    a->pool[s->others + num] = transition;
    s->num_others = num + 1;
    return index_others(a, state, num);
}

/* Room must exist. */
static int32_t add_state(Automaton *a, int32_t len) {
    a->states[a->num_states] = (State){.len = len, .link = ROOT, .first = {NONE, NONE}};
    return (int32_t)a->num_states++;
}

static int copy_transitions(Automaton *a, int32_t from, int32_t to) {
    const State *source = a->states + from;
    State *copy = a->states + to;
    copy->first = source->first;
    if (!source->num_others) return 0;
    const int32_t block = take_block(a, log2_above(source->num_others));
    if (block == NONE) return -1;
    memcpy(a->pool + block, a->pool + source->others, (size_t)source->num_others * sizeof(Transition));
    copy->others = block;
    copy->num_others = source->num_others;
    return index_others(a, to, 0);
}

/* Splits ``follower``: the substrings of ``state`` extended by a token, and their suffixes, also end elsewhere. Returns their new
 * state; NONE: out of memory. */
static int32_t split(Automaton *a, int32_t state, int32_t token_id, int32_t follower) {
    const int32_t clone = add_state(a, a->states[state].len + 1);
    if (copy_transitions(a, follower, clone)) return NONE;
    a->states[clone].link = a->states[follower].link;
    a->states[clone].count = a->states[follower].count;
    a->states[follower].link = clone;
    for (int32_t walker = state; walker != NONE; walker = a->states[walker].link) {
        int32_t *at = find(a, walker, token_id);
        if (!at || *at != follower) break;
        *at = clone;
    }
    return clone;
}

/* The state of the longest substring of ``state`` extended by the token, which leads to ``follower`` already. */
static int32_t exactly(Automaton *a, int32_t state, int32_t token_id, int32_t follower) {
    const int exact = a->states[follower].len == a->states[state].len + 1;
    return exact ? follower : split(a, state, token_id, follower);
}

/* Returns the new last state; NONE: out of memory. Room for two states must exist. */
static int32_t add_token(Automaton *a, int32_t token_id) {
    const int32_t *follower = find(a, a->last, token_id);
    if (follower) return exactly(a, a->last, token_id, *follower);
    const int32_t current = add_state(a, a->states[a->last].len + 1);
    int32_t walker = a->last;
    for (; walker != NONE && !(follower = find(a, walker, token_id)); walker = a->states[walker].link)
        if (add_transition(a, walker, (Transition){token_id, current})) return NONE;
    const int32_t link = walker == NONE ? a->root : exactly(a, walker, token_id, *follower);
    if (link == NONE) return NONE;
    a->states[current].link = link;
    return current;
}

static void count_place(Automaton *a, int32_t state) {
    for (int i = 0; i < MAX_COUNTED_LINKS && !automaton_is_root(a, state); i++) {
        a->states[state].count++;
        state = a->states[state].link;
    }
    a->states[a->root].count++;
}

int automaton_empty(Automaton *a) {
    if (reserve((void **)&a->states, &a->states_size, 1, sizeof(State))) return -1;
    a->num_states = a->num_roots = a->num_tokens = a->pool_len = 0;
    memset(a->free_blocks, NONE, sizeof a->free_blocks);
    if (a->num_indexed) memset(a->index, NONE, (size_t)a->index_size * sizeof(Entry));
    a->num_indexed = 0;
    automaton_begin(a, automaton_add_root(a));
    return 0;
}

int32_t automaton_add_root(Automaton *a) {
    const int64_t most = a->num_states + 1;
    if (most > INT32_MAX || reserve((void **)&a->states, &a->states_size, most, sizeof(State))) return NONE;
    const int32_t root = add_state(a, 0);
    a->states[root].link = NONE;
    a->num_roots++;
    return root;
}

void automaton_free(Automaton *a) {
    free(a->states);
    free(a->pool);
    free(a->index);
    *a = (Automaton){0};
}

int automaton_extend(Automaton *a, const int32_t *token_ids, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        const int64_t most = a->num_states + 2;
        const int full = most > INT32_MAX || reserve((void **)&a->states, &a->states_size, most, sizeof(State));
        const int32_t last = full ? NONE : add_token(a, token_ids[i]);
        if (last == NONE) {
            automaton_empty(a);
            return -1;
        }
        a->num_tokens++;
        a->last = last;
        count_place(a, last);
    }
    return 0;
}

Place automaton_walk(Place at, const int32_t *token_ids, int64_t num) {
    const Automaton *a = at.automaton;
    for (int64_t i = 0; i < num; i++) {
        const int32_t *follower;
        while (!(follower = find(a, at.state, token_ids[i])) && !automaton_is_root(a, at.state)) at = automaton_suffix(a, at.state);
        if (follower) at = (Place){a, *follower, at.match_len + 1};
    }
    return at;
}

Likeliest automaton_likeliest(const Automaton *a, int32_t state) {
    const State *s = a->states + state;
    if (s->first.token_id == NONE) return (Likeliest){s->first, 0, 0};
    const Transition *others = a->pool + s->others;
    const int32_t first = a->states[s->first.follower].count;
    Likeliest best = {s->first, first, first};
    for (int32_t i = 0; i < s->num_others; i++) {
        const int32_t count = a->states[others[i].follower].count;
        best.total += count;
        if (count >= best.count) {
            best.count = count;
            best.transition = others[i];
        }
    }
    return best;
}

static const char *check_transition(const Automaton *a, int32_t state, const Transition *transition) {
    if (find(a, state, transition->token_id) != &transition->follower) return "a transition is not found";
    if (transition->follower < 0 || transition->follower >= a->num_states) return "a transition leads to no state";
    return a->states[transition->follower].len > a->states[state].len ? NULL : "a transition does not grow";
}

static const char *check_state(const Automaton *a, int32_t state) {
    const State *s = a->states + state;
    if (!automaton_is_root(a, state)) {
        if (s->link < 0 || s->link >= a->num_states) return "a link leads to no state";
        if (a->states[s->link].len >= s->len) return "a state links to one that is not shorter";
        if (a->states[s->link].count < 1) return "a state is reached and never occurred";
    }
    if (s->first.token_id == NONE) return s->num_others ? "a state has a second transition and no first" : NULL;
    const char *wrong = check_transition(a, state, &s->first);
    for (int32_t i = 0; !wrong && i < s->num_others; i++) wrong = check_transition(a, state, a->pool + s->others + i);
    return wrong;
}

const char *automaton_check(const Automaton *a) {
    const int64_t most = 2 * a->num_tokens;
    if (a->num_states > (most > 2 ? most : 2) + a->num_roots) return "more states than a suffix automaton may have";
    const char *wrong = NULL;
    for (int32_t state = 0; !wrong && state < a->num_states; state++) wrong = check_state(a, state);
    return wrong;
}
