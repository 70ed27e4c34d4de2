/* drafters/ngram.py in C: the same drafts and hit rates. Each text has an index per length of n-grams, with look-ups in constant
 * time: 16 to 32 bytes per token and length. */
#include "lookup.h"

enum { NUM_PLACES = 4, NO_RATE = -1 };
static const double FIRST_PRIOR = 0.3, LATER_PRIOR = 0.8;
static const double PRIOR_TRIALS = 8.0, MAX_TRIALS = 500.0;

typedef struct {
    double rate, weight;
} HitRate;

/* The position after the last occurrence of an n-gram that a token followed, at least n. The tokens are in the text. */
typedef struct {
    uint32_t hash;
    int32_t end; /* 0: free */
} Entry;

/* All n-grams of one length: open addressing, at most half full. */
typedef struct {
    int64_t size, num; /* size: a power of two, or 0 */
    Entry *entries;
} Index;

/* A token drafted behind the text, and the index of its hit rate. */
typedef struct {
    int32_t token_id;
    int64_t rate;
} Guess;

typedef struct {
    int64_t num, size, num_guesses, guess_size;
    int32_t *token_ids;
    Guess *guesses;
    Index *indices; /* by length, the shortest first; NULL: the slot is free */
} Text;

typedef struct {
    int64_t min_len, num_lens, num_texts;
    Text *texts;      /* by slot */
    HitRate *rates;   /* [num_lens, NUM_PLACES] */
    int32_t *tail;    /* [largest length]: the end of a text and the tokens ahead */
    uint32_t *hashes; /* [num_lens]: of the n-grams at the end of ``tail`` */
} Ngram;

/* Hashes of the n-grams of each length that end before ``end``, behind ``num`` tokens. Returns their number. */
static int64_t hash_ends(const Ngram *ngram, const int32_t *end, int64_t num) {
    const int64_t longest = ngram->min_len + ngram->num_lens - 1;
    uint64_t hash = 0;
    num = num < longest ? num : longest;
    for (int64_t len = 1; len <= num; len++) {
        hash = (hash ^ (uint32_t)end[-len]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
        if (len >= ngram->min_len) ngram->hashes[len - ngram->min_len] = (uint32_t)(hash >> 32);
    }
    return num < ngram->min_len ? 0 : num - ngram->min_len + 1;
}

/* The entry of the n-gram that ends before ``end``, or a free one for it, which must exist. */
static Entry *entry_of(const Text *text, const Index *index, uint32_t hash, const int32_t *end, int64_t len) {
    const uint64_t mask = (uint64_t)index->size - 1;
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        Entry *entry = index->entries + i;
        if (!entry->end) return entry;
        if (entry->hash != hash) continue;
        if (!memcmp(text->token_ids + entry->end - len, end - len, (size_t)len * sizeof(int32_t))) return entry;
    }
}

static int grow(Index *index) {
    const int64_t size = index->size ? 2 * index->size : 32;
    Entry *entries = calloc((size_t)size, sizeof(Entry));
    if (!entries) return -1;
    for (int64_t i = 0; i < index->size; i++) {
        const Entry entry = index->entries[i];
        uint64_t at = entry.hash & (uint64_t)(size - 1);
        while (entry.end && entries[at].end) at = (at + 1) & (uint64_t)(size - 1);
        if (entry.end) entries[at] = entry;
    }
    free(index->entries);
    index->entries = entries;
    index->size = size;
    return 0;
}

/* Indexes every n-gram at the end of the text, before a token is appended. */
static int index_end(const Ngram *ngram, Text *text) {
    int result = 0;
    const int32_t *end = text->token_ids + text->num;
    const int64_t num = hash_ends(ngram, end, text->num);
    for (int64_t i = 0; i < num; i++) {
        Index *index = text->indices + i;
        if (2 * (index->num + 1) > index->size && grow(index)) {
            result = -1;
            continue;
        }
        Entry *entry = entry_of(text, index, ngram->hashes[i], end, ngram->min_len + i);
        if (!entry->end) index->num++;
        *entry = (Entry){ngram->hashes[i], (int32_t)text->num};
    }
    return result;
}

static int make_room(Text *text, int64_t num) {
    if (num > INT32_MAX - text->num) return -1;
    void *token_ids = text->token_ids;
    const int result = reserve(&token_ids, &text->size, text->num + num, sizeof(int32_t));
    text->token_ids = token_ids;
    return result;
}

/* Room for the tokens must exist. */
static int append(const Ngram *ngram, Text *text, const int32_t *token_ids, int64_t num) {
    int result = 0;
    for (int64_t i = 0; i < num; i++) {
        if (text->num && index_end(ngram, text)) result = -1;
        text->token_ids[text->num++] = token_ids[i];
    }
    return result;
}

