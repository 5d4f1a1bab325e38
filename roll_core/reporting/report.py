"""Report page of a run, one self-contained HTML file: accuracy, reward and entropy curves, time per stage, config."""

import html
from collections.abc import Sequence

from roll_core.config.run import RunConfig, flat_config
from roll_core.types.manifest import Manifest

STAGES = ("warm_start", "collect", "prepare", "update_critic", "update", "publish", "evaluate", "checkpoint", "other")
"""Stages shown in charts, in the order of an iteration; `other` is the rest of the time."""
_COLOURS = ("#b0b7bf", "#2f6f9f", "#8fb8d0", "#7b2d26", "#c8553d", "#e0a458", "#588b5f", "#8d6a9f", "#c9c9c9")
COLOUR_OF = dict(zip(STAGES, _COLOURS, strict=True))
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 680, 240, 46, 28


def render_report(run_id: str, config: RunConfig, chain: Sequence[Manifest]) -> str:
    """Render the report page as HTML. The chain must contain iteration 0, with its evaluation."""
    trained = [m for m in chain if m.collected is not None]
    accuracy = [(m.iteration, m.evaluated.accuracy) for m in chain if m.evaluated is not None]
    reward = [(m.iteration, m.metrics["reward/mean"]) for m in trained]
    entropy = [(m.iteration, m.metrics["update/entropy"]) for m in trained if "update/entropy" in m.metrics]
    first, last = accuracy[0], accuracy[-1]
    return _PAGE.format(
        run_id=html.escape(run_id),
        headline=f"held-out accuracy {first[1]:.2f} &rarr; {last[1]:.2f} in {chain[-1].iteration} iterations",
        facts=_facts(config, chain, trained),
        accuracy=_line_chart("held-out accuracy (greedy)", accuracy, 1.0),
        reward=_line_chart("mean reward of rollouts", reward, 1.0),
        entropy=_line_chart("policy entropy (nats)", entropy, max((y for _, y in entropy), default=1.0)),
        stages=_stage_chart(trained),
        config="".join(
            f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in flat_config(config).items()
        ),
    )


def stage_seconds(manifest: Manifest) -> dict[str, float]:
    """Seconds of an iteration by stage. `other` is the control plane: Prefect, store, commit, tracking."""
    timings = {stage: manifest.timings.get(stage, 0.0) for stage in STAGES[:-1]}
    return timings | {"other": max(0.0, manifest.timings.get("wall", 0.0) - sum(timings.values()))}


def _facts(config: RunConfig, chain: Sequence[Manifest], trained: Sequence[Manifest]) -> str:
    wall = sum(m.timings["wall"] for m in trained)
    tokens = sum(m.collected.num_tokens for m in trained if m.collected is not None)
    facts = {
        "algorithm": config.algorithm.kind,
        "trajectories": f"{sum(m.collected.num_trajectories for m in trained if m.collected is not None):,}",
        "tokens generated": f"{tokens:,}",
        "seconds per iteration": f"{wall / max(1, len(trained)):.2f}",
        "tokens per second": f"{tokens / max(wall, 1e-9):,.0f}",
        "legs": str(len({m.leg for m in chain})),
        "seed": str(config.seed),
    }
    return "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in facts.items())


def _line_chart(title: str, points: Sequence[tuple[int, float]], top: float) -> str:
    if not points:
        return ""
    last_x = max(points[-1][0], 1)
    path = " ".join(f"{_x(x, last_x):.1f},{_y(y, top):.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{_x(x, last_x):.1f}" cy="{_y(y, top):.1f}" r="3"><title>iteration {x}: {y:.3f}</title></circle>'
        for x, y in points
    )
    return _frame(title, f'<polyline points="{path}"/>{dots}', last_x, top, "{:.2f}")


def _stage_chart(trained: Sequence[Manifest]) -> str:
    if not trained:
        return ""
    top = max(m.timings["wall"] for m in trained)
    last_x = max(trained[-1].iteration, 1)
    width = max(1.0, (_WIDTH - _LEFT) / (last_x + 1) * 0.8)
    bars = []
    for manifest in trained:
        floor = 0.0
        for (stage, seconds), colour in zip(stage_seconds(manifest).items(), _COLOURS, strict=True):
            if seconds:
                y = _y(floor + seconds, top)
                bars.append(
                    f'<rect x="{_x(manifest.iteration, last_x) - width:.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{_y(floor, top) - y:.1f}" fill="{colour}"><title>{stage} {seconds:.3f} s</title></rect>'
                )
            floor += seconds
    shown = list(zip(STAGES, _COLOURS, strict=True))[1:]
    legend = "".join(f'<span><i style="background:{colour}"></i>{stage}</span> ' for stage, colour in shown)
    return _frame("seconds per iteration, by stage", "".join(bars), last_x, top, "{:.2f}") + f"<p class=legend>{legend}</p>"


def _frame(title: str, inside: str, last_x: int, top: float, label: str) -> str:
    lines = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(top * i / 4, top):.1f}" y2="{_y(top * i / 4, top):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(top * i / 4, top) + 4:.1f}" text-anchor="end">{label.format(top * i / 4)}</text>'
        for i in range(5)
    )
    ends = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">0</text><text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{last_x}</text>'
    )
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH + 8} {_HEIGHT}">'
        f"{lines}{ends}{inside}</svg></figure>"
    )


def _x(iteration: int, last: int) -> float:
    """Horizontal SVG coordinate of an iteration."""
    return _LEFT + (_WIDTH - _LEFT) * iteration / last


def _y(value: float, top: float) -> float:
    """Vertical SVG coordinate of a value in a chart from 0 to `top`."""
    return (_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - 10) * value / (top or 1.0)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{run_id}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1120px;margin:2rem auto;padding:0 1.5rem}}
h1{{margin:0;font-size:1.2rem;color:#666;font-weight:500}} h2{{margin:.1rem 0 1rem;font-size:1.8rem}}
.facts{{display:flex;flex-wrap:wrap;gap:1rem 2.2rem;margin-bottom:1.2rem}} .facts b{{display:block;font-size:1.25rem}}
.facts span{{color:#666;font-size:.85rem}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:1.4rem}}
figure{{margin:0}} figcaption{{font-weight:600;margin-bottom:.2rem}} svg{{width:100%}} svg line{{stroke:#e3e3e3}}
svg text{{font-size:11px;fill:#777}} polyline{{fill:none;stroke:#2f6f9f;stroke-width:2}} circle{{fill:#2f6f9f}}
.legend{{font-size:.85rem;color:#555;margin:.2rem 0}}
.legend span{{white-space:nowrap}} .legend i{{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .9em}}
details{{margin-top:1.5rem}} td{{padding:.05rem .8rem .05rem 0;font-size:.85rem;font-family:ui-monospace,monospace}}
</style><h1>{run_id}</h1><h2>{headline}</h2><div class="facts">{facts}</div>
<div class="charts">{accuracy}{reward}<div>{stages}</div>{entropy}</div>
<details><summary>config</summary><table>{config}</table></details></html>
"""
