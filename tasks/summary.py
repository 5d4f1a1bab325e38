"""summary: what a run achieved, as a record and as a page."""

from roll_core.reporting.report import render_report
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.store.records.summary import RunSummary, summary_of
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.services import run_dir


@state_changing("summary")
def summarize(run: RunRef) -> RunSummary:
    config = read_config(run)
    chain = read_chain(store_of(run), run.run_id)
    report = run_dir(run, config) / "report.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(render_report(run.run_id, config, chain))
    return summary_of(run.run_id, chain)
