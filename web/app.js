// The chat page: what the user does, and what is shown of it.

import { Answer } from "./answers.js";
import { MAX_CONVERSATIONS, newConversation, openConversations } from "./conversations.js";
import { element, MessageView } from "./messages.js";
import { forgetKey, loadKey, loadSettings, saveKey, saveSettings } from "./settings.js";
import { Connection } from "./stream.js";

const MAX_TITLE_CHARS = 80;
const NEAR_END_PX = 60;
const MAX_PROMPT_PX = 240;
const CONNECTION_TEXTS = {
  connecting: "connecting…",
  open: "",
  waiting: "no connection; trying again…",
  refused: "an API key is needed",
};

const at = (id) => document.getElementById(id);
const messageList = at("messages");
const prompt = at("prompt");
const hasTouch = matchMedia("(pointer: coarse)").matches;

const store = await openConversations();
const answers = new Map(); // The answers that run, by their conversation's id.
let settings = loadSettings();
let conversation = newConversation();
let views = [];
let isAtEnd = true;

const connection = new Connection(document.baseURI, loadKey, (state, reason) => {
  at("connection").textContent = reason ?? CONNECTION_TEXTS[state];
  at("connection").dataset.state = state;
  if (state === "open") showModel();
  if (state === "refused") askForKey(loadKey() !== null);
});

// ---- Conversations

function save(changed) {
  changed.updatedMs = Date.now();
  return store.put(changed).then(showList).catch((error) => {
    at("notice").textContent = `The conversation could not be kept in this browser: ${error.message}`;
  });
}

async function showList() {
  const summaries = await store.list();
  at("conversations").replaceChildren(...summaries.map(({ id, title }) => {
    const link = element("a", { href: `#${id}`, textContent: title || "Untitled", title });
    if (id === conversation.id) link.setAttribute("aria-current", "page");
    if (answers.has(id)) link.classList.add("running");
    return element("li", {}, link);
  }));
}

/** Shows the conversation that the address names, or a new one. */
async function openFromAddress() {
  const id = location.hash.slice(1);
  if (id === conversation.id) return;
  const found = answers.get(id)?.conversation ?? (id ? await store.get(id) : undefined);
  if (id !== location.hash.slice(1)) return; // Another was chosen meanwhile.
  if (!found && id) history.replaceState(null, "", location.pathname + location.search);
  show(found ?? newConversation());
}

/** Follows another tab, unless the conversation is in use here. */
async function showChange(id) {
  showList();
  if (id !== conversation.id || answers.has(id) || messageList.querySelector(".editor")) return;
  const found = await store.get(id);
  if (id !== conversation.id || answers.has(id) || found?.messages.at(-1)?.status === "running") return;
  show(found ?? newConversation());
}

function show(shown) {
  const previous = answers.get(conversation.id);
  if (previous) previous.onText = previous.onChange = null;
  conversation = shown;
  if (!answers.has(shown.id)) {
    for (const message of shown.messages) {
      if (message.status === "running") message.status = "interrupted"; // By a page that is gone.
    }
  }
  views = [];
  messageList.replaceChildren();
  isAtEnd = true;
  showMessages();
  showTitle();
  showList();
  closeSidebar();
  if (!hasTouch && document.hasFocus()) prompt.focus();
}

function showTitle() {
  const title = conversation.title || "New conversation";
  at("title").textContent = title;
  document.title = conversation.title ? `${title} · TrioEngine` : "TrioEngine";
  at("open-menu").hidden = conversation.messages.length === 0;
}

/** Brings the list of messages in line with the conversation's. */
function showMessages() {
  const { messages } = conversation;
  const isSame = (view, index) => view.message === messages[index] && view.isLast === (index === messages.length - 1);
  let numKept = 0;
  while (numKept < views.length && isSame(views[numKept], numKept)) numKept++;
  for (const view of views.splice(numKept)) view.root.remove();
  messageList.querySelector(".welcome")?.remove();
  for (const message of messages.slice(numKept)) {
    const isLast = message === messages.at(-1);
    const view = new MessageView(message, actionsOf(message, isLast), followEnd);
    view.isLast = isLast;
    views.push(view);
    messageList.append(view.root);
  }
  if (messages.length === 0) {
    messageList.append(element("div", { className: "welcome" },
      element("h2", { textContent: "What shall we talk about?" }),
      element("p", { textContent: "Conversations stay in this browser." })));
  }
  attachAnswer();
  followEnd();
}

