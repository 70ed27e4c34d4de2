// What the page knows: merged answers of the dashboard's endpoint, and figures derived from them.

const MAX_REQUESTS = 40;
const MAX_ROUNDS = 600; // of a request
const MAX_SAMPLES = 600;
const WINDOW_S = 30; // of "now"

/** Rounds arrive as arrays; the names are those of `Round` in timelines.py. */
function roundOf([version, request, at, base, tokens, proposed, accepted, drafter]) {
  return { version, request, at, base, tokens, proposed, accepted, drafter };
}

/** Counters of a target that restarts begin anew: a difference across that is unknown. */
function difference(later, earlier, name) {
  const value = later[name] - earlier[name];
  return value >= 0 ? value : null;
}

export class Store {
  constructor() {
    this.reset("");
  }

  reset(epoch) {
    this.epoch = epoch;
    this.version = 0;
    this.status = null;
    this.now = 0;
    this.interval = 2;
    this.numQueued = 0;
    this.requests = new Map();
    this.drafts = {};
    this.samples = [];
    this.newRounds = [];
    this.past = []; // drafters' counters of the last polls
  }

  get query() {
    const sample = this.samples.at(-1)?.number ?? 0;
    return `epoch=${this.epoch}&after=${this.version}&sample=${sample}`;
  }

  apply(answer) {
    if (answer.epoch !== this.epoch) this.reset(answer.epoch);
    this.version = answer.version;
    this.status = answer.status;
    this.now = answer.now_s;
    this.interval = answer.interval_s;
    this.numQueued = answer.num_queued;
    this.drafts = answer.drafts;
    this.samples = [...this.samples, ...answer.samples].slice(-MAX_SAMPLES);
    for (const request of answer.requests) {
      const known = this.requests.get(request.number);
      this.requests.set(request.number, { ...request, rounds: known?.rounds ?? [] });
    }
    this.newRounds = answer.rounds.map(roundOf);
    for (const round of this.newRounds) this.requests.get(round.request)?.rounds.push(round);
    this.#trim();
    if (this.status) this.#remember();
  }

  #trim() {
    const numbers = [...this.requests.keys()].sort((a, b) => b - a);
    for (const old of numbers.slice(MAX_REQUESTS)) this.requests.delete(old);
    for (const request of this.requests.values()) {
      if (request.rounds.length > MAX_ROUNDS) request.rounds.splice(0, request.rounds.length - MAX_ROUNDS);
    }
  }

  #remember() {
    const counts = Object.fromEntries(this.status.drafters.map((one) => [one.name, one]));
    this.past.push({ at: this.now, counts });
    while (this.past[0].at < this.now - WINDOW_S) this.past.shift();
  }

  /** Newest first; those that run before those that have ended. */
  listedRequests(limit) {
    const all = [...this.requests.values()].sort((a, b) => b.number - a.number);
    const live = all.filter((one) => one.ended_s === null);
    return [...live, ...all.filter((one) => one.ended_s !== null)].slice(0, limit);
  }

  /** Acceptance of a drafter in the last seconds, or since its start if nothing was verified lately. */
  acceptanceOf(drafter) {
    const before = this.past[0]?.counts[drafter.name] ?? drafter;
    const proposed = difference(drafter, before, "num_proposed");
    const accepted = difference(drafter, before, "num_accepted");
    if (proposed) return { proposed, accepted, recent: true };
    return { proposed: drafter.num_proposed, accepted: drafter.num_accepted, recent: false };
  }

  /** Mean length of a drafter's verified drafts, and of what was accepted of them, as this process counted. */
  lengthOf(name) {
    let drafts = 0, proposed = 0, accepted = 0;
    for (const [length, right, count] of this.drafts[name] ?? []) {
      drafts += count;
      proposed += length * count;
      accepted += right * count;
    }
    return drafts ? { drafts, proposed: proposed / drafts, accepted: accepted / drafts } : null;
  }

  /** Share accepted at each position of a drafter's drafts, of those whose earlier tokens were accepted. */
  positionsOf(name, least = 8) {
    const reached = [], right = [];
    for (const [length, accepted, count] of this.drafts[name] ?? []) {
      for (let i = 0; i < length && i <= accepted; i++) {
        reached[i] = (reached[i] ?? 0) + count;
        right[i] = (right[i] ?? 0) + (i < accepted ? count : 0);
      }
    }
    return reached.map((count, i) => [i + 1, count >= least ? right[i] / count : null]);
  }

  /** A counter's growth over the last `seconds` of samples: `of` names two counters whose ratio is wanted. */
  ratio(part, whole, seconds) {
    const last = this.samples.at(-1);
    if (!last) return null;
    const first = this.samples.find((one) => one.at_s >= last.at_s - seconds);
    const a = difference(last, first, part), b = difference(last, first, whole);
    return a === null || !b ? null : a / b;
  }

  /** Points [seconds ago, value or null] of the samples. `valueOf` gets a sample and one some samples before it. */
  series(valueOf, step = 1) {
    const points = [];
    for (let i = 0; i < this.samples.length; i++) {
      const sample = this.samples[i], before = this.samples[Math.max(0, i - step)];
      if (i && sample.at_s - this.samples[i - 1].at_s > 3 * this.interval) points.push([sample.at_s - this.now, null]);
      points.push([sample.at_s - this.now, valueOf(sample, before)]);
    }
    return points;
  }

  /** Points of the growth of one counter over that of another, each over `step` samples. */
  ratioSeries(part, whole, step, least) {
    return this.series((sample, before) => {
      const a = difference(sample, before, part), b = difference(sample, before, whole);
      return a === null || b === null || b < least ? null : a / b;
    }, step);
  }

  /** Requests that no drafter drafts for now. */
  numPlain(target) {
    const riding = Object.values(target.riders).reduce((sum, count) => sum + count, 0);
    return Math.max(0, target.num_running + target.num_waiting - riding);
  }

  /** A drafter's colour, the same in all pictures. */
  colourOf(name) {
    const index = (this.status?.drafters ?? []).findIndex((one) => one.name === name);
    return index < 0 ? "cm" : `c${index % 6}`;
  }
}
