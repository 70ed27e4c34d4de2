/* The lookups of a cascade, queried together: drafters/ensemble.py's PlainEnsemble for lookups in C. The maps of confidences and
 * of cases belong to the caller, which refits them when enough trials have been recorded here. */
#include "lookup.h"

#include <math.h>

enum { MOST_MEMBERS = 8, IS_SAME = 1, IS_OTHER = 2 };

typedef int (*Open)(void *, int64_t, const int32_t *, int64_t, uint64_t, double, uint64_t);
typedef int (*Extend)(void *, int64_t, const int32_t *, int64_t);
typedef int (*Propose)(void *, const Demands *);
typedef void (*Release)(void *, int64_t);
typedef const char *(*Check)(void *);

/* As drafters/native/ensemble.py fills it; nothing in it moves while the ensemble lives. */
typedef struct {
    void *drafter;
    Open open;
    Extend extend;
    Propose propose;
    Release release;
    Check check;
    const double *maps; /* [num_places, num_steps + 1]: calibrated confidences, by position in a draft */
} Member;

typedef struct {
    int64_t num_members, num_references, num_places, num_steps, num_case_steps, max_splices;
    double price_share, min_survival, min_splice_survival; /* as drafters/protocol.py and drafters/ensemble.py have them */
    const double *case_maps; /* [cases, num_case_steps + 1] */
    const int64_t *due_at;   /* [num_members + 1]: records until each member's map, and the cases' map, is fitted anew */
    Member members[MOST_MEMBERS];
} Setup;

/* Verified tokens. ``at``: their position or case; ``conditional``: their confidence, given the tokens before. */
typedef struct {
    int64_t num_records, num, size;
    int64_t *at;
    double *conditional;
    uint8_t *was_right;
} Trials;

typedef struct {
    int64_t num, num_paying;
    double expected_len;
    int32_t *token_ids;
    int64_t *cases;
    double *confidences, *conditional, *survival;
} MemberDraft;

/* The members' drafts for one demand. */
typedef struct {
    int64_t slot, num_tokens, num_ahead, ahead_size, stride;
    double row_price, least_survival;
    int32_t *ahead;
    void *room; /* of the drafts, of at most ``stride`` tokens each */
    MemberDraft drafts[MOST_MEMBERS];
} LookupDrafts;

/* A request: the last drafts behind its committed tokens, until the next commit. */
typedef struct {
    int is_pending;
    LookupDrafts drafted;
} Followed;

/* The drafts of a member for one demand. */
typedef struct {
    int64_t stride;
    int32_t *token_ids;
    double *confidences, *survival;
} Rest;

typedef struct {
    Setup setup;
    int64_t num_slots, num_queries, queries_size, batch_size, ahead_size;
    Followed *followed;
    LookupDrafts *queries; /* by place: the demands of the last query */
    int32_t *token_ids, *ahead; /* of a batch; behind a draft */
    double *confidences, *least;
    int64_t *lens;
    Rest rest, best;
    Trials trials[MOST_MEMBERS + 1];
} Ensemble;

void *ensemble_new(const Setup *setup) {
    if (setup->num_members > MOST_MEMBERS) return NULL;
    Ensemble *h = calloc(1, sizeof(Ensemble));
    if (h) h->setup = *setup;
    return h;
}

static void free_query(LookupDrafts *query) {
    free(query->ahead);
    free(query->room);
}