static void record(HitRate *hit_rate, int hit) {
    hit_rate->weight = hit_rate->weight + 1.0 < MAX_TRIALS ? hit_rate->weight + 1.0 : MAX_TRIALS;
    hit_rate->rate += ((double)hit - hit_rate->rate) / hit_rate->weight;
}

/* Each committed token at a drafted position is a trial, up to the first wrong draft token. */
static void learn(Ngram *ngram, Text *text, const int32_t *token_ids, int64_t num) {
    const int64_t num_trials = num < text->num_guesses ? num : text->num_guesses;
    for (int64_t i = 0; i < num_trials; i++) {
        const Guess guess = text->guesses[i];
        const int hit = guess.token_id == token_ids[i];
        if (guess.rate != NO_RATE) record(ngram->rates + guess.rate, hit);
        if (!hit) {
            text->num_guesses = 0;
            return;
        }
    }
    if (!num_trials) return;
    text->num_guesses -= num_trials;
    memmove(text->guesses, text->guesses + num_trials, (size_t)text->num_guesses * sizeof(Guess));
}

/* The position after the longest earlier occurrence of the end of the text and ``ahead``, 0 if there is none; and the index of
 * its length. */
static int64_t find(const Ngram *ngram, const Text *text, const int32_t *ahead, int64_t num_ahead, int64_t *which) {
    const int64_t longest = ngram->min_len + ngram->num_lens - 1;
    const int64_t of_ahead = num_ahead < longest ? num_ahead : longest;
    const int64_t of_text = text->num < longest - of_ahead ? text->num : longest - of_ahead;
    const int64_t num = of_text + of_ahead;
    for (int64_t i = 0; i < of_text; i++) ngram->tail[i] = text->token_ids[text->num - of_text + i];
    for (int64_t i = 0; i < of_ahead; i++) ngram->tail[of_text + i] = ahead[num_ahead - of_ahead + i];
    const int32_t *end = ngram->tail + num;
    for (int64_t i = hash_ends(ngram, end, num) - 1; i >= 0; i--) {
        const Index *index = text->indices + i;
        const Entry *entry = index->size ? entry_of(text, index, ngram->hashes[i], end, ngram->min_len + i) : NULL;
        *which = i;
        if (entry && entry->end) return entry->end;
    }
    return 0;
}

/* Length of a draft that survives often enough; confidences are the hit rates of one match length. */
static int64_t worthwhile(const HitRate *rates, int64_t num_tokens, double least_survival, double *confidences) {
    double survival = confidences[0] = rates[0].rate;
    int64_t num = 1;
    for (; num < num_tokens; num++) {
        const double rate = rates[num < NUM_PLACES ? num : NUM_PLACES - 1].rate;
        survival *= rate;
        if (survival < least_survival) break;
        confidences[num] = rate;
    }
    return num;
}

/* Tokens ahead that were drafted here stay trials. */
static int keep_guesses(Text *text, const int32_t *ahead, int64_t num_ahead, const int32_t *token_ids, int64_t num,
                        int64_t first_rate) {
    void *guesses = text->guesses;
    if (reserve(&guesses, &text->guess_size, num_ahead + num, sizeof(Guess))) return -1;
    text->guesses = guesses;
    for (int64_t i = 0; i < num_ahead; i++)
        if (i >= text->num_guesses || text->guesses[i].token_id != ahead[i]) text->guesses[i] = (Guess){ahead[i], NO_RATE};
    for (int64_t i = 0; i < num; i++)
        text->guesses[num_ahead + i] = (Guess){token_ids[i], first_rate + (i < NUM_PLACES ? i : NUM_PLACES - 1)};
    text->num_guesses = num_ahead + num;
    return 0;
}

static int draft(const Ngram *ngram, const Demands *demands, int64_t i) {
    Text *text = ngram->texts + demands->slots[i];
    int32_t *token_ids = demands->token_ids + i * demands->stride;
    int64_t num_ahead, which;
    const int32_t *ahead = ahead_of(demands, i, &num_ahead);
    const int64_t num_tokens = demands->num_tokens[i], position = find(ngram, text, ahead, num_ahead, &which);
    demands->lens[i] = 0;
    if (!position || num_tokens <= 0) return 0;
    const int64_t first_rate = which * NUM_PLACES;
    const int64_t num = worthwhile(ngram->rates + first_rate, num_tokens, demands->least_survival[i],
                                   demands->confidences + i * demands->stride);
    /* A copy that reaches the end of the text continues with the tokens ahead, then in itself. */
    const int64_t of_text = text->num - position, period = of_text + num_ahead;
    for (int64_t j = 0; j < num; j++) {
        const int64_t at = j < of_text ? j : j % period;
        token_ids[j] = at < of_text ? text->token_ids[position + at] : ahead[at - of_text];
    }
    if (keep_guesses(text, ahead, num_ahead, token_ids, num, first_rate)) return -1;
    demands->lens[i] = num;
    return 0;
}

