// Markdown to DOM nodes, made for text that a model writes and that nobody has checked: nodes are built one by one and text stays text, there is
// no HTML in it, links lead to http, https and mailto only, and images are links (a page that shows one tells a stranger that it was read).
//
// Blocks: paragraphs, headings, fences, quotes, lists, tables, rules. Inline: code, emphasis, strikethrough, links, line breaks as written.
// Every scan is linear or bounded, whatever the text.

import { copyButton, make } from "./dom.js";

const kMaxDepth = 12;      // of quotes and lists in each other
const kMaxEmphasis = 50;   // of emphasis in emphasis
const kMaxLabel = 1000;    // characters between the brackets of a link
const kFence = /^ {0,3}(`{3,}|~{3,})/;
const kBullet = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const kRule = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const kHeading = /^ {0,3}(#{1,6})(?: |$)/;
const kTableRule = /^ *\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;

// Blocks

const isBlank = (line) => line.trim() === "";
const isTable = (lines, i) => i + 1 < lines.length && lines[i].includes("|") && lines[i + 1].includes("-") && lines[i + 1].includes("|") &&
  kTableRule.test(lines[i + 1]);
const beginsBlock = (line) => kFence.test(line) || kHeading.test(line) || kRule.test(line) || /^ {0,3}>/.test(line);

/** Where the block that begins at line i ends (exclusive), and what it is. */
function blockAt(lines, i) {
  const line = lines[i];
  const fence = kFence.exec(line);
  if (fence && !(fence[1][0] === "`" && line.slice(fence[0].length).includes("`"))) {
    const mark = fence[1];
    let end = i + 1;
    const closes = (l) => {
      const t = l.trim();
      return t.length >= mark.length && t[0] === mark[0] && t === mark[0].repeat(t.length);
    };
    while (end < lines.length && !closes(lines[end])) ++end;
    return { type: "code", end: Math.min(end + 1, lines.length), language: line.slice(fence[0].length).trim(), text: lines.slice(i + 1, end) };
  }
  const heading = kHeading.exec(line);
  if (heading) return { type: "heading", end: i + 1, level: heading[1].length };
  if (kRule.test(line)) return { type: "rule", end: i + 1 };
  if (/^ {0,3}>/.test(line)) {
    let end = i + 1;
    while (end < lines.length && !isBlank(lines[end]) && (/^ {0,3}>/.test(lines[end]) || !(beginsBlock(lines[end]) || kBullet.test(lines[end])))) ++end;
    return { type: "quote", end };
  }
  const bullet = kBullet.exec(line);
  if (bullet) {
    let end = i + 1;
    const ordered = /\d/.test(bullet[2]);
    for (; end < lines.length; ++end) {
      if (isBlank(lines[end])) {
        const next = lines[end + 1] ?? "";
        if (isBlank(next) || !(/^ {2,}/.test(next) || sameList(next, ordered))) break;
        continue;
      }
      if (/^ {2,}/.test(lines[end]) || sameList(lines[end], ordered)) continue;
      if (isBlank(lines[end - 1]) || beginsBlock(lines[end]) || kBullet.test(lines[end])) break;
    }
    return { type: "list", end, ordered, start: ordered ? parseInt(bullet[2], 10) : 1 };
  }
  if (isTable(lines, i)) {
    let end = i + 2;
    while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) ++end;
    return { type: "table", end };
  }
  let end = i + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end]) && !kBullet.test(lines[end]) && !isTable(lines, end)) ++end;
  return { type: "paragraph", end };
}

function sameList(line, ordered) {
  const bullet = kBullet.exec(line);
  return bullet !== null && /\d/.test(bullet[2]) === ordered && !kRule.test(line);
}

/** [{lines, block}] of the blocks on the top level. */
function splitBlocks(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) {
      ++i;
      continue;
    }
    const block = blockAt(lines, i);
    blocks.push({ block, lines: lines.slice(i, block.end) });
    i = block.end;
  }
  return blocks;
}

function renderBlocks(lines, depth) {
  if (depth > kMaxDepth) return lines.every(isBlank) ? [] : [paragraph(lines)];
  return splitBlocks(lines).map(({ block, lines: own }) => renderBlock(block, own, depth));
}

function renderBlock(block, lines, depth) {
  switch (block.type) {
    case "code": return codeBlock(block.language, block.text.join("\n"));
    case "heading": return make(`h${Math.min(block.level + 1, 6)}`, {}, inline(headingText(lines[0], block.level)));
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, renderBlocks(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1));
    case "list": return list(block, lines, depth);
    case "table": return table(lines);
    default: return paragraph(lines);
  }
}

const joined = (lines) => lines.map((line) => line.trim()).join("\n");
const paragraph = (lines) => make("p", {}, inline(joined(lines)));

function headingText(line, level) {
  const text = line.trim().slice(level).trim();
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") --end;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text;
}

function list(block, lines, depth) {
  const node = make(block.ordered ? "ol" : "ul");
  if (block.ordered && block.start !== 1) node.start = block.start;
  let item = null;
  const flush = () => {
    if (item === null) return;
    const [first] = splitBlocks(item);
    const rest = first ? item.slice(first.lines.length) : [];
    // A list whose items are single paragraphs stands close together.
    const close = first?.block.type === "paragraph" && !rest.some(isBlank);
    node.append(close ? make("li", {}, inline(joined(first.lines)), renderBlocks(rest, depth + 1)) : make("li", {}, renderBlocks(item, depth + 1)));
  };
  let indent = 0;
  for (const line of lines) {
    const bullet = kBullet.exec(line);
    const begins = bullet && (item === null || (bullet[1].length < indent && sameList(line, block.ordered)));
    if (begins) {
      flush();
      indent = bullet[0].length - (bullet[3].length > 4 ? bullet[3].length - 1 : 0) + (bullet[3] === "" ? 1 : 0);
      item = [line.slice(indent)];
      continue;
    }
    let begin = 0;
    while (begin < indent && line[begin] === " ") ++begin;
    item.push(line.slice(begin));
  }
  flush();
  return node;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const parts = [""];
  let inCode = false;
  for (let i = 0; i < text.length; ++i) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      parts[parts.length - 1] += "|";
      ++i;
    } else if (text[i] === "|" && !inCode) {
      parts.push("");
    } else {
      if (text[i] === "`") inCode = !inCode;
      parts[parts.length - 1] += text[i];
    }
  }
  return parts.map((part) => part.trim());
}

