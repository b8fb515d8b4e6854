/** Dark or light: as the system says, until the reader chooses. */

const CHOICE = "tangram.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export const currentTheme = () =>
  localStorage.getItem(CHOICE) ?? (system.matches ? "dark" : "light");

/** Put the theme on the document, now and whenever the system changes. */
export function followTheme() {
  const apply = () => (document.documentElement.dataset.theme = currentTheme());
  system.addEventListener("change", apply);
  apply();
}

export function switchTheme() {
  localStorage.setItem(CHOICE, currentTheme() === "dark" ? "light" : "dark");
  document.documentElement.dataset.theme = currentTheme();
}

/** Call `listener` after each change of the theme; returns what ends that. */
export function onTheme(listener) {
  const observer = new MutationObserver(listener);
  observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  return () => observer.disconnect();
}

/** The colours that canvases need, from the stylesheet: name without dashes to value. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "panel", "ink", "soft", "line", "accent", "unknown"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
