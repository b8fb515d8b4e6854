"""What the canvas of the painted text has drawn: the browser notes each token with its ground."""

from __future__ import annotations

import re
from typing import Any

# A draw begins with setTransform; a token's ground, if any, is filled just before its text.
SCRIPT = """
(() => {
  const proto = CanvasRenderingContext2D.prototype;
  const note = (name, before) => {
    const original = proto[name];
    proto[name] = function (...given) {
      if (this.canvas.closest(".text-map")) before(this, given);
      return original.apply(this, given);
    };
  };
  window.painted = [];
  window.paintedAt = [];
  let ground = null;
  note("setTransform", () => {
    window.painted = [];
    window.paintedAt.push(performance.now());
  });
  note("fillRect", (context, [x]) => (ground = { x, colour: context.fillStyle }));
  note("fillText", (context, [text, x]) => {
    window.painted.push([text, ground?.x === x ? ground.colour : null]);
    ground = null;
  });
})();
"""
Colour = tuple[int, int, int]


def spell(text: str) -> str:
    """How the page writes a token."""
    return re.sub(r"[\x00-\x1f\x7f]", "·", text.replace("\n", "⏎").replace("\t", "→")) or "·"


def painted_tokens(page: Any, tokens: list[str]) -> dict[int, Colour | None]:
    """Position → ground of every token of `tokens`, by scrolling through the painted text."""
    spelled, found = [spell(text) for text in tokens], {}
    frame = page.locator(".text-map")
    height = frame.evaluate("(e) => e.clientHeight")
    top, most = 0, frame.evaluate("(e) => e.scrollHeight - e.clientHeight")
    begin = 0
    while True:
        frame.evaluate("(e, top) => (e.scrollTop = top)", top)
        page.wait_for_timeout(80)
        drawn = page.evaluate("() => window.painted")
        texts = [text for text, _ in drawn]
        begin = next(
            at for at in range(begin, len(spelled)) if spelled[at : at + len(texts)] == texts
        )
        for at, (_, ground) in enumerate(drawn, begin):
            found[at] = None if ground is None else rgb(ground)
        if top >= most:
            return found
        top = min(top + height // 2, most)


def rgb(colour: str) -> Colour:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: Colour) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [part / 255 for part in colour]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def check_scale(shares: dict[int, float], painted: dict[int, Colour | None]) -> None:
    """Equal shares have one colour, a greater share a lighter one, and all of the heads yellow."""
    colours: dict[float, set[Colour | None]] = {}
    for position, share in shares.items():
        colours.setdefault(round(share, 6), set()).add(painted[position])
    assert all(len(each) == 1 for each in colours.values()), "one share has two colours"
    scale = [luminance(colours[share].pop()) for share in sorted(colours)]
    assert scale == sorted(scale) and len(set(scale)) == len(scale)
    assert all(painted[at] == (253, 231, 37) for at, share in shares.items() if share == 1)
