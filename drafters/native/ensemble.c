/* The lookups of a cascade, heard together: drafters/ensemble.py's PlainEnsemble of lookups in C. The confidences' maps, and those
 * of consensus, lie with the caller, who fits them anew when a part of what came true has gathered here. */
#include "lookup.h"

#include <math.h>

enum { MOST_MEMBERS = 8, SAYS_SAME = 1, SAYS_OTHER = 2 };

typedef int (*Open)(void *, int64_t, const int32_t *, int64_t, uint64_t, double);
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
    const double *maps; /* [num_places, num_steps + 1]: what a confidence means at a place of a draft */
} Member;

typedef struct {
    int64_t num_members, num_witnesses, num_places, num_steps, num_case_steps, max_splices;
    double price_share, min_survival, worth_splicing; /* as drafters/protocol.py and drafters/ensemble.py have them */
    const double *case_maps; /* [cases, num_case_steps + 1] */
    const int64_t *due_at;   /* [num_members + 1]: of each member's drafts, and of tokens beside others, when to fit anew */
    Member members[MOST_MEMBERS];
} Setup;

/* Tokens that were tried: ``at`` is their place, or their case; ``told`` how likely they were. */
typedef struct {
    int64_t num_records, num, size;
    int64_t *at;
    double *told;
    uint8_t *came_true;
} Trials;

typedef struct {
    int64_t num, num_worth;
    double expected_len;
    int32_t *token_ids;
    int64_t *cases;
    double *confidences, *told, *survival;
} Guess;

/* What the members drafted for one demand. */
typedef struct {
    int64_t slot, num_tokens, num_ahead, ahead_size, stride;
    double row_price, least_survival;
    int32_t *ahead;
    void *room; /* of the guesses, each of ``stride`` tokens at most */
    Guess guesses[MOST_MEMBERS];
} LookupDrafts;

