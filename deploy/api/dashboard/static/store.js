// What the page knows: merged answers of the dashboard's endpoint, and figures derived from them. A poll is answered by any
// replica of the API: each knows its own requests, drafts and history, and has its own clock. Times here are of the page's clock.

import { Refused } from "./api.js";

const MAX_REQUESTS = 40;
const MAX_ROUNDS = 600; // of a request
const MAX_SKEW_S = 5; // of an answer that was under way
const MAX_SAMPLES = 600;
const WINDOW_S = 30; // of "now"

/** Rounds arrive as arrays; the names are those of `Round` in history.py. */
function roundOf([version, request, at, base, tokens, proposed, accepted, drafter]) {
  return { version, request, at, base, tokens, proposed, accepted, drafter };
}

/** Counters of a target that restarts begin anew: a difference across that is unknown. */
function difference(later, earlier, name) {
  const value = later[name] - earlier[name];
  return value >= 0 ? value : null;
}

/** Adds the counts of `more` to those of `sum`, bucket by bucket. */
function add(sum, more) {
  for (const [name, value] of Object.entries(more)) {
    if (typeof value === "number") sum[name] = (sum[name] ?? 0) + value;
    else {
      sum[name] ??= {};
      for (const [bucket, count] of Object.entries(value)) sum[name][bucket] = (sum[name][bucket] ?? 0) + count;
    }
  }
}

const RATIO = 1.1; // of the buckets' bounds, as in answers.py

/** Seconds below which a share of the counted times lies, or null without any. */
export function percentile(times, share) {
  const buckets = Object.entries(times ?? {}).map(([bucket, count]) => [Number(bucket), count]).sort(([a], [b]) => a - b);
  let rest = share * buckets.reduce((sum, [, count]) => sum + count, 0);
  for (const [bucket, count] of buckets) {
    rest -= count;
    if (rest <= 1e-9) return RATIO ** (bucket + 0.5);
  }
  return null;
}

export class Store {
  constructor() {
    this.replicas = new Map(); // by epoch, in the order of their last answers
    this.status = null;
    this.newest = null; // status that was not null
    this.now = 0;
    this.interval = 2;
    this.requests = new Map();
    this.newRounds = [];
    this.past = []; // drafters' counters of the last polls
  }

  /** What is known of each replica, since the page cannot choose which one answers. */
  get query() {
    return [...this.replicas].map(([epoch, one]) => `after=${epoch}.${one.version}.${one.samples.at(-1)?.number ?? 0}`).join("&");
  }

  apply(answer) {
    this.now = Date.now() / 1000; // performance.now() stands still while the machine sleeps
    const replica = this.#replicaOf(answer);
    const timed = (one, ...names) => ({ ...one, ...Object.fromEntries(names.map((name) => [name, one[name] === null ? null : one[name] + replica.offset])) });
    this.status = answer.status;
    this.newest = answer.status ?? this.newest;
    this.interval = answer.interval_s;
    replica.version = answer.version;
    replica.numQueued = answer.num_queued;
    replica.drafts = answer.drafts;
    replica.samples = [...replica.samples, ...answer.samples.map((one) => timed(one, "at_s"))].slice(-MAX_SAMPLES);
    const keyOf = (number) => `${answer.epoch}.${number}`;
    for (const request of answer.requests) {
      const known = this.requests.get(keyOf(request.number));
      this.requests.set(keyOf(request.number), { ...timed(request, "arrived_s", "ended_s"), epoch: answer.epoch, rounds: known?.rounds ?? [] });
    }
    this.newRounds = answer.rounds.map((one) => timed(roundOf(one), "at"));
    for (const round of this.newRounds) this.requests.get(keyOf(round.request))?.rounds.push(round);
    this.#trim();
    if (this.status) this.#remember();
  }

