/* tests/reference/suffix.py in C: the same drafts and the same bounds of memory. */
#include "automaton.h"

enum {
    NUM_SEGMENTS = 4, /* of the shared memory, which drops one at a time */
    MAX_SALTS = 256,  /* of a segment; few enough to be searched one by one */
};

/* A request: its tokens, and the automaton over the last of them. The automaton of a followed request has memory. */
typedef struct {
    int followed;
    uint64_t salt;
    int32_t *token_ids;
    int64_t num_tokens, tokens_size;
    int64_t opened_len; /* later tokens are added to the shared memory at release */
    Automaton automaton;
} Text;

/* Finished answers. Those of each salt have a root of their own, so that no match leads from one to another. */
typedef struct {
    Automaton automaton;
    uint64_t salts[MAX_SALTS];
    int32_t roots[MAX_SALTS];
    int num_salts;
} Segment;

typedef struct {
    int32_t *token_ids;
    double *confidences;
    int64_t len;
    double expected_len; /* sum of the survival of its tokens */
} Guess;

typedef struct {
    int64_t max_match_len, min_match_len, segment_len, request_tokens;
    double min_survival, doubt;
    Text *texts; /* by slot */
    int64_t num_texts;
    Segment segments[NUM_SEGMENTS]; /* a ring: the newest at (num_begun - 1) % NUM_SEGMENTS */
    int64_t num_begun;
    int32_t *guessed; /* [stride]: the second draft, until they are compared */
    double *guessed_confidences;
    int64_t guessed_size, guessed_confidences_size;
} Suffix;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t num_segments(const Suffix *s) { return least(s->num_begun, NUM_SEGMENTS); }
static inline Segment *segment(Suffix *s, int64_t age) { return s->segments + (s->num_begun - 1 - age) % NUM_SEGMENTS; }

static void forget(Text *text) {
    free(text->token_ids);
    automaton_free(&text->automaton);
    *text = (Text){0};
}

static int remember_tokens(Text *text, const int32_t *token_ids, int64_t num) {
    const int64_t num_tokens = text->num_tokens + num;
    if (reserve((void **)&text->token_ids, &text->tokens_size, num_tokens, sizeof(int32_t))) return -1;
    if (num) memcpy(text->token_ids + text->num_tokens, token_ids, (size_t)num * sizeof(int32_t));
    text->num_tokens = num_tokens;
    return 0;
}

/* Rebuilds the automaton from the last tokens, half of the maximum. */
static int read_again(Text *text, int64_t max_len) {
    const int64_t num = least(text->num_tokens, max_len - max_len / 2);
    if (automaton_empty(&text->automaton)) return -1;
    return automaton_extend(&text->automaton, text->token_ids + text->num_tokens - num, num);
}

static int32_t root_of(const Segment *segment, uint64_t salt) {
    for (int i = 0; i < segment->num_salts; i++)
        if (segment->salts[i] == salt) return segment->roots[i];
    return NONE;
}

/* NONE: out of memory. Room for a salt must exist. */
static int32_t add_root(Segment *segment, uint64_t salt) {
    const int32_t root = segment->num_salts ? automaton_add_root(&segment->automaton) : ROOT;
    if (root == NONE) return NONE;
    segment->salts[segment->num_salts] = salt;
    segment->roots[segment->num_salts++] = root;
    return root;
}

/* Begins a part of an answer: if the newest segment is full, in a new one in place of the oldest. NULL: out of memory. */
static Segment *begin_part(Suffix *s, int64_t part_len, uint64_t salt) {
    Segment *newest = s->num_begun ? segment(s, 0) : NULL;
    int32_t root = newest ? root_of(newest, salt) : NONE;
    const int is_full = !newest || newest->automaton.num_tokens + part_len > s->segment_len;
    if (is_full || (root == NONE && newest->num_salts == MAX_SALTS)) {
        newest = s->segments + s->num_begun % NUM_SEGMENTS;
        if (automaton_empty(&newest->automaton)) return NULL;
        s->num_begun++;
        newest->num_salts = 0;
        root = NONE;
    }
    if (root == NONE && (root = add_root(newest, salt)) == NONE) return NULL;
    automaton_begin(&newest->automaton, root);
    return newest;
}

