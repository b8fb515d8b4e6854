// tangram/sizing/cache_size.py, tangram/sizing/kv_shape.py and the page counts of tangram/cache/layout.py

const GIB = 2 ** 30;
/** Bytes of an element. The engine has no 4-bit cache; a size is all that is given for it. */
export const ELEMENT_BYTES = { fp32: 4, bf16: 2, fp16: 2, fp8: 1, "4-bit": 0.5 };

/** Vectors of an entry: a key and a value; MLA stores one that is both, for all query heads. */
const entryVectors = (shape) => (shape.latent ? 1 : 2);
/** Elements that one layer stores for a token. */
export const layerElements = (shape) => entryVectors(shape) * shape.kv_heads * shape.head_dim;

const fullLayers = (shape) => shape.windows.filter((window) => window === null).length;
const windowTokens = (shape, tokens) =>
  shape.windows.reduce((sum, window) => sum + (window === null ? 0 : Math.min(tokens, window)), 0);

/**
 * The KV cache of one sequence, as `KVSize` computes it.
 * `shape`: kv_heads, head_dim, latent, windows.
 */
export function kvSize(shape, options) {
  const { context_tokens: tokens, dtype, retention, chunk_tokens: chunk } = options;
  const each = layerElements(shape);
  const layerBytes = each * ELEMENT_BYTES[dtype];
  const [chunks, tail] = [Math.floor(tokens / chunk), tokens % chunk];
  const sealed = chunks * chunk * fullLayers(shape) * each;
  const raw = tail * fullLayers(shape) + windowTokens(shape, tokens);
  const kept = Math.floor(retention * sealed) + raw * each;
  const layout = layoutOf(shape, options);
  return {
    context_tokens: tokens,
    bytes_per_token: shape.windows.length * layerBytes,
    uncompressed_bytes: (fullLayers(shape) * tokens + windowTokens(shape, tokens)) * layerBytes,
    compressed_bytes: kept * ELEMENT_BYTES[dtype],
    fp8_bytes: kept,
    page_bytes: pageBytes(shape, options),
    pages: countHeldPages(layout, chunks, tail),
    most_pages: mostPages(layout, tokens),
  };
}

function pageBytes(shape, options) {
  const entries = options.heads_per_page * options.page_tokens;
  return entries * entryVectors(shape) * shape.head_dim * ELEMENT_BYTES[options.dtype];
}

/** The page counts of a layout that keeps ρ in total. */
export function layoutOf(shape, options) {
  const { page_tokens: page, heads_per_page: heads, chunk_tokens: chunk, retention } = options;
  const chunkPages = chunk / page;
  const groups = Math.ceil((fullLayers(shape) * shape.kv_heads) / heads);
  const windowGroups = Math.ceil(shape.kv_heads / heads);
  const windows = shape.windows.filter((window) => window !== null);
  return {
    chunk_tokens: chunk,
    page_tokens: page,
    groups: groups + windows.length * windowGroups,
    full_span_pages: Math.max(groups, Math.floor(retention * groups * chunkPages)),
    window_span_pages: windows.length * windowGroups * chunkPages,
    window_chunks: Math.max(0, ...windows.map((one) => Math.max(1, Math.ceil((one - 1) / chunk)))),
  };
}

/** Pages held with so many sealed chunks and raw tokens: the footprint formula. */
export function countHeldPages(layout, sealed, raw) {
  const windowed = Math.min(sealed, layout.window_chunks) * layout.window_span_pages;
  const tail = Math.ceil(raw / layout.page_tokens) * layout.groups;
  return sealed * layout.full_span_pages + windowed + tail;
}

/** The most pages that a sequence is ever promised on its way to `tokens` tokens. */
export function mostPages(layout, tokens) {
  const chunk = layout.chunk_tokens;
  const [full, rest] = [Math.floor(tokens / chunk), tokens % chunk];
  const before = full ? countHeldPages(layout, full - 1, chunk) : 0;
  const growing = countHeldPages(layout, full, Math.min(chunk, rest));
  const overdue = full > layout.window_chunks ? layout.window_span_pages : 0;
  return Math.max(before, growing, countHeldPages(layout, full, 0) + overdue);
}

/** How many sequences of a `kvSize` fit into a memory beside the weights, as `fit` says. */
export function fit(size, weightBytes, memoryGib) {
  const cacheGib = memoryGib - weightBytes / GIB;
  const bytes = Math.floor(cacheGib * GIB);
  const sequences =
    cacheGib <= 0 ? 0 : Math.floor(Math.floor(bytes / size.page_bytes) / size.most_pages);
  return { cache_gib: cacheGib, sequences, tokens: sequences * size.context_tokens };
}
