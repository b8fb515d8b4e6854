"""What canvases have drawn: the browser notes each token of the painted text with its ground, and
each rectangle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
# The rectangles that the newest drawing of each canvas has filled, by the class of its frame.
FILLS = """
(() => {
  const proto = CanvasRenderingContext2D.prototype;
  const { setTransform, fillRect } = proto;
  const frameOf = ({ canvas }) => canvas.parentElement?.className;
  window.filled = {};
  proto.setTransform = function (...given) {
    window.filled[frameOf(this)] = [];
    return setTransform.apply(this, given);
  };
  proto.fillRect = function (...box) {
    (window.filled[frameOf(this)] ??= []).push([...box, this.fillStyle]);
    return fillRect.apply(this, box);
  };
})();
"""
Colour = tuple[int, int, int]

_MOST_LOOKS = 50


@dataclass(frozen=True)
class Box:
    """A rectangle on a canvas, in pixels of the page."""

    x: float
    y: float
    width: float
    height: float
    colour: str

    def place(self, share: float = 0.5) -> dict[str, float]:
        """Where to point at it: so far along its diagonal."""
        return {"x": self.x + share * self.width, "y": self.y + share * self.height}


def filled_boxes(page: Any, frame: str) -> list[Box]:
    """What the canvas in the frame of class `frame` shows, in the order of drawing."""
    return [Box(*box) for box in page.evaluate("(frame) => window.filled[frame]", frame)]


def token_box(page: Any, tokens: list[str], at: int) -> Box:
    """The ground of token `at` of `tokens` after scrolling to it; its text must be unique, and all
    tokens beside it must have a ground.
    """
    share = at / len(tokens)
    page.locator(".text-map").evaluate(
        "(e, share) => (e.scrollTop = share * e.scrollHeight - e.clientHeight / 2)", share
    )
    page.wait_for_timeout(80)
    texts = [text for text, _ in page.evaluate("() => window.painted")]
    whole, *boxes = filled_boxes(page, "text-map")
    grounds = [box for box in boxes if box.height > 1]  # not the line below an uncompressed token
    assert len(grounds) == len(texts) and whole.x == whole.y == 0
    return grounds[texts.index(spell(tokens[at]))]


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
        begin, drawn = _read_painted(page, spelled, begin, top)
        for at, (_, ground) in enumerate(drawn, begin):
            found[at] = None if ground is None else rgb(ground)
        if top >= most:
            return found
        top = min(top + height // 2, most)


def _read_painted(
    page: Any, spelled: list[str], begin: int, top: int
) -> tuple[int, list[tuple[str, str | None]]]:
    """Where in `spelled`, from `begin` on, the tokens painted at scroll position `top` lie.

    Also these with their grounds. A busy machine may not have painted yet, or only half of it, or
    it may lay out the text anew meanwhile, which moves it.
    """
    frame = page.locator(".text-map")
    for _ in range(_MOST_LOOKS):
        frame.evaluate("(e, top) => (e.scrollTop = top)", top)
        page.wait_for_timeout(80)
        drawn = page.evaluate("() => window.painted")
        texts = [text for text, _ in drawn]
        for at in range(begin, len(spelled)):
            if spelled[at : at + len(texts)] == texts:
                return at, drawn
    raise AssertionError(f"{texts} is no part of the text from token {begin} on")


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
