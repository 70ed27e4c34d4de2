// Requests as rows of tokens, or of rounds over time. Counts and positions only: nobody's text is shown.

import { byId, html, number, picture, plural, share, svg, table } from "./dom.js";

const CELL = 6; // pixels of a token, with the gap after it
const MARK = 5;
const ROW = 34;
const TIME_SPAN_S = 30;

export function showTimelines(store, width, axis) {
  const narrow = width < 640;
  const requests = store.listedRequests(narrow ? 6 : 10);
  const label = narrow ? 0 : 190;
  const row = narrow ? ROW + 18 : ROW;
  const height = Math.max(1, requests.length) * row + 22;
  const left = label, room = width - left - 6;
  const draw = axis === "time" ? drawTime : drawTokens;
  const rows = requests.map((request, i) =>
    svg("g", { transform: `translate(0 ${i * row})` }, heading(store, request, narrow, label),
      svg("g", { transform: `translate(${left} ${narrow ? 18 : 0})` }, draw(store, request, room))));
  const live = requests.filter((one) => one.ended_s === null).length;
  const name = `${plural(requests.length, "request")}, ${live} running. ${requests.map(sentence).join(" ")}`;
  const foot = svg("text", { x: left, y: height - 4, class: "soft" },
    axis === "time" ? `${TIME_SPAN_S} s ago` : "the newest tokens, oldest on the left");
  const end = axis === "time" ? svg("text", { x: width - 6, y: height - 4, class: "soft end" }, "now") : null;
  const none = requests.length ? null : svg("text", { x: 0, y: 20, class: "soft" }, "No request since the start of this server. Send one in the playground.");
  byId("timelines").replaceChildren(picture(width, height, name, rows, none, requests.length ? [foot, end].filter(Boolean) : []));
  byId("timelines-table").replaceChildren(asTable(store.listedRequests(40)));
}

function sentence(one) {
  return `${one.label}, ${stateOf(one)}: ${plural(one.num_tokens, "token")}, ${share(one.num_accepted, one.num_proposed)} of drafts accepted.`;
}

function stateOf(one) {
  return one.ended_s === null ? one.state : one.state === "complete" ? "done" : one.state;
}

function perPass(one) {
  return one.num_rounds ? `${number(one.num_tokens / one.num_rounds, 1)} per pass` : "waiting";
}

function heading(store, one, narrow, width) {
  const drafter = one.drafter ?? "no drafter";
  const state = stateOf(one);
  const colour = svg("circle", { cx: 6, cy: 10, r: 5, class: `point ${one.drafter ? store.colourOf(one.drafter) : "co"}` });
  if (narrow) {
    return [colour, svg("text", { x: 17, y: 14 }, `${one.label} ${drafter}, ${one.num_tokens} tokens, ${perPass(one)}, ${state}`)];
  }
  return [colour,
    svg("text", { x: 17, y: 14 }, `${one.label} `, svg("tspan", { class: "soft" }, drafter)),
    svg("text", { x: 17, y: 28, class: "soft" }, `${one.num_tokens} tokens, ${perPass(one)}`),
    svg("text", { x: width - 12, y: 14, class: one.state === "failed" ? "end state-bad" : "end soft" }, state)];
}

/** A cell per token: drafts that were accepted, and the target's own; below them the drafts that were rejected in their place. */
function drawTokens(store, one, room) {
  const cells = Math.floor(room / CELL);
  const begin = Math.max(0, one.num_tokens - cells);
  const paths = { accepted: "", own: "", lost: "" };
  const add = (kind, position, y, height) => {
    const x = (position - begin) * CELL;
    if (position >= begin && position < begin + cells) paths[kind] += `M${x},${y}h${MARK}v${height}h-${MARK}z`;
  };
  for (const round of one.rounds) {
    const right = Math.min(round.accepted, round.tokens);
    for (let i = 0; i < round.tokens; i++) add(i < right ? "accepted" : "own", round.base + i, 4, 13);
    for (let i = round.accepted; i < round.proposed; i++) add("lost", round.base + i, 20, 6);
  }
  return [svg("line", { x1: 0, x2: room, y1: 18.5, y2: 18.5, class: "row-line" }),
    svg("path", { d: paths.own, class: "own" }), svg("path", { d: paths.accepted, class: "accepted" }), svg("path", { d: paths.lost, class: "lost" })];
}

/** A bar per round at its time: committed tokens upwards, rejected drafts downwards. */
function drawTime(store, one, room) {
  const scale = 2.2;
  const bars = [];
  for (const round of one.rounds) {
    const x = room * (1 - (store.now - round.at) / TIME_SPAN_S);
    if (x < 0) continue;
    const right = Math.min(round.accepted, round.tokens);
    const bar = (y, height, kind) => height > 0 ? svg("rect", { x: x.toFixed(1), y: y.toFixed(1), width: 2.4, height: height.toFixed(1), class: kind }) : null;
    const up = Math.min(9, right) * scale, own = Math.min(2, round.tokens - right) * scale;
    bars.push(bar(22 - up, up, "accepted"), bar(22 - up - own, own, "own"), bar(23, Math.min(5, round.proposed - round.accepted) * scale, "rejected"));
  }
  return [svg("line", { x1: 0, x2: room, y1: 22.5, y2: 22.5, class: "row-line" }), ...bars.filter(Boolean)];
}

function asTable(requests) {
  const rows = requests.map((one) => [one.label, stateOf(one), one.slo ?? "–", one.drafter ?? "–", number(one.prompt_len), number(one.num_tokens),
    number(one.num_rounds), number(one.num_proposed), number(one.num_accepted), number(one.num_proposed - one.num_accepted)]);
  const columns = ["request", "state", "class", "drafter", "prompt", "tokens", "passes", "drafted", "accepted", "rejected"];
  return html("div", {}, table("Requests", columns, rows));
}
