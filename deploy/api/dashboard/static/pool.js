// The pool as a picture: drafters, targets, and who drafts for whom.

import { byId, cut, html, number, picture, plural, share, svg, table, UNKNOWN } from "./dom.js";
import { launch } from "./streaks.js";

const CARD_HEIGHT = 66;
const GAP = 12;

let shape = ""; // of the drawn picture: it is drawn anew only when something in it changes

export function showPool(store, width) {
  const { targets, drafters } = store.status;
  const next = JSON.stringify([width, store.status, store.drafts]);
  if (next !== shape) {
    shape = next;
    byId("pool").replaceChildren(draw(store, width));
    byId("pool-table").replaceChildren(asTable(store));
  }
  launch(store, byId("pool").firstChild, targets, drafters);
}

function draw(store, width) {
  const { targets, drafters } = store.status;
  const narrow = width < 560;
  const cardWidth = narrow ? Math.floor(width * 0.46) : Math.min(300, Math.floor(width * 0.36));
  const targetWidth = narrow ? Math.floor(width * 0.36) : Math.min(250, Math.floor(width * 0.26));
  const column = (count, height) => count * (height + GAP) - GAP;
  const targetHeight = 108;
  const height = Math.max(column(drafters.length, CARD_HEIGHT), column(targets.length, targetHeight), 80) + 8;
  const top = (count, each) => (height - column(count, each)) / 2;
  const places = new Map();
  drafters.forEach((one, i) => places.set(one.name, top(drafters.length, CARD_HEIGHT) + i * (CARD_HEIGHT + GAP) + CARD_HEIGHT / 2));
  const targetX = width - targetWidth;
  const rides = [], cards = [];
  targets.forEach((target, i) => {
    const y = top(targets.length, targetHeight) + i * (targetHeight + GAP);
    drafters.forEach((drafter, k) => {
      const spread = ((k + 0.5) / drafters.length - 0.5) * targetHeight * 0.7;
      const count = target.riders[drafter.name] ?? 0;
      rides.push(ride(store, drafter, target, count, [cardWidth, places.get(drafter.name)], [targetX, y + targetHeight / 2 + spread]));
    });
    cards.push(targetCard(store, target, targetX, y, targetWidth, targetHeight));
  });
  for (const drafter of drafters) cards.push(drafterCard(store, drafter, places.get(drafter.name) - CARD_HEIGHT / 2, cardWidth));
  const riding = drafters.map((one) => `${one.name} for ${plural(one.num_requests, "request")}`).join(", ");
  const label = `${plural(targets.length, "target")} and ${plural(drafters.length, "drafter")}: ${riding || "no drafters"}.`;
  return picture(width, height, label, rides, svg("g", { class: "streaks" }), cards);
}

