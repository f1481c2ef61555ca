// The page: which chat is shown, what is being answered, and what every control does.

import { listModels, readiness, streamChat } from "./api.js";
import {
  apiKey, emptySettings, listChats, loadChat, newAnswer, newChat, removeChat, saveChat, saveSettings, setApiKey, setTheme, switchVersion,
} from "./chats.js";
import { byId, make } from "./dom.js";
import { AssistantMessage, figuresText, userMessage } from "./messages.js";
import { checkTools, fillForm, readForm, requestOf } from "./settings.js";

const kPollMs = 500;
const kSaveMs = 1000;  // a running answer is saved this often
const kMeasurable = 0.02;  // seconds; a speed over less says more about the network than about the model

let chat = newChat();
let views = [];             // of chat.messages
let model = null;           // {id, max_model_len}
const running = new Map();  // chat id -> {controller, chat}

const input = byId("input");
const scroller = byId("scroller");

// The conversation

const isRunning = () => running.has(chat.id);
const viewOptions = (index) => ({ last: index === chat.messages.length - 1, running: isRunning() && index === chat.messages.length - 1 });

function showChat() {
  views = chat.messages.map((message, index) => {
    if (message.role === "user") return { element: userMessage(message, (text) => askFrom(index, text)), update() {} };
    return new AssistantMessage(message, {
      regenerate: () => askFrom(index),
      results: (texts) => giveResults(message, texts),
      version: (step) => showVersion(message, step),
    });
  });
  byId("log").replaceChildren(...views.map((view) => view.element));
  updateViews();
  byId("greeting").hidden = chat.messages.length > 0;
  showControls();
  showList();
  scrollToEnd();
}

const updateViews = () => views.forEach((view, index) => view.update(viewOptions(index)));

function showControls() {
  const send = byId("send");
  send.textContent = isRunning() ? "Stop" : "Send";
  send.classList.toggle("quiet", isRunning());
}

function showList() {
  const entries = listChats().map((entry) => {
    const open = make("button", { type: "button", className: "open", textContent: entry.title || "New chat" });
    if (entry.id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openChat(entry.id));
    const remove = make("button", { type: "button", className: "remove", textContent: "✕", "aria-label": `Delete the chat “${entry.title}”` });
    remove.addEventListener("click", () => deleteChat(entry));
    return make("li", {}, open, remove);
  });
  byId("chats").replaceChildren(...entries);
}

function openChat(id) {
  chat = running.get(id)?.chat ?? loadChat(id) ?? newChat();
  showChat();
  closeSidebar();
  input.focus();
}

function deleteChat(entry) {
  if (!confirm(`Delete “${entry.title}”? It is kept nowhere else.`)) return;
  running.get(entry.id)?.controller.abort();
  removeChat(entry.id);
  if (entry.id === chat.id) chat = newChat();
  showChat();
  byId("new-chat").focus();
}

function keep(changed) {
  if (!saveChat(changed)) showNotice("This browser has no room for more chats: delete some, or this one is gone with the tab.");
}

// Scrolling follows the answer until the reader scrolls up.

const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
let following = true;

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  following = true;
  byId("to-end").hidden = true;
}

scroller.addEventListener("scroll", () => {
  following = isAtEnd();
  byId("to-end").hidden = following;
});

// Asking

/** Takes back everything from this message on and asks again: with another question, or for another answer. */
function askFrom(index, text) {
  if (isRunning()) return;
  const [before] = chat.messages.splice(index);
  if (text !== undefined) chat.messages.push({ role: "user", content: text });
  answer(text === undefined ? before : undefined);
}

function showVersion(message, step) {
  switchVersion(message, step);
  keep(chat);
  updateViews();
}

function giveResults(message, texts) {
  const open = message.calls.filter((call) => call.result === undefined);
  open.forEach((call, i) => { call.result = texts[i]; });
  answer();
}

