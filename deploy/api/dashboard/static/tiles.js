// The figures at the top.

import { byId, duration, html, number, plural, share } from "./dom.js";
import { percentile } from "./store.js";

const WINDOW_S = 60;
const LEAST_ROUNDS = 300; // of requests, before a speed-up is shown: the first ones try what drafting costs

export function showTiles(store) {
  const { targets, drafters } = store.status;
  const sum = (name) => targets.reduce((total, one) => total + one[name], 0);
  const numRounds = targets.flatMap((one) => one.drafting.by_load).reduce((total, one) => total + one.num_rounds, 0);
  const speedUp = numRounds < LEAST_ROUNDS ? null : store.ratio("plain_s", "decode_s", WINDOW_S);
  const { ttft, tpot } = store.answers(WINDOW_S);
  const slowest = (times) => `p50; p99 ${duration(percentile(times, 0.99))}, last minute`;
  const accepted = store.ratio("num_accepted", "num_proposed", WINDOW_S);
  const rejected = store.ratio("rejected_s", "decode_s", WINDOW_S);
  const ready = (list) => list.filter((one) => one.state === "ready").length;
  const [answers, met, refused] = attainment(targets);
  const tiles = [
    ["Tokens per second", number(sum("tokens_per_s")), "all targets"],
    ["Time to first token", duration(percentile(ttft, 0.5)), slowest(ttft)],
    ["Time per token", duration(percentile(tpot, 0.5)), slowest(tpot)],
    ["Speed-up", speedUp === null ? "–" : `${number(speedUp, 2)}×`,
      numRounds < LEAST_ROUNDS ? `by drafting, after ${LEAST_ROUNDS} passes: ${number(numRounds)} so far` : "by drafting, predicted, last minute"],
    ["Accepted drafts", accepted === null ? "–" : `${number(100 * accepted)}%`, "of verified tokens, last minute"],
    ["Wasted verification", rejected === null ? "–" : `${number(100 * rejected, 1)}%`, "of decoding time, last minute"],
    ["Requests", number(sum("num_running")), `${number(sum("num_waiting") + store.numQueued)} waiting`],
    ["Objectives met", share(met, answers), answers ? `of ${number(answers)} answers, ${number(refused)} refused` : "no class was used"],
    ["Ready", `${ready(targets)} + ${ready(drafters)}`, `of ${plural(targets.length, "target")} + ${plural(drafters.length, "drafter")}`],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    html("div", { class: "tile" }, html("dt", {}, name), html("dd", { class: "value" }, value), html("dd", { class: "note" }, note))));
}

/** Answers with objectives, those that met them, and refused requests, since the targets' start. */
function attainment(targets) {
  const counts = targets.flatMap((one) => one.slo);
  const sum = (name) => counts.reduce((total, one) => total + one[name], 0);
  return [sum("num_answers"), sum("num_met"), sum("num_refused")];
}