  /** The replica that answers. Of more than there are, those that have not answered for the longest time are forgotten. */
  #replicaOf(answer) {
    const offset = this.now - answer.now_s;
    const first = { offset, begun: (answer.samples[0]?.at_s ?? answer.now_s) + offset, samples: [] };
    const replica = this.replicas.get(answer.epoch) ?? first;
    if (Math.abs(offset - replica.offset) > MAX_SKEW_S) replica.offset = offset; // a clock was set
    this.replicas.delete(answer.epoch);
    this.replicas.set(answer.epoch, replica);
    for (const epoch of [...this.replicas.keys()].slice(0, -answer.num_replicas)) {
      this.replicas.delete(epoch);
      for (const [key, request] of this.requests) if (request.epoch === epoch) this.requests.delete(key);
    }
    return replica;
  }

  /** The newest status that is known. Throws Refused if the cluster has not answered yet. */
  get known() {
    if (!this.newest) throw new Refused(0, "the cluster does not answer");
    return this.newest;
  }

  get numQueued() {
    return [...this.replicas.values()].reduce((sum, one) => sum + one.numQueued, 0);
  }

  /** Those of the replica with the longest history: but for its own queue they are of the whole cluster. */
  get samples() {
    const [oldest] = [...this.replicas.values()].sort((a, b) => a.begun - b.begun);
    return oldest?.samples ?? [];
  }

  /** By drafter: draft length, accepted tokens, and how many drafts of a replica had both. */
  get drafts() {
    const found = {};
    for (const { drafts } of this.replicas.values()) {
      for (const [name, counts] of Object.entries(drafts)) (found[name] ??= []).push(...counts);
    }
    return found;
  }

  #newestFirst() {
    return [...this.requests].sort(([, a], [, b]) => b.arrived_s - a.arrived_s || b.number - a.number);
  }

  #trim() {
    for (const [key] of this.#newestFirst().slice(MAX_REQUESTS)) this.requests.delete(key);
    for (const request of this.requests.values()) {
      if (request.rounds.length > MAX_ROUNDS) request.rounds.splice(0, request.rounds.length - MAX_ROUNDS);
    }
  }

  #remember() {
    const counts = Object.fromEntries(this.status.drafters.map((one) => [one.name, one]));
    this.past.push({ at: this.now, counts, drafts: this.drafts });
    while (this.past[0].at < this.now - WINDOW_S) this.past.shift();
  }

  /** Newest first; those that run before those that have ended. */
  listedRequests(limit) {
    const all = this.#newestFirst().map(([, one]) => one);
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

  /** Mean length of a drafter's verified drafts, and of what was accepted of them, as the API counted; when as `acceptanceOf`. */
  lengthOf(name) {
    const sums = (drafts) => (drafts?.[name] ?? []).reduce(
      ([num, proposed, accepted], [length, right, count]) => [num + count, proposed + length * count, accepted + right * count], [0, 0, 0]);
    const all = sums(this.drafts), before = sums(this.past[0]?.drafts);
    const recent = all.map((sum, i) => sum - before[i]);
    const [drafts, proposed, accepted] = recent[0] > 0 ? recent : all;
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

  /** Answers that ended in the last `seconds`: counts of times by bucket, and sums, of all replicas that are known. */
  answers(seconds) {
    const found = { ttft: {}, tpot: {}, e2e: {}, num_complete: 0, num_failed: 0, num_aborted: 0, num_prompt_tokens: 0, num_cached_tokens: 0 };
    for (const { samples } of this.replicas.values()) {
      for (const { answers } of samples.filter((one) => one.at_s > this.now - seconds)) add(found, answers);
    }
    return found;
  }

  /** Points of a figure of the answers that ended in the `step` samples up to each one, by the replica with the longest history. */
  answerSeries(valueOf, step) {
    return this.samples.map((sample, i, samples) => {
      const found = {};
      for (const { answers } of samples.slice(Math.max(0, i - step + 1), i + 1)) add(found, answers);
      return [sample.at_s - this.now, valueOf(found)];
    });
  }

  /** A drafter's colour, the same in all pictures. */
  colourOf(name) {
    const index = (this.status?.drafters ?? []).findIndex((one) => one.name === name);
    return index < 0 ? "cm" : `c${index % 6}`;
  }
}
