// The figures at the top.

import { byId, html, number, plural, share } from "./dom.js";

const WINDOW_S = 60;

export function showTiles(store) {
  const { targets, drafters } = store.status;
  const sum = (name) => targets.reduce((total, one) => total + one[name], 0);
  const speedUp = store.ratio("plain_s", "decode_s", WINDOW_S);
  const accepted = store.ratio("num_accepted", "num_proposed", WINDOW_S);
  const rejected = store.ratio("rejected_s", "decode_s", WINDOW_S);
  const ready = (list) => list.filter((one) => one.state === "ready").length;
  const [answers, met, refused] = attainment(targets);
  const tiles = [
    ["Tokens per second", number(sum("tokens_per_s")), "all targets"],
    ["Speed-up", speedUp === null ? "–" : `${number(speedUp, 2)}×`, "over K = 0, predicted, last minute"],
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