function table(lines) {
  const alignments = cells(lines[1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
  const head = cells(lines[0]);
  const row = (tag, texts) => make("tr", {}, head.map((_, i) => make(tag, { className: alignments[i] ?? "" }, inline(texts[i] ?? ""))));
  const body = lines.slice(2).map((line) => row("td", cells(line)));
  return make("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" },
    make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, body)));
}

function codeBlock(language, text) {
  const head = make("div", { className: "code-head" }, make("span", { textContent: language.split(/\s/, 1)[0] }), copyButton("Copy the code", () => text));
  return make("div", { className: "code" }, head,
    make("pre", { tabIndex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, make("code", { textContent: text })));
}

// Inline

const isSpace = (c) => c === undefined || /\s/.test(c);
const isPunctuation = (c) => c !== undefined && /[\p{P}\p{S}]/u.test(c);
const kEscapable = /[!-/:-@[-`{-~]/;
const kUrlBegin = /^(?:https?:\/\/|mailto:)/i;
const kBareUrl = /^https?:\/\/[^\s<>"`]+/i;

/** An address that may be clicked on, or nothing. */
function safeUrl(text) {
  if (!kUrlBegin.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const anchor = (href, children) => make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);

/** The nodes of one paragraph's text. Emphasis as CommonMark has it: a list of pieces, where closing marks look back for their opening. */
function inline(text, inLink = false) {
  const head = { next: null, previous: null };
  let tail = head;
  const push = (piece) => {
    piece.previous = tail;
    piece.next = null;
    tail.next = piece;
    tail = piece;
  };
  let plain = "";
  const flush = () => {
    if (plain !== "") push({ node: document.createTextNode(plain) });
    plain = "";
  };
  const noCloser = new Set();  // lengths of backtick runs that do not occur again
  const lastBracket = text.lastIndexOf("]");
  for (let i = 0; i < text.length;) {
    const c = text[i];
    if (c === "\\" && i + 1 < text.length && kEscapable.test(text[i + 1])) {
      plain += text[i + 1];
      i += 2;
    } else if (c === "\n") {
      flush();
      push({ node: make("br") });
      ++i;
    } else if (c === "`") {
      const length = runLength(text, i);
      const end = noCloser.has(length) ? -1 : closingBackticks(text, i + length, length);
      if (end < 0) {
        noCloser.add(length);
        plain += text.slice(i, i + length);
        i += length;
      } else {
        flush();
        let code = text.slice(i + length, end).replaceAll("\n", " ");
        if (code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "") code = code.slice(1, -1);
        push({ node: make("code", { textContent: code }) });
        i = end + length;
      }
    } else if (!inLink && i < lastBracket && (c === "[" || (c === "!" && text[i + 1] === "["))) {
      const link = linkAt(text, c === "!" ? i + 1 : i);
      if (link) {
        flush();
        push({ node: anchor(link.href, inline(link.label || link.href, true)) });
        i = link.end;
      } else {
        plain += c;
        ++i;
      }
    } else if (!inLink && c === "<") {
      const end = text.slice(i, i + kMaxLabel).indexOf(">");
      const href = end > 0 ? safeUrl(text.slice(i + 1, i + end)) : null;
      if (href && !/\s/.test(text.slice(i, i + end))) {
        flush();
        push({ node: anchor(href, [text.slice(i + 1, i + end)]) });
        i += end + 1;
      } else {
        plain += c;
        ++i;
      }
    } else if (!inLink && (c === "h" || c === "H") && !/[\p{L}\p{N}]/u.test(text[i - 1] ?? " ") && kBareUrl.test(text.slice(i, i + 8) + "x")) {
      let url = kBareUrl.exec(text.slice(i, i + 2 * kMaxLabel))?.[0] ?? "";
      while (/[.,;:!?*_~'\]]$/.test(url) || (url.endsWith(")") && !url.includes("("))) url = url.slice(0, -1);
      const href = safeUrl(url);
      flush();
      if (href) push({ node: anchor(href, [url]) });
      else plain = c;
      i += href ? url.length : 1;
    } else if (c === "*" || c === "_" || (c === "~" && text[i + 1] === "~")) {
      const length = runLength(text, i);
      const before = text[i - 1], after = text[i + length];
      const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
      const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
      flush();
      push({
        mark: c, count: length, original: length,
        opens: left && (c !== "_" || !right || isPunctuation(before)),
        closes: right && (c !== "_" || !left || isPunctuation(after)),
      });
      i += length;
    } else {
      plain += c;
      ++i;
    }
  }
  flush();
  resolveEmphasis(head);
  const nodes = [];
  for (let piece = head.next; piece; piece = piece.next) nodes.push(piece.node ?? document.createTextNode(piece.mark.repeat(piece.count)));
  return nodes;
}

function runLength(text, i) {
  let end = i + 1;
  while (text[end] === text[i]) ++end;
  return end - i;
}

function closingBackticks(text, from, length) {
  for (let i = text.indexOf("`", from); i >= 0; i = text.indexOf("`", i)) {
    const run = runLength(text, i);
    if (run === length) return i;
    i += run;
  }
  return -1;
}

/** [label](address "title") whose bracket opens at i; the title is dropped. */
function linkAt(text, i) {
  let depth = 0;
  let end = i;
  const limit = Math.min(text.length, i + kMaxLabel);
  for (; end < limit; ++end) {
    if (text[end] === "\\") ++end;
    else if (text[end] === "[") ++depth;
    else if (text[end] === "]" && --depth === 0) break;
  }
  if (end >= limit || text[end + 1] !== "(") return null;
  let close = end + 2;
  let parentheses = 0;
  const last = Math.min(text.length, close + 2 * kMaxLabel);
  for (; close < last; ++close) {
    if (text[close] === "\n") return null;
    if (text[close] === "(") ++parentheses;
    else if (text[close] === ")" && parentheses-- === 0) break;
  }
  if (close >= last) return null;
  const href = safeUrl(text.slice(end + 2, close).trim().split(/\s/, 1)[0].replace(/^<|>$/g, ""));
  return href && { href, label: text.slice(i + 1, end), end: close + 1 };
}

/** Turns pairs of marks into elements. For each kind of closing mark it is remembered behind which piece no opening stands, so that nothing is
    looked for twice. */
function resolveEmphasis(head) {
  const bottoms = new Map();
  for (let closer = head.next; closer;) {
    if (!closer.mark || !closer.closes || closer.count === 0) {
      closer = closer.next;
      continue;
    }
    const kind = `${closer.mark}${closer.opens}${closer.original % 3}`;
    const bottom = bottoms.get(kind) ?? head;
    let opener = closer.previous;
    for (; opener !== bottom && opener !== head; opener = opener.previous) {
      if (opener.mark !== closer.mark || !opener.opens || opener.count === 0) continue;
      if (closer.mark === "~") {
        if (opener.count === closer.count) break;
        continue;
      }
      const odd = (closer.opens || opener.closes) && (opener.original + closer.original) % 3 === 0 &&
        (opener.original % 3 !== 0 || closer.original % 3 !== 0);
      if (!odd) break;
    }
    if (opener === bottom || opener === head) {
      bottoms.set(kind, closer.previous);
      closer = closer.next;
      continue;
    }
    const used = closer.mark === "~" ? closer.count : Math.min(2, opener.count, closer.count);
    const element = make(closer.mark === "~" ? "s" : used === 2 ? "strong" : "em");
    let depth = 0;
    for (let piece = opener.next; piece !== closer; piece = piece.next) {
      element.append(piece.node ?? document.createTextNode(piece.mark.repeat(piece.count)));
      depth = Math.max(depth, piece.depth ?? 0);
    }
    const piece = { node: element, depth: depth + 1, previous: opener, next: closer };
    opener.next = piece;
    closer.previous = piece;
    opener.count -= used;
    closer.count -= used;
    if (piece.depth > kMaxEmphasis) return;  // no text that a reader should see; what is left stays as it is written
    if (closer.count === 0) closer = closer.next;
  }
}

// A growing text

/** Shows a text in an element and follows as it grows: blocks that did not change keep their nodes, and with them selection and focus. */
export class MarkdownView {
  #element;
  #shown = [];  // {source, node}

  constructor(element) {
    this.#element = element;
    element.classList.add("markdown");
    element.dir = "auto";
  }

  show(text) {
    const blocks = splitBlocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
    let same = 0;
    while (same < blocks.length && same < this.#shown.length && this.#shown[same].source === sourceOf(blocks[same])) ++same;
    for (const { node } of this.#shown.splice(same)) node.remove();
    for (const entry of blocks.slice(same)) {
      const node = renderBlock(entry.block, entry.lines, 1);
      this.#element.append(node);
      this.#shown.push({ source: sourceOf(entry), node });
    }
  }
}

const sourceOf = (entry) => `${entry.block.type}\n${entry.lines.join("\n")}`;
