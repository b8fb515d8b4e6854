/** Server-sent events from a response of `fetch`, which unlike EventSource can send a key. */

/**
 * The events of `body` until it ends.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{event: string, data: string}>} `event` is "message" where unnamed.
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // A line's end may come in two parts.
      rest = (rest + decoder.decode(value, { stream: true })).replaceAll("\r\n", "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = parseEvent(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** One block of lines; null for comments alone. */
export function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") event = value;
    if (name === "data") data.push(value);
  }
  return data.length === 0 ? null : { event, data: data.join("\n") };
}
