// The plots below the playground. Each is a panel with a heading, a sentence of its figures now, and a picture.

import { bars, curves } from "./charts.js";
import { byId, duration, html, number, share } from "./dom.js";
import { percentile } from "./store.js";

const STEP = 5; // samples over which a ratio is taken
const LEAST_S = 0.2; // of decoding in them
const LEAST_ROUNDS = 50; // of requests in them
const WINDOW = 15; // samples whose answers make a percentile

const percent = (value) => `${number(100 * value)}%`;
const times = (value) => `${number(value, value < 10 ? 1 : 0)}×`;
const count = (value) => number(value, Number.isInteger(value) ? 0 : 1);

const PLOTS = [
  { id: "ttft", title: "Time to first token", draw: (...given) => latency("ttft", ...given) },
  { id: "tpot", title: "Time per token", draw: (...given) => latency("tpot", ...given) },
  { id: "e2e", title: "End-to-end time", draw: (...given) => latency("e2e", ...given) },
  { id: "queue", title: "Waiting requests", draw: queue },
  { id: "cache", title: "KV cache", draw: cache },
  { id: "ends", title: "Errors and aborts", draw: ends },
  { id: "load", title: "Draft length by load", draw: lengthByLoad },
  { id: "speed", title: "Speed-up by drafting", draw: speedUp },
  { id: "wasted", title: "Wasted verification", draw: wasted },
  { id: "positions", title: "Acceptance by position", draw: positions },
  { id: "rate", title: "Tokens per second", draw: tokenRate },
  { id: "slo", title: "Objectives met", draw: objectives },
  { id: "scale", title: "Scale", draw: scale },
];

const panels = new Map();

export function preparePlots() {
  for (const { id, title } of PLOTS) {
    const parts = { now: html("p", { class: "now" }), picture: html("div"), legend: html("ul", { class: "legend", "aria-label": `Colours of ${title}` }) };
    const heading = html("h3", { id: `plot-${id}` }, title);
    byId("policy-panel").before(html("section", { class: "panel plot", "aria-labelledby": `plot-${id}` }, heading, parts.now, parts.picture, parts.legend));
    panels.set(id, parts);
  }
}

export function showPlots(store) {
  for (const { id, title, draw } of PLOTS) {
    const parts = panels.get(id);
    const width = Math.floor(parts.picture.clientWidth) || 320;
    const { now, picture, legend } = draw(store, width, title);
    parts.now.textContent = now;
    parts.picture.replaceChildren(picture);
    parts.legend.replaceChildren(...legend.map(([colour, name, dash]) =>
      html("li", {}, html("span", { class: `key ${dash === undefined ? "" : "line"} ${dash ? `dash${dash}` : ""} ${colour}` }), name)));
    parts.legend.hidden = !legend.length;
  }
}

/** The time axis, in minutes before now. */
function timeAxis(store) {
  const oldest = store.samples.length ? store.samples[0].at_s - store.now : -60;
  const span = [60, 120, 300, 600, 1200].find((one) => one >= -oldest) ?? 1200;
  return { xFrom: -span, xTo: 0, xTicks: [[-span, `${span / 60} min ago`], [0, "now"]] };
}

const largest = (points, least) => Math.max(least, ...points.map(([, y]) => y ?? 0));

function lengthByLoad(store, width, title) {
  const byLoad = new Map();
  for (const one of store.status.targets.flatMap((target) => target.drafting.by_load)) {
    const known = byLoad.get(one.max_sequences) ?? { rounds: 0, proposed: 0, accepted: 0 };
    known.rounds += one.num_rounds;
    known.proposed += one.num_proposed;
    known.accepted += one.num_accepted;
    byLoad.set(one.max_sequences, known);
  }
  const loads = [...byLoad].sort(([a], [b]) => a - b).map(([most, one]) => ({
    name: most <= 2 ? `${most}` : `${most / 2 + 1}–${most}`,
    accepted: one.accepted / one.rounds,
    proposed: one.proposed / one.rounds,
  }));
  const stacks = loads.map(({ name, accepted, proposed }) => ({
    name, note: number(proposed, 1), parts: [["accepted", accepted], ["rejected", proposed - accepted]],
  }));
  const most = Math.max(2, ...loads.map((one) => one.proposed)) * 1.15;
  const sentence = loads.map((one) => `${one.name} requests: ${number(one.proposed, 1)} drafted, ${number(one.accepted, 1)} accepted`).join("; ");
  return {
    now: loads.length ? "verified tokens per request and pass, since the start" : "no pass has decoded yet",
    picture: bars(width, `${title}. ${sentence}`, stacks, { most, format: count, axis: "requests in the pass" }),
    legend: [["accepted", "accepted"], ["rejected", "rejected"]],
  };
}

