/* drafters/table.py in C: the same drafts. The caller keeps the counted table. Contexts of two tokens and more are learned on
 * top; the least recently used is evicted. The longest known context counts. */
#include "../../engine/noise.h"
#include "lookup.h"

enum { LONGEST = 4, NUM_COUNTED = 4, NUM_SHARES = 2 * NUM_COUNTED, NONE = -1 };
static const double FADE = 0.95;
static const double TRUST = 4.0;  /* of a counted context's shares, in occurrences */
static const double SCARCE = 1.0; /* of the doubt in a context that was not counted */

/* N contexts with their likeliest next tokens, in buckets by the upper bits of their keys. Keys are well mixed: a bucket has
 * about one context. */
typedef struct {
    const uint64_t *keys;       /* [N], ascending */
    const int32_t *token_ids;   /* [N, 4], the likeliest first */
    const float *probabilities; /* [N, 4], 0 where there is none */
    int shift;                  /* key >> shift is the bucket */
    uint32_t *starts;           /* [2^(64 - shift) + 1], the first row of each bucket: 4 to 8 bytes per context */
} Counted;

/* Decayed counts of what followed a context; 152 bytes. */
typedef struct {
    double shares[NUM_SHARES], total;
    uint64_t salt, key;
    int32_t token_ids[NUM_SHARES]; /* oldest first */
    int32_t context[LONGEST];
    int32_t older, newer; /* in the order of use */
    int32_t next;         /* in the list of a bucket, or of free entries */
    uint8_t context_len, num_shares;
} Learned;

/* The last tokens of a text, the newest last. */
typedef struct {
    int32_t token_ids[LONGEST];
    int num;
} Recent;

typedef struct {
    int is_open;
    Recent recent;
    int64_t len;
    uint64_t seed, salt;
    double temperature;
} Followed;

typedef struct {
    Counted counted;
    double min_confidence;
    int64_t max_learned, num_learned;
    int64_t size, num_used; /* of ``learned``: allocated entries, a power of two or 0, and those ever used */
    Learned *learned;
    int32_t *heads; /* [size] */
    int32_t oldest, newest, free;
    Followed *followed; /* by slot */
    int64_t num_slots;
} Table;

typedef struct {
    int num;
    int32_t token_ids[NUM_COUNTED + NUM_SHARES];
    double shares[NUM_COUNTED + NUM_SHARES];
} Candidates;

static inline uint64_t context_key(const int32_t *context, int len) {
    uint64_t key = (uint64_t)len;
    for (int i = 0; i < len; i++) {
        key = (key ^ (uint64_t)(int64_t)context[i]) * 0x9E3779B97F4A7C15u;
        key ^= key >> 29;
    }
    return key;
}

static inline void push(Recent *recent, int32_t token_id) {
    if (recent->num == LONGEST) memmove(recent->token_ids, recent->token_ids + 1, (LONGEST - 1) * sizeof(int32_t));
    else recent->num++;
    recent->token_ids[recent->num - 1] = token_id;
}

static inline void push_all(Recent *recent, const int32_t *token_ids, int64_t num) {
    for (int64_t i = num > LONGEST ? num - LONGEST : 0; i < num; i++) push(recent, token_ids[i]);
}

/* Its last ``len`` tokens. */
static inline const int32_t *context_of(const Recent *recent, int len) { return recent->token_ids + recent->num - len; }

static int index_counted(Counted *counted, int64_t num) {
    int bits = 1;
    while (bits < 32 && (int64_t)1 << bits < num) bits++;
    const int64_t num_buckets = (int64_t)1 << bits;
    if (num > UINT32_MAX || !(counted->starts = malloc(((size_t)num_buckets + 1) * sizeof(uint32_t)))) return -1;
    counted->shift = 64 - bits;
    int64_t row = 0;
    for (int64_t bucket = 0; bucket < num_buckets; bucket++) {
        counted->starts[bucket] = (uint32_t)row;
        while (row < num && counted->keys[row] >> counted->shift == (uint64_t)bucket) row++;
    }
    counted->starts[num_buckets] = (uint32_t)row;
    return 0;
}

