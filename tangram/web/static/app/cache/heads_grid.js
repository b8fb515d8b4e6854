/** Layers × heads: what the profile allows each head, and what it holds now. */
import { ChoicePicture } from "./canvas.js";
import { shareGround } from "./palette.js";

const GAP = 10;
const MOST_CELL = 22;
const LEAST_CELL = 2;

/**
 * Two grids, one below the other; a column is a layer, a row a head. A head is chosen by its
 * row = layer · heads + head.
 */
export class HeadsGrid extends ChoicePicture {
  #grids = [null, null];
  #keepers = null;

  constructor(canvas, frame, model, onHead) {
    super(canvas, frame, onHead);
    this.model = model;
    this.fit();
  }

  /** Each is one share in [0, 1] for each row, or null for none. */
  show(budget, held) {
    this.#grids = [budget, held];
    this.change();
  }

  /** Mark the heads that keep a token: true, false or null for each row; null marks none. */
  showKeepers(keepers) {
    this.#keepers = keepers;
    this.change();
  }

  fit() {
    const { layers, kv_heads: heads } = this.model ?? { layers: 1, kv_heads: 1 };
    const cell = Math.floor(this.frame.clientWidth / layers);
    this.cell = Math.min(MOST_CELL, Math.max(LEAST_CELL, cell));
    super.fit(2 * heads * this.cell + GAP);
  }

  paint(context) {
    context.clearRect(0, 0, this.width, this.height);
    this.#paintGrid(context, this.#grids[0], 0);
    const below = this.model.kv_heads * this.cell + GAP;
    if (this.#keepers === null) this.#paintGrid(context, this.#grids[1], below);
    else this.#paintKeepers(context, below);
  }

  #paintGrid(context, shares, top) {
    this.#eachCell((row, x, y) => {
      context.fillStyle = shares === null ? this.colours.unknown : shareGround(shares[row]);
      context.fillRect(x, top + y, this.cell - 1, this.cell - 1);
      if (row === this.chosen) this.#outline(context, x, top + y);
    });
  }

  #paintKeepers(context, top) {
    this.#eachCell((row, x, y) => {
      context.fillStyle = this.#keepers[row] ? this.colours.accent : this.colours.unknown;
      context.fillRect(x, top + y, this.cell - 1, this.cell - 1);
    });
  }

  #eachCell(visit) {
    const { layers, kv_heads: heads } = this.model;
    for (let layer = 0; layer < layers; layer += 1) {
      for (let head = 0; head < heads; head += 1) {
        visit(layer * heads + head, layer * this.cell, head * this.cell);
      }
    }
  }

  #outline(context, x, y) {
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x, y, this.cell - 1, this.cell - 1);
  }

  hit({ offsetX, offsetY }) {
    const { layers, kv_heads: heads } = this.model;
    const below = heads * this.cell + GAP;
    const y = offsetY >= below ? offsetY - below : offsetY;
    const [layer, head] = [Math.floor(offsetX / this.cell), Math.floor(y / this.cell)];
    return layer < layers && head >= 0 && head < heads ? layer * heads + head : null;
  }

  next(key) {
    const { layers, kv_heads: heads } = this.model;
    const step = { ArrowRight: heads, ArrowLeft: -heads, ArrowDown: 1, ArrowUp: -1 }[key];
    if (step === undefined) return null;
    const next = this.chosen === null ? 0 : this.chosen + step;
    return next >= 0 && next < layers * heads ? next : this.chosen;
  }
}