void ensemble_free(void *at) {
    Ensemble *h = at;
    for (int64_t slot = 0; slot < h->num_slots; slot++) free_query(&h->followed[slot].drafted);
    for (int64_t i = 0; i < h->queries_size; i++) free_query(&h->queries[i]);
    for (int64_t i = 0; i <= h->setup.num_members; i++) {
        free(h->trials[i].at);
        free(h->trials[i].conditional);
        free(h->trials[i].was_right);
    }
    void *all[] = {h->followed,          h->queries,           h->token_ids,      h->ahead,           h->confidences,
                   h->least,             h->lens,            h->rest.token_ids, h->rest.confidences, h->rest.survival,
                   h->best.token_ids,    h->best.confidences, h->best.survival,  h};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int ensemble_open(void *at, int64_t slot, const int32_t *token_ids, int64_t num, uint64_t seed, double temperature,
                  uint64_t salt) {
    Ensemble *h = at;
    const int64_t known = h->num_slots;
    if (reserve((void **)&h->followed, &h->num_slots, slot + 1, sizeof(Followed))) return -1;
    memset(h->followed + known, 0, (size_t)(h->num_slots - known) * sizeof(Followed));
    h->followed[slot].is_pending = 0;
    for (int64_t i = 0; i < h->setup.num_members; i++) {
        const Member *m = &h->setup.members[i];
        if (m->open(m->drafter, slot, token_ids, num, seed, temperature, salt)) return -1;
    }
    return 0;
}

void ensemble_release(void *at, int64_t slot) {
    Ensemble *h = at;
    for (int64_t i = 0; i < h->setup.num_members; i++) h->setup.members[i].release(h->setup.members[i].drafter, slot);
    if (slot < h->num_slots) h->followed[slot].is_pending = 0;
}

const char *ensemble_check(void *at) {
    Ensemble *h = at;
    for (int64_t i = 0; i < h->setup.num_members; i++) {
        const char *wrong = h->setup.members[i].check(h->setup.members[i].drafter);
        if (wrong) return wrong;
    }
    return NULL;
}

/* ---- calibration */

static double calibrated(const double *map, int64_t num_steps, double confidence) {
    confidence = confidence > 0.0 ? fmin(confidence, 1.0) : 0.0; /* also of what is no number */
    return map[(int64_t)(confidence * (double)num_steps + 0.5)];
}

/* The survival of each prefix of a member's draft. */
static void find_survival(const Setup *s, const Member *m, const double *confidences, int64_t num, double *survival) {
    double chance = 1.0;
    for (int64_t i = 0; i < num; i++) {
        const int64_t place = i < s->num_places ? i : s->num_places - 1;
        chance *= calibrated(m->maps + place * (s->num_steps + 1), s->num_steps, confidences[i]);
        survival[i] = chance;
    }
}

static int64_t common_prefix_len(const int32_t *a, int64_t num_a, const int32_t *b, int64_t num_b) {
    const int64_t num = num_a < num_b ? num_a : num_b;
    int64_t i = 0;
    while (i < num && a[i] == b[i]) i++;
    return i;
}

/* The case of each token: its member, whether it is the first, and its comparison with each reference (drafters/consensus.py). */
static void compare(const Setup *s, LookupDrafts *query, int64_t member) {
    MemberDraft *draft = &query->drafts[member];
    int64_t num_cases = 1, weight = 1;
    for (int64_t i = 0; i < s->num_references; i++) num_cases *= 3;
    for (int64_t i = 0; i < draft->num; i++) draft->cases[i] = (2 * member + (i > 0)) * num_cases;
    for (int64_t i = 0; i < s->num_references; i++, weight *= 3) {
        const MemberDraft *reference = &query->drafts[i];
        if (i == member || !reference->num) continue;
        const int64_t num_same = common_prefix_len(draft->token_ids, draft->num, reference->token_ids, reference->num);
        for (int64_t place = 0; place < num_same; place++) draft->cases[place] += weight * IS_SAME;
        if (num_same < draft->num && num_same < reference->num) draft->cases[num_same] += weight * IS_OTHER;
    }
}

/* Corrects the survival of a draft by its agreement with the other drafts. */
static void calibrate(const Setup *s, LookupDrafts *query, int64_t member) {
    MemberDraft *draft = &query->drafts[member];
    double before = 1.0, chance = 1.0, sum = 0.0;
    compare(s, query, member);
    draft->num_paying = 0;
    for (int64_t i = 0; i < draft->num; i++) {
        const double certain = before > 0.0 ? draft->survival[i] / before : 0.0;
        before = draft->survival[i];
        chance *= calibrated(s->case_maps + draft->cases[i] * (s->num_case_steps + 1), s->num_case_steps, certain);
        draft->conditional[i] = certain;
        draft->survival[i] = chance;
        if (chance > query->row_price) {
            sum += chance;
            draft->num_paying++;
        }
    }
    draft->expected_len = sum - (double)draft->num_paying * query->row_price;
}

static int64_t best_member(const Ensemble *h, const LookupDrafts *query) {
    int64_t best = 0;
    for (int64_t i = 1; i < h->setup.num_members; i++)
        if (query->drafts[i].expected_len > query->drafts[best].expected_len) best = i;
    return best;
}

/* ---- ensemble */

static int make_room(LookupDrafts *query, int64_t num_members, int64_t stride) {
    if (stride <= query->stride) return 0;
    const size_t each = (size_t)stride, of_one = each * (3 * sizeof(double) + sizeof(int64_t) + sizeof(int32_t));
    char *room = malloc((size_t)num_members * of_one);
    if (!room) return -1;
    free(query->room);
    query->room = room;
    query->stride = stride;
    double *doubles = (double *)room;
    int64_t *cases = (int64_t *)(doubles + 3 * each * (size_t)num_members);
    int32_t *token_ids = (int32_t *)(cases + each * (size_t)num_members);
    for (int64_t i = 0; i < num_members; i++) {
        MemberDraft *draft = &query->drafts[i];
        draft->confidences = doubles + 3 * (size_t)i * each;
        draft->conditional = draft->confidences + each;
        draft->survival = draft->conditional + each;
        draft->cases = cases + (size_t)i * each;
        draft->token_ids = token_ids + (size_t)i * each;
    }
    return 0;
}

static int copy_demand(Ensemble *h, const Demands *d, const double *row_prices, int64_t i) {
    int64_t num_ahead;
    const int32_t *ahead = ahead_of(d, i, &num_ahead);
    LookupDrafts *query = &h->queries[i];
    if (make_room(query, h->setup.num_members, d->num_tokens[i])) return -1;
    if (reserve((void **)&query->ahead, &query->ahead_size, num_ahead, sizeof(int32_t))) return -1;
    if (num_ahead) memcpy(query->ahead, ahead, (size_t)num_ahead * sizeof(int32_t));
    query->slot = d->slots[i];
    query->num_tokens = d->num_tokens[i];
    query->num_ahead = num_ahead;
    query->row_price = row_prices[i];
    query->least_survival = d->least_survival[i];
    return 0;
}

/* Copies the drafts until the commit that verifies them: the next query may come before. */
static int keep_drafts(Ensemble *h, const LookupDrafts *query) {
    Followed *followed = &h->followed[query->slot];
    followed->is_pending = 0;
    if (make_room(&followed->drafted, h->setup.num_members, query->num_tokens)) return -1;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const MemberDraft *from = &query->drafts[m];
        MemberDraft *to = &followed->drafted.drafts[m];
        to->num = from->num;
        if (!from->num) continue;
        memcpy(to->token_ids, from->token_ids, (size_t)from->num * sizeof(int32_t));
        memcpy(to->cases, from->cases, (size_t)from->num * sizeof(int64_t));
        memcpy(to->confidences, from->confidences, (size_t)from->num * sizeof(double));
        memcpy(to->conditional, from->conditional, (size_t)from->num * sizeof(double));
    }
    followed->is_pending = 1;
    return 0;
}

