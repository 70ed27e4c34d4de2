// Starts the page: settings, the key, and one poll a second.

import { getJson, Refused, storedKey, storeKey } from "./api.js";
import { byId, html } from "./dom.js";
import { preparePlayground, showPlayground } from "./playground.js";
import { preparePolicy, showPolicy } from "./policy.js";
import { preparePlots, showPlots } from "./plots.js";
import { showPool } from "./pool.js";
import { Store } from "./store.js";
import { pauseMotion } from "./streaks.js";
import { showTiles } from "./tiles.js";
import { showTimelines } from "./timelines.js";

const POLL_MS = 1000;
const MAX_PAUSE_MS = 10_000;
const THEME = "outrider.theme";

const store = new Store();
let failures = 0;
let timer = 0;
let polling = false;
let keyRefused = false; // the panel is open because of that, and closes when the key is right

function tell(state, text) {
  const pill = byId("connection");
  if (pill.dataset.state !== state) pill.dataset.state = state;
  if (pill.textContent !== text) pill.textContent = text; // a live region: only changes are read out
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  let answer = null;
  try {
    answer = await getJson(`v1/outrider/dashboard?${store.query}`);
    failures = 0;
    if (keyRefused) byId("key-panel").hidden = true;
    keyRefused = false;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    failures += 1;
    refused(error);
  } finally {
    polling = false;
    if (!document.hidden && !keyRefused) timer = setTimeout(poll, Math.min(MAX_PAUSE_MS, POLL_MS * 2 ** Math.min(4, failures)));
  }
  if (answer === null) return;
  store.apply(answer);
  show();
}

function refused(error) {
  keyRefused = error.status === 401;
  if (keyRefused) askForKey(storedKey() ? error.message : "");
  tell("fault", keyRefused ? "needs a key" : `no answer: ${error.message}`);
}

function show() {
  const { status } = store;
  const notes = status ? [...status.notes, ...status.drafters.filter((one) => one.reason).map((one) => `${one.name} is ${one.state}: ${one.reason}`)] : [];
  byId("notes").replaceChildren(...notes.map((note) => html("li", {}, note)));
  if (!status) {
    tell("fault", "the cluster does not answer");
    return;
  }
  const ready = status.targets.some((one) => one.state === "ready");
  tell(ready ? "live" : "fault", ready ? "live" : "no target is ready");
  byId("served").textContent = `${status.model}, routed by ${status.policy}`;
  showTiles(store);
  showPlayground();
  showPolicy();
  draw();
}

function draw() {
  if (!store.status) return;
  showPool(store, Math.floor(byId("pool").clientWidth));
  const axis = document.querySelector("input[name=axis]:checked").value;
  showTimelines(store, Math.floor(byId("timelines").clientWidth), axis);
  showPlots(store);
}

function askForKey(message) {
  const panel = byId("key-panel");
  byId("key-error").textContent = message;
  if (!panel.hidden) return;
  panel.hidden = false;
  byId("key").focus();
}

function prepareKey() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey(byId("key").value.trim());
    byId("key").value = "";
    byId("key-error").textContent = "";
    byId("key-panel").hidden = true;
    failures = 0;
    poll();
  });
  byId("forget-key").addEventListener("click", () => {
    storeKey("");
    location.reload();
  });
  byId("change-key").addEventListener("click", () => {
    if (byId("key-panel").hidden) askForKey("");
    else byId("key-panel").hidden = true;
  });
}

function prepareTheme() {
  const chosen = byId("theme");
  chosen.value = localStorage.getItem(THEME) ?? "auto";
  if (!chosen.value) chosen.value = "auto";
  const apply = () => { document.documentElement.dataset.theme = chosen.value; };
  chosen.addEventListener("change", () => {
    localStorage.setItem(THEME, chosen.value);
    apply();
  });
  apply();
}

function prepareMotion() {
  const button = byId("motion");
  button.addEventListener("click", () => {
    const paused = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(paused));
    pauseMotion(paused);
  });
}

/** Asks for a key before the first call that would be refused without one. */
async function start() {
  let settings = { asks_for_key: false, can_switch: false };
  try {
    settings = await getJson("dashboard/settings.json");
  } catch (error) {
    if (!(error instanceof Refused)) throw error; // the first poll tells the reason
  }
  preparePolicy(store, settings.can_switch);
  if (!settings.asks_for_key || storedKey()) {
    poll();
    return;
  }
  keyRefused = true;
  askForKey("");
  tell("fault", "needs a key");
}

prepareTheme();
prepareKey();
prepareMotion();
preparePlots();
preparePlayground(store);
for (const radio of document.querySelectorAll("input[name=axis]")) radio.addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
let resizing = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(draw);
}).observe(byId("main"));
start();
