/** Source of the engine under the texts: read when it is opened for the first time. */
import { loadData } from "./view.js";

export function showSources() {
  for (const details of document.querySelectorAll("[data-source]")) {
    details.addEventListener("toggle", () => show(details), { once: true });
  }
}

async function show(details) {
  const place = document.createElement("pre");
  place.tabIndex = 0;
  details.append(place);
  try {
    const sources = await loadData("sources");
    place.textContent = sources[details.dataset.source];
  } catch (error) {
    place.textContent = `No source: ${error.message}`;
  }
}