/* The row of a counted context; NONE: unknown. */
static inline int64_t counted_row(const Counted *counted, uint64_t key) {
    const uint64_t bucket = key >> counted->shift;
    uint32_t first = counted->starts[bucket], end = counted->starts[bucket + 1];
    const uint32_t bucket_end = end;
    while (first < end) {
        const uint32_t middle = first + (end - first) / 2;
        if (counted->keys[middle] < key) first = middle + 1;
        else end = middle;
    }
    return first < bucket_end && counted->keys[first] == key ? (int64_t)first : NONE;
}

static inline int32_t *head_of(const Table *table, uint64_t key) {
    return table->heads + ((key >> 32) & (uint64_t)(table->size - 1));
}

/* The entry of a context. Tokens are compared, since two contexts may share a key. */
static inline int32_t find_learned(const Table *table, uint64_t salt, uint64_t key, const int32_t *context, int len) {
    if (!table->num_learned) return NONE;
    int32_t i = *head_of(table, salt ^ key);
    for (; i != NONE; i = table->learned[i].next) {
        const Learned *learned = table->learned + i;
        if (learned->key != key || learned->salt != salt || learned->context_len != len) continue;
        if (!memcmp(learned->context, context, (size_t)len * sizeof(int32_t))) break;
    }
    return i;
}

static void insert(Table *table, int32_t i) {
    int32_t *head = head_of(table, table->learned[i].salt ^ table->learned[i].key);
    table->learned[i].next = *head;
    *head = i;
}

/* Doubles the entries, all of which are in use. */
static int grow(Table *table) {
    const int64_t size = table->size ? 2 * table->size : 16;
    if (size > INT32_MAX) return -1;
    int32_t *heads = malloc((size_t)size * sizeof(int32_t));
    Learned *learned = heads ? realloc(table->learned, (size_t)size * sizeof(Learned)) : NULL;
    if (!learned) {
        free(heads);
        return -1;
    }
    free(table->heads);
    table->heads = heads;
    table->learned = learned;
    table->size = size;
    for (int64_t i = 0; i < size; i++) heads[i] = NONE;
    for (int32_t i = 0; i < table->num_used; i++) insert(table, i);
    return 0;
}

/* A new, empty entry of a context, not yet in the order of use; NONE: out of memory. */
static int32_t add(Table *table, uint64_t salt, uint64_t key, const int32_t *context, int len) {
    int32_t i = table->free;
    if (i != NONE) {
        table->free = table->learned[i].next;
    } else {
        if (table->num_used == table->size && grow(table)) return NONE;
        i = (int32_t)table->num_used++;
    }
    Learned *learned = table->learned + i;
    learned->total = 0;
    learned->num_shares = 0;
    learned->key = key;
    learned->salt = salt;
    learned->context_len = (uint8_t)len;
    memcpy(learned->context, context, (size_t)len * sizeof(int32_t));
    insert(table, i);
    table->num_learned++;
    return i;
}

static void unlink_entry(Table *table, int32_t i) {
    const Learned *learned = table->learned + i;
    *(learned->older == NONE ? &table->oldest : &table->learned[learned->older].newer) = learned->newer;
    *(learned->newer == NONE ? &table->newest : &table->learned[learned->newer].older) = learned->older;
}

static void link_newest(Table *table, int32_t i) {
    table->learned[i].older = table->newest;
    table->learned[i].newer = NONE;
    *(table->newest == NONE ? &table->oldest : &table->learned[table->newest].newer) = i;
    table->newest = i;
}

static void forget_oldest(Table *table) {
    const int32_t i = table->oldest;
    unlink_entry(table, i);
    int32_t *at = head_of(table, table->learned[i].salt ^ table->learned[i].key);
    while (*at != i) at = &table->learned[*at].next;
    *at = table->learned[i].next;
    table->learned[i].next = table->free;
    table->free = i;
    table->num_learned--;
}

