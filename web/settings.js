// What the user has chosen, and the API key, in this browser's storage.

const SETTINGS = "trioengine.settings";
const KEY = "trioengine.api-key";

/** null leaves a parameter to the server. */
const DEFAULTS = { model: null, systemPrompt: "", temperature: null, maxTokens: null };

/** The settings as last saved. */
export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/** Saves them, where the browser lets a page save something. */
export function saveSettings(settings) {
  attempt(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)));
}

/** The API key: that of this tab, else the one to be remembered, else null. */
export function loadKey() {
  return attempt(() => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY)) ?? null;
}

/** Keeps the key until this tab is closed, or until it is forgotten. */
export function saveKey(key, isRemembered) {
  forgetKey();
  attempt(() => (isRemembered ? localStorage : sessionStorage).setItem(KEY, key));
}

/** Forgets the key everywhere. */
export function forgetKey() {
  attempt(() => sessionStorage.removeItem(KEY));
  attempt(() => localStorage.removeItem(KEY));
}

function attempt(action) {
  try {
    return action();
  } catch {
    return undefined; // Storage is full or forbidden.
  }
}
