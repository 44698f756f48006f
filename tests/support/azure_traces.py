"""Small files in the place of Azure's traces, for the loads like life."""

from pathlib import Path

from bench.serving.lifelike_cells import TRACES


def write_azure_traces(folder: Path) -> None:
    """Writes both traces: fifty requests with prompts of 20 to 69 tokens and answers of 3 to 6."""
    for file in TRACES.values():
        lines = "".join(f"2023-11-16 18:17:{i:02},{20 + i},{3 + i % 4}\n" for i in range(50))
        (folder / file).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
