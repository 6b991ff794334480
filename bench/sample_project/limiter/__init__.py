"""A sliding-window rate limiter."""
