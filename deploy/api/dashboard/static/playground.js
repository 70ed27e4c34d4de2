// A chat answer as it streams: accepted drafts on the colour of their drafter, the target's own tokens plain.

import { Refused, streamed } from "./api.js";
import { byId, html, number, share } from "./dom.js";

let running = null; // AbortController of the call under way
let known = ""; // drafters that the form lists
let store = null;

export function preparePlayground(storeGiven) {
  store = storeGiven;
  byId("play").addEventListener("submit", (event) => {
    event.preventDefault();
    play(() => send(byId("drafting").value, byId("answer")).then(tell));
  });
  byId("compare").addEventListener("click", () => play(compare));
  byId("stop").addEventListener("click", () => running?.abort());
}

/** Lists the drafters of the pool, once they are known. */
export function showPlayground() {
  const names = store.status.drafters.map((one) => one.name);
  if (names.join() === known) return;
  known = names.join();
  const option = (value, text) => html("option", { value }, text);
  byId("drafting").replaceChildren(option("auto", "auto: as routed"), option("off", "off: no drafts"), ...names.map((name) => option(name, name)));
  byId("play-legend").replaceChildren(...names.map((name) =>
    html("li", {}, html("span", { class: `key coloured ${store.colourOf(name)}` }), name)));
}

async function play(work) {
  running?.abort();
  const controller = (running = new AbortController());
  byId("play-error").textContent = byId("play-figures").textContent = "";
  byId("answer").setAttribute("aria-busy", "true");
  byId("stop").disabled = false;
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") byId("play-figures").textContent = "stopped";
    else if (error instanceof Refused) byId("play-error").textContent = error.message;
    else throw error;
  } finally {
    if (running === controller) {
      running = null;
      byId("answer").setAttribute("aria-busy", "false");
      byId("stop").disabled = true;
    }
  }
}

function body(drafting, salt) {
  return {
    ...(salt && { cache_salt: salt }),
    model: store.known.model,
    messages: [{ role: "user", content: byId("prompt").value }],
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    seed: Number(byId("seed").value),
    drafting,
    drafting_details: true,
  };
}

/**
 * Streams one answer into `place`. Returns its text, tokens, times and acceptance.
 * With a salt no drafter and no cache knows what was answered without it, or with another.
 */
async function send(drafting, place, salt) {
  place.replaceChildren();
  const began = performance.now();
  const result = { text: "", acceptance: null, firstMs: null, ms: 0, label: "" };
  for await (const chunk of streamed("v1/chat/completions", body(drafting, salt), running.signal)) {
    result.label = chunk.id.slice(-6);
    const text = chunk.choices[0]?.delta?.content ?? "";
    if (text && result.firstMs === null) result.firstMs = performance.now() - began;
    result.text += text;
    append(place, chunk.outrider?.segments ?? (text ? [{ text, drafter: null }] : []));
    result.acceptance = chunk.outrider?.acceptance ?? result.acceptance;
  }
  result.ms = performance.now() - began;
  return result;
}

function append(place, segments) {
  const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  for (const { text, drafter } of segments) {
    const properties = drafter ? { class: `drafted ${store.colourOf(drafter)}`, title: `drafted by ${drafter}` } : {};
    place.append(html("span", properties, text));
  }
  if (follows) place.scrollTop = place.scrollHeight;
}

function tokensOf({ acceptance }) {
  return acceptance ? Math.round(acceptance.num_rounds * (acceptance.mean_accepted_len ?? 0)) : 0;
}

/** Tokens per second after the first, of one request. */
function rateOf(result) {
  const seconds = (result.ms - (result.firstMs ?? 0)) / 1000;
  return seconds > 0 ? (tokensOf(result) - 1) / seconds : null;
}

function tell(result) {
  const { acceptance } = result;
  const drafts = acceptance?.num_proposed
    ? `${share(acceptance.num_accepted, acceptance.num_proposed)} of ${number(acceptance.num_proposed)} drafted tokens accepted, `
      + `${number(acceptance.num_proposed - acceptance.num_accepted)} rejected; ${number(acceptance.mean_accepted_len, 2)} tokens per pass`
    : "no drafts";
  byId("play-figures").textContent = `Request ${result.label}: ${number(tokensOf(result))} tokens at ${number(rateOf(result), 1)} per second, `
    + `the first after ${number(result.firstMs)} ms; ${drafts}.`;
}

/**
 * The same request with drafts and without, in turns: with, without, without, with. Each has a salt of its own, so that no
 * drafter knows the answer from the turn before.
 */
async function compare() {
  const drafting = byId("drafting").value === "off" ? "auto" : byId("drafting").value;
  const turns = [drafting, "off", "off", drafting];
  const results = [];
  for (const [i, turn] of turns.entries()) {
    byId("play-figures").textContent = `Turn ${i + 1} of ${turns.length}: ${turn === "off" ? "without drafts" : "with drafts"} …`;
    results.push(await send(turn, i ? html("div") : byId("answer"), crypto.getRandomValues(new Uint32Array(4)).join("-")));
  }
  const rate = (kind) => {
    const own = results.filter((_, i) => (turns[i] === "off") === (kind === "off"));
    const sum = (value) => own.reduce((total, one) => total + value(one), 0);
    return sum((one) => tokensOf(one) - 1) / sum((one) => (one.ms - (one.firstMs ?? 0)) / 1000);
  };
  const fast = rate(drafting), slow = rate("off");
  const same = results.every((one) => one.text === results[0].text);
  byId("play-figures").textContent = `With drafts (${drafting}) ${number(fast, 1)} tokens per second, without ${number(slow, 1)}: `
    + `${number(fast / slow, 2)}× as fast. Two answers each in turns, after their first token, with caches of their own: no drafter had seen the answer. `
    + (same ? "All answers are the same, character by character." : "The answers differ: in bfloat16 a tie may be rounded otherwise in a batch of another shape.");
}
