// Calls of this server's API. The key stays in this tab's session storage.

const KEY = "outrider.key";
const DEADLINE_MS = 8000;

/** A call that failed: `status` of the answer, or 0 without one, and the reason. */
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

/** The browser's errors of the network, which are TypeErrors, and of deadlines, as Refused. */
async function reached(work) {
  try {
    return await work;
  } catch (error) {
    if (error instanceof TypeError) throw new Refused(0, "the server cannot be reached");
    if (error.name === "TimeoutError") throw new Refused(0, `no answer within ${DEADLINE_MS / 1000} seconds`);
    throw error;
  }
}

async function call(path, { body, signal = AbortSignal.timeout(DEADLINE_MS) } = {}) {
  const key = storedKey();
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = body === undefined ? { headers } : {
    method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const response = await reached(fetch(urlOf(path), { ...options, signal, cache: "no-store" }));
  if (!response.ok) throw new Refused(response.status, await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  const text = await reached(response.text());
  const isJson = response.headers.get("content-type")?.startsWith("application/json");
  return (isJson && JSON.parse(text).error?.message) || `${response.status} ${response.statusText}`;
}

async function parsed(response) {
  return JSON.parse(await reached(response.text()));
}

export async function getJson(path) {
  return parsed(await call(path));
}

export async function postJson(path, body) {
  return parsed(await call(path, { body }));
}

/** The chunks of a streamed answer. Throws Refused if the stream breaks off or reports an error. */
export async function* streamed(path, body, signal) {
  const response = await call(path, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
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
