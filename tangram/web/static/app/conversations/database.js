/** Conversations in this browser's IndexedDB; none of it is ever sent as such. */

const NAME = "tangram";
const STORE = "conversations";

function settle(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @returns {Promise<Database>} rejects where the browser keeps nothing (some private windows). */
export async function openDatabase() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  return new Database(await settle(opening));
}

class Database {
  #database;

  constructor(database) {
    this.#database = database;
  }

  #store(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }

  /** Every conversation, in no order. */
  all() {
    return settle(this.#store("readonly").getAll());
  }

  /** One conversation, or undefined. */
  get(id) {
    return settle(this.#store("readonly").get(id));
  }

  put(conversation) {
    return settle(this.#store("readwrite").put(conversation));
  }

  remove(id) {
    return settle(this.#store("readwrite").delete(id));
  }
}
