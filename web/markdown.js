// Markdown to DOM nodes. What a model writes never becomes HTML: every node is made here, from a list of allowed tags.

import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";

const LINK_SCHEMES = new Set(["http:", "https:", "mailto:"]);
const TAGS = new Set([
  "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote",
  "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s",
]);

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

/** The nodes of a whole text. */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  appendTokens(fragment, parser.parse(normalize(text), {}));
  return fragment;
}

/**
 * A text that grows. Blocks that later text cannot change any more are neither parsed nor touched again, so a long
 * answer costs as much per token as a short one; of the last block only the nodes that differ change.
 */
export class MarkdownStream {
  #container;
  #text = "";
  #stableChars = 0;
  #stableBlocks = 0;
  #environment = {};

  /** Renders into `container`, which is emptied. */
  constructor(container) {
    this.#container = container;
    container.replaceChildren();
  }

  /** Adds text to the end. */
  push(text) {
    this.#text += normalize(text);
    const tail = this.#text.slice(this.#stableChars);
    const tokens = parser.parse(tail, this.#environment);
    const fresh = document.createDocumentFragment();
    appendTokens(fresh, tokens);
    patchChildren(this.#container, fresh, this.#stableBlocks);

    // Each token of level 0 that does not close something begins a block, which is one child of the container.
    const starts = tokens.filter((token) => token.level === 0 && token.nesting >= 0).map((token) => token.map[0]);
    const lastStart = starts.at(-1) ?? 0;
    // The first two lines of a block decide what it is (a table's second line does), so both must be complete.
    const end = lastStart > 0 ? endOfLine(tail, lastStart + 2) : -1;
    if (end >= 0) {
      this.#stableChars += endOfLine(tail, lastStart);
      this.#stableBlocks += starts.length - 1;
    }
  }

  /** Says that nothing follows. What only the whole text tells, as links defined at its end, is made right. */
  finish() {
    patchChildren(this.#container, renderMarkdown(this.#text), 0);
  }
}

function normalize(text) {
  return text.replaceAll("\r", "");
}

/** The offset at which `numLines` complete lines end, or -1 if there are fewer. */
function endOfLine(text, numLines) {
  let offset = 0;
  for (let line = 0; line < numLines; line++) {
    const newline = text.indexOf("\n", offset);
    if (newline < 0) return -1;
    offset = newline + 1;
  }
  return offset;
}

// ---- Tokens to nodes

function appendTokens(parent, tokens) {
  const stack = [parent];
  for (const token of tokens) {
    const top = stack.at(-1);
    if (token.nesting === 1) stack.push(openElement(top, token));
    else if (token.nesting === -1) stack.pop();
    else appendLeaf(top, token);
  }
}

/** Adds what `token` opens to `parent`, and returns where its content goes. */
function openElement(parent, token) {
  if (token.hidden) return parent; // The paragraph of a tight list's item.
  if (token.type === "link_open") return openLink(parent, token.attrGet("href"), token.attrGet("title"));
  const element = document.createElement(TAGS.has(token.tag) ? token.tag : "span");
  if (token.tag === "ol") {
    const start = Number(token.attrGet("start") ?? 1);
    if (start !== 1) element.start = start;
  } else if (token.tag === "th" || token.tag === "td") {
    const align = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
    if (align) element.className = `align-${align[1]}`;
  }
  if (token.tag === "table") {
    const scroller = makeElement("div", "table");
    scroller.tabIndex = 0;
    scroller.append(element);
    parent.append(scroller);
  } else {
    parent.append(element);
  }
  return element;
}

function openLink(parent, href, title) {
  let element;
  if (isSafeLink(href)) {
    element = document.createElement("a");
    element.href = href;
    element.target = "_blank";
    element.rel = "noopener noreferrer nofollow";
    if (title) element.title = title;
  } else {
    element = document.createElement("span");
  }
  parent.append(element);
  return element;
}

function isSafeLink(href) {
  try {
    return LINK_SCHEMES.has(new URL(href).protocol);
  } catch {
    return false; // A relative link would lead to this server.
  }
}

function appendLeaf(parent, token) {
  switch (token.type) {
    case "inline":
      appendTokens(parent, token.children);
      break;
    case "softbreak":
    case "hardbreak":
      parent.append(document.createElement("br"));
      break;
    case "hr":
      parent.append(document.createElement("hr"));
      break;
    case "code_inline":
      parent.append(makeElement("code", "", token.content));
      break;
    case "fence":
    case "code_block":
      parent.append(makeCodeBlock(token.content, token.info.trim().split(/\s+/)[0]));
      break;
    case "image": {
      // Loading it would tell another server who reads this; whoever wants to see it follows the link.
      const link = openLink(parent, token.attrGet("src"), token.attrGet("title"));
      link.append(`🖼 ${token.content || "image"}`);
      break;
    }
    default:
      parent.append(token.content);
  }
}

function makeCodeBlock(text, language) {
  const block = makeElement("div", "code");
  const head = makeElement("div", "code-head");
  const copy = makeElement("button", "copy-code", "Copy");
  copy.type = "button";
  head.append(makeElement("span", "", language || "text"), copy);
  const frame = document.createElement("pre");
  frame.tabIndex = 0;
  frame.append(makeElement("code", "", text.replace(/\n$/, "")));
  block.append(head, frame);
  return block;
}

function makeElement(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.append(text);
  return element;
}

// ---- New nodes over old ones

/** Makes `parent`'s children from number `first` on equal to those of `fresh`, and keeps the nodes that can stay. */
function patchChildren(parent, fresh, first) {
  let old = parent.childNodes[first] ?? null;
  for (const node of [...fresh.childNodes]) {
    if (old === null) {
      parent.append(node);
      continue;
    }
    const next = old.nextSibling;
    if (!patchNode(old, node)) old.replaceWith(node);
    old = next;
  }
  while (old !== null) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

/** Whether `old` could be made equal to `fresh`. */
function patchNode(old, fresh) {
  if (old.isEqualNode(fresh)) return true;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return true;
  }
  if (!haveEqualAttributes(old, fresh)) return false;
  patchChildren(old, fresh, 0);
  return true;
}

function haveEqualAttributes(one, other) {
  const names = one.getAttributeNames();
  if (names.length !== other.getAttributeNames().length) return false;
  return names.every((name) => one.getAttribute(name) === other.getAttribute(name));
}
