// All formulas of the chapters. Each equals a function of the Python package: recorded cases
// (tests/fixtures/learn_cases.json) are checked on both sides.

export * from "./math/attention.js";
export * from "./math/balance.js";
export * from "./math/kernels.js";
export * from "./math/packing.js";
export * from "./math/paging.js";
export * from "./math/positions.js";
export * from "./math/profile.js";
export * from "./math/roofline.js";
export * from "./math/schedule.js";
export * from "./math/size.js";
export * from "./math/speculation.js";
