"""Timeline page, one self-contained HTML file: activity of trainer, engines and graders on one time axis.

All counting is done in Python: the page holds one or two polygons per lane, however many attempts there are. The x axis is
seconds since the first event; zooming only changes which part of it is shown.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from roll_core.reporting.activity import (
    Activity,
    Interval,
    Percentiles,
    StageSpan,
    StepFunction,
    count_over_time,
    engine_intervals,
    grading_intervals,
    iterations_of,
    queue_intervals,
    ready_group_intervals,
    rows_without_overlap,
    stage_spans,
    summarise,
)
from roll_core.reporting.report import COLOUR_OF, STAGES
from roll_core.reporting.stage_log import StageEvent
from roll_core.types.trace import AttemptTrace, Fate

COLUMNS = 2400
"""Most steps drawn in a lane. A lane with more is downsampled to this many columns: finer than an unzoomed screen."""
MEAN_BAR_CHARACTERS = 190
"""Characters that fit side by side in the bar of the mean iteration; labels that do not fit are shown on hovering."""
MAX_TALL_ENGINES = 8
"""Most engines whose lanes have full height; with more, each has half."""
RUNNING, WASTED, GRADING, QUEUED, READY = (COLOUR_OF["collect"], "#d9a09a", "#8d6a9f", "#b0b7bf", "#588b5f")


@dataclass(frozen=True)
class Area:
    """Count over time, drawn as a filled area in a lane."""

    counts: StepFunction
    colour: str


@dataclass(frozen=True)
class Lane:
    """Row of the timeline, such as an engine."""

    name: str
    description: str
    """Meaning of the counts, shown below the name."""
    areas: tuple[Area, ...]
    """Areas from back to front; the page shows the count of the first."""
    top: int
    """Count at full height."""
    height: int = 52
    """Pixels."""


def timeline_html(stages: Sequence[StageEvent], traces: Sequence[AttemptTrace], title: str) -> str:
    """Render the timeline page as HTML. Lanes of stages or traces are left out if there are none."""
    spans = stage_spans(stages)
    activity = summarise(spans, traces)
    begin, end = _extent(spans, traces)
    iterations = iterations_of(spans)
    marks = "".join(f'<span data-at="{at - begin:.3f}">{number}</span>' for number, (at, _) in iterations.items())
    boundaries = "".join(f"M{at - begin:.3f} 0V1" for at, _ in iterations.values())
    lanes = "".join(_lane(lane, begin, end) for lane in lanes_of(traces))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}: timeline</title>
<style>{_STYLE}</style>
<h1>{html.escape(title)}</h1><h2>{_headline(activity)}</h2><div class="facts">{_facts(activity)}</div>
<div class="mean">{_mean_iteration(activity)}</div><p class="legend">{_legend(spans, traces)}</p>
<div class="strip" id="marks">{marks}</div>
<div id="chart" data-seconds="{end - begin:.3f}">{_stage_lane(spans, begin, end)}{lanes}<div class="over">
<svg viewBox="0 0 {end - begin:.3f} 1" preserveAspectRatio="none"><path d="{boundaries}"/></svg><div id="pointer"></div>
</div></div><div class="strip" id="ticks"></div>
<p class="hint">seconds; numbers above the lanes are iterations; wheel: zoom, drag: move, double click: all of it</p>
<script>{_SCRIPT}</script></html>
"""


def lanes_of(traces: Sequence[AttemptTrace]) -> list[Lane]:
    """Build the lanes of attempts in the order they pass them: queue, engines, graders, buffer. Empty without traces."""
    if not traces:
        return []
    running = {name: count_over_time(intervals) for name, intervals in engine_intervals(traces).items()}
    trained = engine_intervals(trace for trace in traces if trace.fate is Fate.TRAINED)
    peak = max((counts.peak for counts in running.values()), default=1)
    engines = [
        Lane(
            name,
            "attempts running",
            (Area(counts, WASTED), Area(count_over_time(trained.get(name, [])), RUNNING)),
            peak,
            height=52 if len(running) <= MAX_TALL_ENGINES else 26,
        )
        for name, counts in running.items()
    ]
    queued = count_over_time(interval for trace in traces for interval in queue_intervals(trace))
    grading, ready = count_over_time(grading_intervals(traces)), count_over_time(ready_group_intervals(traces))
    return [
        Lane("queue", "attempts without an engine", (Area(queued, QUEUED),), queued.peak),
        *engines,
        Lane("graders", "attempts being graded", (Area(grading, GRADING),), grading.peak),
        Lane("buffer", "groups ready to train on", (Area(ready, READY),), ready.peak),
    ]


