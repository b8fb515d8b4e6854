/** Preact, its hooks, and `html`: tagged templates instead of JSX. */
import { h, render, Fragment } from "../vendor/preact/preact.mjs";
import htm from "../vendor/htm/htm.mjs";

export {
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "../vendor/preact/hooks.mjs";
export { h, render, Fragment };
export const html = htm.bind(h);
