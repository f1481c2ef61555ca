// Small helpers. Text only ever becomes text: nothing in this page parses HTML.

/** The element with this id, which index.html has. */
export const byId = (id) => document.getElementById(id);

/** A new element: properties are set as such, attributes with a dash by name; children are nodes, text, or lists of them (of any length, unlike
    arguments). */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  for (const child of children.flat()) node.append(child);
  return node;
}

/** Copies text, also where the page is not a secure context and the clipboard API is missing. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const focused = document.activeElement;
  const area = make("textarea", { className: "unseen", value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not allow it");
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(label, text) {
  const button = make("button", { type: "button", className: "quiet small", textContent: "Copy", "aria-label": label });
  button.addEventListener("click", async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
