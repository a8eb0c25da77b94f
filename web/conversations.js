// Conversations in this browser, in IndexedDB. The oldest go when there are too many or they are too large.

export const MAX_CONVERSATIONS = 500;
export const MAX_BYTES = 64 * 1024 * 1024;

const NAME = "trioengine";
const SUMMARIES = "summaries"; // What the list needs: id, title, updatedMs, bytes.
const CONVERSATIONS = "conversations";

/** A new conversation, which is not kept yet. */
export function newConversation() {
  const now = Date.now();
  return { id: randomId(), title: "", createdMs: now, updatedMs: now, messages: [] };
}

/** Opens the store. Where the browser keeps nothing, as in some private windows, it lasts as long as the page. */
export async function openConversations() {
  try {
    return new ConversationStore(await openDatabase());
  } catch (error) {
    console.warn("Conversations are not kept:", error);
    return new ConversationStore(null);
  }
}

class ConversationStore {
  #database;
  #memory = new Map();
  #channel = new BroadcastChannel(NAME);

  constructor(database) {
    this.#database = database;
    if (database) database.onversionchange = () => database.close();
  }

  /** Whether conversations outlive the page. */
  get isLasting() {
    return this.#database !== null;
  }

  /** Calls `listener` with the id of a conversation that another tab has changed. */
  onChange(listener) {
    this.#channel.onmessage = (event) => listener(event.data);
  }

  /** Summaries, the latest first. */
  async list() {
    const found = this.#database
      ? await this.#run("readonly", [SUMMARIES], ([summaries]) => summaries.getAll())
      : [...this.#memory.values()].map(summaryOf);
    return found.sort((one, other) => other.updatedMs - one.updatedMs);
  }

  /** A conversation, or undefined. */
  async get(id) {
    if (!this.#database) return this.#memory.get(id);
    return this.#run("readonly", [CONVERSATIONS], ([conversations]) => conversations.get(id));
  }

  /** Keeps a conversation as it is now. */
  async put(conversation) {
    if (!this.#database) {
      this.#memory.set(conversation.id, conversation);
      return;
    }
    const copy = structuredClone(conversation);
    await this.#run("readwrite", [SUMMARIES, CONVERSATIONS], ([summaries, conversations]) => {
      conversations.put(copy);
      return summaries.put(summaryOf(copy));
    });
    await this.#dropOldest(conversation.id);
    this.#channel.postMessage(conversation.id);
  }

  /** Forgets a conversation. */
  async remove(id) {
    this.#memory.delete(id);
    if (!this.#database) return;
    await this.#run("readwrite", [SUMMARIES, CONVERSATIONS], ([summaries, conversations]) => {
      conversations.delete(id);
      return summaries.delete(id);
    });
    this.#channel.postMessage(id);
  }

  /** Every conversation, for an export. */
  async all() {
    if (!this.#database) return [...this.#memory.values()];
    return this.#run("readonly", [CONVERSATIONS], ([conversations]) => conversations.getAll());
  }

  async #dropOldest(keptId) {
    let count = 0;
    let bytes = 0;
    for (const summary of await this.list()) {
      count += 1;
      bytes += summary.bytes;
      if ((count > MAX_CONVERSATIONS || bytes > MAX_BYTES) && summary.id !== keptId) await this.remove(summary.id);
    }
  }

  #run(mode, names, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.#database.transaction(names, mode);
      const request = work(names.map((name) => transaction.objectStore(name)));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SUMMARIES, { keyPath: "id" });
      request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function summaryOf({ id, title, updatedMs, messages }) {
  const chars = messages.reduce((sum, message) => sum + message.content.length + (message.reasoning ?? "").length, 0);
  return { id, title, updatedMs, bytes: 2 * chars };
}

function randomId() {
  // `randomUUID` is for secure contexts only, and plain HTTP in a home network is none.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
