/** Work that is done at most once a frame. */

const HIDDEN_MS = 250;

/**
 * A function that has `work` done before the next frame, however often it is called until then.
 * In a hidden tab, which has no frames, a timer does it.
 */
export function oncePerFrame(work) {
  let frame = null;
  let timer = null;
  const run = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    frame = timer = null;
    work();
  };
  return () => {
    if (frame !== null) return;
    frame = requestAnimationFrame(run);
    timer = setTimeout(run, HIDDEN_MS);
  };
}