/** The line of a drafter to a target, with a dot for each request. */
function ride(store, drafter, target, count, [x1, y1], [x2, y2]) {
  const bend = (x2 - x1) * 0.45;
  const line = `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
  const path = svg("path", {
    d: line,
    class: count ? "ride" : "ride none",
    "stroke-width": count ? Math.min(12, 1.5 + 1.1 * count) : 1.5,
    "data-ride": `${drafter.name}\n${target.name}`,
  });
  const dots = [];
  const shown = Math.min(count, 24);
  for (let k = 0; k < shown; k++) {
    const t = (k + 1) / (shown + 1);
    const [x, y] = along(t, [x1, y1], [x1 + bend, y1], [x2 - bend, y2], [x2, y2]);
    dots.push(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 7.5, class: "dot" }));
  }
  return svg("g", { class: store.colourOf(drafter.name) }, path, dots);
}

function along(t, ...points) {
  const s = 1 - t;
  const weights = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
  return [0, 1].map((axis) => weights.reduce((sum, weight, i) => sum + weight * points[i][axis], 0));
}

function drafterCard(store, drafter, y, width) {
  const lengths = store.lengthOf(drafter.name);
  const { proposed, accepted } = store.acceptanceOf(drafter);
  const ready = drafter.state === "ready";
  const letters = Math.floor((width - 24) / 7);
  const narrow = letters < 32;
  const [drafted, right] = lengths ? [number(lengths.proposed, 1), number(lengths.accepted, 1)] : [];
  const length = !lengths ? "no drafts yet" : narrow ? `${drafted} → ${right} tokens` : `${drafted} drafted, ${right} accepted per draft`;
  const accept = share(accepted, proposed);
  const state = ready ? (narrow ? accept : `${accept} accepted`) : drafter.state;
  const bar = width - 24;
  return svg("g", { class: store.colourOf(drafter.name), transform: `translate(0 ${y.toFixed(1)})` },
    svg("title", {}, `${drafter.name} (${drafter.kind}), ${drafter.state}: drafts for ${plural(drafter.num_requests, "request")}; `
      + `${share(drafter.num_accepted, drafter.num_proposed)} of ${number(drafter.num_proposed)} tokens accepted since the start`),
    svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: CARD_HEIGHT - 1, rx: 8, class: ready ? "card" : "card away" }),
    svg("rect", { x: 0.5, y: 0.5, width: 6, height: CARD_HEIGHT - 1, rx: 3, class: "band" }),
    svg("text", { x: 14, y: 19, class: "strong" }, cut(drafter.name, Math.floor(letters * (narrow ? 0.7 : 0.55)))),
    narrow && !ready ? null : svg("text", { x: width - 10, y: 19, class: ready ? "end" : "end state-bad" }, state),
    svg("text", { x: 14, y: 37, class: narrow && !ready ? "state-bad" : "soft" }, narrow && !ready ? state : cut(length, letters)),
    svg("rect", { x: 14, y: 47, width: bar, height: 8, rx: 4, class: "track" }),
    proposed ? svg("rect", { x: 14, y: 47, width: ((bar * accepted) / proposed).toFixed(1), height: 8, rx: 4, class: "accepted" }) : null);
}

function targetCard(store, target, x, y, width, height) {
  const ready = target.state === "ready";
  const used = target.num_blocks ? 1 - target.num_free_blocks / target.num_blocks : 0;
  const bar = width - 24;
  const plain = store.numPlain(target);
  const waiting = width < 170 ? (target.num_waiting ? `, ${number(target.num_waiting)} wait` : "") : `, ${number(target.num_waiting)} waiting`;
  const queue = `${number(target.num_running)} ${waiting.endsWith("wait") ? "run" : "running"}${waiting}`;
  return svg("g", { transform: `translate(${x} ${y.toFixed(1)})` },
    svg("title", {}, `${target.name}, ${target.state}: ${plural(target.num_running, "request")} running, ${number(target.num_waiting)} waiting; `
      + `${number(target.step_ms, 1)} ms per pass; ${number(100 * used)}% of the KV cache used`),
    svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 8, class: ready ? "card" : "card away" }),
    svg("text", { x: 12, y: 20, class: "strong" }, target.name),
    ready ? null : svg("text", { x: 12, y: 36, class: "state-bad" }, target.state),
    ready ? svg("text", { x: 12, y: 38 }, `${number(target.tokens_per_s)} tokens/s`) : null,
    svg("text", { x: 12, y: 55, class: "soft" }, queue),
    svg("text", { x: 12, y: 72, class: "soft" }, `${plain} without drafts`),
    svg("rect", { x: 12, y: 82, width: bar, height: 6, rx: 3, class: "track" }),
    svg("rect", { x: 12, y: 82, width: (bar * used).toFixed(1), height: 6, rx: 3, class: "fill" }),
    svg("text", { x: 12, y: 102, class: "soft" }, `KV cache ${number(100 * used)}%`));
}

function asTable(store) {
  const { targets, drafters } = store.status;
  const rows = drafters.map((one) => {
    const lengths = store.lengthOf(one.name);
    const { proposed, accepted } = store.acceptanceOf(one);
    return [one.name, one.kind, one.state, one.num_requests, share(accepted, proposed),
      lengths ? number(lengths.proposed, 2) : UNKNOWN, lengths ? number(lengths.accepted, 2) : UNKNOWN,
      one.reply_ms === null ? UNKNOWN : number(one.reply_ms, 1), one.device ?? UNKNOWN, one.num_restarts];
  });
  const columns = ["drafter", "kind", "state", "requests", "accepted", "draft length", "accepted length", "reply ms", "device", "restarts"];
  const targetRows = targets.map((one) => [one.name, one.state, one.num_running, one.num_waiting, store.numPlain(one),
    number(one.tokens_per_s), number(one.step_ms, 1), share(one.num_blocks - one.num_free_blocks, one.num_blocks),
    share(one.num_cached_tokens, one.num_prompt_tokens), one.num_preempted]);
  const targetColumns = ["target", "state", "running", "waiting", "without drafts", "tokens/s", "pass ms", "KV cache", "prefix hits", "preemptions"];
  return html("div", {}, table("Drafters", columns, rows), table("Targets", targetColumns, targetRows));
}
