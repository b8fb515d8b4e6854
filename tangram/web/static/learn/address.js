/** The chapter that the address names stays in sight while the widgets above it are loaded. */

const ACTS = ["wheel", "touchstart", "pointerdown", "keydown"];

/** Widgets grow when their modules and data come, so the browser's own jump is made too early. */
export function keepChapterInSight() {
  const observer = new ResizeObserver(() => {
    const chapter = document.getElementById(location.hash.slice(1));
    chapter?.scrollIntoView({ behavior: "instant" });
  });
  const follow = () => observer.observe(document.querySelector("main"));
  // Whoever reloads, or comes back, is where they were.
  if (performance.getEntriesByType("navigation")[0]?.type === "navigate") follow();
  addEventListener("hashchange", follow);
  for (const act of ACTS) addEventListener(act, () => observer.disconnect(), { passive: true });
}
