"""Training of the weights of a policy on many problems by PPO, as GDP does before it places others."""
