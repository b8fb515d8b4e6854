/** Preact, its hooks, and `html`: tagged templates instead of JSX. */
import { h, render, Fragment } from "../vendor/preact/preact.mjs";
import { useLayoutEffect, useRef } from "../vendor/preact/hooks.mjs";
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

/** A ref that gives its element the focus when it appears. */
export function useFocus() {
  const element = useRef(null);
  useLayoutEffect(() => element.current?.focus(), []);
  return element;
}