/* A request: what was drafted behind its committed tokens last, as long as no commit has answered it. */
typedef struct {
    int is_unanswered;
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
    int64_t num_slots, num_heard, heard_size, batch_size, ahead_size;
    Followed *followed;
    LookupDrafts *heard; /* by place: the demands heard last */
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

static void free_heard(LookupDrafts *heard) {
    free(heard->ahead);
    free(heard->room);
}

void ensemble_free(void *at) {
    Ensemble *h = at;
    for (int64_t slot = 0; slot < h->num_slots; slot++) free_heard(&h->followed[slot].drafted);
    for (int64_t i = 0; i < h->heard_size; i++) free_heard(&h->heard[i]);
    for (int64_t i = 0; i <= h->setup.num_members; i++) {
        free(h->trials[i].at);
        free(h->trials[i].told);
        free(h->trials[i].came_true);
    }
    void *all[] = {h->followed,          h->heard,           h->token_ids,      h->ahead,           h->confidences,
                   h->least,             h->lens,            h->rest.token_ids, h->rest.confidences, h->rest.survival,
                   h->best.token_ids,    h->best.confidences, h->best.survival,  h};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int ensemble_open(void *at, int64_t slot, const int32_t *token_ids, int64_t num, uint64_t seed, double temperature) {
    Ensemble *h = at;
    const int64_t known = h->num_slots;
    if (reserve((void **)&h->followed, &h->num_slots, slot + 1, sizeof(Followed))) return -1;
    memset(h->followed + known, 0, (size_t)(h->num_slots - known) * sizeof(Followed));
    h->followed[slot].is_unanswered = 0;
    for (int64_t i = 0; i < h->setup.num_members; i++) {
        const Member *m = &h->setup.members[i];
        if (m->open(m->drafter, slot, token_ids, num, seed, temperature)) return -1;
    }
    return 0;
}

void ensemble_release(void *at, int64_t slot) {
    Ensemble *h = at;
    for (int64_t i = 0; i < h->setup.num_members; i++) h->setup.members[i].release(h->setup.members[i].drafter, slot);
    if (slot < h->num_slots) h->followed[slot].is_unanswered = 0;
}

const char *ensemble_check(void *at) {
    Ensemble *h = at;
    for (int64_t i = 0; i < h->setup.num_members; i++) {
        const char *wrong = h->setup.members[i].check(h->setup.members[i].drafter);
        if (wrong) return wrong;
    }
    return NULL;
}

/* ---- what drafts mean */

static double meant(const double *map, int64_t num_steps, double confidence) {
    confidence = confidence > 0.0 ? fmin(confidence, 1.0) : 0.0; /* also of what is no number */
    return map[(int64_t)rint(confidence * (double)num_steps)];
}

/* The survival of each prefix of a member's draft. */
static void survive(const Setup *s, const Member *m, const double *confidences, int64_t num, double *survival) {
    double chance = 1.0;
    for (int64_t i = 0; i < num; i++) {
        const int64_t place = i < s->num_places ? i : s->num_places - 1;
        chance *= meant(m->maps + place * (s->num_steps + 1), s->num_steps, confidences[i]);
        survival[i] = chance;
    }
}

static int64_t num_alike(const int32_t *a, int64_t num_a, const int32_t *b, int64_t num_b) {
    const int64_t num = num_a < num_b ? num_a : num_b;
    int64_t i = 0;
    while (i < num && a[i] == b[i]) i++;
    return i;
}

/* The case of each token: whose it is, whether it is the first, and what each witness says of it (drafters/consensus.py). */
static void compare(const Setup *s, LookupDrafts *heard, int64_t member) {
    Guess *guess = &heard->guesses[member];
    int64_t num_cases = 1, weight = 1;
    for (int64_t i = 0; i < s->num_witnesses; i++) num_cases *= 3;
    for (int64_t i = 0; i < guess->num; i++) guess->cases[i] = (2 * member + (i > 0)) * num_cases;
    for (int64_t i = 0; i < s->num_witnesses; i++, weight *= 3) {
        const Guess *witness = &heard->guesses[i];
        if (i == member || !witness->num) continue;
        const int64_t num_same = num_alike(guess->token_ids, guess->num, witness->token_ids, witness->num);
        for (int64_t place = 0; place < num_same; place++) guess->cases[place] += weight * SAYS_SAME;
        if (num_same < guess->num && num_same < witness->num) guess->cases[num_same] += weight * SAYS_OTHER;
    }
}

/* From the survival that the member's confidences mean to what it is beside the other drafts. */
static void weigh(const Setup *s, LookupDrafts *heard, int64_t member) {
    Guess *guess = &heard->guesses[member];
    double before = 1.0, chance = 1.0, sum = 0.0;
    compare(s, heard, member);
    guess->num_worth = 0;
    for (int64_t i = 0; i < guess->num; i++) {
        const double certain = before > 0.0 ? guess->survival[i] / before : 0.0;
        before = guess->survival[i];
        chance *= meant(s->case_maps + guess->cases[i] * (s->num_case_steps + 1), s->num_case_steps, certain);
        guess->told[i] = certain;
        guess->survival[i] = chance;
        if (chance > heard->row_price) {
            sum += chance;
            guess->num_worth++;
        }
    }
    guess->expected_len = sum - (double)guess->num_worth * heard->row_price;
}

static int64_t best_member(const Ensemble *h, const LookupDrafts *heard) {
    int64_t best = 0;
    for (int64_t i = 1; i < h->setup.num_members; i++)
        if (heard->guesses[i].expected_len > heard->guesses[best].expected_len) best = i;
    return best;
}

/* ---- ensemble */

static int make_room(LookupDrafts *heard, int64_t num_members, int64_t stride) {
    if (stride <= heard->stride) return 0;
    const size_t each = (size_t)stride, of_one = each * (3 * sizeof(double) + sizeof(int64_t) + sizeof(int32_t));
    char *room = malloc((size_t)num_members * of_one);
    if (!room) return -1;
    free(heard->room);
    heard->room = room;
    heard->stride = stride;
    double *doubles = (double *)room;
    int64_t *cases = (int64_t *)(doubles + 3 * each * (size_t)num_members);
    int32_t *token_ids = (int32_t *)(cases + each * (size_t)num_members);
    for (int64_t i = 0; i < num_members; i++) {
        Guess *guess = &heard->guesses[i];
        guess->confidences = doubles + 3 * (size_t)i * each;
        guess->told = guess->confidences + each;
        guess->survival = guess->told + each;
        guess->cases = cases + (size_t)i * each;
        guess->token_ids = token_ids + (size_t)i * each;
    }
    return 0;
}

static int note_demand(Ensemble *h, const Demands *d, const double *row_prices, int64_t i) {
    int64_t num_ahead;
    const int32_t *ahead = ahead_of(d, i, &num_ahead);
    LookupDrafts *heard = &h->heard[i];
    if (make_room(heard, h->setup.num_members, d->num_tokens[i])) return -1;
    if (reserve((void **)&heard->ahead, &heard->ahead_size, num_ahead, sizeof(int32_t))) return -1;
    if (num_ahead) memcpy(heard->ahead, ahead, (size_t)num_ahead * sizeof(int32_t));
    heard->slot = d->slots[i];
    heard->num_tokens = d->num_tokens[i];
    heard->num_ahead = num_ahead;
    heard->row_price = row_prices[i];
    heard->least_survival = d->least_survival[i];
    return 0;
}

/* What a commit is to answer is kept, for the places are heard anew before. */
static int keep(Ensemble *h, const LookupDrafts *heard) {
    Followed *followed = &h->followed[heard->slot];
    followed->is_unanswered = 0;
    if (make_room(&followed->drafted, h->setup.num_members, heard->num_tokens)) return -1;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const Guess *from = &heard->guesses[m];
        Guess *to = &followed->drafted.guesses[m];
        to->num = from->num;
        if (!from->num) continue;
        memcpy(to->token_ids, from->token_ids, (size_t)from->num * sizeof(int32_t));
        memcpy(to->cases, from->cases, (size_t)from->num * sizeof(int64_t));
        memcpy(to->confidences, from->confidences, (size_t)from->num * sizeof(double));
        memcpy(to->told, from->told, (size_t)from->num * sizeof(double));
    }
    followed->is_unanswered = 1;
    return 0;
}

static int grow_batch(Ensemble *h, int64_t num, int64_t stride) {
    const int64_t known = h->heard_size;
    int64_t size = known, drafted = h->batch_size;
    if (reserve((void **)&h->lens, &size, num, sizeof(int64_t))) return -1;
    if (reserve((void **)&h->heard, &h->heard_size, num, sizeof(LookupDrafts))) return -1;
    if (h->heard_size > known) memset(h->heard + known, 0, (size_t)(h->heard_size - known) * sizeof(LookupDrafts));
    if (reserve((void **)&h->token_ids, &drafted, num * stride, sizeof(int32_t))) return -1;
    drafted = h->batch_size;
    if (reserve((void **)&h->confidences, &drafted, num * stride, sizeof(double))) return -1;
    h->batch_size = drafted;
    return 0;
}

/* ``expected_lens[i]``: of the best draft for demand i, less what its rows cost. */
int ensemble_hear(void *at, const Demands *demands, const double *row_prices, double *expected_lens) {
    Ensemble *h = at;
    h->num_heard = 0;
    if (grow_batch(h, demands->num, demands->stride)) return -1;
    for (int64_t i = 0; i < demands->num; i++)
        if (note_demand(h, demands, row_prices, i)) return -1;
    Demands own = *demands;
    own.token_ids = h->token_ids;
    own.confidences = h->confidences;
    own.lens = h->lens;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const Member *member = &h->setup.members[m];
        if (member->propose(member->drafter, &own)) return -1;
        for (int64_t i = 0; i < own.num; i++) {
            Guess *guess = &h->heard[i].guesses[m];
            guess->num = own.lens[i];
            if (!guess->num) continue;
            memcpy(guess->token_ids, own.token_ids + i * own.stride, (size_t)guess->num * sizeof(int32_t));
            memcpy(guess->confidences, own.confidences + i * own.stride, (size_t)guess->num * sizeof(double));
            survive(&h->setup, member, guess->confidences, guess->num, guess->survival);
        }
    }
    for (int64_t i = 0; i < own.num; i++) {
        LookupDrafts *heard = &h->heard[i];
        for (int64_t m = 0; m < h->setup.num_members; m++) weigh(&h->setup, heard, m);
        expected_lens[i] = heard->guesses[best_member(h, heard)].expected_len;
        if (!heard->num_ahead && keep(h, heard)) return -1;
    }
    h->num_heard = own.num;
    return 0;
}

