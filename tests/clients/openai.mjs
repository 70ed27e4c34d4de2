// npm's openai over a running server: chat, its stream, a forced tool, a schema, responses, and the class of an error.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { OUTRIDER_URL, OUTRIDER_API_KEY = "unused", OUTRIDER_MODEL: model = "smollm2-135m" } = process.env;
const client = new OpenAI({ baseURL: `${OUTRIDER_URL}/v1`, apiKey: OUTRIDER_API_KEY, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 24 };
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

const whole = await client.chat.completions.create({ ...asked, reasoning_effort: "low" });
let text = "";
let usage;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.match(text, /Paris/);
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const tools = [{ type: "function", function: { name: "get_weather", parameters: schema, strict: true } }];
const called = await client.chat.completions.create({ ...asked, max_completion_tokens: 64, tools, tool_choice: "required" });
const call = called.choices[0].message.tool_calls[0].function;
assert.equal(call.name, "get_weather");
assert.equal(typeof JSON.parse(call.arguments).city, "string");

const format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
const parsed = await client.chat.completions.parse({ ...asked, max_completion_tokens: 64, response_format: format });
assert.ok(JSON.parse(parsed.choices[0].message.content).city.length <= 12);

const response = await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 24 });
assert.equal(response.output_text, text);
const stream = client.responses.stream({ model, input: messages, temperature: 0, max_output_tokens: 24 });
assert.equal((await stream.finalResponse()).output_text, text);

await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), OpenAI.NotFoundError);
