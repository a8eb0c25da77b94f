// The connection to `/v1/stream` (docs/stream-protocol.md): many requests on one WebSocket, none of them ever repeated.

const VERSION = 1;
const CREDITS = 64; // Chunks that may be on their way to us.
const CREDITS_AT_ONCE = 16;
const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 15000;
const CANCEL_TIMEOUT_MS = 5000;
const CLOSE_POLICY = 1008;

/** The connection ended before the request did. It may have had effects, so it is the user who repeats it. */
export class ConnectionLostError extends Error {
  constructor() {
    super("The connection to the server was lost.");
  }
}

/** The server's own word about a request that failed. */
export class RequestFailedError extends Error {
  constructor(message) {
    super(message.error?.message ?? "The request failed.");
  }
}

/** The server wants another API key, or one at all. */
export class KeyRefusedError extends Error {
  constructor() {
    super("The server needs an API key.");
  }
}

/**
 * One connection, which is made again when it is lost. `onState` is called with "connecting", "open", "waiting" (it was
 * lost and is tried again later; with the server's reason, if it gave one) or "refused" (a key is needed: `connect`
 * again once there is one).
 */
export class Connection {
  #base;
  #getKey;
  #onState;
  #socket = null;
  #live = new Map();
  #lastId = 0;
  #waiters = [];
  #waitMs = MIN_WAIT_MS;
  #timer = 0;
  #isConnecting = false;
  #problem = null; // What the server has said about the connection as a whole.

  state = "connecting";
  models = [];
  hello = null;

  /** `base` is the page's address; `getKey` gives the API key, or null. */
  constructor(base, getKey, onState) {
    this.#base = base;
    this.#getKey = getKey;
    this.#onState = onState;
  }

  /** Connects, unless that is done or happening. */
  async connect() {
    if (this.state === "open" || this.#isConnecting) return;
    clearTimeout(this.#timer);
    this.#isConnecting = true;
    this.#setState("connecting");
    try {
      this.models = await this.#fetchModels();
      await this.#openSocket();
      this.#waitMs = MIN_WAIT_MS;
      this.#setState("open");
      for (const waiter of this.#waiters.splice(0)) waiter.resolve();
    } catch (error) {
      if (error instanceof KeyRefusedError) this.#setState("refused");
      else this.#connectLater(error instanceof RequestFailedError ? error.message : undefined);
    } finally {
      this.#isConnecting = false;
    }
  }

  /** Connects with what `getKey` gives now. Requests that run end. */
  async reconnect() {
    this.#socket?.close(1000);
    this.#lose();
    await this.connect();
  }

  /** Returns once connected. `signal` ends the waiting. */
  whenOpen(signal) {
    if (this.state === "open") return Promise.resolve();
    this.connect();
    return new Promise((resolve, reject) => {
      this.#waiters.push({ resolve, reject });
      signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    });
  }

  /**
   * Sends a request, once. `onStarted` and `onChunk` get its messages; the promise its `done`, or is rejected.
   * `signal` cancels it: what was generated still comes, then `done` with "abort".
   */
  create(endpoint, body, { onStarted, onChunk, signal }) {
    const id = String(++this.#lastId);
    return new Promise((resolve, reject) => {
      if (this.state !== "open") {
        reject(new ConnectionLostError());
        return;
      }
      this.#live.set(id, { resolve, reject, onStarted, onChunk, owed: 0 });
      this.#send({ type: "create", id, endpoint, body, credits: CREDITS });
      signal.addEventListener("abort", () => this.#cancel(id), { once: true });
    });
  }

  /** The server ends it; where it says nothing, as when the network has gone without a word, it is over all the same. */
  #cancel(id) {
    const request = this.#live.get(id);
    if (!request) return;
    this.#send({ type: "cancel", id });
    setTimeout(() => this.#live.delete(id) && request.reject(new ConnectionLostError()), CANCEL_TIMEOUT_MS);
  }

  /** A GET or other request over HTTP, with the key. */
  fetch(path, options = {}) {
    const key = this.#getKey();
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    return fetch(new URL(path, this.#base), { ...options, headers, credentials: "omit", cache: "no-store" });
  }

  async #fetchModels() {
    const response = await this.fetch("v1/models");
    if (response.status === 401) throw new KeyRefusedError();
    if (!response.ok) throw new RequestFailedError(await response.json());
    return (await response.json()).data.map((card) => card.id);
  }

  #openSocket() {
    const url = new URL("v1/stream", this.#base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.hash = "";
    const socket = new WebSocket(url);
    this.#socket = socket;
    this.#problem = null;
    return new Promise((resolve, reject) => {
      socket.onopen = () => {
        const key = this.#getKey();
        socket.send(JSON.stringify({ type: "hello", version: VERSION, ...(key ? { api_key: key } : {}) }));
      };
      socket.onmessage = (event) => {
        const message = JSON.parse(event.data);
        if (message.type === "hello") {
          this.hello = message;
          resolve();
        } else {
          this.#receive(message);
        }
      };
      socket.onclose = (event) => {
        if (this.#problem && this.#problem.status !== 401) reject(new RequestFailedError(this.#problem));
        else reject(event.code === CLOSE_POLICY ? new KeyRefusedError() : new ConnectionLostError());
        if (this.#socket !== socket) return;
        const wasOpen = this.state === "open";
        this.#lose();
        if (wasOpen) this.#connectLater();
      };
    });
  }

  #receive(message) {
    if (message.type === "error" && message.id === undefined) this.#problem = message;
    const request = this.#live.get(message.id);
    if (!request) return;
    switch (message.type) {
      case "started":
        request.onStarted(message);
        break;
      case "chunk":
        request.onChunk(message.data);
        // Messages wait while the page renders, and so do these: the server then sends fewer and larger chunks.
        if (++request.owed >= CREDITS_AT_ONCE) {
          this.#send({ type: "credit", id: message.id, n: request.owed });
          request.owed = 0;
        }
        break;
      case "done":
        this.#live.delete(message.id);
        request.resolve(message);
        break;
      case "error":
        this.#live.delete(message.id);
        request.reject(new RequestFailedError(message));
        break;
    }
  }

  #send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #lose() {
    this.#socket = null;
    if (this.state === "open") this.#setState("waiting");
    const lost = [...this.#live.values()];
    this.#live.clear();
    for (const request of lost) request.reject(new ConnectionLostError());
  }

  #connectLater(reason) {
    this.#setState("waiting", reason);
    clearTimeout(this.#timer);
    // Not all pages at once, when a server comes back.
    this.#timer = setTimeout(() => this.connect(), this.#waitMs * (0.5 + Math.random() / 2));
    this.#waitMs = Math.min(this.#waitMs * 2, MAX_WAIT_MS);
  }

  #setState(state, reason) {
    this.state = state;
    this.#onState(state, reason);
  }
}
