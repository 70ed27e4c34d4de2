// Vercel's AI SDK over a running server: text, its stream, a forced tool that is executed, an object of a zod schema.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const { OUTRIDER_URL, OUTRIDER_API_KEY: apiKey = "unused", OUTRIDER_MODEL = "smollm2-135m" } = process.env;
const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: `${OUTRIDER_URL}/v1`,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider(OUTRIDER_MODEL),
  prompt: "What is the capital of France?",
  temperature: 0,
  maxOutputTokens: 24,
  maxRetries: 0,
  providerOptions: { outrider: { reasoningEffort: "low" } },
};

const whole = await generateText(asked);
const stream = streamText(asked);
assert.match(whole.text, /Paris/);
assert.equal(await stream.text, whole.text);
assert.deepEqual((await stream.usage).outputTokens, whole.usage.outputTokens);

const cities = [];
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(12) }),
  execute: async ({ city }) => {
    cities.push(city);
    return "sunny";
  },
});
const forced = { tools: { weather }, toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 64 };
const turns = await generateText({
  ...asked,
  ...forced,
  stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "auto" } : {}),
});
assert.equal(turns.steps.length, 2);
assert.equal(turns.steps[0].toolResults[0].output, "sunny");
assert.equal(cities.length, turns.steps.flatMap((step) => step.toolCalls).length);

const schema = z.object({ city: z.string().max(200), population: z.number().int().min(0) });
const typed = await generateText({ ...asked, maxOutputTokens: 400, output: Output.object({ schema }) });
schema.parse(typed.output);
