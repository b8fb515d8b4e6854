/** Numbers as people read them. */

const whole = new Intl.NumberFormat("en");

export const count = (value) => (value == null ? "–" : whole.format(Math.round(value)));

/** Binary multiples, as the rest of the project gives memory. */
export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)} %`);

/** The share that an answer's pages are of its KV cache without compression; why, where it is more than all. */
export function percentHeld({ kv_bytes: held, kv_bytes_uncompressed: whole }) {
  const reason = Math.round((100 * held) / whole) > 100 ? ", as pages and chunks of windows are held whole" : "";
  return `${percent(held / whole)}${reason}`;
}
export const rate = (value) => (value == null ? "–" : `${value.toFixed(1)} tokens/s`);
