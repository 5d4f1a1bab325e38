"""Print the reference of config keys: what each key does, its unit, its default.

  roll config                                     the sections of a run file
  roll config training                            the keys of a section
  roll config training.optimizer.learning_rate    one key

With --json-schema, print the JSON schema of a run file instead. Editors that use the YAML language server (VS Code, Neovim,
Emacs and others) then complete and check the keys of a run file. Write the schema once:

  roll config --json-schema > roll-schema.json

and begin the run file with the comment line:

  # yaml-language-server: $schema=roll-schema.json
"""

import argparse
import json

from flows.cli.options import Commands


def add(commands: Commands) -> None:
    """Declare `roll config`."""
    parser = commands.add_parser(
        "config",
        help="print what the keys of a config mean, or the JSON schema of a run file for editors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("key", metavar="KEY", nargs="?", help="a section or a key, such as rollout or rollout.group_size")
    chosen.add_argument(
        "--json-schema",
        action="store_true",
        help="print the JSON schema of a run file; name it in the first line: # yaml-language-server: $schema=FILE",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the description of a key, of all sections, or the schema."""
    from roll_core.config.reference import describe, json_schema

    text = json.dumps(json_schema(), indent=2) if options.json_schema else describe(options.key)
    print(text)
    return 0
