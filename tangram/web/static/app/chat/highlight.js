/** Colours for code, of the languages that answers have most. */
import core from "../../vendor/highlight/core.js";
import bash from "../../vendor/highlight/languages/bash.js";
import c from "../../vendor/highlight/languages/c.js";
import cpp from "../../vendor/highlight/languages/cpp.js";
import css from "../../vendor/highlight/languages/css.js";
import diff from "../../vendor/highlight/languages/diff.js";
import go from "../../vendor/highlight/languages/go.js";
import java from "../../vendor/highlight/languages/java.js";
import javascript from "../../vendor/highlight/languages/javascript.js";
import json from "../../vendor/highlight/languages/json.js";
import markdown from "../../vendor/highlight/languages/markdown.js";
import python from "../../vendor/highlight/languages/python.js";
import rust from "../../vendor/highlight/languages/rust.js";
import sql from "../../vendor/highlight/languages/sql.js";
import typescript from "../../vendor/highlight/languages/typescript.js";
import xml from "../../vendor/highlight/languages/xml.js";
import yaml from "../../vendor/highlight/languages/yaml.js";

const LANGUAGES = {
  bash,
  c,
  cpp,
  css,
  diff,
  go,
  java,
  javascript,
  json,
  markdown,
  python,
  rust,
  sql,
  typescript,
  xml,
  yaml,
};
for (const [name, language] of Object.entries(LANGUAGES)) core.registerLanguage(name, language);

const MOST_CHARACTERS = 50_000;

/** HTML of `code`, escaped; "" has the caller escape it. Long code and other languages stay plain. */
export function highlight(code, language) {
  if (!core.getLanguage(language) || code.length > MOST_CHARACTERS) return "";
  return core.highlight(code, { language, ignoreIllegals: true }).value;
}
