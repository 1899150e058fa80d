"""The accuracy check of two running OpenAI-compatible servers: the same prompts to both, and what differs."""