/* Out of memory, tokens are dropped. */
static void share(Suffix *s, const int32_t *token_ids, int64_t num, uint64_t salt) {
    if (!s->segment_len) return;
    for (int64_t start = 0; start < num; start += s->segment_len) {
        const int64_t part_len = least(num - start, s->segment_len);
        Segment *newest = begin_part(s, part_len, salt);
        if (!newest) return;
        if (automaton_extend(&newest->automaton, token_ids + start, part_len)) {
            newest->num_salts = 0; /* it is empty now */
            return;
        }
    }
}

/* A text and the tokens ahead of it. */
typedef struct {
    const Text *text;
    const int32_t *ahead;
    int64_t num_ahead;
} Tail;

/* The longest suffix of the last ``most`` tokens that occurs, searched in longer and longer suffixes: it is mostly short. */
static Place longest_end(const Automaton *automaton, int32_t root, const Tail *tail, int64_t most) {
    const Text *text = tail->text;
    most = least(most, text->num_tokens + tail->num_ahead);
    for (int64_t num = 2;; num *= 2) {
        const int64_t len = least(num, most), num_ahead = least(len, tail->num_ahead), num_own = len - num_ahead;
        Place place = {automaton, root, 0};
        place = automaton_walk(place, text->token_ids + text->num_tokens - num_own, num_own);
        place = automaton_walk(place, tail->ahead + tail->num_ahead - num_ahead, num_ahead);
        if (place.match_len < num) return place;
    }
}

/* The earlier occurrence of the end of the text: the suffix link of the whole text. */
static Place own_place(const Tail *tail) {
    const Automaton *automaton = &tail->text->automaton;
    return automaton_walk(automaton_suffix(automaton, automaton->last), tail->ahead, tail->num_ahead);
}

/* The longest matching suffix in answers with the text's salt, in the newest segment that has it; without a match its length
 * is 0. */
static Place shared_place(Suffix *s, const Tail *tail) {
    Place best = {0};
    for (int64_t age = 0; age < num_segments(s); age++) {
        const int32_t root = root_of(segment(s, age), tail->text->salt);
        if (root == NONE) continue;
        const Place place = longest_end(&segment(s, age)->automaton, root, tail, s->max_match_len);
        if (place.match_len > best.match_len) best = place;
    }
    return best;
}

static void follow(const Suffix *s, Place at, int64_t num_tokens, double least_survival, Guess *guess) {
    const double later_least = least_survival > s->min_survival ? least_survival : s->min_survival;
    double survival = 1.0, least = s->min_survival; /* for the first token; later_least for the others */
    guess->len = 0;
    guess->expected_len = 0.0;
    while (guess->len < num_tokens && at.match_len >= s->min_match_len) {
        const Likeliest next = automaton_likeliest(at.automaton, at.state);
        if (!next.total) { /* at the end of a text: try a shorter match */
            at = automaton_suffix(at.automaton, at.state);
            continue;
        }
        const double confidence = (double)next.count / ((double)next.total + s->doubt / (double)at.match_len);
        survival *= confidence;
        if (survival < least) break;
        least = later_least;
        guess->expected_len += survival;
        guess->token_ids[guess->len] = next.transition.token_id;
        guess->confidences[guess->len++] = confidence;
        at = (Place){at.automaton, next.transition.follower, at.match_len + 1};
    }
}

void suffix_free(void *drafter) {
    Suffix *s = drafter;
    for (int64_t slot = 0; slot < s->num_texts; slot++) forget(s->texts + slot);
    for (int i = 0; i < NUM_SEGMENTS; i++) automaton_free(&s->segments[i].automaton);
    free(s->texts);
    free(s->guessed);
    free(s->guessed_confidences);
    free(s);
}