int64_t ensemble_best(void *at, int64_t place) { return best_member(at, &((Ensemble *)at)->heard[place]); }

/* Member ``member``'s draft for what was heard at ``place``. */
void ensemble_guess(void *at, int64_t place, int64_t member, Guess *guess) {
    *guess = ((Ensemble *)at)->heard[place].guesses[member];
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

/* What the most promising of the lookups says behind ``num`` drafted tokens, which survive with ``survival``: into h->best.
 * Returns how many tokens, -1 for want of memory. */
static int64_t behind(Ensemble *h, const LookupDrafts *heard, const int32_t *drafted, int64_t num, double survival) {
    const int64_t ahead_end = heard->num_ahead + num, num_tokens = heard->num_tokens - num;
    const double price = heard->row_price / survival, least = h->setup.price_share * price;
    if (reserve((void **)&h->ahead, &h->ahead_size, ahead_end, sizeof(int32_t))) return -1;
    if (grow_rest(&h->rest, num_tokens) || grow_rest(&h->best, num_tokens)) return -1;
    if (heard->num_ahead) memcpy(h->ahead, heard->ahead, (size_t)heard->num_ahead * sizeof(int32_t));
    memcpy(h->ahead + heard->num_ahead, drafted, (size_t)num * sizeof(int32_t));
    int64_t found = 0, num_found;
    double most = 0.0;
    for (int64_t m = 0; m < h->setup.num_members; m++) {
        const Member *member = &h->setup.members[m];
        const Demands one = {1, &heard->slot, &num_tokens, &least, h->ahead, &ahead_end, num_tokens, h->rest.token_ids,
                             h->rest.confidences, &num_found};
        if (member->propose(member->drafter, &one)) return -1;
        survive(&h->setup, member, h->rest.confidences, num_found, h->rest.survival);
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

/* Lookups go on with a draft: where it ends, and where they promise more than the rest of it; of a lookup's own only there where
 * it ends. ``token_ids`` and ``survival`` have room for what the demand wants. Returns its length then, -1 for want of memory. */
static int64_t splice(Ensemble *h, const LookupDrafts *heard, int is_lookup, int32_t *token_ids, double *survival, int64_t num) {
    const double least = fmax(h->setup.worth_splicing, heard->row_price);
    const double kept = fmax(h->setup.min_survival, heard->least_survival);
    int64_t place = is_lookup ? num : 1, num_splices = 0;
    while (num && place <= num && place < heard->num_tokens && num_splices < h->setup.max_splices) {
        if (survival[place - 1] < least) break;
        const int64_t found = behind(h, heard, token_ids, place, survival[place - 1]);
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

/* Survival becomes confidence, as far as the draft is handed out. Returns how far. */
static int64_t hand_out(const Ensemble *h, const LookupDrafts *heard, double *survival, int64_t num) {
    const double least = fmax(h->setup.min_survival, heard->least_survival);
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

/* The best drafts for what was heard at ``places``, at ``stride`` of ``token_ids`` and ``confidences``; whose they are. */
int ensemble_settle(void *at, int64_t num, const int64_t *places, int64_t stride, int32_t *token_ids, double *confidences,
                   int64_t *lens, int64_t *members) {
    Ensemble *h = at;
    for (int64_t i = 0; i < num; i++) {
        const LookupDrafts *heard = &h->heard[places[i]];
        const Guess *guess = &heard->guesses[members[i] = best_member(h, heard)];
        int32_t *own_ids = token_ids + i * stride;
        double *own = confidences + i * stride;
        if (guess->num) memcpy(own_ids, guess->token_ids, (size_t)guess->num * sizeof(int32_t));
        if (guess->num) memcpy(own, guess->survival, (size_t)guess->num * sizeof(double));
        const int64_t spliced = splice(h, heard, 1, own_ids, own, guess->num);
        if (spliced < 0) return -1;
        lens[i] = hand_out(h, heard, own, spliced);
    }
    return 0;
}

/* As ensemble_settle, of a draft of another's, whose survival lies in ``confidences``: both have room for it and for what the
 * demand wants. Returns its length then, -1 for want of memory. */
int64_t ensemble_splice(void *at, int64_t place, int64_t num, int32_t *token_ids, double *confidences) {
    Ensemble *h = at;
    const LookupDrafts *heard = &h->heard[place];
    const int64_t spliced = splice(h, heard, 0, token_ids, confidences, num);
    return spliced < 0 ? -1 : hand_out(h, heard, confidences, spliced);
}

/* ---- learning */

static int try_token(Trials *trials, int64_t at, double told, int came_true) {
    int64_t size = trials->size;
    if (reserve((void **)&trials->at, &size, trials->num + 1, sizeof(int64_t))) return -1;
    size = trials->size;
    if (reserve((void **)&trials->told, &size, trials->num + 1, sizeof(double))) return -1;
    size = trials->size;
    if (reserve((void **)&trials->came_true, &size, trials->num + 1, 1)) return -1;
    trials->size = size;
    trials->at[trials->num] = at;
    trials->told[trials->num] = told;
    trials->came_true[trials->num++] = (uint8_t)came_true;
    return 0;
}

/* What was committed says of a draft how far it was right, and no more than so far. */
static int judge(Ensemble *h, int64_t member, const Guess *guess, const int32_t *token_ids, int64_t num) {
    Trials *own = &h->trials[member], *beside = &h->trials[h->setup.num_members];
    if (!guess->num) return 0;
    const int64_t num_right = num_alike(guess->token_ids, guess->num, token_ids, num);
    for (int64_t i = 0; i <= num_right && i < num && i < guess->num; i++) {
        const int64_t place = i < h->setup.num_places ? i : h->setup.num_places - 1;
        if (try_token(own, place, guess->confidences[i], i < num_right)) return -1;
        if (try_token(beside, guess->cases[i], guess->told[i], i < num_right)) return -1;
        beside->num_records++;
    }
    own->num_records++;
    return 0;
}

int ensemble_extend(void *at, int64_t slot, const int32_t *token_ids, int64_t num) {
    Ensemble *h = at;
    Followed *followed = &h->followed[slot];
    int failed = 0;
    for (int64_t i = 0; i < h->setup.num_members; i++) { /* all are told, whoever has failed */
        const Member *m = &h->setup.members[i];
        failed |= m->extend(m->drafter, slot, token_ids, num);
        if (followed->is_unanswered && num) failed |= judge(h, i, &followed->drafted.guesses[i], token_ids, num);
    }
    followed->is_unanswered = 0;
    return failed ? -1 : 0;
}

/* Whose trials are due: a bit for each member, and one for all beside each other. */
int64_t ensemble_due(void *at) {
    const Ensemble *h = at;
    int64_t due = 0;
    for (int64_t i = 0; i <= h->setup.num_members; i++) due |= (int64_t)(h->trials[i].num_records >= h->setup.due_at[i]) << i;
    return due;
}

/* Hands the trials over; they stay where they are until the next call of ensemble_extend. */
void ensemble_take(void *at, int64_t number, Trials *taken) {
    Trials *trials = &((Ensemble *)at)->trials[number];
    *taken = *trials;
    trials->num = trials->num_records = 0;
}
