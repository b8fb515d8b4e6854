/** The key of a colour. */
import { html } from "./preact.js";

/** A square of a colour; without one it has that of nothing. */
export function Swatch({ colour }) {
  const paint = (element) => element && (element.style.background = colour ?? "");
  return html`<i class="swatch" aria-hidden="true" ref=${paint}></i>`;
}
