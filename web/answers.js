// One answer: a request, what came of it so far, and how fast.

import { ConnectionLostError } from "./stream.js";

const SAVE_EVERY_MS = 1000;

/**
 * Asks for the answer to a conversation's last message and adds it to the conversation as it comes. It goes on whatever
 * conversation is shown; `onText` and `onChange` tell whoever shows it.
 */
export class Answer {
  #connection;
  #settings;
  #save;
  #abort = new AbortController();
  #lastSavedMs = 0;

  onText = null; // (content, reasoning): what came.
  onChange = null; // (): anything else changed.

  /** `save` keeps the conversation. */
  constructor(connection, conversation, settings, save) {
    this.#connection = connection;
    this.#settings = settings;
    this.#save = save;
    this.conversation = conversation;
    this.message = { role: "assistant", content: "", status: "running" };
    conversation.messages.push(this.message);
  }

  /** Ends it; what has been generated stays. */
  stop() {
    this.#abort.abort();
  }

  /** Ends it, and keeps nothing of it. */
  discard() {
    this.#save = () => {};
    this.stop();
  }

  /** Returns when it has ended, whatever the way: `message.status` tells which. */
  async run() {
    const { message } = this;
    const body = requestBody(this.conversation, this.#settings);
    const times = { created: 0, first: 0, last: 0 };
    try {
      await this.#connection.whenOpen(this.#abort.signal);
      times.created = performance.now();
      const done = await this.#connection.create("chat", body, {
        signal: this.#abort.signal,
        onStarted: ({ warnings }) => {
          if (warnings?.length) message.warning = warnings.join(" ");
        },
        onChunk: (chunk) => this.#add(chunk, times),
      });
      message.status = done.finish[0] ?? "stop";
      message.stats = { ...message.stats, ...speed(done.usage, times) };
    } catch (error) {
      if (this.#abort.signal.aborted) {
        message.status = "abort";
      } else {
        message.status = error instanceof ConnectionLostError ? "lost" : "error";
        message.error = error.message;
      }
    }
    this.onChange?.();
    this.#save(this.conversation);
  }

  #add(chunk, times) {
    const { message } = this;
    const delta = chunk.choices?.[0]?.delta;
    const content = delta?.content ?? "";
    const reasoning = delta?.reasoning_content ?? "";
    if (!content && !reasoning) return;
    const now = performance.now();
    times.last = now;
    message.content += content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    this.onText?.(content, reasoning);
    if (!times.first) {
      times.first = now;
      message.stats = { ttftS: (now - times.created) / 1000 };
      this.onChange?.();
    }
    if (now - this.#lastSavedMs > SAVE_EVERY_MS) {
      this.#lastSavedMs = now;
      this.#save(this.conversation);
    }
  }
}

function requestBody(conversation, settings) {
  const body = { messages: requestMessages(conversation.messages.slice(0, -1), settings.systemPrompt) };
  if (settings.model !== null) body.model = settings.model;
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  return body;
}

/** The messages as a model gets them: user and assistant take turns, which many chat templates insist on. */
function requestMessages(messages, systemPrompt) {
  const turns = systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : [];
  for (const { role, content } of messages) {
    const last = turns.at(-1);
    if (!content) continue; // An answer that failed before it said anything.
    if (last?.role === role) last.content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  return turns;
}

function speed(usage, times) {
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (times.last - times.first) / 1000;
  // The first token is not one of those that took these seconds.
  return { tokens, tokensPerS: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null };
}
