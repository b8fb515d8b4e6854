/** State that several views read. */
import { useEffect, useState } from "./preact.js";

/** A value and those who want to know when it changes. */
export class Store {
  #listeners = new Set();

  /** @param {object} value is never changed in place. */
  constructor(value) {
    this.value = value;
  }

  /** Replace the fields of `changes`; listeners are called at once. */
  set(changes) {
    this.value = { ...this.value, ...changes };
    for (const listener of [...this.#listeners]) listener(this.value);
  }

  /** @returns {() => void} ends the subscription. */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/**
 * What `select` takes of a store; the component renders again when that changes.
 * @template T
 * @param {Store} store
 * @param {(value: any) => T} select
 * @returns {T}
 */
export function useStore(store, select = (value) => value) {
  const [chosen, choose] = useState(() => select(store.value));
  useEffect(() => {
    const take = (value) => choose(() => select(value));
    take(store.value);
    return store.subscribe(take);
  }, [store]);
  return chosen;
}
