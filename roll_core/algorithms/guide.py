"""Generator of `docs/algorithms.md` from the catalogue and the configs: `make docs`. A test compares the file with it."""

import json

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roll_core.algorithms.catalog import TABLE, CatalogEntry
from roll_core.config.algorithm import correction, critic, policy_update, shaping, teachers
from roll_core.config.algorithm.policy_update import PolicyUpdate

SHARED = (
    ("shaping", shaping.ShapingConfig),
    ("shaping.normalize", shaping.NormalizeConfig),
    ("shaping.overlong", shaping.OverlongConfig),
    ("shaping.kl", shaping.KlRewardConfig),
    ("shaping.kl.adaptive", shaping.AdaptiveKlConfig),
    ("shaping.masks", shaping.MasksConfig),
    ("shaping.weights", shaping.SampleWeightsConfig),
    ("correction", correction.CorrectionConfig),
    ("correction.weighting", correction.WeightingConfig),
    ("correction.filters", correction.FilterConfig),
    ("kl_loss", policy_update.KlLossConfig),
    ("critic (ppo)", critic.CriticConfig),
    ("teachers of kind run (distillation)", teachers.RunTeacher),
    ("teachers of kind pretrained (distillation)", teachers.PretrainedTeacher),
)

HEAD = """\
<!-- Written by `make docs` from roll_core/algorithms/catalog.py and roll_core/config: change those, not this file. -->
# Algorithms

An algorithm is an advantage, an objective and the signals they need. Choose one with `algorithm.kind`; every knob below is a
key of the `algorithm` section, and a key that a method does not have is refused. `roll plan` shows which signals a run will
compute.

Notation: R what a trajectory earned, A advantage, pi policy, anchor the policy before the iteration's first optimizer step,
sampler the policy that produced the tokens, r = pi / anchor, sg[x] x without gradient. The loss is to be minimised.

Signals: *anchor* and *reference* logprobs, the full-vocabulary *divergence* from the reference, *teacher* logprobs, the
critic's *values*. The anchor is computed only for more than one optimizer step an iteration (`training.optimizer_steps`,
`training.epochs`);
with a single step the policy is its own anchor until it moves.
"""


def guide() -> str:
    """Text of the whole document."""
    parts = [HEAD, _overview(), *(_section(row) for row in TABLE), _shared(), _pairs()]
    return "\n".join(parts)


def _overview() -> str:
    lines = ["| kind | name | signals | use it when |", "|---|---|---|---|"]
    lines += [f"| [`{row.kind}`](#{row.kind}) | {row.name} | {_signals(row)} | {row.use_when} |" for row in TABLE]
    return "\n".join(lines) + "\n"


def _section(row: CatalogEntry) -> str:
    config = row.config
    own = {name: field for name, field in config.model_fields.items() if _is_own(config, name) and name != "kind"}
    knobs = _knobs(own) if own else "No knobs but the shared ones.\n"
    example = f"algorithm:\n  kind: {row.kind}\n" + (f"  {row.example}\n" if row.example else "")
    return (
        f'<a id="{row.kind}"></a>\n## {row.name}\n\n{row.paper}. {row.use_when}\n\n'
        f"    {_lines(row.formula)}\n\n```yaml\n{example}```\n\nSignals: {_signals(row)}.\n\n{knobs}"
    )


def _lines(formula: str) -> str:
    return formula.replace(";  ", "\n    ")


def _signals(row: CatalogEntry) -> str:
    """Signals that the default config needs, with one optimizer step and with several."""
    config = row.config.model_validate({"kind": row.kind} | row.example_settings)
    always = sorted(config.credit_signals | config.loss_signals(1))
    later = sorted(config.loss_signals(2) - set(always))
    return ", ".join([*always, *(f"{signal} (several steps)" for signal in later)]) or "none"


def _is_own(config: type[PolicyUpdate], name: str) -> bool:
    """True if the variant declares the field, or gives it another default than `PolicyUpdate`."""
    shared = PolicyUpdate.model_fields.get(name)
    return shared is None or shared.default != config.model_fields[name].default


def _knobs(fields: dict[str, FieldInfo]) -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    lines += [f"| `{name}` | {_default(field)} | {_text(field)} |" for name, field in fields.items()]
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{json.dumps(changed)}`" if changed else "see below"
    if value is None:
        return "null"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value not in ((), {}) else "none"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _shared() -> str:
    parts = ["## What every algorithm has\n", _knobs(dict(PolicyUpdate.model_fields))]
    for title, section in SHARED:
        summary = " ".join((section.__doc__ or "").split())
        parts.append(f"### {title}\n\n{summary}\n\n{_knobs(dict(section.model_fields))}")
    parts.append(f"### aggregation\n\n{_AGGREGATION}")
    parts.append(f"### KL estimators\n\n{' '.join((shaping.KlEstimator.__doc__ or '').split())}\n")
    return "\n".join(parts)


_AGGREGATION = """\
How token losses become one number, over the tokens and sequences of the whole optimizer step, so that neither ranks, packing
nor accumulation change it: `token_mean` every token weighs the same; `sequence_mean_token_mean` every sequence weighs the
same; `sequence_mean_token_sum` the policy gradient as it is derived; `fixed_length` sums over one length for all.
"""


def _pairs() -> str:
    return (
        "## Losses for fine-tuning\n\n"
        "`roll_core/algorithms/preferences.py` holds DPO, cDPO (label smoothing) and IPO on pairs of completions;\n"
        "`roll_core/algorithms/losses.py` holds cross-entropy, which the warm start uses.\n"
    )


if __name__ == "__main__":
    print(guide(), end="")  # noqa: T201