static int grow_batch(Ensemble *h, int64_t num, int64_t stride) {
    const int64_t known = h->queries_size;
    int64_t size = known, drafted = h->batch_size;
    if (reserve((void **)&h->lens, &size, num, sizeof(int64_t))) return -1;
    if (reserve((void **)&h->queries, &h->queries_size, num, sizeof(LookupDrafts))) return -1;
    if (h->queries_size > known) memset(h->queries + known, 0, (size_t)(h->queries_size - known) * sizeof(LookupDrafts));
    if (reserve((void **)&h->token_ids, &drafted, num * stride, sizeof(int32_t))) return -1;
    drafted = h->batch_size;
    if (reserve((void **)&h->confidences, &drafted, num * stride, sizeof(double))) return -1;
    h->batch_size = drafted;
    return 0;
}

/* ``expected_lens[i]``: of the best draft for demand i, less what its rows cost. */
int ensemble_query(void *at, const Demands *demands, const double *row_prices, double *expected_lens) {
    Ensemble *h = at;
    h->num_queries = 0;
    if (grow_batch(h, demands->num, demands->stride)) return -1;
    for (int64_t i = 0; i < demands->num; i++)
        if (copy_demand(h, demands, row_prices, i)) return -1;
    Demands own = *demands;
    own.token_ids = h->token_ids;
    own.confidences = h->confidences;
    own.lens = h->lens;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const Member *member = &h->setup.members[m];
        if (member->propose(member->drafter, &own)) return -1;
        for (int64_t i = 0; i < own.num; i++) {
            MemberDraft *draft = &h->queries[i].drafts[m];
            draft->num = own.lens[i];
            if (!draft->num) continue;
            memcpy(draft->token_ids, own.token_ids + i * own.stride, (size_t)draft->num * sizeof(int32_t));
            memcpy(draft->confidences, own.confidences + i * own.stride, (size_t)draft->num * sizeof(double));
            find_survival(&h->setup, member, draft->confidences, draft->num, draft->survival);
        }
    }
    for (int64_t i = 0; i < own.num; i++) {
        LookupDrafts *query = &h->queries[i];
        for (int64_t m = 0; m < h->setup.num_members; m++) calibrate(&h->setup, query, m);
        expected_lens[i] = query->drafts[best_member(h, query)].expected_len;
        if (!query->num_ahead && keep_drafts(h, query)) return -1;
    }
    h->num_queries = own.num;
    return 0;
}

