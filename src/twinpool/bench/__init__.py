"""The load client, and what is built on it: bench, compare, check. Speaks to any OpenAI-compatible service over HTTP alone."""