void *suffix_new(int64_t max_match_len, int64_t max_shared_tokens, int64_t min_match_len, double min_survival, double doubt,
                 int64_t request_tokens) {
    Suffix *s = calloc(1, sizeof(Suffix));
    if (!s) return NULL;
    s->max_match_len = max_match_len;
    s->min_match_len = min_match_len;
    s->segment_len = max_shared_tokens / NUM_SEGMENTS;
    s->request_tokens = request_tokens;
    s->min_survival = min_survival;
    s->doubt = doubt;
    return s;
}

int suffix_open(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num, uint64_t seed, double temperature,
                uint64_t salt) {
    (void)seed, (void)temperature; /* the most frequent continuation, whatever the sampling parameters */
    Suffix *s = drafter;
    const int64_t num_texts = s->num_texts;
    if (reserve((void **)&s->texts, &s->num_texts, slot + 1, sizeof(Text))) return -1;
    for (int64_t i = num_texts; i < s->num_texts; i++) s->texts[i] = (Text){0};
    Text *text = s->texts + slot;
    forget(text);
    if (remember_tokens(text, token_ids, num) || read_again(text, s->request_tokens)) {
        forget(text);
        return -1;
    }
    text->opened_len = num;
    text->followed = 1;
    text->salt = salt;
    return 0;
}

int suffix_extend(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num) {
    Suffix *s = drafter;
    Text *text = s->texts + slot;
    if (remember_tokens(text, token_ids, num)) return -1;
    if (text->automaton.num_tokens + num > s->request_tokens) /* halved, so the cost per token is constant */
        return read_again(text, s->request_tokens);
    return automaton_extend(&text->automaton, token_ids, num);
}

int suffix_propose(void *drafter, const Demands *demands) {
    Suffix *s = drafter;
    const int64_t stride = demands->stride;
    if (reserve((void **)&s->guessed, &s->guessed_size, stride, sizeof(int32_t))) return -1;
    if (reserve((void **)&s->guessed_confidences, &s->guessed_confidences_size, stride, sizeof(double))) return -1;
    for (int64_t i = 0; i < demands->num; i++) {
        const int64_t num_tokens = demands->num_tokens[i];
        const double least_survival = demands->least_survival[i];
        Tail tail = {.text = s->texts + demands->slots[i]};
        tail.ahead = ahead_of(demands, i, &tail.num_ahead);
        Guess own = {.token_ids = demands->token_ids + i * stride, .confidences = demands->confidences + i * stride};
        follow(s, own_place(&tail), num_tokens, least_survival, &own);
        demands->lens[i] = own.len;
        if (!s->num_begun) continue;
        Guess shared = {.token_ids = s->guessed, .confidences = s->guessed_confidences};
        follow(s, shared_place(s, &tail), num_tokens, least_survival, &shared);
        if (shared.expected_len <= own.expected_len) continue;
        memcpy(own.token_ids, shared.token_ids, (size_t)shared.len * sizeof(int32_t));
        memcpy(own.confidences, shared.confidences, (size_t)shared.len * sizeof(double));
        demands->lens[i] = shared.len;
    }
    return 0;
}

void suffix_release(void *drafter, int64_t slot) {
    Suffix *s = drafter;
    if (slot >= s->num_texts || !s->texts[slot].followed) return;
    Text *text = s->texts + slot;
    share(s, text->token_ids + text->opened_len, text->num_tokens - text->opened_len, text->salt);
    forget(text);
}

const char *suffix_check(void *drafter) {
    Suffix *s = drafter;
    const char *wrong = NULL;
    for (int64_t age = 0; !wrong && age < num_segments(s); age++) {
        wrong = automaton_check(&segment(s, age)->automaton);
        if (!wrong && segment(s, age)->automaton.num_tokens > s->segment_len) wrong = "a segment outgrew its bound";
    }
    for (int64_t slot = 0; !wrong && slot < s->num_texts; slot++) {
        const Text *text = s->texts + slot;
        if (!text->followed) continue;
        wrong = automaton_check(&text->automaton);
        if (!wrong && text->automaton.num_tokens > s->request_tokens) wrong = "a text outgrew its bound";
    }
    return wrong;
}
