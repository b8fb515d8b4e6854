/** Copying, also outside HTTPS and the loopback, where browsers have no `navigator.clipboard`. */

/** @returns {Promise<void>} */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
