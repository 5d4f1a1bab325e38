"""Mutations of every shipped config, taken through `roll plan` and the checks before `roll run`, in this process.

A mutation is a function of its seed. It is accepted, or refused by a UserError of one line below 2 kB. Anything else is a
finding: another exception, more than 5 CPU seconds, more than 1 GB. Nothing is started, and folders are temporary.
"""

import contextlib
import copy
import io
import os
import random
import resource
import signal
import string
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from flows import cli
from roll_core.config.load import ConfigFiles, load_config
from roll_core.config.reference import entries
from roll_core.config.run import flat_config
from roll_core.errors import RollError, UserError
from roll_core.planning.preflight import check_ready
from tests.support import ROOT

CONFIGS = sorted((ROOT / "configs").glob("runs/*.yaml"))
CPU_SECONDS = 5.0
"""Most CPU seconds of a mutation: a wait for a busy machine does not count."""
MEMORY = 10**9
"""Most bytes that the process may grow by while mutations run."""
LONGEST_REFUSAL = 2000
"""Longest refusal, in characters."""

KEYS = sorted({entry.key.partition("[")[0] for entry in entries() if entry.file == "run"})
"""Dotted keys of a run file; of keys inside lists, the list."""
TREES_OF_CONFIGS = {path: ConfigFiles().read(path) for path in CONFIGS}
VALUES = {path: flat_config(load_config(path)) for path in CONFIGS}
"""Text of every value by its dotted key, of each shipped config."""
ENUMS = {entry.key: [value for value, _ in entry.values] for entry in entries() if entry.values and "[" not in entry.key}
"""Allowed values of keys that have a set of them."""
NUMBERS = ["0", "-1", "1", "2", "3", "7", "1.5", "1e3", "1e9", "1e12", "1e18", "1e300", "1e400", ".inf", "-.inf", ".nan"]
NUMBERS += [str(2**31), str(2**63 - 1), str(2**63), str(10**400), "9" * 5000, "1_000", "010", "0x10", "-0.0", "1e-320"]
TEXTS = [
    "",
    "~",
    "null",
    "true",
    "false",
    "yes",
    "x",
    "a" * 300,
    "b" * 5000,
    "a/" * 2500,
    '"a\\0b"',
    '"\\ud800"',
    "2024-13-45",
]
TEXTS += [
    "'\u2028'",
    "../..",
    "file://host/x",
    "nowhere://x",
    "s3:",
    "http://",
    "{prompt} {question}",
    "0-99999999",
    "0-,1",
    "é",
]
TREES = [
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "[[[]]]",
    "[true]",
    "[~]",
    "{kind: x}",
    "{kind: [x]}",
    "{kind: }",
    "[" * 60,
    "{a: " * 60,
]
LINES = [
    "seed: 1\nseed: 2",
    "a: &a [*a]",
    "<<: {seed: 3}",
    "<<: 3",
    "? [a]\n: b",
    "--- \n...",
    "!!python/object:os.system x",
    "!!timestamp 2024-13-45",
    "\tseed: 1",
    "seed: *nowhere",
    "extends: nowhere.yaml",
    "extends: [1]",
    "extends: {a: b}",
    "\x07",
    "a: &a {k: 1}\nb: &b {<<: [*a, *a]}",
]


