// `openai` for Node: streams, the helpers that accumulate them, tools, parsed answers, embeddings, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is the capital of Japan?" }];
const options = { model, messages, temperature: 0, max_tokens: 64 };
const Weather = z.object({ city: z.string().max(12), unit: z.enum(["celsius", "fahrenheit"]) });

test("models", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
});

test("a stream equals the whole answer", async () => {
  const whole = await client.chat.completions.create(options);
  assert.match(whole.choices[0].message.content, /Tokyo/);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
    text += chunk.choices[0].delta.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
  const runner = client.chat.completions.stream({ ...options, stream_options: { include_usage: true } });
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

test("parsed answers", async () => {
  const response_format = zodResponseFormat(Weather, "weather");
  const whole = await client.chat.completions.parse({ ...options, response_format });
  Weather.parse(whole.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream({ ...options, response_format }).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, whole.choices[0].message.parsed);
});

test("a call of a tool", async () => {
  const tools = [zodFunction({ name: "weather", parameters: Weather })];
  for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
    const whole = await client.chat.completions.parse({ ...options, tools, tool_choice });
    const [call] = whole.choices[0].message.tool_calls;
    Weather.parse(call.function.parsed_arguments);
    const streamed = await client.chat.completions.stream({ ...options, tools, tool_choice }).finalChatCompletion();
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  }
});

test("a loop of tools", async () => {
  const asked = [];
  const weather = zodFunction({
    name: "weather",
    parameters: Weather,
    function: (input) => {
      asked.push(input);
      return "21 degrees";
    },
  });
  const runner = client.chat.completions.runTools({ ...options, tools: [weather], tool_choice: "required" });
  runner.on("functionToolCallResult", () => runner.abort());
  await assert.rejects(runner.done(), OpenAI.APIUserAbortError);
  Weather.parse(asked[0]);
});

test("completions", async () => {
  const prompt = { model, prompt: "The sky is", temperature: 0, max_tokens: 8 };
  const whole = await client.completions.create(prompt);
  let text = "";
  for await (const chunk of await client.completions.create({ ...prompt, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
});

test("embeddings", async () => {
  const input = ["a cat", "a dog"];
  const coded = await client.embeddings.create({ model, input });
  const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.equal(coded.data.length, 2);
  coded.data[1].embedding.forEach((number, i) => assert.ok(Math.abs(number - floats.data[1].embedding[i]) < 1e-4));
});

test("errors", async () => {
  await assert.rejects(client.withOptions({ apiKey: "another" }).models.list(), OpenAI.AuthenticationError);
  await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...options, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});

test("an aborted stream", async () => {
  const stream = await client.chat.completions.create({ ...options, max_tokens: 4000, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    stream.controller.abort();
  }
});
