// One message on the page, and how it changes while it is written.

import { copyButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const action = (label, act) => {
  const button = make("button", { type: "button", className: "quiet small", textContent: label });
  button.addEventListener("click", act);
  return button;
};

/** What the user said; can be edited. `onEdit(text)`: ask again from here. */
export function userMessage(message, onEdit) {
  const article = make("article", { className: "message user", "aria-label": "You" });
  const show = () => {
    const edit = action("Edit", change);
    article.replaceChildren(
      make("div", { className: "text", textContent: message.content, dir: "auto" }),
      make("div", { className: "row end" }, copyButton("Copy this message", () => message.content), edit));
    return edit;
  };
  const change = () => {
    const area = make("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1), dir: "auto", "aria-label": "Edit the message" });
    const form = make("form", { className: "edit" }, area,
      make("div", { className: "row end" }, action("Cancel", () => show().focus()), make("button", { type: "submit", textContent: "Ask again" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "") onEdit(area.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        show().focus();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    article.replaceChildren(form);
    area.focus();
  };
  show();
  return article;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

/** "42 tokens · 38.1 tok/s · first token after 120 ms · prompt 512 tokens, 448 cached". */
export function figuresText({ figures, finish }) {
  if (!figures) return "";
  const parts = [];
  if (figures.outputTokens > 0) parts.push(count(figures.outputTokens, "token"));
  if (figures.tokensPerSecond > 0) parts.push(`${figures.tokensPerSecond.toFixed(1)} tok/s`);
  if (figures.ttft !== undefined) parts.push(`first token after ${seconds(figures.ttft)}`);
  if (figures.promptTokens > 0) parts.push(`prompt ${count(figures.promptTokens, "token")}, ${figures.cachedTokens.toLocaleString("en")} cached`);
  if (finish === "length") parts.push("cut off by the limit of tokens");
  if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;  // still being written, or cut off
  }
}

/** What the model says: reasoning folded, text, tool calls, figures. Call update() after every change of `message`. */
export class AssistantMessage {
  element = make("article", { className: "message assistant", "aria-label": "Answer" });
  #message;
  #on;
  #reasoning = null;  // {details, summary, view}
  #content = make("div", { className: "content" });
  #contentView = new MarkdownView(this.#content);
  #calls = make("div", { className: "calls" });
  #callsShown = "";
  #fault = make("p", { className: "fault", role: "alert", hidden: true });
  #figures = make("span", { className: "figures" });
  #actions = make("span", { className: "row" });
  #actionsShown = "";

  /** on: {regenerate(), results([text of each call]), version(step)} */
  constructor(message, on) {
    this.#message = message;
    this.#on = on;
    this.element.append(this.#content, this.#calls, this.#fault, make("div", { className: "row" }, this.#figures, this.#actions));
  }

  update({ running, last }) {
    const message = this.#message;
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    if (this.#reasoning) this.#reasoning.details.hidden = !message.reasoning;  // another version may have none
    if (message.reasoning) this.#showReasoning(running);
    this.#contentView.show(message.content);
    this.#showCalls(running, last);
    this.#fault.hidden = !message.fault;
    if (this.#fault.textContent !== (message.fault ?? "")) this.#fault.textContent = message.fault ?? "";
    this.#figures.textContent = figuresText(message);
    this.#showActions(running, last);
  }

  #showReasoning(running) {
    if (this.#reasoning === null) {
      const summary = make("summary");
      const text = make("div");
      const details = make("details", { className: "reasoning" }, summary, text);
      this.#reasoning = { details, summary, view: new MarkdownView(text) };
      details.addEventListener("toggle", () => this.#fillReasoning());
      this.element.prepend(details);
    }
    const { figures, content, calls } = this.#message;
    const thinking = running && content === "" && calls.length === 0;
    const words = thinking ? "Thinking…" : figures?.thinking ? `Thought for ${seconds(figures.thinking)}` : "Thoughts";
    if (this.#reasoning.summary.textContent !== words) this.#reasoning.summary.textContent = words;
    this.#fillReasoning();
  }

  #fillReasoning() {
    if (this.#reasoning.details.open) this.#reasoning.view.show(this.#message.reasoning);
  }

  #showCalls(running, last) {
    const { calls } = this.#message;
    const state = JSON.stringify([calls, running, last]);
    if (state === this.#callsShown) return;
    this.#callsShown = state;
    if (calls.length === 0) return this.#calls.replaceChildren();
    const answerable = last && !running;
    const areas = [];
    const cards = calls.map((call) => {
      const card = make("section", { className: "call", "aria-label": `Call of ${call.name}` },
        make("p", {}, "Calls ", make("code", { textContent: call.name })), make("pre", { textContent: prettyJson(call.arguments) }));
      if (call.result !== undefined) {
        card.append(make("pre", { className: "result", textContent: call.result, "aria-label": "Result" }));
      } else if (answerable) {
        const area = make("textarea", { rows: 2, spellcheck: false });
        areas.push(area);
        card.append(make("label", {}, `What ${call.name} gives back`, area));
      }
      return card;
    });
    if (areas.length > 0) {
      const send = make("button", { type: "submit", textContent: areas.length === 1 ? "Send the result" : "Send the results" });
      const form = make("form", {}, ...cards, send);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.#on.results(areas.map((area) => area.value));
      });
      this.#calls.replaceChildren(form);
    } else {
      this.#calls.replaceChildren(...cards);
    }
  }

  #showActions(running, last) {
    const { versions, version } = this.#message;
    const state = running ? "" : JSON.stringify([last, last && versions ? [version, versions.length] : null]);
    if (state === this.#actionsShown) return;
    this.#actionsShown = state;
    const buttons = [];
    if (!running) buttons.push(copyButton("Copy this answer", () => this.#message.content));
    if (!running && last) buttons.push(action("Regenerate", this.#on.regenerate));
    if (!running && last && versions) {
      const turn = (label, sign, step) => {
        const button = action(sign, () => {
          this.#on.version(step);
          this.#actions.querySelector(`[aria-label="${label}"]:enabled`)?.focus();
        });
        button.setAttribute("aria-label", label);
        button.disabled = version + step < 0 || version + step >= versions.length;
        return button;
      };
      buttons.push(turn("Earlier answer", "‹", -1), make("span", { className: "figures", textContent: `${version + 1} of ${versions.length}` }), turn("Later answer", "›", 1));
    }
    this.#actions.replaceChildren(...buttons);
  }
}