function actionsOf(message, isLast) {
  const actions = { Copy: (event) => copyText(message.content, event.currentTarget) };
  if (message.role === "user") actions.Edit = () => edit(message);
  else if (isLast) actions.Regenerate = () => regenerate();
  return actions;
}

/** Lets the running answer, if there is one, show itself in the last view. */
function attachAnswer() {
  const answer = answers.get(conversation.id);
  at("send").textContent = answer ? "Stop" : "Send";
  at("send").classList.toggle("stop", answer !== undefined);
  if (!answer) return;
  const view = views.at(-1);
  answer.onText = (content, reasoning) => {
    view.addReasoning(reasoning);
    view.addText(content);
  };
  answer.onChange = () => view.update();
}

// ---- Asking

function send() {
  const content = prompt.value.trim();
  if (!content || answers.has(conversation.id)) return;
  prompt.value = "";
  resizePrompt();
  conversation.messages.push({ role: "user", content });
  if (!conversation.title) conversation.title = firstLine(content);
  ask();
}

function regenerate() {
  if (answers.has(conversation.id)) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  ask();
}

function edit(message) {
  if (answers.has(conversation.id)) return;
  const view = views.find((one) => one.message === message);
  const field = element("textarea", { value: message.content, ariaLabel: "Message" });
  const cancel = element("button", { type: "button", className: "plain", textContent: "Cancel" });
  const form = element("form", { className: "editor" }, field,
    element("div", { className: "buttons end" }, cancel, element("button", { type: "submit", textContent: "Send again" })));
  const restore = view.showInstead(form);
  cancel.onclick = restore;
  field.onkeydown = (event) => {
    if (event.key === "Escape") restore();
    if (isSendKey(event)) form.requestSubmit();
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    const content = field.value.trim();
    if (!content || answers.has(conversation.id)) return;
    conversation.messages.length = conversation.messages.indexOf(message);
    conversation.messages.push({ role: "user", content });
    ask();
  };
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  field.focus();
}

async function ask() {
  const asked = conversation;
  const answer = new Answer(connection, asked, settings, save);
  answers.set(asked.id, answer);
  if (location.hash.slice(1) !== asked.id) history.pushState(null, "", `#${asked.id}`);
  isAtEnd = true;
  showMessages();
  showTitle();
  save(asked);
  await answer.run();
  answers.delete(asked.id);
  showList();
  if (conversation === asked) attachAnswer();
  announce(answer.message.status === "stop" ? "The answer is complete." : "The answer has ended.");
}

// ---- The end of the list stays in view while text comes, unless the user has scrolled away

function followEnd() {
  if (isAtEnd) messageList.scrollTop = messageList.scrollHeight;
}

messageList.addEventListener("scroll", () => {
  isAtEnd = messageList.scrollHeight - messageList.scrollTop - messageList.clientHeight < NEAR_END_PX;
  at("to-end").hidden = isAtEnd;
}, { passive: true });
new ResizeObserver(followEnd).observe(messageList);
at("to-end").onclick = () => {
  isAtEnd = true;
  followEnd();
};

// ---- The composer

at("composer").onsubmit = (event) => {
  event.preventDefault();
  const answer = answers.get(conversation.id);
  if (answer) answer.stop();
  else send();
};
prompt.oninput = resizePrompt;
prompt.onkeydown = (event) => {
  if (!isSendKey(event)) return;
  event.preventDefault();
  send();
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open, .editor")) {
    answers.get(conversation.id)?.stop();
    closeSidebar();
  }
});

/** Enter sends; on a touch keyboard it begins a line, as there is no Shift+Enter. An input method's Enter is its own. */
function isSendKey(event) {
  if (event.key !== "Enter" || event.isComposing) return false;
  return event.ctrlKey || event.metaKey || !(event.shiftKey || hasTouch);
}

function resizePrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, MAX_PROMPT_PX)}px`;
}

// ---- The sidebar and the menu of a conversation

at("new-conversation").onclick = () => {
  history.pushState(null, "", location.pathname + location.search);
  show(newConversation());
  prompt.focus();
};
at("toggle-sidebar").onclick = () => {
  const isOpen = document.body.classList.toggle("sidebar-open");
  at("toggle-sidebar").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) at("new-conversation").focus();
};
at("backdrop").onclick = closeSidebar;
at("conversations").onclick = closeSidebar;
addEventListener("hashchange", openFromAddress);
addEventListener("popstate", openFromAddress);

function closeSidebar() {
  document.body.classList.remove("sidebar-open");
  at("toggle-sidebar").setAttribute("aria-expanded", "false");
}

at("menu").onclick = () => at("menu").hidePopover();
at("rename").onclick = async () => {
  const form = await askIn(at("naming"), { title: conversation.title });
  if (!form) return;
  conversation.title = form.title.trim() || firstLine(conversation.messages[0].content);
  showTitle();
  save(conversation);
};
at("export").onclick = () => download([conversation], firstLine(conversation.title));
at("delete").onclick = async () => {
  at("confirming-title").textContent = "Delete this conversation?";
  if (await askIn(at("confirming"))) await forget([conversation.id]);
};

/** Deletes conversations, and ends their answers first. */
async function forget(ids) {
  for (const id of ids) {
    answers.get(id)?.discard();
    await store.remove(id);
  }
  if (ids.includes(conversation.id)) {
    history.replaceState(null, "", location.pathname + location.search);
    show(newConversation());
  } else {
    showList();
  }
}

function download(conversations, name) {
  const text = JSON.stringify({ format: "trioengine-conversations", version: 1, conversations }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: `${name.replace(/[^\p{L}\p{N} _-]/gu, "").trim() || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// ---- Dialogs

/** Shows a dialog; its form's values once it is submitted, null if it is closed otherwise. */
function askIn(dialog, values = {}) {
  const form = dialog.querySelector("form");
  form.reset();
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value ?? "";
  dialog.returnValue = "";
  dialog.querySelector("[data-close]").onclick = () => dialog.close();
  form.onsubmit = (event) => {
    event.preventDefault();
    dialog.close("submitted");
  };
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      const isSubmitted = dialog.returnValue === "submitted";
      resolve(isSubmitted ? Object.fromEntries(new FormData(form)) : null);
      form.reset(); // A key does not stay in the page.
    };
  });
}

async function askForKey(isWrong) {
  if (at("key").open) return;
  at("key-note").textContent = isWrong ? "The server does not know this API key." : "This server wants an API key.";
  const form = await askIn(at("key"));
  if (!form) return;
  saveKey(form.key.trim(), form.remember === "on");
  connection.reconnect();
}

at("open-settings").onclick = async () => {
  const { model } = at("settings").querySelector("form").elements;
  model.replaceChildren(...connection.models.map((name) => element("option", { value: name, textContent: name })));
  at("forget-key").hidden = loadKey() === null;
  at("storage-note").textContent = store.isLasting
    ? `This browser keeps the last ${MAX_CONVERSATIONS} conversations.`
    : "This browser does not let the page keep conversations.";
  const form = await askIn(at("settings"), { ...settings, model: settings.model ?? connection.models[0] });
  if (!form) return;
  settings = {
    model: !form.model || form.model === connection.models[0] ? null : form.model,
    systemPrompt: form.systemPrompt,
    temperature: form.temperature === "" ? null : Number(form.temperature),
    maxTokens: form.maxTokens === "" ? null : Number(form.maxTokens),
  };
  saveSettings(settings);
  showModel();
};
at("export-all").onclick = async () => download(await store.all(), "conversations");
at("delete-all").onclick = async () => {
  at("settings").close();
  at("confirming-title").textContent = "Delete all conversations?";
  if (await askIn(at("confirming"))) await forget((await store.list()).map((summary) => summary.id));
};
at("forget-key").onclick = () => {
  at("settings").close();
  forgetKey();
  connection.reconnect();
};

// ---- Small things

function showModel() {
  const name = settings.model ?? connection.hello?.model ?? "";
  at("model").textContent = name;
}

function announce(text) {
  at("announcer").textContent = text;
}

function firstLine(text) {
  const line = text.trim().split("\n")[0];
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}…` : line;
}

async function copyText(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // Plain HTTP but from this machine has no clipboard.
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = name), 1500);
}

function copyBySelection(text) {
  const field = element("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

messageList.addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copyText(button.closest(".code").querySelector("code").textContent, button);
});

// ---- Begin

const retry = () => connection.state === "waiting" && connection.connect();
addEventListener("online", retry);
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && retry());
store.onChange(showChange);
connection.connect();
show(conversation);
await openFromAddress();
document.documentElement.dataset.ready = "";
