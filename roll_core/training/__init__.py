"""Training backends: logprobs, gradients and optimizer steps of the policy and the critic."""
