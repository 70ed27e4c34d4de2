// Calls of this server's API. The key stays in this tab's session storage.

const KEY = "outrider.key";
const DEADLINE_MS = 8000;

/** An answer that is an error: `status`, and the server's message. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// Relative to this file, so that the page also works below a path prefix.
const urlOf = (path) => new URL(`../${path}`, import.meta.url);

function headers(extra = {}) {
  const key = storedKey();
  return key ? { authorization: `Bearer ${key}`, ...extra } : extra;
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error; // an answer that is not JSON has no better message
  }
  return new Refused(response.status, message);
}

export async function getJson(path) {
  const response = await fetch(urlOf(path), { headers: headers(), signal: AbortSignal.timeout(DEADLINE_MS), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export async function postJson(path, body) {
  const response = await fetch(urlOf(path), {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(DEADLINE_MS),
  });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The chunks of a streamed answer. Ends with an exception if the stream breaks off or reports an error. */
export async function* streamed(path, body, signal) {
  const response = await fetch(urlOf(path), {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the stream broke off");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error.message);
      yield chunk;
    }
  }
}
