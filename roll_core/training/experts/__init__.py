"""Mixture-of-experts routers: load statistics, auxiliary losses and routing replay, shared by both backends."""
