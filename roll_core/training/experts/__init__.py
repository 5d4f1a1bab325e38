"""Routers of mixture-of-experts models: load statistics, auxiliary losses and routing replay, shared by both backends."""