/** Adds one chunk to the message and its figures. */
function addChunk(message, chunk, times) {
  const now = performance.now();
  const { figures } = message;
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (reasoning || delta.content || delta.tool_calls) {
    times.last = now;
    if (times.first === undefined) {
      times.first = now;
      figures.ttft = now - times.sent;
    }
    if (!reasoning && message.reasoning && figures.thinking === undefined) figures.thinking = now - times.first;
  }
  message.reasoning += reasoning;
  message.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (message.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    call.arguments += piece.function?.arguments ?? "";
  }
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.usage) {
    figures.promptTokens = chunk.usage.prompt_tokens;
    figures.outputTokens = chunk.usage.completion_tokens;
    figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const seconds = (times.last - times.first) / 1000;
  if (figures.outputTokens > 1 && seconds > kMeasurable) figures.tokensPerSecond = (figures.outputTokens - 1) / seconds;
}

/** Lets the model go on with this chat; its answer comes in the place of `before`, where given. */
async function answer(before) {
  const own = chat;
  if (running.has(own.id) || !model) return;
  let request;
  try {
    request = requestOf(own, model.id);
  } catch (fault) {
    announce(`The list of tools cannot be read: ${fault.message}`);
    return openSettings();
  }
  const message = newAnswer(before);
  const controller = new AbortController();
  own.messages.push(message);
  own.updated = Date.now();
  if (!own.title) own.title = own.messages.find((m) => m.role === "user")?.content.trim().replace(/\s+/g, " ").slice(0, 60) ?? "";
  running.set(own.id, { controller, chat: own });
  keep(own);
  showChat();
  if (document.activeElement === document.body) byId("send").focus();  // the control that asked is gone
  announce("The answer begins.");

  const times = { sent: performance.now(), saved: performance.now() };
  let frame = 0;
  const draw = () => {
    frame = 0;
    if (chat !== own) return;
    views.at(-1)?.update(viewOptions(own.messages.length - 1));
    if (following) scrollToEnd();
  };
  let unauthorized = false;
  try {
    for await (const chunk of streamChat(request, apiKey(), controller.signal)) {
      addChunk(message, chunk, times);
      frame ||= requestAnimationFrame(draw);
      if (performance.now() - times.saved > kSaveMs) {
        times.saved = performance.now();
        keep(own);
      }
    }
  } catch (fault) {
    if (fault.name === "AbortError") message.finish = "stopped";
    else message.fault = fault.message;
    unauthorized = fault.status === 401;
  }
  cancelAnimationFrame(frame);
  running.delete(own.id);
  if (listChats().some((entry) => entry.id === own.id)) keep(own);  // or it was deleted meanwhile
  if (chat === own) {
    updateViews();
    showControls();
    if (following) scrollToEnd();
    const called = message.calls.map((call) => `The model calls ${call.name}.`).join(" ");
    announce(message.fault ? "" : `${message.finish === "stopped" ? "Stopped." : "The answer is complete."} ${message.content} ${called} ${figuresText(message)}`);
  }
  showList();
  if (unauthorized && (await askForKey("This key is not accepted."))) {
    own.messages.pop();
    if (chat === own) answer(before);
  } else if (message.fault) {
    connect();
  }
}

function send() {
  if (isRunning()) return running.get(chat.id).controller.abort();
  const text = input.value;
  if (text.trim() === "" || !model) return;
  input.value = "";
  fitInput();
  chat.messages.push({ role: "user", content: text });
  answer();
}

function announce(text) {
  byId("announcer").textContent = text;
}

// The message's field grows with its text.

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!isRunning()) send();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("chats-open")) closeSidebar();
  else if (isRunning()) running.get(chat.id).controller.abort();
});
byId("to-end").addEventListener("click", () => {
  scrollToEnd();
  input.focus();
});

// The list of chats

function openSidebar() {
  document.body.classList.add("chats-open");
  byId("backdrop").hidden = false;
  byId("open-sidebar").setAttribute("aria-expanded", "true");
  byId("new-chat").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("chats-open")) return;
  document.body.classList.remove("chats-open");
  byId("backdrop").hidden = true;
  byId("open-sidebar").setAttribute("aria-expanded", "false");
  byId("open-sidebar").focus();
}