void ngram_release(void *drafter, int64_t slot) {
    const Ngram *ngram = drafter;
    if (slot >= ngram->num_texts || !ngram->texts[slot].indices) return;
    Text *text = ngram->texts + slot;
    for (int64_t i = 0; i < ngram->num_lens; i++) free(text->indices[i].entries);
    free(text->indices);
    free(text->token_ids);
    free(text->guesses);
    *text = (Text){0};
}

void ngram_free(void *drafter) {
    Ngram *ngram = drafter;
    for (int64_t slot = 0; slot < ngram->num_texts; slot++) ngram_release(drafter, slot);
    free(ngram->texts);
    free(ngram->rates);
    free(ngram->tail);
    free(ngram->hashes);
    free(ngram);
}

/* NULL: out of memory. */
void *ngram_new(int64_t max_match_len, int64_t min_match_len) {
    Ngram *ngram = calloc(1, sizeof(Ngram));
    if (!ngram) return NULL;
    ngram->min_len = min_match_len;
    ngram->num_lens = max_match_len - min_match_len + 1;
    ngram->rates = calloc((size_t)ngram->num_lens, NUM_PLACES * sizeof(HitRate));
    ngram->tail = calloc((size_t)max_match_len, sizeof(int32_t));
    ngram->hashes = calloc((size_t)ngram->num_lens, sizeof(uint32_t));
    if (!ngram->rates || !ngram->tail || !ngram->hashes) {
        ngram_free(ngram);
        return NULL;
    }
    for (int64_t i = 0; i < ngram->num_lens * NUM_PLACES; i++)
        ngram->rates[i] = (HitRate){i % NUM_PLACES ? LATER_PRIOR : FIRST_PRIOR, PRIOR_TRIALS};
    return ngram;
}

int ngram_open(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num, uint64_t seed, double temperature,
               uint64_t salt) {
    (void)seed, (void)temperature, (void)salt;
    Ngram *ngram = drafter;
    const int64_t num_before = ngram->num_texts;
    void *texts = ngram->texts;
    if (reserve(&texts, &ngram->num_texts, slot + 1, sizeof(Text))) return -1;
    ngram->texts = texts;
    for (int64_t i = num_before; i < ngram->num_texts; i++) ngram->texts[i] = (Text){0};
    ngram_release(drafter, slot);
    Text *text = ngram->texts + slot;
    text->indices = calloc((size_t)ngram->num_lens, sizeof(Index));
    if (!text->indices || make_room(text, num)) return -1;
    return append(ngram, text, token_ids, num);
}

int ngram_extend(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num) {
    Ngram *ngram = drafter;
    Text *text = ngram->texts + slot;
    if (make_room(text, num)) return -1;
    learn(ngram, text, token_ids, num);
    return append(ngram, text, token_ids, num);
}

int ngram_propose(void *drafter, const Demands *demands) {
    int result = 0;
    for (int64_t i = 0; i < demands->num; i++)
        if (draft(drafter, demands, i)) result = -1;
    return result;
}

static const char *damage(const Ngram *ngram, const Text *text, int64_t which) {
    const Index *index = text->indices + which;
    int64_t num = 0;
    for (int64_t i = 0; i < index->size; i++) {
        const Entry *entry = index->entries + i;
        if (!entry->end) continue;
        num++;
        const int32_t *end = text->token_ids + entry->end;
        if (entry->end >= text->num) return "an n-gram that no token follows";
        if (hash_ends(ngram, end, entry->end) <= which) return "an n-gram that begins before its text";
        if (ngram->hashes[which] != entry->hash) return "an n-gram of another hash";
        if (entry_of(text, index, entry->hash, end, ngram->min_len + which) != entry) return "an n-gram is lost";
    }
    return num == index->num && 2 * num <= index->size ? NULL : "an index that miscounts its n-grams";
}

const char *ngram_check(void *drafter) {
    const Ngram *ngram = drafter;
    for (int64_t slot = 0; slot < ngram->num_texts; slot++) {
        for (int64_t i = 0; ngram->texts[slot].indices && i < ngram->num_lens; i++) {
            const char *wrong = damage(ngram, ngram->texts + slot, i);
            if (wrong) return wrong;
        }
    }
    return NULL;
}