def _extent(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> Interval:
    """Interval of everything drawn."""
    begins = [*(span.begin for span in spans), *(trace.drawn_at for trace in traces)]
    ends = [*(span.end for span in spans), *(trace.consumed_at for trace in traces)]
    return (min(begins), max(ends)) if begins else (0.0, 1.0)


# -------------------------------------------------------------------------------------------------- above the lanes
def _headline(activity: Activity) -> str:
    if not activity.num_iterations:
        return f"engines busy {activity.engines_busy:.0%} of the time"
    return (
        f"{_seconds(activity.iteration_seconds)} per iteration: the trainer computes {activity.trainer_busy:.0%} of the "
        f"time, engines are busy {activity.engines_busy:.0%}"
    )


def _facts(activity: Activity) -> str:
    wasted = sum(activity.wasted_tokens.values()) / max(1, activity.num_tokens)
    by_fate = ", ".join(f"{fate} {tokens:,}" for fate, tokens in sorted(activity.wasted_tokens.items()))
    facts = {
        f"mean of {activity.num_iterations} iterations": _seconds(activity.iteration_seconds),
        "trainer computes": f"{activity.trainer_busy:.0%}",
        "bubble: it waits": f"{activity.bubble:.0%}",
        "engines busy": f"{activity.engines_busy:.0%}",
        "attempts running per engine": f"{activity.mean_running:.1f}",
        "attempt seconds p50 / p90 / p99": _percentiles_text(activity.attempt_seconds, "{:.3g}"),
        "attempt tokens p50 / p90 / p99": _percentiles_text(activity.attempt_tokens, "{:,.0f}"),
        f"tokens wasted{': ' + by_fate if by_fate else ''}": f"{wasted:.1%}",
    }
    if activity.staleness is not None:
        facts["staleness p50 / p90 / p99"] = _percentiles_text(activity.staleness, "{:.0f}")
    return "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in facts.items())


def _percentiles_text(values: Percentiles, shown: str) -> str:
    return " / ".join(shown.format(value) for value in (values.p50, values.p90, values.p99))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _mean_iteration(activity: Activity) -> str:
    """Render the stages of the mean iteration as one bar, with widths in proportion to their seconds."""
    if not activity.stage_seconds:
        return ""
    rest = max(0.0, activity.iteration_seconds - sum(activity.stage_seconds.values()))
    whole = rest + sum(activity.stage_seconds.values())
    order = {stage: place for place, stage in enumerate(STAGES)}
    parts = sorted(activity.stage_seconds.items(), key=lambda part: order.get(part[0], len(order)))
    return "".join(
        f'<div style="flex:{seconds:.4f};background:{_colour(stage)}" class="{stage}" '
        f'title="{stage} {_seconds(seconds)}">{label if len(label) < MEAN_BAR_CHARACTERS * seconds / whole else ""}</div>'
        for stage, seconds in [*parts, ("between", rest)]
        for label in [f"{stage} {_seconds(seconds)}"]
        if seconds > 0
    )


def _colour(stage: str) -> str:
    return COLOUR_OF.get(stage, COLOUR_OF["other"])


def _legend(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> str:
    seen = {span.stage for span in spans if span.end > span.begin}
    entries = [(stage, "collect: waits for rollouts" if stage == "collect" else stage) for stage in STAGES if stage in seen]
    entries += [("commit", "commit")] if "commit" in seen else []
    shown = "".join(
        f'<span><i class="{stage}" style="background:{_colour(stage)}"></i>{description}</span>'
        for stage, description in entries
    )
    if traces:
        shown += f'<span><i style="background:{RUNNING}"></i>running, trained on</span>'
        shown += f'<span><i style="background:{WASTED}"></i>running, wasted (aborted, filtered, failed)</span>'
    return shown


# -------------------------------------------------------------------------------------------------- lanes
def _stage_lane(spans: Sequence[StageSpan], begin: float, end: float) -> str:
    if not spans:
        return ""
    rows = rows_without_overlap(spans)
    bars = "".join(
        f'<rect class="{span.stage}" x="{span.begin - begin:.3f}" y="{row + 0.06}" width="{span.end - span.begin:.3f}" '
        f'height="0.88" fill="{_colour(span.stage)}">'
        f"<title>{html.escape(span.name)}: {_seconds(span.end - span.begin)}, from {span.begin - begin:.2f} s</title></rect>"
        for row, stages in enumerate(rows)
        for span in stages
    )
    return (
        f'<div class="lane" style="height:{40 * len(rows)}px"><div class="label"><b>trainer</b><span>stages</span></div>'
        f'<svg viewBox="0 0 {end - begin:.3f} {len(rows)}" preserveAspectRatio="none">{bars}</svg></div>'
    )


def _lane(lane: Lane, begin: float, end: float) -> str:
    top = max(1, lane.top)
    polygons = "".join(
        f'<polygon fill="{area.colour}" points="{_points(area.counts, begin, end, top)}"/>' for area in lane.areas
    )
    return (
        f'<div class="lane" style="height:{lane.height}px"><div class="label"><b>{html.escape(lane.name)}</b>'
        f'<span>{html.escape(lane.description)}</span><em data-peak="{lane.areas[0].counts.peak}">peak '
        f"{lane.areas[0].counts.peak}</em></div>"
        f'<svg viewBox="0 0 {end - begin:.3f} {top}" preserveAspectRatio="none" data-top="{top}">{polygons}</svg></div>'
    )


def _points(counts: StepFunction, begin: float, end: float, top: int) -> str:
    """Corners of the polygon of a step function. SVG y coordinates grow downward."""
    drawn = counts if len(counts.times) <= COLUMNS else counts.downsampled((begin, end), COLUMNS)
    corners = [f"{max(0.0, drawn.times[0] - begin):.3f},{top}"]
    level = 0.0
    for time, after in zip(drawn.times.tolist(), drawn.levels.tolist(), strict=True):
        if after != level:
            corners.append(f"{time - begin:.3f},{top - level:g}")
            corners.append(f"{time - begin:.3f},{top - after:g}")
            level = after
    return " ".join(corners)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1500px;margin:2rem auto;padding:0 1.5rem}
h1{margin:0;font-size:1.2rem;color:#666;font-weight:500} h2{margin:.1rem 0 1rem;font-size:1.6rem;line-height:1.25}
.facts{display:flex;flex-wrap:wrap;gap:.8rem 2rem;margin-bottom:1.2rem} .facts b{display:block;font-size:1.15rem}
.facts span{color:#666;font-size:.85rem}
.mean{display:flex;gap:1px;height:1.7rem;margin-bottom:1.1rem;border-radius:3px;overflow:hidden}
.mean div{color:#fff;font-size:.8rem;line-height:1.7rem;padding-left:.4rem;overflow:hidden;white-space:nowrap;min-width:0;
box-sizing:border-box;text-shadow:0 0 2px #0003}
.mean .collect,i.collect{background:#d5e2ec!important;color:#2f6f9f;text-shadow:none} rect.collect{fill:#d5e2ec}
.legend{font-size:.85rem;color:#555;margin:.2rem 0 .8rem} .legend span{white-space:nowrap;margin-right:1.1em}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
#chart{position:relative;user-select:none} .lane{display:flex;border-top:1px solid #ececec}
.lane:last-of-type{border-bottom:1px solid #ececec}
.label{overflow:hidden;width:190px;flex:none;box-sizing:border-box;
padding:.3rem .6rem .3rem 0;line-height:1.25;position:relative}
.label b{display:block;font-size:.9rem} .label span{color:#777;font-size:.75rem}
.label em{position:absolute;right:.8rem;top:.35rem;font-style:normal;font-size:.8rem;color:#555;
font-variant-numeric:tabular-nums} .label em.now{color:#000;font-weight:600}
.lane svg{flex:1;min-width:0;height:100%;background:#fafafa;display:block} polygon,rect{shape-rendering:geometricPrecision}
.over{position:absolute;left:190px;right:0;top:0;bottom:0;pointer-events:none}
.over svg{position:absolute;width:100%;height:100%}
.over path{stroke:#0003;stroke-width:1;vector-effect:non-scaling-stroke}
#pointer{position:absolute;top:0;bottom:0;width:1px;background:#222;display:none}
.strip{position:relative;height:1.3rem;margin-left:190px;font-size:.78rem;color:#777}
.strip span{position:absolute;white-space:nowrap} #ticks span{transform:translateX(-50%)} #marks span{padding-left:.25em}
.hint{color:#999;font-size:.8rem;margin:.6rem 0 0 190px}
"""
_SCRIPT = """
const chart = document.getElementById("chart"), whole = +chart.dataset.seconds;
const pointer = document.getElementById("pointer");
const svgs = [...chart.querySelectorAll("svg")], over = chart.querySelector(".over");
const marks = document.getElementById("marks"), ticks = document.getElementById("ticks");
const lanes = [...chart.querySelectorAll("svg[data-top]")].map(svg => ({
  top: +svg.dataset.top, says: svg.parentNode.querySelector("em"),
  points: svg.querySelector("polygon").getAttribute("points").split(" ").map(p => p.split(",").map(Number))}));
let from = 0, span = whole;
function draw() {
  from = Math.max(0, Math.min(from, whole - span));
  for (const svg of svgs) svg.setAttribute("viewBox", `${from} 0 ${span} ${svg.viewBox.baseVal.height}`);
  const width = over.clientWidth, x = at => (at - from) / span * width;
  const apart = width * whole / span / Math.max(1, marks.children.length);
  const each = [1, 2, 5, 10, 20, 50, 100, 200, 500].find(k => k * apart >= 34) || 1000;
  for (const mark of marks.children) {
    const at = x(+mark.dataset.at);
    mark.style.display = at >= -1 && at <= width && +mark.textContent % each === 0 ? "" : "none";
    mark.style.left = at + "px";
  }
  const rough = span / 10, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= rough), digits = Math.max(0, -Math.floor(Math.log10(step)));
  ticks.textContent = "";
  for (let k = Math.ceil(from / step); k * step <= from + span; k++) {
    const tick = document.createElement("span");
    tick.textContent = (k * step).toFixed(digits); tick.style.left = x(k * step) + "px"; ticks.append(tick);
  }
}
function timeAt(event) {
  const box = over.getBoundingClientRect();
  return from + span * (event.clientX - box.left) / box.width;
}
function valueAt(lane, time) {
  let low = 0, high = lane.points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.points[middle][0] <= time) low = middle + 1; else high = middle;
  }
  return low ? Math.round((lane.top - lane.points[low - 1][1]) * 10) / 10 : 0;
}
chart.addEventListener("wheel", event => {
  event.preventDefault();
  const time = timeAt(event), next = Math.min(whole, Math.max(whole / 5000, span * 1.25 ** Math.sign(event.deltaY)));
  from = time - (time - from) * next / span; span = next; draw();
}, {passive: false});
chart.addEventListener("dblclick", () => { from = 0; span = whole; draw(); });
function read(time) {
  pointer.style.display = time === null ? "none" : "block";
  pointer.style.left = (time - from) / span * 100 + "%";
  for (const lane of lanes) {
    lane.says.textContent = time === null ? "peak " + lane.says.dataset.peak : valueAt(lane, time);
    lane.says.classList.toggle("now", time !== null);
  }
}
chart.addEventListener("mousemove", event => {
  if (event.buttons & 1) { from -= event.movementX / over.clientWidth * span; draw(); }
  const time = timeAt(event);
  read(time >= from ? time : null);
});
chart.addEventListener("mouseleave", () => read(null));
addEventListener("resize", draw);
draw();
"""