byId("open-sidebar").addEventListener("click", openSidebar);
byId("close-sidebar").addEventListener("click", closeSidebar);
byId("backdrop").addEventListener("click", closeSidebar);
byId("new-chat").addEventListener("click", () => {
  chat = newChat();
  showChat();
  closeSidebar();
  input.focus();
});
window.addEventListener("storage", (event) => {
  if (event.key === "quern.chats") showList();  // another tab
});

const theme = byId("theme");
theme.value = document.documentElement.dataset.theme ?? "auto";
theme.addEventListener("change", () => {
  if (theme.value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  setTheme(theme.value);
});

// Settings

function openSettings() {
  fillForm(chat.settings);
  byId("settings").showModal();
}

byId("open-settings").addEventListener("click", openSettings);
byId("set-tools").addEventListener("input", checkTools);
byId("reset-settings").addEventListener("click", () => fillForm(emptySettings));
byId("settings").querySelector("form").addEventListener("submit", (event) => {
  if (checkTools()) return applySettings();
  event.preventDefault();
  byId("set-tools").focus();
});
byId("settings").addEventListener("close", applySettings);  // Escape keeps what was typed, too

function applySettings() {
  const settings = readForm();
  if (!checkTools()) settings.tools = chat.settings.tools;
  chat.settings = settings;
  saveSettings(settings);
  if (chat.messages.length > 0) keep(chat);
}

// Server, model and key

function showNotice(text, { fraction, key = false } = {}) {
  byId("notice").hidden = text === "";
  if (byId("notice-text").textContent !== text) byId("notice-text").textContent = text;
  const progress = byId("notice-progress");
  progress.hidden = fraction === undefined;
  if (fraction !== undefined) progress.value = fraction;
  byId("notice-key").hidden = !key;
}

/** Resolves to true when a key was given. */
function askForKey(fault) {
  const dialog = byId("key-dialog");
  if (dialog.open) return Promise.resolve(false);
  byId("key-fault").textContent = apiKey() === "" ? "" : fault;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "given" && byId("key").value.trim() !== "";
      if (given) setApiKey(byId("key").value.trim(), byId("keep-key").checked);
      byId("key").value = "";
      resolve(given);
    }, { once: true });
  });
}

byId("cancel-key").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-dialog").close("given");
});
byId("notice-key").addEventListener("click", async () => {
  if (await askForKey("This key is not accepted.")) connect();
});

const kPhases = { starting: "The server starts", loading_weights: "The model loads", starting_engine: "The model is loaded, the engine starts" };
const wait = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });
let connecting = false;

/** Waits until the server is ready, showing how far it is, and learns the model. */
async function connect() {
  if (connecting) return;
  connecting = true;
  try {
    for (;;) {
      const state = await readiness();
      if (state.ready) break;
      if (state.loading) {
        const percent = state.phase === "loading_weights" ? `: ${Math.floor(state.fraction * 100)} %` : "";
        showNotice((kPhases[state.phase] ?? kPhases.starting) + percent, { fraction: state.phase === "starting" ? undefined : state.fraction || (state.phase === "starting_engine" ? 1 : 0) });
      } else {
        showNotice(state.message);
      }
      await wait(kPollMs);
    }
    showNotice("");
    for (;;) {
      try {
        [model] = await listModels(apiKey());
        break;
      } catch (fault) {
        if (fault.status !== 401) {
          showNotice(fault.message);
          await wait(kPollMs);
        } else if (!(await askForKey("This key is not accepted."))) {
          return showNotice("Without an API key this server does not answer.", { key: true });
        }
      }
    }
    showNotice("");
    byId("model-name").textContent = model.id;
    byId("model-about").textContent = `${model.max_model_len.toLocaleString("en")} tokens of context`;
    document.title = `${model.id} · quern`;
  } finally {
    connecting = false;
  }
}

const latest = listChats()[0];
if (latest) chat = loadChat(latest.id) ?? chat;
showChat();
connect();
