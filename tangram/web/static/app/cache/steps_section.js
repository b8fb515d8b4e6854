/** The timeline of the engine's last steps. */
import { count, seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../preact.js";
import { Swatch } from "../swatch.js";
import { PARTS, Timeline } from "./timeline.js";

export function StepsSection({ watch, model }) {
  const canvas = useRef();
  const frame = useRef();
  const [step, setStep] = useState(null);
  useEffect(() => {
    const timeline = new Timeline(canvas.current, frame.current, model.chunk_tokens, setStep);
    const show = () => timeline.show(watch.steps);
    show();
    const end = watch.on("steps", show);
    return () => {
      end();
      timeline.close();
    };
  }, [watch, model]);
  return html`<section aria-label="Steps">
    <h2>Steps of the engine</h2>
    <div class="timeline" ref=${frame}>
      <canvas
        ref=${canvas}
        tabindex="0"
        role="application"
        aria-label="The last 400 steps, a bar each, as high as its time; arrow keys choose one"
      ></canvas>
    </div>
    <ul class="counts">
      ${PARTS.map(([name, , colour]) => html`<li><${Swatch} colour=${colour} /> ${name}</li>`)}
    </ul>
    <p class="detail" role="status">
      ${step === null ? "The height is the time. The newest step is at the right." : describe(step)}
    </p>
  </section>`;
}

const describe = (step) =>
  [
    `Step ${step.n}: ${seconds(step.seconds)}`,
    `${count(step.decode_rows)} decode rows with ${count(step.decode_tokens)} tokens`,
    `${count(step.chunks)} chunks`,
    `${count(step.tail_tokens)} tail tokens`,
    `${count(step.moves)} moves`,
    step.drafted > 0 && `${count(step.accepted)} of ${count(step.drafted)} drafts accepted`,
  ]
    .filter(Boolean)
    .join(", ");
