"""Reports about runs, computed from manifests, stage logs and traces: HTML pages, goodput, and the nightly verdict."""