@dataclass(frozen=True)
class Mutation:
    """Mutated config: a file's text and overrides."""

    seed: int
    text: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        settings = "".join(f"  --set {override[:300]!r}\n" for override in self.overrides)
        return f"seed {self.seed}\n{settings}{self.text[:3000]}"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation."""

    mutation: Mutation
    kind: str
    """accepted, refused by the plan, refused by the checks, or the finding."""
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return not self.kind.startswith(("accepted", "refused"))


def mutate(seed: int) -> Mutation:
    """Mutate a shipped config; the seed decides how."""
    rng = random.Random(seed)
    path = rng.choice(CONFIGS)
    tree = copy.deepcopy(TREES_OF_CONFIGS[path])
    overrides = tuple(_override(path, rng) for _ in range(rng.choice((0, 1, 1, 1, 2, 3))))
    if not overrides or rng.random() < 0.15:
        for _ in range(rng.randint(1, 3)):
            _change(tree, rng)
    text = yaml.safe_dump(tree, sort_keys=False)
    if rng.random() < 0.1:
        text = rng.choice((_with_line, _with_bytes, _with_value))(text, rng)
    return Mutation(seed, text, overrides)


def _value(rng: random.Random) -> str:
    """YAML text of a value: a number, a text, a structure, or random characters."""
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(NUMBERS)
    if choice < 0.5:
        return str(rng.randint(-(10 ** rng.randint(0, 25)), 10 ** rng.randint(0, 25)))
    if choice < 0.75:
        return rng.choice(TEXTS)
    if choice < 0.9:
        return rng.choice(TREES)
    return "".join(rng.choices(string.printable, k=rng.randint(1, 30)))


def _override(path: Path, rng: random.Random) -> str:
    """Override of a key that the config has, by a value like its own; or of any key, by any value."""
    if rng.random() < 0.7:
        key, value = rng.choice(list(VALUES[path].items()))
        return f"{key}={_similar(key, value, rng)}"
    key = rng.choice(KEYS)
    if rng.random() < 0.1:
        key = rng.choice((key + ".x", key[:-1], key.upper(), key * 40, "", ".", "a.b", "extends"))
    return f"{key}={_value(rng)}"


def _similar(key: str, value: str, rng: random.Random) -> str:
    """Value of the same type: another member of an enum, the other truth value, a larger or smaller number."""
    if key in ENUMS:
        return rng.choice(ENUMS[key])
    if value in ("True", "False"):
        return rng.choice(("true", "false"))
    try:
        number = float(value) or 1.0
    except ValueError:
        return _value(rng)
    scaled = number * rng.choice((0.5, 1, 2, 3, 10, 1000, 1e6, 1e12))
    return str(scaled if "." in value or "e" in value else round(scaled))


def _change(tree: dict[str, Any], rng: random.Random) -> None:
    """Remove, replace or copy one value of a tree, at any depth."""
    while True:
        key = rng.choice(list(tree))
        if not isinstance(tree[key], dict) or not tree[key] or rng.random() < 0.3:
            break
        tree = tree[key]
    choice = rng.random()
    if choice < 0.3:
        del tree[key]
    elif choice < 0.4:
        tree[rng.choice((key + "s", "kind", "x"))] = tree[key]
    else:
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            tree[key] = yaml.safe_load(_value(rng))
    if not tree:
        tree["kind"] = "x"


def _with_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    lines.insert(rng.randint(0, len(lines)), rng.choice(LINES))
    return "\n".join(lines)


def _with_bytes(text: str, rng: random.Random) -> str:
    """Replace, remove or repeat a span of characters."""
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.randint(1, 20))
    middle = rng.choice(("", text[start:end] * rng.choice((2, 300)), "".join(rng.choices(string.printable, k=5)), "\u2028"))
    return text[:start] + middle + text[end:]


def _with_value(text: str, rng: random.Random) -> str:
    """Replace the value of one line."""
    lines = text.splitlines()
    number = rng.randrange(len(lines))
    lines[number] = lines[number].partition(":")[0] + ": " + _value(rng)
    return "\n".join(lines)


class TooSlow(BaseException):
    """A mutation took more than CPU_SECONDS. Not an Exception, so that no handler takes it for a failure of its own."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the CPU seconds of the block, and the memory of the process to MEMORY beyond what it has."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooSlow

    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, before[1]))
    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(mutation: Mutation, folder: Path) -> Outcome:
    """Take a mutation through `roll plan`, and if that accepts it through the checks before `roll run`."""
    path = folder / "run.yaml"
    path.write_text(mutation.text, errors="surrogatepass")
    for step, take in (("plan", _plan), ("checks", _check)):
        try:
            with limited():
                take(path, mutation.overrides)
        except UserError as error:
            return _judge_refusal(mutation, step, str(error))
        except MemoryError:
            return Outcome(mutation, f"{step}: more than {MEMORY / 1e9:.0f} GB")
        except TooSlow:
            return Outcome(mutation, f"{step}: more than {CPU_SECONDS:g} s", traceback.format_exc()[-2000:])
        except RollError as error:
            return Outcome(mutation, f"{step}: exit code {error.exit_code}", str(error))
        except Exception as error:  # whatever it is, a user would see a traceback
            return Outcome(mutation, f"{step}: {type(error).__name__}", traceback.format_exc()[-2000:])
    return Outcome(mutation, "accepted")


def _judge_refusal(mutation: Mutation, step: str, sentence: str) -> Outcome:
    if "\n" in sentence or not sentence:
        return Outcome(mutation, f"{step}: not one line", sentence)
    if len(sentence) > LONGEST_REFUSAL:
        return Outcome(mutation, f"{step}: more than {LONGEST_REFUSAL} characters", sentence)
    return Outcome(mutation, f"refused by the {step}", sentence)


def _plan(path: Path, overrides: tuple[str, ...]) -> None:
    """`roll plan`, as its own function: the parser would exit."""
    options = cli.build_parser().parse_args(["plan", str(path), *(f"--set={override}" for override in overrides)])
    with contextlib.redirect_stdout(io.StringIO()):
        options.command(options)


def _check(path: Path, overrides: tuple[str, ...]) -> None:
    """Checks before `roll run`, if all folders are in the working one. A store that is no folder needs a network."""
    config = load_config(path, overrides)
    inside = [
        config.work_dir,
        config.store.uri.removeprefix("file://"),
        (config.tracking.uri or "").removeprefix("sqlite:///"),
    ]
    if all(Path(each).is_relative_to(Path.cwd()) for each in inside if each):
        check_ready(config)


def run(number: int, first_seed: int = 0, report: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Judge mutations of consecutive seeds in a temporary working folder; `report` gets every outcome as it comes."""
    outcomes = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="roll-fuzz-") as folder:
        os.chdir(folder)
        try:
            for seed in range(first_seed, first_seed + number):
                outcomes.append(judge(mutate(seed), Path(folder)))
                report(outcomes[-1])
        finally:
            os.chdir(before)
    return outcomes


def main(number: int) -> None:
    """Judge mutations, print how many ended how, and exit with 1 if there is a finding; each is printed to be repeated."""
    started = time.monotonic()

    def report(outcome: Outcome) -> None:
        if outcome.is_finding:
            print(f"{outcome.kind}\n{outcome.mutation}\n{outcome.detail}\n", flush=True)

    outcomes = run(number, report=report)
    for kind, count in Counter(outcome.kind for outcome in outcomes).most_common():
        print(f"{count:>7,}  {kind}")
    findings = sum(outcome.is_finding for outcome in outcomes)
    print(f"{number:>7,}  configs in {time.monotonic() - started:.0f} s, {findings} findings")
    if findings:
        raise SystemExit(1)


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