int64_t ensemble_best(void *at, int64_t place) { return best_member(at, &((Ensemble *)at)->queries[place]); }

/* The draft of ``member`` for demand ``place`` of the last query. */
void ensemble_draft(void *at, int64_t place, int64_t member, MemberDraft *draft) {
    *draft = ((Ensemble *)at)->queries[place].drafts[member];
}

/* ---- splices */

static double sum_of(const double *survival, int64_t num, double least) {
    double sum = 0.0;
    for (int64_t i = 0; i < num; i++)
        if (survival[i] >= least) sum += survival[i];
    return sum;
}

static int grow_rest(Rest *rest, int64_t stride) {
    int64_t size = rest->stride;
    if (reserve((void **)&rest->token_ids, &size, stride, sizeof(int32_t))) return -1;
    size = rest->stride;
    if (reserve((void **)&rest->confidences, &size, stride, sizeof(double))) return -1;
    size = rest->stride;
    if (reserve((void **)&rest->survival, &size, stride, sizeof(double))) return -1;
    rest->stride = size;
    return 0;
}

/* The most promising lookup's tokens behind ``num`` drafted tokens of survival ``survival``: into h->best. Returns their number;
 * -1 if out of memory. */
static int64_t continuation(Ensemble *h, const LookupDrafts *query, const int32_t *drafted, int64_t num, double survival) {
    const int64_t ahead_end = query->num_ahead + num, num_tokens = query->num_tokens - num;
    const double price = query->row_price / survival, least = h->setup.price_share * price;
    if (reserve((void **)&h->ahead, &h->ahead_size, ahead_end, sizeof(int32_t))) return -1;
    if (grow_rest(&h->rest, num_tokens) || grow_rest(&h->best, num_tokens)) return -1;
    if (query->num_ahead) memcpy(h->ahead, query->ahead, (size_t)query->num_ahead * sizeof(int32_t));
    memcpy(h->ahead + query->num_ahead, drafted, (size_t)num * sizeof(int32_t));
    int64_t found = 0, num_found;
    double most = 0.0;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const Member *member = &h->setup.members[m];
        const Demands one = {1, &query->slot, &num_tokens, &least, h->ahead, &ahead_end, num_tokens, h->rest.token_ids,
                             h->rest.confidences, &num_found};
        if (member->propose(member->drafter, &one)) return -1;
        find_survival(&h->setup, member, h->rest.confidences, num_found, h->rest.survival);
        double sum = 0.0;
        for (int64_t i = 0; i < num_found; i++) sum += h->rest.survival[i] *= survival;
        if (sum > most) {
            const Rest former = h->best;
            h->best = h->rest;
            h->rest = former;
            most = sum;
            found = num_found;
        }
    }
    return found;
}

/* Extends a draft by lookups where it ends, and replaces the rest of a model's draft where they promise more. ``token_ids`` and
 * ``survival`` have room for the demanded tokens. Returns the new length; -1 if out of memory. */
static int64_t splice(Ensemble *h, const LookupDrafts *query, int is_lookup, int32_t *token_ids, double *survival, int64_t num) {
    const double least = fmax(h->setup.min_splice_survival, query->row_price);
    const double kept = fmax(h->setup.min_survival, query->least_survival);
    int64_t place = is_lookup ? num : 1, num_splices = 0;
    while (num && place <= num && place < query->num_tokens && num_splices < h->setup.max_splices) {
        if (survival[place - 1] < least) break;
        const int64_t found = continuation(h, query, token_ids, place, survival[place - 1]);
        if (found < 0) return -1;
        if (sum_of(h->best.survival, found, kept) > sum_of(survival + place, num - place, kept)) {
            if (found) memcpy(token_ids + place, h->best.token_ids, (size_t)found * sizeof(int32_t));
            if (found) memcpy(survival + place, h->best.survival, (size_t)found * sizeof(double));
            num = place = place + found;
            num_splices++;
        } else {
            place++;
        }
    }
    return num;
}

/* From survival to confidences, of the part that survives often enough. Returns its length. */
static int64_t to_confidences(const Ensemble *h, const LookupDrafts *query, double *survival, int64_t num) {
    const double least = fmax(h->setup.min_survival, query->least_survival);
    double before = 1.0;
    int64_t kept = 0;
    for (int64_t i = 0; i < num; i++) kept += survival[i] >= least; /* it never rises */
    for (int64_t i = 0; i < kept; i++) {
        const double own = survival[i];
        survival[i] = fmin(1.0, own / before);
        before = own;
    }
    return kept;
}

