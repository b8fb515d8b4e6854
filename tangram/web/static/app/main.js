/** Starts the page. */
import { App } from "./app.js";
import { openDatabase } from "./conversations/database.js";
import { html, render } from "./preact.js";
import { followTheme } from "./theme.js";
import { Page } from "./page.js";

followTheme();
const database = await openDatabase().catch(() => null);
const app = new App(database);
addEventListener("pagehide", () => app.flush());
render(html`<${Page} app=${app} />`, document.getElementById("page"));
await app.start();
