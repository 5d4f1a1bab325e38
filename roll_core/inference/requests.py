"""What is asked of an engine and what it answers. Torch-free: the rollout scheduler needs these and no model."""

from dataclasses import dataclass

from roll_core.types.trajectory import Ending


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. Its tokens depend on its seed and the weights, not on what else is being generated.

    Example: GenerationRequest(request_id="17/2", prompt_ids=(6, 2, 4, 33), max_new_tokens=6,
    temperature=1.0, stop_token_ids=(1,), seed=8123)
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """Tokens (the stop token included), the logprob each had under the full distribution at the request's temperature
    (at temperature 1 for greedy requests), and the weights version that produced each.

    Example: Completion(request_id="17/2", token_ids=(2, 4, 6, 1), sampler_logprobs=(-0.1, -0.3, -0.2, -0.01),
    weights_versions=(3, 3, 3, 3), ending=Ending.STOP)
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_versions: tuple[int, ...]
    ending: Ending
