"""Parts of a layer outside attention in other forms: experts of few rows, and residual sums.

Experts are a layer of GPT-OSS-20B. `grouped_mm` is Transformers' form that serves. `batched_mm` is
its other one: as it is, and with Inductor's coordinate descent, which reads an expert's weights
inside one kernel instead of copying them. A residual sum follows a product of Qwen3-4B, and a norm
follows it. All forms must give the answer of the first before anything is timed. `--small` checks
tiny sizes on a CPU and times nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from bench.kernels.family import NO_DEVICE, RESULTS
from bench.kernels.sealing import REPLAYS, median_us
from bench.serving.competitors import MODELS
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.timing import ColdCache, WrongAnswer, relative_error

# By form: Transformers' name of it, and options of torch.compile.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped_mm": ("grouped_mm", {}),
    "batched_mm": ("batched_mm", {}),
    "batched_mm, one kernel": ("batched_mm", {"coordinate_descent_tuning": True}),
}
LARGEST_ERROR = 0.02  # of numbers in bfloat16, added in another order
WIDTH, INNER, QUERIES = 2560, 9728, 4096  # of Qwen3-4B

EXPERT_ROWS = 1, 2, 4, 8, 16, 64

Forms = dict[str, Callable[[], Tensor]]


def _normalize(h: Tensor, weight: Tensor) -> Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * weight


def build_experts(small: bool, device: torch.device) -> nn.Module:
    """Router and experts of one layer with random weights in bfloat16."""
    config: Any = GptOssConfig.from_pretrained(MODELS / "gpt-oss-20b")
    if small:
        config.hidden_size = config.intermediate_size = 64
    with device:
        layer: nn.Module = GptOssMLP(config).to(torch.bfloat16)  # type: ignore[no-untyped-call]
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    return layer.eval().requires_grad_(False)


def compile_experts(layer: nn.Module, config: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layer's answer [rows, hidden size] to x [1, rows, hidden size], by form."""

    def compile_form(kind: str, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        run = torch.compile(_Experts(layer), dynamic=True, options=options or None)

        def answer(x: Tensor) -> Tensor:
            config._experts_implementation = kind
            found: Tensor = run(x)
            return found

        return answer

    return {name: compile_form(*form) for name, form in EXPERTS.items()}


class _Experts(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found[0]


def forms_of_sums(rows: int, inner: int, width: int, device: torch.device) -> Forms:
    """A norm [rows, width] of a residual and a product over `inner`, by where they are added."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, inner, **options), torch.randn(rows, width, **options)
    weight = (torch.randn(width, inner, **options) / inner**0.5).t()
    gain, place = torch.ones(width, **options), residual.clone()
    sum_and_norm = torch.compile(lambda r, y: _normalize(r + y, gain), dynamic=True)
    add = torch.compile(lambda r, y: r + y, dynamic=True)
    normalize = torch.compile(lambda h: _normalize(h, gain), dynamic=True)

    def add_in_place() -> Tensor:
        # The same sum each time: the residual is put back, which is timed by itself.
        place.copy_(residual)
        return normalize(place.addmm_(x, weight))

    return {
        "sum and norm in one kernel": lambda: sum_and_norm(residual, x @ weight),
        "sum, then norm": lambda: normalize(add(residual, x @ weight)),
        "sum in the product, out of place": lambda: normalize(torch.addmm(residual, x, weight)),
        "sum in the product, in place": add_in_place,
        "a copy, to take off the line before": lambda: place.copy_(residual),
    }


def check(name: str, forms: Forms) -> dict[str, float]:
    """How far each form's answer is from the first one's; raises `WrongAnswer` if too far."""
    answers = {form: run().float() for form, run in forms.items() if not form.startswith("a copy")}
    expected = next(iter(answers.values()))
    errors = {form: relative_error(answer, expected) for form, answer in answers.items()}
    for form, error in errors.items():
        if error > LARGEST_ERROR:
            raise WrongAnswer(f"{name}, {form}: differs from the first form by {error:.3g}")
    return errors


def list_cases(small: bool, device: torch.device) -> dict[tuple[str, int], Callable[[], Forms]]:
    """What is measured: the forms of each part and number of rows."""
    layer = build_experts(small, device)
    config: Any = layer.experts.config  # type: ignore[union-attr]
    answers = compile_experts(layer, config)

    def ask(rows: int) -> Forms:
        x = torch.randn(1, rows, config.hidden_size, device=device).bfloat16()
        return {name: partial(answer, x) for name, answer in answers.items()}

    cases: dict[tuple[str, int], Callable[[], Forms]] = {
        ("experts", rows): partial(ask, rows) for rows in ((1, 2) if small else EXPERT_ROWS)
    }
    for rows in (32,) if small else (8192, 16384):
        for part, inner in (("out", QUERIES), ("down", INNER)):
            sizes = (rows, 48, 64) if small else (rows, inner, WIDTH)
            cases["residual, " + part, rows] = partial(forms_of_sums, *sizes, device)
    return cases


@torch.inference_mode()
def measure(small: bool, device: torch.device) -> list[dict[str, Any]]:
    """A row of figures for each part and size: errors, and µs of each form on a GPU."""
    torch.manual_seed(0)
    cold, found = ColdCache(device) if device.type == "cuda" else None, []
    for (part, rows), make in list_cases(small, device).items():
        forms = make()
        row: dict[str, Any] = {"part": part, "rows": rows, "error": check(part, forms)}
        if cold is not None:
            row["us"] = {form: median_us(run, cold) for form, run in forms.items()}
        found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, keep the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, checked and not timed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.small:
        for row in measure(True, torch.device("cpu")):
            print(row["part"], row["rows"], row["error"])
        return
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    rows = measure(False, torch.device("cuda"))
    table = Table(title=f"µs, cold L2, median of {REPLAYS} (least to most)")
    for column in ("part", "rows", "form", "µs"):
        table.add_column(column)
    for row in rows:
        for form, (middle, least, most) in row["us"].items():
            table.add_row(
                row["part"], str(row["rows"]), form, f"{middle:.1f} ({least:.1f}–{most:.1f})"
            )
    Console(width=120).print(table)
    content = {
        "command": "python -m bench.kernels.model_parts",
        "environment": environment(),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels_model_parts.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
