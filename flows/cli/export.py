"""Write the policy of a checkpoint as a Hugging Face folder: safetensors, config and tokenizer.

An export that is stored already is copied; otherwise the trainer ranks write one from the checkpoint.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.options import Commands, add_store, create_folder, parse_run_and_iteration

if TYPE_CHECKING:
    from roll_core.config.run import RunConfig


def add(commands: Commands) -> None:
    """Declare `roll export`."""
    parser = commands.add_parser(
        "export", help="write the policy of a checkpoint as a Hugging Face folder", description=__doc__
    )
    parser.add_argument(
        "checkpoint", metavar="RUN[@ITERATION]", help="for example quickstart-1@20; the newest checkpoint without @"
    )
    parser.add_argument("folder", metavar="FOLDER", help="must not exist yet, or be empty")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Copy the stored export of a checkpoint, or make it, into a folder that appears complete or not at all."""
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.checkpoints import download_files
    from roll_core.store.records.exports import find_export, manifest_to_export
    from roll_core.store.records.runs import find_run, read_config

    has_iteration = "@" in options.checkpoint
    run_id, iteration = parse_run_and_iteration(options.checkpoint) if has_iteration else (options.checkpoint, None)
    store_uri = absolute_uri(options.store)
    store = ObjectStore(store_uri)
    config = read_config(find_run(store, run_id))
    manifest = manifest_to_export(store, run_id, iteration)
    stored = find_export(store, manifest)
    with create_folder(Path(options.folder)) as folder:
        if stored is not None:
            download_files(store, stored, folder)
        else:
            _export_by_roles(config, run_id, manifest.iteration, store_uri, folder)
    print(f"the policy of {run_id}@{manifest.iteration} is in {options.folder}")
    return 0


def _export_by_roles(config: "RunConfig", run_id: str, iteration: int, store_uri: str, folder: Path) -> None:
    """Load the checkpoint into trainer ranks, which write the folder."""
    from flows.prefect_server import prefect_api

    with prefect_api(Path(config.work_dir)):
        from flows.export import export

        export(run_id, iteration, store_uri, str(folder))
