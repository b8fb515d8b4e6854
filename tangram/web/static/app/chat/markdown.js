/** Markdown of models as safe elements. */
import MarkdownIt from "../../vendor/markdown-it/markdown-it.mjs";
import DOMPurify from "../../vendor/dompurify/purify.mjs";
import { copyText } from "../clipboard.js";
import { highlight } from "./highlight.js";

// `html: false` shows tags as text; DOMPurify goes over the result all the same.
const markdown = new MarkdownIt({ html: false, linkify: true, highlight });
const PURIFY = {
  RETURN_DOM_FRAGMENT: true,
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["img", "style", "form", "input", "button", "audio", "video", "picture", "source"],
  FORBID_ATTR: ["style", "id", "name", "srcset"],
  ADD_ATTR: ["target"],
};

// The page asks no other host for anything: a picture is a link to it.
markdown.renderer.rules.image = (tokens, at) => {
  const escape = markdown.utils.escapeHtml;
  const source = tokens[at].attrGet("src") ?? "";
  return `<a href="${escape(source)}">${escape(tokens[at].content || source)}</a>`;
};

/** The policy of the page allows no style attributes: alignment becomes a class. */
function useClasses(tokens) {
  for (const token of tokens) {
    const side = token.attrGet("style")?.match(/text-align:(\w+)/)?.[1];
    if (side) token.attrs = [["class", `align-${side}`]];
  }
}

/** @returns {DocumentFragment} */
function renderTokens(tokens) {
  useClasses(tokens);
  const fragment = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, {}), PURIFY);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) addCopyButton(block);
  for (const table of fragment.querySelectorAll("table")) wrap(table, "table-frame");
  return fragment;
}

function wrap(element, name) {
  const frame = document.createElement("div");
  frame.className = name;
  frame.tabIndex = 0;
  element.replaceWith(frame);
  frame.append(element);
  return frame;
}

const COPIED_MS = 1500;

function addCopyButton(block) {
  block.tabIndex = 0; // long lines scroll, also by keyboard
  const frame = document.createElement("div");
  frame.className = "code-frame";
  block.replaceWith(frame);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this code");
  button.addEventListener("click", async () => {
    await copyText(block.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  frame.append(block, button);
}

/** Shows a text that grows. Blocks before the last are rendered once. */
export class MarkdownView {
  #element;
  #settled = "";
  #last = document.createElement("div");

  /** @param {HTMLElement} element its content is this view's */
  constructor(element) {
    this.#element = element;
    this.#clear();
  }

  #clear() {
    this.#settled = "";
    this.#element.replaceChildren(this.#last);
  }

  /**
   * Show `text`. While it grows, a block that another follows no longer changes.
   * @param {boolean} grows false renders the whole, so that references to later lines hold
   */
  show(text, grows) {
    if (!grows || !text.startsWith(this.#settled)) this.#clear();
    const rest = text.slice(this.#settled.length);
    const tokens = markdown.parse(rest, {});
    const begin = grows ? lastBlock(tokens) : 0;
    if (begin > 0) {
      this.#last.before(renderTokens(tokens.slice(0, begin)));
      const lines = rest.split("\n").slice(0, tokens[begin].map[0]);
      this.#settled += lines.map((line) => `${line}\n`).join("");
    }
    this.#last.replaceChildren(renderTokens(tokens.slice(begin)));
  }
}

/** Where the last block of the first level begins among `tokens`. */
function lastBlock(tokens) {
  for (let at = tokens.length - 1; at > 0; at -= 1) {
    if (tokens[at].level === 0 && tokens[at].nesting >= 0 && tokens[at].map) return at;
  }
  return 0;
}
