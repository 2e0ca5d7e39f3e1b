"""Draws `docs/rollouts.svg` again: `PYTHONPATH=tests python tests/support/draw_rollouts.py`."""

from __future__ import annotations

from pathlib import Path

from support.rollout_timeline import draw_svg

if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "rollouts.svg").write_text(draw_svg(), "utf-8")
