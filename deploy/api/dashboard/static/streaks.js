// Drafts on their way: a streak per round from its drafter to the target. Its accepted part arrives, the rejected part falls.

import { svg } from "./dom.js";

const FLIGHT_MS = 900;
const MAX_STREAKS = 40;
const TOKEN = 4; // pixels

const reduced = matchMedia("(prefers-reduced-motion: reduce)");
let paused = false;
let flying = [];
let frame = 0;

export function motionAllowed() {
  return !paused && !reduced.matches;
}

export function pauseMotion(isPaused) {
  paused = isPaused;
  if (paused) clear();
}

function clear() {
  for (const one of flying) one.element.remove();
  flying = [];
}

/** Starts a streak for each new round, spread over the second until the next poll. */
export function launch(store, picture, targets) {
  if (!motionAllowed() || document.hidden) {
    store.newRounds = [];
    return;
  }
  const layer = picture.querySelector(".streaks");
  const lines = new Map([...picture.querySelectorAll("[data-ride]")].map((line) => [line.dataset.ride, line]));
  for (const one of flying) { // the picture may have been drawn anew
    layer.append(one.element);
    one.path = lines.get(one.ride);
  }
  const rounds = store.newRounds.filter((one) => one.proposed > 0).slice(-MAX_STREAKS);
  store.newRounds = [];
  const first = rounds[0]?.at ?? 0;
  const now = performance.now();
  for (const round of rounds) {
    if (flying.length >= MAX_STREAKS) break;
    const name = targets.find((one) => round.drafter in one.riders)?.name;
    const ride = `${round.drafter}\n${name}`;
    const path = lines.get(ride);
    if (!path) continue;
    const right = round.accepted * TOKEN, wrong = (round.proposed - round.accepted) * TOKEN;
    const lost = svg("rect", { x: -right - wrong, y: -3, width: wrong, height: 6, rx: 2, class: "rejected" });
    const element = svg("g", { class: "moving", opacity: 0 },
      svg("rect", { x: -right, y: -3, width: right, height: 6, rx: 2, class: "accepted" }), lost);
    layer.append(element);
    flying.push({ element, lost, ride, path, begins: now + Math.min(900, 1000 * (round.at - first)) });
  }
  if (!frame && flying.length) frame = requestAnimationFrame(fly);
}

function fly(now) {
  frame = 0;
  flying = flying.filter((one) => {
    const t = (now - one.begins) / FLIGHT_MS;
    if (t >= 1.25 || !one.path?.isConnected) {
      one.element.remove();
      return false;
    }
    if (t >= 0) place(one, t);
    return true;
  });
  if (flying.length) frame = requestAnimationFrame(fly);
}

function place({ element, lost, path }, t) {
  const length = path.getTotalLength();
  const here = path.getPointAtLength(length * Math.min(1, t));
  const next = path.getPointAtLength(Math.min(length, length * Math.min(1, t) + 2));
  const angle = (Math.atan2(next.y - here.y, next.x - here.x) * 180) / Math.PI;
  element.setAttribute("transform", `translate(${here.x.toFixed(1)} ${here.y.toFixed(1)}) rotate(${angle.toFixed(1)})`);
  element.setAttribute("opacity", t > 1 ? (1.25 - t) * 4 : 1);
  const fall = Math.max(0, t - 0.8);
  lost.setAttribute("transform", `translate(0 ${(fall * 50).toFixed(1)})`);
  lost.setAttribute("opacity", Math.max(0, 1 - fall * 2.5).toFixed(2));
}
