// Messages on the page.

import { MarkdownStream, renderMarkdown } from "./markdown.js";

const RENDERING_SHARE = 0.25; // Of the page's time, at most.

/** An element with properties and children; strings become text. */
export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A message, and the buttons of what can be done with it (by name: what they call). */
export class MessageView {
  #content = element("div", { className: "content" });
  #reasoning = null;
  #notes = element("div", { className: "notes" });
  #stats = element("span", { className: "stats" });
  #renderer = null;
  #reasoningText = null;

  constructor(message, actions, onRendered) {
    this.message = message;
    const buttons = Object.entries(actions).map(([name, onclick]) =>
      element("button", { type: "button", className: "plain", textContent: name, onclick }));
    this.root = element("article", { className: `message ${message.role}` },
      element("h2", { className: "hidden", textContent: message.role === "user" ? "You" : "Answer" }),
      this.#content, this.#notes,
      element("footer", {}, element("span", { className: "actions" }, ...buttons), this.#stats));
    if (message.reasoning) this.addReasoning(message.reasoning);
    if (message.role === "user") {
      this.#content.append(message.content);
    } else if (message.status === "running") {
      this.#renderer = new TextRenderer(this.#content, onRendered);
      this.addText(message.content);
    } else {
      this.#content.append(renderMarkdown(message.content));
    }
    this.update();
  }

  /** Adds text to an answer that runs. */
  addText(text) {
    if (text) this.#renderer.add(text);
  }

  /** Adds to what the model has thought before it answered. */
  addReasoning(text) {
    if (!text) return;
    if (this.#reasoning === null) {
      this.#reasoningText = document.createTextNode("");
      this.#reasoning = element("details", { className: "reasoning" },
        element("summary", { textContent: "Reasoning" }), element("div", {}, this.#reasoningText));
      this.#content.before(this.#reasoning);
    }
    this.#reasoningText.appendData(text);
  }

  /** Shows how the message stands now. */
  update() {
    const { message } = this;
    const isRunning = message.status === "running";
    this.root.classList.toggle("running", isRunning);
    this.root.setAttribute("aria-busy", String(isRunning));
    this.root.dataset.status = message.status ?? "";
    if (!isRunning) {
      this.#renderer?.finish();
      this.#renderer = null;
    }
    this.#notes.replaceChildren(...notesOf(message));
    this.#stats.textContent = statsText(message.stats);
  }

  /** Puts `editor` in the place of the text, until it is called back. */
  showInstead(editor) {
    this.#content.replaceWith(editor);
    this.root.classList.add("editing");
    return () => {
      editor.replaceWith(this.#content);
      this.root.classList.remove("editing");
    };
  }
}

function notesOf(message) {
  const text = {
    abort: "Stopped.",
    length: "The answer reached its limit of tokens.",
    interrupted: "The page was closed before the answer was complete.",
    lost: "The connection was lost before the answer was complete. Nothing was sent again.",
    error: message.error,
  }[message.status];
  const notes = [message.warning, text].filter(Boolean);
  const className = message.status === "error" || message.status === "lost" ? "note error" : "note";
  return notes.map((note) => element("p", { className, textContent: note }));
}

function statsText(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.tokensPerS) parts.push(`${stats.tokensPerS.toFixed(1)} tokens/s`);
  if (stats.tokens) parts.push(`${stats.tokens} tokens`);
  if (stats.ttftS !== undefined) parts.push(`first token after ${stats.ttftS.toFixed(2)} s`);
  return parts.join(" · ");
}

/** Renders what is added once per frame at most, and more rarely where rendering takes long. */
class TextRenderer {
  #stream;
  #onRendered;
  #pending = "";
  #frame = 0;
  #timer = 0;
  #notBeforeMs = 0;

  constructor(container, onRendered) {
    this.#stream = new MarkdownStream(container);
    this.#onRendered = onRendered;
  }

  add(text) {
    this.#pending += text;
    if (this.#frame || this.#timer) return;
    const waitMs = this.#notBeforeMs - performance.now();
    if (waitMs > 0) this.#timer = setTimeout(() => this.#render(), waitMs);
    else this.#frame = requestAnimationFrame(() => this.#render());
  }

  finish() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    this.#render();
    this.#stream.finish();
    this.#onRendered();
  }

  #render() {
    this.#frame = this.#timer = 0;
    const startMs = performance.now();
    this.#stream.push(this.#pending);
    this.#pending = "";
    this.#onRendered();
    const endMs = performance.now();
    this.#notBeforeMs = endMs + (endMs - startMs) * (1 / RENDERING_SHARE - 1);
  }
}
