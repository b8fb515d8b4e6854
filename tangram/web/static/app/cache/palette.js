/** Colours. The scale of shares is viridis, which colour-blind readers can order, too. */

// Nine points of viridis; between them colours are interpolated.
const VIRIDIS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37],
];
const STEPS = 256;

/** @returns {[number, number, number]} red, green and blue of a share in [0, 1] */
export function shareColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((from, part) =>
    Math.round(from + (at - low) * (VIRIDIS[low + 1][part] - from)),
  );
}

const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** Relative luminance, as WCAG defines it. */
function luminance(colour) {
  const [red, green, blue] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// Where white and black have the same contrast.
const MIDDLE = Math.sqrt(1.05 * 0.05) - 0.05;
const scale = Array.from({ length: STEPS }, (_, step) => shareColour(step / (STEPS - 1)));
const grounds = scale.map(css);
const inks = scale.map((colour) => (luminance(colour) > MIDDLE ? "#000" : "#fff"));
const step = (share) => Math.round(Math.min(Math.max(share, 0), 1) * (STEPS - 1));

/** The colour of a share, and that of text on it. */
export const shareGround = (share) => grounds[step(share)];
export const shareInk = (share) => inks[step(share)];

/** A colour for conversation `number`; neighbours differ much. */
export const conversationColour = (number, { strong = 65, light = 48 } = {}) =>
  `hsl(${(number * 137.508) % 360} ${strong}% ${light}%)`;
