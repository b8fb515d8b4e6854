"""`tangram eval` and `tangram bench`, which `tangram` finds by their entry points."""

from __future__ import annotations

import typer

from tangram.cli.command import Command, rename_options
from tangram_lab.cli import ablation, bench, evaluate, fleet, naive, serving

ablation_settings = rename_options(batch="batch-requests")
serving.commands.command(cls=Command, context_settings=ablation_settings)(ablation.ablation)
bench.commands.command(cls=Command)(naive.naive)
bench.commands.command(cls=Command)(fleet.fleet)
bench.commands.add_typer(serving.commands, name="serving")

app = typer.Typer()
app.command("eval", cls=Command, context_settings=evaluate.RENAMED)(evaluate.evaluate)
app.add_typer(bench.commands, name="bench")
