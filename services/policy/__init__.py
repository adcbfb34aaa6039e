"""The policy server: vLLM, started with exactly what the recipe says."""