/* The best draft for each of ``places``, at ``stride`` of ``token_ids`` and ``confidences``, and its member. */
int ensemble_best_drafts(void *at, int64_t num, const int64_t *places, int64_t stride, int32_t *token_ids, double *confidences,
                   int64_t *lens, int64_t *members) {
    Ensemble *h = at;
    for (int64_t i = 0; i < num; i++) {
        const LookupDrafts *query = &h->queries[places[i]];
        const MemberDraft *draft = &query->drafts[members[i] = best_member(h, query)];
        int32_t *own_ids = token_ids + i * stride;
        double *own = confidences + i * stride;
        if (draft->num) memcpy(own_ids, draft->token_ids, (size_t)draft->num * sizeof(int32_t));
        if (draft->num) memcpy(own, draft->survival, (size_t)draft->num * sizeof(double));
        const int64_t spliced = splice(h, query, 1, own_ids, own, draft->num);
        if (spliced < 0) return -1;
        lens[i] = to_confidences(h, query, own, spliced);
    }
    return 0;
}

/* As ensemble_best_drafts, for an expensive member's draft with its survival in ``confidences``; room as for splice. Returns the
 * new length; -1 if out of memory. */
int64_t ensemble_splice(void *at, int64_t place, int64_t num, int32_t *token_ids, double *confidences) {
    Ensemble *h = at;
    const LookupDrafts *query = &h->queries[place];
    const int64_t spliced = splice(h, query, 0, token_ids, confidences, num);
    return spliced < 0 ? -1 : to_confidences(h, query, confidences, spliced);
}

/* ---- learning */

static int add_trial(Trials *trials, int64_t at, double conditional, int was_right) {
    int64_t size = trials->size;
    if (reserve((void **)&trials->at, &size, trials->num + 1, sizeof(int64_t))) return -1;
    size = trials->size;
    if (reserve((void **)&trials->conditional, &size, trials->num + 1, sizeof(double))) return -1;
    size = trials->size;
    if (reserve((void **)&trials->was_right, &size, trials->num + 1, 1)) return -1;
    trials->size = size;
    trials->at[trials->num] = at;
    trials->conditional[trials->num] = conditional;
    trials->was_right[trials->num++] = (uint8_t)was_right;
    return 0;
}

/* Records how far a draft was right, as far as tokens were committed. */
static int record_draft(Ensemble *h, int64_t member, const MemberDraft *draft, const int32_t *token_ids, int64_t num) {
    Trials *own = &h->trials[member], *beside = &h->trials[h->setup.num_members];
    if (!draft->num) return 0;
    const int64_t num_right = common_prefix_len(draft->token_ids, draft->num, token_ids, num);
    for (int64_t i = 0; i <= num_right && i < num && i < draft->num; i++) {
        const int64_t place = i < h->setup.num_places ? i : h->setup.num_places - 1;
        if (add_trial(own, place, draft->confidences[i], i < num_right)) return -1;
        if (add_trial(beside, draft->cases[i], draft->conditional[i], i < num_right)) return -1;
        beside->num_records++;
    }
    own->num_records++;
    return 0;
}

int ensemble_extend(void *at, int64_t slot, const int32_t *token_ids, int64_t num) {
    Ensemble *h = at;
    Followed *followed = &h->followed[slot];
    int failed = 0;
    for (int64_t i = 0; i < h->setup.num_members; i++) { /* all of them, also after a failure */
        const Member *m = &h->setup.members[i];
        failed |= m->extend(m->drafter, slot, token_ids, num);
        if (followed->is_pending && num) failed |= record_draft(h, i, &followed->drafted.drafts[i], token_ids, num);
    }
    followed->is_pending = 0;
    return failed ? -1 : 0;
}

/* Which maps are to be fitted anew: a bit for each member, and one for the cases. */
int64_t ensemble_due(void *at) {
    const Ensemble *h = at;
    int64_t due = 0;
    for (int64_t i = 0; i <= h->setup.num_members; i++) due |= (int64_t)(h->trials[i].num_records >= h->setup.due_at[i]) << i;
    return due;
}

/* Takes the trials. They stay in place until the next call of ensemble_extend. */
void ensemble_take(void *at, int64_t number, Trials *taken) {
    Trials *trials = &((Ensemble *)at)->trials[number];
    *taken = *trials;
    trials->num = trials->num_records = 0;
}