function speedUp(store, width, title) {
  const points = store.series((sample, before) => {
    const decode = sample.decode_s - before.decode_s, rounds = sample.num_rounds - before.num_rounds;
    return decode >= LEAST_S && rounds >= LEAST_ROUNDS ? (sample.plain_s - before.plain_s) / decode : null;
  }, STEP);
  const last = points.at(-1)?.[1] ?? null;
  const now = last === null ? "no decoding lately" : `${number(last, 2)}× over the last ${STEP * store.interval} s`;
  const axis = { ...timeAxis(store), most: largest(points, 2) * 1.1, format: times, reference: 1 };
  return { now: `${now}; the time without drafts is predicted`, picture: curves(width, `${title}: ${now}`, [{ colour: "ca", points, area: true }], axis), legend: [] };
}

function wasted(store, width, title) {
  const time = store.ratioSeries("rejected_s", "decode_s", STEP, LEAST_S);
  const tokens = store.ratioSeries("num_accepted", "num_proposed", STEP, 1).map(([x, y]) => [x, y === null ? null : 1 - y]);
  const last = time.at(-1)?.[1] ?? null;
  const now = last === null ? "no decoding lately" : `${number(100 * last, 1)}% of decoding time went into rejected tokens`;
  const axis = { ...timeAxis(store), most: 1, format: percent };
  const lines = [{ colour: "cr", points: time, area: true }, { colour: "cm", points: tokens, dash: 1 }];
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: [["cr", "share of decoding time", 0], ["cm", "share of verified tokens", 1]] };
}

function positions(store, width, title) {
  const names = Object.keys(store.drafts).filter((name) => store.positionsOf(name).some(([, y]) => y !== null)).sort();
  const lines = names.map((name, i) => ({ colour: store.colourOf(name), dash: i % 3, points: store.positionsOf(name).filter(([, y]) => y !== null) }));
  const longest = Math.max(4, ...lines.flatMap((one) => one.points.map(([x]) => x)));
  const ticks = [1, Math.ceil(longest / 2), longest].map((x) => [x, ordinal(x)]);
  const axis = { xFrom: 1, xTo: longest, xTicks: ticks, most: 1, format: percent, dots: true };
  const firsts = lines.map((one, i) => `${names[i]} ${percent(one.points[0][1])}`).join(", ");
  const known = Object.values(store.drafts).flat().reduce((sum, [, , count]) => sum + count, 0);
  const now = names.length ? "of the drafts whose earlier tokens were accepted"
    : `${number(known)} drafts verified in answers of this process of the API, which are too few to show`;
  return { now, picture: curves(width, `${title}. First token: ${firsts || "none"}`, lines, axis), legend: names.map((name, i) => [lines[i].colour, name, i % 3]) };
}

const ordinal = (n) => {
  const ending = n % 100 >= 11 && n % 100 <= 13 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return `${n}${ending}`;
};

function latency(kind, store, width, title) {
  const lines = [["c0", "p50", 0.5, 0], ["c1", "p99", 0.99, 1]].map(([colour, name, part, dash]) => (
    { colour, name, dash, points: store.answerSeries((answers) => percentile(answers[kind], part), WINDOW) }));
  const [p50, p99] = lines.map((one) => duration(one.points.at(-1)?.[1] ?? null));
  const now = `p50 ${p50}, p99 ${p99} of answers that ended in the last ${WINDOW * store.interval} s`;
  const axis = { ...timeAxis(store), most: largest(lines.flatMap((one) => one.points), 0.001) * 1.1, format: duration };
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: lines.map((one) => [one.colour, one.name, one.dash]) };
}

