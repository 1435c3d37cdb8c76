"""Model loading: sources, the transformers adapter, module replacement."""
