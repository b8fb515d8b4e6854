/** Head-wise budgets, balanced decode, and shared prefixes: three panels. */
import { html, useState, withData } from "../view.js";
import { Balance } from "./compression/balance.js";
import { Budgets } from "./compression/budgets.js";
import { Packing } from "./compression/packing.js";

function Compression({ profiles: { profiles }, kernels }) {
  const [number, setNumber] = useState(0);
  const [retention, setRetention] = useState(profiles[0].kv_retention);
  const choose = (index) => {
    setNumber(index);
    setRetention(profiles[index].kv_retention);
  };
  const profile = profiles[number];
  return html`<div>
    <${Budgets}
      profiles=${profiles}
      number=${number}
      onChoose=${choose}
      retention=${retention}
      onRetention=${setRetention}
    />
    <${Balance} profile=${profile} retention=${retention} />
    <${Packing} kernels=${kernels} />
  </div>`;
}

export const Widget = withData(["profiles", "kernels"], Compression);