/* Counts ``token_id``. Of too many tokens the one of the smallest share is removed, the first of equals, possibly itself. */
static void count(Learned *learned, int32_t token_id) {
    int place = NONE, smallest = 0;
    for (int j = 0; j < learned->num_shares; j++) {
        learned->shares[j] *= FADE;
        if (learned->shares[j] < learned->shares[smallest]) smallest = j;
        if (learned->token_ids[j] == token_id) place = j;
    }
    learned->total = learned->total * FADE + 1.0;
    if (place != NONE) {
        learned->shares[place] += 1.0;
        return;
    }
    if (learned->num_shares == NUM_SHARES) {
        if (learned->shares[smallest] > 1.0) return;
        const size_t num_after = (size_t)(NUM_SHARES - 1 - smallest);
        memmove(learned->shares + smallest, learned->shares + smallest + 1, num_after * sizeof(double));
        memmove(learned->token_ids + smallest, learned->token_ids + smallest + 1, num_after * sizeof(int32_t));
        learned->num_shares--;
    }
    learned->shares[learned->num_shares] = 1.0;
    learned->token_ids[learned->num_shares++] = token_id;
}

/* Learns that ``token_id`` followed ``recent``. Single tokens have too many continuations to be contexts. */
static int learn(Table *table, const Followed *followed, int32_t token_id) {
    const Recent *recent = &followed->recent;
    int result = 0;
    for (int len = recent->num; len >= 2; len--) {
        const int32_t *context = context_of(recent, len);
        const uint64_t key = context_key(context, len);
        int32_t i = find_learned(table, followed->salt, key, context, len);
        if (i != NONE) {
            unlink_entry(table, i);
        } else if ((i = add(table, followed->salt, key, context, len)) == NONE) {
            result = -1;
            continue;
        }
        link_newest(table, i);
        count(table->learned + i, token_id);
    }
    while (table->num_learned > table->max_learned) forget_oldest(table);
    return result;
}

static inline int place_of(Candidates *candidates, int32_t token_id) {
    for (int j = 0; j < candidates->num; j++)
        if (candidates->token_ids[j] == token_id) return j;
    candidates->token_ids[candidates->num] = token_id;
    candidates->shares[candidates->num] = 0.0;
    return candidates->num++;
}

static Candidates counted_after(const Counted *counted, uint64_t key) {
    Candidates found = {.num = 0};
    const int64_t row = counted_row(counted, key);
    for (int64_t j = row * NUM_COUNTED; row != NONE && j < (row + 1) * NUM_COUNTED; j++) {
        if (!(counted->probabilities[j] > 0)) continue;
        found.token_ids[found.num] = counted->token_ids[j];
        found.shares[found.num++] = counted->probabilities[j];
    }
    return found;
}

/* Counted tokens first, then the others in the order in which they were learned. */
static Candidates mixed(const Candidates *counted, const Learned *learned) {
    Candidates all = {.num = 0};
    const double weight = counted->num ? TRUST : SCARCE, whole = weight + learned->total;
    for (int j = 0; j < counted->num; j++) all.shares[place_of(&all, counted->token_ids[j])] = weight * counted->shares[j];
    for (int j = 0; j < learned->num_shares; j++) all.shares[place_of(&all, learned->token_ids[j])] += learned->shares[j];
    for (int j = 0; j < all.num; j++) all.shares[j] /= whole;
    return all;
}

/* Candidates after the longest known context; none if none is known. */
static Candidates candidates_after(const Table *table, const Recent *recent, uint64_t salt) {
    for (int len = recent->num; len >= 1; len--) {
        const int32_t *context = context_of(recent, len);
        const uint64_t key = context_key(context, len);
        const int32_t learned = len > 1 ? find_learned(table, salt, key, context, len) : NONE;
        const Candidates counted = counted_after(&table->counted, key);
        if (learned != NONE) return mixed(&counted, table->learned + learned);
        if (counted.num) return counted;
    }
    return (Candidates){.num = 0};
}

/* Index of the candidate that the target's rule would choose if these were its probabilities; the first of equals. */
static int choose(const Candidates *candidates, const Followed *followed, int64_t position) {
    const int races = followed->temperature != 0.0 && candidates->num > 1;
    const uint64_t key = races ? noise_key(followed->seed, position) : 0;
    double highest = -INFINITY;
    int best = 0;
    for (int j = 0; j < candidates->num; j++) {
        double score = candidates->shares[j];
        if (races) {
            const int64_t token_id = candidates->token_ids[j];
            /* A learned share may fade to 0, with logarithm -INFINITY. */
            score = log(score) / followed->temperature + noise(key, token_id, block_bits(key, token_id / BLOCK_LEN));
        }
        if (score > highest) {
            highest = score;
            best = j;
        }
    }
    return best;
}

