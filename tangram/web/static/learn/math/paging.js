// tangram/cache/manager.py and layout.py

import { countHeldPages } from "./size.js";

/**
 * Pages of several conversations that begin with the same tokens.
 * Each has `sharedTokens` and then `ownTokens` of its own. Only sealed chunks and full raw pages
 * are shared, so no page that is written has a second reader and none is copied.
 * `cached_tokens` is what a later conversation finds; it computes the rest of its prompt.
 */
export function sharePages(layout, conversations, sharedTokens, ownTokens) {
  const { chunk_tokens: chunk, page_tokens: page, groups } = layout;
  const tokens = sharedTokens + ownTokens;
  const [sealed, raw] = [Math.floor(tokens / chunk), tokens % chunk];
  const sharedChunks = Math.min(Math.floor(sharedTokens / chunk), sealed);
  const inTail = sharedChunks === sealed;
  const sharedRaw = inTail ? Math.floor((sharedTokens % chunk) / page) : 0;
  const held = countHeldPages(layout, sealed, raw);
  const shared = sharedChunks * layout.full_span_pages + sharedRaw * groups;
  return {
    separate_pages: conversations * held,
    shared_pages: shared,
    pages: shared + conversations * (held - shared),
    cached_tokens: sharedChunks * chunk + sharedRaw * page,
  };
}
