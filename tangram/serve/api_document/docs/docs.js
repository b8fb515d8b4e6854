/** Shows /openapi.json in Swagger UI, with the key and the theme that the chat page has, too. */

const [KEY, THEME] = ["tangram.key", "tangram.theme"];
// A stream without an end, which Swagger UI would read to its end before it shows anything.
const ENDLESS = "/v1/kv/events";
const form = document.getElementById("key");
const system = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const theme = localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light");
  document.documentElement.classList.toggle("dark-mode", theme === "dark");
}

/** In the place of the button that sends a request without an end. */
const NoEndlessRequest = () => ({
  wrapComponents: {
    execute: (Execute, { React }) => (props) =>
      React.createElement(
        ...(props.path === ENDLESS
          ? ["p", null, "This stream has no end: follow it with curl -N, or open the chat page."]
          : [Execute, props]),
      ),
  },
});

async function show() {
  const key = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const answer = await fetch("/openapi.json", { headers, credentials: "omit" });
  form.hidden = answer.ok;
  if (!answer.ok) {
    const { error } = await answer.json();
    document.getElementById("fault").textContent = key === null ? "" : error.message;
    return;
  }
  const viewer = window.SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#api",
    deepLinking: true,
    tryItOutEnabled: true,
    displayRequestDuration: true,
    defaultModelsExpandDepth: 0,
    docExpansion: "list",
    validatorUrl: null,
    plugins: [NoEndlessRequest],
    onComplete: () => key !== null && viewer.preauthorizeApiKey("key", key),
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, document.getElementById("value").value.trim());
  show();
});
system.addEventListener("change", applyTheme);
applyTheme();
show();
