"""Limits on request parameters that no deployment changes; docs and error messages name them."""

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_LABEL_CHARS = 256
"""Characters of `cache_salt` and `request_id`."""