static void draft(const Table *table, const Demands *demands, int64_t i) {
    const Followed *followed = table->followed + demands->slots[i];
    int32_t *token_ids = demands->token_ids + i * demands->stride;
    double *confidences = demands->confidences + i * demands->stride;
    int64_t num_ahead, num = 0;
    const int32_t *ahead = ahead_of(demands, i, &num_ahead);
    Recent recent = followed->recent;
    push_all(&recent, ahead, num_ahead);
    double survival = 1.0;
    for (; num < demands->num_tokens[i]; num++) {
        const Candidates candidates = candidates_after(table, &recent, followed->salt);
        if (!candidates.num) break;
        const int place = choose(&candidates, followed, followed->len + num_ahead + num);
        const double confidence = candidates.shares[place];
        survival *= confidence;
        if (confidence < table->min_confidence || (num && survival < demands->least_survival[i])) break;
        token_ids[num] = candidates.token_ids[place];
        confidences[num] = confidence;
        push(&recent, token_ids[num]);
    }
    demands->lens[i] = num;
}

void table_free(void *drafter) {
    Table *table = drafter;
    free(table->counted.starts);
    free(table->learned);
    free(table->heads);
    free(table->followed);
    free(table);
}

/* NULL: out of memory. The arrays must outlive the drafter. */
void *table_new(int64_t num_contexts, const uint64_t *keys, const int32_t *token_ids, const float *probabilities,
                int64_t max_learned, double min_confidence) {
    Table *table = calloc(1, sizeof(Table));
    if (!table) return NULL;
    table->counted = (Counted){.keys = keys, .token_ids = token_ids, .probabilities = probabilities};
    table->max_learned = max_learned;
    table->min_confidence = min_confidence;
    table->oldest = table->newest = table->free = NONE;
    if (!index_counted(&table->counted, num_contexts)) return table;
    table_free(table);
    return NULL;
}

int table_open(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num, uint64_t seed, double temperature,
               uint64_t salt) {
    Table *table = drafter;
    const int64_t num_before = table->num_slots;
    void *followed = table->followed;
    if (reserve(&followed, &table->num_slots, slot + 1, sizeof(Followed))) return -1;
    table->followed = followed;
    for (int64_t i = num_before; i < table->num_slots; i++) table->followed[i].is_open = 0;
    table->followed[slot] = (Followed){.is_open = 1, .len = num, .seed = seed, .salt = salt, .temperature = temperature};
    push_all(&table->followed[slot].recent, token_ids, num);
    return 0;
}

int table_extend(void *drafter, int64_t slot, const int32_t *token_ids, int64_t num) {
    Table *table = drafter;
    Followed *followed = table->followed + slot;
    int result = 0;
    for (int64_t i = 0; i < num; i++) {
        if (table->max_learned && learn(table, followed, token_ids[i])) result = -1;
        push(&followed->recent, token_ids[i]);
    }
    followed->len += num;
    return result;
}

int table_propose(void *drafter, const Demands *demands) {
    for (int64_t i = 0; i < demands->num; i++) draft(drafter, demands, i);
    return 0;
}

void table_release(void *drafter, int64_t slot) {
    Table *table = drafter;
    if (slot < table->num_slots) table->followed[slot].is_open = 0;
}

const char *table_check(void *drafter) {
    const Table *table = drafter;
    if (table->num_learned > table->max_learned) return "more contexts were learned than there is room for";
    for (int64_t slot = 0; slot < table->num_slots; slot++)
        if (table->followed[slot].is_open && !table->followed[slot].recent.num) return "a tail of the wrong length";
    int64_t num = 0;
    int32_t older = NONE;
    for (int32_t i = table->oldest; i != NONE; older = i, i = table->learned[i].newer) {
        const Learned *learned = table->learned + i;
        if (++num > table->num_learned || learned->older != older) return "the order of use is broken";
        if (find_learned(table, learned->salt, learned->key, learned->context, learned->context_len) != i) return "a context is lost";
        if (!learned->num_shares || learned->num_shares > NUM_SHARES) return "a context of no or too many shares";
    }
    if (num != table->num_learned || table->newest != older) return "the order of use is broken";
    return NULL;
}
