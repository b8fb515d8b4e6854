// node check_math.mjs MATH.JS CASES.JSON: prints, as JSON, what math.js gives otherwise.

import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [, , math, cases] = process.argv;
const functions = await import(pathToFileURL(math).href);
const recorded = JSON.parse(await readFile(cases, "utf8"));

/** Whether `found` has all that `expected` has; numbers may differ by a relative error. */
function agrees(found, expected, tolerance) {
  if (typeof expected === "number") {
    const error = Math.abs(found - expected);
    return typeof found === "number" && error <= tolerance * Math.max(1, Math.abs(expected));
  }
  if (Array.isArray(expected)) {
    return (
      Array.isArray(found) &&
      found.length === expected.length &&
      expected.every((value, place) => agrees(found[place], value, tolerance))
    );
  }
  if (expected !== null && typeof expected === "object") {
    return (
      found !== null &&
      typeof found === "object" &&
      Object.entries(expected).every(([name, value]) => agrees(found[name], value, tolerance))
    );
  }
  return found === expected;
}

const wrong = [];
let checked = 0;
for (const [name, { tolerance, cases: list }] of Object.entries(recorded)) {
  for (const { arguments: given, result } of list) {
    const found = name in functions ? functions[name](...given) : undefined;
    checked += 1;
    if (!agrees(found, result, tolerance)) wrong.push({ name, given, found, result });
  }
}
const constants = (name) => typeof functions[name] !== "function";
const exported = Object.keys(functions).filter((name) => !constants(name));
console.log(JSON.stringify({ checked, exported, wrong: wrong.slice(0, 5) }));
