// Vercel's `ai`, over both of its providers for servers of this kind.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;
const compatible = createOpenAICompatible({
  name: "trioengine", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey });
const PROVIDERS = {
  "openai-compatible": {
    chat: compatible(model),
    text: compatible.completionModel(model),
    vectors: compatible.embeddingModel(model),
  },
  openai: { chat: openai.chat(model), text: openai.completion(model), vectors: openai.embedding(model) },
};
const options = { prompt: "What is the capital of Japan?", temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const City = z.object({ name: z.string().max(12) });

for (const [name, models] of Object.entries(PROVIDERS)) {
  test(`${name}: a stream equals the whole answer`, async () => {
    const whole = await generateText({ ...options, model: models.chat });
    assert.match(whole.text, /Tokyo/);
    const stream = streamText({ ...options, model: models.chat });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal(await stream.finishReason, "stop");
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: a tool is called, and its answer given back`, async () => {
    const asked = [];
    const tools = {
      weather: tool({
        description: "Tell the weather.",
        inputSchema: City,
        execute: (input) => {
          asked.push(input);
          return "21 degrees";
        },
      }),
    };
    const called = { ...options, model: models.chat, tools, toolChoice: { type: "tool", toolName: "weather" } };
    const whole = await generateText({
      ...called,
      stopWhen: ({ steps }) => steps.length === 2,
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
    });
    City.parse(asked[0]);
    assert.equal(whole.steps.length, 2);
    assert.ok(whole.text);
    const stream = streamText(called);
    await stream.consumeStream();
    const [call] = await stream.toolCalls;
    assert.deepEqual(call.input, asked[0]);
    City.parse((await generateText({ ...called, toolChoice: "required" })).toolCalls[0].input);
  });

  test(`${name}: structured output`, async () => {
    const whole = await generateText({ ...options, model: models.chat, output: Output.object({ schema: City }) });
    City.parse(whole.output);
    const stream = streamText({ ...options, model: models.chat, output: Output.object({ schema: City }) });
    let last;
    for await (const part of stream.partialOutputStream) last = part;
    assert.deepEqual(last, whole.output);
  });

  test(`${name}: completions and vectors`, async () => {
    const whole = await generateText({ ...options, model: models.text, maxOutputTokens: 8 });
    assert.ok(whole.text);
    const { embeddings } = await embedMany({ model: models.vectors, values: ["a cat", "a dog"] });
    assert.equal(embeddings.length, 2);
    assert.equal(embeddings[0].length, embeddings[1].length);
  });
}

test("errors", async () => {
  await assert.rejects(generateText({ ...options, model: compatible("no-such-model") }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /no-such-model/);
    return true;
  });
});
