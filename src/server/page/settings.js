// The parameters of a chat: what the form says, and what a request makes of it.

import { byId } from "./dom.js";
import { emptySettings } from "./chats.js";

const field = (name) => byId(`set-${name}`);

export function fillForm(settings) {
  for (const name of Object.keys(emptySettings)) field(name).value = settings[name];
  checkTools();
}

export function readForm() {
  return Object.fromEntries(Object.keys(emptySettings).map((name) => [name, field(name).value.trim()]));
}

/** The list of tools, null for none; throws what is wrong with it. */
function parseTools(text) {
  if (text === "") return null;
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error("a list is expected: [ … ]");
  return tools;
}

/** Says below the field what is wrong; true when nothing is. */
export function checkTools() {
  let fault = "";
  try {
    parseTools(field("tools").value.trim());
  } catch (error) {
    fault = error.message;
  }
  byId("tools-fault").textContent = fault;
  field("tools").setAttribute("aria-invalid", String(fault !== ""));
  return fault === "";
}

/** The request for an answer to this chat. */
export function requestOf(chat, model) {
  const { settings } = chat;
  const request = { model, messages: [] };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (settings[name] !== "") request[name] = Number(settings[name]);
  }
  if (settings.thinking !== "") request.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const tools = parseTools(settings.tools);
  if (tools) request.tools = tools;
  if (settings.system !== "") request.messages.push({ role: "system", content: settings.system });
  for (const message of chat.messages) {
    if (message.role === "user") {
      request.messages.push({ role: "user", content: message.content });
      continue;
    }
    if (message.content === "" && message.calls.length === 0) continue;  // stopped or failed before it said anything
    const answer = { role: "assistant", content: message.content };
    if (message.reasoning) answer.reasoning_content = message.reasoning;
    if (message.calls.length > 0) {
      answer.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    request.messages.push(answer);
    for (const call of message.calls) {
      if (call.result !== undefined) request.messages.push({ role: "tool", tool_call_id: call.id, content: call.result });
    }
  }
  return request;
}
