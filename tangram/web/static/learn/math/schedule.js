// tangram/engine/schedule/scheduler.py, for prompts that one step computes whole

/**
 * The steps of a batch of at most `most` sequences; `answers[i]` tokens are generated for i.
 * Static batching admits only when nothing runs. Each step lists the requests that it serves.
 */
export function simulateSteps(answers, most, scheduling) {
  const waiting = answers.map((_, request) => request);
  const left = [...answers];
  let running = [];
  const steps = [];
  while (waiting.length || running.length) {
    if (scheduling === "continuous" || !running.length) {
      while (waiting.length && running.length < most) running.push(waiting.shift());
    }
    steps.push([...running]);
    for (const request of running) left[request] -= 1;
    running = running.filter((request) => left[request] > 0);
  }
  return steps;
}

/** The share of the batch's places that steps have used. */
export const fillShare = (steps, most) =>
  steps.reduce((sum, rows) => sum + rows.length, 0) / (steps.length * most);
