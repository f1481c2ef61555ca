// Chats and settings, kept in localStorage; in memory alone where the browser has none or it is full.
//
// A chat: {id, title, updated, settings, messages}. A message: {role: "user", content} or
// {role: "assistant", content, reasoning, calls: [{id, name, arguments, result}], figures, finish, fault}, which may have `versions`: all answers
// to the same question, of which number `version` is the one that stands in the message itself.

const memory = new Map();

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? memory.get(name);
  } catch {
    return memory.get(name);
  }
}

/** False when the browser does not keep it. */
function write(name, value) {
  memory.set(name, value);
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function remove(name) {
  memory.delete(name);
  try {
    localStorage.removeItem(name);
  } catch {
    // Nothing was kept there.
  }
}

export const emptySettings = { system: "", thinking: "", temperature: "", top_p: "", top_k: "", max_tokens: "", seed: "", tools: "" };

const kIndex = "quern.chats";
const nameOf = (id) => `quern.chat.${id}`;

/** [{id, title, updated}], the latest first. */
export const listChats = () => [...(read(kIndex) ?? [])].sort((a, b) => b.updated - a.updated);

export function newChat() {
  // crypto.randomUUID is for secure contexts only; getRandomValues is not.
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), settings: { ...emptySettings, ...read("quern.settings") }, messages: [] };
}

export function loadChat(id) {
  const chat = read(nameOf(id));
  return chat ? { ...chat, settings: { ...emptySettings, ...chat.settings } } : null;
}

/** False when the browser is out of room and the chat will be gone with this tab. */
export function saveChat(chat) {
  const index = (read(kIndex) ?? []).filter((entry) => entry.id !== chat.id);
  index.push({ id: chat.id, title: chat.title, updated: chat.updated });
  const kept = write(nameOf(chat.id), chat);
  return write(kIndex, index) && kept;
}

export function removeChat(id) {
  write(kIndex, (read(kIndex) ?? []).filter((entry) => entry.id !== id));
  remove(nameOf(id));
}

export const saveSettings = (settings) => write("quern.settings", settings);

const answerOf = ({ content, reasoning, calls, figures, finish, fault }) => ({ content, reasoning, calls, figures, finish, fault });

/** A new, empty answer; `before`, where given, is the one in whose place it comes, and stays a version of it. */
export function newAnswer(before) {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], figures: {} };
  if (before && (before.content || before.reasoning || before.calls.length > 0)) {
    const versions = [...(before.versions ?? [null])];
    versions[before.version ?? 0] = answerOf(before);
    message.versions = [...versions, null];
    message.version = versions.length;
  }
  return message;
}

/** Puts the version before (-1) or after (1) this one into the message. */
export function switchVersion(message, step) {
  message.versions[message.version] = answerOf(message);
  message.version += step;
  Object.assign(message, { finish: undefined, fault: undefined }, message.versions[message.version]);  // storage knows no undefined
}

/** The API key: of this tab, or kept. */
export function apiKey() {
  try {
    return sessionStorage.getItem("quern.key") ?? localStorage.getItem("quern.key") ?? "";
  } catch {
    return memory.get("quern.key") ?? "";
  }
}

export function setApiKey(key, keep) {
  memory.set("quern.key", key);
  try {
    sessionStorage.setItem("quern.key", key);
    if (keep) localStorage.setItem("quern.key", key);
    else localStorage.removeItem("quern.key");
  } catch {
    // This tab has it.
  }
}

export function setTheme(theme) {
  try {
    if (theme === "auto") localStorage.removeItem("quern.theme");
    else localStorage.setItem("quern.theme", theme);
  } catch {
    // For this tab then.
  }
}
