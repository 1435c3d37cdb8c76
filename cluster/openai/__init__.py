"""The OpenAI wire format: request schema, chat template, detokeniser, stop strings, errors."""
