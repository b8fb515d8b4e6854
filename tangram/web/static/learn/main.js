/** Starts the widgets of /learn. The text of the chapters is in the page itself. */
import { html, render } from "../app/preact.js";
import { followTheme, switchTheme } from "../app/theme.js";
import { keepChapterInSight } from "./address.js";
import { showSources } from "./sources.js";

followTheme();
keepChapterInSight();
document.getElementById("theme").addEventListener("click", switchTheme);
showSources();
// A running server has the other page; the static site has a folder with a slash at its end.
document.getElementById("talk").hidden = !location.pathname.endsWith("/learn");

for (const place of document.querySelectorAll("[data-widget]")) {
  import(`./chapters/${place.dataset.widget}.js`).then(
    ({ Widget }) => {
      place.textContent = "";
      render(html`<${Widget} />`, place);
      place.dataset.ready = "";
    },
    (error) => {
      place.textContent = `This widget could not be loaded: ${error.message}`;
    },
  );
}