function queue(store, width, title) {
  const lines = [
    { colour: "c0", name: "at the targets", dash: 0, area: true, points: store.series((one) => one.num_waiting) },
    { colour: "c1", name: "in the API's queue", dash: 1, points: store.series((one) => one.num_queued) },
  ];
  const last = store.samples.at(-1);
  const now = last ? `${number(last.num_waiting)} at the targets, ${number(last.num_queued)} in the API's queue; ${number(last.num_running)} run` : "no samples yet";
  const axis = { ...timeAxis(store), most: largest(lines.flatMap((one) => one.points), 4) * 1.1, format: count };
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: lines.map((one) => [one.colour, one.name, one.dash]) };
}

function cache(store, width, title) {
  const hits = ({ num_prompt_tokens: asked, num_cached_tokens: found }) => (asked ? found / asked : null);
  const lines = [
    { colour: "c0", name: "blocks in use", dash: 0, area: true, points: store.series((one) => one.kv_usage) },
    { colour: "ca", name: "prompt tokens found in the prefix cache", dash: 1, points: store.answerSeries(hits, WINDOW) },
  ];
  const [used, found] = lines.map((one) => one.points.at(-1)?.[1] ?? null);
  const now = `${used === null ? "–" : percent(used)} in use; ${found === null ? "no prompts lately" : `${percent(found)} of prompt tokens were cached`}`;
  return { now, picture: curves(width, `${title}: ${now}`, lines, { ...timeAxis(store), most: 1, format: percent }), legend: lines.map((one) => [one.colour, one.name, one.dash]) };
}

function ends(store, width, title) {
  const lines = [["cr", "failed", "num_failed", 0], ["cm", "cut off by the client", "num_aborted", 1]].map(([colour, name, field, dash]) => (
    { colour, name, dash, step: true, points: store.answerSeries((answers) => answers[field] ?? 0, WINDOW) }));
  const [failed, aborted] = lines.map((one) => number(one.points.at(-1)?.[1] ?? 0));
  const now = `${failed} failed, ${aborted} cut off by their clients in the last ${WINDOW * store.interval} s`;
  const axis = { ...timeAxis(store), most: largest(lines.flatMap((one) => one.points), 4) * 1.1, format: count };
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: lines.map((one) => [one.colour, one.name, one.dash]) };
}

function tokenRate(store, width, title) {
  const points = store.series((sample) => sample.tokens_per_s);
  const last = points.at(-1)?.[1] ?? 0;
  const axis = { ...timeAxis(store), most: largest(points, 10) * 1.1, format: count };
  const now = `${number(last)} now, by all targets`;
  return { now, picture: curves(width, `${title}: ${now}`, [{ colour: "c0", points, area: true }], axis), legend: [] };
}

function objectives(store, width, title) {
  const names = Object.keys(store.samples.at(-1)?.slo ?? {}).sort();
  const lines = names.map((name, i) => ({
    colour: `c${i % 6}`,
    dash: i % 3,
    points: store.series((sample, before) => {
      const [answers, met] = sample.slo[name] ?? [0, 0], [answersBefore, metBefore] = before.slo[name] ?? [0, 0];
      return answers > answersBefore && met >= metBefore ? (met - metBefore) / (answers - answersBefore) : null;
    }, 3 * STEP),
  }));
  const last = store.samples.at(-1)?.slo ?? {};
  const now = names.map((name) => `${name}: ${share(last[name][1], last[name][0])} of ${number(last[name][0])}`).join(", ") || "no class was used yet";
  const axis = { ...timeAxis(store), most: 1, format: percent };
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: names.map((name, i) => [`c${i % 6}`, name, i % 3]) };
}

function scale(store, width, title) {
  const lines = [
    { colour: "c0", name: "requests running or waiting", points: store.series((one) => one.num_running + one.num_waiting + one.num_queued), area: true },
    { colour: "ca", name: "ready targets", points: store.series((one) => one.num_ready_targets), step: true },
    { colour: "c2", name: "ready drafters", points: store.series((one) => one.num_ready_drafters), step: true, dash: 1 },
  ];
  const most = largest(lines.flatMap((one) => one.points), 4) * 1.1;
  const last = store.samples.at(-1);
  const now = last ? `${last.num_ready_targets} of ${last.num_targets} targets, ${last.num_ready_drafters} of ${last.num_drafters} drafters ready` : "no samples yet";
  const axis = { ...timeAxis(store), most, format: count };
  return { now, picture: curves(width, `${title}: ${now}`, lines, axis), legend: lines.map((one) => [one.colour, one.name, one.dash ?? 0]) };
}
